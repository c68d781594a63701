"""Studies of several runs: sweeps, tuning by validation, and the tables of the paper."""
