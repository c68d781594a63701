"""Contracts: what an adapter of every scheme promises, W = W0 + scale * compose(factors)."""

from copy import deepcopy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

import fedpara as fp
from fedpara.errors import SchemeError
from fedpara.interop import read_state, save_state
from fedpara.parameterization import compose_state, corrected_grad, forms, private

SCHEMES = {
    "fedpara": fp.FedPara(rank=2),
    "tanh": fp.FedPara(rank=2, nonlinearity="tanh"),
    "reshape": fp.FedPara(rank=2, conv="reshape"),
    "pfedpara": fp.PFedPara(rank=2),
    "lowrank": fp.LowRank(rank=2),
}
ZERO = {"fedpara": "x2", "tanh": "x2", "reshape": "x2", "pfedpara": "x1", "lowrank": "x"}


class Network(nn.Module):
    """A convolution, attention, a tied table, a norm, a mask that never changes, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 12)
        self.conv = nn.Conv1d(12, 12, 3, padding=1)
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.norm = nn.LayerNorm(12)
        self.output = nn.Linear(12, 20, bias=False)
        self.output.weight = self.table.weight
        self.classifier = nn.Linear(20, 3)
        self.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool).triu(1))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.conv(self.table(ids).transpose(1, 2)).transpose(1, 2)
        x = self.norm(x + self.attention(x, x, x, attn_mask=self.mask)[0])
        scores: Tensor = self.classifier(self.output(x).mean(1))
        return scores


IDS = torch.arange(15).reshape(3, 5)
ADAPTED = {"conv.weight", "attention.in_proj_weight", "attention.out_proj.weight"}
scheme = pytest.mark.parametrize("scheme", SCHEMES)


def base() -> nn.Module:
    torch.manual_seed(0)
    return Network()


def adapted(scheme: str, alpha: float | None = 3.0, train: tuple[str, ...] = ("classifier",)) -> nn.Module:
    torch.manual_seed(1)
    return fp.factorize(base(), SCHEMES[scheme], onto="frozen", alpha=alpha, train=train)


def trained(model: nn.Module, steps: int = 3) -> nn.Module:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(IDS) - 1).square().mean().backward()
        optimizer.step()
    return model


@scheme
def test_an_adapter_starts_at_no_change_and_can_move(scheme):
    model, plain = adapted(scheme), base()
    assert set(forms(model)) == ADAPTED
    assert torch.equal(model(IDS), plain(IDS))
    model(IDS).square().sum().backward()
    for name, tensor in model.state_dict(keep_vars=True).items():
        moves = name.startswith("classifier") or name.rpartition(".")[2] == ZERO[scheme]
        assert (tensor.grad is not None and bool(tensor.grad.abs().max() > 0)) == moves, name
    before = model.state_dict()["conv.weight.base"].clone()
    trained(model)
    factors = {name for name in model.state_dict() if name.rpartition(".")[0] in ADAPTED} - {
        f"{weight}.base" for weight in ADAPTED
    }
    moved = {n for n, t in model.state_dict().items() if not torch.equal(t, adapted(scheme).state_dict()[n])}
    assert moved == factors | {"classifier.weight", "classifier.bias"}
    assert torch.equal(model.state_dict()["conv.weight.base"], before)


@scheme
def test_merging_adds_the_scaled_change_to_the_frozen_weight(scheme):
    model, plain = trained(adapted(scheme, alpha=3.0)), base()
    merged = fp.merge(model)
    torch.testing.assert_close(merged(IDS), model(IDS))
    assert [type(m) for m in merged.modules()] == [type(m) for m in plain.modules()]
    for weight, form in forms(model).items():
        factors = [model.state_dict()[f"{weight}.{factor}"] for factor in form.factors]
        change = 1.5 * form.whole.compose(factors)  # alpha / rank
        assert change.abs().max() > 0
        torch.testing.assert_close(merged.state_dict()[weight], plain.state_dict()[weight] + change)
    composed = compose_state(model.state_dict(), forms(model))
    assert composed.keys() == plain.state_dict().keys()
    torch.testing.assert_close(functional_call(plain, composed, (IDS,), tie_weights=False), model(IDS))


@scheme
def test_lanes_share_the_frozen_weight(scheme):
    """What trains is stacked; W0 comes from the forms."""
    models = [trained(adapted(scheme), steps) for steps in (1, 3)]
    plain, written = fp.merge(models[0]), forms(models[0])
    states = [
        {n: p.detach() for n, p in m.state_dict(keep_vars=True).items() if p.requires_grad} for m in models
    ]
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}

    def output(state: dict[str, Tensor]) -> Tensor:
        scores: Tensor = functional_call(plain, compose_state(state, written), (IDS,))
        return scores

    for got, model in zip(vmap(output)(stacked), models, strict=True):
        torch.testing.assert_close(got, model(IDS))


@scheme
def test_the_jacobian_correction_is_that_of_the_change(scheme):
    """A plain factorized model whose factors are the adapter's and whose loss adds W0 has the same correction."""
    model = trained(adapted(scheme, alpha=None, train=()).double())
    name = "conv.weight"
    form, whole = forms(model)[name], forms(model)[name].whole
    state = {f"{name}.{factor}": model.state_dict()[f"{name}.{factor}"] for factor in form.factors}
    options = {"eta": 0.1, "lambda_": 0.7}

    def loss(shift: float | Tensor):
        return lambda plain: (plain[name] + shift - 1).square().sum()

    onto, value = corrected_grad(loss(0.0), state, {name: form}, **options)
    alone, same = corrected_grad(loss(form.base), state, {name: whole}, **options)
    torch.testing.assert_close(value, same)
    for factor in state:
        torch.testing.assert_close(onto[factor], alone[factor])


