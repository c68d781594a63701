"""Two processes that meet like torchrun's ranks."""

import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import torch

ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": str(torch.get_num_threads()),
    "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])),
}


@contextmanager
def ranks(*words, cwd):
    """Two processes that find each other like torchrun's. If one dies, nothing stops the other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**ENVIRONMENT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": cwd}
    started = [
        subprocess.Popen([sys.executable, *words], env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}, **pipes)
        for r in range(2)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def ended(processes):
    """(exit code, stdout, stderr) of each."""
    texts = [process.communicate(timeout=120) for process in processes]
    return [(process.returncode, *text) for process, text in zip(processes, texts, strict=True)]
