"""Client updates a second: both engines against a bare PyTorch loop, pfl and Flower's simulator.

    python benchmarks/round.py                both workloads, every row whose package is installed
    python benchmarks/round.py --no-flower    without the row that takes half a minute to start
    python benchmarks/round.py --deploy       then seconds a round on Flower: simulated, and deployed over TLS
    python benchmarks/round.py --smoke        few rounds, no Flower: only that it runs

Digits, MLP 64-256-10, plain SGD, no evaluation, one thread. The first round of a run is not timed, so that
starting up is not either. The loops and pfl take the same cohorts and batches as fedpara, in turns, and must end
at its model (pfl does not shuffle: its batches are the same where one holds all of a client's examples, as here).
Flower draws its own cohorts and runs once, after the others.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedpara as fp
from fedpara import algorithms, data, models
from fedpara.engines.local.batches import batches
from fedpara.engines.participation.cohorts import Cohorts
from fedpara.engines.rng import numpy_rng
from fedpara.state import State, mean

SEED = 0
LR = 0.1
OURS = "fedpara, sequential"
AUTO = "fedpara, batched (auto)"
FLOWER_HOME = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@dataclass(frozen=True)
class Workload:
    clients: int
    cohort: int
    epochs: int
    batch: int
    rounds: int

    @property
    def algorithm(self) -> algorithms.Algorithm:
        return algorithms.fedavg(lr=LR, epochs=self.epochs, batch_size=self.batch)


@dataclass(frozen=True)
class Timed:
    """Seconds of all rounds but the first, by the clock and of this process's CPU, and the final model."""

    wall: float
    cpu: float
    state: State


Row = Callable[[Workload], Timed]


class Watch:
    """Called at the end of each round."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def __call__(self, *_: object) -> None:
        self.marks.append((time.perf_counter(), time.process_time()))

    def timed(self, state: State) -> Timed:
        (wall, cpu), (wall_end, cpu_end) = self.marks[0], self.marks[-1]
        return Timed(wall_end - wall, cpu_end - cpu, state)


@cache
def federation(clients: int) -> fp.FederatedData:
    train, _ = data.load("digits")
    return fp.FederatedData(train, data.iid(train.targets, clients, SEED))


@cache
def ready(clients: int) -> list[tuple[Tensor, Tensor]]:
    """Each client's normalised inputs and labels, made once: the other rows find their data as they want it."""
    held = [federation(clients).client(i) for i in range(clients)]
    return [(data.normalise(e.inputs, e.mean, e.std), e.targets) for e in held]


@cache
def start() -> nn.Module:
    torch.manual_seed(SEED)
    return models.mlp(inputs=64, classes=10)


def ours(work: Workload, engine: str = "sequential") -> Timed:
    watch = Watch()
    run = fp.simulate(
        fp.Task(start()),
        federation(work.clients),
        work.algorithm,
        rounds=work.rounds,
        cohort=work.cohort,
        seed=SEED,
        engine=engine,
        on_round=watch,
    )
    return watch.timed(run.state)


def bare(work: Workload, by_hand: bool = False) -> Timed:
    """What one would write without a library; `by_hand` steps without torch.optim, as the engine does."""
    held, local, watch = ready(work.clients), work.algorithm.local, Watch()
    model = deepcopy(start()).train()
    parameters: list[torch.Tensor] = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=LR)
    x = {name: t.clone() for name, t in model.state_dict().items()}
    for t in range(1, work.rounds + 1):
        replies, sizes = [], []
        for client in Cohorts(SEED, work.clients, work.cohort).draw(t):
            model.load_state_dict(x)
            inputs, labels = held[client]
            total = torch.zeros(())
            for batch in batches(len(labels), local, numpy_rng(SEED, "batches", t, client)):
                index = torch.from_numpy(batch)
                loss = cross_entropy(model(inputs[index]), labels[index])
                if by_hand:
                    gradient = torch.autograd.grad(loss, parameters)
                    with torch.no_grad():
                        torch._foreach_add_(parameters, gradient, alpha=-LR)
                else:
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                total += loss.detach()
            replies.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            sizes.append(float(len(labels)))
        x = mean(replies, sizes)
        watch()
    return watch.timed(x)


