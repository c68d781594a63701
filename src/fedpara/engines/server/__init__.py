"""The server's part of a round, the same over every engine."""
