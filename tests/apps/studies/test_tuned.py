"""`fedpara reproduce tuned-NAME` in miniature: run, interrupt, continue on another machine, report."""

import json
import shutil
from dataclasses import replace

import pytest
from finished_runs import write_run

from fedpara.apps import report as report_command
from fedpara.apps.studies import tuned as command
from fedpara.errors import RunError
from fedpara.experiments import Experiment, read_run
from fedpara.experiments.paper import STUDIES, run_name, runs, study
from fedpara.experiments.storage.catalog import Library
from fedpara.experiments.studies.tune import trial_runs
from fedpara.experiments.studies.tuned.archive import restore
from fedpara.experiments.studies.tuned.cost import filled_cells
from fedpara.experiments.studies.tuned.plan import setting_for
from fedpara.experiments.studies.tuned.plans import PLANS, plan_of
from fedpara.report.tables import NOT_RUN, table_of
from fedpara.report.tuned_studies import replacements, settings, tuned_studies

TINY = ("--scale", "tiny", "--engine", "sequential", "--results", "results", "--keep", "results")
PERSONAL = ("reproduce", "tuned-personal", "--only", "personal-3", *TINY)


TRAINED = [name for name, one in STUDIES.items() if one.experiments]


def trains(err):
    return err.count(": round ")


def entries(folder, *names):
    """The cells of these tables at tiny scale, by (study, row, column)."""
    library = Library.of(folder)
    chosen = replacements(tuned_studies(library), "tiny")
    tables = [
        table_of(study, library, library.seeds, scale="tiny", tuned=chosen) for study in map(study, names)
    ]
    return {(t.study.name, e.row, e.column): e for t in tables for e in t.entries}


def scored(experiment):
    return 0.9 - abs(experiment.lr - 0.05) / 10 + experiment.seed / 1e4


@pytest.fixture
def fake(monkeypatch):
    """Runs end at once with made-up scores; trials with a rate of 0.3 diverge. The names of the runs so far."""
    played = []

    def play(paths, *_):
        done, failed = {}, {}
        for name, path in paths.items():
            played.append(name)
            e = read_run(path).experiment
            if e.validation and e.lr == 0.3:
                failed[name] = RunError("round 1: all clients diverged")
            else:
                write_run(path, e, scored(e))
                done[name] = read_run(path)
        return done, failed

    monkeypatch.setattr(command, "run_all", play)
    return played


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """Every run of every prepared study, as --keep archives them; trials with a rate of 0.3 have diverged."""
    results = tmp_path_factory.mktemp("all") / "results"
    plans = [plan_of(name, "tiny") for name in PLANS]
    for tuning in (tuning for plan in plans for tuning in plan.tunings):
        there, trials = results / "tuning" / tuning.name, tuning.trials
        for run, e in trial_runs(trials, tuning.seeds).items():
            write_run(there / f"{tuning.name}-{run}", e, scored(e), rounds=0 if e.lr == 0.3 else None)
        (there / "chosen.json").write_text("{}")
        for method, listed in trials.items():
            best = max((one.experiment for one in listed if one.experiment.lr != 0.3), key=scored)
            final = replace(best, validation=0.0, seed=1, rounds=tuning.methods[method].rounds)
            write_run(results / "final" / tuning.name / f"{method}-seed1", final, scored(final))
    known = settings(tuned_studies(Library.of(results)), "tiny")
    for e in (e for plan in plans for e in plan.reused):
        applied = replace(setting_for(e, known)[1], seed=1)
        write_run(results / "paper" / run_name(applied), applied, scored(applied))
    return results


def test_the_studies_fill_all_cells_but_those_of_cinic10(archive, tmp_path, monkeypatch):
    found, filled = entries(archive, *TRAINED), {*filled_cells(PLANS.values())}
    assert len(filled) > 170
    for cell, entry in found.items():
        assert entry.computed or (entry.seeds > 0, entry.trials > 0) == (cell in filled,) * 2, cell
    assert found["gamma-sweep", "γ 0.3", "CIFAR-10 IID"].origin == "1 seed, reused setting of 7 trials"
    assert found["capacity-cnn", "FedPara", "CIFAR-10 IID"].origin == "1 seed, 7 trials"
    assert found["personalization", "FedPer", "Scenario 2, after"].origin == "1 seed, 5 trials"
    monkeypatch.setattr(
        report_command,
        "STUDIES",
        {name: STUDIES[name] for name in ("gamma-sweep", "personalization", "techniques", "lstm")},
    )
    report_command.report([archive], tmp_path / "page.md", None, "tiny")
    text = (tmp_path / "page.md").read_text()
    assert "Tuned methods: Scenario 1, variants of pFedPara" in text
    assert "the clients are those of Acar et al." in text
    assert "| before local training [%] | after local training [%] |" in text
    assert "chosen by test accuracy" not in text.split("## personalization")[1].split("## techniques")[0]
    assert "A reused setting was not tuned for the cell itself" in text.split("## gamma-sweep")[1]


