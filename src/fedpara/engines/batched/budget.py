"""How much of a cohort fits into a device's memory: lanes on a CPU, trained states on a GPU."""

import os
import sys

import torch

from fedpara.algorithms.optimizers import build_optimizer
from fedpara.engines.session import Session
from fedpara.state import nbytes


def lanes_that_fit(session: Session, device: torch.device) -> int:
    """On a CPU, as many lanes as fit into half of the memory. On a GPU no limit: CUDA reports when memory is full."""
    if device.type == "cuda":
        return sys.maxsize
    return max(1, int(host_memory() / 2 / _lane_bytes(session)))


def cannot_wait(session: Session, device: torch.device, size: int) -> str:
    """Why the device cannot hold a cohort's trained states until the last client ends, or "".

    They may take half of its memory. Each state is there three times (as it leaves its lane, joined, and side by
    side), and each client's memory twice (as it was read, and stacked).
    """
    program, room = session.program, memory_of(device)
    state = {name: program.initial[name] for name in (*program.parameters, *program.buffers)}
    needed = size * (3 * len(session.trainings) * nbytes(state) + 2 * _memory_bytes(session))
    if 2 * needed <= room:
        return ""
    return (
        f"the cohort's states take {needed / 2**30:.3g} GiB with their copies, and half of {device}'s memory is "
        f"{room / 2**31:.3g} GiB: each state moves to the host when its client ends"
    )


def memory_of(device: torch.device) -> float:
    """Total bytes, used or free, so that the same run on the same machine always takes the same path."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host_memory()


def host_memory() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _lane_bytes(session: Session) -> int:
    """A lane's state, gradient, stepped state, correction and leaving state, and its client's memory.

    A second training has its own lanes.
    """
    program = session.program
    parameters = {name: program.initial[name] for name in program.parameters}
    slots = [build_optimizer(one.algorithm.local).init(parameters) for one in session.trainings]
    of_slots = sum(nbytes(state) for one in slots for state in one.values())
    return 5 * len(slots) * nbytes(parameters) + 2 * of_slots + 3 * _memory_bytes(session)


def _memory_bytes(session: Session) -> int:
    return sum(map(nbytes, session.first_memory(session.program.initial).values()))
