"""The work of `fedpara inspect`: how a scheme factorizes a model, without training it."""

import json
from dataclasses import replace
from typing import Any

import torch
import typer
from torch import nn

from fedpara import models
from fedpara.apps.terminal.table import empty_table, print_table
from fedpara.choices import CLASSES, SCHEMES
from fedpara.errors import UsageError
from fedpara.experiments.build import build_scheme
from fedpara.experiments.config import Experiment
from fedpara.parameterization import Choice, Scheme, plan
from fedpara.parameterization.selection import Where
from fedpara.references import is_reference


def inspect(
    model: str,
    scheme: str,
    gamma: float | None,
    rank: int | None,
    ratio: float | None,
    nonlinearity: str | None,
    conv: str,
    classes: int | None,
    every: bool,
    force: bool,
    as_json: bool,
) -> None:
    fields = {"scheme": scheme, "gamma": gamma, "rank": rank, "ratio": ratio}
    wanted = build_scheme(replace(Experiment(), nonlinearity=nonlinearity, conv=conv, **fields))  # type: ignore[arg-type]
    if wanted is None:
        raise UsageError(f"scheme 'original' factorizes nothing: choose one of {', '.join(SCHEMES[1:])}.")
    network, rule = load_model(model, classes)
    choices = plan(network, wanted, None if every else rule, force=force)
    if as_json:
        typer.echo(json.dumps(summary(choices)))
    else:
        _print(model, wanted, choices)


def load_model(name: str, classes: int | None) -> tuple[nn.Module, Where | None]:
    """The model and its rule. A library model is built without allocating its weights; a custom model has no rule."""
    if is_reference(name):
        return models.build(name, classes=classes), None
    with torch.device("meta"):
        shape = models.usual_shape(name)
        return models.build(name, classes=classes or CLASSES, shape=shape), models.rule(name)


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
    full = min(shape[0], choice.weight.numel() // shape[0]) if len(shape) > 1 else 1
    return {
        "name": choice.name,
        "shape": shape,
        "scheme": form.scheme.name if form else "dense",
        "rank": form.rank if form else None,
        "max_rank": form.max_rank if form else full,
        "parameters": choice.parameters,
    }


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
