"""Packs small numbers into bytes: 8 of base 2, 5 of base 3, 4 of base 4, 3 of base 6 or 2 of base 16 per byte.

byte = sum_i digit_i base^i
"""

from functools import cache

import torch
from torch import Tensor

from fedpara.errors import WireError

DIGITS = {2: 8, 3: 5, 4: 4, 6: 3, 16: 2}


def packed_length(count: int, base: int) -> int:
    """The bytes that hold `count` digits."""
    return -(-count // DIGITS[base])


def pack(digits: Tensor, base: int) -> Tensor:
    """The digits, uint8 below `base`, as bytes. Zeros fill the last byte."""
    each = DIGITS[base]
    filled = torch.nn.functional.pad(digits, (0, -digits.numel() % each)).view(-1, each)
    packed = filled[:, -1]
    for i in range(each - 2, -1, -1):
        packed = packed * base + filled[:, i]  # uint8: at most 255
    return packed.contiguous()


def unpack(packed: Tensor, base: int, count: int) -> Tensor:
    """The inverse: `count` digits, uint8. WireError if a byte is out of range, or the padding is not zero."""
    each = DIGITS[base]
    if base**each < 256 and bool((packed >= base**each).any()):
        raise WireError(f"a packed byte is above {base**each - 1}: expected {each} digits of base {base}.")
    digits = _table(base, packed.device)[packed.int()].view(torch.uint8).view(-1)
    if bool(digits[count:].any()):
        raise WireError("the unused digits of a packed byte are not zero.")
    return digits[:count]


@cache
def _table(base: int, device: torch.device) -> Tensor:
    """The digits of each byte value. Where an integer type fits, they are one number, which is faster to look up."""
    digits = (torch.arange(256)[:, None] // base ** torch.arange(DIGITS[base]) % base).to(torch.uint8)
    wide = {8: torch.int64, 4: torch.int32, 2: torch.int16}.get(DIGITS[base])
    return (digits if wide is None else digits.view(wide).view(-1)).to(device)
