"""`fedpara reproduce tuned-NAME`: prepared studies whose settings are chosen by validation."""
