"""Training and scoring on one model: the steps of one client."""
