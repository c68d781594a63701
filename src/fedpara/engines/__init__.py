"""Engines run the clients of a round; `simulate` runs a whole federated training."""

from fedpara.engines.participation.devices import Devices, lognormal
from fedpara.engines.progress import Progress, Round
from fedpara.engines.result import Run
from fedpara.engines.simulate import simulate
from fedpara.tasks import Task

__all__ = ["Devices", "Progress", "Round", "Run", "Task", "lognormal", "simulate"]
