"""Checks of a run before its first round, so that a mistake costs no training time."""

from fedpara.engines.checks.run import check_run, smallest_batch, tell_unused_test_set

__all__ = ["check_run", "smallest_batch", "tell_unused_test_set"]
