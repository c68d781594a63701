"""A SuperLink and three SuperNodes on loopback, with TLS and node keys, behind nginx if it is installed.

It takes minutes: `make test-deploy` runs it.
"""

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from living import alive

from fedpara.apps.flower.app_folder import write_home
from fedpara.apps.flower.certificates import make_certificates
from fedpara.apps.flower.federation import NAME, Federation
from fedpara.apps.flower.processes import Processes, environment, free_port, program, wait_for_port
from fedpara.apps.flower.simulation import follow
from fedpara.apps.flower.watchdog import family as family_of
from fedpara.experiments import Experiment
from fedpara.experiments.run import lay_out, resume
from fedpara.experiments.storage.checkpoint import final_checkpoint

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")
pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]

EXPERIMENT = Experiment(
    model="mlp",
    scheme="pfedpara",
    algorithm="scaffold",
    personal=True,
    clients=3,
    cohort=3,
    rounds=2,
    lr=0.05,
    engine="flower",
)
NGINX = shutil.which("nginx", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"]))
CONFIG = Path(__file__).parents[3] / "docs" / "nginx.conf"


def start_nginx(federation, folder, sites="allow 127.0.0.1;\ndeny all;\n"):
    """Start nginx with docs/nginx.conf; only paths and ports differ. `sites` is the list of addresses."""
    port = free_port()
    text = CONFIG.read_text()
    (folder / "sites.conf").write_text(sites)
    for ours, theirs in {
        "127.0.0.1:8000": f"127.0.0.1:{federation.port}",
        "listen 8443": f"listen 127.0.0.1:{port}",
        "/etc/fedpara/sites": f"{folder}/sites",
        "/etc/fedpara/": f"{federation.certificates}/",
        "/run/fedpara-nginx.pid": f"{folder}/nginx.pid",
        "/var/log/fedpara-nginx.log": f"{folder}/nginx.log",
        "/var/lib/fedpara/": f"{folder}/",
    }.items():
        assert ours in text
        text = text.replace(ours, theirs)
    (folder / "nginx.conf").write_text(text)
    words = ["-c", str(folder / "nginx.conf"), "-e", str(folder / "nginx.log"), "-g", "daemon off;"]
    with (folder / "nginx.out").open("ab") as log:
        process = subprocess.Popen([NGINX, *words], stdout=log, stderr=log, start_new_session=True)
    federation.processes.running.append(process)
    wait_for_port(port, process, folder / "nginx.log")
    return port


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """The federation, the run folder, the port that nodes connect to, and the submitted run."""
    folder = tmp_path_factory.mktemp("deployed")
    lay_out(EXPERIMENT, folder / "run")
    with Processes() as processes:
        given = {"out": str(folder / "run"), "deadline": 200, "hello": 200, "wait": 200}
        federation = Federation(folder / "federation", 3, processes, given, {"OMP_NUM_THREADS": "1"})
        federation.start_link()
        port = start_nginx(federation, folder) if NGINX else federation.port
        federation.register()
        for i in range(3):
            federation.start_node(i, port=port)
        greedy(federation, folder / "greedy", port)
        log = federation.folder / "node-7" / "log.txt"
        await_words({log: "SuperNode ID"})  # the run says hello to every node that is connected
        yield federation, folder / "run", port, federation.submit()


def greedy(federation, folder, port):
    """Start a fourth node that claims every client. Its key is registered with the SuperLink."""
    make_certificates(folder, ["127.0.0.1"], 1)
    register(federation, folder / "node-0.pub")
    federation.start_node(7, port=port, key=folder / "node-0", more="client=0 clients=1")


def await_words(expected, seconds=120):
    """Wait until each of the logs contains its words."""
    end = time.monotonic() + seconds
    while not all(words in log.read_text() for log, words in expected.items()):
        assert time.monotonic() < end, [log.read_text() for log in expected]
        time.sleep(0.2)


def register(federation, key):
    got = flwr(federation.folder / "flwr", "supernode", "register", str(key))
    assert got.returncode == 0, got.stdout + got.stderr


def flwr(home, *words):
    command = [program("flwr"), *words, NAME]
    return subprocess.run(command, env=environment(home), capture_output=True, text=True)


def test_the_deployment_equals_the_sequential_engine(deployed, tmp_path):
    federation, folder, _, submitted = deployed
    follow(folder, submitted, federation.folder / "run.log", None, None)
    lay_out(EXPERIMENT, tmp_path / "run")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        resume(tmp_path / "run", engine="sequential")
    finally:
        torch.set_num_threads(threads)
    assert (folder / "metrics.jsonl").read_bytes() == (tmp_path / "run" / "metrics.jsonl").read_bytes()
    ours = final_checkpoint(tmp_path / "run").state
    theirs = final_checkpoint(folder).state
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for i in range(3):
        memory = federation.folder / f"node-{i}" / "memory"
        assert sorted(path.name for path in memory.glob("*/*/*")) == [
            "1.safetensors",
            "2.safetensors",
        ]


SITES = """
from pathlib import Path
import torch
from fedpara.data import Examples

def load(node_config):
    count = 0 if node_config.get("server") else int(Path(node_config["file"]).read_text())
    images = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(count))
    return Examples(images, (images.mean((1, 2, 3)) > 0).long(), 2), None
"""


def test_each_node_of_flower_up_reads_its_own_data(tmp_path):
    (tmp_path / "sites.py").write_text(SITES)
    for i, count in enumerate((30, 40)):
        (tmp_path / f"count-{i}").write_text(str(count))
    chosen = {"dataset": "load:sites:load", "model": "mlp", "clients": 2, "cohort": 2, "rounds": 1}
    fields = [word for name, value in chosen.items() for word in ("--set", f"{name}={value}")]
    config = ["--node-config", f'file="{tmp_path}/count-{{node}}"', "--nodes", "2", "--out", "run"]
    command = [sys.executable, "-c", "from fedpara.apps.cli import main; main()", "flower", "up"]
    done = subprocess.run([*command, *fields, *config], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "examples.json").read_text()) == {"0": 30, "1": 40}


