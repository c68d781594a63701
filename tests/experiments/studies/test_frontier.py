"""The frontier: the words of combinations, the choice by validation, the front, and what a combination costs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedpara.errors import ConfigError
from fedpara.experiments import run
from fedpara.experiments.config_file import to_toml
from fedpara.experiments.presets import preset
from fedpara.experiments.storage.catalog import Library
from fedpara.experiments.studies.frontier.cost import costs
from fedpara.experiments.studies.frontier.scales import SCALES
from fedpara.experiments.studies.frontier.study import (
    SEEDS,
    TRIAL_SEED,
    Point,
    belongs,
    best_trial,
    finals,
    folder_name,
    front,
    frontier_jobs,
    leanest,
    points,
    trials,
)

ROOT = Path(__file__).parents[3]
TINY = SCALES["tiny"]


def write(folder, experiment, accuracies, each=1000):
    """A finished run that sent `each` bytes per round in each direction."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(experiment))
    nothing = dict.fromkeys(("loss", "before", "after", "train_loss"))
    same = {**nothing, "up": each, "down": each, "clients": 2, "refused": [], "notes": []}
    lines = [
        {"round": t, "accuracy": accuracy, **same, "total_up": t * each, "total_down": t * each}
        for t, accuracy in enumerate(accuracies, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "timing.jsonl").write_text("")


@pytest.mark.parametrize("name", SCALES)
def test_every_combination_is_a_different_experiment(name):
    scale = SCALES[name]
    made = [trial for one in scale.combinations for trial in trials(scale, one)]
    assert len({e.identity for e in made}) == len(made) == len(scale.combinations) * max(1, len(scale.rates))
    assert bool(scale.rates) != bool(scale.tuned)
    folders = {folder_name(one, e) for one in scale.combinations for e in trials(scale, one)}
    assert len(folders) == len(made)
    assert not any(set(folder) & set("/ ()") for folder in folders)
    assert len(scale.combinations) >= 25 or "noniid" in name or name == "tiny"


def test_the_words_of_a_combination():
    e = SCALES["cifar10"].experiment("fedpara0.05all topk3+/eden+ rotate")
    assert (e.scheme, e.gamma, e.where, e.init) == ("fedpara", 0.05, "every", "he:1.4")
    assert e.link_up == "topk(0.03, feedback=True)"
    assert e.link_down == "eden(unbiased=False, feedback=True)"
    assert e.rotate
    assert e.weight_decay == 0.0
    for text, what in (("dense7 f32/f32", "network 'dense7'"), ("fedpara0 f32/zip", "link 'zip'")):
        with pytest.raises(ConfigError, match=f"unknown {what}"):
            SCALES["cifar10"].experiment(text)
    with pytest.raises(ConfigError, match="unknown option 'spin'"):
        TINY.experiment("fedpara0 f32/f32 spin")


@pytest.mark.parametrize(
    ("combination", "trial"),
    [
        ("original f32/f32", "original-6"),
        ("dense20 f32/f32", "narrow-3"),
        ("lowrank f32/f32", "lowrank-0"),
        ("fedpara0.1 f32/f32", "fedpara-0"),
    ],
)
def test_networks_on_cifar10_are_the_best_trials_of_the_tuning(combination, trial):
    library = Library.of(ROOT / "results" / "tuning" / "cifar10-iid")
    found = best_trial(SCALES["cifar10"], combination, library)
    assert found is not None
    assert found.path.name == f"cifar10-iid-{trial}"


def test_the_rate_is_chosen_by_validation_and_its_finals_have_other_seeds(tmp_path):
    name = TINY.combinations[1]
    assert finals(TINY, name, Library.of(tmp_path)) == []
    with pytest.raises(ConfigError, match="no finished trial, such as 'fedpara0 f32/f32'"):
        frontier_jobs(TINY, "test", Library.of(tmp_path), only=["fedpara0 f32"])
    slow, fast = trials(TINY, name)
    write(tmp_path / "slow", slow, [0.1, 0.6])
    write(tmp_path / "fast", fast, [0.5, 0.4])
    library = Library.of(tmp_path)
    made = finals(TINY, name, library)
    assert [e.seed for e in made] == list(range(1, SEEDS + 1))
    assert TRIAL_SEED not in range(1, SEEDS + 1)
    assert {(e.lr, e.validation, e.rounds) for e in made} == {(slow.lr, 0.0, TINY.base.rounds)}
    (point,) = points(TINY, "validation", library)
    assert [run.path.name for run in point.runs] == ["slow"]
    with pytest.raises(ConfigError, match="no combination has this in its name"):
        frontier_jobs(TINY, "validation", library, only=["nothing"])
    with pytest.raises(ConfigError, match="trials only: its final runs are those of --scale cifar100-noniid"):
        frontier_jobs(SCALES["cifar100-noniid-links"], "test", library)


def test_repeated_trials_have_the_chosen_rate_and_change_no_choice(tmp_path):
    name = TINY.combinations[1]
    with pytest.raises(ConfigError, match="no finished trial, such as 'fedpara0 f32/f32'"):
        frontier_jobs(TINY, "validation", Library.of(tmp_path), seeds=3, only=["fedpara0 f32"])
    slow, fast = trials(TINY, name)
    write(tmp_path / "slow", slow, [0.1, 0.6])
    write(tmp_path / "fast", fast, [0.5, 0.5])
    listed = frontier_jobs(TINY, "validation", Library.of(tmp_path), seeds=3, only=["fedpara0 f32"])
    first, second = (job.experiment for job in listed[2:])
    assert [first, second] == [replace(slow, seed=TRIAL_SEED + 1), replace(slow, seed=TRIAL_SEED + 2)]
    assert {job.experiment.seed for job in listed[:2]} == {TRIAL_SEED}
    write(tmp_path / "first", first, [0.1, 0.2])
    library = Library.of(tmp_path)
    (point,) = points(TINY, "validation", library)
    assert [run.path.name for run in point.runs] == ["slow", "first"]
    assert finals(TINY, name, library)[0].lr == slow.lr


def test_the_first_rate_of_all_combinations_comes_first(tmp_path):
    listed = frontier_jobs(TINY, "validation", Library.of(tmp_path))
    assert [job.experiment.lr for job in listed] == [0.05] * 4 + [0.1] * 4


@pytest.mark.parametrize(("only", "count"), [("fedpara0", 3), ("fedpara0 f32/f32", 1), ("*rotate", 1)])
def test_only_takes_a_whole_name_or_a_part(tmp_path, only, count):
    listed = frontier_jobs(TINY, "validation", Library.of(tmp_path), only=[only])
    assert len(listed) == count * len(TINY.rates)


def made_point(tmp_path, name, accuracies, each):
    experiment = replace(TINY.experiment("original f32/f32"), rounds=len(accuracies[0]))
    for seed, scores in enumerate(accuracies, 1):
        write(tmp_path / f"{name}-{seed}", replace(experiment, seed=seed, lr=each / 1e6), scores, each)
    library = Library.of(tmp_path)
    return Point(name, tuple(run for run in library if run.path.name.startswith(f"{name}-")))


def test_the_front_and_the_leanest_by_hand(tmp_path):
    a = made_point(tmp_path, "a", [[0.5, 0.9], [0.9, 0.9]], 1000)
    b = made_point(tmp_path, "b", [[0.5, 0.895], [0.5, 0.895]], 100)
    c = made_point(tmp_path, "c", [[0.5, 0.6]], 200)
    d = made_point(tmp_path, "d", [[0.5, 0.55]], 10)
    e = made_point(tmp_path, "e", [[0.5, 0.895], [0.5, 0.5]], 50)
    assert [point.combination for point in front([a, b, c, d])] == ["d", "b", "a"]
    assert leanest([a, b, c, d]) is b
    assert leanest([a, b, c, d, e]) is e  # by the first seed
    assert (a.sent, b.sent, d.sent) == (4000, 400, 40)
    assert a.accuracy == pytest.approx(0.9)
    assert a.sent_to(0.8) == [4000, 2000]
    assert c.sent_to(0.8) is None


def test_costs_are_those_of_a_run(tmp_path):
    """The length of a header's numbers may differ by some bytes."""
    expected = costs(TINY)
    for name in TINY.combinations:
        done = run(replace(TINY.experiment(name), seed=1), tmp_path / folder_name(name, TINY.base))
        assert done.bytes_up + done.bytes_down == pytest.approx(expected[name]["bytes"], rel=0.002)
        assert done.bytes_up == pytest.approx(expected[name]["up"] * 2 * 3, rel=0.01)


def test_runs_belong_to_the_study_by_their_place():
    assert belongs(Path("results/frontier/digits/test/one-seed1"))
    assert not belongs(Path("results/paper/frontier"))
    assert not belongs(Path("frontier/digits/final/one-seed1"))
    assert not belongs(Path("one"))


@pytest.mark.parametrize(("name", "scale"), [("lean", "digits"), ("lean-cifar10", "cifar10")])
def test_lean_is_the_leanest_of_the_saved_trials(name, scale):
    folders = [ROOT / "results" / "frontier" / scale / "validation", ROOT / "results" / "tuning"]
    found = points(SCALES[scale], "validation", Library.of(*folders))
    lean = leanest(found)
    assert lean is not None
    assert found[0].combination == "original f32/f32"
    (made,) = preset(name).runs.values()
    chosen = replace(SCALES[scale].experiment(lean.combination), lr=lean.runs[0].experiment.lr)
    assert made.identity == chosen.identity
