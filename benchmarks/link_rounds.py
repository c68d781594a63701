"""Seconds of a round by link and by algorithm: VGG16 (FedPara, gamma 0.1), 16 clients, the batched engine.

    python benchmarks/link_rounds.py                         on the CPU, one thread, without training
    python benchmarks/link_rounds.py --device cuda           the same on a GPU
    python benchmarks/link_rounds.py --device cuda --train   with the paper's local steps: the whole round

Without training, a step adds fixed random numbers to the lanes. What is left of a round is its messages: the server's
is encoded and read, every client's update is encoded, checked, decoded and added to the mean, and memories are loaded
and kept. A link stands for both directions. The rows "in files" keep memories in files, as a run folder does, the
others in this process. Scores and checkpoints are no part of a round here.

With `--train` a client takes 80 steps of 64 images (10 epochs of 500), as in the paper's run on CIFAR-10.
The first round of a row does not count, and rows take turns in random order.
"""

import argparse
import platform
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from links import LINKS, processor

import fedpara as fp
from fedpara import algorithms, data, models
from fedpara.engines.batched.engine import Batched
from fedpara.engines.memory import ClientMemory, InMemory, PendingMemory
from fedpara.engines.participation.cohorts import Cohorts
from fedpara.engines.program import make_program
from fedpara.engines.progress import Schedule
from fedpara.engines.server.rounds import run_rounds
from fedpara.engines.session import Session
from fedpara.experiments.storage.client_files import OnDisk

CLIENTS, BATCH, EPOCHS = 16, 64, 10
FEEDBACK = ("int8(feedback=True)", "topk(0.01, feedback=True)")
ALGORITHMS = ("fedavg", "scaffold", "feddyn")


class Untrained(Batched):
    """Adds the same random numbers to the lanes in place of a step."""

    def _tick(self, plan: Any, lane_state: Any, of: Any) -> Callable[[], None]:
        if False not in of.ticks:
            tensors = list(lane_state.parameters.values())
            torch.manual_seed(0)
            noise = [1e-3 * torch.randn_like(tensor) for tensor in tensors]
            of.ticks[False] = lambda: torch._foreach_add_(tensors, noise)
        return of.ticks[False]  # type: ignore[no-any-return]


def federation(examples: int) -> fp.FederatedData:
    generator = torch.Generator().manual_seed(0)
    count = CLIENTS * examples
    images = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 10, (count,), generator=generator)
    train = data.Examples(images, labels, 10, mean=(0.5,) * 3, std=(0.25,) * 3)
    return fp.FederatedData(train, data.iid(labels, CLIENTS, 0))


def engine_of(algorithm: str, device: str, train: bool) -> Batched:
    torch.manual_seed(0)
    model = models.build("vgg16", classes=10, shape=(3, 32, 32))
    fp.factorize(model, fp.FedPara(gamma=0.1), models.rule("vgg16"))
    local = algorithms.Local(lr=1e-3, batch_size=BATCH, epochs=EPOCHS if train else 1)
    session = Session(make_program(model), algorithms.build(algorithm, local), fp.Link(), 0)
    task = fp.Task(model, augment="crop-flip" if train else "none")
    held = federation(500 if train else BATCH)
    kind = Batched if train else Untrained
    return kind(session, task, held, InMemory(), cohorts=Cohorts(0, CLIENTS, CLIENTS), device=device)


def seconds(engine: Batched, link: str, rounds: int, memory: ClientMemory | None = None) -> list[float]:
    """Of each round but the first. The engine keeps its compiled step from link to link."""
    session = replace(engine.session, link=fp.Link(up=link, down=link))
    engine.session, engine.memory = session, PendingMemory(memory or InMemory())
    for one_pass, training in zip(engine._passes, session.trainings, strict=True):
        one_pass.session = training
    engine.examples._session = session
    engine.examples.forget_plan()
    schedule = Schedule(rounds + 1, CLIENTS, CLIENTS, engine.data.size)
    marks = []
    for _ in run_rounds(session, engine, schedule, personal=False):
        if engine.on_gpu:
            torch.cuda.synchronize()
        marks.append(time.perf_counter() if engine.on_gpu else time.process_time())
    return [after - before for before, after in pairwise(marks)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--train", action="store_true", help="with local steps; on a GPU")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3, help="per turn, beside the first")
    parser.add_argument("--links", nargs="*", default=[*LINKS, *FEEDBACK])
    given = parser.parse_args()
    torch.set_num_threads(1 if given.device == "cpu" else torch.get_num_threads())
    where = torch.cuda.get_device_name() if given.device.startswith("cuda") else f"{processor()}, 1 thread"
    print(f"{where}; Python {platform.python_version()}, torch {torch.__version__}")
    print(
        f"Seconds of a round, {'with' if given.train else 'without'} local steps: VGG16, FedPara, {CLIENTS} clients"
    )
    print(f"CPU time; on a GPU elapsed time. Median of {given.turns} turns of {given.rounds} rounds\n")
    engines = {name: engine_of(name, given.device, given.train) for name in ALGORITHMS}
    rows = [("fedavg", link, "") for link in given.links]
    rows += [(name, "float32", where) for name in ALGORITHMS[1:] for where in ("", ", in files")]
    found: dict[tuple[str, str, str], list[float]] = {row: [] for row in rows}
    for _ in range(given.turns):
        for row in random.sample(rows, len(rows)):
            with tempfile.TemporaryDirectory() as folder:
                memory = OnDisk(Path(folder)) if row[2] else None
                found[row] += seconds(engines[row[0]], row[1], given.rounds, memory)
    print("| algorithm | link | seconds | least | of float32 FedAvg |")
    print("|---|---|---|---|---|")
    exact = median(found[rows[0]])
    for (name, link, where), times in found.items():
        print(
            f"| {name}{where} | {link} | {median(times):.3f} | {min(times):.3f} | {median(times) / exact:.2f} |"
        )


if __name__ == "__main__":
    main()
