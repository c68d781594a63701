"""What `fedpara export` reads: a run folder or a saved state, returned as a SavedState.

For a run with private tensors this is one client's own model: the shared state and the client's private tensors,
both from the newest checkpoint. The run folder is only read, so the run may still be in progress.
"""

import json
from pathlib import Path
from typing import Any

from torch import nn

from fedpara import models
from fedpara.algorithms import Variables
from fedpara.apps.named_model import is_custom
from fedpara.choices import CLASSES
from fedpara.engines.flower.engine import ACCEPTED
from fedpara.engines.program import make_program, shared_names
from fedpara.engines.session import PRIVATE
from fedpara.errors import FedParaError, RunError, UsageError, in_a_line
from fedpara.experiments.build import build_model, build_scheme
from fedpara.experiments.config import Experiment
from fedpara.experiments.storage.checkpoint import Checkpoint, final_checkpoint
from fedpara.experiments.storage.client_files import memory_file
from fedpara.experiments.storage.node_memory import NodeMemory
from fedpara.experiments.storage.run_folder import NODES
from fedpara.experiments.storage.summary import read_config
from fedpara.experiments.storage.tensor_files import read_memory
from fedpara.interop import SavedState, build_target, read_state
from fedpara.interop.rebuild import EXPECTED, is_description, refuse_misfit
from fedpara.parameterization import forms
from fedpara.state import State

FEW = 8
"""An error message lists at most this many clients."""


def read_run_or_state(
    source: Path,
    model: str | None = None,
    classes: int | None = None,
    shape: str | None = None,
    client: int | None = None,
) -> tuple[SavedState, nn.Module | None]:
    """The state, and the custom network that `model` names. The user's code is called only if they name it here."""
    is_run = source.is_dir()
    options = {"--model": model, "--classes": classes, "--shape": shape, "--client": client}
    given = [option for option, value in options.items() if value is not None]
    allowed = ["--client"] if is_run else ["--model", "--classes", "--shape"] if model else []
    misplaced = " and ".join(option for option in given if option not in allowed)
    if misplaced:
        raise UsageError(
            f"{source} does not take {misplaced}: a run folder takes --client, a .safetensors state takes --model and, "
            "with it, --classes and --shape."
        )
    if is_run:
        return _from_run(source, client), None
    saved = read_state(source)
    return (saved, None) if model is None else _as_model(saved, model, classes, shape)


def _as_model(
    saved: SavedState, model: str, classes: int | None, shape: str | None
) -> tuple[SavedState, nn.Module | None]:
    """The state described as `model`'s, and the network if it is a custom model."""
    description: dict[str, Any] = {"target": model}
    network = None
    if is_custom(model):
        network = build_target(model)
        refuse_misfit(saved.merged(), network, model)
    else:
        description = {"name": model, "classes": CLASSES if classes is None else classes}
        description["shape"] = list(models.usual_shape(model))
    if shape is not None:
        description["shape"] = _sides(shape)
    return SavedState(saved.state, saved.forms, description), network


def _sides(shape: str) -> list[int]:
    try:
        return [int(side) for side in shape.split(",")]
    except ValueError:
        raise UsageError(f"--shape {shape!r}: expected whole numbers with commas, such as 3,32,32.") from None


def _from_run(path: Path, client: int | None) -> SavedState:
    """The global model, or the client's own model if parts of it are private."""
    experiment = read_config(path)
    newest = final_checkpoint(path)
    found = newest.state
    network, description = _initial(path, experiment)
    program = make_program(network, experiment.share)  # type: ignore[arg-type]
    if program.private:
        found = _own_state(path, client, newest)
    elif client is not None:
        raise UsageError(f"{path} trained one model without private parts: leave out --client.")
    missing = [name for name in (*program.parameters, *program.buffers) if name not in found]
    if missing:
        raise RunError(f"{path} lacks {missing[0]}: expected every tensor of the model its config describes.")
    state = {**program.initial, **found}
    state |= {twin: state[name] for twin, name in shared_names(network).items()}
    return SavedState(state, forms(network), description)


def _initial(path: Path, experiment: Experiment) -> tuple[nn.Module, dict[str, Any]]:
    """The run's network before training, and its description."""
    try:
        description = json.loads((path / "model.json").read_text())
        if not is_description(description) or "classes" not in description:
            raise ValueError(EXPECTED)
        shape = tuple(description["shape"])
        return build_model(experiment, description["classes"], shape, build_scheme(experiment)), description
    except (OSError, RuntimeError, TypeError, ValueError, OverflowError, MemoryError) as error:
        raise RunError(
            f"{path / 'model.json'} does not describe the run's network ({in_a_line(error)}): restore the file."
        ) from None


def _own_state(path: Path, client: int | None, newest: Checkpoint) -> State:
    """The shared state of the newest checkpoint, with the client's private tensors of that moment."""
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
    return memory[PRIVATE]


def _node_memory(path: Path, client: int, round: int) -> Variables:
    """The client's memory from its Flower node's folder inside the run folder."""
    run = (path / NODES).read_text().strip()
    return NodeMemory(path, run, client).get(round) or {}
