"""Policy: how long a Flower server waits for its nodes, and how many replies a round needs."""

from dataclasses import dataclass, replace

from fedpara.choices import DEADLINE, MIN_REPLIES, OVERSAMPLE
from fedpara.engines.progress import Schedule
from fedpara.errors import ConfigError


@dataclass(frozen=True)
class Policy:
    deadline: float = DEADLINE  # seconds per round
    minimum: int = MIN_REPLIES  # good replies; with fewer the model stays unchanged
    oversample: int = (
        OVERSAMPLE  # clients asked beyond the cohort; the round ends after as many replies as the cohort
    )
    wait: float = 120.0  # seconds for nodes to appear, at the start and after a resume
    hello: float = 60.0  # seconds for a node to introduce itself
    poll: float = 0.5
    threads: int = 0  # per client; 0 lets the node decide

    def __post_init__(self) -> None:
        for name in ("deadline", "hello", "poll", "wait", "minimum", "oversample", "threads"):
            value, positive = getattr(self, name), name in ("deadline", "hello", "poll")
            if not value >= 0 or (positive and value == 0):
                shown = "min_replies" if name == "minimum" else name
                raise ConfigError(
                    f"{shown} is {value}: expected a number {'above 0' if positive else 'of 0 or more'}."
                )

    def schedule(self, schedule: Schedule) -> Schedule:
        """The schedule with the clients that are asked beyond the cohort, and the replies that a round needs."""
        cohort, spare = schedule.cohort, schedule.clients - schedule.cohort
        if not 1 <= self.minimum <= cohort:
            raise ConfigError(f"min_replies is {self.minimum}: expected 1 to the cohort of {cohort}.")
        if self.oversample > spare:
            raise ConfigError(
                f"oversample is {self.oversample}: only {spare} clients are outside the cohort."
            )
        if self.oversample and schedule.spending is not None:
            raise ConfigError(
                f"oversample is {self.oversample} in a private run, whose cost is that of the cohort alone: expected 0."
            )
        return replace(schedule, cohort=cohort + self.oversample, minimum=self.minimum)
