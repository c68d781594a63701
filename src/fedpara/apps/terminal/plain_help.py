"""Help as plain text: `[default: page.html]`.

typer writes what it adds in brackets for rich's markup, `\\[default: page.html]`, also where that markup is off.
"""

from collections.abc import Iterable

import click
from typer.core import TyperGroup


class PlainFormatter(click.HelpFormatter):
    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl(
            [(first, second.replace("\\[", "[")) for first, second in rows], col_max, col_spacing
        )


class PlainContext(click.Context):
    formatter_class = PlainFormatter


class PlainGroup(TyperGroup):
    """A group whose help, and that of the commands in it, is plain."""

    context_class = PlainContext

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            command.context_class = PlainContext
        return command
