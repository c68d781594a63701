"""Turn an Experiment into the objects that it names."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from inspect import signature
from os import PathLike
from typing import Any

import torch
from torch import nn

from fedpara import algorithms, models, parameterization, references
from fedpara.algorithms import Algorithm, Local, Optimizer
from fedpara.algorithms.optimizers import OPTIMIZERS
from fedpara.algorithms.schedules import SCHEDULES, RateSchedule
from fedpara.attacks import Attack
from fedpara.data import Examples, FederatedData
from fedpara.engines.settings import all_but, read_gammas
from fedpara.errors import ConfigError, in_a_line
from fedpara.experiments.config import CALLS, Experiment
from fedpara.experiments.federation import load_federation
from fedpara.parameterization import Scheme, adapters
from fedpara.parameterization.naming import is_named, unknown
from fedpara.parameterization.selection import Where
from fedpara.privacy import Privacy, read_privacy
from fedpara.robust import Defence
from fedpara.tasks import Metric, Task
from fedpara.trees import leaves
from fedpara.wire import Link

DEFAULT_GAMMA = 0.1
CHUNK = 10_000
"""Examples per step of the digest. Windows of a text share memory, so a copy of all would take 80 times as much."""


@dataclass(frozen=True, eq=False)
class Parts:
    task: Task
    data: FederatedData
    algorithm: Algorithm
    link: Link
    own_clients: bool = False
    """Whether a custom function decides which client holds which examples."""

    @cached_property
    def digest(self) -> str:
        """A digest of all examples. Two runs with the same config and the same digest are the same run."""
        digest = blake2b(digest_size=16)
        for examples in (self.data.train, self.task.test):
            if examples is not None:
                for tensor in (*leaves(examples.inputs), *leaves(examples.targets)):
                    for part in tensor.split(CHUNK):
                        digest.update(part.contiguous().view(torch.uint8).numpy().data)
        if not self.data.pooled:  # too large to read: the sizes replace the contents
            digest.update(str(self.data.sizes.tolist() if self.data.sizes_known else len(self.data)).encode())
        elif self.own_clients:
            for client in range(len(self.data)):
                digest.update(self.data.indices(client).tobytes() + b"/")
        return digest.hexdigest()

    @property
    def normalisation(self) -> dict[str, object] | None:
        """The mean and std of the inputs and the type they are stored in. None if they are not normalised."""
        for examples in (self.data.train, self.task.test):
            if examples is not None and examples.mean is not None and examples.std is not None:
                dtype = str(examples.inputs.dtype).removeprefix("torch.")
                return {"mean": list(examples.mean), "std": list(examples.std), "dtype": dtype}
        return None


def build(experiment: Experiment, data_dir: str | PathLike[str] | None = None) -> Parts:
    """The model, data, algorithm and link that the experiment names."""
    algorithm = build_algorithm(experiment)
    link = Link(up=experiment.link_up, down=experiment.link_down)
    scheme = build_scheme(experiment)
    federation, scored = load_federation(experiment, data_dir)
    model = build_model(experiment, federation.train.classes, federation.train.shape or None, scheme)
    task = build_task(experiment, model, scored)
    own_clients = bool(experiment.references.keys() & {"dataset", "split"})
    return Parts(task, federation, algorithm, link, own_clients)


def build_task(experiment: Experiment, model: nn.Module, test: Examples | None) -> Task:
    """The model with its loss and metrics. A custom metric has the name of its function."""
    loss: Any = references.value(experiment.loss) if "loss" in experiment.references else experiment.loss
    if isinstance(loss, type):
        raise ConfigError(
            f"{experiment.loss!r} is a class: call it, as in {experiment.loss}(reduction='none'), or name a function "
            "(output, target)."
        )
    if not isinstance(loss, str) and not callable(loss):
        raise references.wrong_result(experiment.loss, loss, "a function (output, target)")
    metrics: dict[str, Any] | None = None
    for text in references.split(experiment.metrics or ""):
        if text:
            name, of = _metric(text)
            metrics = {**(metrics or {}), text if name in (metrics or {}) else name: of}
    return Task(model, test, experiment.augment, loss, metrics)  # type: ignore[arg-type]


def _metric(text: str) -> tuple[str, Any]:
    if not references.is_reference(text):
        return text, text
    of = references.value(text)
    if not isinstance(of, Metric) and not callable(of):
        raise references.wrong_result(text, of, "a function (output, target) or a Metric")
    return references.parse(text).function, of


def build_sampler(experiment: Experiment) -> Any:
    """The sampler's name, or a custom function."""
    named = "sampler" in experiment.references
    return references.value(experiment.sampler) if named else experiment.sampler


