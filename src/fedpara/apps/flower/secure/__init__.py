"""Secure aggregation on a Flower node."""
