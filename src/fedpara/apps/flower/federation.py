"""A federation on this machine: a SuperLink and nodes on loopback, with TLS and node keys."""

import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedpara.apps.flower.app_folder import write_app, write_home
from fedpara.apps.flower.certificates import FILE, make_certificates
from fedpara.apps.flower.processes import (
    Processes,
    environment,
    free_port,
    program,
    require,
    tail,
    wait_for_port,
)
from fedpara.errors import RunError

NAME = "federation"
LOOPBACK = "127.0.0.1"
Child = subprocess.Popen[bytes]
RESTART = 5.0
"""Seconds between two starts of a node that exits."""


class Federation:
    """`folder` holds everything: certificates, the SuperLink's state, each node's home and log.

    Each part is started separately, so it can be killed and restarted.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int,
        processes: Processes,
        given: Mapping[str, str | int | float],
        env: Mapping[str, str] | None = None,
        secure: bool = True,
        sources: Mapping[str, Path] | None = None,
        node_config: str = "",
    ) -> None:
        """The app contains `sources`. `secure=False` turns off TLS and keys; use it only to inspect the traffic.

        `node_config` is part of every node's config; in it, {node} stands for the node's number.
        """
        require()
        self.folder, self.nodes, self.processes = folder, nodes, processes
        self.port = free_port()
        self.certificates = folder / "certificates"
        self._env = dict(env or {})
        self.secure = secure
        self._node_config = node_config
        self._started: dict[int, float] = {}
        make_certificates(self.certificates, [LOOPBACK, "localhost"], nodes)
        keys = {"keys": str(self.certificates / FILE)} if secure else {}
        write_app(folder / "app", {**keys, **given}, sources)
        write_home(folder / "flwr", self.port, self.certificates / "ca.crt" if secure else None)

    def start_link(self) -> Child:
        """Start the SuperLink. Its state is on disk, so node keys stay registered after a restart."""
        at = self.certificates
        log = self.folder / "superlink.log"
        trust = ["--ssl-ca-certfile", str(at / "ca.crt"), "--ssl-certfile", str(at / "server.pem")]
        trust += ["--ssl-keyfile", str(at / "server.key"), "--enable-supernode-auth"]
        link = self._start(
            "flower-superlink",
            ["--host", LOOPBACK, "--port", str(self.port)],
            trust if self.secure else ["--insecure"],
            ["--database", str(self.folder / "state.db")],
            log=log,
        )
        wait_for_port(self.port, link, log)
        return link

    def register(self) -> None:
        """Register each node's public key. Nodes start afterwards."""
        keys = [self.certificates / f"node-{i}.pub" for i in range(self.nodes)]
        log = self.folder / "register.log"
        started = [self._start("flwr", ["supernode", "register", str(key), NAME], log=log) for key in keys]
        for process in started:
            if process.wait(120) != 0:
                raise RunError(f"a node's key could not be registered: {tail(log)}")
            self.processes.forget(process)

    def start_node(
        self,
        i: int,
        *,
        port: int | None = None,
        key: Path | None = None,
        ca: Path | None = None,
        more: str = "",
    ) -> Child:
        """Start node `i`. `port`, `key` and `ca` replace the federation's; `more` is appended to the node's config."""
        self._started[i] = time.monotonic()
        home = self.folder / f"node-{i}"
        home.mkdir(exist_ok=True)
        own = self._node_config.replace("{node}", str(i))
        config = f'partition-id={i} num-partitions={self.nodes} memory="{home / "memory"}" {own} {more}'
        trust = ["--root-certificates", str(ca or self.certificates / "ca.crt")]
        trust += ["--auth-supernode-private-key", str(key or self.certificates / f"node-{i}")]
        return self._start(
            "flower-supernode",
            ["--superlink", f"{LOOPBACK}:{port or self.port}", "--port", str(free_port())],
            trust if self.secure else ["--insecure"],
            ["--node-config", config.strip()],
            log=home / "log.txt",
            home=home / "flwr",
        )

    def restart_ended(self, nodes: list[Child]) -> None:
        """Restart the nodes that have exited. Call this repeatedly, as a service manager does.

        A killed node counts as connected until its heartbeat is overdue, for up to 60 s. Until then the SuperLink
        refuses its key, and the restarted node exits.
        """
        for i, node in enumerate(nodes):
            if node.poll() is not None and time.monotonic() >= self._started[i] + RESTART:
                self.processes.kill(node)  # its remaining descendants
                nodes[i] = self.start_node(i)

    def submit(self, run_config: str = "") -> Child:
        words = ["--run-config", run_config] if run_config else []
        return self._start(
            "flwr", ["run", str(self.folder / "app"), NAME, "--stream"], words, log=self.folder / "run.log"
        )

    def ask(self, *words: str) -> Any:
        """The output of `flwr WORDS --format json`."""
        env = environment(self.folder / "flwr", self._env)
        command = [program("flwr"), *words, NAME, "--format", "json"]
        got = subprocess.run(command, env=env, capture_output=True, text=True)
        if got.returncode != 0:
            raise RunError(f"flwr {' '.join(words)} failed: {(got.stdout + got.stderr)[-600:]}")
        return json.loads(got.stdout)

    def _start(self, program: str, *words: list[str], log: Path, home: Path | None = None) -> Child:
        env = environment(home or self.folder / "flwr", self._env)
        return self.processes.start([program, *(word for part in words for word in part)], env, log)


def ended(process: Child, seconds: float) -> bool:
    """Whether the process exits by itself within this time."""
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    return process.poll() is not None
