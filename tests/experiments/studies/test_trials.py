"""Trials: which settings are tried, that methods get equally many, and which one is chosen."""

import math
from dataclasses import replace
from pathlib import Path
from statistics import stdev

import pytest

from fedpara.errors import ConfigError
from fedpara.experiments import Experiment, Summary
from fedpara.experiments.seeds import Group
from fedpara.experiments.storage.summary import Primary
from fedpara.experiments.studies.trials import Choice, Outcome, Trial, all_trials

ORIGINAL, FEDPARA = Experiment(scheme="original", clip=2.0), Experiment(scheme="fedpara", init="he:1.4")
BOTH = {"original": ORIGINAL, "fedpara": FEDPARA}
PROTOCOL = {"validation": 0.1, "seed": 100, "rounds": 60}


def labels(methods, grid, own=None, one_at_a_time=False):
    found = all_trials(methods, grid, own or {}, one_at_a_time, PROTOCOL)
    return {name: [trial.label for trial in trials] for name, trials in found.items()}


def test_all_combinations_or_one_field_at_a_time():
    grid = {"weight_decay": [0.0, 1e-3], "lr": [0.05, 0.1]}
    assert labels({"original": ORIGINAL}, grid)["original"] == [
        f"lr={lr}, weight_decay={decay}" for lr in (0.05, 0.1) for decay in (0, 0.001)
    ]
    # lr 0.1 and weight_decay 0 are the base's own values, so they are no new trials.
    alone = labels({"original": ORIGINAL}, grid, one_at_a_time=True)["original"]
    assert alone == ["base", "lr=0.05", "weight_decay=0.001"]


def test_each_method_may_have_its_own_values():
    own = {"original": {"clip": [1, 10]}, "fedpara": {"init": ["he:1", "he:2"], "lr": [0.3, 0.4]}}
    found = all_trials(BOTH, {"lr": [0.05, 0.2]}, own, True, PROTOCOL)
    assert [t.label for t in found["original"]] == ["base", "clip=1", "clip=10", "lr=0.05", "lr=0.2"]
    assert [t.label for t in found["fedpara"]] == ["base", "init=he:1", "init=he:2", "lr=0.3", "lr=0.4"]
    for trial in (*found["original"], *found["fedpara"]):
        e = trial.experiment
        assert (e.validation, e.seed, e.rounds, e.scheme) == (0.1, 100, 60, trial.method)


@pytest.mark.parametrize(
    ("grid", "own", "says"),
    [
        ({"lr": [0.05, 0.2]}, {"original": {"clip": [1, 2]}}, r"original 4, fedpara 2\).*--set fedpara:lr="),
        ({"lr": [0.05]}, {}, "only one trial"),
        ({"rounds": [1, 2]}, {}, "rounds is in the grid"),
        ({"lrr": [1, 2]}, {}, "method original: unknown key 'lrr': did you mean 'lr'"),
    ],
)
def test_mistakes(grid, own, says):
    with pytest.raises(ConfigError, match=says):
        all_trials(BOTH, grid, own, False, PROTOCOL)


def test_a_target_would_end_trials_early():
    with pytest.raises(ConfigError, match=r"target is 0\.8: tuning compares scores after equal rounds"):
        all_trials({"a": replace(ORIGINAL, target=0.8)}, {"lr": [1, 2]}, {}, False, PROTOCOL)


def outcome(number, *scores, metric=None, examples=None, seeds=None):
    trial = Trial("a", number, {"lr": number}, ORIGINAL)
    runs = tuple(
        Summary(Path("a"), ORIGINAL, [{"round": 1, "accuracy": s}], [], metric or Primary()) for s in scores
    )
    return Outcome(trial, Group(runs), seeds or len(scores), examples)


def chosen(*outcomes):
    return Choice.of(outcomes).chosen.trial.number


def test_the_best_mean_is_chosen_in_the_direction_of_the_metric():
    assert chosen(outcome(0, 0.5, 0.6), outcome(1, 0.9, 0.4), outcome(2, 0.7, 0.5)) == 1
    lower = Primary("mse", higher_is_better=False)
    assert chosen(*(outcome(i, s, metric=lower) for i, s in enumerate((0.5, 0.2, 0.9)))) == 1
    assert chosen(outcome(0, 0.5), outcome(1, 0.5)) == 0, "the first of equal scores"


def test_a_trial_without_a_finite_score_of_every_seed_is_not_chosen():
    trials = [outcome(0, math.nan), outcome(1, math.inf), outcome(2, 0.9, seeds=2), outcome(3, 0.1)]
    assert chosen(*trials) == 3
    assert Choice.of(trials[:3]) is None


def test_standard_errors_and_ties_by_hand():
    """sqrt(0.8 * 0.2 / 1600) = 0.01; over seeds s / sqrt(n)."""
    best, near, far = (outcome(i, s, examples=1600) for i, s in enumerate((0.8, 0.791, 0.789)))
    assert best.standard_error == pytest.approx(0.01)
    assert [one.trial.number for one in Choice.of([best, near, far]).ties] == [1]
    several = outcome(0, 0.7, 0.8, 0.9, examples=1600)
    assert several.standard_error == pytest.approx(stdev([0.7, 0.8, 0.9]) / 3**0.5)
    assert outcome(0, 0.8).standard_error is None
    assert outcome(0, 0.8, metric=Primary("mse", False), examples=9).standard_error is None
    assert [one.trial.number for one in Choice.of([outcome(0, 0.8), outcome(1, 0.8)]).ties] == [1]
