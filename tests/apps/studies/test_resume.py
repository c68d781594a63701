"""`fedpara resume` on the folder of a sweep or a tuning that was interrupted."""

import shlex

import pytest

from fedpara.experiments import read_run

BASE = """
model = "mlp"
clients = 5
cohort = 2
steps = 1
rounds = 2
engine = "sequential"
"""
SWEEP = ("sweep", "--config", "base.toml", "--out", "out", "--set", "lr=0.02,0.1")
TUNE = ("tune", "--config", "base.toml", "--out", "out", "--set", "lr=0.02,0.1", "--validation", 0.2)
FINAL = ("--final-seeds", "1-2")


@pytest.fixture
def study(cli, tmp_path, monkeypatch):
    """A function that calls fedpara in a folder with a config. It stops before run number `stop`, as if killed."""
    (tmp_path / "base.toml").write_text(BASE)

    def call(*words, stop=None):
        if stop is None:
            return cli(*words)
        with monkeypatch.context() as patch:
            from fedpara.apps import run as command

            left, resume = [stop], command.resume_run

            def played(*given, **options):
                if left[0] == 0:
                    raise KeyboardInterrupt
                left[0] -= 1
                return resume(*given, **options)

            patch.setattr(command, "resume_run", played)
            return cli(*words)

    return call


def rounds(folder):
    return {
        path.parent.relative_to(folder).as_posix(): read_run(path.parent).rounds
        for path in folder.rglob("config.toml")
    }


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("metrics.jsonl")}


def test_the_runs_of_a_sweep_are_resumed_and_its_command_is_named(study, tmp_path):
    out = tmp_path / "out"
    assert study(*SWEEP, stop=1)[0] == 130
    assert sorted(rounds(out).values()) == [0, 2]
    code, said, err = study("resume", "out")
    assert code == 0
    assert {name for name in rounds(out) if name in said} == {"lr=0.02/seed=0", "lr=0.1/seed=0"}
    assert set(rounds(out).values()) == {2}
    assert f"its command then starts missing runs and compares them: fedpara {shlex.join(SWEEP)}" in err
    assert not list(tmp_path.rglob("*.png"))
    before = files(out)
    code, _, err = study(*SWEEP)
    assert (code, err.count(": round ")) == (0, 0)
    assert files(out) == before


def test_the_trials_of_a_tuning_are_resumed_and_then_its_final_runs(study, tmp_path):
    out = tmp_path / "out"
    assert study(*TUNE, *FINAL, stop=1)[0] == 130
    assert study("resume", "out")[0] == 0
    assert rounds(out) == {f"trials/fedpara-{k}-seed100": 2 for k in (0, 1)}
    assert study(*TUNE, *FINAL, stop=1)[0] == 130
    assert sorted(rounds(out / "final").values()) == [0, 2]
    trials = files(out / "trials")
    code, said, err = study("resume", "out", "--rounds", 3)
    assert (code, "trials/" in said, "fedpara tune --config" in err) == (0, False, True)
    assert rounds(out / "final") == {"fedpara-seed1": 3, "fedpara-seed2": 3}
    assert files(out / "trials") == trials, "a choice is final"


def test_a_tuning_without_final_runs_says_what_is_left(study):
    assert study(*TUNE)[0] == 0
    code, _, err = study("resume", "out")
    assert (code, "its trials are done. `fedpara tune` with --final-seeds starts final runs." in err) == (
        2,
        True,
    )


def test_a_file_is_no_run_folder(study):
    code, _, err = study("resume", "base.toml")
    assert (code, err.strip()) == (2, "fedpara: base.toml is a file: expected a run folder.")
