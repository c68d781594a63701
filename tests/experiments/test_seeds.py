"""Means over seeds: Student's t interval, and which runs belong to one setting."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import stdev

import pytest

from fedpara.errors import RunError
from fedpara.experiments import Experiment, Summary, read_run, resume, run
from fedpara.experiments.seeds import Mean, group, t_quantile
from fedpara.experiments.storage.catalog import archive_run
from fedpara.experiments.storage.summary import Primary

# scipy.stats.t.ppf(0.975, v), SciPy 1.17
QUANTILES = {
    1: 12.706204736174694,
    2: 4.302652729749462,
    3: 3.1824463052837078,
    4: 2.776445105197793,
    9: 2.262157162798204,
    30: 2.0422724563012373,
    1000: 1.9623390808264074,
}


@pytest.mark.parametrize(("freedom", "expected"), QUANTILES.items())
def test_the_quantile_of_students_t(freedom, expected):
    assert t_quantile(freedom) == pytest.approx(expected, rel=1e-12)


def test_an_interval_by_hand():
    """Values 1, 2, 3: mean 2, s = 1, and 4.302653 / sqrt(3) = 2.484138."""
    found = Mean.of([1.0, 2.0, 3.0])
    assert (found.value, found.n) == (2.0, 3)
    assert found.half == pytest.approx(2.4841377, abs=1e-7)
    assert (found.low, found.high) == pytest.approx((2 - found.half, 2 + found.half))
    values = [0.71, 0.74, 0.69, 0.77, 0.73]
    assert Mean.of(values).half == pytest.approx(QUANTILES[4] * stdev(values) / 5**0.5)


def test_one_value_has_no_interval():
    assert Mean.of([0.5]) == Mean(0.5, None, 1)
    assert Mean.of([]) is None


def summary(rounds=1, **fields):
    lines = [{"round": t, "accuracy": 0.5} for t in range(1, rounds + 1)]
    return Summary(Path(f"{fields}-{rounds}"), Experiment(**fields), lines, [])


def test_runs_of_one_setting_differ_only_in_the_seed():
    first, second, other = summary(seed=1), summary(seed=0), summary(lr=0.2)
    assert [one.runs for one in group([first, other, second])] == [(second, first), (other,)]
    longer = summary(rounds=3, seed=1)
    assert [one.runs for one in group([first, longer])] == [(longer,)], "the same seed twice"
    assert group([summary(rounds=0)]) == []
    by_loss = replace(second, metric=Primary("mse", higher_is_better=False))
    assert len(group([first, by_loss])) == 2, "scores of two metrics have no mean"


def scored(*scores, metric):
    lines = [{"round": t, "accuracy": None, "score": s} for t, s in enumerate(scores, 1)]
    return Summary(Path("a"), Experiment(), lines, [], metric)


def test_a_loss_reaches_its_target_from_above():
    falling = scored(0.9, None, 0.4, 0.6, metric=Primary("mse", higher_is_better=False))
    assert falling.reached(0.5)["round"] == 3
    assert falling.reached(0.3) is None
    assert falling.final == 0.6
    assert scored(0.1, 0.6, metric=Primary("r2")).reached(0.5)["round"] == 2


@pytest.mark.parametrize(
    ("metric", "score", "title", "text"),
    [
        (Primary(), 0.932, "accuracy [%]", "93.20%"),
        (Primary("dice"), 0.5, "dice [%]", "50.00%"),
        (Primary("mse", higher_is_better=False), 0.012345, "mse", "0.01235"),
    ],
)
def test_only_fractions_are_shown_in_percent(metric, score, title, text):
    assert (metric.title, metric.text(score)) == (title, text)


def test_the_metric_is_read_from_the_run_folder(tmp_path):
    experiment = Experiment(
        model="mlp", scheme="original", clients=5, cohort=2, rounds=1, steps=1, engine="sequential"
    )
    found = run(experiment, tmp_path / "a")
    assert found.metric == Primary("accuracy")
    path = tmp_path / "a" / "model.json"
    described = json.loads(path.read_text())
    path.write_text(json.dumps({**described, "metric": {"name": "mse", "higher_is_better": False}}))
    assert read_run(tmp_path / "a").metric == Primary("mse", higher_is_better=False)
    small = archive_run(tmp_path / "a", tmp_path / "archive")
    assert read_run(small).metric == Primary("mse", higher_is_better=False)
    with pytest.raises(RunError, match="it is an archived run"):
        resume(small)
    path.write_text(json.dumps({**described, "metric": "mse"}))
    with pytest.raises(RunError, match=r"model\.json is damaged"):
        read_run(tmp_path / "a")
    path.unlink()
    assert read_run(tmp_path / "a").metric == Primary(), "earlier archives have no model.json"