def by_pfl(work: Workload) -> Timed:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    watch, held = Watch(), ready(work.clients)

    class Learner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = deepcopy(start())

        def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
            return cross_entropy(self.net(inputs), labels)

        def metrics(self, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
            return {"loss": Weighted(float(self.loss(inputs, labels).detach()) * len(labels), len(labels))}

    class Marks(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, *_: object, **__: object) -> tuple[bool, Any]:
            watch()
            return False, Metrics()

    users = [PyTorchTensorDataset(pair, user_id=str(i)) for i, pair in enumerate(held)]
    order = (c for t in range(1, work.rounds + 1) for c in Cohorts(SEED, work.clients, work.cohort).draw(t))
    people = FederatedDataset(users.__getitem__, order.__next__)
    model = Learner()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=work.rounds,
            evaluation_frequency=work.rounds + 1,  # pfl scores its first round whatever this is: untimed here
            train_cohort_size=work.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(people, people, postprocessors=[WeightByDatapoints()]),
        model=PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(
            local_batch_size=work.batch, local_num_epochs=work.epochs, local_learning_rate=LR
        ),
        callbacks=[Marks()],
        send_metrics_to_platform=False,  # its printing would be timed too
    )
    return watch.timed({name: t.clone() for name, t in model.net.state_dict().items()})


@cache
def _own_model() -> nn.Module:
    return deepcopy(start()).train()


def flower_train(message: Any, context: Any) -> Any:
    """One client's message in Flower; its process keeps the data and the model between messages."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    torch.set_num_threads(1)
    work = Workload(*message.content["config"]["work"])
    who, model = int(context.node_config["partition-id"]), _own_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, labels = ready(work.clients)[who]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    order = numpy_rng(SEED, "batches", int(message.content["config"]["server-round"]), who)
    for batch in batches(len(labels), work.algorithm.local, order):
        index = torch.from_numpy(batch)
        optimizer.zero_grad()
        cross_entropy(model(inputs[index]), labels[index]).backward()
        optimizer.step()
    arrays, metrics = ArrayRecord(model.state_dict()), MetricRecord({"num-examples": len(labels)})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def by_flower(work: Workload) -> Timed:
    """Flower's FedAvg under its simulator, clients on one CPU. The clock's seconds: the work is in other processes."""
    with tempfile.TemporaryDirectory() as home:
        os.environ.update(FLOWER_HOME | {"FLWR_HOME": home})
        from flwr.app import ArrayRecord, ConfigRecord
        from flwr.clientapp import ClientApp
        from flwr.serverapp import ServerApp
        from flwr.serverapp.strategy import FedAvg
        from flwr.simulation import run_simulation

        sys.path.insert(0, str(Path(__file__).parent))
        import round as importable  # so that a client is sent to its process by name, not with this module's data

        watch, client, server = Watch(), ClientApp(), ServerApp()
        client.train()(importable.flower_train)
        final: State = {}

        @server.main()
        def main(grid: Any, context: Any) -> None:
            numbers_of = [work.clients, work.cohort, work.epochs, work.batch, work.rounds]
            result = FedAvg(
                fraction_train=work.cohort / work.clients,
                fraction_evaluate=0.0,
                min_available_nodes=work.clients,
            ).start(
                grid,
                ArrayRecord(start().state_dict()),
                num_rounds=work.rounds,
                train_config=ConfigRecord({"work": numbers_of}),
                evaluate_fn=lambda round, arrays: watch() if round else None,
            )
            final.update(result.arrays.to_torch_state_dict())

        run_simulation(
            server,
            client,
            num_supernodes=work.clients,
            backend_config={
                "init_args": {"num_cpus": 1},
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            },
        )
    if len(watch.marks) != work.rounds:
        raise RuntimeError(
            f"Flower ended after {len(watch.marks)} of {work.rounds} rounds: see its log above."
        )
    return watch.timed(final)


def in_turns(rows: dict[str, Row], work: Workload, repeats: int) -> dict[str, list[Timed]]:
    """The rows of a turn in random order. Each must come to fedpara's model."""
    order, times = random.Random(0), {name: list[Timed]() for name in rows}
    for _ in range(repeats):
        for name in order.sample(list(rows), len(rows)):
            times[name].append(rows[name](work))
    final = times[OURS][0].state
    for name, turns in times.items():
        torch.testing.assert_close(
            turns[0].state, final, rtol=1e-3, atol=1e-5, msg=f"{name} trained otherwise"
        )
    return times


