"""Kills a real SuperNode in the middle of a stage. Python imports this file at its start, if it is on its path.

KILL_AT lists stage:client, such as masked:1. The process that Flower started for the request ends with its SuperNode,
both by SIGKILL, before it answers; a file in KILL_LOG tells the test. HEARTBEAT is the seconds between the heartbeats
of a SuperNode, 30 without it; the SuperLink counts a node as connected for twice as long. The time that a SuperNode
gives its own processes stays as it is: a busy machine starts them slowly.
"""

import os
import signal
import sys
from importlib.machinery import PathFinder
from pathlib import Path


class Changing:
    """Finds the modules that are changed, and calls their function once they are imported."""

    def __init__(self, changes):
        self.changes = changes

    def find_spec(self, name, path=None, target=None):
        if name not in self.changes:
            return None
        spec = PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            self.changes[name](module)

        spec.loader.exec_module = exec_module
        return spec


def kill_at(module):
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


def beat(module):
    module.HEARTBEAT_DEFAULT_INTERVAL = int(os.environ["HEARTBEAT"])


def ancestors():
    """The SuperNode of this process, and those in between; the SuperNode is first."""
    pid, found = os.getppid(), []
    while pid > 1:
        found.insert(0, pid)
        if b"flower-supernode" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return found
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return []


CHANGES = {
    "KILL_AT": {"fedpara.apps.flower.secure.node": kill_at},
    "HEARTBEAT": {"flwr.supernode.fleet_http_connection": beat, "flwr.supercore.heartbeat": beat},
}
sys.meta_path.insert(
    0, Changing({n: f for key, of in CHANGES.items() if key in os.environ for n, f in of.items()})
)
