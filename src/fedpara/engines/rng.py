"""Random streams by name: neither the engine nor the order of clients changes what a client draws.

Every draw comes from (seed, purpose, round, client), so there is no generator state to save. Random layers other than
`nn.Dropout` draw from torch's global generator, which is seeded the same way. The order of their draws depends on the
engine, and two runs in threads of one process share that generator.
"""

from hashlib import blake2b
from typing import Literal, get_args

import numpy as np
import torch

from fedpara.wire.encoders.draws import DrawnAhead

Purpose = Literal[
    "cohort",
    "batches",
    "augment",
    "layers",
    "link-up",
    "link-down",
    "final",
    "lost",
    "devices",
    "send",
    "secure",
    "restart",
    "fold",
    "recycle",
]
_PURPOSES: tuple[Purpose, ...] = get_args(
    Purpose
)  # a new purpose goes to the end: the index enters the stream


def numpy_rng(seed: int, purpose: Purpose, round: int, client: int = 0) -> np.random.Generator:
    return np.random.default_rng((seed, _PURPOSES.index(purpose), round, client))


def torch_seed(seed: int, purpose: Purpose, round: int, client: int = 0) -> int:
    """A seed of 63 bits for torch's generators."""
    digest = blake2b(f"{seed} {purpose} {round} {client}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def torch_rng(seed: int, purpose: Purpose, round: int, client: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(torch_seed(seed, purpose, round, client))


def uplink_rng(seed: int, round: int, client: int) -> DrawnAhead:
    """The generator of a client's message, whose numbers may be drawn before the client has trained."""
    generator = DrawnAhead()
    generator.manual_seed(torch_seed(seed, "link-up", round, client))
    return generator


class LayerRng:
    """Inside this context, torch's global generator is the client's stream; afterwards it is the caller's again.

    Entering it again continues the stream.
    """

    def __init__(self, seed: int, round: int, client: int, device: torch.device | None = None) -> None:
        # Not torch.manual_seed: it stores a traceback for each GPU that might exist.
        self._generator = torch.default_generator
        if device is not None and device.type == "cuda":
            self._generator = torch.cuda.default_generators[
                torch.cuda.current_device() if device.index is None else device.index
            ]
        self._seed = torch_seed(seed, "layers", round, client)
        self._state: torch.Tensor | None = None

    def __enter__(self) -> None:
        self._before = self._generator.get_state()
        if self._state is None:
            self._generator.manual_seed(self._seed)
        else:
            self._generator.set_state(self._state)

    def __exit__(self, *_: object) -> None:
        self._state = self._generator.get_state()
        self._generator.set_state(self._before)


def final_sample(seed: int, clients: int, size: int) -> list[int]:
    """The clients that are scored at the end of a run if the federation is too large to score everyone."""
    chosen = numpy_rng(seed, "final", 0).choice(clients, size, replace=False, shuffle=False)
    return sorted(chosen.tolist())
