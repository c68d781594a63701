"""Contracts: what every scheme promises on every kind of layer."""

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import fedpara as fp
from fedpara.parameterization import (
    AwareKronecker,
    AwareLowRank,
    Kronecker,
    compose_state,
    forms,
    plan,
    private,
)

SCHEMES = {
    "fedpara": fp.FedPara(gamma=0.5),
    "tanh": fp.FedPara(gamma=0.5, nonlinearity="tanh"),
    "reshape": fp.FedPara(gamma=0.5, conv="reshape"),
    "pfedpara": fp.PFedPara(gamma=0.5),
    "lowrank": fp.LowRank(gamma=0.5),
    "kronecker": Kronecker(gamma=0.5),
    "lowrank-aad": AwareLowRank(gamma=0.5),
    "kronecker-aad": AwareKronecker(gamma=0.5),
}


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.build()

    def batch(self) -> tuple[Tensor, ...]:
        torch.manual_seed(7)
        return self.inputs()


class Raw(nn.Module):
    """Named parameters of two and three dimensions, read by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 7, 5))
        self.scale = nn.Parameter(torch.ones(5))
        self.mixing = nn.Parameter(torch.randn(9, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bj,oi,ijk->bok", x, self.mixing, self.table) * self.scale


class Tied(nn.Module):
    """A language model's shape: the embedding is the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 10)
        self.hidden = nn.Linear(10, 10)
        self.output = nn.Linear(10, 24)
        self.output.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(torch.tanh(self.hidden(self.embedding(ids))))


def normal(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(shape),)


def attended(*widths: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randn(3, 4, width) for width in widths)


def ids(count: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(0, count, (3, 5)),)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True)


CASES = {
    "linear": Case(lambda: nn.Linear(12, 10), normal(3, 12)),
    "conv1d": Case(lambda: nn.Conv1d(6, 8, 3), normal(2, 6, 9)),
    "conv2d": Case(lambda: nn.Conv2d(6, 8, (3, 2), padding=1), normal(2, 6, 5, 5)),
    "conv3d": Case(lambda: nn.Conv3d(5, 6, 2), normal(2, 5, 4, 4, 4)),
    "pointwise": Case(lambda: nn.Conv2d(10, 12, 1, bias=False), normal(2, 10, 3, 3)),
    "grouped": Case(lambda: nn.Conv2d(8, 12, 3, groups=4), normal(2, 8, 5, 5)),
    "depthwise": Case(lambda: nn.Conv2d(8, 8, 3, groups=8), normal(2, 8, 5, 5)),
    "transposed1d": Case(lambda: nn.ConvTranspose1d(6, 8, 3, stride=2), normal(2, 6, 5)),
    "transposed2d": Case(lambda: nn.ConvTranspose2d(6, 8, 3, stride=2), normal(2, 6, 4, 4)),
    "transposed3d": Case(lambda: nn.ConvTranspose3d(5, 6, 2), normal(2, 5, 3, 3, 3)),
    "transposed grouped": Case(lambda: nn.ConvTranspose2d(8, 12, 3, groups=4), normal(2, 8, 4, 4)),
    "embedding": Case(lambda: nn.Embedding(20, 9), ids(20)),
    "lstm": Case(lambda: nn.LSTM(7, 6, num_layers=2, bidirectional=True), normal(4, 3, 7)),
    "lstm projected": Case(lambda: nn.LSTM(7, 8, proj_size=5, batch_first=True), normal(3, 4, 7)),
    "gru": Case(lambda: nn.GRU(7, 6, num_layers=2), normal(4, 3, 7)),
    "rnn": Case(lambda: nn.RNN(7, 6, bias=False), normal(4, 3, 7)),
    "gru cell": Case(lambda: nn.GRUCell(7, 6), lambda: (torch.randn(3, 7), torch.randn(3, 6))),
    "attention": Case(lambda: nn.MultiheadAttention(12, 3, batch_first=True), attended(12, 12, 12)),
    "attention of three": Case(lambda: nn.MultiheadAttention(12, 3, kdim=10, vdim=8), attended(12, 10, 8)),
    "encoder": Case(encoder, attended(12)),
    "bilinear": Case(lambda: nn.Bilinear(6, 7, 8), lambda: (torch.randn(3, 6), torch.randn(3, 7))),
    "raw": Case(Raw, normal(3, 7)),
    "tied": Case(Tied, ids(24)),
}
RECURRENT = ["lstm", "lstm projected", "gru", "rnn"]

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")  # torch warns for its plain layer too
case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


