"""What a federation learns: losses, metrics, and the Task that joins them with a model."""

from fedpara.tasks.losses import LOSSES, Loss
from fedpara.tasks.metrics import METRICS, Metric, Score, metric
from fedpara.tasks.task import Augment, Task

__all__ = ["LOSSES", "METRICS", "Augment", "Loss", "Metric", "Score", "Task", "metric"]
