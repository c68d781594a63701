"""Tables: every number of ours comes from a run folder, and what is missing says so."""

import csv
import io
import re
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import pytest

from fedpara.experiments import paper
from fedpara.experiments.library import Library
from fedpara.report.document import BEGIN, END, document
from fedpara.report.figures import study_figure
from fedpara.report.formats import csv_text, latex, markdown, plain
from fedpara.report.others import COLUMNS, other_runs
from fedpara.report.page import page
from fedpara.report.tables import NO_NUMBER, NOT_REACHED, NOT_RUN, NOT_SCORED, half_width, table_of

ROOT = Path(__file__).parent.parent.parent


def entry(tables, study, row, column):
    (table,) = (table for table in tables if table.study.name == study)
    found = table.at(row, column)
    assert found is not None
    return found


def test_ours_is_the_mean_of_the_seeds_that_were_run(tables, library):
    found = entry(tables, "capacity-cnn", "FedPara", "CIFAR-10 IID")
    last = [100 * run.accuracy for run in library if run.experiment.scheme == "fedpara"]
    assert found.seeds == len(last) == 2
    assert found.value == pytest.approx(mean(last))
    assert found.spread == pytest.approx(stdev(last))
    assert found.text == f"{mean(last):.2f} ± {stdev(last):.2f}"
    assert found.paper_text == "82.88"
    assert len(found.runs) == 2


def test_what_was_not_run_and_what_was_not_reached(tables):
    assert entry(tables, "capacity-cnn", "FedPara", "CINIC-10 IID").text == NOT_RUN
    assert entry(tables, "communication", "CIFAR-10 IID, 80%", "FedPara [GB]").text == NOT_REACHED
    assert entry(tables, "communication", "CIFAR-10 non-IID, 70%", "times fewer").text == NOT_RUN
    assert entry(tables, "optimizers", "FedProx", "rounds to 80%").paper_text == "-"


def test_only_a_target_is_not_reached(library):
    unscored = {
        identity: tuple(replace(r, metrics=[line | {"accuracy": None} for line in r.metrics]) for r in runs)
        for identity, runs in library.runs.items()
    }
    names = ("capacity-cnn", "communication")
    tables = [table_of(paper.study(name), Library(unscored), range(4), scale="tiny") for name in names]
    assert entry(tables, "capacity-cnn", "FedPara", "CIFAR-10 IID").text == NOT_SCORED
    assert entry(tables, "communication", "CIFAR-10 IID, 80%", "FedPara [GB]").text == NOT_REACHED
    assert '"state":"unreached"' in page(Library(unscored), tables)


def test_runs_of_another_scale_are_not_taken_for_the_papers(library):
    table = table_of(paper.study("capacity-cnn"), library, range(2))
    assert table.run == 0


def test_a_95_percent_interval_by_hand():
    """n = 5, s = sqrt(2.5), t(0.975, 4) = 2.776"""
    assert half_width([1, 2, 3, 4, 5]) == pytest.approx(2.776 * 2.5**0.5 / 5**0.5)
    for n, t in {15: 2.145, 16: 2.131, 31: 2.042, 1001: 1.962}.items():  # as printed in tables of t
        assert half_width(range(n)) == pytest.approx(t * stdev(range(n)) / n**0.5, rel=5e-4)


def test_every_study_as_text(tables):
    for table in tables:
        shown = plain(table)
        assert all(row in shown for row in table.study.rows)
        lines = markdown(table).splitlines()
        assert len(lines) == 2 + len(table.study.rows)
        assert {line.count("|") for line in lines} == {2 + len(table.study.columns)}
        tex = latex(table)
        assert tex.count(r"\\") == 2 + len(table.study.rows) + bool(table.caveat)
        assert "γ" not in tex
        assert all(
            line.count("&") == 2 * len(table.study.columns)
            for line in tex.splitlines()
            if "&" in line and "multicolumn" not in line
        )


def test_a_miniature_is_called_so_wherever_it_stands_beside_the_paper(tables, library, tmp_path):
    said = "ours is a miniature: generated data, small networks, 2 rounds"
    trained = [table for table in tables if any(entry.seeds for entry in table.entries)]
    assert {table.study.name for table in trained} >= {"capacity-cnn", "communication"}
    for table in tables:
        assert table.caveat == (said if table in trained else "")
        for text in (
            plain(table),
            latex(table),
            document(tables).split(f"## {table.study.name}: ")[1].split("## ")[0],
        ):
            assert text.count(said) == (table in trained)
    assert document(tables).index(said) < document(tables).index(BEGIN)
    for row in csv.DictReader(io.StringIO(csv_text(tables))):
        assert (row["caveat"] == said) == (row["study"] in {table.study.name for table in trained})
    (table,) = (table for table in tables if table.study.name == "capacity-cnn")
    assert said.replace(": ", ":\n") in drawn(table, library, tmp_path)
    assert "ours" not in drawn(replace(table, caveat=""), library, tmp_path)


def drawn(table, library, folder):
    """The text of the figure, a line a line."""
    path = study_figure(table, list(library), folder / "figure.svg")
    return "\n".join(re.findall(r"<!-- (.*?) -->", path.read_text(), re.S))


