"""`fedpara data`: list, verify and prepare data sets."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpara.apps.terminal.interrupt import starting
from fedpara.apps.terminal.plain_help import PlainGroup
from fedpara.errors import DataError

if TYPE_CHECKING:
    from fedpara import data

app = typer.Typer(
    cls=PlainGroup, help="Data sets: list, verify, prepare.", no_args_is_help=True, rich_markup_mode=None
)
Folder = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Folder of the data sets; default: FEDPARA_DATA, then the cache."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]


@app.command("list")
def list_(data_dir: Folder = None, as_json: Json = False) -> None:
    """List every data set: present or missing, and where.

    Example: fedpara data list
    """
    with starting():
        from fedpara import data
    for name in data.names():
        status = data.status(name, data_dir)
        if as_json:
            typer.echo(json.dumps(asdict(status), default=str))
        else:
            counts = f"{status.examples[0]:,} + {status.examples[1]:,}" if status.examples else ""
            where = str(status.path or "")
            typer.echo(f"{name:14} {'here' if status.present else 'missing':8} {counts:22} {where}".rstrip())
            if not status.present:
                typer.echo(f"{'':14} {status.note}")


@app.command()
def verify(
    name: Annotated[str, typer.Argument(help="A data set's name, or all.")] = "all",
    data_dir: Folder = None,
    as_json: Json = False,
) -> None:
    """Read every file of a data set and compare it with the publisher's sizes and checksums.

    Example: fedpara data verify cifar10
    """
    with starting():
        from fedpara import data
    names = [n for n in data.names() if data.status(n, data_dir).present] if name == "all" else [name]
    missing, bad = [], []
    for each in names:
        report = data.verify(each, data_dir)
        if as_json:
            typer.echo(json.dumps({**asdict(report), "ok": report.ok}, default=str))
        else:
            typer.echo(f"{each:14} {_found(report)}")
            for problem in report.problems:
                typer.echo(f"{'':14} {problem}", err=True)
        if report.path is None:
            missing.append(each)
        elif not report.ok:
            bad.append(each)
    texts = []
    if missing:
        texts.append(
            f"missing: {', '.join(missing)}. Get the files from their publisher, or give their folder with --data-dir."
        )
    if bad:
        texts.append(f"not as published: {', '.join(bad)}. Get the files from their publisher again.")
    if texts:
        raise DataError(" ".join(texts))


def _found(report: "data.Report") -> str:
    if report.path is None:
        return "missing"
    counts = f"{report.examples[0]:,} + {report.examples[1]:,} examples, " if report.examples else ""
    compared = (
        f"{report.checked} of {report.files} file{'s' * (report.files != 1)} compared with known checksums"
    )
    if not report.checked:
        compared = "no known checksums"
    return f"{'ok' if report.ok else 'damaged':8} {counts}{compared}"


@app.command()
def prepare(
    names: Annotated[list[str], typer.Argument(help="Names of data sets.")],
    data_dir: Folder = None,
    as_json: Json = False,
) -> None:
    """Write the compact cache: later starts load it in under a second.

    Example: fedpara data prepare cifar10 mnist
    """
    with starting():
        from fedpara import data
    for name in names:
        status: Any = data.prepare(name, data_dir)
        typer.echo(
            json.dumps(asdict(status), default=str) if as_json else f"{name}: {status.cache or status.note}"
        )
