"""model.json of a run folder: what `export` needs to know about the network.

    name, classes, shape    a model of this package or a reference; classes and shape only if the data has them
    normalise               the mean, std and type of the inputs; null if they are not normalised
    base                    a digest of the frozen tensors, if there are any
    metric                  name and direction of the primary metric, if it is not the accuracy

If the config references a model or a rule, or `simulate` wrote the folder, the file also has facts that only that code
provides:

    forms                   how each factorized weight is written
    ties                    further names of shared tensors
    fixed                   tensors that the checkpoint does not hold: frozen ones, and all private ones
    private                 whether each client has its own model
    inputs                  the type and the shape of one example's inputs: "float32 [30]", or a list or dict of such
"""

import re
from typing import Any

import torch
from torch import Tensor, nn

from fedpara.engines.program import Program, shared_names
from fedpara.experiments.build import Parts
from fedpara.experiments.config import Experiment
from fedpara.experiments.node_data import is_own
from fedpara.parameterization import forms
from fedpara.parameterization.description import describe_form
from fedpara.trees import Tree, describe, map_tree

DESCRIBED = ("name", "classes", "shape")


def describe_model(experiment: Experiment, parts: Parts, program: Program) -> dict[str, Any]:
    train, normalise = parts.data.train, parts.normalisation
    kind = {"classes": train.classes, "shape": list(train.shape) or None}
    model: dict[str, Any] = {
        "name": experiment.model,
        **{key: value for key, value in kind.items() if value is not None},
    }
    if program.base:
        model["base"] = program.base
    task = parts.task
    if task.primary != "accuracy":
        model["metric"] = {"name": task.primary, "higher_is_better": task.higher_is_better}
    if experiment.objects or experiment.references.keys() & {"model", "where"}:
        model |= _structure(parts.task.model, program)
        if len(train):
            model["inputs"] = map_tree(lambda tensor: describe(tensor[0]), train.inputs)
    # Nodes may normalise their own data even if the server's examples have no mean.
    unknown = normalise is None and is_own(experiment.dataset)
    return model if unknown else {**model, "normalise": normalise}


def _structure(network: nn.Module, program: Program) -> dict[str, Any]:
    held = {*program.shared, *program.shared_buffers}
    return {
        "forms": {weight: describe_form(weight, form) for weight, form in forms(network).items()},
        "ties": shared_names(network),
        "fixed": sorted(program.initial.keys() - held - {*program.retained}),
        "private": bool(program.local),
    }


def example_inputs(recorded: Any) -> Tree:
    """Random inputs of two examples, as `inputs` describes them. Whole numbers are 0 or 1, the first of each is 1."""
    if isinstance(recorded, dict):
        return {name: example_inputs(part) for name, part in recorded.items()}
    if isinstance(recorded, list):
        return tuple(map(example_inputs, recorded))
    kind, sides = re.fullmatch(r"(\w+) \[([\d, ]*)\]", recorded).groups()  # type: ignore[union-attr]  # may raise
    shape, dtype = [2, *(int(side) for side in sides.split(",") if side)], getattr(torch, kind)
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=dtype)
    made: Tensor = torch.randint(2, shape, generator=generator)
    made[..., :1] = 1
    return made.to(dtype)
