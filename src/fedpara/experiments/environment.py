"""What a run ran on: versions, machine, threads, command."""

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


def _version() -> str:
    import fedpara

    return fedpara.__version__
