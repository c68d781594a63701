"""The frontier: accuracy against bytes, for combinations of a network and the links of both directions."""
