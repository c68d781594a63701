"""Which processes still run."""

import subprocess


def alive(pids):
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,stat="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in listed.splitlines()]
    return {int(pid) for pid, state in rows if int(pid) in pids and not state.startswith("Z")}
