"""What is started together is stopped together: the server first, for it counts what its nodes do."""

import os
import signal
import subprocess
import sys
import time

import pytest
from living import alive

from fedpara.apps.flower_processes import Processes, descendants

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


def test_the_server_goes_first_and_nothing_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Processes() as processes:
        started = []
        for name in ("server", "node"):
            started.append(processes.start(["python", "-c", TOLD, name], os.environ, tmp_path / "log"))
            while not (tmp_path / name).exists() or not (tmp_path / name).read_text():
                assert started[-1].poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.01)
        assert all(len(descendants(process.pid)) == 1 for process in started)
    assert (tmp_path / "order").read_text().split() == ["server", "node"]
    assert all(process.poll() == 0 for process in started)
    assert not processes.running


PARENT = """
import os, sys, time
from pathlib import Path
from fedpara.apps.flower_processes import Processes
with Processes() as processes:
    gone = processes.start(["python", "-c", "pass"], os.environ, Path("log"))
    gone.wait()
    processes.forget(gone)
    processes.start(["python", "-c", sys.argv[1], "server"], os.environ, Path("log"))
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=lambda n: n.name)
def test_whatever_ends_the_program_ends_what_it_started(tmp_path, number):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, TOLD], cwd=tmp_path, stderr=subprocess.DEVNULL
    ) as parent:
        while not (tmp_path / "server").exists() or not (tmp_path / "server").read_text():
            assert parent.poll() is None
            time.sleep(0.01)
        family = set(descendants(parent.pid))
        assert len(family) == 3, "the watchdog, the server and its child"
        parent.send_signal(number)
    end = time.monotonic() + 30
    while alive(family) and time.monotonic() < end:
        time.sleep(0.01)
    assert not alive(family)


def test_a_signal_that_nohup_has_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Processes():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signal.getsignal(signal.SIGTERM) is not signal.default_int_handler
