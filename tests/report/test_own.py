"""Reports of runs that are not the paper's: settings, intervals, metrics, and nothing of the paper."""

import csv
import io
import json
import re
from pathlib import Path

import pytest

from fedpara.experiments import Experiment, Summary, paper
from fedpara.experiments.seeds import Mean
from fedpara.experiments.storage.catalog import Library
from fedpara.experiments.storage.summary import Primary
from fedpara.report.figures import section_figure
from fedpara.report.formats import latex
from fedpara.report.own import sections, tables
from fedpara.report.own_formats import csv_text, document
from fedpara.report.page import own_page
from fedpara.report.tables import NO_NUMBER, NOT_REACHED

ACCURACY, MSE = Primary(), Primary("mse", higher_is_better=False)
SCORES = {"fedpara": ([0.5, 0.7], [0.6, 0.9], [0.4, 0.8]), "lowrank": ([0.3, 0.6], [0.4, 0.5])}
"""Two rounds of each seed, by scheme."""


def summary(scores, metric=ACCURACY, sent=10**6, **fields):
    """A run with these scores, which sends `sent` bytes per round."""
    lines = []
    for number, score in enumerate(scores, 1):
        named = {"accuracy": score} if metric == ACCURACY else {"accuracy": None, "score": score}
        bytes_ = {"up": sent, "down": 0, "total_up": number * sent, "total_down": 0}
        lines.append({"round": number, "clients": 10, "refused": [], **named, **bytes_})
    experiment = Experiment(model="mlp", **fields)
    return Summary(Path("/runs") / "-".join(map(str, fields.values())), experiment, lines, [], metric)


def library_of(runs):
    return Library({str(i): (run,) for i, run in enumerate(runs)})


def of_schemes(metric=ACCURACY, **fields):
    return [
        summary(scores, metric, scheme=scheme, seed=seed, **fields)
        for scheme, each in SCORES.items()
        for seed, scores in enumerate(each)
    ]


def reported(runs):
    found = sections(runs)
    return found, tables(found, library_of(runs))


def texts(runs):
    """The report in every text format; of the page, the data that it shows."""
    found, made = reported(runs)
    page = own_page(library_of(runs), made, found)
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)[1]
    tex = "\n".join(map(latex, made))
    return {
        "markdown": document(made, len(runs), "runs", "page.md"),
        "csv": csv_text(made, found),
        "tex": tex,
        "html": data,
    }


def test_seeds_become_a_mean_with_its_interval():
    ((section,), (table,)) = reported(of_schemes())
    assert section.panel == "digits non-IID (Dirichlet), mlp"
    assert table.study.rows == ["FedPara", "low-rank"], "the best first"
    best = table.at("FedPara", "accuracy [%]")
    expected = Mean.of([70.0, 90.0, 80.0])
    assert (best.value, best.spread) == pytest.approx((80.0, 4.302652729749462 * 10 / 3**0.5))
    assert best.text == f"80.00 ± {expected.half:.2f}"
    assert [table.at(row, "seeds").text for row in table.study.rows] == ["3", "2"]
    assert table.at("FedPara", "MB sent").text == "2"


def test_one_seed_has_no_interval():
    runs = [summary([0.5, 0.7], scheme="fedpara"), summary([0.2, 0.4], scheme="lowrank")]
    (_, (table,)) = reported(runs)
    assert table.at("FedPara", "accuracy [%]").text == "70.00"
    curve = [row for row in rows_of(runs) if row["part"] == "curve"]
    assert {(row["low"], row["high"], row["n"]) for row in curve} == {("", "", "1")}


def rows_of(runs):
    return list(csv.DictReader(io.StringIO(texts(runs)["csv"])))


