"""Full disks, closed streams, early Ctrl-C: a one-line error and exit code, or the run continues."""

import errno
import io
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedpara.apps.cli import main
from fedpara.apps.terminal import progress
from fedpara.engines import Progress, Round
from fedpara.experiments import read_run
from fedpara.experiments.storage import run_folder as store

ROOT = Path(__file__).parents[2]
RUN = sys.modules["fedpara.experiments.run"]  # the package's own `run` is the function
TINY = ["--model", "mlp", "--scheme", "original", "--clients", "8", "--cohort", "2", "--steps", "1"]


def test_a_full_disk_is_a_one_line_error(cli, monkeypatch, tmp_path):
    written = store.append_line

    def append(path, line, durable=True):
        if line["round"] == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(path, line, durable)

    monkeypatch.setattr(store, "append_line", append)
    code, out, err = cli("run", *TINY, "--rounds", "3", "--out", "a")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == "fedpara: No space left on device"
    monkeypatch.undo()
    assert read_run(tmp_path / "a").rounds == 1


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 3.78 TiB for an array"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 3.78 TiB"),
    ],
)
def test_out_of_memory_stops_only_its_own_run(cli, monkeypatch, tmp_path, error):
    for name in "ab":
        assert cli("run", *TINY, "--rounds", "1", "--out", f"runs/{name}")[0] == 0
    original, played = RUN.run_rounds, []

    def short(*given):
        played.append(given)
        if len(played) == 1:
            raise error
        return original(*given)

    monkeypatch.setattr(RUN, "run_rounds", short)
    code, _, err = cli("resume", "runs", "--rounds", "2")
    assert (code, read_run(tmp_path / "runs/b").rounds) == (1, 2)
    said = err.splitlines()[-1]
    assert said.startswith("fedpara: 1 of 2 runs failed, the others are done. a: runs/a ran out of memory (")
    assert "3.78 TiB" in said


def test_out_of_memory_outside_a_run_is_a_one_line_error(cli, monkeypatch):
    def short(*_, **__):
        raise MemoryError

    monkeypatch.setattr(RUN, "build", short)
    code, _, err = cli("run", *TINY, "--out", "a")
    assert (code, err) == (1, "fedpara: out of memory (MemoryError): try a smaller model or batch.\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", *TINY, "--out", "n" * 300], f"{'n' * 300}: File name too long"),
        (["resume", "n" * 300], f"{'n' * 300}/config.toml: File name too long"),
        (["resume", "folder"], "folder/metrics.jsonl: Is a directory"),
    ],
    ids=["run", "resume", "a folder for a file"],
)
def test_an_impossible_file_name_is_a_one_line_error(cli, tmp_path, words, says):
    (tmp_path / "folder" / "metrics.jsonl").mkdir(parents=True)
    (tmp_path / "folder" / "config.toml").touch()
    assert cli(*words) == (1, "", f"fedpara: {says}\n")


def test_an_unreadable_folder_is_named(cli, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "secret/config.toml")

    monkeypatch.setattr(Path, "exists", denied)
    assert cli("resume", "secret") == (1, "", "fedpara: secret/config.toml: Permission denied\n")


def test_a_bug_keeps_its_traceback(monkeypatch):
    def broken(*_, **__):
        raise OverflowError("a defect")

    monkeypatch.setattr("fedpara.apps.cli._command", broken)
    with pytest.raises(OverflowError):
        main()


def test_a_full_stdout_is_a_failure(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["fedpara", "inspect", "mlp", "--json"])
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as end:
            main()
        monkeypatch.undo()
    assert end.value.code == 1
    assert capsys.readouterr().err == "fedpara: stdout: No space left on device\n"


def test_ctrl_c_during_the_import_of_the_package(tmp_path):
    """A fake package raises KeyboardInterrupt on import; the real one takes seconds."""
    (tmp_path / "fedpara").mkdir()
    (tmp_path / "fedpara" / "__init__.py").write_text("raise KeyboardInterrupt")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    where, _, name = scripts["fedpara"].partition(":")
    code = f"import sys; sys.path[:0] = {[str(tmp_path), str(ROOT / 'src')]}; from {where} import {name}; {name}()"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (got.returncode, got.stdout) == (130, "")
    assert got.stderr == "interrupted: nothing was started.\n"


class Failing(io.StringIO):
    """A stream that raises an error on every write."""

    def __init__(self, error, terminal=False):
        super().__init__()
        self.error, self.terminal = error, terminal

    def isatty(self):
        return self.terminal

    def write(self, text):
        raise self.error


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


STREAMS = {
    "closed at the start": lambda: None,
    "closed since": closed,
    "no reader": lambda: Failing(BrokenPipeError(errno.EPIPE, "Broken pipe")),
    "full": lambda: Failing(OSError(errno.ENOSPC, "No space left on device")),
    "a terminal that is gone": lambda: Failing(OSError(errno.EIO, "Input/output error"), terminal=True),
    "a terminal without a reader": lambda: Failing(
        BrokenPipeError(errno.EPIPE, "Broken pipe"), terminal=True
    ),
}


@pytest.mark.parametrize("stream", STREAMS)
def test_a_failing_stderr_does_not_end_the_run(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", STREAMS[stream]())
    result = Round(Progress(2, {}, {}, {}, 10, 10), (0, 1), 0.5, 10, 10, (), {"accuracy": 0.5})
    with progress.Show("a", 2) as show:
        show(result, {"seconds": 1.0, "clients_per_second": 2.0})
        progress.say("a note")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["report", "."], "interrupted.\n"),
        (
            ["run", *TINY],
            "interrupted: finished rounds are saved, `fedpara resume` continues a run that has begun.\n",
        ),
    ],
)
def test_only_resumable_commands_mention_resume(cli, monkeypatch, words, says):
    def key(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedpara.apps.report.Library.of", key)
    monkeypatch.setattr("fedpara.apps.run.lay_out_all", key)
    assert cli(*words) == (130, "", says)


def test_the_progress_bar_shows_a_name_without_markup(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.Show("x[red]y", 1) as show:
        show(Round(Progress(1, {}, {}, {}, 0, 0), (0,), 1.0, 0, 0), {"clients_per_second": 1.0})
    assert "x[red]y" in terminal.getvalue()