def test_a_node_that_claims_every_client_is_rejected(deployed):
    """Flower admits its registered key; the run above gave the same bits as without it."""
    federation, folder, *_ = deployed
    (attacker,) = [
        node for node in federation.ask("supernode", "list")["nodes"] if _is_greedy(federation, node)
    ]
    text = (folder / "log.txt").read_text()
    assert f"node {attacker['node-id']} refused: its key is not in the server's keys file" in text
    assert "is number 0 of 1" not in text
    assert not (federation.folder / "node-7" / "memory").exists()


def _is_greedy(federation, node):
    return f"SuperNode ID: {node['node-id']}" in (federation.folder / "node-7" / "log.txt").read_text()


def test_strangers_are_rejected(deployed, tmp_path):
    """A node with an unregistered key, and one that does not trust the server's certificate."""
    federation, *_ = deployed
    make_certificates(tmp_path / "other", ["127.0.0.1"], 1)
    key = tmp_path / "other" / "node-0"
    trusting = ssl.create_default_context(cafile=tmp_path / "other" / "ca.crt")
    with (
        socket.create_connection(("127.0.0.1", federation.port)) as plain,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        trusting.wrap_socket(plain, server_hostname="127.0.0.1")
    federation.start_node(8, key=key)
    federation.start_node(9, key=key, ca=tmp_path / "other" / "ca.crt")
    logs = {i: federation.folder / f"node-{i}" / "log.txt" for i in (8, 9)}
    await_words({logs[8]: "Failed to activate SuperNode", logs[9]: "Connection attempt failed"})
    assert all("SuperNode ID" not in log.read_text() for log in logs.values())
    link = (federation.folder / "superlink.log").read_text()
    assert link.count("No SuperNode found with the given public key") == 1
    assert len(federation.ask("supernode", "list")["nodes"]) == 4


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx-light")
def test_the_proxy_admits_only_node_requests(deployed, tmp_path):
    """The nodes above connect through it."""
    federation, _, port, _ = deployed
    make_certificates(tmp_path / "other", ["127.0.0.1"], 1)
    key = str(tmp_path / "other" / "node-0.pub")
    write_home(tmp_path / "outside", port, federation.certificates / "ca.crt")
    for words in (["supernode", "register", key], ["ls"], ["run", str(federation.folder / "app")]):
        refused = flwr(tmp_path / "outside", *words)
        assert refused.returncode != 0, refused.stdout
        assert "403" in refused.stdout + refused.stderr
    register(federation, key)
    for path in (
        "/v1/fleet/../control/list-runs",
        "/v1/fleet/..%2fcontrol/list-runs",
        "//v1/control/list-runs",
        "/",
    ):
        assert status(knock(federation, port, path)) == 403, path


def knock(federation, port, path="/v1/fleet/push-object", length=0, body=b"", rest="\r\n\r\n"):
    """Send a stranger's request over TLS, without reading the response; an empty `rest` leaves the header open."""
    trusting = ssl.create_default_context(cafile=federation.certificates / "ca.crt")
    plain = socket.create_connection(("127.0.0.1", port), timeout=30)
    door = trusting.wrap_socket(plain, server_hostname="127.0.0.1")
    words = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/protobuf"]
    door.sendall("\r\n".join([*words, f"Content-Length: {length}{rest}"]).encode() + body)
    return door


def status(door):
    """The HTTP status, or 0 if the connection was closed without one."""
    with door:
        try:
            response = door.recv(64)
        except ConnectionResetError:
            return 0
    return int(response.split()[1]) if response else 0


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx-light")
def test_the_proxy_bounds_what_strangers_cost(deployed, tmp_path):
    """It limits size, number and duration of requests; the SuperLink alone would read 200 MB from a stranger."""
    federation, *_ = deployed
    port = start_nginx(federation, tmp_path)
    slow = knock(federation, port, rest="")
    began = time.monotonic()
    assert status(knock(federation, port, length=9 << 20)) == 413
    assert status(knock(federation, port, length=3, body=b"abc")) != 413
    held = [knock(federation, port, length=1000, body=b"x") for _ in range(32)]
    time.sleep(1)  # nginx counts a request after reading its header
    assert status(knock(federation, port, length=1000, body=b"x")) == 503
    for door in held:
        door.close()
    assert status(slow) == 0
    assert 5 < time.monotonic() - began < 25, "a header has ten seconds to arrive"


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx-light")
def test_the_proxy_can_admit_known_addresses_only(deployed, tmp_path):
    federation, *_ = deployed
    port = start_nginx(federation, tmp_path, sites="allow 192.0.2.1;\ndeny all;\n")
    assert status(knock(federation, port)) == 403


def a_node(family):
    """The pid of a SuperNode among these processes. (`ww` prevents truncated lines.)"""
    listed = subprocess.run(["ps", "axww", "-o", "pid=,args="], capture_output=True, text=True, check=True)
    rows = [line.split(None, 1) for line in listed.stdout.splitlines()]
    return next(int(pid) for pid, words in rows if int(pid) in family and "flower-supernode" in words)


def test_ctrl_c_stops_a_federation(tmp_path):
    """Including the descendants of a killed node, and the folder that holds the keys."""
    (tmp_path / "tmp").mkdir()
    words = [
        "flower",
        "up",
        "--nodes",
        "2",
        "--out",
        "run",
        "--set",
        "model=mlp",
        "--set",
        "clients=2",
        "--set",
        "cohort=2",
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", "from fedpara.apps.cli import main; main()", *words],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts the suite in the background ignores SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        end = time.monotonic() + 200
        log = tmp_path / "run" / "log.txt"
        while process.poll() is None and time.monotonic() < end:
            if log.exists() and "is number 1 of 2" in log.read_text():  # the run has started, with every node
                break
            time.sleep(0.2)
        family = family_of(process.pid)
        assert len(alive(family)) >= 3  # at least the SuperLink and two nodes
        assert list((tmp_path / "tmp").glob("fedpara-*/certificates/ca.key"))
        os.kill(a_node(family), signal.SIGKILL)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=100)
        assert process.returncode == 130, err
        assert "Traceback" not in err
        assert not alive(family)
        assert not list((tmp_path / "tmp").glob("fedpara-*"))
    finally:
        process.kill()  # only if the test failed: the watchdog ends the rest
        process.wait()
