"""Link: the encoding of messages, up (client to server) and down. FedPAQ is `Link(up="float16")`.

    float32, float16, bfloat16, int8    each tensor in this type (`encoders/rounding.py`)
    int4, int2, ternary                 stochastic rounding to 15, 4 or 3 levels, one scale per block
    sign                                the sign, and one scale per block
    topk(0.01), stc(0.01)               the largest 1%, or their signs, and their positions
    eden                                a random rotation, then 1, 2 or 4 bits
    powersgd(rank=2)                    two factors of a matrix of this rank

Options are Python literals in parentheses, such as int4(block=64). With `feedback=True`, the sender adds what a message
left out to its next one. Integer tensors (BatchNorm's step counter) are sent unchanged on every link, and so are
buffers: rounding could turn a running variance negative.
"""

from dataclasses import dataclass
from functools import lru_cache

from fedpara import references
from fedpara.errors import ConfigError
from fedpara.wire.encoders import ENCODINGS, Encoding


@dataclass(frozen=True)
class Link:
    up: str = "float32"
    down: str = "float32"

    def __post_init__(self) -> None:
        up = parse_encoding(self.up, "Link up")
        if up.grid is not None and up.grid.halve is not None:
            raise ConfigError(
                f"Link up is {self.up!r}: halve is for the downlink. The grid of an update shrinks with the update."
            )
        parse_encoding(self.down, "Link down")

    @property
    def uplink(self) -> Encoding:
        return parse_encoding(self.up, "Link up")

    @property
    def downlink(self) -> Encoding:
        return parse_encoding(self.down, "Link down")


@lru_cache(maxsize=64)
def parse_encoding(text: str, what: str) -> Encoding:
    """The encoding that a text such as "int4(block=64)" names. Otherwise ConfigError, whose text begins with `what`."""
    if not isinstance(text, str) or text.partition("(")[0].strip() not in ENCODINGS:
        raise ConfigError(
            f"{what} is {text!r}: expected one of {', '.join(ENCODINGS)}, with options in parentheses such as "
            "topk(0.01). FedPAQ: Link(up='float16')."
        )
    name, arguments = references.library_call(text, ENCODINGS, what)
    try:
        return ENCODINGS[name](**arguments)
    except ConfigError as error:
        raise ConfigError(f"{what} is {text!r}: {error}") from None
