"""`fedpara sweep`: the table, resuming, failing runs, mistakes."""

import json
import re

import pytest

from fedpara.apps import run as command
from fedpara.experiments import Experiment, presets, read_run, run
from fedpara.report.tables import half_width

BASE = """
model = "mlp"
scheme = "original"
clients = 5
cohort = 2
steps = 1
rounds = 2
engine = "sequential"
"""
LRS = ("--set", "lr=0.02,0.1", "--seeds", "0-1")


@pytest.fixture
def sweep(cli, tmp_path):
    """A function that calls `fedpara sweep` on a small config."""
    (tmp_path / "base.toml").write_text(BASE)

    def call(*options):
        return cli("sweep", "--config", "base.toml", "--out", "out", *options)

    return call


def rounds_run(err):
    return err.count(": round ")


def cells(out):
    return [re.findall(r"[^│]+", line.replace(" ", "")) for line in out.splitlines() if line.startswith("│")]


def test_a_sweep_ends_in_a_table_and_is_not_repeated(sweep, tmp_path):
    code, out, err = sweep(*LRS)
    assert (code, rounds_run(err)) == (0, 8)
    folders = sorted(path.parent for path in (tmp_path / "out").rglob("config.toml"))
    assert [str(path.relative_to(tmp_path / "out")) for path in folders] == [
        f"lr={lr}/seed={seed}" for lr in ("0.02", "0.1") for seed in (0, 1)
    ]
    table = cells(out)
    assert {row[0] for row in table} == {"0.02", "0.1"}
    assert all(re.fullmatch(r"[\d.]+%±[\d.]+%\(test\)", row[1]) for row in table)
    assert [row[2::2] for row in table] == [["2", "2"]] * 2
    means = [float(row[1].partition("%")[0]) for row in table]
    assert means == sorted(means, reverse=True)
    code, again, err = sweep(*LRS)
    assert (code, again, rounds_run(err)) == (0, out, 0)


def test_json_has_the_same_numbers(sweep, tmp_path):
    code, out, _ = sweep(*LRS, "--json")
    found = json.loads(out)
    assert (code, found["sweep"], found["failed"]) == (0, "out", {})
    for row in found["settings"]:
        runs = [read_run(tmp_path / path) for path in row["runs"]]
        accuracies = [run.final for run in runs]
        assert [run.experiment.lr for run in runs] == [row["values"]["lr"]] * 2
        assert row["accuracy"] == pytest.approx(sum(accuracies) / 2)
        assert row["ci95"] == pytest.approx(half_width(accuracies))
        assert (row["seeds"], row["rounds"], row["scored"]) == ([0, 1], 2, "test")
        assert row["bytes_up"] == sum(run.bytes_up for run in runs) / 2


def test_one_seed_has_no_interval_and_the_validation_score_is_named(sweep):
    code, out, _ = sweep("--set", "lr=0.1,0.2", "--set", "validation=0.2")
    assert code == 0
    assert out.count("% (validation)") == 2
    assert "±" not in out
    assert json.loads(sweep("--set", "lr=0.1", "--json")[1])["settings"][0]["ci95"] is None


def test_an_interrupted_sweep_is_resumed(sweep, tmp_path, monkeypatch):
    untouched, begun = command.resume_run, []

    def interrupted(path, *, on_round, **how):
        begun.append(path)

        def stop(result, timing):
            on_round(result, timing)
            if len(begun) == 2:
                raise KeyboardInterrupt

        return untouched(path, on_round=stop, **how)

    with monkeypatch.context() as patched:
        patched.setattr(command, "resume_run", interrupted)
        code, out, err = sweep(*LRS)
    assert (code, out) == (130, "")
    assert "finished rounds are saved, the same command continues" in err
    done = [read_run(path.parent).rounds for path in (tmp_path / "out").rglob("config.toml")]
    assert sorted(done) == [0, 0, 1, 2]
    code, out, err = sweep(*LRS)
    assert (code, rounds_run(err)) == (0, 5)
    whole = sweep(*LRS, "--out", "other")[1]
    assert out == whole, "as without the interruption"


def test_a_failing_run_does_not_stop_the_others(sweep):
    code, out, err = sweep("--set", "lr=1e30,0.1", "--json")
    assert code == 1
    found = json.loads(out)
    assert [row["accuracy"] is None for row in found["settings"]] == [False, True]
    assert [*found["failed"]] == ["lr=1e+30/seed=0"]
    assert "fedpara: 1 of 2 runs failed, the others are done. lr=1e+30/seed=0: round 2" in err
    code, out, err = sweep("--set", "lr=1e30,0.1")
    assert (code, "1 of 2 runs failed" in err) == (1, True), "tried again, and the table is printed"
    assert [row[2] for row in cells(out)] == ["1", "0of1"]


def test_a_preset_with_one_run(cli, monkeypatch):
    small = Experiment(model="mlp", clients=5, cohort=2, rounds=1, steps=1)
    monkeypatch.setitem(presets.PRESETS, "small", presets.Preset("one run", {"only": small}))
    code, out, _ = cli("sweep", "small", "--set", "gamma=0.1,0.3", "--seeds", "0,2", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["sweep"] == "runs/sweep"
    assert [row["seeds"] for row in found["settings"]] == [[0, 2]] * 2
    code, _, err = cli("sweep", "quickstart", "--seeds", "0,1")
    assert (code, "quickstart has 4 runs" in err) == (2, True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "lrr=0.1"], "unknown key 'lrr': did you mean 'lr'?"),
        (["--set", "lr=0.1,-1"], "lr is -1.0: expected a number above 0."),
        (["--set", "cohort=2,50"], "a cohort of 50 from 5 clients"),
        (["--set", "lr="], "--set 'lr=': expected a field and its values"),
        (["--seeds", "4-0"], "--seeds '4-0': expected numbers or an ascending range"),
        (["--set", "seed=1", "--seeds", "0"], "the seeds are given twice"),
        ([], "nothing to vary"),
    ],
)
def test_mistakes_leave_no_folder(sweep, tmp_path, words, says):
    code, out, err = sweep(*words)
    assert (code, out) == (2, "")
    assert says in err
    assert not (tmp_path / "out").exists()


def test_folders_of_other_experiments_are_refused(sweep, cli, tmp_path):
    assert sweep("--set", "lr=0.1")[0] == 0
    (tmp_path / "base.toml").write_text(BASE.replace("clients = 5", "clients = 6"))
    code, _, err = sweep("--set", "lr=0.1,0.2")
    assert (code, "out/lr=0.1/seed=0 holds a run of another experiment (clients" in err) == (2, True)
    assert not (tmp_path / "out" / "lr=0.2").exists()
    run(Experiment(model="mlp", clients=5, cohort=2, rounds=1, steps=1), tmp_path / "single")
    code, _, err = sweep("--seeds", "0,1", "--out", "single")
    assert (code, "single holds a run" in err) == (2, True)


def test_seeds_can_be_varied_as_a_field(sweep):
    code, out, _ = sweep("--set", "seed=0,3", "--json")
    assert code == 0
    assert [row["seeds"] for row in json.loads(out)["settings"]] == [[0, 3]]
