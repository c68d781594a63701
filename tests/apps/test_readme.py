"""What the README shows can be done as it stands there."""

import re
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def commands(pattern):
    """The README's shell lines that match, without their comments."""
    lines = re.findall(rf"^    (fedpara {pattern}.*)$", README, re.MULTILINE)
    return [line.partition("#")[0].split()[1:] for line in lines]


def test_what_it_runs_it_can_export(cli, tmp_path):
    """On digits: MNIST is not everywhere. The clients and who takes part are the same."""
    (started,) = commands("run .*--out runs/one")
    (exported,) = commands("export runs/one")
    assert started[1:3] == ["--dataset", "mnist"]
    assert cli("run", "--dataset", "digits", *started[3:])[0] == 0
    code, _, err = cli(*exported)
    assert code == 0, err
    assert [path.name for path in (tmp_path / "runs" / "one").glob("*.onnx")] == ["model-client-0.onnx"]
