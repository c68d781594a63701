"""A table on the terminal, as wide as that is; 120 columns in a file or a pipe. What does not fit goes on below."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def empty_table(words: Sequence[str], numbers: Sequence[str], title: str | None = None) -> "Table":
    """With these headings: words to the left, numbers to the right."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading in words:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def print_table(table: "Table") -> None:
    from rich.console import Console

    # No markup: a name with [red] in it is shown as it is.
    Console(width=None if sys.stdout.isatty() else 120, markup=False).print(table)
