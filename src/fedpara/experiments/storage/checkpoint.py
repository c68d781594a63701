"""A run's checkpoint: one safetensors file. The previous checkpoint stays until the next one is written.

    x/NAME  buffers/NAME  server/VARIABLE/NAME  the model and the server's variables
    known/NAME  known.sizes  known.last  known.messages
                                                on a downlink that sends differences: what the clients know
    base/NAME  folds.sizes  folds.last  folds.messages    in a run that folds: the base, and what each client has of it
    clients                                     (client, round) of each client memory
    digests                                     the SHA-256 of each memory file, in the same order

The metadata holds the round, the bytes sent so far, the simulated clock if there is one, the identity of the config,
and the SHA-256 of the lines of metrics.jsonl up to the round. Checkpoints of earlier versions have no digests.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fedpara.engines.differences import Known
from fedpara.engines.progress import Progress
from fedpara.engines.setup.folding import Folds
from fedpara.errors import RunError
from fedpara.experiments.config import Experiment
from fedpara.experiments.storage.summary import read_config
from fedpara.experiments.storage.tensor_files import read_tensors, write_tensors
from fedpara.files import sync
from fedpara.state import State

CHECKPOINT = "checkpoint.safetensors"
PREVIOUS = "checkpoint.previous.safetensors"
NEXT = ".checkpoint.part.safetensors"
"""The name of a checkpoint while it is written. `sweep` removes a leftover file."""
CLIENTS, DIGESTS = "clients", "digests"
SIZES, LAST, MESSAGES = "known.sizes", "known.last", "known.messages"
FOLD_SIZES, FOLD_LAST, FOLD_MESSAGES = "folds.sizes", "folds.last", "folds.messages"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    progress: Progress
    memories: dict[int, int]
    """The round of each client's memory file."""
    identity: str
    digests: dict[int, str] = field(default_factory=dict)
    """The digest of each memory file. Empty in checkpoints of earlier versions."""
    metrics: str | None = None
    """The digest of the lines of metrics.jsonl up to this round."""

    @property
    def round(self) -> int:
        return self.progress.round

    @property
    def state(self) -> State:
        """The model's shared state."""
        return self.progress.model

    def refuse_other(self, path: Path, experiment: Experiment) -> None:
        """RunError if another experiment wrote this checkpoint."""
        if self.identity != experiment.identity:
            raise RunError(
                f"{path} belongs to another config than {path.parent / 'config.toml'}: restore the original config, or "
                "start a new run folder."
            )


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the new checkpoint to disk, then keep the current one as the previous checkpoint."""
    state, metadata = _flatten(checkpoint.progress)
    if checkpoint.memories:
        state[CLIENTS] = torch.tensor(sorted(checkpoint.memories.items()))
        joined = bytearray.fromhex(
            "".join(checkpoint.digests[client] for client in sorted(checkpoint.memories))
        )
        state[DIGESTS] = torch.frombuffer(joined, dtype=torch.uint8).reshape(len(checkpoint.memories), -1)
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
    """RunError if the file is damaged."""
    state, metadata = read_tensors(path)
    memories = dict(state[CLIENTS].tolist()) if CLIENTS in state else {}
    digests = {}
    if DIGESTS in state:
        digests = {
            client: row.tobytes().hex() for client, row in zip(memories, state[DIGESTS].numpy(), strict=True)
        }
    identity, metrics = metadata.get("identity", ""), metadata.get("metrics")
    return Checkpoint(_unflatten(state, metadata), memories, identity, digests, metrics)


def final_checkpoint(folder: Path) -> Checkpoint:
    """The newest checkpoint. RunError if it is damaged or belongs to another config.

    It does not fall back to the previous checkpoint: the caller would not notice the different round.
    """
    experiment, reasons = read_config(folder), []
    # While the newest checkpoint is being written, only the previous one exists.
    for path in checkpoint_files(folder):
        try:
            checkpoint = read_checkpoint(path)
        except RunError as error:
            reasons.append(str(error))
            continue
        checkpoint.refuse_other(path, experiment)
        if reasons:
            raise RunError(
                f"{reasons[0]} The previous checkpoint is of round {checkpoint.round}: `fedpara resume "
                f"{shlex.quote(str(folder))}` continues from it."
            )
        return checkpoint
    why = " ".join(reasons) or "the run has not finished its first round, or it is an archived run."
    raise RunError(f"{folder} has no readable checkpoint: {why}")


def checkpoint_files(folder: Path) -> list[Path]:
    """The checkpoint files in the folder, newest first."""
    return [folder / name for name in (CHECKPOINT, PREVIOUS) if (folder / name).exists()]


def read_progress(folder: Path, round: int) -> Progress:
    """The progress in the checkpoint of that round, which rank 0 resumes from."""
    for path in checkpoint_files(folder):
        checkpoint = read_checkpoint(path)
        if checkpoint.round == round:
            return checkpoint.progress
    raise RunError(
        f"{folder} has no checkpoint of round {round} on this machine: expected a folder that all ranks share."
    )


def _flatten(progress: Progress) -> tuple[State, dict[str, str]]:
    state = {f"x/{name}": tensor for name, tensor in progress.x.items()}
    state |= {f"buffers/{name}": tensor for name, tensor in progress.buffers.items()}
    for variable, tensors in progress.server.items():
        state |= {f"server/{variable}/{name}": tensor for name, tensor in tensors.items()}
    if progress.known is not None:
        state |= _flatten_known(progress.known)
    if progress.folds is not None:
        state |= {f"base/{name}": tensor for name, tensor in progress.folds.state.items()}
        state[FOLD_SIZES] = torch.tensor(progress.folds.sizes, dtype=torch.int64)
        state[FOLD_LAST] = _pairs(progress.folds.last)
        state[FOLD_MESSAGES] = _joined(progress.folds.messages)
    numbers: dict[str, float] = {
        "round": progress.round,
        "bytes_up": progress.bytes_up,
        "bytes_down": progress.bytes_down,
    }
    if progress.clock is not None:
        numbers["clock"] = progress.clock
    variables = json.dumps(sorted(progress.server))
    return state, {**{name: str(value) for name, value in numbers.items()}, "groups": variables}


def _unflatten(state: State, metadata: dict[str, str]) -> Progress:
    def under(prefix: str) -> State:
        return {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}

    server = {variable: under(f"server/{variable}/") for variable in json.loads(metadata["groups"])}
    numbers = {name: int(metadata[name]) for name in ("round", "bytes_up", "bytes_down")}
    return Progress(
        numbers["round"],
        under("x/"),
        under("buffers/"),
        server,
        numbers["bytes_up"],
        numbers["bytes_down"],
        float(metadata["clock"]) if "clock" in metadata else None,
        _unflatten_known(under("known/"), state) if SIZES in state else None,
        _folds(under("base/"), state) if FOLD_SIZES in state else None,
    )


def _folds(base: State, all_: State) -> Folds:
    sizes, joined = all_[FOLD_SIZES].tolist(), all_.get(FOLD_MESSAGES, torch.empty(0, dtype=torch.uint8))
    return Folds(base, tuple(sizes), dict(all_[FOLD_LAST].tolist()), _parted(sizes, joined))


def _pairs(of: Mapping[int, int]) -> torch.Tensor:
    return torch.tensor(sorted(of.items()), dtype=torch.int64).reshape(-1, 2)


def _flatten_known(known: Known) -> State:
    last = _pairs(known.last)
    state = {f"known/{name}": tensor for name, tensor in known.state.items()}
    return {**state, SIZES: torch.tensor(known.sizes), LAST: last, MESSAGES: _joined(known.messages)}


def _unflatten_known(state: State, all_: State) -> Known:
    sizes = tuple(all_[SIZES].tolist())
    return Known(state, sizes, dict(all_[LAST].tolist()), _parted(sizes, all_[MESSAGES]))


def _joined(messages: Sequence[bytes]) -> torch.Tensor:
    body = bytearray(b"".join(messages))
    return torch.frombuffer(body, dtype=torch.uint8) if body else torch.empty(0, dtype=torch.uint8)


def _parted(sizes: Sequence[int], joined: torch.Tensor) -> tuple[bytes, ...]:
    """The newest messages in `joined`. `sizes` are the lengths of all messages, also of those no longer stored."""
    body, messages = joined.numpy().tobytes(), list[bytes]()
    for size in reversed(sizes):
        if not body:
            break
        messages.append(body[-size:])
        body = body[:-size]
    return tuple(reversed(messages))
