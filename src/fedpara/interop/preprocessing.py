"""How raw inputs become the inputs of a network: (x / scale - mean) / std, per channel.

The scale is 255 for integers and 1 for floats, which are on the 0..1 scale already. This is the formula of
`fedpara.data.normalise`, in float32, as a module that can be exported.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedpara.errors import StateError

SCALES = {"uint8": 255, "int16": 255, "int32": 255, "int64": 255, "float16": 1, "float32": 1, "float64": 1}
"""What raw inputs of each type are divided by."""


@dataclass(frozen=True)
class Preprocessing:
    """The mean and std per channel, on the 0..1 scale, and the type of raw inputs."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    dtype: str = "uint8"

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or self.dtype not in SCALES:
            raise StateError(
                f"the preprocessing is {asdict(self)}: expected a mean and a std per channel, and one of the types "
                f"{', '.join(SCALES)}."
            )

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> "Preprocessing":
        """The preprocessing that a file records. Any exception means that the entry is damaged."""
        return cls(tuple(map(float, entry["mean"])), tuple(map(float, entry["std"])), entry["dtype"])

    def to_entry(self) -> dict[str, Any]:
        return {"mean": [*self.mean], "std": [*self.std], "scale": self.scale, "dtype": self.dtype}

    @property
    def scale(self) -> int:
        return SCALES[self.dtype]

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether an example of this shape is an image with a channel per mean."""
        return len(shape) == 3 and shape[0] == len(self.mean)

    def example(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Two random raw inputs."""
        x = torch.rand(2, *shape, generator=generator)
        return (x * 255 if self.scale == 255 else x).to(getattr(torch, self.dtype))

    def __str__(self) -> str:
        mean, std = (", ".join(f"{value:.4g}" for value in values) for values in (self.mean, self.std))
        x = f"x / {self.scale}" if self.scale != 1 else "x"
        return f"({x} - mean) / std with mean {mean} and std {std}"


class Normalised(nn.Module):
    """The network for raw inputs."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.network, self.scale = network, preprocessing.scale
        self.register_buffer("mean", torch.tensor(preprocessing.mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(preprocessing.std).view(-1, 1, 1))
        self.eval()

    def forward(self, x: Tensor) -> Any:
        x = x.float()
        if self.scale != 1:
            x = x / self.scale
        return self.network((x - self.mean) / self.std)
