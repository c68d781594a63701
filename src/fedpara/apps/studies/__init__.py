"""The commands that run several experiments."""
