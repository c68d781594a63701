"""The Flower apps, and `fedpara flower`."""
