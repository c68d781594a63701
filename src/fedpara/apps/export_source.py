"""What `fedpara export` reads: a run folder or a saved state, with how its inputs are normalised.

For a run with private tensors this is one client's own model: the shared state and the client's private tensors,
both from the newest checkpoint. The run folder is only read, so the run may still be in progress.
"""

import inspect
import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedpara import models
from fedpara.algorithms import Variables
from fedpara.choices import CLASSES, REFERENCE
from fedpara.engines.flower.engine import ACCEPTED
from fedpara.engines.program import base_digest, make_program, shared_names
from fedpara.engines.session import own_part
from fedpara.errors import DataError, FedParaError, RunError, UsageError, in_a_line
from fedpara.experiments.build import build, build_model, build_scheme
from fedpara.experiments.config import Experiment
from fedpara.experiments.node_data import is_own
from fedpara.experiments.storage.checkpoint import Checkpoint, final_checkpoint
from fedpara.experiments.storage.client_files import memory_file
from fedpara.experiments.storage.model_file import DESCRIBED, example_inputs
from fedpara.experiments.storage.node_memory import NodeMemory
from fedpara.experiments.storage.run_folder import NODES, data_digest
from fedpara.experiments.storage.summary import read_config
from fedpara.experiments.storage.tensor_files import read_memory
from fedpara.interop import Preprocessing, SavedState, build_target, read_state
from fedpara.interop.rebuild import EXPECTED, is_description, refuse_misfit
from fedpara.parameterization import forms
from fedpara.parameterization.description import read_form
from fedpara.parameterization.naming import BASE
from fedpara.references import OBJECT, is_reference
from fedpara.state import State
from fedpara.trees import Tree, arguments

FEW = 8
"""An error message lists at most this many clients."""


@dataclass(frozen=True)
class Source:
    """A state, the custom network that the user named, a note if the normalisation is unknown, and its inputs."""

    saved: SavedState
    network: nn.Module | None = None
    note: str | None = None
    example: tuple[Tensor, ...] | None = None


def read_run_or_state(
    source: Path,
    model: str | None = None,
    classes: int | None = None,
    shape: str | None = None,
    client: int | None = None,
) -> Source:
    """The state, and the custom network that `model` names. The user's code is called only if they name it here."""
    is_run = source.is_dir()
    options = {"--model": model, "--classes": classes, "--shape": shape, "--client": client}
    given = [option for option, value in options.items() if value is not None]
    own = is_run and _is_own(read_config(source))
    allowed = (
        ["--client", *["--model"] * own] if is_run else ["--model", "--classes", "--shape"] if model else []
    )
    misplaced = " and ".join(option for option in given if option not in allowed)
    if misplaced:
        raise UsageError(
            f"{source} does not take {misplaced}: a run folder takes --client and, for a custom model, --model; a "
            ".safetensors state takes --model and, with it, --classes and --shape."
        )
    if own:
        return _from_recorded_run(source, model, client)
    if is_run:
        return _from_run(source, client)
    saved = read_state(source)
    return Source(saved) if model is None else _as_model(saved, model, classes, shape)


def _is_own(experiment: Experiment) -> bool:
    """Whether building the run's network needs the user's code."""
    return experiment.objects is not None or bool(experiment.references.keys() & {"model", "where"})


def _as_model(saved: SavedState, model: str, classes: int | None, shape: str | None) -> Source:
    """The state described as `model`'s, and the network if it is a custom model."""
    description: dict[str, Any] = {"target": model}
    network = None
    if is_reference(model):
        sides = None if shape is None else tuple(_sides(shape))
        network = build_target(model, classes=classes, shape=sides)
        refuse_misfit(saved.merged(), network, model)
    else:
        description = {"name": model, "classes": CLASSES if classes is None else classes}
        description["shape"] = list(models.usual_shape(model))
    if shape is not None:
        description["shape"] = _sides(shape)
    return Source(replace(saved, model=description), network)


