"""Combinations of a network, an uplink, a downlink and options, as text:

    fedpara0.1 eden/int8            FedPara with gamma 0.1; eden up, int8 down
    original topk1+/topk1 rotate    + is error feedback; options follow

Every word is a named value of the scale or of this file. A combination without links sends float32. A scale holds its
networks and its list of combinations.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedpara.errors import ConfigError, among
from fedpara.experiments.config import Experiment

Values = Mapping[str, Any]

LINKS = {
    "f32": "float32",
    "int8": "int8",
    "int4": "int4",
    "int4+": "int4(feedback=True)",
    "ternary": "ternary",
    "ternary+": "ternary(feedback=True)",
    "sign": "sign",
    "sign+": "sign(feedback=True)",
    "eden": "eden",
    "eden2": "eden(bits=2)",
    "eden+": "eden(unbiased=False, feedback=True)",
    **{f"topk{percent}": f"topk({percent / 100})" for percent in (1, 2, 3, 5)},
    **{f"topk{percent}+": f"topk({percent / 100}, feedback=True)" for percent in (1, 2, 3, 5)},
    **{f"stc{percent}": f"stc({percent / 100})" for percent in (1, 3, 5, 10)},
    **{f"grid{step:g}": f"grid({step!r})" for step in (0.0625, 0.125, 0.25, 0.5, 1.0)},
    **{f"grid{step:g}h86": f"grid({step!r}, halve=86.0)" for step in (0.125, 0.25)},
    **{f"stc{percent}+": f"stc({percent / 100}, feedback=True)" for percent in (1, 3, 5, 10)},
}
"""Links by their words in a combination; topk5 sends the largest 5%, stc5 their signs; grid1 has a step of 1 rms.

With h86 the step halves in 86 rounds, as a learning rate does that falls by 0.8% per round.
"""

OPTIONS: dict[str, Values] = {
    "rotate": {"rotate": True, "weight_decay": 0.0},
    **{f"recycle{layers}": {"recycle": layers} for layers in (1, 8)},
    "refit": {"products": "refit", "aggregation_error": True},
}
"""Rotation needs a weight decay of 0: a factor that rests must not move. refit: factors of the mean of the weights."""


@dataclass(frozen=True)
class Scale:
    """A setting, its networks, and the combinations to run. The others are compared with the first one."""

    base: Experiment
    networks: Mapping[str, Values]
    combinations: tuple[str, ...]
    target: float  # of "bytes to the target"
    validation: float  # the held-out fraction of the trials
    trial_rounds: int
    trial_target: float
    rates: tuple[
        float, ...
    ]  # the learning rates to try for every combination; empty if `tuned` chose each network's
    tuned: str | None = None  # the prepared study whose trials chose the settings of each network
    ratio: float | None = None  # FedMUD: the share of the original parameters that every method may train
    classes: int = 10
    final_scale: str | None = None
    """the scale of the final runs that use the choices of this one, if it is another"""

    def rates_of(self, combination: str) -> tuple[float, ...]:
        """The learning rates to try."""
        return self.rates or (self.experiment(combination).lr,)

    def experiment(self, combination: str) -> Experiment:
        """ConfigError if the combination has an unknown word."""
        network, *rest = combination.split()
        links, *options = rest or ["f32/f32"]
        up, _, down = links.partition("/")
        values = {
            **_value(network, self.networks, "network"),
            "link_up": _value(up, LINKS, "link"),
            "link_down": _value(down, LINKS, "link"),
        }
        for option in options:
            values |= _value(option, OPTIONS, "option")
        return replace(self.base, **values)


def _value(word: str, values: Mapping[str, Any], what: str) -> Any:
    if word not in values:
        raise ConfigError(f"unknown {what} {word!r} in a combination: {among(word, values)}")
    return values[word]
