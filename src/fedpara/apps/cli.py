"""fedpara: inspect, run, resume, reproduce, report, export, data, flower.

Exit code 0 done, 1 failed, 2 wrong use, 130 interrupted.
"""

import io
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

import click
import typer

from fedpara import __version__
from fedpara.apps import commands
from fedpara.apps.data import app as data_app
from fedpara.apps.flower.cli import app as flower_app
from fedpara.apps.terminal.interrupt import NotBegun, starting
from fedpara.apps.terminal.plain_help import PlainGroup
from fedpara.apps.terminal.progress import say
from fedpara.errors import FedParaError, UsageError, in_a_line

if TYPE_CHECKING:
    from fedpara.engines.distributed.process_group import ProcessGroup

INTERRUPTED = 130
KEEPS = {"run", "resume", "reproduce"}
"""The commands that leave a run folder to go on with."""

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
app.command()(commands.reproduce)
app.command()(commands.report)
app.command()(commands.export)
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
    """SIGTERM, which torchrun sends to the ranks that are left when one has died."""


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated("SIGTERM")


def _command(group: "ProcessGroup | None") -> int:
    """Under torchrun all ranks run the command, in step, and rank 0 speaks for them."""
    if group is None or group.size == 1:
        return _call()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        with group.in_step("the end of the command"):
            return _call()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends by itself now, and says why


def _call() -> int:
    code = app(standalone_mode=False) or 0
    if code == INTERRUPTED:  # which typer makes of Ctrl-C
        raise KeyboardInterrupt
    return int(code)


def _told(error: OSError) -> str:
    """What the system says of a file: a full disk, a folder that may not be read, a name that is too long."""
    what = error.strerror or str(error) or type(error).__name__
    return f"{os.fsdecode(error.filename)}: {what}" if isinstance(error.filename, str | bytes) else what


def _flush() -> None:
    """All that was said is out, or OSError: Python itself would find out too late for an exit code."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python tries again as it ends
        raise OSError(error.errno, error.strerror, "stdout") from None


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # a file's name that is no text is said as it is
    first, group, begun = True, None, True
    try:
        if "WORLD_SIZE" in os.environ:  # set by torchrun; without it there is one process, and torch can wait
            with starting():
                from fedpara.engines.distributed.process_group import join, place
            first = place()[0] == 0
            group = join()
        try:
            code = _command(group)
        finally:
            _flush()
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except click.ClickException as error:
        if first:
            with suppress(OSError, ValueError):
                error.show()
        code = 2
    except (KeyboardInterrupt, click.exceptions.Abort):
        code = INTERRUPTED
    except NotBegun:
        code, begun = INTERRUPTED, False
    except FedParaError as error:
        if first or (group and group.over):  # rank 0 may be the one that is gone
            say(f"fedpara: {error}")
        code = 2 if isinstance(error, UsageError) else 1
    except BrokenPipeError:  # who read what was said has enough
        code = 1
    except OSError as error:
        if first or (group and group.over):
            say(f"fedpara: {_told(error)}")
        code = 1
    except MemoryError as error:
        say(f"fedpara: the memory ran out ({in_a_line(error)}): something smaller was expected.")
        code = 1
    if code == INTERRUPTED and first:
        kept = ": what was finished is saved, `fedpara resume` goes on with it" * bool(
            KEEPS & {*sys.argv[1:2]}
        )
        say(f"interrupted{kept if begun else ': nothing was begun'}.")
    if group:
        group.leave()
    sys.exit(code)
