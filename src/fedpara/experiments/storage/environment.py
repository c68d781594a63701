"""The environment of a run: versions, machine, threads, command."""

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


def read_environment(folder: Path) -> dict[str, Any]:
    """The environment of a run folder. Empty if the file is missing or damaged, because it is only informative."""
    try:
        found = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def environment_warning(path: Path) -> str:
    """Warning text if torch or the thread count changed since the run began, else "".

    Both affect the order in which sums are added up, and so the last bits of every result.
    """
    then = read_environment(path)
    now = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    changed = [name for name, value in now.items() if then.get(name, value) != value]
    if not changed:
        return ""
    differences = [f"{name} {then[name]}, now {now[name]}" for name in changed]
    advice = f" Set OMP_NUM_THREADS={then['threads']} to run as before." * ("threads" in changed)
    return f"the run began with {' and '.join(differences)}: the next rounds may differ in their last bits.{advice}"


def _version() -> str:
    import fedpara

    return fedpara.__version__