def test_the_csv_has_the_bands_of_the_curves():
    found = [row for row in rows_of(of_schemes()) if (row["part"], row["setting"]) == ("curve", "FedPara")]
    assert [(row["round"], row["bytes"], row["n"]) for row in found] == [
        ("1", "1000000", "3"),
        ("2", "2000000", "3"),
    ]
    for row, values in zip(found, ([50, 60, 40], [70, 90, 80]), strict=True):
        expected = Mean.of(values)
        numbers = [float(row[name]) for name in ("mean", "low", "high")]
        assert numbers == pytest.approx([expected.value, expected.low, expected.high])


def test_nothing_of_the_paper_is_shown():
    for kind, text in texts(of_schemes()).items():
        for study in paper.STUDIES.values():
            assert study.title not in text, kind
        assert not re.search("Reproduction|not run here|Other runs|Not in the paper", text), kind
    shown = json.loads(texts(of_schemes())["html"])
    assert shown["texts"]["heading"] == "Runs"
    assert all(not table["paper"] for table in shown["tables"])


def test_the_lowest_loss_is_best_and_its_target_counts_downwards():
    runs = of_schemes(MSE)
    ((section,), (table,)) = reported(runs)
    assert table.study.rows == ["low-rank", "FedPara"]
    assert table.at("low-rank", "mse").text.startswith("0.55 ± ")
    assert section.targets == [0.6], "the worst of the lowest: 0.3, 0.4, 0.5, 0.6, 0.4"
    assert table.at("FedPara", "MB to 0.6").value == 1.0
    assert "mse" in texts(runs)["markdown"]
    assert "accuracy" not in texts(runs)["markdown"]
    metrics = [series["metric"] for series in json.loads(texts(runs)["html"])["series"]]
    assert metrics == [{"name": "mse", "percent": False, "higher": False}] * 2


def test_every_other_metric_has_a_column():
    runs = of_schemes()
    for run in runs:
        run.metrics[-1]["scores"] = {"accuracy": 0.5, "loss": 1.0, "top-5": 0.9, "own": 0.25}
    table = reported(runs)[1][0]
    assert table.at("FedPara", "top-5 [%]").value == pytest.approx(90)
    assert table.at("FedPara", "own").value == 0.25
    assert "loss" not in {entry.column for entry in table.entries}


def test_another_metric_of_other_models_has_no_column():
    """The score is the mean over all clients' own models; the metrics beside it are those of the last cohort."""
    runs = of_schemes(personal=True)
    for run in runs:
        run.metrics[-1]["scores"] = {"accuracy": 0.5, "top-5": 0.9}
        run.metrics[-1]["everyone"] = {"accuracy": 0.6, "clients": 10, "of": 10}
    assert "top-5 [%]" not in {entry.column for entry in reported(runs)[1][0].entries}


def test_runs_without_privacy_have_no_epsilon():
    private, open_ = of_schemes()[0], of_schemes()[-1]
    private.metrics[-1]["privacy"] = {"epsilon": 3.5, "delta": 1e-5, "private": True}
    table = reported([private, open_])[1][0]
    assert table.at("FedPara", "epsilon").number_text == "3.5"
    assert {table.at("low-rank", name).number_text for name in ("epsilon", "delta")} == {NO_NUMBER}


def test_the_common_target_is_reached_by_every_run():
    ((section,), (table,)) = reported(of_schemes())
    assert section.targets == [0.5], "the worst of the best: 0.7, 0.9, 0.8, 0.6, 0.5"
    reached = table.at("FedPara", "MB to 50%")
    assert (reached.value, reached.samples[0].count) == (pytest.approx(4 / 3), "3")


def test_a_given_target_may_be_missed():
    (_, (table,)) = reported(of_schemes(target=0.8))
    assert table.at("FedPara", "MB to 80%").text.endswith("(2 of 3 seeds)")
    assert table.at("low-rank", "MB to 80%").text == NOT_REACHED


