"""Who runs the clients."""

from fedpara.engines.progress import Progress, Round
from fedpara.engines.simulate import Run, simulate
from fedpara.engines.task import Task

__all__ = ["Progress", "Round", "Run", "Task", "simulate"]
