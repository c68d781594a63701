"""Tuned methods in reports: trials, the chosen one and its final runs, from where the run folders lie."""

import shutil
from dataclasses import replace

import pytest
from finished_runs import write_run as write

from fedpara.apps import report as command
from fedpara.apps.report import report
from fedpara.experiments import Experiment, paper
from fedpara.experiments.storage.catalog import Library
from fedpara.report.document import BEGIN, END, HEADLINE
from fedpara.report.own import Unit
from fedpara.report.tables import NOT_RUN, NOT_SCORED, TRIALS, table_of
from fedpara.report.tuned_studies import replacements, tuned_studies
from fedpara.report.tuning import final_table, trials_table

RECIPE = {
    cell.row: cell.experiments[0]
    for cell in paper.study("capacity-cnn").cells
    if cell.column == "CIFAR-10 IID"
}
METHODS = {
    "original": RECIPE["original"],
    "lowrank": RECIPE["low-rank"],
    "fedpara": RECIPE["FedPara"],
    "narrow": replace(RECIPE["original"], model="vgg16-narrow"),
}
OWN = {
    "original": {"clip": 10.0},
    "lowrank": {"init": "he:1.0"},
    "fedpara": {"init": "he:2.0"},
    "narrow": {"clip": 1.0},
}
TRIED = {"original": (70, 60, 71), "lowrank": (65, 50, 64), "fedpara": (69, 66, 68), "narrow": (60, 62, 61)}
"""Validation accuracies of the base, lr 0.2, and the method's own value."""
OTHER_LR = 0.2


def write_trials(root, study="cifar10-iid"):
    for name, base in METHODS.items():
        trial = replace(base, validation=0.104, seed=100, rounds=60)
        settings = (trial, replace(trial, lr=OTHER_LR), replace(trial, **OWN[name]))
        for number, (experiment, score) in enumerate(zip(settings, TRIED[name], strict=True)):
            write(root / "tuning" / study / f"{study}-{name}-{number}", experiment, score / 100)


def write_finals(root, study="cifar10-iid"):
    """The original's chosen trial has a clip, narrow's another rate; the others are the recipe."""
    changes = {"original": OWN["original"], "narrow": {"lr": OTHER_LR}}
    for i, (name, base) in enumerate(METHODS.items()):
        for seed in (1, 2, 3):
            experiment = replace(base, seed=seed, rounds=200, **changes.get(name, {}))
            write(root / "final" / study / f"{name}-seed{seed}", experiment, 0.8 + seed / 100 + i / 1000)


@pytest.fixture
def results(tmp_path):
    write_trials(tmp_path / "results")
    write_finals(tmp_path / "results")
    write(tmp_path / "results" / "paper" / "old", replace(RECIPE["original"], seed=0), 0.99)
    return tmp_path / "results"


def studies(root):
    library = Library.of(root)
    return library, tuned_studies(library)


def test_the_best_trial_is_chosen_and_its_final_runs_are_averaged(results):
    library, (study,) = studies(results)
    assert [method.title for method in study.methods] == [
        "original",
        "low-rank",
        "FedPara",
        "narrow dense VGG16",
    ]
    table = final_table(study, library, Unit("GB", 2**30), "std")
    found = table.at("original", "test accuracy [%]")
    assert (found.value, found.spread) == pytest.approx((82.0, 1.0))
    assert (found.seeds, found.trials) == (3, 3)
    error = 100 * (0.71 * 0.29 / 5200) ** 0.5
    assert table.at("original", "validation accuracy [%]").text == f"71.00 ± {error:.2f} (clip=10)"
    assert table.at("narrow dense VGG16", "validation accuracy [%]").text.endswith("(lr=0.2)")
    assert table.at("FedPara", "GB sent").value == 2
    assert "low-rank: within one standard error" not in " ".join(table.study.notes)
    assert (
        "FedPara minus others in the test score, seed by seed: "
        "original +0.20 ± 0.00, low-rank +0.10 ± 0.00, narrow dense VGG16 -0.10 ± 0.00."
    ) in table.study.notes


def test_every_trial_is_shown(results):
    library, (study,) = studies(results)
    table = trials_table(study, library)
    assert table.study.rows == ["base", "lr=0.2", "trial 2"]
    shown = {row: [table.at(row, c).text for c in table.study.columns] for row in table.study.rows}
    assert shown == {
        "base": ["70.00", "65.00 (chosen)", "69.00 (chosen)", "60.00"],
        "lr=0.2": ["60.00", "50.00", "66.00", "62.00 (chosen)"],
        "trial 2": [
            "71.00 (clip=10, chosen)",
            "64.00 (init=he:1.0)",
            "68.00 (init=he:2.0)",
            "61.00 (clip=1)",
        ],
    }
    assert "The base is lr=0.1; FedPara: init=he:1.4." in table.study.notes


def test_chosen_settings_fill_the_tables_that_compare_methods(results):
    paq = replace(RECIPE["original"], link_up="float16", seed=0)
    write(results / "paper" / "paq", paq, 0.9)
    library, found = studies(results)
    tables = {
        name: table_of(paper.study(name), library, library.seeds, tuned=replacements(found))
        for name in ("capacity-cnn", "communication", "quantization")
    }
    cell = tables["capacity-cnn"].at("original", "CIFAR-10 IID")
    assert (cell.value, cell.seeds, cell.trials) == (pytest.approx(82.0), 3, 3), (
        "and not the 99% of the recipe"
    )
    assert cell.origin == "3 seeds, 3 trials"
    assert tables["capacity-cnn"].study.notes[-1] == TRIALS
    assert tables["communication"].at("CIFAR-10 IID, 80%", "times fewer").trials == 3
    recipe = tables["quantization"].at("FedAvg", "accuracy")
    assert (recipe.value, recipe.trials) == (99.0, 0), "compared with FedPAQ under the same recipe"


