"""`--engine flower`: Flower's simulator runs the folder's experiment, and this process shows its progress.

Flower launches fedpara, not the reverse. So a Flower app that names the folder is written to a temporary home, and a
SuperLink runs it. The progress is read from the run folder.
"""

import logging
import os
import re
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
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
from fedpara.experiments.run import OnRound
from fedpara.experiments.storage.checkpoint import final_checkpoint
from fedpara.experiments.storage.jsonl import read_lines
from fedpara.experiments.storage.run_folder import is_locked
from fedpara.experiments.storage.summary import read_config, stops_early
from fedpara.source_files import portable_files

logger = logging.getLogger(__name__)

LOOK = 0.2
# A slow machine must not drop a simulated client.
PATIENT = {"deadline": 7 * 86400, "hello": 600, "wait": 600, "poll": 0.02}
MOST_NODES = 100
QUIET = re.compile(r"stopped: |engine |node \d+ is number ")
"""Log lines to hide: routine messages, and errors, which are raised instead."""


class Simulation:
    """One SuperLink and one Flower run for several folders, which run in order."""

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
        on_round: OnRound | None = None,
    ) -> Summary:
        """Like `experiments.resume`; rounds and data are those of the simulation."""
        return follow(path, self._submitted, self._log, self._rounds, on_round)

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
        experiments = [read_config(path) for path in self._paths]
        write_app(home / "app", given, portable_files(t for e in experiments for t in e.references.values()))
        write_home(home / "flwr", port)
        env = environment(home / "flwr", {**extra, **_closed_to_others(), "RAY_TMPDIR": str(home)})
        words = ["--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
        link = processes.start(["flower-superlink", *words], env, home / "superlink.log")
        wait_for_port(port, link, home / "superlink.log")
        nodes = max(min(e.clients, e.cohort, MOST_NODES) for e in experiments)
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
    """Ray runs code for anyone who reaches its ports: this requires a token and binds to loopback.

    The token is only in the environment of our own processes, which other users cannot read.
    """
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # Without a cluster Ray binds to 127.0.0.1. Despite its name, the variable also works on Linux.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }


def follow(
    path: Path,
    submitted: "subprocess.Popen[bytes]",
    output: Path,
    rounds: int | None,
    on_round: OnRound | None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Summary:
    """Show the folder's progress until its run is done. RunError if it stopped or Flower ended earlier.

    Calls `meanwhile` between two checks.
    """
    log = path / "log.txt"
    shown, log_start = read_run(path).rounds, log.stat().st_size if log.exists() else 0
    read = log_start
    while True:
        ended = submitted.poll() is not None or (_is_stopped(log, log_start) and not is_locked(path))
        done = _has_its_lines(path, rounds) and not is_locked(path) and _is_saved(path)
        read = _repeat_log(log, read)
        if on_round is not None:
            shown = _show_new(path, shown, on_round)
        if done:
            return read_run(path)
        if ended:
            raise RunError(_why(log, output))
        meanwhile()
        time.sleep(LOOK)


def _has_its_lines(path: Path, rounds: int | None) -> bool:
    summary = read_run(path)
    experiment = summary.experiment
    return summary.rounds >= (rounds or experiment.rounds) or stops_early(
        experiment, summary.metrics, summary.metric
    )


def _is_saved(path: Path) -> bool:
    """Whether the checkpoint belongs to the last line. A killed server may leave a line for a round that runs again."""
    try:
        return final_checkpoint(path).round == read_run(path).rounds
    except RunError:
        return False


def _is_stopped(log: Path, log_start: int) -> bool:
    """Whether this folder's run stopped; Flower may still run other folders."""
    return log.exists() and b" stopped: " in log.read_bytes()[log_start:]


def _repeat_log(log: Path, read: int) -> int:
    if not log.exists():
        return read
    with log.open("rb") as file:
        file.seek(read)
        new = file.read()
    whole = new[: new.rfind(b"\n") + 1]
    for line in whole.decode(errors="replace").splitlines():
        text = line.partition(" ")[2]
        if not QUIET.match(text):
            logger.info("%s", text)
    return read + len(whole)


def _show_new(path: Path, shown: int, on_round: OnRound) -> int:
    """Shows new rounds. A resumed folder may repeat a round, which is not shown twice."""
    timing = {line["round"]: line for line in read_lines(path / "timing.jsonl")}
    for line in read_lines(path / "metrics.jsonl"):
        if line["round"] > shown and line["round"] in timing:
            on_round(_round(line), timing[line["round"]])
            shown = line["round"]
    return shown


def _round(line: dict[str, Any]) -> Round:
    """The round that a line of metrics describes, without tensors."""
    refused = tuple((entry["client"], entry["reason"]) for entry in line["refused"])
    scores = line.get("scores") or {name: line[name] for name in ("accuracy", "loss")}
    return Round(
        Progress(line["round"], {}, {}, {}, line["total_up"], line["total_down"]),
        tuple(range(line["clients"])),
        float("nan") if line["train_loss"] is None else line["train_loss"],
        line["up"],
        line["down"],
        refused,
        {name: value for name, value in scores.items() if value is not None},
        line["before"],
        line["after"],
        tuple(line["notes"]),
        primary=next(iter(scores)) if "score" in line else "accuracy",
    )


def _why(log: Path, output: Path) -> str:
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    if lines and " stopped: " in lines[-1]:
        kind, _, text = lines[-1].partition(" stopped: ")[2].partition(": ")
        return text or kind
    said = tail(output, 2000)
    raised = re.findall(r"^fedpara\.errors\.\w+: (.+)$", said, re.MULTILINE)  # raised before the log was open
    if raised:
        return str(raised[-1])
    return (
        f"Flower ended the run in {log.parent} before its last round. Its last message: {_last(said)} "
        "Finished rounds are saved: resume with `fedpara resume`."
    )


def _last(output_text: str) -> str:
    """The last line that contains a word, or the whole text of Flower's last box."""
    lines = [line for line in output_text.splitlines() if re.search(r"[^\W\d_]", line)]
    boxed = [*takewhile(lambda line: line.startswith("│"), reversed(lines))]
    return " ".join(line.strip("│ ") for line in reversed(boxed or lines[-1:])) or "nothing."
