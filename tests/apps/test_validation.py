"""`fedpara run --validation`: the score is called what it is, wherever it is shown."""

import json

import pytest

from fedpara.experiments import read_run

TINY = (
    "run",
    "--model",
    "mlp",
    "--scheme",
    "original",
    "--clients",
    8,
    "--cohort",
    2,
    "--steps",
    1,
    "--rounds",
    2,
)


@pytest.fixture
def told(cli, tmp_path):
    def tell(*options):
        code, out, err = cli(*TINY, *options)
        assert code == 0, err
        return out

    return tell


def test_the_table_and_json_say_validation(told, cli):
    assert "% (validation)" in told("--validation", 0.1, "--out", "runs/held")
    assert (
        json.loads(told("--validation", 0.1, "--json", "--out", "other/held").splitlines()[-1])["scored"]
        == "validation"
    )
    assert "validation" not in told("--out", "runs/plain")
    assert "scored" not in json.loads(told("--json", "--out", "other/plain").splitlines()[-1])
    both = cli("resume", "runs")[1]
    assert both.count("% (validation)") == 1, "one of the two runs"


def test_a_report_keeps_the_two_apart(told, cli, tmp_path):
    told("--validation", 0.1, "--out", "runs/held")
    told("--out", "runs/plain")
    assert cli("report", "runs", "--out", "page.md")[0] == 0
    rows = [line for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith("| digits")]
    assert len(rows) == 2
    (held,) = (row for row in rows if "validation" in row)
    assert held.startswith("| digits non-IID (Dirichlet), validation, original (validation) |")


def test_weights_and_their_cap_are_written_to_the_config(told, cli, tmp_path):
    told("--weights", "uniform", "--max-share", 0.4, "--split", "iid", "--out", "runs/one")
    experiment = read_run(tmp_path / "runs" / "one").experiment
    assert (experiment.weights, experiment.max_share) == ("uniform", 0.4)
    for option, value, says in (
        ("--weights", "size", "unknown weights"),
        ("--max-share", 2, "max_share is 2"),
    ):
        code, _, err = cli(*TINY, option, value)
        assert (code, says in err) == (2, True), err
