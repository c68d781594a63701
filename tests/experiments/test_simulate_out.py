"""simulate(..., out=folder): a run folder from Python objects, which the same call resumes."""

import math
import operator
from functools import cached_property

import pytest
import torch
from torch import nn

import fedpara as fp
from fedpara import algorithms
from fedpara.errors import ConfigError, RunError
from fedpara.experiments import object_digests, read_run, resume
from fedpara.experiments.seeds import group

HOW = {"rounds": 4, "cohort": 2, "seed": 3}


def huber(output, target):
    return nn.functional.huber_loss(output.squeeze(1), target, reduction="none")


def federation(shift=0.0):
    generator = torch.Generator().manual_seed(0)

    def draw(count):
        x = torch.randn(count, 6, generator=generator)
        return x, x @ torch.arange(6.0) / 6 + shift

    return fp.FederatedData.of(
        [draw(20 + i) for i in range(4)], test=draw(40), tests=[draw(5) for _ in range(4)]
    )


def task(seed=0, width=8, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1))
    return fp.Task(model, **{"loss": huber, "metrics": {"r2": "r2"}, **options})


def adamw(**options):
    return algorithms.fedavg(
        **{"lr": 0.01, "batch_size": 8, "optimizer": "adamw", "keep_optimizer": True, **options}
    )


class Killed(Exception):
    pass


def kill_after(number):
    def on_round(result):
        if result.number == number:
            raise Killed

    return on_round


def killed(path, number=2, **how):
    with pytest.raises(Killed):
        fp.simulate(task(), federation(), adamw(), **HOW, **how, out=path, on_round=kill_after(number))


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path, engine):
    in_memory = fp.simulate(task(), federation(), adamw(), **HOW, engine=engine)
    whole = fp.simulate(task(), federation(), adamw(), **HOW, engine=engine, out=tmp_path / "whole")
    killed(tmp_path / "parts", engine=engine)
    assert read_run(tmp_path / "parts").rounds == 2
    parts = fp.simulate(task(), federation(), adamw(), **HOW, engine=engine, out=tmp_path / "parts")
    assert (tmp_path / "whole/metrics.jsonl").read_bytes() == (tmp_path / "parts/metrics.jsonl").read_bytes()
    for run in (whole, parts):
        assert all(torch.equal(run.state[name], value) for name, value in in_memory.state.items())
        assert [r.scores for r in run.rounds] == [r.scores for r in in_memory.rounds]
        assert [(r.cohort, r.train_loss, r.bytes_up, r.before) for r in run.rounds] == [
            (r.cohort, r.train_loss, r.bytes_up, r.before) for r in in_memory.rounds
        ]
        assert (run.score, run.bytes) == (in_memory.score, in_memory.bytes)
        for client in range(4):
            ours, theirs = run.client_state(client), in_memory.client_state(client)
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_finished_run_returns_at_once_and_more_rounds_continue_it(tmp_path):
    first = fp.simulate(task(), federation(), adamw(), **HOW, out=tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    again = fp.simulate(task(), federation(), adamw(), **HOW, out=tmp_path, on_round=kill_after(1))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert again.score == first.score
    assert math.isclose(again.everyone.score, first.everyone.score)
    assert again.everyone.by_client == first.everyone.by_client
    assert list(again.everyone.by_client[0].values) == ["r2", "loss"]
    more = fp.simulate(task(), federation(), adamw(), **{**HOW, "rounds": 5}, out=tmp_path)
    assert [r.number for r in more.rounds] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"task": task(seed=1)}, "the weights differ"),
        ({"task": task(width=9)}, "the model, the weights differ"),
        ({"task": task(loss="mse")}, "the task, loss"),
        ({"algorithm": adamw(lr=0.02)}, r"lr \(0.01 there, 0.02 here\) differ"),
        ({"algorithm": adamw(betas=(0.8, 0.9))}, "the algorithm differ"),
        ({"algorithm": algorithms.fedprox(0.1, lr=0.01, batch_size=8)}, "the algorithm"),
        ({"data": federation(shift=1.0)}, "different examples"),
        ({"cohort": 3}, "cohort"),
        ({"sampler": lambda round, clients, cohort, generator: range(cohort)}, "the settings"),
        ({"lost": 0.1}, "lost"),
        ({"rounds": 3}, "expected at least the 4 that are done"),
    ],
)
def test_another_run_is_refused(tmp_path, changes, says):
    given = {"task": task(), "data": federation(), "algorithm": adamw(), **HOW}
    fp.simulate(**given, out=tmp_path)
    before = {
        path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "log.txt"
    }
    with pytest.raises((ConfigError, RunError), match=says) as error:
        fp.simulate(**{**given, **changes}, out=tmp_path)
    assert "\n" not in str(error.value)
    assert all(path.read_bytes() == content for path, content in before.items())