def factorized(case: Case, scheme: fp.parameterization.Scheme) -> nn.Module:
    """At He's scale, so no recurrent layer or tanh saturates and every gradient is visible."""
    return fp.factorize(case.model(), scheme, force=True, init="calibrated")


def answer(model: Callable[..., object], inputs: tuple[Tensor, ...]) -> Tensor:
    output = model(*inputs)
    return output[0] if isinstance(output, tuple) else output


def train(model: nn.Module, inputs: tuple[Tensor, ...], steps: int = 4, lr: float = 0.05) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        (answer(model, inputs) - 1).square().mean().backward()
        optimizer.step()


def doubled(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.double() if x.is_floating_point() else x for x in inputs)


def assert_rounding(a: Tensor, b: Tensor) -> None:
    a, b = a.detach(), b.detach()
    assert a.shape == b.shape
    assert float((a - b).abs().max()) <= 2e-6 * float(b.abs().max())


@case
@scheme
def test_the_merged_model_gives_the_same_output(case, scheme):
    model = factorized(case, scheme)
    merged, inputs = fp.merge(model), case.batch()
    with torch.no_grad():
        assert_rounding(answer(merged, inputs), answer(model, inputs))
        # Attention takes another, fused path.
        assert_rounding(answer(merged.eval(), inputs), answer(model.eval(), inputs))


@case
@scheme
def test_the_merged_model_is_plain(case, scheme):
    model, never = factorized(case, scheme), case.model()
    merged = fp.merge(model)
    assert [type(m) for m in merged.modules()] == [type(m) for m in never.modules()]
    shapes, expected = ({k: v.shape for k, v in m.state_dict().items()} for m in (merged, never))
    assert list(shapes.items()) == list(expected.items())
    assert [n for n, _ in merged.named_parameters()] == [n for n, _ in never.named_parameters()]
    assert [p.requires_grad for p in merged.parameters()] == [True] * len(list(never.parameters()))
    assert {k for k in vars(merged) if "fedpara" in k} == set()
    never.load_state_dict(merged.state_dict())
    inputs = case.batch()
    assert_rounding(answer(never, inputs), answer(model, inputs))


@case
@scheme
def test_both_go_on_training_after_a_merge(case, scheme):
    model, inputs = factorized(case, scheme), case.batch()
    merged = fp.merge(model)
    before = answer(model, inputs).detach()
    train(merged, inputs)
    assert torch.equal(answer(model, inputs), before)
    assert not torch.allclose(answer(merged, inputs), before)
    after = answer(merged, inputs).detach()
    train(model, inputs)
    assert torch.equal(answer(merged, inputs), after)
    assert not torch.allclose(answer(model, inputs), before)
    assert_rounding(answer(fp.merge(model), inputs), answer(model, inputs))


@case
@scheme
def test_every_factor_gets_a_gradient(case, scheme):
    model = factorized(case, scheme)
    answer(model, case.batch()).square().sum().backward()
    form = next(iter(forms(model).values()))
    for name, parameter in model.named_parameters():
        factor = list(form.factors)[int(name[-1])] if ".original" in name else ""
        if factor in scheme.fixed:
            assert not parameter.requires_grad
        elif factor:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name


@case
@scheme
def test_training_equals_training_by_functional_composition(case, scheme):
    """Steps on the module equal steps on a state that is composed for the plain module."""
    model, inputs = factorized(case, scheme).double(), doubled(case.batch())
    plain, written = fp.merge(model), forms(model)
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    start = answer(model, inputs).detach()
    train(model, inputs)
    if isinstance(case.build(), Tied):  # both names of a shared factor must move as one
        aliases = {n: n.replace("output.weight", "embedding.weight") for n in state}
    else:
        aliases = {n: n for n in state}

    def loss(free):
        whole = compose_state({name: free[alias] for name, alias in aliases.items()}, written)
        return (
            (answer(lambda *x: functional_call(plain, whole, x, tie_weights=False), inputs) - 1)
            .square()
            .mean()
        )

    free = {name: state[name] for name in set(aliases.values())}
    for _ in range(4):
        gradient = torch.func.grad(loss)(free)
        moves = {name for name in free if name.rpartition(".")[2] not in scheme.fixed}
        free |= {name: free[name] - 0.05 * gradient[name] for name in moves}
    for name, tensor in model.state_dict().items():
        assert torch.allclose(tensor, free[aliases[name]], rtol=1e-9, atol=1e-12), name
    assert not torch.allclose(answer(model, inputs), start)


