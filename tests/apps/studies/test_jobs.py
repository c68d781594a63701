"""`--jobs` and `--minutes`: the same results as one after another, who plays which run, failures, interruption."""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from living import alive

from fedpara.apps.studies import run_processes
from fedpara.apps.studies.jobs import _choose, _program, player
from fedpara.apps.studies.reproduce import kept
from fedpara.errors import RunError
from fedpara.experiments import Experiment, run
from fedpara.experiments.run import lay_out_all

SMALL = Experiment(
    model="mlp", scheme="original", clients=5, cohort=2, steps=1, rounds=2, engine="sequential"
)
CONFIG = 'model = "mlp"\nscheme = "original"\nclients = 5\ncohort = 2\nsteps = 1\nrounds = 2\nengine = "sequential"\n'
LINE = {
    **dict.fromkeys(("round", "clients", "up", "down", "total_up", "total_down"), 1),
    **dict.fromkeys(("accuracy", "loss", "before", "after", "train_loss")),
    "refused": [],
    "notes": [],
}
FAKE = f"""#!/bin/sh
# Stands in for Python: the watchdog is the real one, and a run is a few lines of shell.
[ "$1" = -I ] && exec {sys.executable} "$@"
cd "$(dirname "$0")"
[ -e unfit ] && {{ echo "no such device" >&2; exit 7; }}
trap 'echo "stop $(basename "$run")" >> journal; exit 130' INT
while read -r line; do
    run=$(echo "$line" | tr -d '"')
    echo "start $(basename "$run") $OMP_NUM_THREADS $$" >> journal
    sh "$run/does" $$ > "$run/output.txt" 2>&1 & wait $! && echo 0 && continue
    echo "fedpara: it broke" >> "$run/output.txt"
    echo 1
done
"""


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Plays runs by name with shell scripts in place of training. Returns (finished, failed) of the last call.

    `again` are runs of a second call with the same processes.
    """
    fake = tmp_path / "fake"
    fake.write_text(FAKE)
    fake.chmod(0o755)

    def call(scripts, jobs=2, minutes=None, again=None):
        paths = {name: tmp_path / name for name in {**scripts, **(again or {})}}
        scripts, first = {**scripts, **(again or {})}, list(scripts)
        lay_out_all({paths[name]: e for name, (e, _) in scripts.items()})
        line = tmp_path / "line.jsonl"
        line.write_text(json.dumps(LINE) + "\n")
        for name, (_, script) in scripts.items():
            (paths[name] / "does").write_text(
                script.replace("ROUND", f"cat {line} >> {paths[name]}/metrics.jsonl")
            )
        with monkeypatch.context() as patched:
            patched.setattr(sys, "executable", str(fake))
            with player(jobs, minutes, None, engines={"sequential"}) as started:
                done = started({name: paths[name] for name in first})
                return started({name: paths[name] for name in again}) if again else done

    return call


def journal(folder):
    return [line.split() for line in (folder / "journal").read_text().splitlines()]


def test_the_metrics_are_those_of_one_process_and_a_failed_run_is_named(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    (tmp_path / "base.toml").write_text(CONFIG)
    grid = ["sweep", "--config", "base.toml", "--set", "lr=1e30,0.1", "--json"]
    code, alone, told = cli(*grid, "--out", "one")
    assert code == 1
    code, together, progress = cli(*grid, "--out", "two", "--jobs", 2)
    assert code == 1
    assert json.loads(together) == json.loads(alone.replace('"one', '"two'))
    *lines, last = progress.splitlines()
    assert last == told.splitlines()[-1]
    assert [line[:4] for line in lines] == ["1/2 ", "2/2 "]
    assert sum("lr=1e+30/seed=0: failed: round 2" in line for line in lines) == 1
    assert sum("lr=0.1/seed=0: accuracy " in line for line in lines) == 1
    for path in (tmp_path / "one").rglob("metrics.jsonl"):
        other = tmp_path / "two" / path.relative_to(tmp_path / "one")
        assert other.read_bytes() == path.read_bytes()
        assert (other.parent / "output.txt").exists()


def test_runs_of_one_program_wait_for_its_first_round(play, tmp_path):
    first = f"sleep 0.3; echo half >> {tmp_path}/journal; ROUND; sleep 0.3; ROUND"
    scripts = {
        "a1": (SMALL, first),
        "a2": (replace(SMALL, seed=1), "ROUND"),
        "a3": (replace(SMALL, seed=2, lr=0.2), "ROUND"),
        "b1": (replace(SMALL, momentum=0.2), "sleep 1; ROUND"),
    }
    done, failed = play(scripts, jobs=3)
    assert (len(done), failed) == (4, {})
    words = [line[1] if line[0] == "start" else line[0] for line in journal(tmp_path)]
    assert sorted(words[:2]) == ["a1", "b1"], "one of each program"
    assert words.index("half") < words.index("a2")
    assert words.index("half") < words.index("a3")


def test_a_failed_first_run_lets_the_next_one_start(play, tmp_path):
    scripts = {"a1": (SMALL, "exit 1"), "a2": (replace(SMALL, seed=1), "ROUND")}
    done, failed = play(scripts)
    assert [*done] == ["a2"]
    assert [*failed] == ["a1"]
    assert isinstance(failed["a1"], RunError)
    assert str(failed["a1"]) == "it broke"


def test_a_process_plays_several_runs_also_of_later_calls(play, tmp_path):
    runs = {f"a{i}": (replace(SMALL, seed=i), "ROUND") for i in range(6)}
    done, failed = play(dict(list(runs.items())[:4]), again=dict(list(runs.items())[4:]))
    assert (sorted(done), failed) == (["a4", "a5"], {})
    lines = journal(tmp_path)
    assert sorted(line[1] for line in lines) == sorted(runs)
    assert len({line[3] for line in lines}) == 2
    assert not alive({int(line[3]) for line in lines}), "they end with the block"


def test_a_process_prefers_a_near_run_whose_program_it_has():
    programs = {"a1": "A", "b1": "B", "a2": "A", "b2": "B", "c": "C"}
    ready, near = ["a2", "b2", "c"], ["a2", "b2"]
    known = {"A": "a2", "B": "b2", "C": "a2"}
    for loaded, chosen in known.items():
        assert _choose(ready, near, programs, SimpleNamespace(programs={loaded})) == chosen
    assert _choose(ready, near, programs, SimpleNamespace(programs=set())) == "a2"


def test_a_run_does_not_wait_for_all_runs_of_programs_that_are_loaded(play, tmp_path):
    scripts = {f"a{i}": (replace(SMALL, seed=i), "ROUND") for i in range(6)}
    scripts = {"a0": scripts.pop("a0"), "b": (replace(SMALL, momentum=0.2), "ROUND"), **scripts}
    assert play(scripts, jobs=1, minutes=1)[1] == {}
    assert [line[1] for line in journal(tmp_path)][:2] == ["a0", "b"]


def test_a_process_that_dies_fails_only_its_run_and_is_replaced(play, tmp_path):
    scripts = {
        f"a{i}": (replace(SMALL, seed=i), "echo killed; kill -9 $1" if i == 1 else "ROUND") for i in range(4)
    }
    done, failed = play(scripts, jobs=1, minutes=1)
    assert sorted(done) == ["a0", "a2", "a3"]
    assert str(failed.pop("a1")) == "its process ended with code -9: killed"
    assert not failed
    pids = [line[3] for line in journal(tmp_path)]
    assert (pids[0] == pids[1], pids[1] == pids[2], pids[2] == pids[3]) == (True, False, True)


def test_a_process_that_cannot_start_fails_every_run_and_says_why(play, tmp_path):
    (tmp_path / "unfit").touch()
    done, failed = play({f"a{i}": (replace(SMALL, seed=i), "ROUND") for i in range(3)})
    assert (done, sorted(failed)) == ({}, ["a0", "a1", "a2"])
    assert {str(error) for error in failed.values()} == {"its process ended with code 7: no such device"}


def test_each_process_has_its_share_of_the_threads(play, tmp_path, monkeypatch):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(6)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        play({"mine": (SMALL, "ROUND")}, jobs=3)
        assert torch.get_num_threads() == 2, "a new run folder records it"
        torch.set_num_threads(6)
        monkeypatch.setenv("OMP_NUM_THREADS", "5")
        play({"other": (SMALL, "ROUND")}, jobs=3)
        assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(before)
    assert [line[1:3] for line in journal(tmp_path)] == [["mine", "2"], ["other", "5"]]


@pytest.fixture
def listening():
    """Ctrl-C is heard, also if a shell started the tests with `&`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize("how", ["Ctrl-C", "minutes"])
