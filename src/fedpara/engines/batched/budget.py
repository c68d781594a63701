"""How much of a cohort fits into a device's memory: lanes on a CPU, waiting states on a GPU."""

import os
import sys

import torch

from fedpara.engines.session import Session
from fedpara.state import nbytes


def lanes_that_fit(session: Session, device: torch.device) -> int:
    """On a CPU, as many lanes as half of the memory holds. A GPU itself reports that its memory is full."""
    if device.type == "cuda":
        return sys.maxsize
    return max(1, int(host_memory() / 2 / _lane_bytes(session)))


def cannot_wait(session: Session, device: torch.device, size: int) -> str:
    """Why a cohort's trained states cannot wait on the device for the last one, or "".

    They need half of its memory at most: each state three times (as it leaves its lane, joined, and side by side), and
    what the clients own.
    """
    program, room = session.program, memory_of(device)
    state = {name: program.initial[name] for name in (*program.parameters, *program.buffers)}
    needed = size * (3 * nbytes(state) + _owned_bytes(session))
    if 2 * needed <= room:
        return ""
    return (
        f"the cohort's states, {needed / 2**30:.3g} GiB with their copies, do not wait on {device}, which has "
        f"{room / 2**30:.3g}: they go to the host as clients end"
    )


def memory_of(device: torch.device) -> float:
    """Bytes in total, whoever else uses them: the same run on the same machine takes the same path."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host_memory()


def host_memory() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _lane_bytes(session: Session) -> int:
    """A lane's state, gradient, stepped state, correction and leaving state, and what its client owns."""
    program = session.program
    parameters = {name: program.initial[name] for name in program.parameters}
    momentum = 2 if session.algorithm.local.momentum else 0
    return (5 + momentum) * nbytes(parameters) + 3 * _owned_bytes(session)


def _owned_bytes(session: Session) -> int:
    return sum(map(nbytes, session.first(session.program.initial).values()))
