"""Tables for the terminal: as wide as it is, 120 columns in a file or a pipe. Long cells wrap."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def empty_table(words: Sequence[str], numbers: Sequence[str], title: str | None = None) -> "Table":
    """A table with left-aligned `words` columns, then right-aligned `numbers` columns."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading in words:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def print_table(table: "Table") -> None:
    from rich.console import Console

    # Without markup, a name that contains [red] prints unchanged.
    Console(width=None if sys.stdout.isatty() else 120, markup=False).print(table)
