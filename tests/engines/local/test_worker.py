"""One model trains all clients in turn: scoring it, even in another thread, does not change training."""

import threading

import pytest
import torch
from torch import nn

import fedpara as fp
from fedpara import algorithms
from fedpara.data import Examples
from fedpara.engines.local.worker import Worker, _read
from fedpara.engines.program import make_program

EXAMPLES = Examples(torch.randn(20, 8, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3, 3)


class Waits(nn.Sequential):
    """During scoring it signals an event and waits until the test lets it continue."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.there, self.go = threading.Event(), threading.Event()

    def __deepcopy__(self, memo):
        return self

    def forward(self, x):
        y = super().forward(x)
        if not self.training:
            self.there.set()
            assert self.go.wait(60)
        return y


def worker(model):
    torch.manual_seed(0)
    factorized = fp.factorize(model, fp.FedPara(gamma=0.5), force=True)
    return Worker(make_program(factorized), fp.Task(factorized))


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def trained(one, seed=0):
    algorithm = algorithms.fedavg(lr=0.1, batch_size=5)
    state = {name: tensor.clone() for name, tensor in one.program.initial.items()}
    x = {name: state[name] for name in one.program.shared}
    return one.train(state, EXAMPLES, algorithm, x, {}, {}, seed=seed, round=1, who=0).state


def test_scoring_in_another_thread_does_not_stop_factors_from_training():
    torch.manual_seed(0)
    slow, mine = worker(Waits()), worker(plain())
    alone = trained(worker(plain()))
    scoring = threading.Thread(target=slow.evaluate, args=(slow.program.initial, EXAMPLES))
    scoring.start()
    try:
        assert slow.model.there.wait(60)
        mine.evaluate(mine.program.initial, EXAMPLES)
        beside = trained(mine)
    finally:
        slow.model.go.set()
        scoring.join()
    for name, tensor in alone.items():
        assert torch.equal(beside[name], tensor), name


def test_a_failed_score_leaves_the_model_in_training_mode():
    one = worker(plain())
    expected = trained(worker(plain()))
    with pytest.raises(RuntimeError):
        one.evaluate(one.program.initial, Examples(torch.randn(4, 9), torch.zeros(4, dtype=torch.int64), 3))
    after = trained(one)
    assert one.model.training
    for name, tensor in expected.items():
        assert torch.equal(after[name], tensor), name


def test_a_weight_is_composed_once_per_score(monkeypatch):
    one, made = worker(plain()), []
    form = type(next(iter(one.program.forms.values())))
    compose = form.compose
    monkeypatch.setattr(form, "compose", lambda self, factors: made.append(self) or compose(self, factors))
    several = EXAMPLES.subset(list(range(20)) * 60)  # more than two batches
    one.evaluate(one.program.initial, several)
    assert len(made) == len(one.program.forms)
    one.evaluate(one.program.initial, several)
    assert len(made) == 2 * len(one.program.forms)


@pytest.mark.parametrize(("odd", "known"), [(1.0, True), (float("nan"), None), (1e30, None), (1, True)])
def test_the_loss_and_the_check_of_the_parameters_are_read_together(odd, known):
    blocks = {"a": torch.ones(3), "b": torch.tensor([2.0]), "c": torch.tensor([odd])}
    assert _read(torch.tensor(0.5), blocks) == (0.5, known)
    assert _read(torch.tensor(0.5), {}) == (0.5, None)
