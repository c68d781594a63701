"""What `fedpara export` reads: a run folder or a saved state, as one kind of thing."""

import json
import sys
from pathlib import Path

from fedpara import models
from fedpara.errors import RunError, UsageError
from fedpara.experiments.build import build_model, build_scheme
from fedpara.experiments.store import final_state, read_config
from fedpara.interop import SavedState, read_state
from fedpara.parameterization import forms


def read_run_or_state(source: Path, model: str | None, classes: int, shape: str | None = None) -> SavedState:
    if source.is_dir():
        return _of_run(source)
    if not source.exists():
        raise UsageError(f"{source} does not exist: expected a run folder or a .safetensors state.")
    saved = read_state(source)
    if model is None:
        return saved
    given = {"shape": _sides(shape)} if shape is not None else {}
    if ":" in model:
        sys.path.insert(0, str(Path.cwd()))
        return SavedState(saved.state, saved.forms, {"target": model, **given})
    usual = {"name": model, "classes": classes, "shape": list(models.usual_shape(model))}
    return SavedState(saved.state, saved.forms, {**usual, **given})


def _sides(shape: str) -> list[int]:
    try:
        return [int(side) for side in shape.split(",")]
    except ValueError:
        raise UsageError(f"--shape {shape!r}: expected whole numbers with commas, such as 3,32,32.") from None


def _of_run(path: Path) -> SavedState:
    """The global model; where parts are private, those parts as the model started with them."""
    experiment = read_config(path)
    state, _ = final_state(path)
    try:
        description = json.loads((path / "model.json").read_text())
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path / 'model.json'} cannot be read ({error}): it says how the network is built."
        ) from None
    network = build_model(
        experiment, description["classes"], tuple(description["shape"]), build_scheme(experiment)
    )
    whole = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    return SavedState({**whole, **state}, forms(network), description)
