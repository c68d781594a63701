"""A run's checkpoint, one safetensors file; the one before it is kept until the next.

    x/NAME  buffers/NAME  server/GROUP/NAME     the model and the server's variables
    clients                                     of each client that keeps something, the round that its file is of
    digests                                     and the SHA-256 of that file, in the same order

Beside the tensors: the round, the bytes so far, the identity of the config it belongs to, and the SHA-256 of all lines
of metrics.jsonl up to the round. A checkpoint of an earlier version has no digests.
"""

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fedpara.engines.progress import Progress
from fedpara.errors import RunError
from fedpara.experiments.config import Experiment
from fedpara.experiments.storage.summary import read_config
from fedpara.experiments.storage.tensor_files import read_tensors, write_tensors
from fedpara.files import sync
from fedpara.state import State

CHECKPOINT = "checkpoint.safetensors"
PREVIOUS = "checkpoint.previous.safetensors"
NEXT = ".checkpoint.part.safetensors"
"""A name that `sweep` removes."""
CLIENTS, DIGESTS = "clients", "digests"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    progress: Progress
    kept: dict[int, int]
    """Of which round each client's file is."""
    identity: str
    digests: dict[int, str] = field(default_factory=dict)
    """Of each client's file; empty in a checkpoint of an earlier version."""
    metrics: str | None = None
    """The digest of the lines of metrics.jsonl up to this round."""

    @property
    def round(self) -> int:
        return self.progress.round

    @property
    def state(self) -> State:
        """The model's shared state."""
        return {**self.progress.x, **self.progress.buffers}

    def refuse_other(self, path: Path, experiment: Experiment) -> None:
        """RunError where it was not made by this experiment."""
        if self.identity != experiment.identity:
            raise RunError(
                f"{path} belongs to another config than {path.parent / 'config.toml'}: the folder was mixed up. "
                "Restore the config it was made with, or start a new run folder."
            )


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """The one that is there becomes the one before it, once the new one is on the disk: until then both stay."""
    state, metadata = _flatten(checkpoint.progress)
    if checkpoint.kept:
        state[CLIENTS] = torch.tensor(sorted(checkpoint.kept.items()))
        joined = bytearray.fromhex("".join(checkpoint.digests[client] for client in sorted(checkpoint.kept)))
        state[DIGESTS] = torch.frombuffer(joined, dtype=torch.uint8).reshape(len(checkpoint.kept), -1)
    metadata["identity"] = checkpoint.identity
    if checkpoint.metrics is not None:
        metadata["metrics"] = checkpoint.metrics
    current, written = folder / CHECKPOINT, folder / NEXT
    write_tensors(written, state, metadata)
    if current.exists():
        current.replace(folder / PREVIOUS)
    written.replace(current)
    sync(folder)


def read_checkpoint(path: Path) -> Checkpoint:
    """RunError where it is damaged."""
    state, metadata = read_tensors(path)
    kept = dict(state[CLIENTS].tolist()) if CLIENTS in state else {}
    digests = {}
    if DIGESTS in state:
        digests = {
            client: row.tobytes().hex() for client, row in zip(kept, state[DIGESTS].numpy(), strict=True)
        }
    identity, metrics = metadata.get("identity", ""), metadata.get("metrics")
    return Checkpoint(_unflatten(state, metadata), kept, identity, digests, metrics)


def final_checkpoint(folder: Path) -> Checkpoint:
    """RunError where the newest is damaged or of another config: the one before it is of another round, and nobody
    would know.
    """
    experiment, reasons = read_config(folder), []
    for name in (CHECKPOINT, PREVIOUS):  # while a checkpoint is written, only the one before it is there
        if not (folder / name).exists():
            continue
        try:
            checkpoint = read_checkpoint(folder / name)
        except RunError as error:
            reasons.append(str(error))
            continue
        checkpoint.refuse_other(folder / name, experiment)
        if reasons:
            raise RunError(
                f"{reasons[0]} The one before it is of round {checkpoint.round}: `fedpara resume "
                f"{shlex.quote(str(folder))}` goes back to it."
            )
        return checkpoint
    why = " ".join(reasons) or "the run has not finished its first round, or is kept for reading only."
    raise RunError(f"{folder} has no readable checkpoint: {why}")


def read_progress(folder: Path, round: int) -> Progress:
    """The checkpoint of that round, which whoever holds the folder goes on from."""
    for name in (CHECKPOINT, PREVIOUS):
        if (folder / name).exists():
            checkpoint = read_checkpoint(folder / name)
            if checkpoint.round == round:
                return checkpoint.progress
    raise RunError(
        f"{folder} has no checkpoint of round {round} here: expected one folder that all ranks see."
    )


def _flatten(progress: Progress) -> tuple[State, dict[str, str]]:
    state = {f"x/{name}": tensor for name, tensor in progress.x.items()}
    state |= {f"buffers/{name}": tensor for name, tensor in progress.buffers.items()}
    for group, members in progress.server.items():
        state |= {f"server/{group}/{name}": tensor for name, tensor in members.items()}
    numbers = {"round": progress.round, "bytes_up": progress.bytes_up, "bytes_down": progress.bytes_down}
    groups = json.dumps(sorted(progress.server))
    return state, {**{name: str(value) for name, value in numbers.items()}, "groups": groups}


def _unflatten(state: State, metadata: dict[str, str]) -> Progress:
    def under(prefix: str) -> State:
        return {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}

    server = {group: under(f"server/{group}/") for group in json.loads(metadata["groups"])}
    numbers = {name: int(metadata[name]) for name in ("round", "bytes_up", "bytes_down")}
    return Progress(
        numbers["round"],
        under("x/"),
        under("buffers/"),
        server,
        numbers["bytes_up"],
        numbers["bytes_down"],
    )
