"""`fedpara report`: output files, formats, and files that are never replaced."""

import os
import shutil

import pytest

from fedpara.experiments.paper import STUDIES
from fedpara.experiments.studies.reproduce import carry_out


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    given = {"seeds": 1, "scale": "tiny", "finished_in": (), "engine": "sequential"}
    carry_out(["personalization"], out=folder, only="mnist-shards-mlp-original", **given)
    return folder


@pytest.mark.parametrize(
    ("name", "starts"),
    [
        ("page.html", "<!doctype html>"),
        ("page.md", "# Results: reproduction of the paper"),
        ("page.csv", "study,row,column,paper,ours"),
        ("page.tex", "% rank-histogram"),
    ],
)
def test_the_ending_of_out_chooses_the_format(cli, tmp_path, runs, name, starts):
    code, out, err = cli("report", runs, "--out", name, "--scale", "tiny")
    assert code == 0, err
    assert (tmp_path / name).read_text().startswith(starts)
    assert "3 runs" in out


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_figures_are_written_to_a_folder(cli, tmp_path, runs, kind):
    code, _, err = cli("report", runs, "--format", kind, "--out", "figures", "--scale", "tiny")
    assert code == 0, err
    found = {path.name for path in (tmp_path / "figures").iterdir()}
    assert found == {f"rank-histogram.{kind}", f"personalization.{kind}"}


def test_runs_that_are_not_the_papers_have_a_report_without_it(cli, tmp_path):
    code, _, err = cli(
        *("run", "--model", "mlp", "--scheme", "original", "--clients", 8, "--cohort", 2, "--steps", 1),
        *("--rounds", 3, "--out", "runs/mine"),
    )
    assert code == 0, err
    for kind in ("html", "markdown", "csv", "latex"):
        code, _, err = cli("report", "runs", "--out", "page", "--format", kind)
        assert code == 0, err
        text = (tmp_path / "page").read_text()
        assert "digits non-IID (Dirichlet), mlp" in text
        assert not any(study.title in text for study in STUDIES.values())
        (tmp_path / "page").unlink()
    code, out, err = cli("report", "runs", "--format", "pdf", "--out", "figures")
    assert (code, out) == (0, "figures/runs-1.pdf: digits non-IID (Dirichlet), mlp\n"), err
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["runs-1.pdf"]


def test_each_format_has_its_default_file(cli, tmp_path, runs):
    assert cli("report", runs)[0] == 0
    page = (tmp_path / "page.html").read_bytes()
    for kind, name in {"csv": "page.csv", "latex": "page.tex", "markdown": "page.md"}.items():
        assert cli("report", runs, "--format", kind)[0] == 0
        assert (tmp_path / name).exists()
    assert (tmp_path / "page.html").read_bytes() == page


def test_a_single_run_is_counted_in_the_singular(cli, runs):
    one = next(path.parent for path in runs.rglob("config.toml"))
    assert cli("report", one, "--out", "page.csv")[1].endswith(" kB, 1 run\n")


@pytest.mark.parametrize("kind", ["html", "csv"])
def test_a_folder_name_may_be_invalid_utf8(cli, tmp_path, runs, kind):
    odd = tmp_path / os.fsdecode(b"od\xff")
    shutil.copytree(next(path.parent for path in runs.rglob("config.toml")), odd / "run")
    code, _, err = cli("report", odd, "--out", "page", "--format", kind)
    assert code == 0, err
    assert "od?/run" in (tmp_path / "page").read_text()


def test_a_write_error_names_the_file_and_not_its_temporary_name(cli, runs):
    name = f"{'x' * 300}.csv"
    code, _, err = cli("report", runs, "--out", name)
    assert code == 1
    assert f"{name} could not be written: File name too long." in err
    assert ".part" not in err