def build_robust(experiment: Experiment) -> Defence | None:
    """The defence against hostile clients."""
    return _made(experiment, "robust", Defence)  # type: ignore[no-any-return]


def build_attack(experiment: Experiment) -> Attack | None:
    """What simulated hostile clients do."""
    return _made(experiment, "attack", Attack)  # type: ignore[no-any-return]


def _made(experiment: Experiment, field: str, kind: type) -> Any:
    """The value of a field that names a factory of the library, or your function that returns such a value."""
    text = getattr(experiment, field)
    if text is None:
        return None
    if not references.is_reference(text):
        name, arguments = references.library_call(text, CALLS[field], field)
        return CALLS[field][name](**arguments)
    made = references.value(text)
    made = made() if callable(made) and not isinstance(made, kind) else made
    if not isinstance(made, kind):
        raise references.wrong_result(text, made, f"a fedpara {kind.__name__}")
    return made


def build_privacy(experiment: Experiment) -> Privacy | None:
    return None if experiment.privacy is None else read_privacy(experiment.privacy)


def build_schedule(experiment: Experiment) -> RateSchedule | None:
    """The schedule of the learning rate, called once to check that it returns a factor."""
    text = experiment.schedule
    if text is None:
        return None
    if references.is_reference(text):
        schedule = references.value(text)
    else:
        name, arguments = references.library_call(text, SCHEDULES, "schedule")
        schedule = SCHEDULES[name](**arguments)
    try:
        float(schedule(0.0, experiment.rounds))
    except Exception as error:  # a custom schedule may raise anything
        raise ConfigError(
            f"schedule {text!r} failed ({in_a_line(error)}): expected a function (at, rounds) -> factor."
        ) from None
    return schedule  # type: ignore[no-any-return]


def _optimizer(experiment: Experiment) -> dict[str, Any]:
    """The fields of Local for the optimizer. A call such as adamw(eps=1e-6) may also set betas and weight_decay."""
    text = experiment.optimizer
    if not references.is_reference(text):
        name, arguments = references.library_call(text, OPTIMIZERS, "optimizer")
        return {"optimizer": name, **arguments}
    made = references.find(text)
    if not isinstance(made, Optimizer):
        decay = {"weight_decay": experiment.weight_decay}
        if experiment.weight_decay and not decay.keys() & references.parameters(text).keys():
            raise ConfigError(f"weight_decay is {experiment.weight_decay}, which {text!r} does not take.")
        made = references.call(text, offered=decay)
    if not isinstance(made, Optimizer):
        raise references.wrong_result(text, made, "an Optimizer")
    return {"optimizer": made}


def build_algorithm(experiment: Experiment) -> Algorithm:
    chosen: dict[str, Any] = {"momentum": experiment.momentum, "weight_decay": experiment.weight_decay}
    chosen |= _optimizer(experiment)
    schedule = build_schedule(experiment)
    local = Local(
        lr=experiment.lr,
        lr_decay=experiment.lr_decay,
        epochs=experiment.epochs,
        steps=experiment.steps,
        batch_size=experiment.batch_size,
        clip=experiment.clip,
        jacobian=experiment.jacobian,
        jacobian_norm=experiment.jacobian_norm,  # type: ignore[arg-type]
        keep_optimizer=experiment.keep_optimizer,
        schedule=schedule,
        rounds=None if schedule is None else experiment.rounds,
        **chosen,
    )
    return algorithms.build(experiment.algorithm, local, **experiment.options)


