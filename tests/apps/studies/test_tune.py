"""`fedpara tune`: on digits and on a user's own task, interrupted, and with mistakes."""

import json
import re
import sys
from dataclasses import replace

import pytest
from own_task import NAME, write_module

import fedpara as fp
from fedpara.apps import run as command
from fedpara.experiments import Experiment, presets, read_run
from fedpara.experiments.seeds import half_width

BASE = """
model = "mlp"
clients = 5
cohort = 2
steps = 1
rounds = 2
lr_decay = 0.9
engine = "sequential"
"""
METHODS = ("--method", "original:scheme=original", "--method", "fedpara:scheme=fedpara,gamma=0.1")
ALONE = ("--set", "lr=0.02,0.1", "--validation", 0.2)
GRID = (*METHODS, *ALONE, "--rounds", 1)
FINAL = ("--final-seeds", "1-2")


@pytest.fixture
def tune(cli, tmp_path):
    """A function that calls `fedpara tune` on a small config."""
    (tmp_path / "base.toml").write_text(BASE)

    def call(*options):
        return cli("tune", "--config", "base.toml", "--out", "out", *options)

    return call


def rounds_run(err):
    return err.count(": round ")


def files(folder):
    """The bytes of every metrics.jsonl, by run."""
    return {str(p.parent.relative_to(folder)): p.read_bytes() for p in folder.rglob("metrics.jsonl")}


def test_trials_choose_and_other_seeds_score_the_test_set(tune, tmp_path):
    code, out, err = tune(*GRID, *FINAL, "--json")
    assert (code, rounds_run(err)) == (0, 4 * 1 + 4 * 2)
    folders = {p.parent.relative_to(tmp_path / "out").as_posix() for p in tmp_path.rglob("*/config.toml")}
    assert folders == {
        *(f"trials/{name}-{k}-seed100" for name in ("original", "fedpara") for k in (0, 1)),
        *(f"final/{name}-seed{seed}" for name in ("original", "fedpara") for seed in (1, 2)),
    }
    for method in json.loads(out)["methods"]:
        scores = [trial["score"] for trial in method["trials"]]
        best = method["trials"][scores.index(max(scores))]
        assert method["chosen"] == best["name"]
        assert all(trial["standard_error"] > 0 for trial in method["trials"])
        (tried,) = (read_run(tmp_path / path) for path in best["runs"])
        assert (tried.experiment.validation, tried.experiment.seed, tried.rounds) == (0.2, 100, 1)
        finals = [read_run(tmp_path / path) for path in method["final"]["runs"]]
        for run, seed in zip(finals, (1, 2), strict=True):
            same = replace(run.experiment, validation=0.2, seed=100, rounds=1)
            assert (same, run.experiment.seed, run.rounds) == (tried.experiment, seed, 2)
            assert run.experiment.validation == 0
        assert method["final"]["ci95"] == pytest.approx(half_width([run.final for run in finals]))
        assert method["final"]["bytes_up"] == sum(run.bytes_up for run in finals) / 2


def test_the_table_says_what_was_chosen_and_by_how_much(tune):
    code, out, _ = tune(*GRID, *FINAL)
    assert code == 0
    rows = [re.findall(r"[^│]+", line) for line in out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row][:2] for row in rows] == [["original", "2"], ["fedpara", "2"]]
    for row in rows:
        assert re.fullmatch(r"lr=0\.(02|1)", row[2].strip())
        assert re.fullmatch(r"[\d.]+% ± [\d.]+%", row[3].strip())
        assert re.fullmatch(r"[\d.]+% ± [\d.]+%", row[4].strip())
    assert "held-out examples ± its standard error" in out
    assert "mean over 2 other seeds ± its 95% confidence interval (Student's t)" in out
    code, again, err = tune(*GRID, *FINAL)
    assert (code, again, rounds_run(err)) == (0, out, 0), "finished runs are not repeated"


@pytest.mark.parametrize("at", [2, 3], ids=["in a trial", "in a final run"])
def test_a_killed_command_continues_with_the_same_bits(tune, tmp_path, monkeypatch, at):
    untouched, begun = command.resume_run, []

    def interrupted(path, *, on_round, **how):
        begun.append(path)

        def stop(result, timing):
            on_round(result, timing)
            if len(begun) == at:
                raise KeyboardInterrupt

        return untouched(path, on_round=stop, **how)

    grid = [*ALONE, "--rounds", 2, "--final-seeds", 1]
    with monkeypatch.context() as patched:
        patched.setattr(command, "resume_run", interrupted)
        code, out, err = tune(*grid)
    assert (code, out) == (130, "")
    assert "finished rounds are saved, the same command continues" in err
    code, out, err = tune(*grid)
    assert (code, rounds_run(err)) == (0, 2 * 3 - (2 * at - 1))
    assert tune(*grid, "--out", "other")[1] == out
    assert files(tmp_path / "out") == files(tmp_path / "other")


def test_the_users_own_task_with_a_lower_metric(cli, tmp_path, monkeypatch):
    write_module(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.toml").write_text(
        f'dataset = "{NAME}:examples"\nmodel = "{NAME}:net"\nsplit = "iid"\nclients = 4\ncohort = 2\nrounds = 2\n'
        'engine = "sequential"\n'
        f'loss = "{NAME}:huber"\nmetrics = "mae"\n'
    )
    methods = [
        "--method",
        "wide:scheme=original,model=tabular:net(width=16)",
        "--method",
        "small:scheme=original",
    ]
    grid = ["--set", "lr=0.3,0.001", "--one-at-a-time", *FINAL, "--out", "out"]
    code, out, err = cli("tune", "--config", "mine.toml", *methods, *grid, "--json")
    sys.modules.pop(NAME, None)
    assert code == 0, err
    for method in json.loads(out)["methods"]:
        assert method["metric"] == {"name": "mae", "higher_is_better": False}
        assert [trial["values"] for trial in method["trials"]] == [{}, {"lr": 0.3}, {"lr": 0.001}]
        scores = {trial["name"]: trial["score"] for trial in method["trials"]}
        assert scores[method["chosen"]] == min(scores.values())
    models = [
        read_run(tmp_path / method["final"]["runs"][0]).experiment.model
        for method in json.loads(out)["methods"]
    ]
    assert models == [f"{NAME}:net(width=16)", f"{NAME}:net"]


