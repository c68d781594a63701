"""Contract: every link with every algorithm and every scheme, on both engines; resumed runs have the same bits."""

import json
from itertools import product

import pytest
import torch

import fedpara as fp
from fedpara import algorithms
from fedpara.experiments import Experiment, resume, run
from fedpara.experiments.storage.checkpoint import final_checkpoint

LINKS = (
    *("int8(feedback=True)", "int4", "int2(feedback=True)", "ternary", "sign(feedback=True)"),
    *("topk(0.05, feedback=True)", "stc(0.05, feedback=True)", "eden", "powersgd(rank=1, feedback=True)"),
    "grid(1.0, feedback=True)",
)
SCHEMES = ("original", "lowrank", "fedpara", "pfedpara")
ALGORITHMS = tuple(algorithms.names())
# The downlink is the link three further on. Over the algorithms, each link meets every scheme.
COVER = [
    (LINKS[i], LINKS[(i + 3) % len(LINKS)], algorithm, SCHEMES[(i + a) % 4])
    for (i, _), (a, algorithm) in product(enumerate(LINKS), enumerate(ALGORITHMS))
]


def test_the_cases_cover_every_pair():
    for i, parts in ((2, ALGORITHMS), (3, SCHEMES)):
        for direction in (0, 1):
            assert {(case[direction], case[i]) for case in COVER} == {*product(LINKS, parts)}


@pytest.mark.parametrize(("up", "down", "algorithm", "scheme"), COVER)
def test_every_link_trains_on_both_engines(world, up, down, algorithm, scheme):
    runs = [
        world.simulate(
            world.model(scheme),
            world.algorithm(algorithm, steps=1),
            link=fp.Link(up=up, down=down),
            engine=engine,
            cohort=2,
        )
        for engine in ("sequential", "batched")
    ]
    assert [r.cohort for r in runs[0].rounds] == [r.cohort for r in runs[1].rounds]
    first, second = ([(r.bytes_up, r.bytes_down) for r in one.rounds] for one in runs)
    # The length of a grid's messages depends on the numbers, and the engines differ in rounding.
    for ours, theirs in zip(first, second, strict=True):
        assert ours == pytest.approx(theirs, rel=0.02 if "grid" in up + down else 0, abs=0)
    for one in runs:
        assert not any(result.refused for result in one.rounds)
        assert all(bool(tensor.isfinite().all()) for tensor in one.state.values())
    # Before the first step both engines have the same model, and then they differ in rounding only.
    losses = [one.rounds[0].train_loss for one in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    ("link", "engine", "algorithm", "scheme"),
    [
        (link, ("sequential", "batched")[i % 2], ("scaffold", "fedavg", "ditto")[i % 3], SCHEMES[-1 - i % 4])
        for i, link in enumerate(LINKS)
    ],
)
def test_a_resumed_run_has_the_same_bits(tmp_path, link, engine, algorithm, scheme):
    experiment = Experiment(
        model="mlp",
        scheme=scheme,
        algorithm=algorithm,
        link_up=link,
        link_down=LINKS[(LINKS.index(link) + 3) % len(LINKS)],
        engine=engine,
        clients=6,
        cohort=3,
        rounds=4,
        epochs=None,
        steps=1,
        lr=0.02,
        personal=scheme == "pfedpara",
    )
    run(experiment, tmp_path / "whole")
    run(Experiment(**{**vars(experiment), "rounds": 2}), tmp_path / "stopped")
    resume(tmp_path / "stopped", rounds=4)
    whole, stopped = (final_checkpoint(tmp_path / name) for name in ("whole", "stopped"))
    for part in ("x", "server"):
        assert flat(getattr(whole.progress, part)) == flat(getattr(stopped.progress, part))
    assert flat(whole.progress.known.state) == flat(stopped.progress.known.state)
    assert whole.progress.known.messages == stopped.progress.known.messages
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "stopped")]
    for a, b in zip(*lines, strict=True):
        known = [{k: v for k, v in json.loads(one).items() if k != "everyone"} for one in (a, b)]
        assert known[0] == known[1]
    assert whole.memories == stopped.memories
    assert bool(whole.memories) == ("feedback" in link or algorithm != "fedavg" or scheme == "pfedpara")
    assert whole.digests == stopped.digests, "the memory files differ"


def flat(nested):
    if isinstance(nested, torch.Tensor):
        return nested.flatten().tolist()
    return {name: flat(value) for name, value in nested.items()}