def test_metrics_and_data_sets_have_their_own_sections():
    runs = [*of_schemes(), *of_schemes(MSE), *of_schemes(split="iid")]
    found, _ = reported(runs)
    assert [section.panel for section in found] == [
        "digits non-IID (Dirichlet), mlp",
        "digits non-IID (Dirichlet), mlp, mse",
        "digits IID, mlp",
    ]


def test_labels_name_the_fields_that_differ():
    runs = [summary([0.1], scheme="fedpara", lr=lr, momentum=m) for lr, m in ((0.1, 0.0), (0.02, 0.9))]
    runs += [summary([0.1], scheme="lowrank", lr=0.1, rank=r) for r in (2, 4)]
    ((section,), _) = reported(runs)
    assert {one.label for one in section.series} == {
        "FedPara, lr 0.1",
        "FedPara, lr 0.02, momentum 0.9",
        "low-rank, rank 2, lr 0.1",
        "low-rank, rank 4, lr 0.1",
    }


def test_digests_are_named_only_if_nothing_else_differs():
    def of(algorithm, number, seed=0):
        objects = f"model aa, weights w{seed}, algorithm a{number}"
        return summary([0.1], scheme="original", algorithm=algorithm, objects=objects, seed=seed)

    ((section,), _) = reported([of("python:one", 1), of("python:two", 2)])
    assert {one.label for one in section.series} == {"original python:one", "original python:two"}
    ((section,), _) = reported([of("python:one", 1), of("python:one", 2), of("python:one", 2, seed=1)])
    assert {one.label for one in section.series} == {
        "original python:one, algorithm a1",
        "original python:one, algorithm a2",
    }


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_a_global_model_is_named_after_its_algorithm(algorithm):
    ((section,), _) = reported([summary([0.1], scheme="original", algorithm=algorithm, personal=True)])
    name = {"fedavg": "FedAvg", "scaffold": "SCAFFOLD"}[algorithm]
    assert [one.label for one in section.series] == [f"{name}'s global model"]


@pytest.mark.parametrize(
    ("sent", "heading", "text"),
    [(1, "kB sent", "0.002"), (10**5, "kB sent", "200"), (10**7, "MB sent", "20"), (10**10, "GB sent", "20")],
)
def test_bytes_have_a_readable_unit(sent, heading, text):
    (_, (table,)) = reported([summary([0.1, 0.2], sent=sent, scheme="fedpara")])
    assert table.at("FedPara", heading).text == text


def test_scores_of_all_clients_have_a_table():
    runs = of_schemes(personal=True)
    assert len(reported(runs)[1]) == 1
    for seed, run in enumerate(runs[:3]):
        everyone = {"accuracy": 0.6, "worst_tenth": 0.1 * seed, "spread": 0.2, "clients": 10, "of": 10}
        run.metrics[-1]["everyone"] = everyone
    _, (_, table) = reported(runs)
    assert table.study.columns == ["mean [%]", "worst tenth [%]", "standard deviation [%]", "clients"]
    assert table.at("FedPara", "worst tenth [%]").text == f"10.00 ± {Mean.of([0, 10, 20]).half:.2f}"
    assert table.at("FedPara", "clients").text == "10"


def test_a_run_without_a_round_is_no_error():
    found = texts([summary([], scheme="fedpara")])
    assert "No run has finished a round yet." in found["markdown"]
    assert "No run has finished a round yet." in found["html"]


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_figure_is_the_same_file_each_time(tmp_path, ending):
    (section,) = sections(of_schemes())
    first, second = (section_figure(section, tmp_path / f"{name}.{ending}") for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    if ending == "svg":
        shown = re.findall(r"<!-- (.*?) -->", first.read_text(), re.S)
        assert {"accuracy [%]", "round", "sent both ways by all clients [MB]", "FedPara (3 seeds)"} <= {
            *shown
        }


def test_runs_without_a_score_have_no_figure(tmp_path):
    (section,) = sections([summary([None], scheme="fedpara")])
    assert section_figure(section, tmp_path / "a.png") is None
