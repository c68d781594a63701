"""Tables: our numbers come from run folders, and missing ones are marked."""

import csv
import io
import re
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import pytest

from fedpara.experiments import paper
from fedpara.experiments.seeds import half_width
from fedpara.experiments.storage.catalog import Library
from fedpara.report.document import BEGIN, END, document
from fedpara.report.figures import study_figure
from fedpara.report.formats import csv_text, latex, markdown, plain
from fedpara.report.others import COLUMNS, other_runs
from fedpara.report.page import page
from fedpara.report.tables import (
    NO_NUMBER,
    NOT_REACHED,
    NOT_RUN,
    NOT_SCORED,
    TO_RUN_AGAIN,
    ratio,
    spread_of,
    table_of,
)
from fedpara.report.tuned_studies import replacements, tuned_studies
from fedpara.report.tuning import with_tuned

ROOT = Path(__file__).parent.parent.parent


def entry(tables, study, row, column):
    (table,) = (table for table in tables if table.study.name == study)
    found = table.at(row, column)
    assert found is not None
    return found


def test_our_number_is_the_mean_over_the_seeds(tables, library):
    found = entry(tables, "capacity-cnn", "FedPara", "CIFAR-10 IID")
    last = [100 * run.accuracy for run in library if run.experiment.scheme == "fedpara"]
    assert found.seeds == len(last) == 2
    assert found.value == pytest.approx(mean(last))
    assert found.spread == pytest.approx(stdev(last))
    assert found.text == f"{mean(last):.2f} ± {stdev(last):.2f}"
    assert found.paper_text == "82.88"
    assert len(found.runs) == 2


def test_missing_runs_and_missed_targets_are_marked(tables):
    assert entry(tables, "capacity-cnn", "FedPara", "CINIC-10 IID").text == NOT_RUN
    assert entry(tables, "communication", "CIFAR-10 IID, 80%", "FedPara [GB]").text == NOT_REACHED
    assert entry(tables, "communication", "CIFAR-10 non-IID, 70%", "times fewer").text == NOT_RUN
    assert entry(tables, "optimizers", "FedProx", "rounds to 80%").paper_text == "-"


def test_only_targets_are_marked_as_not_reached(library):
    unscored = {
        identity: tuple(replace(r, metrics=[line | {"accuracy": None} for line in r.metrics]) for r in runs)
        for identity, runs in library.runs.items()
    }
    names = ("capacity-cnn", "communication")
    tables = [table_of(paper.study(name), Library(unscored), range(4), scale="tiny") for name in names]
    assert entry(tables, "capacity-cnn", "FedPara", "CIFAR-10 IID").text == NOT_SCORED
    assert entry(tables, "communication", "CIFAR-10 IID, 80%", "FedPara [GB]").text == NOT_REACHED
    assert '"state":"unreached"' in page(Library(unscored), tables)


def test_miniatures_do_not_fill_the_papers_tables(library):
    table = table_of(paper.study("capacity-cnn"), library, range(2))
    assert table.run == 0


def test_an_interval_uses_t_as_printed_in_tables():
    """n = 5, s = sqrt(2.5), t(0.975, 4) = 2.776"""
    assert spread_of([1, 2, 3, 4, 5], "ci95") == pytest.approx(2.776 * 2.5**0.5 / 5**0.5)
    for n, t in {2: 12.706, 15: 2.145, 16: 2.131, 31: 2.042, 1001: 1.962}.items():
        assert spread_of(range(n), "ci95") == pytest.approx(t * stdev(range(n)) / n**0.5)


def test_every_study_has_every_text_format(tables):
    for table in tables:
        shown = plain(table)
        assert all(row in shown for row in table.study.rows)
        lines = markdown(table).splitlines()
        assert len(lines) == 2 + len(table.study.rows)
        assert {line.count("|") for line in lines} == {2 + len(table.study.columns)}
        tex = latex(table)
        assert tex.count(r"\\") == 1 + table.of_paper + len(table.study.rows) + bool(table.caveat)
        assert "γ" not in tex
        assert all(
            line.count("&") == (1 + table.of_paper) * len(table.study.columns)
            for line in tex.splitlines()
            if "&" in line and "multicolumn" not in line
        )


