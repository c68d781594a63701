"""Every example runs unchanged."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
OUTPUT = {
    "01_factorize.py": ["times fewer to send", "merged: a plain"],
    "02_own_algorithm.py": ["fedavgm", "after 30 rounds"],
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_it_runs(path, tmp_path):
    done = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(words in done.stdout for words in OUTPUT[path.name])
    assert list(tmp_path.iterdir()) == []