def test_all_processes_end_with_the_command(play, tmp_path, capsys, how):
    scripts = {f"a{i}": (replace(SMALL, momentum=i / 10), "sleep 60") for i in range(3)}
    if how == "Ctrl-C":
        threading.Thread(target=_interrupt_when_started, args=(tmp_path / "journal", 2)).start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        play(scripts, minutes=None if how == "Ctrl-C" else 2 / 60)
    assert time.monotonic() - begun < 30
    lines = journal(tmp_path)
    assert sorted(line[1] for line in lines if line[0] == "start") == ["a0", "a1"]
    assert sorted(line[1] for line in lines if line[0] == "stop") == ["a0", "a1"]
    assert not alive({int(line[3]) for line in lines if line[0] == "start"})
    told = capsys.readouterr().err
    assert ("the minutes are over: 3 of 3 runs are left." in told) == (how == "minutes")


def test_processes_end_also_if_ctrl_c_is_ignored(play, tmp_path, monkeypatch):
    monkeypatch.setattr(run_processes, "PATIENCE", 60.0)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does that starts a command with `&`
    begun = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            play({"a": (SMALL, "sleep 60"), "b": (replace(SMALL, seed=1), "ROUND")}, minutes=1 / 60)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begun < 50, "nobody waits for processes that do not hear"
    assert not alive({int(line[3]) for line in journal(tmp_path)})