@case
@scheme
def test_names_are_readable(case, scheme):
    model, dense = factorized(case, scheme), case.model().state_dict()
    written = forms(model)
    state = model.state_dict()
    assert set(written) == {name for name, tensor in dense.items() if tensor.dim() >= 2}
    factors = {
        f"{weight}.{factor}": form.factors[factor]
        for weight, form in written.items()
        for factor in form.factors
    }
    assert all(re.fullmatch(r"(.+\.)?\w+\.[xyt][12]?", name) for name in factors)
    assert {name: state[name].shape for name in factors} == factors
    assert set(state) - set(factors) == set(dense) - set(written)
    kept = {name for name in factors if name.endswith("2")} if scheme.name == "pfedpara" else set()
    assert private(model) == kept


@pytest.mark.parametrize("name", RECURRENT)
@scheme
def test_a_recurrent_layer_never_computes_with_stale_weights(name, scheme):
    """torch's recurrent layers keep a list of their weights; each forward must use the current factors."""
    model, inputs = factorized(CASES[name], scheme), CASES[name].batch()
    seen = []
    for _ in range(3):
        seen.append(answer(model, inputs).detach())
        assert_rounding(answer(fp.merge(model), inputs), seen[-1])
        train(model, inputs, steps=1)
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if ".original" in n).mul_(2)
    seen.append(answer(model, inputs).detach())
    assert_rounding(answer(fp.merge(model), inputs), seen[-1])
    assert all(not torch.allclose(a, b) for a, b in pairwise(seen))


@scheme
def test_tied_weights_share_their_factors(scheme):
    model = factorized(CASES["tied"], scheme)
    each = {id(p) for name, p in model.named_parameters() if "embedding" in name}
    assert len(each) == len(forms(model)["embedding.weight"].factors)
    assert not [name for name, _ in model.named_parameters() if "output" in name and "original" in name]
    merged = fp.merge(model)
    assert merged.output.weight is merged.embedding.weight
    assert len(list(merged.parameters())) == len(list(CASES["tied"].model().parameters()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@case
@scheme
def test_the_gpu_trains_to_the_same_factors(case, scheme):
    """The GPU composes kernels in another order, and cuDNN packs recurrent weights into a separate buffer."""
    model, inputs = factorized(case, scheme).double(), doubled(case.batch())
    there = deepcopy(model).cuda()
    train(model, inputs)
    train(there, tuple(x.cuda() for x in inputs))
    for name, tensor in there.state_dict().items():
        assert torch.allclose(tensor.cpu(), model.state_dict()[name], rtol=1e-8, atol=1e-10), name
    merged = fp.merge(there)
    assert_rounding(answer(merged, tuple(x.cuda() for x in inputs)).cpu(), answer(model, inputs))


def test_where_may_go_by_the_name_of_a_part():
    """The biases and norms of the part are one-dimensional and stay dense, and the plan says so."""
    encoder = nn.Sequential(nn.Conv2d(8, 32, 3), nn.BatchNorm2d(32), nn.Flatten(), nn.Linear(32, 40))
    model = nn.ModuleDict({"encoder": encoder, "head": nn.Linear(40, 30)})

    def where(name: str, module: nn.Module, parameter: str) -> bool:
        return name.startswith("encoder")

    reasons = {choice.name: choice.reason for choice in plan(model, SCHEMES["fedpara"], where)}
    fp.factorize(model, SCHEMES["fedpara"], where)

    assert set(forms(model)) == {"encoder.0.weight", "encoder.3.weight"}
    assert {name: reason for name, reason in reasons.items() if reason} == {
        "encoder.0.bias": "one-dimensional",
        "encoder.1.weight": "one-dimensional",
        "encoder.1.bias": "one-dimensional",
        "encoder.3.bias": "one-dimensional",
        "head.weight": "not chosen",
        "head.bias": "one-dimensional",
    }
