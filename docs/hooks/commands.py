"""MkDocs hook: write the command-line reference from the typer app, so that it cannot go out of date."""

import re
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
        lines.append(f"Example:\n\n```text\n$ {wrapped(' '.join(example.split()))}\n```")
    arguments = [p for p in command.params if isinstance(p, click.Argument)]
    options = [p for p in command.params if isinstance(p, click.Option) and p.name != "help"]
    if arguments:
        rows = [row(f"`{p.human_readable_name}`", getattr(p, "help", "")) for p in arguments]
        lines.append("\n".join(["| argument | meaning |", "|---|---|", *rows]))
    if options:
        rows = [row(names(p), described(p)) for p in options]
        lines.append("\n".join(["| option | meaning |", "|---|---|", *rows]))
    return "\n\n".join(lines) + "\n"


def wrapped(command: str, width: int = 100) -> str:
    """The command on several lines, broken before options."""
    lines = [""]
    for part in re.split(r" (?=--)", command):
        if lines[-1] and len(lines[-1]) + len(part) > width - 2:
            lines.append(f"    {part}")
        else:
            lines[-1] = f"{lines[-1]} {part}" if lines[-1] else part
    return " \\\n".join(lines)


def names(option: click.Option) -> str:
    value = "" if option.is_flag else f" {option.type.name.upper().removesuffix(' RANGE')}"
    *others, last = [*option.opts, *option.secondary_opts]
    return ", ".join([*(f"`{name}`" for name in others), f"`{last}{value}`"])


def described(option: click.Option) -> str:
    text = re.sub(r"\s*\[default: (.*)\]$", "", option.help or "")
    found = re.search(r"\[default: (.*)\]$", option.help or "")
    default: Any = found[1] if found else option.default
    shown = default not in (None, False, "", ()) and not callable(default)
    repeated = option.multiple and not re.search("repeatable|may be repeated", text)
    sentences = [text if text.endswith((".", "]")) or not (repeated or shown) else f"{text}."]
    sentences += ["May be repeated."] * repeated + [f"Default: `{default}`."] * shown
    return " ".join(filter(None, sentences))


def row(first: str, second: str | None) -> str:
    text = " ".join((second or "").replace("|", "\\|").split())
    return f"| {first} | {text} |"
