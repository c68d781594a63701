"""model.json of a run folder: what `export` needs to know about the network.

    name, classes, shape    a model of this package or a reference; classes and shape only if the data has them
    normalise               the mean, std and type of the inputs; null if they are not normalised

If the config references a model or a rule, the file also has what only that code could tell:

    forms                   how each factorized weight is written
    ties                    further names of shared tensors
    fixed                   tensors that the checkpoint does not hold: frozen ones, and all private ones
    private                 whether each client has its own model
"""

from typing import Any

from fedpara.engines.program import make_program, shared_names
from fedpara.experiments.build import Parts
from fedpara.experiments.config import Experiment
from fedpara.experiments.node_data import is_own
from fedpara.parameterization import forms
from fedpara.parameterization.description import describe_form

DESCRIBED = ("name", "classes", "shape")


def describe_model(experiment: Experiment, parts: Parts) -> dict[str, Any]:
    train, normalise = parts.data.train, parts.normalisation
    kind = {"classes": train.classes, "shape": list(train.shape) or None}
    model = {"name": experiment.model, **{key: value for key, value in kind.items() if value is not None}}
    if experiment.references.keys() & {"model", "where"}:
        model |= _structure(experiment, parts)
    # Nodes that read their own data may normalise it although the server's examples have no mean.
    unknown = normalise is None and is_own(experiment.dataset)
    return model if unknown else {**model, "normalise": normalise}


def _structure(experiment: Experiment, parts: Parts) -> dict[str, Any]:
    network = parts.task.model
    program = make_program(network, experiment.share)  # type: ignore[arg-type]
    held = {*program.shared, *program.shared_buffers}
    return {
        "forms": {weight: describe_form(weight, form) for weight, form in forms(network).items()},
        "ties": shared_names(network),
        "fixed": sorted(program.initial.keys() - held - {*program.retained}),
        "private": bool(program.private),
    }
