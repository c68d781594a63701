"""Engines run the clients of a round; `simulate` runs a whole federated training."""

from fedpara.engines.progress import Progress, Round
from fedpara.engines.simulate import Run, simulate
from fedpara.tasks import Task

__all__ = ["Progress", "Round", "Run", "Task", "simulate"]
