"""The `cli` fixture: call fedpara in an empty folder."""

import sys

import pytest

from fedpara.apps.cli import main


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    """A function that calls fedpara in an empty folder and returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDPARA_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")  # independent of the terminal that runs the suite
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedpara", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return end.value.code, out, err

    return call
