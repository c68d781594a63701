"""Output of the command line: progress, tables, help."""
