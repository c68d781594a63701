"""`--engine flower`: Flower's simulator runs the folder's experiment; this process watches the folder.

Flower starts our ServerApp, not we it. So a Flower app that names the folder is written into a temporary home, a
SuperLink of our own runs it, and what the run folder says is shown as if the rounds were ours.
"""

import os
import re
import secrets
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from fedpara.apps.flower.app_folder import write_app, write_home
from fedpara.apps.flower.node import RUNS
from fedpara.apps.flower.processes import Processes, environment, free_port, require, tail, wait_for_port
from fedpara.engines import Progress, Round
from fedpara.errors import RunError
from fedpara.experiments import Summary, read_run
from fedpara.experiments.run import Speaker, Watcher
from fedpara.experiments.storage.checkpoint import final_checkpoint
from fedpara.experiments.storage.jsonl import read_lines
from fedpara.experiments.storage.run_folder import is_locked
from fedpara.experiments.storage.summary import read_config

LOOK = 0.2
# A slow machine is no reason to leave a simulated client out.
PATIENT = {"deadline": 7 * 86400, "hello": 600, "wait": 600, "poll": 0.02}
MOST_NODES = 100
QUIET = re.compile(r"stopped: |engine |node \d+ is number ")
"""Of the log's lines, those that are an error to be raised, or say that all is well."""


class Simulation:
    """One SuperLink and one Flower run for several folders, which it goes through in their order."""

    def __init__(self, paths: Sequence[Path], rounds: int | None, data_dir: Path | None) -> None:
        require()
        self._paths = [path.absolute() for path in paths]
        self._rounds, self._data_dir = rounds, data_dir
        self._stack = ExitStack()

    def __enter__(self) -> "Simulation":
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def resume(
        self,
        path: Path,
        *,
        rounds: int | None = None,
        engine: str | None = None,
        data_dir: Path | None = None,
        watch: Watcher | None = None,
        say: Speaker | None = None,
    ) -> Summary:
        """As `experiments.resume`; rounds and data are those the simulation was made with."""
        return follow(path, self._submitted, self._log, self._rounds, watch, say)

    def _start(self) -> None:
        threads, cores = torch.get_num_threads(), os.cpu_count() or 1
        folders = "\n".join(map(str, self._paths))
        given: dict[str, str | int | float] = {"out": folders, "threads": threads, **PATIENT}
        extra = {RUNS: folders}
        if self._rounds is not None:
            given["rounds"] = self._rounds
        if self._data_dir is not None:
            given["data-dir"] = extra["FEDPARA_DATA"] = str(self._data_dir.absolute())
        short = "/tmp" if os.path.isdir("/tmp") else None  # Ray's sockets need a short path
        processes = self._stack.enter_context(Processes())
        home, port = processes.folder(short), free_port()
        write_app(home / "app", given)
        write_home(home / "flwr", port)
        env = environment(home / "flwr", {**extra, **_closed_to_others(), "RAY_TMPDIR": str(home)})
        words = ["--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
        link = processes.start(["flower-superlink", *words], env, home / "superlink.log")
        wait_for_port(port, link, home / "superlink.log")
        nodes = max(min(e.clients, e.cohort, MOST_NODES) for e in map(read_config, self._paths))
        cpus = f"client-resources-num-cpus={threads} init-args-num-cpus={max(cores, threads)}"
        self._log = home / "run.log"
        words = [
            str(home / "app"),
            "federation",
            "--stream",
            "--federation-config",
            f"num-supernodes={nodes} {cpus}",
        ]
        self._submitted = processes.start(["flwr", "run", *words], env, self._log)


def _closed_to_others() -> dict[str, str]:
    """Ray runs code for whoever reaches one of its ports: only with this token, and only on loopback.

    The token is in the environment of our own processes alone, which no other user can read.
    """
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # Ray binds to 127.0.0.1 where it does not expect a cluster. The name is historical: Linux heeds it too.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }


def follow(
    path: Path,
    submitted: "subprocess.Popen[bytes]",
    output: Path,
    rounds: int | None,
    watch: Watcher | None,
    say: Speaker | None,
) -> Summary:
    """Show what the folder says until its run is done; RunError where it was stopped or Flower ended before."""
    log = path / "log.txt"
    shown, begun = read_run(path).rounds, log.stat().st_size if log.exists() else 0
    read = begun
    while True:
        ended = submitted.poll() is not None or (_is_stopped(log, begun) and not is_locked(path))
        done = _has_its_lines(path, rounds) and not is_locked(path) and _is_saved(path)
        if say is not None:
            read = _say_new(log, read, say)
        if watch is not None:
            shown = _watch_new(path, shown, watch)
        if done:
            return read_run(path)
        if ended:
            raise RunError(_why(log, output))
        time.sleep(LOOK)


def _has_its_lines(path: Path, rounds: int | None) -> bool:
    summary = read_run(path)
    target = summary.experiment.target
    met = target is not None and summary.reached(target) is not None
    return met or summary.rounds >= (rounds or summary.experiment.rounds)


def _is_saved(path: Path) -> bool:
    """A server that was killed before its checkpoint leaves a line of metrics for a round that is run again."""
    try:
        return final_checkpoint(path).round == read_run(path).rounds
    except RunError:
        return False


def _is_stopped(log: Path, begun: int) -> bool:
    """Flower may go on with other folders."""
    return log.exists() and b" stopped: " in log.read_bytes()[begun:]


def _say_new(log: Path, read: int, say: Speaker) -> int:
    if not log.exists():
        return read
    with log.open("rb") as file:
        file.seek(read)
        new = file.read()
    whole = new[: new.rfind(b"\n") + 1]
    for line in whole.decode(errors="replace").splitlines():
        text = line.partition(" ")[2]
        if not QUIET.match(text):
            say(text)
    return read + len(whole)


def _watch_new(path: Path, shown: int, watch: Watcher) -> int:
    """A resumed folder may be cut back by a round first: what was shown is not shown again."""
    timing = {line["round"]: line for line in read_lines(path / "timing.jsonl")}
    for line in read_lines(path / "metrics.jsonl"):
        if line["round"] > shown and line["round"] in timing:
            watch(_round(line), timing[line["round"]])
            shown = line["round"]
    return shown


def _round(line: dict[str, Any]) -> Round:
    """A round as its metrics tell it, without the tensors."""
    refused = tuple((entry["client"], entry["reason"]) for entry in line["refused"])
    return Round(
        Progress(line["round"], {}, {}, {}, line["total_up"], line["total_down"]),
        tuple(range(line["clients"])),
        float("nan") if line["train_loss"] is None else line["train_loss"],
        line["up"],
        line["down"],
        refused,
        line["accuracy"],
        line["loss"],
        line["before"],
        line["after"],
        tuple(line["notes"]),
    )


def _why(log: Path, output: Path) -> str:
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    if lines and " stopped: " in lines[-1]:
        kind, _, text = lines[-1].partition(" stopped: ")[2].partition(": ")
        return text or kind
    return (
        f"Flower ended the run in {log.parent} before its last round; the last it said: {_last(tail(output, 2000))} "
        "What was finished is saved: `fedpara resume` goes on with it."
    )


def _last(said: str) -> str:
    """Its last line that has a word in it; where Flower drew a box around its words, all of them."""
    lines = [line for line in said.splitlines() if re.search(r"[^\W\d_]", line)]
    boxed = [*takewhile(lambda line: line.startswith("│"), reversed(lines))]
    return " ".join(line.strip("│ ") for line in reversed(boxed or lines[-1:])) or "nothing."
