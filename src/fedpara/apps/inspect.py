"""The work of `fedpara inspect`: what a model's weights become, before anything is trained."""

import json
from dataclasses import replace
from typing import Any

import torch
import typer
from torch import nn

from fedpara import models
from fedpara.apps.named_model import is_users
from fedpara.apps.terminal.table import empty_table, print_table
from fedpara.errors import UsageError
from fedpara.experiments.build import build_scheme
from fedpara.experiments.config import Experiment
from fedpara.interop import build_target
from fedpara.parameterization import Choice, Scheme, plan
from fedpara.parameterization.selection import Where


def inspect(
    model: str,
    scheme: str,
    gamma: float | None,
    rank: int | None,
    ratio: float | None,
    nonlinearity: str | None,
    conv: str,
    classes: int,
    every: bool,
    force: bool,
    as_json: bool,
) -> None:
    if scheme == "original":
        raise UsageError(
            "scheme 'original' leaves every weight as it is: choose fedpara, pfedpara or lowrank."
        )
    fields = {"scheme": scheme, "gamma": gamma, "rank": rank, "ratio": ratio}
    wanted = build_scheme(replace(Experiment(), nonlinearity=nonlinearity, conv=conv, **fields))  # type: ignore[arg-type]
    assert wanted is not None
    network, rule = load_model(model, classes)
    choices = plan(network, wanted, None if every else rule, force=force)
    if as_json:
        typer.echo(json.dumps(summary(choices)))
    else:
        _print(model, wanted, choices)


def load_model(
    target: str, classes: int, shape: tuple[int, ...] | None = None
) -> tuple[nn.Module, Where | None]:
    """A library model by name with its rule, without memory for its weights; or the user's own by
    `package.module:function`.
    """
    if is_users(target):
        return build_target(target), None
    try:
        with torch.device("meta"):
            built = models.build(target, classes=classes, shape=shape or models.usual_shape(target))
    except (RuntimeError, TypeError):  # an integer overflowed in torch
        raise UsageError(f"--classes {classes}: expected fewer, no tensor has so many numbers.") from None
    return built, models.rule(target)


def summary(choices: list[Choice]) -> dict[str, Any]:
    original = sum(choice.weight.numel() for choice in choices)
    parameters = sum(choice.parameters for choice in choices)
    return {
        "parameters": parameters,
        "original_parameters": original,
        "ratio": parameters / original,
        "layers": [_row(choice) for choice in choices],
    }


def _row(choice: Choice) -> dict[str, Any]:
    shape, form = list(choice.weight.shape), choice.form
    if form is None:
        full = min(shape[0], choice.weight.numel() // shape[0]) if len(shape) > 1 else 1
        made = {"scheme": "dense", "rank": None, "max_rank": full, "parameters": choice.weight.numel()}
        return {"name": choice.name, "shape": shape, **made}
    made = {
        "scheme": form.scheme.name,
        "rank": form.rank,
        "max_rank": form.max_rank,
        "parameters": form.parameters,
    }
    return {"name": choice.name, "shape": shape, **made}


def _print(model: str, scheme: Scheme, choices: list[Choice]) -> None:
    total = summary(choices)
    headings = ["layer", "shape", "scheme"], ["rank", "max rank", "parameters", "of dense"]
    table = empty_table(*headings, title=f"{model} with {scheme}")
    reasons: dict[str, list[str]] = {}
    small = [choice for choice in choices if choice.weight.dim() < 2]
    for choice, row in zip(choices, total["layers"], strict=True):
        if choice in small:
            continue
        share = f"{row['parameters'] / choice.weight.numel():.1%}"
        shape = " x ".join(map(str, row["shape"]))
        rank = "" if row["rank"] is None else str(row["rank"])
        table.add_row(
            row["name"], shape, row["scheme"], rank, str(row["max_rank"]), f"{row['parameters']:,}", share
        )
        if choice.reason:
            reasons.setdefault(choice.reason, []).append(choice.name)
    rest = sum(choice.weight.numel() for choice in small)
    table.add_row(f"{len(small)} biases and norms", "", "dense", "", "", f"{rest:,}", "100.0%")
    table.add_section()
    table.add_row("total", "", "", "", "", f"{total['parameters']:,}", f"{total['ratio']:.1%}")
    print_table(table)
    times = f"{1 / total['ratio']:.2f}"
    typer.echo(f"original {total['original_parameters']:,} parameters, {times} times as many")
    for reason, names in reasons.items():
        typer.echo(f"dense ({reason}): {', '.join(names)}")
