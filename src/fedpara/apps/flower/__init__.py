"""The Flower apps and the `fedpara flower` commands."""
