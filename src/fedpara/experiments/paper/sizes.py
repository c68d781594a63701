"""Numbers without training: parameters, bytes per client and round, ranks of random products, GPU time."""

from dataclasses import dataclass, replace
from functools import cache

import torch

from fedpara import models
from fedpara.algorithms import Variables
from fedpara.data.readers.generated import KINDS, TRAIN
from fedpara.engines.program import Program, make_program
from fedpara.engines.session import Session
from fedpara.experiments.build import build_algorithm, build_rule, build_scheme
from fedpara.experiments.config import OWNED, Experiment
from fedpara.parameterization import factorize
from fedpara.parameterization.compose import matrix
from fedpara.parameterization.schemes import Form
from fedpara.wire import Link, make_message, pack

EXAMPLES = {
    "cifar10": 50_000,
    "cifar100": 50_000,
    "cinic10": 90_000,
    "mnist": 60_000,
    "femnist": 300 * 137,
    "shakespeare": 3_803_027,
    "shakespeare-100": 200_000,
    "shakespeare-100-mixed": 200_000,
}
OWNERS = {"femnist": 300, "shakespeare": 1_129, "shakespeare-100": 100}

STEP_MS = {"vgg16": 0.58, "resnet18": 0.99, "lstm": 0.73, "mlp": 0.03}
"""GPU milliseconds per client and step of one run alone, in bfloat16, for planning. All but the last are measured: one
H200, 16 clients, FedPara, whole rounds (ResNet18 and LSTM on one occasion). The last is an estimate."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of one client's round."""

    up: int
    down: int


def parameters(experiment: Experiment) -> int:
    """The number of trainable parameters, counting factors."""
    program = _program(_shape_only(experiment))
    return sum(program.initial[name].numel() for name in program.parameters)


def shared_parameters(experiment: Experiment) -> int:
    """The number of parameters that are sent."""
    program = _program(_shape_only(experiment))
    return sum(program.initial[name].numel() for name in program.shared)


def traffic(experiment: Experiment) -> Traffic:
    """The lengths of encoded messages, for a model of zeros."""
    return _traffic(_shape_only(experiment))


def total_bytes(experiment: Experiment) -> int:
    each = traffic(experiment)
    return (each.up + each.down) * experiment.cohort * experiment.rounds


def gpu_minutes(experiment: Experiment) -> float:
    """Cohort x local steps x rounds x STEP_MS."""
    name = experiment.dataset.removeprefix("generated:")
    whole = TRAIN if name != experiment.dataset else EXAMPLES[name]
    held = OWNERS.get(name, experiment.clients) if experiment.split in OWNED else experiment.clients
    each = max(1, round(whole / held * experiment.data_fraction))
    steps = build_algorithm(experiment).local.steps_for(each)
    ms = next((ms for model, ms in STEP_MS.items() if experiment.model.startswith(model)), STEP_MS["vgg16"])
    return experiment.cohort * steps * experiment.rounds * ms / 60_000


@cache
def random_ranks(size: int = 100, rank: int = 10, repeats: int = 1000) -> dict[int, int]:
    """How often each rank(W) occurs for W = (X1 Y1^T) * (X2 Y2^T) with standard normal factors."""
    generator = torch.Generator().manual_seed(0)
    counts: dict[int, int] = {}
    for _ in range(repeats // 100):
        x1, y1, x2, y2 = torch.randn(4, 100, size, rank, generator=generator, dtype=torch.float64)
        for found in torch.linalg.matrix_rank(matrix(x1, y1) * matrix(x2, y2)).tolist():
            counts[found] = counts.get(found, 0) + 1
    return counts


def _shape_only(experiment: Experiment) -> Experiment:
    """The experiment with only the fields that determine shapes and messages: the key of the caches below."""
    e = experiment
    name = e.dataset.removeprefix("generated:")
    return Experiment(
        dataset=next(known for known, kind in KINDS.items() if kind == KINDS[name]),
        model=e.model,
        scheme=e.scheme,
        gamma=e.gamma,
        rank=e.rank,
        ratio=e.ratio,
        conv=e.conv,
        where=e.where,
        share=e.share,
        algorithm=e.algorithm,
        link_up=e.link_up,
        link_down=e.link_down,
    )


@cache
def _program(e: Experiment) -> Program:
    """The program on the meta device, with shapes and no numbers."""
    kind, scheme = KINDS[e.dataset], build_scheme(e)
    with torch.device("meta"):
        model = models.build(e.model, classes=kind.classes, shape=kind.shape)
        if scheme is not None:
            factorize(model, scheme, build_rule(e, model, scheme), init=_nothing)
        return make_program(model, e.share)


def _nothing(form: Form, generator: torch.Generator | None) -> list[torch.Tensor]:
    return [torch.empty(shape) for shape in form.factors.values()]


@cache
def _traffic(e: Experiment) -> Traffic:
    program = _program(e)
    zeros = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in program.initial.items()}
    algorithm = build_algorithm(e)
    session = Session(replace(program, initial=zeros), algorithm, Link(e.link_up, e.link_down), 0)
    x = {name: zeros[name] for name in program.shared}
    model = {**x, **{name: zeros[name] for name in program.shared_buffers}}
    broadcast = algorithm.broadcast(algorithm.server_init(x))
    extra, _ = algorithm.finish(x, x, broadcast, algorithm.client_init(x), 1, 1.0)

    def length(extra: Variables, precision: str, sender: str) -> int:
        state, header = pack({"": model, **extra}), session.header(1, sender, 1)
        return len(make_message(state, header, precision, torch.Generator(), session.exact))

    return Traffic(length(extra, e.link_up, "client:0"), length(broadcast, e.link_down, "server"))
