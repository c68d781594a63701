"""Attack on `--engine flower`: a process that knows Ray's port tries to run code inside the run.

It may take minutes: `make test-deploy` runs it.
"""

import http.client
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedpara.apps.flower.watchdog import family as family_of
from fedpara.experiments import Experiment
from fedpara.experiments.run import lay_out, resume

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")
pytest.importorskip("ray", reason="Flower's simulator is not installed: pip install '.[flower]'")
grpc = pytest.importorskip("grpc")
pytestmark = [
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="listening ports are read from /proc"),
]

EXPERIMENT = Experiment(model="mlp", clients=5, cohort=3, rounds=20, lr=0.05, batch_size=16, engine="flower")
FEDPARA = "from fedpara.apps.cli import main; main()"
ATTACK = """
import sys
import ray

ray.init(address=f"127.0.0.1:{sys.argv[1]}", log_to_driver=False)

@ray.remote(num_cpus=0)
def inside(path):
    open(path, "w").write("this ran in the victim's cluster")

ray.get(inside.remote(sys.argv[2]))
"""
# One method of each Ray service that could run code or reveal data.
METHODS = (
    "ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "ray.rpc.JobInfoGcsService/AddJob",
    "ray.rpc.NodeManagerService/GetNodeStats",
    "ray.rpc.CoreWorkerService/PushTask",
    "ray.rpc.ObjectManagerService/Push",
)


def listening(pids):
    """(program, address, port) of every TCP socket these processes listen on."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = row.split()
            if words[3] == "0A":
                sockets[words[9]] = words[1].split(":")
    found = set()
    for pid in pids:
        with suppress(OSError):
            for handle in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    inode = os.readlink(handle).removeprefix("socket:[").removesuffix("]")
                    if inode in sockets:
                        name = Path(f"/proc/{pid}/comm").read_text().strip()
                        found.add((name, sockets[inode][0], int(sockets[inode][1], 16)))
    return found


LOOPBACK = {
    "0100007F": "127.0.0.1",
    "0000000000000000FFFF00000100007F": "::ffff:127.0.0.1",
    "00000000000000000000000001000000": "::1",
}


def verdicts(port):
    """How the Ray services on this port respond without a token. UNIMPLEMENTED means no such service."""
    said = set()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for method in METHODS:
            call = channel.unary_unary(f"/{method}", lambda sent: sent, lambda got: got)
            try:
                call(b"", timeout=10)
                said.add("ANSWERED")
            except grpc.RpcError as error:
                said.add(error.code().name)
    return said - {"UNIMPLEMENTED"}


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """The process, its listening sockets once its clients are up, and its folder."""
    folder = tmp_path_factory.mktemp("ray")
    words = ["run", "--engine", "flower", "--out", "a", "--model", "mlp", "--clients", "5", "--cohort", "3"]
    words += ["--rounds", str(EXPERIMENT.rounds), "--lr", "0.05", "--batch-size", "16"]
    with (folder / "out.txt").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", FEDPARA, *words],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=out,
        )
    try:
        end = time.monotonic() + 240
        ports = set()
        while process.poll() is None and time.monotonic() < end:
            ports = listening(family_of(process.pid))
            if {"gcs_server", "raylet"} <= {name for name, *_ in ports} and any(
                name.startswith("ray::Client") for name, *_ in ports
            ):
                break
            time.sleep(0.5)
        assert process.poll() is None, (folder / "out.txt").read_text()
        yield process, ports, folder
    finally:
        process.kill()  # only if a test failed: the watchdog ends the rest
        process.wait()


def test_a_process_that_knows_the_port_cannot_run_code(running):
    """It gives up, or Ray keeps rejecting it."""
    _, ports, folder = running
    (port,) = (port for name, _, port in ports if name == "gcs_server")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    clean["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else Ray looks for 127.0.0.1 on another interface
    with (folder / "attack.txt").open("w") as said:
        attack = subprocess.Popen(
            [sys.executable, "-c", ATTACK, str(port), str(folder / "owned")],
            env=clean,
            stdout=said,
            stderr=said,
        )
    try:
        end = time.monotonic() + 120
        while attack.poll() is None and time.monotonic() < end and not (folder / "owned").exists():
            if "InvalidAuthToken" in (folder / "attack.txt").read_text():
                break
            time.sleep(0.1)
        assert not (folder / "owned").exists(), "the attacker's code ran"
        assert "Authentication token is missing or incorrect" in (folder / "attack.txt").read_text()
    finally:
        attack.kill()
        attack.wait()


def test_every_port_is_on_loopback_and_needs_the_token(running):
    process, ports, _ = running
    assert {address for _, address, _ in ports} <= LOOPBACK.keys(), ports
    ray = [(name, port) for name, _, port in ports if not name.startswith("flower")]
    agents = [port for name, port in ray if name.startswith("ray::RuntimeEnv")]
    assert len(ray) >= 6
    for name, port in ray:
        if port not in agents:
            assert verdicts(port) == {"UNAUTHENTICATED"}, name
    for port in agents:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("POST", "/get_or_create_runtime_env", b"")
        assert connection.getresponse().status in (401, 403)
        connection.close()
    shown = subprocess.run(["ps", "axww", "-o", "args="], capture_output=True, text=True, check=True).stdout
    (token,) = {
        word.removeprefix("RAY_AUTH_TOKEN=")
        for pid in family_of(process.pid)
        for word in _environment(pid)
        if word.startswith("RAY_AUTH_TOKEN=")
    }
    assert len(token) == 64
    assert token not in shown


def _environment(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    return []


def test_training_gives_the_same_result(running):
    process, _, folder = running
    assert process.wait(300) == 0, (folder / "out.txt").read_text()
    lay_out(replace(EXPERIMENT, engine="sequential"), folder / "b")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        resume(folder / "b")
    finally:
        torch.set_num_threads(threads)
    assert (folder / "a" / "metrics.jsonl").read_bytes() == (folder / "b" / "metrics.jsonl").read_bytes()
