"""Task: the model to train, its loss, and how it is scored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from torch import nn

from fedpara.data import Examples
from fedpara.data.convert import as_examples
from fedpara.errors import ConfigError, among
from fedpara.tasks.losses import LOSSES, Loss
from fedpara.tasks.metrics import METRICS, Metric, as_metric

Augment = Literal["none", "crop-flip"]
LOSS = "loss"
"""The name under which the loss is scored."""


@dataclass(frozen=True, eq=False)
class Task:
    """What the federation learns.

    model     factorized or plain; called as model(x), model(*x) or model(**x) for a tensor, tuple or dict of inputs
    test      examples that score the global model, in any form that `FederatedData.of` reads; by default those of the
              FederatedData
    augment   changes training images, with new draws in each epoch
    loss      a name, or a function (output, target) -> one value per example, or (sums, weights) per example
    metrics   names, or a dict of functions with the same contract (`Metric` for one where lower is better). The first
              is the primary one: targets, early stopping and reports use it. By default the accuracy for cross-entropy
              and otherwise only the loss, which is always measured.
    """

    model: nn.Module
    test: Examples | None = None
    augment: Augment = "none"
    loss: str | Loss = "cross-entropy"
    metrics: Sequence[str] | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.augment not in get_args(Augment):
            raise ConfigError(f"augment is {self.augment!r}: expected one of {', '.join(get_args(Augment))}.")
        if isinstance(self.loss, str) and self.loss not in LOSSES:
            raise ConfigError(f"unknown loss {self.loss!r}: {among(self.loss, LOSSES)}")
        model: Any = self.model
        if not isinstance(model, nn.Module):
            given = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
            raise ConfigError(f"model is {given}: expected a torch.nn.Module, such as nn.Linear(8, 2).")
        if isinstance(self.loss, nn.Module) and any(p.requires_grad for p in self.loss.parameters()):
            raise ConfigError(
                "the loss has parameters of its own, which would not train: make them parameters of the model, and let "
                "the model return what the loss needs."
            )
        named = self.metrics or ()
        if isinstance(named, str):
            raise ConfigError(f"metrics is {named!r}: expected a list, such as [{named!r}].")
        if LOSS in named:
            raise ConfigError("a metric is called 'loss': the loss is always measured, so leave it out.")
        of = list(named.values() if isinstance(named, Mapping) else named)
        for name in of:
            if isinstance(name, str) and name not in METRICS:
                raise ConfigError(f"unknown metric {name!r}: {among(name, METRICS)}")
            if not isinstance(name, str) and not isinstance(named, Mapping):
                raise ConfigError(
                    f"metrics holds {name!r} without a name: give a dict, such as {{'mine': ...}}."
                )
        if self.test is not None:
            object.__setattr__(self, "test", as_examples(self.test))

    @cached_property
    def objective(self) -> Loss:
        """The loss as a function."""
        return LOSSES[self.loss] if isinstance(self.loss, str) else self.loss

    @cached_property
    def scored(self) -> dict[str, Metric]:
        """Every metric by name, the primary one first, with the loss."""
        named = self.metrics
        if named is None:
            named = ["accuracy"] if self.loss == "cross-entropy" else []
        given = named.items() if isinstance(named, Mapping) else ((name, name) for name in named)
        found = {name: METRICS[of] if isinstance(of, str) else as_metric(of) for name, of in given}
        return {**found, LOSS: Metric(self.objective, higher_is_better=False)}

    @property
    def primary(self) -> str:
        return next(iter(self.scored))

    @property
    def higher_is_better(self) -> bool:
        return self.scored[self.primary].higher_is_better
