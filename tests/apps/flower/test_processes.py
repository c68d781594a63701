"""Processes are stopped together, the server first, and nothing is left running."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from living import alive

from fedpara.apps.flower.processes import Processes
from fedpara.apps.flower.watchdog import family as family_of

TOLD = """
import signal, subprocess, sys
def told(*_):
    open("order", "a").write(sys.argv[1] + "\\n")
    sys.exit()
signal.signal(signal.SIGTERM, told)
child = subprocess.Popen(["sleep", "60"])
open(sys.argv[1], "w").write(str(child.pid))
child.wait()
signal.pause()
"""


def test_the_server_stops_first_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Processes() as processes:
        started = []
        for name in ("server", "node"):
            started.append(processes.start(["python", "-c", TOLD, name], os.environ, tmp_path / "log"))
            while not (tmp_path / name).exists() or not (tmp_path / name).read_text():
                assert started[-1].poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.01)
        assert all(len(family_of(process.pid)) == 1 for process in started)
    assert (tmp_path / "order").read_text().split() == ["server", "node"]
    assert all(process.poll() == 0 for process in started)
    assert not processes.running


LEAVES = """
import fcntl, os, subprocess, sys, time
for own in (False, True):
    held = open(f"held-{own}", "w")
    fcntl.flock(held, fcntl.LOCK_EX)
    child = subprocess.Popen(["sleep", "60"], start_new_session=own, pass_fds=[held.fileno()])
    held.close()
    print(child.pid, flush=True)
time.sleep(60)
"""


def test_descendants_of_a_killed_process_end_too(tmp_path, monkeypatch):
    """In its session or in a new one. Their locks are free after the block."""
    monkeypatch.chdir(tmp_path)
    with Processes() as processes:
        started = processes.start(["python", "-c", LEAVES], os.environ, tmp_path / "log")
        while (tmp_path / "log").read_text().count("\n") < 2:
            assert started.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.01)
        left = {int(line) for line in (tmp_path / "log").read_text().split()}
        os.kill(started.pid, signal.SIGKILL)
        started.wait()
        assert alive(left) == left
        stranger = subprocess.Popen(["sleep", "60"])
    assert not alive(left)
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()
    for own in (False, True):
        with (tmp_path / f"held-{own}").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


PARENT = """
import os, sys, time
from pathlib import Path
from fedpara.apps.flower.processes import Processes
with Processes() as processes:
    folder = processes.folder()
    (folder / "ca.key").write_text("secret")
    Path("folder").write_text(str(folder))
    gone = processes.start(["python", "-c", "pass"], os.environ, Path("log"))
    gone.wait()
    processes.forget(gone)
    processes.start(["python", "-c", sys.argv[1], "server"], os.environ, Path("log"))
    time.sleep(60)
"""


def begun(parent, folder):
    """The parent's descendants, once the server has written its file."""
    while not (folder / "server").exists() or not (folder / "server").read_text():
        assert parent.poll() is None
        time.sleep(0.01)
    family = family_of(parent.pid)
    assert len(family) == 3, "the watchdog, the server and its child"
    return family


def gone(family, folder):
    """Whether the processes and the folder disappear soon."""
    end = time.monotonic() + 30
    while (alive(family) or folder.exists()) and time.monotonic() < end:
        time.sleep(0.01)
    return not alive(family) and not folder.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=lambda n: n.name)
def test_any_signal_that_ends_the_program_ends_its_processes(tmp_path, number):
    """And removes the folder, which holds keys."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, TOLD], cwd=tmp_path, stderr=subprocess.DEVNULL
    ) as parent:
        family = begun(parent, tmp_path)
        folder = Path((tmp_path / "folder").read_text())
        assert (folder / "ca.key").exists()
        parent.send_signal(number)
    assert gone(family, folder)


STUBBORN = TOLD.replace("sys.exit()", "return")


def test_a_second_ctrl_c_kills_at_once(tmp_path):
    """After the first Ctrl-C the server has ten seconds to stop."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, STUBBORN],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
        # A shell that starts the suite in the background ignores SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as parent:
        family = begun(parent, tmp_path)
        folder = Path((tmp_path / "folder").read_text())
        parent.send_signal(signal.SIGINT)
        while not (tmp_path / "order").exists():  # the server was asked
            assert parent.poll() is None
            time.sleep(0.01)
        parent.send_signal(signal.SIGINT)
        parent.wait(8)
        assert not alive(family)
        assert not folder.exists()


def test_a_signal_ignored_by_nohup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Processes():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signal.getsignal(signal.SIGTERM) is not signal.default_int_handler