def show(title: str, work: Workload, times: dict[str, list[Timed]], elsewhere: tuple[str, ...] = ()) -> None:
    updates = (work.rounds - 1) * work.cohort
    least = min(len(labels) for _, labels in ready(work.clients))
    steps = work.algorithm.local.steps_for(least)
    print(f"\n{title}: {work.cohort} of {work.clients} clients, {work.epochs} epochs, batch {work.batch}")
    print(f"({steps} steps a client, {work.rounds - 1} timed rounds; medians of the turns)\n")
    print(
        "| | turns | updates/s | sequential is | CPU time | batched is | CPU time |\n|---|---|---|---|---|---|---|"
    )
    wall = {name: median(t.wall for t in turns) for name, turns in times.items()}
    cpu = {name: median(t.cpu for t in turns) for name, turns in times.items()}
    for name, turns in times.items():
        cells = [name, str(len(turns)), f"{updates / wall[name]:.0f}"]
        for engine in (OURS, AUTO):
            processor = "-" if name in elsewhere else f"{cpu[name] / cpu[engine]:.2f}x"
            cells += [f"{wall[name] / wall[engine]:.2f}x", processor]
        print(f"| {' | '.join(cells)} |")


def hardware() -> str:
    lscpu = subprocess.run(["lscpu"], capture_output=True, text=True).stdout if shutil.which("lscpu") else ""
    model = [line.partition(":")[2].strip() for line in lscpu.splitlines() if line.startswith("Model name")]
    names = [n for n in ("torch", "pfl", "flwr", "ray") if importlib.util.find_spec(n)]
    versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in names)
    return (
        f"{' '.join(model) or platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} thread, "
        f"load {os.getloadavg()[0]:.1f}; Python {platform.python_version()}, {versions}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--flower", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--deploy", action="store_true", help="the rows of flower.py; about two minutes")
    parser.add_argument("--smoke", action="store_true", help="few rounds and no Flower; not for figures")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    light, heavy = Workload(100, 10, 1, 32, 31), Workload(20, 10, 5, 16, 6)
    repeats = args.repeats
    if args.smoke:
        light, heavy, repeats = Workload(100, 10, 1, 32, 3), Workload(20, 10, 5, 16, 3), 2
    print(hardware())

    rows: dict[str, Row] = {
        OURS: ours,
        AUTO: lambda work: ours(work, "auto"),
        "bare loop (torch.optim)": bare,
        "bare loop (by hand)": lambda work: bare(work, by_hand=True),
    }
    show("Steps dominate", heavy, in_turns(rows, heavy, repeats))
    if importlib.util.find_spec("pfl"):
        rows["pfl"] = by_pfl
    else:
        print("\npfl is left out: pip install pfl==0.6.0 (Python 3.10 to 3.12)")
    times = in_turns(rows, light, repeats)
    if not importlib.util.find_spec("flwr") or not importlib.util.find_spec("ray"):
        print("\nFlower is left out: pip install 'flwr[simulation]==1.41.0'")
    elif args.flower and not args.smoke:
        times["Flower's simulator"] = [by_flower(light)]
    show("Rounds dominate", light, times, elsewhere=("Flower's simulator",))
    if args.deploy:
        from flower import rounds

        with tempfile.TemporaryDirectory() as scratch:
            rounds(Path(scratch))


if __name__ == "__main__":
    main()
