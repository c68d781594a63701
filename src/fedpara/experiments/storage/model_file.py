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
"""

from typing import Any

from torch import nn

from fedpara.engines.program import Program, shared_names
from fedpara.experiments.build import Parts
from fedpara.experiments.config import Experiment
from fedpara.experiments.node_data import is_own
from fedpara.parameterization import forms
from fedpara.parameterization.description import describe_form

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