def test_the_document_has_the_protocol_the_trials_and_their_number(results, tmp_path, monkeypatch):
    needed = {name: paper.STUDIES[name] for name, *_ in HEADLINE if name in paper.STUDIES}
    monkeypatch.setattr(command, "STUDIES", needed)
    report([results], tmp_path / "page.md", None, "paper")
    text = (tmp_path / "page.md").read_text()
    assert text.count("Settings are tuned by validation, and final runs use other seeds.") == 1
    headline = text.split(BEGIN)[1].split(END)[0]
    assert (
        "| VGG16, original weights, CIFAR-10 IID, 200 rounds [%] | 83.68 | 82.00 ± 1.00 | 3 | 3 |" in headline
    )
    assert "| a narrower dense VGG16, the same size [%] | – | 82.30 ± 1.00 | 3 | 3 |" in headline
    assert f"| the narrower dense VGG16, non-IID [%] | – | {NOT_RUN} | – | – |" in headline
    assert "| 3.40× | 3.41× | computed | – |" in headline
    assert "| base | 70.00 | **65.00 (chosen)** | **69.00 (chosen)** | 60.00 |" in text
    others = text.split("## runs: ")[1]
    assert others.count("| CIFAR-10") == 1, (
        "the run of the recipe; trials and final runs are in their own tables"
    )
    for ending in ("html", "csv", "tex"):
        report([results], tmp_path / f"page.{ending}", None, "paper")
        assert "clip=10" in (tmp_path / f"page.{ending}").read_text()


def test_runs_of_another_setting_and_unfinished_runs_do_not_count(results):
    (results / "final" / "cifar10-iid" / "original-seed1" / "metrics.jsonl").write_text("")
    other = replace(METHODS["original"], seed=9, rounds=200)
    write(results / "final" / "cifar10-iid" / "original-seed9", other, 0.99)
    library, (study,) = studies(results)
    table = final_table(study, library, Unit("GB", 2**30))
    assert table.at("original", "test accuracy [%]").value == pytest.approx(82.5)
    assert "original: 1 final run has another setting" in " ".join(table.study.notes)


def test_an_unfair_study_fills_no_other_table(results):
    shutil.rmtree(results / "tuning" / "cifar10-iid" / "cifar10-iid-narrow-1")
    library, (study,) = studies(results)
    assert not any(map(replacements([study]), RECIPE.values()))
    assert "equally many trials with equally many seeds" in " ".join(
        final_table(study, library, Unit("GB", 2**30)).study.notes
    )
    table = trials_table(study, library)
    assert table.at("lr=0.2", "narrow dense VGG16") is None
    assert table.at("trial 2", "narrow dense VGG16").value == 61


def test_a_study_whose_trials_lack_seeds_fills_no_other_table(results):
    again = replace(METHODS["original"], validation=0.104, seed=101, rounds=60)
    write(results / "tuning" / "cifar10-iid" / "cifar10-iid-original-0-seed101", again, 0.75)
    library, (study,) = studies(results)
    assert not any(map(replacements([study]), RECIPE.values()))
    assert "equally many seeds" in " ".join(final_table(study, library, Unit("GB", 2**30)).study.notes)
    table = trials_table(study, library)
    assert table.at("base", "original").value == pytest.approx(72.5)
    assert "seed 100, 101, but not every trial has all of them yet" in table.study.notes[0]


def test_without_final_runs_nothing_is_replaced(tmp_path):
    write_trials(tmp_path)
    write(tmp_path / "tuning" / "short" / "cifar10-iid-original-0", METHODS["original"], 0.5)
    library, (study,) = studies(tmp_path)
    assert not any(map(replacements([study]), RECIPE.values()))
    assert final_table(study, library, Unit("GB", 2**30)).at("FedPara", "test accuracy [%]").text == NOT_RUN
    assert "(best)" in trials_table(study, library).at("base", "FedPara").text


def test_a_folder_of_fedpara_tune_is_recognized(tmp_path):
    base, mine = Experiment(model="mlp", scheme="original", rounds=2), tmp_path / "mine"
    for number, lr in enumerate((0.1, 0.2, 0.3)):
        trial = replace(base, validation=0.1, lr=lr, seed=100, momentum=0.9 * (number > 0))
        write(mine / "trials" / f"my-net-{number}-seed100", trial, 0.5 + lr)
    (mine / "trials" / "my-net-2-seed100" / "metrics.jsonl").write_text("")  # diverged in the first round
    for seed in (1, 2):
        write(mine / "final" / f"my-net-seed{seed}", replace(trial, validation=0.0, lr=0.2, seed=seed), 0.8)
    (mine / "chosen.json").write_text('{"chosen": {"my-net": "my-net-1"}, "diverged": {}, "examples": 2100}')
    library, (study,) = studies(tmp_path)
    assert (study.name, study.methods[0].name, len(study.methods[0].finals)) == ("mine", "my-net", 2)
    table = trials_table(study, library)
    assert table.study.rows == ["lr=0.1, momentum=0", "lr=0.2, momentum=0.9", "lr=0.3, momentum=0.9"]
    assert [table.at(row, "my-net").text for row in table.study.rows] == [
        "60.00",
        "70.00 (chosen)",
        NOT_SCORED,
    ]
    report([tmp_path], tmp_path / "page.md", None, "paper")
    text = (tmp_path / "page.md").read_text()  # sqrt(0.7 * 0.3 / 2100) is a hundredth
    assert "| my-net | 3 | 70.00 ± 1.00 (lr=0.2, momentum=0.9) | 80.00 ± 0.00 |" in text
