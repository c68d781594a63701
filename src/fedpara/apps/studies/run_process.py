"""A process of `--jobs`: it resumes run folders one after another, as `fedpara resume` resumes one.

This way torch is imported once, and a compiled program is loaded once. Each line of stdin is the path of a run folder,
in JSON. The answer on stdout is the exit code of that run. What a run prints goes to output.txt in its folder. An error
that fedpara does not expect, such as one of CUDA, ends the process: later runs could fail for the same reason.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import TextIO

from fedpara.apps.cli import INTERRUPTED
from fedpara.apps.cli import main as command


def main() -> None:
    """The arguments are options of `fedpara resume`."""
    options = sys.argv[1:]
    paths, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    try:
        _serve(paths, answers, options)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _serve(paths: TextIO, answers: TextIO, options: list[str]) -> None:
    # These imports take seconds, so the command starts processes before it has runs for them.
    import torch
    import torch._dynamo  # otherwise imported at the first gradient

    from fedpara.apps import run  # noqa: F401
    from fedpara.experiments.storage.run_folder import OUTPUT

    gc.freeze()  # the collector skips objects of the imports
    for line in paths:
        path = Path(json.loads(line))
        _print_to(path / OUTPUT)
        code = _resume(path, options)
        if code == INTERRUPTED:
            sys.exit(code)
        gc.collect()
        if torch.cuda.is_initialized():
            torch._C._cuda_clearCublasWorkspaces()  # one per stream on which a step was captured
            torch.cuda.empty_cache()
        print(code, file=answers, flush=True)


def _print_to(file: Path) -> None:
    """Appends everything that this process prints from now on to the file."""
    sys.stdout.flush()
    sys.stderr.flush()
    with file.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)


def _resume(path: Path, options: list[str]) -> int:
    """The exit code of `fedpara resume PATH`."""
    sys.argv = ["fedpara", "resume", str(path), *options]
    try:
        command()
    except SystemExit as end:
        return int(end.code or 0)


if __name__ == "__main__":
    main()