def test_no_file_of_a_run_is_replaced(cli, tmp_path, runs):
    shutil.copytree(runs, tmp_path / "runs")
    one = next((tmp_path / "runs").rglob("metrics.jsonl")).parent
    before = {path: path.read_bytes() for path in one.rglob("*") if path.is_file()}
    for name in ("metrics.jsonl", "config.toml", "page.csv", "figures/page.csv"):
        code, out, err = cli("report", one, "--format", "csv", "--out", one / name)
        assert (code, out) == (2, "")
        assert f"is inside the run folder {one}" in err
    code, _, err = cli("report", one, "--format", "png", "--out", one)
    assert (code, "is inside the run folder" in err) == (2, True)
    assert before == {path: path.read_bytes() for path in one.rglob("*") if path.is_file()}


@pytest.mark.parametrize("left", ["model.json", "data.json", "environment.json", "metrics.jsonl"])
def test_nothing_is_written_into_a_run_that_has_just_started(cli, tmp_path, runs, left):
    one = tmp_path / "begun"
    one.mkdir()
    (one / "config.toml").write_text("")
    (one / left).write_text("")
    code, _, err = cli("report", runs, "--out", one / "page.csv")
    assert (code, "is inside the run folder" in err) == (2, True)
    assert {path.name for path in one.iterdir()} == {"config.toml", left}


def test_only_a_file_of_the_same_format_is_replaced(cli, tmp_path, runs):
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / "link").symlink_to("thesis.txt")
    for name, kind in {"thesis.txt": "csv", "page.csv": "latex", "link": "markdown"}.items():
        assert cli("report", runs, "--out", "page.csv")[0] == 0
        code, out, err = cli("report", runs, "--out", name, "--format", kind)
        assert (code, out) == (2, "")
        assert f"{name} exists and does not end in ." in err
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_mistakes(cli, tmp_path, runs):
    (tmp_path / "file").write_text("mine")
    for arguments, says in (
        (["report", runs, "--out", "page.doc"], "unknown format 'doc'"),
        (["report", runs, "--out", "file/page.html"], "the folder file cannot be made"),
        (["report", runs, "--out", "file/figures/page.html"], "the folder file/figures cannot be made"),
        (["report", runs, "--format", "png", "--out", "file"], "the folder file cannot be made"),
        (["report", tmp_path / "absent"], "does not exist"),
        (["report", runs, tmp_path / "absent"], "does not exist"),
        (["report", tmp_path], "no run in"),
    ):
        code, _, err = cli(*arguments)
        assert code == 2
        assert says in err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["metrics.jsonl", "timing.jsonl"])
def test_a_damaged_run_is_named(cli, tmp_path, runs, name):
    shutil.copytree(runs, tmp_path / "runs")
    path = sorted((tmp_path / "runs").rglob(name))[0]
    path.write_text('{"round": 1}\n')
    code, out, err = cli("report", "runs")
    assert code == 1
    assert "1 run cannot be read; the others are reported." in err
    assert f"{path} is damaged in line 1" in err
    assert "page.html: " in out
    assert "2 runs" in out
    code, _, err = cli("report", path.parent, "--out", "alone.html")
    assert (code, f"1 run cannot be read. {path} is damaged" in err) == (1, True)
    assert not (tmp_path / "alone.html").exists()


def test_a_damaged_config_is_named_and_a_lone_config_ignored(cli, tmp_path, runs):
    shutil.copytree(runs, tmp_path / "runs")
    (tmp_path / "runs" / "mine").mkdir()
    (tmp_path / "runs" / "mine" / "config.toml").write_text("of another program = [")
    assert cli("report", "runs")[0] == 0
    path = sorted((tmp_path / "runs").rglob("metrics.jsonl"))[0].with_name("config.toml")
    path.write_text("scheme = 'of a later version'")
    code, out, err = cli("report", "runs", "--format", "svg")
    assert (code, f"{path}, line 1: unknown scheme" in err) == (1, True), err
    assert "runs-1.svg" in out
