"""Tables on terminals of any width show every character of every cell."""

import re
import sys

import pytest

from fedpara.apps.terminal.table import empty_table, print_table


@pytest.mark.parametrize("width", [24, 40, 60, 200])
def test_long_cells_wrap_on_a_terminal(capsys, monkeypatch, width):
    table = empty_table(["run", "what"], ["sent [MB]"])
    table.add_row("pfedpara-[red]", "a", "68.12345")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(table)
    lines = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= width
    rows = [line.split("│") for line in lines if line.startswith("│")]
    name, what, sent = (
        "".join(cell.strip() for cell in cells) for cells in list(zip(*rows, strict=True))[1:4]
    )
    assert (name, what, sent) == ("pfedpara-[red]", "a", "68.12345")


def test_a_pipe_gets_unwrapped_lines(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "24")
    table = empty_table(["run"], ["accuracy", "sent [MB]"])
    table.add_row("pfedpara", "96.2%", "10.03")
    print_table(table)
    assert "│ pfedpara │    96.2% │     10.03 │" in capsys.readouterr().out
