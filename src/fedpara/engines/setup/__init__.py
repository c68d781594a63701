"""What is fixed before the first round: the session, and what privacy and rotation add to it."""