def _interrupt_when_started(file: Path, count: int) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end and not (file.exists() and file.read_text().count("start") == count):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


def test_finished_runs_are_kept_after_an_interruption(tmp_path):
    run(SMALL, tmp_path / "out" / "whole")
    lay_out_all({tmp_path / "out" / "left": replace(SMALL, seed=1)})
    with pytest.raises(KeyboardInterrupt), kept(tmp_path / "out", tmp_path / "results"):
        raise KeyboardInterrupt
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["whole"]


def test_mistakes_are_refused_before_a_run_starts(cli, tmp_path):
    (tmp_path / "base.toml").write_text(CONFIG.replace("sequential", "flower"))
    code, _, err = cli("sweep", "--config", "base.toml", "--seeds", "0-1", "--jobs", 2)
    assert (code, err) == (
        2,
        "fedpara: --engine flower starts its own processes: use it without --jobs and --minutes.\n",
    )
    code, _, err = cli("reproduce", "robustness", "--jobs", 2)
    assert (code, "--jobs is for" in err) == (2, True)
    assert [*tmp_path.iterdir()] == [tmp_path / "base.toml"]


def test_noise_and_clip_are_no_part_of_a_compiled_program():
    private = replace(SMALL, sampler="poisson", weights="uniform", privacy="user(noise=1.1, clip=0.5)")
    other = replace(private, privacy="user(noise=0.8, clip=0.1)", privacy_seed=3, seed=3, lr=0.5)
    assert _program(private) == _program(other)
    programs = {_program(one) for one in (SMALL, private, replace(private, momentum=0.2))}
    assert len(programs) == 3
