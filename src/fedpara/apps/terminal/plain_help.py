"""Help as plain text: `[default: page.html]`.

typer escapes brackets for rich's markup, as in `\\[default: page.html]`, even with the markup turned off.
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
    """A command group with plain help, also for its commands."""

    context_class = PlainContext

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            command.context_class = PlainContext
        return command