def test_a_miniature_is_marked_in_every_format(tables, library, tmp_path):
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
    """The text of the figure."""
    path = study_figure(table, list(library), folder / "figure.svg")
    return "\n".join(re.findall(r"<!-- (.*?) -->", path.read_text(), re.S))


def test_a_table_of_other_rounds_is_marked(library):
    study = paper.study("capacity-cnn")
    assert table_of(study, library, range(2), rounds=1, scale="tiny").caveat.endswith(" networks, 1 round")
    assert table_of(study, library, range(2), rounds=2).caveat == "", "nothing of that scale is there"
    whole = paper.changes(rounds=2)(study.cells[0].experiments[0])
    found = Library({whole.identity: (replace(next(iter(library)), experiment=whole),)})
    assert table_of(study, found, [0], rounds=2).caveat == "ours is after 2 rounds"
    assert table_of(study, found, [0]).caveat == ""


def test_csv_has_one_line_per_cell_and_unrounded_numbers(tables):
    rows = list(csv.DictReader(io.StringIO(csv_text(tables))))
    assert len(rows) == sum(len(study.cells) for study in paper.STUDIES.values())
    (row,) = (
        r for r in rows if (r["study"], r["row"], r["column"]) == ("capacity-cnn", "FedPara", "CIFAR-10 IID")
    )
    assert float(row["ours"]) == entry(tables, "capacity-cnn", "FedPara", "CIFAR-10 IID").value
    assert row["seeds"] == "2"
    assert {r["state"] for r in rows} == {"run", "computed", NOT_RUN, NOT_REACHED}


def test_the_document_has_every_study_and_a_headline_with_seeds(tables):
    text = document(tables)
    assert all(f"## {name}: " in text for name in paper.STUDIES)
    headline = text.split(BEGIN)[1].split(END)[0]
    assert 5 < headline.count("\n") < 19
    fedpara = entry(tables, "capacity-cnn", "FedPara", "CIFAR-10 IID")
    assert f"| 82.88 | {fedpara.number_text} | 2 | {NO_NUMBER} |" in headline
    assert (
        f"| 77.62 | {entry(tables, 'capacity-cnn', 'low-rank', 'CIFAR-10 IID').number_text} | 2 |" in headline
    )
    assert f"| 86.05 | {NOT_RUN} | {NO_NUMBER} |" in headline
    assert "| 3.40× | 3.41× | computed | – |" in headline
    assert NOT_RUN in text


def test_a_ratio_is_of_means_by_hand():
    """12 / mean(1, 2, 3) = 6; s / mean is 0 (one seed) and 1/2, so ± 3. With 10 and 14 it is sqrt(8) / 12 and 1/2."""
    assert ratio([12], [1, 2, 3]) == pytest.approx((6.0, 3.0))
    assert ratio([10, 14], [1, 2, 3]) == pytest.approx((6.0, 6 * (8 / 144 + 1 / 4) ** 0.5))
    assert ratio([12], [2]) == (6.0, None)
    half = 4.303 * 1 / 3**0.5  # t(0.975, 2) s / sqrt(3), where s = 1
    assert ratio([12], [1, 2, 3], "ci95") == pytest.approx((6.0, 6 * half / 2))


def with_rounds_to_80(library, study, rounds):
    """Runs of the miniature that reach 80% in the given rounds, by scheme and seed. Each round sends 10 bytes."""
    runs = {}
    for scheme, numbers in rounds.items():
        of_setting = [e for c in study.cells if c.row.startswith("CIFAR-10 IID") for e in c.experiments]
        e = next(e for e in of_setting if e.scheme == scheme)
        for seed, last in numbers.items():
            experiment = paper.changes(seed)(e)
            some = next(iter(library))
            lines = [
                some.metrics[0]
                | {"round": t, "accuracy": 0.8 if t == last else 0.1, "total_up": 10 * t, "total_down": 0}
                for t in range(1, e.rounds + 1)
            ]
            path = some.path.with_name(f"{scheme}-{seed}")
            runs[experiment.identity] = (replace(some, path=path, experiment=experiment, metrics=lines),)
    return Library(runs)


