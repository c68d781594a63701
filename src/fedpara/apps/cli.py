"""fedpara: inspect, run, resume, data, export. Exit code 0 done, 1 failed, 2 wrong use, 130 interrupted."""

import sys

import click
import typer

from fedpara import __version__
from fedpara.apps.data import app as data_app
from fedpara.apps.export import export
from fedpara.apps.inspect import inspect
from fedpara.apps.run import resume, run
from fedpara.errors import FedParaError, UsageError

INTERRUPTED = 130

app = typer.Typer(
    name="fedpara",
    help="FedPara: low-rank Hadamard products for communication-efficient federated learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(inspect)
app.command()(run)
app.command()(resume)
app.command()(export)
app.add_typer(data_app, name="data")


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


def main() -> None:
    try:
        code = app(standalone_mode=False)
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except click.ClickException as error:
        error.show()
        code = 2
    except (KeyboardInterrupt, click.exceptions.Abort):
        code = INTERRUPTED
    except FedParaError as error:
        typer.echo(f"fedpara: {error}", err=True)
        code = 2 if isinstance(error, UsageError) else 1
    if code == INTERRUPTED:  # which typer, too, makes of Ctrl-C
        typer.echo("interrupted: what was finished is saved, `fedpara resume` goes on with it.", err=True)
    sys.exit(code or 0)
