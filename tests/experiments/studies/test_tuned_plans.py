"""Prepared studies: equal trials, which cells of the paper they fill, and settings that are reused."""

from dataclasses import replace

import pytest

from fedpara.errors import ConfigError
from fedpara.experiments import Experiment
from fedpara.experiments.paper import STUDIES
from fedpara.experiments.studies.tuned.cost import cost, filled_cells
from fedpara.experiments.studies.tuned.plan import Setting, setting_for
from fedpara.experiments.studies.tuned.plans import PLANS, TUNINGS, plan_of

OF_PAPER = [study for study in STUDIES.values() if any(cell.paper is not None for cell in study.cells)]
CINIC = {(s.name, c.row, c.column) for s in OF_PAPER for c in s.cells if "CINIC" in f"{c.row} {c.column}"}


@pytest.mark.parametrize("name", TUNINGS)
def test_every_method_has_the_same_trials_and_other_final_seeds(name):
    tuning = TUNINGS[name]
    counts = {len(listed) for listed in tuning.trials.values()}
    assert len(counts) == 1
    assert not {*tuning.seeds} & {*tuning.final_seeds}
    for method, listed in tuning.trials.items():
        assert all(one.experiment.validation == tuning.validation for one in listed)
        assert tuning.methods[method].validation == 0


def test_no_batch_of_a_trial_is_short():
    """With 450 of 500 examples, whose last batch has two, training hardly moves."""
    for name, size in (("cifar10-iid", 500), ("cifar100-iid", 1000), ("lstm-noniid", 2000)):
        tuning = TUNINGS[name]
        left = size - round(tuning.validation * size)
        assert left % next(iter(tuning.methods.values())).batch_size == 0


def test_together_they_fill_every_trained_cell_but_those_of_cinic10():
    trained = {(s.name, c.row, c.column) for s in OF_PAPER for c in s.cells if c.experiments}
    filled = {cell for cell in filled_cells(PLANS.values()) if cell[0] in {s.name for s in OF_PAPER}}
    assert filled == trained - CINIC
    computed = sum(not cell.experiments for study in OF_PAPER for cell in study.cells)
    assert (len(filled) + computed, computed + len(trained)) == (245, 281)


def test_an_experiment_takes_over_what_validation_chose_for_its_method():
    method = Experiment(model="mlp", lr=0.1, clip=None)
    chosen = replace(method, lr=0.05, clip=1.0, validation=0.1, seed=100, rounds=3)
    known = [Setting("t", method, chosen, 4)]
    other = replace(method, gamma=0.5, rounds=7, lr=0.03)
    setting, applied = setting_for(other, known)
    assert setting is known[0]
    assert applied == replace(other, clip=1.0), (
        "its own rate stays; validation, seed and rounds are not taken over"
    )
    assert setting_for(replace(method, scheme="lowrank"), known) == (None, None)


def test_costs_and_mistakes():
    assert cost(PLANS["tuned-lstm"])["trials"] == 36
    assert cost(PLANS["tuned-lstm"], seeds=1)["final_runs"] == 9
    assert cost(PLANS["tuned-gamma"])["gpu_minutes"] > cost(PLANS["tuned-gamma-noniid"])["gpu_minutes"]
    with pytest.raises(ConfigError, match="did you mean 'tuned-personal'"):
        plan_of("tuned-persona")
    with pytest.raises(ConfigError, match="expected paper or tiny"):
        plan_of("tuned-lstm", "digits")
