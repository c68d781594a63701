"""The `fedpara` command. It is outside the package so that Ctrl-C is handled while the package is imported."""

import sys


def main() -> None:
    try:
        from fedpara.apps.cli import main as command
    except KeyboardInterrupt:
        if sys.stderr is not None:
            sys.stderr.write("interrupted: nothing was started.\n")
        sys.exit(130)
    command()