def test_a_ratio_uses_all_seeds_of_each_side(library):
    """Rounds to 80%: 6 of one seed over the mean of 1, 2 and 3."""
    study, row = paper.study("communication"), "CIFAR-10 IID, 80%"
    found = with_rounds_to_80(library, study, {"original": {0: 6}, "fedpara": {0: 1, 1: 2, 2: 3}})
    table = table_of(study, found, range(4))
    fewer = table.at(row, "times fewer")
    assert (fewer.value, fewer.spread) == pytest.approx((3.0, 1.5))
    assert fewer.text == "3.0× ± 1.5 (1 and 3 seeds)"
    assert (fewer.number_text, fewer.seeds_text) == ("3.0× ± 1.5", "1 and 3")
    assert len(fewer.runs) == 4
    assert table.at(row, "FedPara [GB]").value == pytest.approx(20 / 2**30)
    (cell,) = (
        r
        for r in csv.DictReader(io.StringIO(csv_text([table])))
        if r["column"] == "times fewer" and r["row"] == row
    )
    assert cell["seeds"] == "1 and 3"
    said = document([table_of(s, found, range(4)) for s in paper.STUDIES.values()])
    assert (
        "A ratio divides two means, each over all seeds" in said.split("## communication")[1].split("## ")[0]
    )
    assert "A ratio" not in said.split("## capacity-cnn")[1].split("## ")[0]


def test_a_ratio_names_seeds_that_missed_the_target(library):
    study, row = paper.study("communication"), "CIFAR-10 IID, 80%"
    found = with_rounds_to_80(library, study, {"original": {0: 6, 1: 6}, "fedpara": {0: 2, 1: 999}})
    assert table_of(study, found, range(2)).at(row, "times fewer").text == "3.0× ± 0.0 (2 and 1 of 2 seeds)"
    both = with_rounds_to_80(library, study, {"original": {0: 6}, "fedpara": {0: 2}})
    assert table_of(study, both, range(2)).at(row, "times fewer").text == "3.0× (1 seed each)"
    none = with_rounds_to_80(library, study, {"original": {0: 6}, "fedpara": {0: 999}})
    assert table_of(study, none, range(2)).at(row, "times fewer").text == NOT_REACHED


def test_a_run_from_before_a_correction_does_not_fill_its_cell(library):
    """It is listed among the other runs, and its label says what it is."""
    study = paper.study("lstm")
    (new,) = (
        c.experiments[0] for c in study.cells if (c.row, c.column) == ("original", "Shakespeare non-IID")
    )
    old = replace(new, test_owners="all", rounds=2)
    some = next(iter(library))
    found = Library({old.identity: (replace(some, experiment=old),)})
    table = table_of(study, found, [0], rounds=2)
    cell = table.at("original", "Shakespeare non-IID")
    assert (cell.text, cell.runs) == (TO_RUN_AGAIN, ())
    assert table.at("FedPara, γ 0", "Shakespeare non-IID").text == NOT_RUN
    assert '"state":"missing"' in page(found, [table])
    (row,) = other_runs(found, [table]).study.rows
    assert row == "Shakespeare non-IID, scored on all owners' test data, original"
    again = replace(new, rounds=2)
    right = Library({**found.runs, again.identity: (replace(some, experiment=again),)})
    assert table_of(study, right, [0], rounds=2).at("original", "Shakespeare non-IID").value is not None


