"""One weight under several names: its factors are one, and every function here knows all the names."""

import pytest
import torch
from torch import Tensor, nn

import fedpara as fp
from fedpara import algorithms
from fedpara.data import Examples
from fedpara.parameterization import compose_state, forms, private
from fedpara.wire.share import split

SCHEME = fp.FedPara(gamma=0.3)


class HeldTwice(nn.Module):
    """One parameter, two names in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Parameter(torch.randn(40, 40))
        self.decode = self.encode

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.encode @ self.decode.mT


class UsedTwice(nn.Module):
    """One module, two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(40, 40)
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))  # type: ignore[no-any-return]


def test_a_parameter_held_twice_by_one_module_stays_one() -> None:
    model = fp.factorize(HeldTwice(), SCHEME)
    assert {name.partition(".")[0] for name in model.state_dict()} == {"encode", "decode"}
    assert torch.equal(model.encode, model.decode)
    assert len(list(model.parameters())) == 4
    plain = fp.merge(model)
    assert plain.encode is plain.decode
    x = torch.randn(3, 40)
    torch.testing.assert_close(plain(x), model(x))


def test_a_list_that_holds_a_weight_twice() -> None:
    weight = nn.Parameter(torch.randn(40, 40))
    model = fp.factorize(nn.ParameterList([weight, weight]), SCHEME)
    assert len(list(model.parameters())) == 4
    assert torch.equal(model[0], model[1])


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_it_is_sent_once(engine: str) -> None:
    examples = Examples(torch.randn(40, 40), torch.randint(0, 40, (40,)), classes=40)
    data = fp.FederatedData(examples, list(torch.arange(40).split(10)))
    model = fp.factorize(HeldTwice(), SCHEME)
    run = fp.simulate(
        fp.Task(model, test=examples), data, algorithms.fedavg(lr=1e-4), rounds=1, cohort=2, engine=engine
    )
    messages = 2 * 2  # two clients, down and up
    assert run.bytes < 1.5 * messages * sum(4 * p.numel() for p in model.parameters())
    assert torch.equal(run.state["encode.x1"], run.state["decode.x1"])


def test_a_module_under_two_names_is_known_by_both() -> None:
    model = fp.factorize(UsedTwice(), fp.PFedPara(gamma=0.3))
    assert set(forms(model)) == {"a.weight", "b.weight"}
    assert private(model) == {"a.weight.x2", "a.weight.y2", "b.weight.x2", "b.weight.y2"}
    shared, _ = split(model.state_dict(), private(model))
    assert not [name for name in shared if name.endswith("2")]
    plain = UsedTwice()
    plain.load_state_dict(compose_state(model.state_dict(), forms(model)))
    x = torch.randn(3, 40)
    torch.testing.assert_close(plain(x), model(x))
