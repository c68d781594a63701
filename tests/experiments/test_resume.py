"""A resumed run ends with the same bits as an uninterrupted one."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedpara import data
from fedpara.errors import ConfigError, RunError
from fedpara.experiments import Experiment, read_run, resume, run
from fedpara.experiments.build import build
from fedpara.experiments.run import lay_out
from fedpara.experiments.storage.catalog import archive_run
from fedpara.experiments.storage.client_scores import CLIENT_SCORES
from fedpara.experiments.storage.summary import read_config
from fedpara.experiments.storage.tensor_files import read_tensors

RUN = sys.modules["fedpara.experiments.run"]  # the package's own `run` is the function
CRASH = Path(__file__).parents[2] / "benchmarks" / "crash.py"

SHORT = Experiment(
    model="mlp",
    scheme="pfedpara",
    init="calibrated",
    algorithm="scaffold",
    link_up="float16",
    personal=True,
    clients=10,
    cohort=3,
    rounds=6,
    epochs=None,
    steps=2,
    batch_size=16,
    lr=0.02,
)


class Stop(Exception):
    pass


def stop_after(round):
    def watch(result, timing):
        if result.number == round:
            raise Stop

    return watch


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    path = tmp_path_factory.mktemp("alone") / "run"
    run(SHORT, path)
    return path


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory):
    path = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Stop):
        run(SHORT, path, on_round=stop_after(4))
    assert read_run(path).rounds == 4
    return path


@pytest.fixture
def stopped(stopped_once, tmp_path):
    """A copy of a run of SHORT that was stopped after round 4."""
    return shutil.copytree(stopped_once, tmp_path / "run")


def ends_like(path, reference, prolonged=False):
    """Bit for bit. A prolonged run also has everyone's score in the round where it first ended."""
    assert read_run(path).by_client == read_run(reference).by_client
    a, b = (read_tensors(p / "checkpoint.safetensors") for p in (path, reference))
    if prolonged:
        ours, theirs = (read_run(p).metrics for p in (path, reference))
        last = [line.pop("everyone", None) for line in ours][-1]
        assert last == [line.pop("everyone", None) for line in theirs][-1]
        assert ours == theirs
        assert a[1].pop("metrics") != b[1].pop("metrics")
    else:
        for name in ("metrics.jsonl", CLIENT_SCORES):
            assert (path / name).read_bytes() == (reference / name).read_bytes()
    assert a[1] == b[1]
    assert a[0].keys() == b[0].keys()
    assert all(torch.equal(a[0][name], b[0][name]) for name in a[0])
    assert any(name.startswith("server/control/") for name in a[0])


def log(path):
    return (path / "log.txt").read_text()


def test_a_stopped_run_resumes_to_the_same_bits(stopped, alone):
    assert "stopped: Stop" in log(stopped)
    resume(stopped)
    ends_like(stopped, alone)
    assert "resumed after round 4" in log(stopped)
    assert len(read_run(stopped).timing) == 6


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            {"threads": 99},
            r"the run began with threads 99, now \d+: .* may differ in their last bits. Set OMP_NUM_THREADS=99",
        ),
        ({"torch": "1.0"}, r"the run began with torch 1.0, now .* may differ in their last bits.$"),
    ],
)
def test_a_changed_thread_count_or_torch_is_reported(stopped, caplog, changed, says):
    environment = json.loads((stopped / "environment.json").read_text())
    (stopped / "environment.json").write_text(json.dumps(environment | changed))
    resume(stopped)
    assert [text for text in caplog.messages if re.match(says, text)]
    assert "the run began with" in log(stopped)
    caplog.clear()
    resume(stopped)  # the run is finished
    assert "the run began with" not in caplog.text


def test_an_unchanged_environment_is_not_reported(tmp_path, caplog):
    lay_out(SHORT, tmp_path / "run")
    resume(tmp_path / "run")
    assert "the run began with" not in caplog.text


def test_a_folder_laid_out_and_resumed_is_the_same_run(tmp_path, alone):
    lay_out(SHORT, tmp_path / "run")
    assert read_run(tmp_path / "run").rounds == 0
    resume(tmp_path / "run")
    ends_like(tmp_path / "run", alone)


def test_a_finished_run_is_not_changed(alone):
    before = {p: p.read_bytes() for p in alone.iterdir() if p.is_file() and p.name != "log.txt"}
    assert resume(alone).rounds == 6
    assert {p: p.read_bytes() for p in alone.iterdir() if p.is_file() and p.name != "log.txt"} == before


def test_a_run_killed_five_times_resumes_to_the_same_bits():
    """Real SIGKILLs on every engine, at random times and in the middle of a write. The benchmark does many more."""
    words = [sys.executable, CRASH, "--kills", "5", "--only", "scaffold"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if re.search(r"\d+ of \d+$", line)]
    kills = [int(re.findall(r" (\d+)", row)[0]) for row in rows]
    assert [row.split()[0] for row in rows] == ["sequential", "batched", "flower", "torchrun"]
    assert sum(kills) == 5, done.stdout
    assert all(re.search(r" (\d+) of \1$", row) for row in rows), done.stdout


