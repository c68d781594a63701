"""Run folders: their files, who may open them, and which damage they survive."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from fedpara.engines.progress import Progress, Round
from fedpara.errors import ConfigError, RunError
from fedpara.experiments import Experiment, read_run, resume, run
from fedpara.experiments.build import build
from fedpara.experiments.run import lay_out
from fedpara.experiments.storage.checkpoint import final_checkpoint
from fedpara.experiments.storage.jsonl import append_line, drop_rounds_after, read_lines
from fedpara.experiments.storage.metrics_line import metrics_of
from fedpara.experiments.storage.run_folder import RunFolder, create, open_run
from fedpara.experiments.storage.summary import read_config

TINY = Experiment(
    model="mlp", scheme="original", clients=8, cohort=2, rounds=3, batch_size=32, epochs=None, steps=1
)
PARTS = build(TINY)
MODEL = {"name": "mlp", "classes": 10, "shape": [1, 8, 8], "normalise": PARTS.normalisation}
DATA = PARTS.digest
FILES = {
    ".lock",
    "checkpoint.previous.safetensors",
    "checkpoint.safetensors",
    "config.toml",
    "data.json",
    "environment.json",
    "log.txt",
    "metrics.jsonl",
    "model.json",
    "timing.jsonl",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "finished"
    run(TINY, path)
    return path


def test_a_run_folder_has_the_documented_files(finished):
    assert {entry.name for entry in finished.iterdir()} == FILES
    assert read_config(finished) == TINY
    assert json.loads((finished / "model.json").read_text()) == MODEL
    environment = json.loads((finished / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    assert {"fedpara", "python", "machine", "threads", "device", "command"} <= environment.keys()
    assert "engine sequential (auto was requested)" in (finished / "log.txt").read_text()


def test_metrics_have_one_line_per_round(finished):
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert 0 <= line["accuracy"] <= 1
        assert line["up"] > 0
        assert line["clients"] == 2
        assert line["refused"] == line["notes"] == []
    assert lines[-1]["total_up"] == sum(line["up"] for line in lines)
    assert lines[-1]["total_down"] == sum(line["down"] for line in lines)


def test_a_summary_reads_the_metrics(finished):
    summary = read_run(finished)
    assert (summary.rounds, summary.experiment) == (3, TINY)
    assert summary.accuracy == summary.metrics[-1]["accuracy"]
    assert summary.bytes_up == summary.metrics[-1]["total_up"]
    assert summary.seconds == pytest.approx(sum(line["seconds"] for line in summary.timing))
    assert summary.reached(0.0)["round"] == 1
    assert summary.reached(1.1) is None


def test_the_final_checkpoint_is_the_newest(finished):
    newest = final_checkpoint(finished)
    assert newest.round == 3
    assert set(newest.state) == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}
    assert all(tensor.isfinite().all() for tensor in newest.state.values())


def round_of(**values):
    progress = Progress(1, {"w": torch.ones(2)}, {}, {}, 10, 20)
    return Round(progress, (0, 1), **{"train_loss": 1.0, "bytes_up": 10, "bytes_down": 20, **values})


def test_nan_and_infinity_become_null():
    line = metrics_of(round_of(train_loss=float("nan"), scores={"loss": float("inf"), "accuracy": 0.5}))
    assert (line["train_loss"], line["loss"], line["accuracy"]) == (None, None, 0.5)
    json.dumps(line, allow_nan=False)


def test_a_used_folder_is_rejected_with_the_resume_command(finished):
    before = {path: path.read_bytes() for path in finished.iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match=f"fedpara resume {finished}"):
        run(TINY, finished)
    assert {path: path.read_bytes() for path in finished.iterdir() if path.is_file()} == before


def test_unusable_places_are_rejected(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    for place in (file, file / "below"):
        with pytest.raises(ConfigError, match="cannot be made"):
            run(TINY, place)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="not empty and holds no run"):
        run(TINY, tmp_path / "used")
    assert [entry.name for entry in (tmp_path / "used").iterdir()] == ["thesis.tex"]
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    "words",
    [
        {"dataset": "digit"},
        {"split": "owner"},
        {"cohort": 101},
        {"rounds": 0},
        {"evaluate_every": 0},
        {"max_share": 0.0},
        {"target": 80.0},
        {"jacobian": 1.0},
        {"scheme": "pfedpara", "target": 0.5},
        {"engine": "sequential", "precision": "bfloat16"},
        pytest.param(
            {"precision": "tf32"}, marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU")
        ),
    ],
)
def test_a_mistake_leaves_no_folder_behind(tmp_path, words):
    experiment = Experiment(**{"model": "mlp", "scheme": "original", **words})
    for begin in (run, lay_out):
        with pytest.raises(ConfigError):
            begin(experiment, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_killed_before_its_config_counts_as_empty(tmp_path):
    for name in ("environment.json", "model.json", ".0123abcd.part.toml", ".lock"):
        (tmp_path / name).write_text("torn")
    create(tmp_path, TINY, MODEL, {"blake2b": DATA}).close()
    assert json.loads((tmp_path / "model.json").read_text()) == MODEL
    assert not list(tmp_path.glob(".*.part*"))


def test_only_run_folders_can_be_resumed(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=r"no config\.toml"):
            resume(path)


HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_two_processes_cannot_open_one_folder(tmp_path):
    path = tmp_path / "run"
    lay_out(TINY, path)
    other = [sys.executable, "-c", HOLDER, str(path / ".lock")]
    with subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(RunError, match="in use by another process"):
            resume(path)
        holder.stdin.close()
    folder = open_run(path, TINY, DATA)
    with pytest.raises(RunError, match="in use by another process"):
        resume(path)
    folder.close()
    assert resume(path).rounds == 3


def test_a_folder_that_cannot_be_opened_is_unlocked(tmp_path):
    path = tmp_path / "run"
    run(TINY, path)
    good = (path / "checkpoint.safetensors").read_bytes()
    for name in ("checkpoint.safetensors", "checkpoint.previous.safetensors"):
        (path / name).write_bytes(b"torn")
    with pytest.raises(RunError, match=r"no checkpoint in .* can be used"):
        resume(path)
    (path / "checkpoint.safetensors").write_bytes(good)
    assert resume(path).rounds == 3


def test_a_checkpoint_of_another_config_is_rejected(tmp_path):
    path = tmp_path / "run"
    run(TINY, path)
    config = path / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.1", "lr = 0.2"))
    with pytest.raises(RunError, match="belongs to another config"):
        resume(path)


def test_truncated_lines_are_dropped(tmp_path):
    path = tmp_path / "m.jsonl"
    for t in range(1, 5):
        append_line(path, {"round": t, "x": 0.1 * t})
    whole = path.read_bytes()
    drop_rounds_after(path, 4)
    assert path.read_bytes() == whole
    path.write_bytes(whole[:-3])
    assert [line["round"] for line in read_lines(path)] == [1, 2, 3]
    drop_rounds_after(path, 2)
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:2])
    assert read_lines(tmp_path / "none.jsonl") == []


DEEP = b"[" * 200_000 + b"\n"


@pytest.mark.parametrize("damage", [b"{\n", b"3\n", b'{"x": 1}\n', b"\xff\n", b"\n", DEEP], ids=range(6))
def test_damaged_lines_are_rejected_by_name(tmp_path, damage):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"round": 1}\n' + damage + b'{"round": 2}\n')
    with pytest.raises(RunError, match=r"m\.jsonl is damaged"):
        read_lines(path)


@pytest.mark.parametrize(
    ("name", "line", "lacks"),
    [
        ("metrics.jsonl", {"round": 3}, "clients"),
        ("metrics.jsonl", {"round": 3, "clients": "two"}, "clients"),
        ("timing.jsonl", {"round": 3}, "seconds"),
        ("timing.jsonl", {"round": 3, "seconds": None}, "seconds"),
    ],
)
def test_a_line_without_required_fields_is_rejected_by_name(finished, tmp_path, name, line, lacks):
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / name
    kept = path.read_bytes().splitlines(keepends=True)[:2]
    path.write_bytes(b"".join(kept) + json.dumps(line).encode() + b"\n")
    with pytest.raises(RunError, match=rf"{name} is damaged in line 3: expected .*{lacks}"):
        read_run(tmp_path / "run")


def test_a_line_with_nan_is_never_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        append_line(tmp_path / "m.jsonl", {"round": 1, "x": float("nan")})


def test_only_clients_with_a_memory_have_a_file(tmp_path, finished):
    assert not (finished / "clients").exists()
    scaffold = Experiment(**{**vars(TINY), "algorithm": "scaffold", "rounds": 4})
    run(scaffold, tmp_path / "run")
    folder = open_run(tmp_path / "run", scaffold, DATA)
    versions: dict[int, int] = {}
    for path in (tmp_path / "run" / "clients").glob("*/*.safetensors"):
        client = int(path.stem.split("-")[0])
        versions[client] = versions.get(client, 0) + 1
        assert folder.memory.get(client).keys() == {"private", "control"}
    folder.close()
    assert 2 <= len(versions) <= 8
    assert max(versions.values()) <= 2


def test_an_empty_group_of_the_server_survives(tmp_path):
    """Local with SCAFFOLD: the server's control has no tensors."""
    folder = create(tmp_path / "run", TINY, MODEL, {"blake2b": DATA})
    progress = Progress(
        1, {}, {"bn.count": torch.tensor(4)}, {"control": {}, "m": {"w": torch.ones(1)}}, 5, 6
    )
    folder.save(Round(progress, (0,), 1.0, 5, 6), {"seconds": 1.0}, "sequential: alone")
    folder.close()
    again = RunFolder(tmp_path / "run", TINY).progress
    assert again.server.keys() == {"control", "m"}
    assert again.server["m"]["w"].tolist() == [1.0]
    assert again.buffers["bn.count"].tolist() == 4
    assert (again.round, again.bytes_up, again.bytes_down, again.x) == (1, 5, 6, {})


def test_a_target_is_met_at_equality(tmp_path):
    met = run(replace(TINY, rounds=1), tmp_path / "a").accuracy
    assert run(replace(TINY, target=met), tmp_path / "b").rounds == 1
    assert resume(tmp_path / "b").rounds == 1


def test_a_target_ends_the_run_for_good(tmp_path):
    experiment = Experiment(model="mlp", scheme="original", clients=10, rounds=40, lr=0.1, target=0.5)
    summary = run(experiment, tmp_path / "run")
    assert summary.accuracy >= 0.5
    assert summary.rounds < 40
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert resume(tmp_path / "run").rounds == summary.rounds
    assert resume(tmp_path / "run", rounds=50).rounds == summary.rounds
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    assert summary.reached(0.5)["round"] == summary.rounds