@scheme
def test_copies_files_and_compiled_models_keep_the_adapter(scheme, tmp_path):
    model = trained(adapted(scheme))
    expected, fresh = model(IDS), adapted(scheme)
    fresh.load_state_dict(model.state_dict())
    copy = deepcopy(model)
    for other in (fresh, copy, torch.compile(model, backend="eager")):
        assert torch.equal(other(IDS), expected)
    trained(copy)
    assert torch.equal(model(IDS), expected)
    save_state(tmp_path / "state.safetensors", model.state_dict(), forms(model))
    saved = read_state(tmp_path / "state.safetensors")
    assert saved.forms == forms(model)
    plain = base()
    plain.load_state_dict(saved.merged())
    torch.testing.assert_close(plain(IDS), expected)


def test_lowrank_is_loras_form():
    """W = W0 + (alpha / r) B A with B = 0 and A ~ U(-1/sqrt(n), 1/sqrt(n)), kaiming_uniform's with a = sqrt(5)."""
    model = fp.factorize(nn.Linear(400, 300), fp.LowRank(rank=4), onto="frozen", alpha=8)
    form, state = forms(model)["weight"], model.state_dict()
    assert (form.rank, form.scale) == (4, 2.0)
    assert not state["weight.x"].any()
    a = state["weight.y"]
    assert 0.99 / 20 < float(a.abs().max()) <= 1 / 20
    assert float(a.std()) == pytest.approx(1 / 20 / 3**0.5, rel=0.1)
    state["weight.x"].normal_()
    torch.testing.assert_close(model.weight, state["weight.base"] + 2 * state["weight.x"] @ a.mT)


def test_the_mask_of_fedparas_adapter_has_unit_scale():
    model = fp.factorize(nn.Linear(400, 300), fp.FedPara(rank=4), onto="frozen")
    state = model.state_dict()
    mask = state["weight.x1"] @ state["weight.y1"].mT
    assert float(mask.square().mean().sqrt()) == pytest.approx(1, rel=1e-4)
    assert float(state["weight.y2"].abs().max()) <= 1 / 20


def test_private_factors_stay_private():
    names = {f"{weight}.{factor}" for weight in ADAPTED for factor in ("x2", "y2", "t2")}
    assert private(adapted("pfedpara")) == names & adapted("pfedpara").state_dict().keys()


def test_the_caller_says_what_else_trains():
    model = adapted("lowrank", train=("norm", "attention.in_proj_bias"))
    others = {n for n, p in model.named_parameters() if p.requires_grad and "original" not in n}
    assert others == {"norm.weight", "norm.bias", "attention.in_proj_bias"}
    model.requires_grad_(True)  # a buffer never trains
    assert not [name for name, _ in model.named_parameters() if name.endswith("base")]
    tied = fp.factorize(base(), fp.LowRank(rank=2), onto="frozen", train="output")
    assert tied.table.weight.requires_grad
    frozen = base().requires_grad_(False)
    assert all(
        p.requires_grad
        for p in fp.factorize(frozen, fp.LowRank(rank=2), onto="frozen").conv.parametrizations.parameters()
    )


def test_where_chooses_tables_too():
    model = fp.factorize(base(), fp.LowRank(rank=2), lambda n, m, p: n == "table", onto="frozen")
    assert set(forms(model)) == {"table.weight", "output.weight"}
    assert torch.equal(model(IDS), base()(IDS))


@dataclass(frozen=True)
class Sum(fp.FedPara):
    """W = W1 + W2, which is not 0 where X2 is."""

    def join(self, inner):
        return inner[0] + inner[1]


@pytest.mark.parametrize(
    ("scheme", "options", "said"),
    [
        (fp.LowRank(rank=2), {"onto": "frozen", "train": ["head"]}, r"train names 'head', .* \(table, conv"),
        (fp.LowRank(rank=2), {"train": ["classifier"]}, r"pass onto=\"frozen\""),
        (fp.LowRank(rank=2), {"alpha": 2}, r"pass onto=\"frozen\""),
        (fp.LowRank(rank=2), {"onto": "frozen", "init": "fit"}, "starts at no change"),
        (Sum(rank=2), {"onto": "frozen"}, "does not compose to 0 where x2 is 0"),
    ],
)
def test_mistakes_leave_the_model_as_it_was(scheme, options, said):
    model = base()
    with pytest.raises(SchemeError, match=said):
        fp.factorize(model, scheme, **options)
    assert model.state_dict().keys() == base().state_dict().keys()
    assert all(p.requires_grad for p in model.parameters())
