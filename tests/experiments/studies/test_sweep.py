"""Sweeps: the grid, the names of its points, what is resumed, and the rows."""

from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from fedpara.errors import ConfigError, UsageError
from fedpara.experiments import Experiment, Summary, read_run, run
from fedpara.experiments.storage.summary import Primary
from fedpara.experiments.studies.sweep import points, read_grid, read_seeds, rows, take_up

TINY = Experiment(
    model="mlp", scheme="original", clients=5, cohort=2, rounds=1, epochs=None, steps=1, engine="sequential"
)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("lr=0.02,0.1", [0.02, 0.1]),
        ("scheme = fedpara, lowrank", ["fedpara", "lowrank"]),
        ("personal=true,false", [True, False]),
        ("init=he:1.4", ["he:1.4"]),
        ('dataset="digits"', ["digits"]),
    ],
)
def test_values_are_toml_or_text(text, values):
    assert read_grid([text]) == {text.partition("=")[0].strip(): values}


@pytest.mark.parametrize("given", [["lr"], ["lr="], ["=1"], ["lr=1,,2"], ["lr=1", "lr=2"]])
def test_a_grid_without_values_or_with_a_field_twice(given):
    with pytest.raises(UsageError, match=r"such as lr=0\.02,0\.1"):
        read_grid(given)


@pytest.mark.parametrize(
    ("text", "seeds"), [("0-4", [0, 1, 2, 3, 4]), ("0,2,5", [0, 2, 5]), ("7", [7]), ("0-1, 4", [0, 1, 4])]
)
def test_seeds(text, seeds):
    assert read_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "4-0", "a", "1,", "-1", "0.5"])
def test_seeds_that_are_none(text):
    with pytest.raises(UsageError, match="such as 0,2,5 or 0-4"):
        read_seeds(text)


def test_the_grid_is_the_product_of_values_and_seeds():
    listed = points(Experiment(), {"scheme": ["fedpara", "lowrank"], "lr": [1, 0.1]}, [0, 1])
    assert [point.name for point in listed] == [
        f"lr={lr},scheme={scheme}/seed={seed}"
        for seed in (0, 1)
        for lr in (1, 0.1)
        for scheme in ("fedpara", "lowrank")
    ]
    last = listed[-1].experiment
    assert (last.lr, last.scheme, last.seed) == (0.1, "lowrank", 1)
    assert [point.name for point in points(Experiment(), {}, [3])] == ["seed=3"]


def test_names_depend_on_the_values_alone():
    one = points(Experiment(), read_grid(["lr=1", "scheme=fedpara"]), [0])
    other = points(Experiment(), read_grid(["scheme=fedpara", "lr=1.0"]), [0])
    assert one == other
    assert len(points(Experiment(), {"lr": [1, 1.0]}, [0, 0])) == 1, "the same point twice"


@pytest.mark.parametrize(
    ("field", "value", "setting"),
    [
        ("dataset", "hub:a/b@c", "dataset=hub%3Aa%2Fb%40c"),
        ("init", "he:1.4", "init=he%3A1.4"),
        ("personal", True, "personal=true"),
        ("lr", 1e30, "lr=1e+30"),
        ("lr", 0.1234567890123, "lr=0.1234567890123"),
    ],
)
def test_names_are_safe_and_distinct(field, value, setting):
    (point,) = points(Experiment(), {field: [value]}, [0])
    assert point.setting == setting


def test_an_option_of_the_algorithm_is_varied():
    base = Experiment(algorithm="fedprox", options={"mu": 1})
    listed = points(base, read_grid(["options.mu=0.01,0.1"]), [0])
    assert [point.experiment.options for point in listed] == [{"mu": 0.01}, {"mu": 0.1}]
    assert [point.setting for point in listed] == ["options.mu=0.01", "options.mu=0.1"]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [("lrr", 1, "did you mean 'lr'"), ("lr", "fast", "lr is 'fast'"), ("scheme", "lowrnk", "'lowrank'")],
)
def test_mistakes_in_the_grid(field, value, says):
    with pytest.raises(ConfigError, match=says):
        points(Experiment(), {field: [value]}, [0])


def test_nothing_is_made_if_one_point_is_wrong(tmp_path):
    runs = {tmp_path / "good": TINY, tmp_path / "bad": replace(TINY, cohort=50)}
    with pytest.raises(UsageError, match="a cohort of 50"):
        take_up(runs)
    assert not list(tmp_path.iterdir())


def test_finished_runs_are_returned_and_the_others_laid_out(tmp_path):
    done = run(TINY, tmp_path / "done")
    found = take_up({tmp_path / "done": TINY, tmp_path / "new": replace(TINY, seed=1)})
    assert found == {tmp_path / "done": done}
    assert read_run(tmp_path / "new").rounds == 0


def test_a_run_that_met_its_target_is_finished(tmp_path):
    done = run(replace(TINY, target=0.001), tmp_path / "a")
    assert take_up({tmp_path / "a": replace(TINY, rounds=9, target=0.001)}) == {tmp_path / "a": done}


def test_a_folder_takes_over_more_rounds_but_not_fewer(tmp_path):
    path = tmp_path / "a"
    run(replace(TINY, rounds=2), path)
    with pytest.raises(ConfigError, match="rounds is 1: expected at least the 2 that are done"):
        take_up({path: TINY, tmp_path / "b": replace(TINY, seed=1)})
    assert not (tmp_path / "b").exists()
    assert take_up({path: replace(TINY, rounds=3)}) == {}
    assert read_run(path).experiment.rounds == 3


def scored(experiment, accuracy):
    metrics = [{"round": 1, "accuracy": accuracy, "total_up": 10, "total_down": 20}]
    return Summary(Path("a"), experiment, metrics, [])


def test_rows_average_the_seeds_and_the_best_comes_first():
    listed = points(TINY, {"lr": [0.01, 0.1, 1.0], "validation": [0.1]}, [0, 1])
    accuracies = dict(zip((p.name for p in listed), (0.2, 0.5, None, 0.4, 0.6, None), strict=True))
    runs = {p.name: scored(p.experiment, accuracies[p.name]) for p in listed if accuracies[p.name]}
    best, second, failed = rows(listed, runs)
    assert [row.values["lr"] for row in (best, second, failed)] == [0.1, 0.01, 1.0]
    assert best.group.scores == [0.5, 0.6]
    assert best.group.score.value == mean([0.5, 0.6])
    assert (best.scored, best.seeds) == ("validation", 2)
    assert (failed.group.score, failed.group.runs, failed.seeds) == (None, (), 2)


def test_the_lowest_loss_comes_first():
    listed = points(TINY, {"lr": [0.01, 0.1, 1.0]}, [0])
    losses = dict(zip((p.name for p in listed), (0.5, 0.2, 0.9), strict=True))
    runs = {
        p.name: replace(scored(p.experiment, losses[p.name]), metric=Primary("mse", False)) for p in listed
    }
    assert [row.values["lr"] for row in rows(listed, runs)] == [0.1, 0.01, 1.0]
