"""User and Example: the kinds of privacy, as values and as text such as user(noise=1.1, clip=0.5)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from fedpara.errors import ConfigError
from fedpara.privacy.clipping import clip_update, noise_of_updates
from fedpara.references import library_call
from fedpara.state import State, add, subtract

PRIVACY, CLIP = "privacy", "clip"
"""The server's variable that holds the bound of adaptive clipping, and its only tensor."""

SMALLEST_NOISE = 0.1
BIT_NOISE = 1 / 20
"""The default noise on the number of updates below the bound, as a share of the expected cohort."""


@dataclass(frozen=True)
class User:
    """User-level differential privacy: the models of a run hide whether any one client took part.

        d_i = (y_i - x) min(1, clip / ||y_i - x||);   y = x + (sum_i d_i + N(0, (noise clip)^2)) / (q N)

    noise      z, the noise multiplier: the standard deviation of the sum's noise over `clip`
    clip       C, the largest norm of an update, over all tensors that clients send
    quantile   moves C to this quantile of the clients' norms; `clip` is then the first C
    clip_rate  eta_C, how fast C moves
    bit_noise  s, the noise on the number of clients below C; by default a twentieth of the cohort, or z if larger

    N is the number of clients and q N the expected cohort. All clients count the same.
    """

    noise: float
    clip: float | None = None
    quantile: float | None = None
    clip_rate: float = 0.2
    bit_noise: float | None = None

    name: ClassVar[str] = "user"

    def __post_init__(self) -> None:
        _check_noise_and_clip(self)
        for name in ("clip_rate", "bit_noise"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"privacy {self}: {name} is {value}: expected a number above 0.")
        if self.quantile is not None and not 0 < self.quantile < 1:
            raise ConfigError(f"privacy {self}: quantile is {self.quantile}: expected above 0 and below 1.")

    def __str__(self) -> str:
        return text_of(self)

    @property
    def bound(self) -> float:
        """The first C."""
        assert self.clip is not None
        return self.clip

    @property
    def sum_noise(self) -> float:
        """z C: the standard deviation of the sum's noise, with a constant C."""
        return self.noise * self.bound

    @property
    def adaptive(self) -> bool:
        return self.quantile is not None

    def bounded(self, x: State, y: State, down: Mapping[str, State]) -> State:
        """The model that a client sends in place of y, at most C away from x."""
        bound = float(down[PRIVACY][CLIP]) if self.adaptive else self.bound
        d, norm = clip_update(subtract(y, x), bound)
        return y if norm <= bound else add(x, d)

    def bits(self, cohort: int) -> float:
        """s, the standard deviation of the noise on the bits."""
        return self.bit_noise if self.bit_noise is not None else max(cohort * BIT_NOISE, self.noise)

    def update_noise(self, cohort: int) -> float:
        """The noise multiplier of the updates: larger than `noise` if the bits of adaptive clipping share its cost."""
        if not self.adaptive:
            return self.noise
        bits = self.bits(cohort)
        if not 2 * bits > self.noise:
            raise ConfigError(
                f"privacy {self}: the bits have noise {bits:g}, so they alone cost more than noise {self.noise:g}: "
                f"expected a bit_noise above {self.noise / 2:g}."
            )
        return noise_of_updates(self.noise, bits)


@dataclass(frozen=True)
class Example:
    """Example-level differential privacy: what a client sends hides whether any one of its examples was there.

        g = (sum_j g_j min(1, clip / ||g_j||) + N(0, (noise clip)^2)) / B in every local step

    noise   z, the noise multiplier: the standard deviation of the noise over `clip`
    clip    C, the largest norm of one example's gradient

    The client adds the noise itself, so it need not trust the server. An example is in one batch of each epoch, and the
    cost is that of a Gaussian mechanism per use: no credit is taken for the shuffling of batches.
    """

    noise: float
    clip: float | None = None

    name: ClassVar[str] = "example"
    adaptive: ClassVar[bool] = False
    quantile: ClassVar[None] = None

    def __post_init__(self) -> None:
        _check_noise_and_clip(self)

    def __str__(self) -> str:
        return text_of(self)

    @property
    def bound(self) -> float:
        assert self.clip is not None
        return self.clip


Privacy = User | Example
KINDS: dict[str, Callable[..., Privacy]] = {"user": User, "example": Example}


def read_privacy(text: str) -> Privacy:
    """The kind of privacy in a config, such as user(noise=1.1, clip=0.5)."""
    if text.partition("(")[0].strip() not in KINDS:
        raise ConfigError(
            f"privacy is {text!r}: expected {' or '.join(KINDS)}, such as user(noise=1.1, clip=0.5)."
        )
    name, arguments = library_call(text, KINDS, "privacy")
    return KINDS[name](**arguments)


def _check_noise_and_clip(kind: Privacy) -> None:
    if kind.clip is None:
        raise ConfigError(
            f"privacy {kind} has noise and no clip: noise hides only what is bounded. Add a clip, such as clip=0.5."
        )
    if not kind.clip > 0:
        raise ConfigError(f"privacy {kind}: clip is {kind.clip}: expected a number above 0.")
    check_noise(kind.noise, f"privacy {kind}: noise")


def check_noise(noise: float, what: str) -> None:
    """ConfigError if the noise is below SMALLEST_NOISE."""
    if not noise >= SMALLEST_NOISE:
        raise ConfigError(
            f"{what} is {noise}: expected {SMALLEST_NOISE} or more. With less, a single round already costs an epsilon "
            "above 50."
        )


def text_of(privacy: Any) -> str:
    """The kind with the options that differ from their defaults."""
    given = [
        (f.name, getattr(privacy, f.name)) for f in fields(privacy) if getattr(privacy, f.name) != f.default
    ]
    return f"{privacy.name}({', '.join(f'{name}={value!r}' for name, value in given)})"
