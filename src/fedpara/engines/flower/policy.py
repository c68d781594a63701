"""What a Flower server grants its clients: how long it waits for them, and how many it needs."""

from dataclasses import dataclass, replace

from fedpara.choices import DEADLINE, MIN_REPLIES, OVERSAMPLE
from fedpara.engines.progress import Schedule
from fedpara.errors import ConfigError

LONGEST = 100_000_000
"""Seconds, three years: clocks and timers take no more than some."""


@dataclass(frozen=True)
class Policy:
    """What the server grants its clients."""

    deadline: float = DEADLINE  # seconds a round
    minimum: int = MIN_REPLIES  # good replies, else the round keeps the model
    oversample: int = OVERSAMPLE  # clients asked beyond the cohort, whose number of answers ends the round
    wait: float = 120.0  # seconds for nodes to appear, at the start and after a resume
    hello: float = 60.0  # seconds for a node to introduce itself
    poll: float = 0.5
    threads: int = 0  # of each client; 0 leaves it to the node

    def __post_init__(self) -> None:
        for name in ("deadline", "hello", "poll", "wait"):
            seconds = getattr(self, name)
            least = "0 or more" if name == "wait" else "above 0"
            if not (0 < seconds <= LONGEST or (seconds == 0 and name == "wait")):
                raise ConfigError(
                    f"{name} is {seconds}: expected a number of seconds {least}, up to {LONGEST:,}."
                )
        for name in ("minimum", "oversample", "threads"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                shown_as = "min_replies" if name == "minimum" else name
                raise ConfigError(f"{shown_as} is {value}: expected a whole number of 0 or more.")

    def schedule(self, schedule: Schedule) -> Schedule:
        if not 1 <= self.minimum <= schedule.cohort:
            raise ConfigError(
                f"min_replies is {self.minimum}: expected 1 to the cohort of {schedule.cohort}."
            )
        asked = schedule.cohort + self.oversample
        if asked > schedule.clients:
            raise ConfigError(
                f"oversample is {self.oversample}: a cohort of {schedule.cohort} and that many more are beyond "
                f"the {schedule.clients} clients."
            )
        return replace(schedule, cohort=asked, minimum=self.minimum)
