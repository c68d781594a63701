"""What is started together is stopped together: the server first, for it counts what its nodes do."""

import os
import time

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
