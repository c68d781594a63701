"""Secure aggregation in a run: updates as vectors, the stages over an engine, the checks before the first round."""