def _sides(shape: str) -> list[int]:
    try:
        return [int(side) for side in shape.split(",")]
    except ValueError:
        raise UsageError(f"--shape {shape!r}: expected whole numbers with commas, such as 3,32,32.") from None


def _from_run(path: Path, client: int | None) -> Source:
    """The global model, or the client's own model if parts of it are private or it has a personal one."""
    experiment = read_config(path)
    newest = final_checkpoint(path)
    network, description, preprocessing, recorded = _initial(path, experiment)
    program = make_program(network, experiment.share)
    found = _state(path, client, newest, bool(program.local))
    missing = [name for name in (*program.parameters, *program.buffers) if name not in found]
    if missing:
        raise RunError(f"{path} lacks {missing[0]}: expected every tensor of the model its config describes.")
    state = {**program.initial, **found}
    state |= {twin: state[name] for twin, name in shared_names(network).items()}
    note = None
    if not recorded and len(description["shape"]) == 3:  # other inputs are not normalised
        preprocessing, note = _from_data(path, experiment)
    return Source(SavedState(state, forms(network), description, preprocessing), note=note)


def _from_recorded_run(path: Path, model: str | None, client: int | None) -> Source:
    """`_from_run` without the run's code. Only `model`, which the user typed, is imported."""
    try:
        described = json.loads((path / "model.json").read_text())
        known = {weight: read_form(**entry) for weight, entry in described["forms"].items()}
        entry, shape = described.get("normalise"), described.get("shape")
        preprocessing = None if entry is None else Preprocessing.from_entry(entry)
        description = {key: described[key] for key in DESCRIBED if key in described}
        if is_reference(description["name"]) or description["name"].startswith(OBJECT):
            description["target"] = description.pop("name")
        if not is_description(description):
            raise ValueError(EXPECTED)
        ties, fixed, private = dict(described["ties"]), set(described["fixed"]), described["private"]
        inputs = example_inputs(described["inputs"]) if "inputs" in described else None
    except Exception as error:  # a damaged file may break any assumption
        raise _misdescribed(path, error) from None
    newest = final_checkpoint(path)
    state = dict(_state(path, client, newest, private))
    network = None
    if model is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(read_config(path).seed)
            network = models.build(model, classes=described.get("classes"), shape=shape and tuple(shape))
        first = network.state_dict()
        dense = {name: name.removesuffix(f".{BASE}") for name in fixed}  # an adapter's W0 is the plain weight
        initial = {name: first[weight] for name, weight in dense.items() if weight in first}
        state = {**initial, **state}  # a run that folds holds its base
    if missing := sorted(fixed - state.keys()):
        name = str(description.get("target", description.get("name")))
        typed = REFERENCE if name.startswith(OBJECT) else shlex.quote(name)
        raise UsageError(
            f"{path} does not hold the frozen tensor {missing[0]!r}: pass --model {typed} if you trust that code."
        )
    moved = newest.progress.folds is not None
    if not moved and described.get("base") not in (
        None,
        base_digest({name: state[name] for name in fixed}, known),
    ):
        raise UsageError(
            f"{model} does not build the frozen weights of {path}: pass the function that loads the same weights."
        )
    state |= {twin: state[name] for twin, name in ties.items()}
    by_shape = network is not None and "shape" in description  # `export` then chooses better values
    example = None if inputs is None or by_shape else _in_order(inputs, network)
    return Source(SavedState(state, known, description, preprocessing), network, example=example)


def _in_order(inputs: Tree, network: nn.Module | None) -> tuple[Tensor, ...] | None:
    """The inputs as positional arguments of the network. None if some are no tensors, or have no position."""
    args, named = arguments(inputs)
    if network is not None and named:
        first = [*inspect.signature(network.forward).parameters][: len(named)]
        if {*first} != named.keys():
            return None
        named = {name: named[name] for name in first}
    found = (*args, *named.values())
    return found if all(isinstance(one, Tensor) for one in found) else None


