"""`fedpara run --validation`: every output labels the score as validation."""

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
def run(cli, tmp_path):
    def call(*options):
        code, out, err = cli(*TINY, *options)
        assert code == 0, err
        return out

    return call


def test_the_table_and_the_json_say_validation(run, cli):
    assert "% (validation)" in run("--validation", 0.1, "--out", "runs/held")
    assert (
        json.loads(run("--validation", 0.1, "--json", "--out", "other/held").splitlines()[-1])["scored"]
        == "validation"
    )
    assert "validation" not in run("--out", "runs/plain")
    assert "scored" not in json.loads(run("--json", "--out", "other/plain").splitlines()[-1])
    both = cli("resume", "runs")[1]
    assert both.count("% (validation)") == 1, "one of the two runs"


def test_a_report_separates_validation_from_test_scores(run, cli, tmp_path):
    run("--validation", 0.1, "--out", "runs/held")
    run("--out", "runs/plain")
    assert cli("report", "runs", "--out", "page.md")[0] == 0
    titles = [line for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith("## ")]
    assert len(titles) == 2, "the two kinds of scores are not compared in one table"
    assert sorted("validation" in title for title in titles) == [False, True]


def test_weights_and_their_cap_are_written_to_the_config(run, cli, tmp_path):
    run("--weights", "uniform", "--max-share", 0.4, "--split", "iid", "--out", "runs/one")
    experiment = read_run(tmp_path / "runs" / "one").experiment
    assert (experiment.weights, experiment.max_share) == ("uniform", 0.4)
    for option, value, says in (
        ("--weights", "size", "unknown weights"),
        ("--max-share", 2, "max_share is 2"),
    ):
        code, _, err = cli(*TINY, option, value)
        assert (code, says in err) == (2, True), err
