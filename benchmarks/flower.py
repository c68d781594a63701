"""What Flower costs: seconds a round next to the sequential engine, and bytes by three counters.

    python benchmarks/flower.py rounds    digits, MLP, 3 clients: sequential, Flower's simulator, a deployment
    python benchmarks/flower.py bytes     VGG16 at gamma 0.1: the meter, `flwr ls`, a counting TCP proxy

`bytes` runs without TLS, so that the proxy sees what travels: it looks for the bytes of every private factor in
the capture, and of every shared one, which must be there.
"""

import argparse
import os
import selectors
import socket
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from fedpara import parameterization
from fedpara.apps.flower.federation import Federation
from fedpara.apps.flower.processes import Processes
from fedpara.apps.flower.simulation import Simulation, follow
from fedpara.experiments import Experiment, Summary, run
from fedpara.experiments.build import build
from fedpara.experiments.run import lay_out
from fedpara.experiments.storage.checkpoint import PREVIOUS, final_checkpoint
from fedpara.experiments.storage.tensor_files import read_tensors

WINDOW = 64
DIGITS = Experiment(model="mlp", clients=3, cohort=3, rounds=6, lr=0.05, engine="flower")
VGG16 = Experiment(
    dataset="generated:cifar10",
    model="vgg16",
    scheme="pfedpara",
    gamma=0.1,
    split="iid",
    clients=2,
    cohort=2,
    rounds=2,
    epochs=None,
    steps=1,
    batch_size=4,
    lr=0.01,
    engine="flower",
)


class Proxy:
    """Forwards loopback connections to a port, counting and keeping every byte."""

    def __init__(self, port: int, capture: Path) -> None:
        self._port, self._file, self.bytes = port, capture.open("wb"), 0
        self._parts: dict[tuple[int, bool], list[bytes]] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        number = 0
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            number += 1
            threading.Thread(target=self._forward, args=(near, number), daemon=True).start()

    def _forward(self, near: socket.socket, number: int) -> None:
        far = socket.create_connection(("127.0.0.1", self._port))
        with near, far, selectors.DefaultSelector() as ready:
            ready.register(near, selectors.EVENT_READ, far)
            ready.register(far, selectors.EVENT_READ, near)
            while True:
                for key, _ in ready.select():
                    data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                    if not data:
                        return
                    key.data.sendall(data)
                    self.bytes += len(data)
                    self._parts.setdefault((number, key.fileobj is near), []).append(data)

    def close(self) -> None:
        """Each connection and direction whole, one after another: a message is then in one piece."""
        self._listener.close()
        for parts in self._parts.values():
            self._file.write(b"".join(parts) + bytes(WINDOW))
        self._file.close()


def deployed(
    experiment: Experiment, folder: Path, scratch: Path, proxied: bool = False
) -> tuple[Summary, int, int]:
    """The run, and of a proxied one what `flwr ls` and the proxy counted."""
    lay_out(experiment, folder)
    given: dict[str, str | int | float] = {"out": str(folder), "deadline": 300}
    with Processes() as processes:
        federation = Federation(
            scratch, experiment.clients, processes, given, {"OMP_NUM_THREADS": "1"}, secure=not proxied
        )
        federation.start_link()
        proxy = Proxy(federation.port, scratch / "capture") if proxied else None
        if not proxied:
            federation.register()
        for i in range(experiment.clients):
            federation.start_node(i, port=proxy.port if proxy else None)
        summary = follow(folder, federation.submit(), scratch / "run.log", None, None, None)
        if proxy is None:
            return summary, 0, 0
        (listed,) = federation.ask("ls")["runs"]
    proxy.close()
    return summary, int(listed["network-traffic"]["total-bytes"]), proxy.bytes


def rounds(scratch: Path) -> int:
    lay_out(DIGITS, scratch / "simulated")
    sequential = run(replace(DIGITS, engine="sequential"), scratch / "sequential")
    with Simulation([scratch / "simulated"], None, None) as simulation:
        simulated = simulation.resume(scratch / "simulated")
    deployment, _, _ = deployed(DIGITS, scratch / "deployed", scratch / "federation")
    print(
        f"{os.cpu_count()} cores, one thread a client, Python {sys.version.split()[0]}, torch {torch.__version__}\n"
    )
    print(
        "| digits, MLP, 3 clients, 1 epoch of batches of 32 | first round | later rounds, median |\n|---|---|---|"
    )
    for name, summary in (
        ("sequential", sequential),
        ("Flower, simulation", simulated),
        ("Flower, deployment, 3 nodes, TLS", deployment),
    ):
        times = [line["seconds"] for line in summary.timing]
        print(f"| {name} | {times[0]:.2f} s | {median(times[1:]):.3f} s |")
    states = [final_checkpoint(scratch / name).state for name in ("sequential", "simulated", "deployed")]
    same = all(torch.equal(state[name], tensor) for state in states[1:] for name, tensor in states[0].items())
    print(f"\nThe three final states are {'equal, bit for bit' if same else 'NOT equal'}.")
    return 0 if same else 1


def bytes_(scratch: Path) -> int:
    federation = scratch / "federation"
    summary, listed, proxied = deployed(VGG16, scratch / "run", federation, proxied=True)
    metered = summary.bytes_up + summary.bytes_down
    print("| VGG16, gamma 0.1, 2 clients, 2 rounds | MB | of the meter's |\n|---|---|---|")
    for name, count in (
        ("the meter", metered),
        ("`flwr ls`, network-traffic", listed),
        ("TCP proxy", proxied),
    ):
        print(f"| {name} | {count / 1e6:.3f} | {count / metered:.4%} |")
    capture = (federation / "capture").read_bytes()
    kept = [_read(path) for path in sorted(federation.glob("node-*/memory/**/*.safetensors"))]
    model = build(VGG16).task.model
    start = {name: model.state_dict()[name] for name in parameterization.private(model)}
    private = [tensor for state in (*kept, start) for tensor in state.values()]
    shared = _read(scratch / "run" / PREVIOUS)  # what the second round's broadcast carried
    seen = sum(_window(t) in capture for t in private), sum(_window(t) in capture for t in shared.values())
    print(
        f"\nIn the capture: {seen[0]} of {len(private)} private factors ({len(kept)} files of clients and the start),"
    )
    print(f"{seen[1]} of {len(shared)} shared tensors.")
    close = max(abs(count / metered - 1) for count in (listed, proxied)) < 0.01
    return 0 if close and private and seen == (0, len(shared)) else 1


def _read(path: Path) -> dict[str, torch.Tensor]:
    state, _ = read_tensors(path)
    return {name: t for name, t in state.items() if t.numel() * t.element_size() >= WINDOW}


def _window(tensor: torch.Tensor) -> bytes:
    """Some bytes of its middle: enough to know it by."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    start = (len(raw) - WINDOW) // 8 * 4
    return bytes(raw[max(0, start) : max(0, start) + WINDOW].tolist())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("rounds", "bytes"))
    what = parser.parse_args().what
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="fl-") as name:
        return rounds(Path(name)) if what == "rounds" else bytes_(Path(name))


if __name__ == "__main__":
    sys.exit(main())
