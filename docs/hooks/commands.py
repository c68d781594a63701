"""MkDocs hook: write the command-line reference from the typer app, so that it cannot go out of date."""

from collections.abc import Iterator
from typing import Any

import click
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from fedpara.apps.cli import app

PAGE = "reference/command-line.md"
INTRO = """# Command line

This page lists every command and option. `fedpara COMMAND --help` prints the same text.

The exit code is 0 for success, 1 for a failure, 2 for wrong usage and 130 for an interrupted command.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = typer.main.get_command(app)
    sections = [INTRO, *(section(path, command) for path, command in commands(root, "fedpara"))]
    files.append(File.generated(config, PAGE, content="\n".join(sections)))
    return files


def commands(group: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    assert isinstance(group, click.Group)
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def section(path: str, command: click.Command) -> str:
    about, _, example = (command.help or "").partition("Example:")
    context = click.Context(command, info_name=path)
    lines = [f"## {path}", about.strip(), f"```text\n$ {command.get_usage(context)[7:]}\n```"]
    if example:
        lines.append(f"Example:\n\n```text\n$ {' '.join(example.split())}\n```")
    arguments = [p for p in command.params if isinstance(p, click.Argument)]
    options = [p for p in command.params if isinstance(p, click.Option) and p.name != "help"]
    if arguments:
        rows = [row(f"`{p.human_readable_name}`", getattr(p, "help", "")) for p in arguments]
        lines.append("\n".join(["| argument | meaning |", "|---|---|", *rows]))
    if options:
        rows = [row(names(p), described(p)) for p in options]
        lines.append("\n".join(["| option | meaning |", "|---|---|", *rows]))
    return "\n\n".join(lines) + "\n"


def names(option: click.Option) -> str:
    value = "" if option.is_flag else f" {option.type.name.upper()}"
    every = ", ".join([*option.opts, *option.secondary_opts])
    return f"`{every}{value}`".replace("INTEGER RANGE", "INTEGER")


def described(option: click.Option) -> str:
    default: Any = option.default
    shown = default not in (None, False, "", ()) and not callable(default)
    repeated = " May be repeated." if option.multiple else ""
    return f"{option.help or ''}{repeated}{f' Default: `{default}`.' if shown else ''}"


def row(first: str, second: str | None) -> str:
    text = " ".join((second or "").replace("|", "\\|").split())
    return f"| {first} | {text} |"