def _state(path: Path, client: int | None, newest: Checkpoint, private: bool) -> State:
    """The trained tensors: the client's own if parts of the model are private, or if it has a personal model."""
    if private:
        return _own_state(path, client, newest)
    if client is None:
        return newest.state
    if not newest.memories or not _private_state(path, client, newest):
        raise UsageError(f"{path} trained one model without private parts: leave out --client.")
    return _own_state(path, client, newest)


def _misdescribed(path: Path, error: Exception) -> RunError:
    return RunError(
        f"{path / 'model.json'} does not describe the run's network ({in_a_line(error)}): restore the file."
    )


def _initial(
    path: Path, experiment: Experiment
) -> tuple[nn.Module, dict[str, Any], Preprocessing | None, bool]:
    """The run's network before training, its description, its preprocessing, and whether the folder records that."""
    try:
        description = json.loads((path / "model.json").read_text())
        recorded = "normalise" in description
        entry = description.pop("normalise", None)
        base = description.pop("base", None)
        description.pop("metric", None)
        preprocessing = None if entry is None else Preprocessing.from_entry(entry)
        if not is_description(description) or "classes" not in description:
            raise ValueError(EXPECTED)
        shape = tuple(description["shape"])
        network = build_model(experiment, description["classes"], shape, build_scheme(experiment))
        if base not in (None, make_program(network).base):
            raise ValueError("the frozen weights of the model are not those of the run")
        return network, description, preprocessing, recorded
    except Exception as error:  # a damaged file may break any assumption
        raise _misdescribed(path, error) from None


def _from_data(path: Path, experiment: Experiment) -> tuple[Preprocessing | None, str | None]:
    """The normalisation of the run's data set, for folders that do not record it, or a note why it is unknown."""
    try:
        if is_own(experiment.dataset) or experiment.references:
            raise DataError("export calls no function that a file names")
        parts = build(experiment)
        if data_digest(path) not in (None, parts.digest):
            raise DataError("its examples are not those of the run")
    except FedParaError as error:
        return None, (
            f"{path} does not record how its inputs were normalised, and {experiment.dataset} cannot be used "
            f"({in_a_line(error)}): the file is the bare network and takes normalised inputs."
        )
    entry = parts.normalisation
    return None if entry is None else Preprocessing.from_entry(entry), None


def _own_state(path: Path, client: int | None, newest: Checkpoint) -> State:
    """The shared state of the newest checkpoint, with the client's private tensors of that checkpoint."""
    try:
        return {**newest.state, **_private_state(path, client, newest)}
    except FedParaError:
        newer = final_checkpoint(path)
        if newer.round == newest.round:
            raise
    # The run is in progress and has removed the files of the older checkpoint.
    return _own_state(path, client, newer)


def _private_state(path: Path, client: int | None, newest: Checkpoint) -> State:
    rounds = newest.memories
    if client is None or client not in rounds:
        few = ", ".join(map(str, sorted(rounds)[:FEW])) + (", ..." if len(rounds) > FEW else "")
        problem = "has a model per client" if client is None else f"has no model of client {client}"
        raise UsageError(
            f"{path} {problem}: expected --client with one of the {len(rounds)} that took part ({few})."
        )
    file = memory_file(path / "clients", client, rounds[client])
    memory = read_memory(file, (client, rounds[client]), newest.digests.get(client))
    if ACCEPTED in memory:
        memory = _node_memory(path, client, int(memory[ACCEPTED]["round"]))
    return own_part(memory)


def _node_memory(path: Path, client: int, round: int) -> Variables:
    """The client's memory from its Flower node's folder inside the run folder."""
    memory = NodeMemory(path, (path / NODES).read_text().strip(), client)
    if not memory.folder.exists():
        raise UsageError(
            f"the private part of client {client} is only on its node: copy the folder {memory.folder.parent.name} "
            f"from the `memory` of the node's config to {path}."
        )
    return memory.get(round) or {}
