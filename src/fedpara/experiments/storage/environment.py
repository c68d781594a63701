"""What a run ran on: versions, machine, threads, command."""

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy
import safetensors
import torch


def environment() -> dict[str, Any]:
    return {
        "fedpara": _version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "safetensors": safetensors.__version__,
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def unlike(path: Path) -> str:
    """What decides the last bits of a sum and is not as the run folder began with it, in a sentence; or nothing.

    Threads share a sum among them and each torch has its own kernels: the run goes on, to other bits.
    """
    try:
        begun = json.loads((path / "environment.json").read_text(encoding="utf-8"))
        then = {"torch": str(begun["torch"]), "threads": int(begun["threads"])}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return ""  # of an earlier version, or none: it is for people, and nothing else hangs on it
    now = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    told = [f"{name} {value}, here {now[name]}" for name, value in then.items() if now[name] != value]
    if not told:
        return ""
    cure = f" OMP_NUM_THREADS={then['threads']} sets the threads." * (then["threads"] != now["threads"])
    return f"begun with {' and '.join(told)}: the rounds to come may differ in their last bits.{cure}"


def _version() -> str:
    import fedpara

    return fedpara.__version__