@pytest.mark.parametrize("length", [0, 100, -1])
def test_a_truncated_checkpoint_falls_back_to_the_previous_one(stopped, alone, length):
    checkpoint = stopped / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:length])
    resume(stopped)
    ends_like(stopped, alone)
    assert "Falling back to the previous checkpoint, of round 3." in log(stopped)
    assert "resumed after round 3" in log(stopped)


def test_a_flipped_bit_in_a_checkpoint_is_detected(stopped, alone):
    checkpoint = stopped / "checkpoint.safetensors"
    content = bytearray(checkpoint.read_bytes())
    content[-5] ^= 4
    checkpoint.write_bytes(content)
    resume(stopped)
    ends_like(stopped, alone)
    assert "does not match its digest" in log(stopped)


def test_a_damaged_checkpoint_does_not_replace_the_intact_one(stopped, alone, monkeypatch):
    """The run falls back and is stopped again before the next round: round 3 must still be there."""
    (stopped / "checkpoint.safetensors").write_bytes(b"torn")
    with monkeypatch.context() as patched:
        patched.setattr(RUN, "run_rounds", lambda *_: (_ for _ in ()).throw(Stop))
        with pytest.raises(Stop):
            resume(stopped)
    assert not (stopped / "checkpoint.previous.safetensors").exists()
    _, metadata = read_tensors(stopped / "checkpoint.safetensors")
    assert metadata["round"] == "3"
    resume(stopped)
    ends_like(stopped, alone)


def test_the_previous_checkpoint_alone_is_enough(stopped, alone):
    """The moment between the two renames of `write_checkpoint`."""
    (stopped / "checkpoint.safetensors").replace(stopped / "checkpoint.previous.safetensors")
    resume(stopped)
    ends_like(stopped, alone)


def test_two_damaged_checkpoints_are_rejected(stopped):
    for name in ("checkpoint.safetensors", "checkpoint.previous.safetensors"):
        (stopped / name).write_bytes((stopped / name).read_bytes()[:-9])
    with pytest.raises(
        RunError, match=r"no checkpoint in .* can be used.*start the run again in a new folder"
    ):
        resume(stopped)
    assert read_run(stopped).rounds == 4


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(lambda lines: lines + b'{"round": 5, "accur', id="a line begun"),
        pytest.param(
            lambda lines: lines + lines.splitlines(keepends=True)[-1].replace(b"4", b"5"), id="one more"
        ),
        pytest.param(lambda lines: lines[:-5], id="the last line cut"),
    ],
)
def test_truncated_metrics_are_repaired(stopped, alone, cut):
    metrics = stopped / "metrics.jsonl"
    metrics.write_bytes(cut(metrics.read_bytes()))
    resume(stopped)
    ends_like(stopped, alone)


@pytest.mark.parametrize("cut", [0, 1, 9], ids=["all lines", "the last line cut", "a line less"])
def test_scores_of_clients_without_their_checkpoint_are_written_again(stopped, alone, cut):
    """As if the kill came after the lines of the last round, or between two of them, and before its checkpoint."""
    content = (alone / CLIENT_SCORES).read_bytes()
    (stopped / CLIENT_SCORES).write_bytes(content[: len(content) - 20 * cut])
    resume(stopped)
    ends_like(stopped, alone)


def test_every_client_has_one_line_of_scores(alone):
    lines = [json.loads(line) for line in (alone / CLIENT_SCORES).read_text().splitlines()]
    assert [(line["round"], line["client"]) for line in lines] == [(6, client) for client in range(10)]
    federation = build(SHORT).data
    assert [line["examples"] for line in lines] == [len(federation.client_test(i)) for i in range(10)]
    scores = [line["scores"]["accuracy"] for line in lines]
    assert read_run(alone).everyone["accuracy"] == pytest.approx(sum(scores) / 10)
    found = read_run(alone)
    assert {i: score.values["accuracy"] for i, score in found.by_client.items()} == dict(enumerate(scores))
    accuracy, loss = found.distributions["accuracy"], found.distributions["loss"]
    assert (accuracy.worst, scores[accuracy.worst_client]) == (min(scores), min(scores))
    assert loss.worst == max(line["scores"]["loss"] for line in lines)


def test_metrics_that_lack_rounds_of_both_checkpoints_are_rejected(stopped):
    metrics = stopped / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:1]))
    with pytest.raises(RunError, match=r"metrics\.jsonl lacks rounds"):
        resume(stopped)


def test_memories_newer_than_the_checkpoint_are_removed(stopped, alone):
    """As if the kill came after the memory files and before the checkpoint."""
    newest = sorted((stopped / "clients").glob("*/*-4.safetensors"))
    assert newest
    for path in newest:
        shutil.copy(path, path.with_name(path.name.replace("-4.", "-5.")))
    (stopped / "clients" / "0" / ".ab.part.safetensors").write_bytes(b"torn")
    resume(stopped)
    ends_like(stopped, alone)
    assert not list(stopped.rglob(".*.part*"))


