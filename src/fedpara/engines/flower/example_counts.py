"""ExampleCounts: how many examples each client has, if only nodes know. The first count a node states is binding.

A count is a client's weight in the mean, so a node must not change it between rounds. The counts are a JSON file in the
run folder, such as {"0": 812, "1": 440}, so that a resumed run keeps them.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from fedpara.errors import RunError
from fedpara.files import write_bytes

MAX_EXAMPLES = 1 << 40


class ExampleCounts:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts = _read(path) if path.exists() else {}

    def examples(self, client: int) -> int:
        """0 until the client's node has stated a count."""
        return self._counts.get(client, 0)

    def objection(self, clients: Sequence[int], examples: int) -> str:
        """Why these clients cannot have this many examples each, or ""."""
        if not 1 <= examples <= MAX_EXAMPLES:
            return f"it states {examples} examples: expected 1 to {MAX_EXAMPLES}"
        if len(clients) > 1:
            return (
                f"it brings its own data, which is one client, and would serve {len(clients)}: set clients to the "
                "number of nodes, or correct its number in --node-config"
            )
        for client in clients:
            if (pinned := self.examples(client)) not in (0, examples):
                return (
                    f"it states {examples} examples for client {client}, which began this run with {pinned}: restore "
                    "its data, or start a new run"
                )
        return ""

    def pin(self, clients: Sequence[int], examples: int) -> None:
        """Store the count of those clients that have none yet."""
        counts = {**dict.fromkeys(clients, examples), **self._counts}
        if counts != self._counts:
            named = {str(client): counts[client] for client in sorted(counts)}
            write_bytes(self._path, (json.dumps(named) + "\n").encode())
            self._counts = counts


def _read(path: Path) -> dict[int, int]:
    try:
        counts = {int(client): count for client, count in json.loads(path.read_bytes()).items()}
    except (OSError, ValueError, AttributeError) as error:
        raise _unreadable(path, str(error)) from None
    if wrong := [
        count for count in counts.values() if type(count) is not int or not 1 <= count <= MAX_EXAMPLES
    ]:
        raise _unreadable(path, f"a count is {wrong[0]!r}")
    return counts


def _unreadable(path: Path, why: str) -> RunError:
    return RunError(
        f'{path} cannot be read ({why}): expected each client\'s number of examples, such as {{"0": 812}}. Restore the '
        "file, or delete it to accept the counts that the nodes state next."
    )
