"""Kills a real SuperNode in the middle of a stage. Python imports this file at its start, if it is on its path.

KILL_AT lists stage:client, such as masked:1. The process that Flower started for the request ends with its SuperNode,
both by SIGKILL, before it answers; a file in KILL_LOG tells the test. HEARTBEAT is the seconds between the heartbeats
of a SuperNode, 30 without it; the SuperLink counts a node as connected for twice as long.
"""

import os
import signal
import sys
from importlib.machinery import PathFinder
from pathlib import Path

NODE = "fedpara.apps.flower.secure.node"


class Killing:
    """Finds the module that answers a stage, and wraps its function."""

    def find_spec(self, name, path=None, target=None):
        if name != NODE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            respond = module.respond_stage

            def killed(request, *given):
                at = f"{request.kind}:{request.client}"
                if at in os.environ["KILL_AT"].split():
                    response = respond(request, *given)
                    (Path(os.environ["KILL_LOG"]) / at).write_text(str(len(response.message)))
                    for pid in [*ancestors(), os.getpid()]:
                        os.kill(pid, signal.SIGKILL)
                return respond(request, *given)

            module.respond_stage = killed

        spec.loader.exec_module = exec_module
        return spec


def ancestors():
    """The SuperNode of this process, and those in between; the SuperNode is first."""
    pid, found = os.getppid(), []
    while pid > 1:
        found.insert(0, pid)
        if b"flower-supernode" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return found
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return []


if "KILL_AT" in os.environ:
    sys.meta_path.insert(0, Killing())
if "HEARTBEAT" in os.environ:
    import flwr.common.constant

    flwr.common.constant.HEARTBEAT_DEFAULT_INTERVAL = int(os.environ["HEARTBEAT"])
