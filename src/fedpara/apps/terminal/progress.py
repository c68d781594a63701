"""Progress of a run on stderr: a live bar on a terminal, otherwise a line every few seconds.

If stderr is closed or full, nothing is shown and the run continues: its folder has the log.
"""

import logging
import os
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO, cast

import typer

if TYPE_CHECKING:
    from fedpara.engines import Round


def say(text: str) -> None:
    with suppress(OSError, ValueError):
        typer.echo(text, err=True)


class TerminalHandler(logging.Handler):
    """Prints messages for the user to stderr; under torchrun only rank 0 does."""

    def emit(self, record: logging.LogRecord) -> None:
        if os.environ.get("RANK", "0") == "0":
            say(record.getMessage())


class TolerantStream:
    """A stream that drops output instead of raising if the terminal goes away."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


class Show:
    """Call it once per round: shows round, accuracy, bytes so far, clients per second and the time left."""

    def __init__(self, name: str, rounds: int) -> None:
        self.name, self.rounds = name, rounds
        self._bar: object | None = None
        self._last = 0.0
        self._score = "-"

    def __enter__(self) -> "Show":
        from fedpara.engines.distributed.process_group import join

        if join().rank == 0 and _is_terminal(sys.stderr):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(),
            )
            terminal = cast(TextIO, TolerantStream(sys.stderr))
            self._bar = bar = Progress(*columns, console=Console(file=terminal))
            bar.start()
            self._task = bar.add_task(self.name, total=self.rounds, facts="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()  # type: ignore[attr-defined]

    def __call__(self, result: "Round", timing: dict[str, float]) -> None:
        from fedpara.tasks.metrics import shown

        if result.score is not None:
            self._score = shown(result.primary, result.score)
        sent = (result.progress.bytes_up + result.progress.bytes_down) / 1e6
        speed = timing["clients_per_second"]
        facts = f"{result.primary} {self._score}  {sent:.2f} MB  {speed:.0f} clients/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=result.number, facts=facts)  # type: ignore[attr-defined]
        elif result.number == self.rounds or time.monotonic() - self._last > 5:
            self._last = time.monotonic()
            say(f"{self.name}: round {result.number}/{self.rounds}  {facts}")


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether it is a terminal. Python sets a stream to None if it was closed at start-up."""
    with suppress(ValueError):  # closed in the meantime
        return stream is not None and stream.isatty()
    return False