def test_the_mean_over_a_cohort_does_not_represent_all_clients(library):
    some = next(iter(library))
    experiment = replace(
        some.experiment, personal=True, share="none", scheme="original", gamma=None, init=None
    )
    run = replace(some, experiment=experiment)
    assert experiment.cohort < experiment.clients
    rest = other_runs(Library({"one": (run,)}), [])
    assert rest.entries[0].text == TO_RUN_AGAIN
    assert "only the scores of each round's cohort" in document([*tables_of(library), rest])
    everyone = {"accuracy": 0.5, "clients": 6, "of": 6}
    scored = replace(run, metrics=[*run.metrics[:-1], {**run.metrics[-1], "everyone": everyone}])
    assert other_runs(Library({"one": (scored,)}), []).entries[0].value == 50.0
    whole = replace(run, experiment=replace(experiment, cohort=experiment.clients))
    assert other_runs(Library({"one": (whole,)}), []).entries[0].value is not None


@pytest.mark.parametrize(
    "path", ["results/privacy/mnist/final/original/epsilon-4/seed=1", "results/frontier/digits/test/a"]
)
def test_runs_that_another_page_shows_are_left_out(library, path):
    run = replace(next(iter(library)), path=Path(path))
    assert other_runs(Library({"one": (run,)}), []) is None
    assert other_runs(Library({"one": (replace(run, path=Path("results/mine")),)}), []) is not None


def tables_of(library):
    return [table_of(study, library, range(4), scale="tiny") for study in paper.STUDIES.values()]


def test_a_validation_score_is_marked(library):
    some = next(iter(library))
    held = replace(
        some, experiment=replace(some.experiment, validation=0.1), path=some.path.with_name("held")
    )
    both = Library({**library.runs, held.experiment.identity: (held,)})
    assert all("held" not in name for t in tables_of(both) for e in t.entries for name in e.runs)
    (row,) = other_runs(both, tables_of(both)).study.rows
    assert "validation" in row


def test_the_documents_match_the_results():
    """`fedpara report results --out docs/reproduction.md`, and its headline between the README's marks."""
    found = Library.of(ROOT / "results")
    tuned = tuned_studies(found)
    chosen = replacements(tuned)
    tables = [table_of(study, found, found.seeds, tuned=chosen) for study in paper.STUDIES.values()]
    tables = with_tuned(tables, tuned, found)
    text = document([*tables, other_runs(found, tables)])
    assert (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8") == text
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if BEGIN in readme:
        assert readme.split(BEGIN)[1].split(END)[0] == text.split(BEGIN)[1].split(END)[0]


def test_the_note_on_fedavgs_learning_rate_matches_its_runs():
    found = Library.of(ROOT / "results" / "personal-femnist")
    before = [100 * run.metrics[-1]["before"] for run in found]
    assert {run.experiment.seed for run in found} == set(range(5))
    (note,) = (note for note in paper.study("personalization").notes if "FedAvg has" in note)
    assert f"at 0.1 FedAvg has {mean(before):.2f} ± {half_width(before):.2f} before local training" in note


def test_other_runs_have_their_own_table(library, tables, tmp_path):
    assert other_runs(library, tables) is None, "the fixture's runs are all the miniature's"
    rest = other_runs(library, [])
    rows = {row: [rest.at(row, column) for column in COLUMNS] for row in rest.study.rows}
    assert len(rows) == 3
    assert all(len(entries[0].samples[0].values) == 2 for entries in rows.values()), "two seeds are one row"
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
        assert NO_NUMBER not in text, "the paper has no such runs"
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
def test_other_runs_have_labels_unlike_those_of_the_tables(library, tables, scheme, change, said):
    own = next(run for run in library if run.experiment.scheme == scheme)
    changed = replace(own.experiment, **change)
    assert changed != own.experiment
    other = replace(own, path=own.path.with_name("other"), experiment=changed)
    both = Library({**library.runs, changed.identity: (other,)})
    rest = other_runs(both, tables)
    assert len(rest.study.rows) == 1
    assert said in rest.study.rows[0]


def test_the_library_skips_other_folders(tmp_path, runs):
    (tmp_path / "empty").mkdir()
    assert Library.of(tmp_path, tmp_path / "absent").runs == {}
    assert len(Library.of(runs, runs).runs) == len(Library.of(runs).runs), "a folder named twice counts once"
