"""Participation: who takes part in a round, how long clients take, and how the scores spread over clients."""
