"""Progress of a run: a live bar on a terminal, a plain line now and then elsewhere. Both go to stderr."""

import sys
import time
from types import TracebackType

import typer

from fedpara.engines import Round
from fedpara.engines.group import join


def say(text: str) -> None:
    typer.echo(text, err=True)


class Show:
    """Called once a round: round, accuracy, bytes so far, clients a second, time left."""

    def __init__(self, name: str, rounds: int) -> None:
        self.name, self.rounds = name, rounds
        self._bar: object | None = None
        self._last = 0.0
        self._accuracy = "-"

    def __enter__(self) -> "Show":
        if sys.stderr.isatty() and join().rank == 0:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(),
            )
            self._bar = bar = Progress(*columns, console=Console(stderr=True))
            bar.start()
            self._task = bar.add_task(self.name, total=self.rounds, facts="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()  # type: ignore[attr-defined]

    def __call__(self, result: Round, timing: dict[str, float]) -> None:
        if result.accuracy is not None:
            self._accuracy = f"{result.accuracy:.2%}"
        sent = (result.progress.bytes_up + result.progress.bytes_down) / 1e6
        speed = timing["clients_per_second"]
        facts = f"accuracy {self._accuracy}  {sent:.2f} MB  {speed:.0f} clients/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=result.number, facts=facts)  # type: ignore[attr-defined]
        elif result.number == self.rounds or time.monotonic() - self._last > 5:
            self._last = time.monotonic()
            typer.echo(f"{self.name}: round {result.number}/{self.rounds}  {facts}", err=True)
