"""What is fixed before the first round: the session, and what privacy, rotation and recycling add to it."""
