"""Experiments: configs, presets, run folders, resume."""

from fedpara.experiments.config import Experiment
from fedpara.experiments.run import resume, run
from fedpara.experiments.storage.summary import Summary, read_run
from fedpara.experiments.studies.tune import tune

__all__ = ["Experiment", "Summary", "read_run", "resume", "run", "tune"]