def build_scheme(experiment: Experiment) -> Scheme | None:
    """The scheme, or None for the original weights."""
    options = {name: getattr(experiment, name) for name in ("gamma", "rank", "ratio", "nonlinearity")}
    if experiment.scheme == "original":
        given = [
            name for name in (*options, "gammas", "init", "onto") if getattr(experiment, name) is not None
        ]
        if given:
            raise ConfigError(f"scheme 'original' has no {given[0]}: leave it out.")
        return None
    if (gammas := read_gammas(experiment.gammas)) is not None:
        if taken := [size for size in ("gamma", "rank", "ratio") if options[size] is not None]:
            raise ConfigError(f"gammas and {taken[0]} are both given: leave out {taken[0]}.")
        options["gamma"] = max(gammas)
    if all(options[size] is None for size in ("gamma", "rank", "ratio")):
        options["gamma"] = DEFAULT_GAMMA
    conv = None if experiment.conv == Experiment.conv else experiment.conv  # each scheme has its own default
    return parameterization.make_scheme(experiment.scheme, conv=conv, **options)


def build_model(
    experiment: Experiment, classes: int | None, shape: tuple[int, ...] | None, scheme: Scheme | None
) -> nn.Module:
    """The initial model. The same seed gives the same numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(experiment.seed)
        model = models.build(experiment.model, classes=classes, shape=shape)
        onto, train = experiment.onto, references.split(experiment.train) if experiment.train else []
        if experiment.fold_every is not None and onto is None:
            onto, train = "frozen", train or ["*"]
        if scheme is not None:
            parameterization.factorize(
                model,
                scheme,
                build_rule(experiment, model, scheme),
                init=experiment.init,
                onto=onto,  # type: ignore[arg-type]
                alpha=experiment.adapter_alpha,
                train=train,
            )
    return model


def build_rule(experiment: Experiment, model: nn.Module, scheme: Scheme) -> Where | None:
    """Which weights to factorize: the model's rule, or the one that `where` names.

    every      all weights of two or more dimensions that become smaller
    hybrid:N   all convolutions except the first N (Pufferfish)
    inner      all convolutions and linear layers except the first and the last one (FedMUD)
    early      all convolutions; ResNet's first two and its 1x1 ones at gamma 1 (appendix D.2)
    all but A  the model's rule, without the modules and parameters A, such as "all but head, conv1"
    reference  your rule(name, module, parameter); with parentheses, what your function returns
    """
    if experiment.where is None:
        return models.rule(experiment.model)
    if references.is_reference(experiment.where):
        return _own_rule(experiment.where, model)
    if experiment.where == "every":
        return None
    if hybrid := re.fullmatch(r"hybrid:(\d+)", experiment.where):
        return models.hybrid(model, int(hybrid[1]))
    if experiment.where == "inner":
        return models.inner(model)
    if names := all_but(experiment.where):
        return _all_but(model, names, models.rule(experiment.model) or _usual_rule(experiment, model, scheme))
    if experiment.where != "early":
        raise ConfigError(
            f"unknown where {experiment.where!r}: expected every, inner, early, hybrid:N such as hybrid:5, "
            "'all but head', or package.module:function."
        )
    if not isinstance(scheme, parameterization.FedPara | parameterization.PFedPara) or scheme.gamma is None:
        raise ConfigError(f"where 'early' needs fedpara or pfedpara with a gamma: the scheme is {scheme}.")
    return models.resnet_layers(replace(scheme, gamma=1.0), scheme)


def _all_but(model: nn.Module, names: Sequence[str], rule: Where) -> Where:
    if problem := unknown(model, [name for name, _ in model.named_parameters(remove_duplicate=False)], names):
        raise ConfigError(f"where {problem}")

    def chosen(name: str, module: nn.Module, parameter: str) -> bool | Scheme:
        return not is_named(f"{name}.{parameter}", names) and rule(name, module, parameter)

    return chosen


def _usual_rule(experiment: Experiment, model: nn.Module, scheme: Scheme) -> Where:
    """What `factorize` chooses without a rule: every weight, or those that get an adapter."""
    if experiment.onto is None:
        return models.everything
    return adapters.rule(model, scheme, None, references.split(experiment.train) if experiment.train else [])


def _own_rule(where: str, model: nn.Module) -> Where:
    rule: Where = references.value(where)
    try:
        signature(rule).bind("layer", model, "weight")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"where {where!r} is not a rule ({in_a_line(error)}): expected a function rule(name, module, parameter) "
            "that returns True for the weights to factorize."
        ) from None
    return rule
