"""The publishers' files, read to arrays."""
