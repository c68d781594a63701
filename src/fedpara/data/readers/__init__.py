"""Readers of the publishers' files."""