@pytest.mark.parametrize("lose", ["*", "0/1-*"], ids=["all", "all of one"])
def test_missing_memories_are_rejected(stopped, lose):
    """Otherwise those clients would silently start again."""
    lost = sorted((stopped / "clients").glob(f"{lose}/*" if lose == "*" else lose))
    assert lost
    for path in lost:
        path.unlink()
    there = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match=r"the memory of client \d+, round \d cannot be used: .* is missing\."):
        resume(stopped)
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == there


def test_the_previous_checkpoint_uses_the_previous_memories(stopped, alone):
    (stopped / "checkpoint.safetensors").unlink()
    for path in (stopped / "clients").glob("*/*-4.safetensors"):
        path.unlink()
    resume(stopped)
    ends_like(stopped, alone)


def test_a_run_without_memories_resumes(tmp_path):
    plain = replace(SHORT, scheme="original", algorithm="fedavg", init=None, rounds=2)
    run(plain, str(tmp_path / "run"))
    assert resume(str(tmp_path / "run"), rounds=3).rounds == read_run(str(tmp_path / "run")).rounds == 3
    assert "clients" not in read_tensors(tmp_path / "run" / "checkpoint.safetensors")[0]


def test_an_archived_run_is_rejected_unchanged(alone, tmp_path):
    archived = tmp_path / "archived"
    archived.mkdir()
    for name in ("config.toml", "metrics.jsonl", "timing.jsonl"):
        shutil.copy(alone / name, archived)
    with pytest.raises(RunError, match="it is an archived run"):
        resume(archived)
    assert {path.name for path in archived.iterdir()} == {"config.toml", "metrics.jsonl", "timing.jsonl"}


def test_an_archive_keeps_the_scores_of_clients(alone, tmp_path):
    small = archive_run(alone, tmp_path)
    assert read_run(small).by_client == read_run(alone).by_client != {}


def test_a_folder_may_be_moved(stopped, alone, tmp_path):
    shutil.move(stopped, tmp_path / "elsewhere")
    resume(tmp_path / "elsewhere")
    ends_like(tmp_path / "elsewhere", alone)


def test_a_prolonged_run_is_a_longer_run(tmp_path, alone):
    path = tmp_path / "run"
    run(replace(SHORT, rounds=3), path)
    with pytest.raises(Stop):
        resume(path, rounds=6, on_round=stop_after(5))
    assert read_config(path).rounds == 6, "the folder says what it is a run of"
    resume(path)
    ends_like(path, alone, prolonged=True)
    lines = (path / CLIENT_SCORES).read_bytes().splitlines(keepends=True)
    assert [json.loads(line)["round"] for line in lines] == [3] * 10 + [6] * 10
    assert b"".join(lines[10:]) == (alone / CLIENT_SCORES).read_bytes()


@pytest.mark.parametrize("rounds", [0, 2])
def test_fewer_rounds_than_done_are_rejected(stopped, rounds):
    with pytest.raises(ConfigError, match=f"rounds is {rounds}: expected"):
        resume(stopped, rounds=rounds)
    assert read_config(stopped).rounds == 6


def test_a_diverging_run_keeps_its_last_good_round(tmp_path):
    path = tmp_path / "run"
    experiment = Experiment(
        model="mlp", scheme="original", clients=10, cohort=5, rounds=30, lr=1e6, epochs=None, steps=1
    )
    with pytest.raises(RunError, match=r"round (\d+): no update is left, and") as caught:
        run(experiment, path)
    failed = int(re.search(r"round (\d+)", str(caught.value))[1])
    assert failed > 1
    assert read_run(path).rounds == failed - 1
    state, metadata = read_tensors(path / "checkpoint.safetensors")
    assert metadata["round"] == str(failed - 1)
    assert all(tensor.isfinite().all() for tensor in state.values())
    assert f"stopped: RunError: {caught.value}" in log(path)
    with pytest.raises(RunError, match=f"round {failed}: no update is left, and"):
        resume(path)
    assert read_run(path).rounds == failed - 1


def test_different_examples_are_rejected(stopped, alone, monkeypatch):
    load = data.load

    def changed(name, data_dir=None):
        train, test = load(name, data_dir)
        inputs = train.inputs.clone()
        inputs[7, 0, 0, 0] += 1
        return replace(train, inputs=inputs), test

    with monkeypatch.context() as other:
        other.setattr(data, "load", changed)
        with pytest.raises(RunError, match="was started with different examples"):
            resume(stopped)
    resume(stopped)
    ends_like(stopped, alone)


def test_a_folder_without_data_json_resumes(stopped, alone):
    (stopped / "data.json").unlink()
    resume(stopped)
    ends_like(stopped, alone)


def test_a_copy_of_a_memory_file_is_ignored(stopped, alone):
    path = next((stopped / "clients").glob("*/*.safetensors"))
    copy = path.with_name(f"{path.stem} (copy).safetensors")
    shutil.copy(path, copy)
    resume(stopped)
    copy.unlink()
    ends_like(stopped, alone)
