"""`fedpara resume`: one run or a folder of runs, intact or damaged."""

import fcntl
import json
import os
import shlex
from dataclasses import replace

import pytest

from fedpara.apps import run as command
from fedpara.errors import RunError
from fedpara.experiments import Experiment, read_run, run
from fedpara.experiments.run import rounds_done

TINY = Experiment(
    model="mlp", scheme="original", clients=5, cohort=2, rounds=1, epochs=None, steps=1, engine="sequential"
)
DAMAGE = {"a": ("config.toml", "rounds = many"), "c": ("metrics.jsonl", '{"round": 1}\n')}


@pytest.fixture
def runs(tmp_path):
    for name in "abc":
        run(TINY, tmp_path / "runs" / name)
    return tmp_path / "runs"


def test_a_damaged_run_does_not_stop_the_others(cli, runs):
    for name, (file, content) in DAMAGE.items():
        (runs / name / file).write_text(content)
    code, out, err = cli("resume", "runs", "--rounds", 2)
    assert (code, out) == (1, "")
    assert read_run(runs / "b").rounds == 2
    said = err.splitlines()[-1]
    assert said.startswith("fedpara: 2 of 3 runs failed, the others are done. a: ")
    assert "config.toml" in said
    assert "metrics.jsonl is damaged in line 1" in said


def test_a_failing_run_does_not_stop_the_others(cli, runs):
    for name in ("checkpoint.safetensors", "checkpoint.previous.safetensors"):
        (runs / "a" / name).write_bytes(b"torn")
    code, _, err = cli("resume", "runs", "--rounds", 2)
    assert (code, "1 of 3 runs failed, the others are done. a: no checkpoint in" in err) == (1, True)
    assert [read_run(runs / name).rounds for name in "bc"] == [2, 2]


def test_a_name_is_printed_unchanged_and_quoted_in_commands(cli, tmp_path):
    name = "x[red]y's ü"
    run(TINY, tmp_path / name)
    code, out, _ = cli("resume", name)
    assert code == 0
    assert name in out
    assert f"fedpara export {shlex.quote(name)} --format" in " ".join(out.split())
    assert f"read {shlex.quote(name + '/metrics.jsonl')}" in " ".join(out.split())
    code, _, err = cli("run", "--out", name)
    assert (code, f"fedpara resume {shlex.quote(name)}. " in err) == (2, True)
    code, _, err = cli("resume", "a b")
    assert (code, "`fedpara run --out 'a b'` creates one" in err) == (2, True)
    (tmp_path / name / "checkpoint.previous.safetensors").write_bytes(
        (tmp_path / name / "checkpoint.safetensors").read_bytes()
    )
    (tmp_path / name / "checkpoint.safetensors").write_bytes(b"torn")
    code, _, err = cli("export", name)
    assert (code, f"`fedpara resume {shlex.quote(name)}` continues from it" in err) == (1, True)
    assert cli("report", name, "--out", "my page.md")[0] == 0
    written = (tmp_path / "my page.md").read_text()
    assert f"`fedpara report {shlex.quote(name)} --out 'my page.md'`" in written


def test_a_usage_error_is_printed_once(cli, runs):
    code, _, err = cli("resume", "runs", "--rounds", 2, "--engine", "sequentail")
    assert code == 2
    assert err.count("did you mean 'sequential'") == 1
    assert "failed" not in err


def test_a_reached_target_is_reported(cli, tmp_path):
    words = ["--model", "mlp", "--clients", 5, "--cohort", 2, "--steps", 1, "--target", 0.01, "--out", "a"]
    assert cli("run", *words, "--rounds", 2)[0] == 0
    code, out, err = cli("resume", "a", "--rounds", 5, "--json")
    assert (code, json.loads(out)["rounds"]) == (0, 1)
    assert "a: the target accuracy of 0.01 was reached in round 1: nothing to run." in err


@pytest.fixture
def no_simulation(monkeypatch):
    def started(paths, *_):
        if paths:
            pytest.fail("Flower was started")
        return untouched(paths, *_)

    untouched = command._simulation
    monkeypatch.setattr(command, "_simulation", started)


def test_flower_computes_in_float32_only(cli, runs, no_simulation):
    code, _, err = cli("resume", "runs/a", "--rounds", 2, "--engine", "flower", "--precision", "bfloat16")
    assert code == 2
    assert "precision 'bfloat16' needs the batched or the sequential engine on a GPU" in err


def test_a_folder_in_use_is_reported_before_flower_starts(cli, runs, no_simulation):
    lock = os.open(runs / "a" / ".lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    said = []
    for engine in ("sequential", "flower"):
        code, _, err = cli("resume", "runs/a", "--rounds", 2, "--engine", engine)
        assert code == 1
        said.append(err)
    os.close(lock)
    assert said[0] == said[1]
    assert "runs/a is in use by another process" in said[0]


REFUSED = {
    "rounds": (lambda folder: None, ["--rounds", 0], "rounds is 0: expected"),
    "data": (
        lambda folder: (folder / "data.json").write_text('{"blake2b": "another"}'),
        ["--rounds", 2],
        "was started with different examples",
    ),
    "digest": (lambda folder: (folder / "data.json").write_text("{}"), ["--rounds", 2], "cannot be read"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_mistakes_are_reported_before_flower_starts(cli, runs, no_simulation, how):
    damage, words, says = REFUSED[how]
    damage(runs / "a")
    before = (runs / "a" / "config.toml").read_bytes()
    said = [cli("resume", "runs/a", *words, "--engine", engine) for engine in ("sequential", "flower")]
    assert said[0] == said[1]
    assert says in said[0][2]
    assert (runs / "a" / "config.toml").read_bytes() == before


def test_flower_does_not_resume_a_run_with_local_client_memory(cli, tmp_path, no_simulation):
    run(replace(TINY, scheme="pfedpara", gamma=0.5), tmp_path / "a")
    before = (tmp_path / "a" / "config.toml").read_bytes()
    code, _, err = cli("resume", "a", "--rounds", 2, "--engine", "flower")
    assert (code, "no Flower node has them: resume with --engine sequential." in err) == (1, True)
    assert (tmp_path / "a" / "config.toml").read_bytes() == before
    assert cli("resume", "a", "--rounds", 2)[0] == 0


def test_a_finished_run_needs_no_client_memory(tmp_path):
    run(replace(TINY, scheme="pfedpara", gamma=0.5), tmp_path / "a")
    assert rounds_done(tmp_path / "a", None, "flower", None, None) == (1, True)
    with pytest.raises(RunError, match="no Flower node has them"):
        rounds_done(tmp_path / "a", 2, "flower", None, None)


def test_the_flower_server_does_not_resume_it_either(tmp_path):
    pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")
    from fedpara.apps.flower.server_app import run_folders

    run(replace(TINY, scheme="pfedpara", gamma=0.5), tmp_path / "a")
    before = (tmp_path / "a" / "config.toml").read_bytes()
    with pytest.raises(RunError, match="no Flower node has them"):
        run_folders({tmp_path / "a": 2}, None, lambda *_: pytest.fail("a round was begun"))
    assert (tmp_path / "a" / "config.toml").read_bytes() == before
