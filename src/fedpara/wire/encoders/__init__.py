"""The encoders of lossy links, one file each, by the names that a link uses."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from fedpara.errors import ConfigError
from fedpara.wire.encoders.core import SMALL, Encoder, codes
from fedpara.wire.encoders.eden import Eden
from fedpara.wire.encoders.grid import Grid
from fedpara.wire.encoders.levels import Levels
from fedpara.wire.encoders.powersgd import PowerSGD
from fedpara.wire.encoders.rounding import PRECISIONS
from fedpara.wire.encoders.sign import Sign
from fedpara.wire.encoders.stc import SparseTernary
from fedpara.wire.encoders.topk import TopK

__all__ = ["ENCODINGS", "PRECISIONS", "SMALL", "Encoder", "Encoding", "codes"]


@dataclass(frozen=True)
class Encoding:
    """The encoding of one direction.

    `text` stands in the header of each message. Without an `encoder` it is one of PRECISIONS.
    """

    text: str
    encoder: Encoder | None = None
    feedback: bool = False
    """Whether the sender keeps what a message left out, and adds it to its next one."""

    @property
    def draws(self) -> bool:
        """Whether encoding draws random numbers."""
        return self.encoder is not None or self.text == "int8"

    def uniforms(self, spec: Iterable[tuple[torch.dtype, torch.Size]]) -> int:
        """How many uniform numbers the encoding of such tensors draws."""
        shapes = [shape for dtype, shape in spec if self.loses(dtype, shape)]
        if self.encoder is not None:
            return self.encoder.uniforms(shapes)
        return sum(shape.numel() for shape in shapes) if self.text == "int8" else 0

    @property
    def sends_differences(self) -> bool:
        """Whether a server with this downlink sends differences between models, not models."""
        return self.encoder is not None or self.feedback

    @property
    def grid(self) -> Grid | None:
        """The grid of this encoding. A server with such a downlink rounds its model to the grid."""
        return self.encoder if isinstance(self.encoder, Grid) else None

    def loses(self, dtype: torch.dtype, shape: torch.Size) -> bool:
        """Whether the encoding may change a tensor of this type and shape."""
        if self.encoder is not None:
            return codes(self.encoder, dtype, shape)
        return self.text != "float32" and dtype.is_floating_point


def float32() -> Encoding:
    return Encoding("float32")


def float16(feedback: bool = False) -> Encoding:
    return Encoding("float16", feedback=feedback)


def bfloat16(feedback: bool = False) -> Encoding:
    return Encoding("bfloat16", feedback=feedback)


def int8(feedback: bool = False) -> Encoding:
    return Encoding("int8", feedback=feedback)


def int4(block: int = 128, feedback: bool = False) -> Encoding:
    return _coded(Levels("int4", 15, 16, _block(block)), feedback)


def int2(block: int = 128, feedback: bool = False) -> Encoding:
    return _coded(Levels("int2", 4, 4, _block(block)), feedback)


def ternary(block: int = 128, feedback: bool = False) -> Encoding:
    return _coded(Levels("ternary", 3, 3, _block(block)), feedback)


def sign(block: int = 256, feedback: bool = False) -> Encoding:
    return _coded(Sign(_block(block)), feedback)


def topk(fraction: float, feedback: bool = False) -> Encoding:
    return _coded(TopK(_fraction(fraction)), feedback)


def stc(fraction: float, feedback: bool = False) -> Encoding:
    return _coded(SparseTernary(_fraction(fraction)), feedback)


def eden(bits: int = 1, block: int = 1024, unbiased: bool = True, feedback: bool = False) -> Encoding:
    if bits not in (1, 2, 4):
        raise ConfigError(f"bits is {bits!r}: expected 1, 2 or 4.")
    if _block(block) & (block - 1):
        raise ConfigError(f"block is {block}: expected a power of two, such as 1024.")
    return _coded(Eden(bits, block, bool(unbiased)), feedback)


def grid(step: float, halve: float | None = None, feedback: bool = False) -> Encoding:
    if type(step) not in (int, float) or not 0 <= step <= 8:
        raise ConfigError(
            f"step is {step!r}: expected 0 to 8 times the root mean square of a tensor, such as 0.5."
        )
    if halve is not None and (type(halve) not in (int, float) or not 1 <= halve < math.inf):
        raise ConfigError(f"halve is {halve!r}: expected the rounds in which the step halves, such as 100.")
    return _coded(Grid(float(step), None if halve is None else float(halve)), feedback)


def powersgd(rank: int = 2, feedback: bool = False) -> Encoding:
    if type(rank) is not int or rank < 1:
        raise ConfigError(f"rank is {rank!r}: expected 1 or more.")
    return _coded(PowerSGD(rank), feedback)


ENCODINGS: dict[str, Callable[..., Encoding]] = {
    made.__name__: made
    for made in (float32, float16, bfloat16, int8, int4, int2, ternary, sign, topk, stc, eden, grid, powersgd)
}


def _coded(encoder: Encoder, feedback: bool) -> Encoding:
    return Encoding(encoder.text, encoder, feedback)


def _fraction(fraction: float) -> float:
    if type(fraction) not in (int, float) or not 0 < fraction < 1:
        raise ConfigError(f"fraction is {fraction!r}: expected a number above 0 and below 1, such as 0.01.")
    return float(fraction)


def _block(block: int) -> int:
    if type(block) is not int or not 16 <= block <= 1 << 20:
        raise ConfigError(f"block is {block!r}: expected 16 to {1 << 20} numbers per scale.")
    return block
