"""The command `fedpara`: beside the package, whose import takes seconds in which Ctrl-C may come."""

import sys


def main() -> None:
    try:
        from fedpara.apps.cli import main as command
    except KeyboardInterrupt:
        if sys.stderr is not None:
            sys.stderr.write("interrupted: nothing was begun.\n")
        sys.exit(130)
    command()