def test_the_options_of_a_function_count(tmp_path):
    """No field holds the mu of FedProx: only the digest can tell."""
    run, again, other = (algorithms.fedprox(mu, lr=0.01) for mu in (0.1, 0.1, 0.2))
    fp.simulate(task(), federation(), run, **HOW, out=tmp_path)
    fp.simulate(task(), federation(), again, **HOW, out=tmp_path)
    with pytest.raises(ConfigError, match="the algorithm differ"):
        fp.simulate(task(), federation(), other, **HOW, out=tmp_path)


class Fixed:
    """A sampler whose only setting is an attribute."""

    def __init__(self, first):
        self._first = first

    def __call__(self, round, clients, cohort, generator):
        return range(self._first, self._first + cohort)

    def drawn(self, round, clients, cohort, generator):
        return self(round, clients, cohort, generator)


@pytest.mark.parametrize("sampler", [Fixed, lambda first: Fixed(first).drawn], ids=["object", "method"])
def test_the_attributes_of_an_object_count(tmp_path, sampler):
    fp.simulate(task(), federation(), adamw(), **HOW, sampler=sampler(0), out=tmp_path)
    fp.simulate(task(), federation(), adamw(), **HOW, sampler=sampler(0), out=tmp_path)
    with pytest.raises(ConfigError, match="the settings differ"):
        fp.simulate(task(), federation(), adamw(), **HOW, sampler=sampler(1), out=tmp_path)


class Node:
    def __init__(self, name):
        self.name, self.others = name, []

    @cached_property
    def stored(self):
        return self.name * 2


def ring(*names):
    nodes = [Node(name) for name in names]
    for node in nodes:
        node.others = nodes
    return nodes[0]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (nn.HuberLoss(delta=1.0), nn.HuberLoss(delta=0.01)),
        (operator.add, operator.mul),
        ({"a", "b"}, {"a", "c"}),
        (torch.float32, torch.float64),
        (ring("a", "b", "c"), ring("a", "b", "d")),
        (Fixed(0).drawn, Fixed(0).__call__),
    ],
    ids=["module", "builtin", "set", "dtype", "ring", "method"],
)
def test_a_digest_tells_values_apart(a, b):
    assert object_digests._digest(a) != object_digests._digest(b)


def test_a_digest_is_that_of_an_equal_value():
    for make in (lambda: ring("a", "b"), lambda: {"b", "a"}, lambda: nn.HuberLoss().eval(), torch.Generator):
        assert object_digests._digest(make()) == object_digests._digest(make())
    used = ring("a", "b")
    assert used.stored
    assert object_digests._digest(used) == object_digests._digest(ring("a", "b"))


def test_a_schedule_fixes_the_rounds(tmp_path):
    given = {"task": task(), "data": federation(), "algorithm": adamw(schedule=fp.cosine(warmup=1))}
    fp.simulate(**given, **HOW, out=tmp_path)
    with pytest.raises(ConfigError, match="the algorithm differ"):
        fp.simulate(**given, **{**HOW, "rounds": 5}, out=tmp_path)


def test_the_command_line_says_how_to_resume(tmp_path):
    killed(tmp_path)
    with pytest.raises(RunError, match=r"started from Python objects: call simulate\(\.\.\., out="):
        resume(tmp_path)


def test_a_mistake_leaves_no_folder(tmp_path):
    for how in ({"cohort": 9}, {"memory": object()}, {"engine": "flower"}, {"target": 0.1, "share": "half"}):
        with pytest.raises(ConfigError):
            fp.simulate(task(), federation(), adamw(), **{**HOW, **how}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_summary_tells_what_ran_and_seeds_are_one_setting(tmp_path):
    for seed in (0, 1):
        fp.simulate(task(seed), federation(), adamw(), **{**HOW, "seed": seed}, out=tmp_path / str(seed))
    runs = [read_run(tmp_path / str(seed)) for seed in (0, 1)]
    e = runs[0].experiment
    assert (e.model, e.algorithm, e.loss, e.metrics) == (
        "python:Sequential",
        "python:fedavg",
        "python:huber",
        "r2",
    )
    assert (e.scheme, e.optimizer, e.lr, e.clients, runs[0].metric.name) == (
        "original",
        "adamw",
        0.01,
        4,
        "r2",
    )
    assert len(group(runs)) == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"task": nn.Linear(6, 1)}, r"task is a Linear: expected a Task, such as fp.Task\("),
        ({"data": []}, "data is a list: expected a FederatedData"),
        (
            {"algorithm": "fedavg"},
            r"algorithm is 'fedavg': expected an Algorithm, such as algorithms.fedavg\(lr=0.1\)",
        ),
        ({"algorithm": algorithms.fedavg}, "algorithm is a function: expected"),
        ({"link": "int8"}, r"link is 'int8': expected a Link, such as fp.Link\(up=\"int8\"\)"),
    ],
)
def test_an_object_of_another_kind_is_named(changes, says):
    given = {
        "task": fp.Task(nn.Linear(6, 1), loss="mse"),
        "data": federation(),
        "algorithm": algorithms.fedavg(),
    }
    with pytest.raises(ConfigError, match=says):
        fp.simulate(**{**given, **HOW, **changes})
