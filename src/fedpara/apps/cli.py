"""The `fedpara` command.

Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted.
"""

import io
import logging
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import click
import typer

from fedpara import __version__
from fedpara.apps import commands, output_commands, study_commands
from fedpara.apps.data import app as data_app
from fedpara.apps.flower.cli import app as flower_app
from fedpara.apps.terminal.interrupt import NotStarted, starting
from fedpara.apps.terminal.plain_help import PlainGroup
from fedpara.apps.terminal.progress import TerminalHandler, say
from fedpara.errors import FedParaError, UsageError, in_a_line

if TYPE_CHECKING:
    from fedpara.engines.distributed.process_group import ProcessGroup

INTERRUPTED = 130
_RESUME = "`fedpara resume` continues a run that has begun"
_AGAIN = "the same command continues"
RESUMABLE = {"run": _RESUME, "resume": _RESUME, "reproduce": _AGAIN, "sweep": _AGAIN, "tune": _AGAIN}
"""Commands that leave a resumable run folder when interrupted, and how to continue."""

app = typer.Typer(
    name="fedpara",
    cls=PlainGroup,
    help="FedPara: low-rank Hadamard products for communication-efficient federated learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(commands.inspect)
app.command()(commands.run)
app.command()(commands.resume)
app.command()(commands.privacy)
app.command()(study_commands.sweep)
app.command()(study_commands.tune)
app.command()(study_commands.reproduce)
app.command()(output_commands.report)
app.command()(output_commands.export)
app.add_typer(data_app, name="data")
app.add_typer(flower_app, name="flower")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedpara {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", callback=_version, is_eager=True
    ),
) -> None:
    pass


class Terminated(KeyboardInterrupt):
    """SIGTERM: torchrun sends it to the remaining ranks when one has died."""


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated("SIGTERM")


def _command(group: "ProcessGroup | None") -> int:
    """The command's exit code. Under torchrun every rank runs the command, and only rank 0 prints."""
    if group is None or group.size == 1:
        return _call()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        with group.in_step("the end of the command"):
            return _call()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this rank is about to print the cause and exit


def _call() -> int:
    logger, handler = logging.getLogger("fedpara"), TerminalHandler()
    logger.addHandler(handler)
    try:
        code = app(standalone_mode=False) or 0
    finally:
        logger.removeHandler(handler)
    if code == INTERRUPTED:  # typer turns Ctrl-C into this code
        raise KeyboardInterrupt
    return int(code)


def _describe(error: OSError) -> str:
    """The system's message after the file it concerns, such as `runs/a: Permission denied`."""
    what = error.strerror or str(error) or type(error).__name__
    return f"{os.fsdecode(error.filename)}: {what}" if isinstance(error.filename, str | bytes) else what


def _flush() -> None:
    """Write out stdout now: at exit, Python would report a full disk too late for an exit code."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again at exit
        raise OSError(error.errno, error.strerror, "stdout") from None


def main() -> NoReturn:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # file names need not be valid UTF-8
    first_rank, group, started = True, None, True
    try:
        if "WORLD_SIZE" in os.environ:  # torchrun sets it; a single process imports torch later
            with starting():
                from fedpara.engines.distributed.process_group import is_joined, join, place
            first_rank = place()[0] == 0
            group = join()
        try:
            code = _command(group)
        finally:
            _flush()
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except click.ClickException as error:
        if first_rank:
            with suppress(OSError, ValueError):
                error.show()
        code = 2
    except (KeyboardInterrupt, click.exceptions.Abort):
        code = INTERRUPTED
    except NotStarted:
        code, started = INTERRUPTED, False
    except FedParaError as error:
        if first_rank or (group.over if group else not is_joined()):  # rank 0 may have died
            say(f"fedpara: {error}")
        code = 2 if isinstance(error, UsageError) else 1
    except BrokenPipeError:  # the reader of stdout, such as `head`, has closed it
        code = 1
    except OSError as error:
        if first_rank or (group and group.over):
            say(f"fedpara: {_describe(error)}")
        code = 1
    except MemoryError as error:
        say(f"fedpara: out of memory ({in_a_line(error)}): try a smaller model or batch.")
        code = 1
    if code == INTERRUPTED and first_rank:
        how = RESUMABLE.get("".join(sys.argv[1:2]))
        saved = f": finished rounds are saved, {how}" if how else ""
        say(f"interrupted{saved if started else ': nothing was started'}.")
    if group:
        group.leave()
    sys.exit(code)