def test_a_diverged_trial_counts_as_the_worst_and_stays_so(tune, tmp_path):
    grid = ("--set", "lr=1e30,0.1", "--rounds", 3)
    code, out, err = tune(*grid)
    assert code == 0, err
    assert "diverged, and counted as the worst: lr=1e+30." in out
    assert "│ lr=0.1" in out
    assert tune(*grid)[:2] == (0, out), "the choice is made"
    (tmp_path / "out" / "chosen.json").write_text("{")
    assert "chosen.json is damaged" in tune(*grid)[2]


def test_another_failure_stops_before_a_choice(tune, tmp_path, monkeypatch):
    def full(path, **how):
        raise fp.errors.RunError(f"{path} ran out of memory.")

    with monkeypatch.context() as patched:
        patched.setattr(command, "resume_run", full)
        code, out, err = tune(*GRID)
    assert (code, out, "4 of 4 runs failed" in err) == (1, "", True)
    assert not (tmp_path / "out" / "chosen.json").exists()
    assert tune(*GRID)[0] == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "original:clip=1,2"], "original 4, fedpara 2): a fair comparison needs the same number."),
        (["--final-seeds", "99-101"], "seed 100 is a seed of the trials and of the final runs"),
        (["--set", "low:lr=1,2"], "--set low:lr: unknown method 'low'"),
        (["--method", "original:lr=1"], "--method original is given twice"),
        (["--method", "a/b:lr=1"], "--method 'a/b:lr=1': expected a name and its fields"),
        (["--method", "a:seed=1"], "seed is the same for every method"),
        (["--validation", "0"], "tuning needs held-out examples"),
        (["--set", "cohort=2,50"], "a cohort of 50 from 5 clients"),
        (["--method", "a:personal=true"], "a scores each client's own model (personal), and"),
    ],
)
def test_mistakes_leave_no_folder(tune, tmp_path, words, says):
    code, out, err = tune(*GRID, *words)
    assert (code, out) == (2, "")
    assert says in err
    assert not (tmp_path / "out").exists()


UNSCORED = """
from fedpara import data
from fedpara.data import FederatedData

def federation():
    train, _ = data.load("digits")
    return FederatedData(train, [list(range(i, 200, 5)) for i in range(5)])
"""


@pytest.mark.parametrize(
    ("personal", "says"),
    [
        ("false", "score the test set, and unscored:federation has none"),
        ("true", "on its own test data (personal), and no client has any"),
    ],
)
def test_final_runs_without_a_score_are_refused_before_the_trials(
    tune, tmp_path, monkeypatch, personal, says
):
    (tmp_path / "unscored.py").write_text(UNSCORED)
    monkeypatch.syspath_prepend(tmp_path)
    base = BASE.replace("clients = 5\n", f'dataset = "unscored:federation"\npersonal = {personal}\n')
    (tmp_path / "base.toml").write_text(base)
    code, out, err = tune(*GRID, *FINAL)
    assert (code, rounds_run(err), out) == (2, 0, "")
    assert says in err
    assert not (tmp_path / "out").exists()
    assert tune(*GRID)[0] == 0
    sys.modules.pop("unscored", None)


def test_another_grid_in_the_same_folder_is_refused(tune, tmp_path):
    assert tune(*GRID)[0] == 0
    before = files(tmp_path / "out")
    for other, what in (
        (("--rounds", 2), "its rounds differ"),
        (("--seed", 7), "its seeds and methods differ"),
        (("--set", "momentum=0,0.9"), "its methods differ"),
    ):
        code, _, err = tune(*GRID, *other)
        assert (code, f"out holds another grid ({what}): choose another folder" in err) == (2, True), err
    assert files(tmp_path / "out") == before
    code, _, err = tune(*GRID, *FINAL)
    assert (code, rounds_run(err)) == (0, 8), "final runs may be added later"


def test_the_runs_of_a_preset_are_methods(cli, monkeypatch):
    small = Experiment(model="mlp", clients=5, cohort=2, rounds=1, steps=1)
    runs = {"factors": small, "dense": replace(small, scheme="original")}
    monkeypatch.setitem(presets.PRESETS, "pair", presets.Preset("two runs", runs))
    code, out, err = cli("tune", "pair", "--set", "lr=0.1,0.2", "--json")
    assert code == 0, err
    assert [method["method"] for method in json.loads(out)["methods"]] == ["factors", "dense"]


def test_the_function_gives_the_same_choice(tune, tmp_path):
    (found,) = json.loads(tune(*ALONE, "--rounds", 1, "--final-seeds", 1, "--json")[1])["methods"]
    base = Experiment(model="mlp", clients=5, cohort=2, steps=1, rounds=2, lr_decay=0.9, engine="sequential")
    protocol = {"validation": 0.2, "rounds": 1, "final_seeds": [1]}
    (one,) = fp.experiments.tune({"fedpara": base}, tmp_path / "again", {"lr": [0.02, 0.1]}, **protocol)
    assert one.choice.chosen.trial.name == found["chosen"]
    assert one.final.score.value == found["final"]["score"]
    assert files(tmp_path / "again") == files(tmp_path / "out")
