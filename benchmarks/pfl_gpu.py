"""Client updates a second on one GPU: fedpara's batched engine against pfl, side by side.

    python benchmarks/pfl_gpu.py             pfl's own benchmark, then the paper's VGG16 round
    python benchmarks/pfl_gpu.py --smoke     on the CPU, tiny: only that it runs

pfl's benchmark: 1,000 clients of 50 CIFAR-10 images, cohort 50, one epoch, batch 10, lr 0.1, a network of two
convolutions and 1,626,442 parameters. Random images here: the rate does not depend on what they show. pfl trains
client after client in float32 (TF32 allowed), its data on the GPU from the start. The first rounds, in which both warm
up and fedpara compiles, are not timed. fedpara writes, checks and counts every message; pfl sends none.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import time
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedpara as fp
from fedpara import algorithms, data, models
from fedpara.engines.participation.cohorts import Cohorts

SEED, LR, UNTIMED = 0, 0.1, 2


@dataclass(frozen=True)
class Workload:
    title: str
    model: nn.Module
    clients: int
    images: int
    cohort: int
    epochs: int
    batch: int
    rounds: tuple[int, int]  # timed ones of fedpara and of pfl
    precisions: tuple[str, ...] = ("tf32", "bfloat16")


def two_convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(12544, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


def federation(work: Workload) -> fp.FederatedData:
    generator = torch.Generator().manual_seed(SEED)
    count = work.clients * work.images
    images = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 10, (count,), generator=generator)
    train = data.Examples(images, labels, 10, mean=(0.5,) * 3, std=(0.25,) * 3)
    return fp.FederatedData(train, data.iid(labels, work.clients, SEED))


def ours(work: Workload, precision: str | None) -> tuple[float, str]:
    """Updates a second, and how they were run."""
    marks: list[float] = []
    run = fp.simulate(
        fp.Task(deepcopy(work.model)),
        federation(work),
        algorithms.fedavg(lr=LR, epochs=work.epochs, batch_size=work.batch),
        rounds=UNTIMED + work.rounds[0],
        cohort=work.cohort,
        seed=SEED,
        engine="batched",
        precision=precision,
        on_round=lambda _: marks.append(time.perf_counter()),
    )
    return work.rounds[0] * work.cohort / (marks[-1] - marks[UNTIMED - 1]), run.engine


def pfl(work: Workload, device: str) -> float:
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

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    marks: list[float] = []

    class Learner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = deepcopy(work.model).to(device)

        def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
            return cross_entropy(self.net.train()(inputs), labels)

        def metrics(self, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
            return {"loss": Weighted(float(self.loss(inputs, labels).detach()) * len(labels), len(labels))}

    class Marks(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, *_: object, **__: object) -> tuple[bool, Any]:
            if device == "cuda":
                torch.cuda.synchronize()
            marks.append(time.perf_counter())
            return False, Metrics()

    held, rounds = federation(work), UNTIMED + work.rounds[1]
    drawn = [Cohorts(SEED, work.clients, work.cohort).draw(t) for t in range(1, rounds + 1)]
    users = {}
    for client in sorted({client for clients in drawn for client in clients}):
        own = held.client(client)
        inputs = data.normalise(own.inputs, own.mean, own.std).to(device)
        users[client] = PyTorchTensorDataset((inputs, own.targets.to(device)), user_id=str(client))
    order = (client for clients in drawn for client in clients)
    people = FederatedDataset(users.__getitem__, order.__next__)
    model = Learner()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=work.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(people, people, postprocessors=[WeightByDatapoints()]),
        model=PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(
            local_batch_size=work.batch, local_num_epochs=work.epochs, local_learning_rate=LR
        ),
        callbacks=[Marks()],
        send_metrics_to_platform=False,
    )
    return work.rounds[1] * work.cohort / (marks[-1] - marks[UNTIMED - 1])


def show(work: Workload, device: str) -> None:
    size = sum(p.numel() for p in work.model.parameters())
    print(
        f"\n{work.title}: {work.cohort} of {work.clients} clients of {work.images} images, {work.epochs} epoch(s)"
    )
    print(
        f"of batch {work.batch}, {size:,} parameters; timed rounds: {work.rounds[0]} and {work.rounds[1]}\n"
    )
    print("| | updates/s | against pfl |\n|---|---|---|")
    theirs = pfl(work, device)
    print(f"| pfl | {theirs:.1f} | 1.0x |", flush=True)
    for precision in work.precisions if device == "cuda" else (None,):
        rate, how = ours(work, precision)
        print(f"| fedpara, {how} | {rate:.1f} | {rate / theirs:.1f}x |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument(
        "--rounds", type=int, default=300, help="timed rounds of pfl's own benchmark; a sixth of pfl"
    )
    args = parser.parse_args()
    if not importlib.util.find_spec("pfl"):
        raise SystemExit("pfl is not installed: pip install pfl==0.6.0 (Python 3.10 to 3.12)")
    device = "cpu" if args.smoke else "cuda"
    card = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    try:
        version = importlib.metadata.version("pfl")
    except importlib.metadata.PackageNotFoundError:
        version = "0.6.0 (from a folder)"
    print(f"{card}; Python {platform.python_version()}, torch {torch.__version__}, pfl {version}")
    torch.manual_seed(SEED)
    if args.smoke:
        show(Workload("smoke", two_convolutions(), 6, 10, 2, 1, 10, (1, 1)), device)
        return
    timed = (args.rounds, -(-args.rounds // 6))
    show(Workload("pfl's benchmark", two_convolutions(), 1000, 50, 50, 1, 10, timed), device)
    paper = Workload("The paper's round", models.vgg16(10), 100, 500, 16, 10, 64, (3, 1), ("bfloat16",))
    show(paper, device)


if __name__ == "__main__":
    main()