def test_a_table_of_other_rounds_says_how_many(library):
    study = paper.study("capacity-cnn")
    assert table_of(study, library, range(2), rounds=1, scale="tiny").caveat.endswith(" networks, 1 round")
    assert table_of(study, library, range(2), rounds=2).caveat == "", "nothing of that scale is there"
    whole = paper.changes(rounds=2)(study.cells[0].experiments[0])
    found = Library({whole.identity: (replace(next(iter(library)), experiment=whole),)})
    assert table_of(study, found, [0], rounds=2).caveat == "ours is after 2 rounds, as was asked for"
    assert table_of(study, found, [0]).caveat == ""


def test_csv_has_a_line_a_cell_and_unrounded_numbers(tables):
    rows = list(csv.DictReader(io.StringIO(csv_text(tables))))
    assert len(rows) == sum(len(study.cells) for study in paper.STUDIES.values())
    (row,) = (
        r for r in rows if (r["study"], r["row"], r["column"]) == ("capacity-cnn", "FedPara", "CIFAR-10 IID")
    )
    assert float(row["ours"]) == entry(tables, "capacity-cnn", "FedPara", "CIFAR-10 IID").value
    assert row["seeds"] == "2"
    assert {r["state"] for r in rows} == {"run", "computed", NOT_RUN, NOT_REACHED}


def test_the_document_has_every_study_and_a_headline(tables):
    text = document(tables)
    assert all(f"## {name}: " in text for name in paper.STUDIES)
    assert 5 < text.split(BEGIN)[1].split(END)[0].count("\n") < 16
    assert NOT_RUN in text


def test_unequal_seeds_are_explained_where_two_runs_make_a_number(tables, runs, tmp_path):
    said = "A number of two runs is of the seeds that both have."
    assert said not in document(tables)
    for path in runs.iterdir():
        if not ("fedpara" in path.name and "seed1" in path.name):
            shutil.copytree(path, tmp_path / path.name)
    fewer = [
        table_of(study, Library.of(tmp_path), range(4), scale="tiny") for study in paper.STUDIES.values()
    ]
    sections = {part.split(":")[0]: part for part in document(fewer).split("\n## ")}
    assert said in sections["communication"]
    assert said not in sections["capacity-cnn"]


def test_the_documents_are_those_of_the_results():
    """`fedpara report results --out docs/reproduction.md`, and its headline between the README's two marks."""
    found = Library.of(ROOT / "results")
    tables = [table_of(study, found, found.seeds) for study in paper.STUDIES.values()]
    text = document([*tables, other_runs(found, tables)])
    assert (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8") == text
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if BEGIN in readme:
        assert readme.split(BEGIN)[1].split(END)[0] == text.split(BEGIN)[1].split(END)[0]


def test_runs_of_no_table_have_one_of_their_own(library, tables, tmp_path):
    assert other_runs(library, tables) is None, "the fixture's runs are all the miniature's"
    rest = other_runs(library, [])
    rows = {row: [rest.at(row, column) for column in COLUMNS] for row in rest.study.rows}
    assert len(rows) == 3
    assert all(len(entries[0].values) == 2 for entries in rows.values()), "two seeds are one row"
    names = [name for entries in rows.values() for name in entries[0].runs]
    assert sorted(names) == sorted(map(library.name_of, library))
    (row,) = (row for row in rows if "FedPara" in row)
    scored, rounds, sent = rows[row]
    twins = [run for run in library if run.experiment.scheme == "fedpara"]
    assert scored.value == pytest.approx(100 * sum(run.accuracy for run in twins) / 2)
    assert scored.spread is not None
    assert (rounds.value, rounds.spread) == (2, None)
    assert sent.value == (twins[0].bytes_up + twins[0].bytes_down) / 2**30

    for text in (markdown(rest), latex(rest)):
        assert scored.text in text or scored.text.replace("±", r"$\pm$") in text
        assert NO_NUMBER not in text, "the paper has no part in it"
    assert {line.count("&") for line in latex(rest).splitlines() if "&" in line} == {3}
    assert study_figure(rest, list(library), tmp_path / "runs.svg").exists()

    (early,) = (
        replace(run, metrics=[{**line, "accuracy": None} for line in run.metrics]) for run in twins[:1]
    )
    alone = other_runs(Library({early.experiment.identity: (early,)}), [])
    assert [e.column for e in alone.entries] == ["rounds", "GB sent"], "not scored yet"


@pytest.mark.parametrize(
    ("scheme", "change", "said"),
    [("original", {"cohort": 1}, "(cohort 1)"), ("fedpara", {"init": None}, "(default init)")],
)
def test_a_run_of_no_table_is_told_from_the_tables_own(library, tables, scheme, change, said):
    own = next(run for run in library if run.experiment.scheme == scheme)
    changed = replace(own.experiment, **change)
    assert changed != own.experiment
    other = replace(own, path=own.path.with_name("other"), experiment=changed)
    both = Library({**library.runs, changed.identity: (other,)})
    rest = other_runs(both, tables)
    assert len(rest.study.rows) == 1
    assert said in rest.study.rows[0]


def test_the_library_skips_what_is_no_run(tmp_path, runs):
    (tmp_path / "empty").mkdir()
    assert Library.of(tmp_path, tmp_path / "absent").runs == {}
    assert len(Library.of(runs, runs).runs) == len(Library.of(runs).runs), "a folder named twice counts once"
