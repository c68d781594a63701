"""The report page is one self-contained file."""

import json
import re
import shutil
from dataclasses import replace

import pytest

from fedpara.experiments import Experiment, paper
from fedpara.experiments.paper.measures import minutes_to
from fedpara.experiments.storage.catalog import Library
from fedpara.report.page import page
from fedpara.report.series import aligned, all_series, label_of, panel_of, points
from fedpara.report.tables import table_of


@pytest.fixture(scope="module")
def text(library, tables):
    return page(library, tables)


def content(text):
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)[1])


def test_nothing_is_fetched(text):
    """The only URL is the SVG namespace."""
    assert set(re.findall(r"https?://[^\s\"'<)]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(
        r"\bimport\b[^;]*from|@import|fetch\(|XMLHttpRequest|<link[^>]+stylesheet|src=", text
    )
    assert "/* data */" not in text
    assert "/* style */" not in text
    assert len(text.encode()) < 5_000_000


def test_the_page_has_every_table_and_run(text, library, tables):
    found = content(text)
    assert [table["name"] for table in found["tables"]] == [table.study.name for table in tables]
    assert set(found["runs"]) == {library.name_of(run) for run in library}
    for table in found["tables"]:
        assert all(len(row["cells"]) == len(table["columns"]) for row in table["rows"])
        shown = [cell for row in table["rows"] for cell in row["cells"] if cell]
        assert all(name in found["runs"] for cell in shown for name in cell["runs"])
    some = next(iter(found["runs"].values()))
    assert some["config"]["dataset"] == "generated:cifar10"
    assert "torch" in some["environment"]


def test_a_table_of_miniatures_is_marked(text, tables):
    for shown, table in zip(content(text)["tables"], tables, strict=True):
        assert (table.caveat != "") == any(entry.seeds for entry in table.entries)
        if table.caveat:
            assert shown["source"] == f"{table.study.source}; {table.caveat}"
            assert shown["notes"][0] == f"{table.caveat}."


def test_seeds_are_one_series_with_a_range(text, library):
    found = content(text)
    assert len(found["series"]) == 3
    for series in found["series"]:
        assert len(series["runs"]) == 2
        assert series["rounds"] == [1, 2]
        rows = zip(series["low"], series["mean"], series["high"], strict=True)
        assert all(low <= middle <= high for low, middle, high in rows)
    labels = [label for _, label in found["groups"][0]["members"]]
    assert sorted(labels) == ["FedPara γ 0.1", "low-rank", "original"]


def test_seeds_are_averaged_by_round_even_if_one_was_prolonged(library):
    """Scored every 5 rounds and at the end: a run prolonged from 7 to 15 rounds has one more score."""
    some = next(iter(library))
    scores = {0: {5: 0.5, 7: 0.9, 10: 0.6, 15: 0.7}, 1: {5: 0.3, 10: 0.4, 15: 0.5}}
    runs = {}
    for seed, by_round in scores.items():
        lines = [some.metrics[0] | {"round": t, "accuracy": by_round.get(t)} for t in range(1, 16)]
        experiment = replace(some.experiment, seed=seed, evaluate_every=5)
        path = some.path.with_name(f"seed{seed}")
        runs[experiment.identity] = (replace(some, path=path, experiment=experiment, metrics=lines),)
    (series,) = content(page(Library(runs), []))["series"]
    assert series["rounds"] == [5, 10, 15]
    assert series["mean"] == [40.0, 50.0, 60.0]
    assert (series["low"], series["high"]) == ([30.0, 40.0, 50.0], [50.0, 60.0, 70.0])
    assert len(series["sent"]) == len(series["compute"]) == 3


def test_a_seed_without_a_common_round_is_left_out_of_the_curve(library):
    first, second = (run for run in library if run.experiment.scheme == "original")
    late = replace(second, metrics=[{**line, "round": line["round"] + 5} for line in second.metrics])
    found = aligned([first, late])
    assert found == [points(first)]
    assert aligned([replace(first, metrics=[])]) == []


def test_validation_scores_have_their_own_panel(library):
    some = next(iter(library))
    held = replace(
        some, experiment=replace(some.experiment, validation=0.1), path=some.path.with_name("held")
    )
    both = Library({**library.runs, held.experiment.identity: (held,)})
    shown = content(
        page(both, [table_of(study, both, range(4), scale="tiny") for study in paper.STUDIES.values()])
    )
    (own,) = (s for s in shown["series"] if s["scored"] == "Validation")
    assert own["runs"] == [both.name_of(held)]
    assert own["panel"].endswith(", validation")
    assert own["paper"] is None
    assert all(s["panel"] != own["panel"] for s in shown["series"] if s is not own)
    assert label_of(held.experiment).endswith("(validation)")
    assert shown["runs"][both.name_of(held)]["score"].endswith("% (validation)")


@pytest.mark.parametrize("split", ["dirichlet", "dirichlet-capped"])
def test_the_two_dirichlet_splits_are_two_panels(split):
    said = {"dirichlet": "non-IID (Dirichlet)", "dirichlet-capped": "non-IID (capped Dirichlet)"}
    assert panel_of(Experiment(dataset="cifar10", model="vgg16", split=split)) == f"CIFAR-10 {said[split]}"


def test_points_add_up_to_the_runs_bytes(library):
    run = next(iter(library))
    found = points(run)
    assert found.sent[-1] == run.bytes_up + run.bytes_down
    assert found.megabits[-1] == pytest.approx(
        8 * (run.bytes_up + run.bytes_down) / run.experiment.cohort / 1e6
    )
    assert found.compute[-1] == pytest.approx(run.seconds / run.experiment.cohort)


def test_rejected_clients_count_for_the_bytes(library):
    run = next(iter(library))
    refused = [{"client": 3, "reason": "it sent no reply"}]
    lines = [{**line, "clients": line["clients"] - 1, "refused": refused} for line in run.metrics]
    assert points(replace(run, metrics=lines)) == points(run)
    measure = minutes_to(0.0, 1.0, 1.0)
    assert measure(replace(run, metrics=lines)) == measure(run)


def test_personal_models_are_compared_on_the_clients_own_data(library):
    """FedAvg's accuracy is on the whole test set. Among personal models, its curve is before local training."""
    run = next(iter(library))
    lines = [{**line, "accuracy": 0.1, "before": 0.6, "after": 0.7} for line in run.metrics]
    for changes, expected in (({"share": "all"}, 60.0), ({"share": "none"}, 10.0)):
        experiment = replace(run.experiment, scheme="original", gamma=None, personal=True, **changes)
        assert set(points(replace(run, experiment=experiment, metrics=lines)).score) == {expected}


def test_labels_are_unique_in_a_panel(library):
    series = all_series(library)
    assert len({(one.panel, one.label) for one in series}) == len(series)
    assert {label_of(run.experiment) for run in library} == {"FedPara γ 0.1", "low-rank", "original"}


def test_runs_of_one_name_in_two_folders_get_unique_names(library, tmp_path):
    first, second, third = list(library)[:3]
    places = {"m1/runs/x": first, "m2/runs/x": second, "runs/y": third}
    for place, run in places.items():
        shutil.copytree(run.path, tmp_path / "all" / place)
    found = Library.of(tmp_path / "all")
    tables = [table_of(study, found, range(4), scale="tiny") for study in paper.STUDIES.values()]
    shown = content(page(found, tables))
    configs = {name: (run["config"]["scheme"], run["config"]["seed"]) for name, run in shown["runs"].items()}
    assert configs == {name: (run.experiment.scheme, run.experiment.seed) for name, run in places.items()}
    assert {name for series in shown["series"] for name in series["runs"]} == set(shown["runs"])
    assert {name for table in tables for entry in table.entries for name in entry.runs} <= set(shown["runs"])


@pytest.mark.parametrize("name", ["</script><b>", "<!--<script>", "<!-- <SCRIPT "])
def test_a_title_can_neither_end_the_script_nor_keep_it_open(library, tables, name):
    """After "<!--<script", the next "</script>" ends only the inner one, and the page stays blank."""
    wild = [replace(t, study=replace(t.study, title=name)) for t in tables]
    text = page(library, wild)
    data = text.split('<script id="data" type="application/json">')[1].split("</script>")[0]
    assert "<" not in data
    assert json.loads(data)["tables"][0]["title"] == name


def test_a_folder_name_cannot_keep_the_script_open(runs, tmp_path):
    for path in runs.iterdir():
        shutil.copytree(path, tmp_path / "<!--<script>" / path.name)
    found = Library.of(tmp_path)
    text = page(found, [])
    assert text.count("<!--") == 0
    assert all(name.startswith("<!--<script>/") for name in content(text)["runs"])
