"""What `fedpara export` reads: a run folder or a saved state, as one kind of thing.

Of a run whose model has private parts it is one client's own model: the shared state and what that client keeps,
both as of the newest checkpoint. The folder is only read, so a run may be going on in it.
"""

import json
from pathlib import Path
from typing import Any

from torch import nn

from fedpara import models
from fedpara.algorithms import Variables
from fedpara.apps.named_model import is_users
from fedpara.choices import CLASSES
from fedpara.engines.flower.engine import ACCEPTED
from fedpara.engines.program import make_program, shared_names
from fedpara.engines.session import PRIVATE
from fedpara.errors import FedParaError, RunError, UsageError, in_a_line
from fedpara.experiments.build import build_model, build_scheme
from fedpara.experiments.config import Experiment
from fedpara.experiments.storage.checkpoint import Checkpoint, final_checkpoint
from fedpara.experiments.storage.client_files import kept_file
from fedpara.experiments.storage.node_memory import NodeMemory
from fedpara.experiments.storage.run_folder import NODES
from fedpara.experiments.storage.summary import read_config
from fedpara.experiments.storage.tensor_files import read_groups
from fedpara.interop import SavedState, build_target, read_state
from fedpara.interop.rebuild import EXPECTED, is_description, refuse_misfit
from fedpara.parameterization import forms
from fedpara.state import State

FEW = 8
"""Clients that a text names before it stops at dots."""


def read_run_or_state(
    source: Path,
    model: str | None = None,
    classes: int | None = None,
    shape: str | None = None,
    client: int | None = None,
) -> tuple[SavedState, nn.Module | None]:
    """The state, and the custom network that `--model` names: only then is code of the user's called."""
    described = {"--model": model, "--classes": classes, "--shape": shape}
    given = [option for option, value in described.items() if value is not None]
    if source.is_dir():
        if given:
            raise UsageError(
                f"{source} is a run folder, whose files say which model it trained: leave out {' and '.join(given)}, "
                "meant for a .safetensors state by itself."
            )
        return _of_run(source, client), None
    if not source.exists():
        raise UsageError(f"{source} does not exist: expected a run folder or a .safetensors state.")
    if client is not None:
        raise UsageError(f"{source} is one state: --client expects a run folder, where clients keep theirs.")
    if given and model is None:
        raise UsageError(
            f"{' and '.join(given)} without --model: expected the model that is so built. Name it too."
        )
    saved = read_state(source)
    return (saved, None) if model is None else _described(saved, model, classes, shape)


def _described(
    saved: SavedState, model: str, classes: int | None, shape: str | None
) -> tuple[SavedState, nn.Module | None]:
    """The state as that of the model the user names, and that model if it is a custom one."""
    description: dict[str, Any] = {"target": model}
    network = None
    if not is_users(model):
        usual = list(models.usual_shape(model))
        description = {
            "name": model,
            "classes": CLASSES if classes is None else classes,
            "shape": usual,
        }
    elif classes is not None:
        raise UsageError(
            f"--classes is for a model of the library: {model} is called as it is. Leave it out."
        )
    else:
        network = build_target(model)
        refuse_misfit(saved.merged(), network, model)
    if shape is not None:
        description["shape"] = _sides(shape)
    return SavedState(saved.state, saved.forms, description), network


def _sides(shape: str) -> list[int]:
    try:
        return [int(side) for side in shape.split(",")]
    except ValueError:
        raise UsageError(f"--shape {shape!r}: expected whole numbers with commas, such as 3,32,32.") from None


def _of_run(path: Path, client: int | None) -> SavedState:
    """The global model; where parts of it are private, the client's own."""
    experiment = read_config(path)
    newest = final_checkpoint(path)
    found = newest.state
    network, description = _start(path, experiment)
    program = make_program(network, experiment.share)  # type: ignore[arg-type]
    if program.private:
        found = _own(path, client, newest)
    elif client is not None:
        raise UsageError(
            f"{path} has one model, and no client keeps a part of it: --client expects a run with private parts. "
            "Leave it out."
        )
    missing = [name for name in (*program.parameters, *program.buffers) if name not in found]
    if missing:
        raise RunError(
            f"{path} holds no {missing[0]}: expected every tensor of the model its config describes."
        )
    state = {**program.initial, **found}
    state |= {twin: state[name] for twin, name in shared_names(network).items()}
    return SavedState(state, forms(network), description)


def _start(path: Path, experiment: Experiment) -> tuple[nn.Module, dict[str, Any]]:
    """The run's network as it started, and its description."""
    try:
        description = json.loads((path / "model.json").read_text())
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path / 'model.json'} cannot be read ({error}): it says how the network is built."
        ) from None
    if not is_description(description) or "classes" not in description:
        raise RunError(f"{path / 'model.json'} is damaged: {EXPECTED}.")
    classes, shape = description["classes"], tuple(description["shape"])
    try:
        return build_model(experiment, classes, shape, build_scheme(experiment)), description
    except (RuntimeError, TypeError, ValueError, OverflowError, MemoryError) as error:
        raise RunError(
            f"{path / 'model.json'} is damaged: no network has {classes} classes of examples {list(shape)} "
            f"({in_a_line(error)}). Bring back the file it was."
        ) from None


def _own(path: Path, client: int | None, newest: Checkpoint) -> State:
    """The shared state of the newest checkpoint and what the client kept then."""
    try:
        return {**newest.state, **_kept(path, client, newest)}
    except FedParaError:
        newer = final_checkpoint(path)
        if newer.round == newest.round:
            raise
    # A run goes on there: it has removed what belonged to the older checkpoint.
    return _own(path, client, newer)


def _kept(path: Path, client: int | None, newest: Checkpoint) -> State:
    files = newest.kept
    if not files:
        raise RunError(
            f"parts of the model of {path} are private, and its clients folder holds none: expected what clients keep."
        )
    few = ", ".join(map(str, sorted(files)[:FEW])) + (", ..." if len(files) > FEW else "")
    choice = f"one of the {len(files)} that have taken part ({few})"
    if client is None:
        raise UsageError(
            f"parts of the model of {path} are private to each client, so it has no one model to export: expected "
            f"--client with {choice}."
        )
    if client not in files:
        raise UsageError(
            f"client {client} has taken part in no round of {path}, so it has no model of its own: expected --client "
            f"with {choice}."
        )
    file = kept_file(path / "clients", client, files[client])
    if not file.exists():
        raise RunError(f"{file} is missing: client {client} kept it in round {files[client]}. Bring it back.")
    groups = read_groups(file, (client, files[client]), newest.digests.get(client))
    if ACCEPTED in groups:
        groups = _at_its_node(path, client, int(groups[ACCEPTED]["round"]))
    return groups[PRIVATE]


def _at_its_node(path: Path, client: int, round: int) -> Variables:
    """Under Flower nodes keep the parts; those of a simulation lie in the run folder too."""
    run = (path / NODES).read_text().strip()
    if not (path / f"nodes-{run}").is_dir():
        raise RunError(
            f"what client {client} keeps is on its Flower node: expected nodes-{run} in {path}. Copy that folder there "
            "from the node."
        )
    return NodeMemory(path, run, client).get(round) or {}