def test_a_study_of_one_recipe_does_not_mix_tuned_numbers_with_others(archive, tmp_path):
    """FedPAQ is compared with FedAvg: either both are tuned or none."""
    results = tmp_path / "results"
    shutil.copytree(archive, results)

    def trials():
        return [e.trials for e in entries(results, "quantization").values() if not e.computed]

    assert trials() == [7, 7, 7, 7]
    (quantized,) = (results / "paper").glob("*fedpara0.5-fedavg-float16-seed1*")
    shutil.rmtree(quantized)
    assert trials() == [7, 7, 7, 0], "it has not been run"
    (recipe,) = (
        e for e in runs("quantization", scale="tiny").values() if (e.gamma, e.link_up) == (0.5, "float16")
    )
    write_run(results / "paper" / "old", recipe, 0.5)
    assert trials() == [0, 0, 0, 0], "it has a number that is not tuned"


def test_a_study_continues_from_the_archive(cli, tmp_path, fake):
    """The folder of the runs is lost after each command, as with a borrowed machine."""
    for words in (("tuned-lstm", "--only", "lstm-iid-mixed"), ("tuned-resnet",)):
        for fresh in (True, False):
            before = len(fake)
            code, _, err = cli("reproduce", *words, *TINY, "--out", "runs")
            assert code == 0, err
            assert (len(fake) > before) == fresh, "the second command finds every run in the archive"
            shutil.rmtree(tmp_path / "runs", ignore_errors=True)


def test_diverged_trials_are_archived_with_the_choice(cli, tmp_path, fake):
    for again in (False, True):
        before = len(fake)
        code, out, err = cli(*PERSONAL, "--out", "runs", "--json")
        assert code == 0, err
        assert len(fake) - before == (0 if again else 20 + 4)
        assert [len(one["diverged"]) for one in json.loads(out)["personal-3"]] == [1] * 4
        shutil.rmtree(tmp_path / "runs")
    cell = entries(tmp_path / "results", "personalization")[
        "personalization", "pFedPara", "Scenario 3, after"
    ]
    assert cell.origin == "1 seed, 5 trials", "a diverged trial counts"


def test_an_interrupted_study_continues_elsewhere_without_repeating_a_round(cli, tmp_path, monkeypatch):
    """Real training of the four personal methods. The second machine has only the archive."""
    begun, untouched = [], command.run_all

    def interrupted(paths, *how):
        for name, path in paths.items():
            begun.append(name)
            if len(begun) == 6:
                raise KeyboardInterrupt
            untouched({name: path}, *how)
        return {name: read_run(path) for name, path in paths.items()}, {}

    with monkeypatch.context() as patched:
        patched.setattr(command, "run_all", interrupted)
        code, _, err = cli(*PERSONAL, "--out", "first")
    assert (code, trains(err)) == (130, 5)
    assert len(Library.of(tmp_path / "results").runs) == 5
    shutil.rmtree(tmp_path / "first")
    code, out, err = cli(*PERSONAL, "--out", "second", "--json")
    assert (code, trains(err)) == (0, 20 - 5 + 4 * 2)
    tuned = json.loads(out)["personal-3"]
    assert [(len(one["trials"]), one["final"]["seeds"]) for one in tuned] == [(5, [1])] * 4
    chosen = {one["method"]: one["chosen"] for one in tuned}
    assert json.loads((tmp_path / "results/tuning/personal-3/chosen.json").read_text())["chosen"] == chosen
    cell = entries(tmp_path / "results", "personalization")[
        "personalization", "pFedPara", "Scenario 3, before"
    ]
    final = read_run(tmp_path / "results" / "final" / "personal-3" / "pfedpara-seed1")
    assert (cell.value, cell.origin) == (100 * final.metrics[-1]["before"], "1 seed, 5 trials")
    assert final.everyone["clients"] == 2, "the choice is by the score of all clients"
    assert (
        entries(tmp_path / "results", "personalization")[
            "personalization", "pFedPara", "Scenario 1, before"
        ].text
        == NOT_RUN
    )


def test_what_cannot_work_is_refused(cli, tmp_path):
    for words, says in (
        (("tuned-gamma", *TINY), "is not chosen yet: run tuned-cifar10-iid first"),
        (("tuned-gamma", "--only", "zzz"), "tuned-gamma has no such part. Its parts are cifar10-iid-vgg16"),
        (("tuned-lstm", "optimizers"), "name it in a command without other studies"),
        (("tuned-lstm", "--rounds", 3), "--rounds is for"),
        (("tuned-lst",), "did you mean 'tuned-lstm'"),
    ):
        code, _, err = cli("reproduce", *words)
        assert (code, says in err) == (2, True), err
    assert list(tmp_path.rglob("config.toml")) == []


def test_longer_runs_are_not_taken_for_final_runs(tmp_path):
    """A run of 1,000 rounds has the identity of one of 200, but it is another folder."""
    e = Experiment(rounds=2)
    write_run(tmp_path / "long", replace(e, rounds=5), 0.5)
    restore(tmp_path / "final", {"a": e}, Library.of(tmp_path / "long"))
    assert not (tmp_path / "final").exists()
    write_run(tmp_path / "short", e, 0.5)
    restore(tmp_path / "final", {"a": e}, Library.of(tmp_path / "long", tmp_path / "short"))
    assert read_run(tmp_path / "final" / "a").rounds == 2
