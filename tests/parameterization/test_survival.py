"""A factorized model supports what PyTorch models support: copies, state dicts, moves, vmap, autocast."""

from copy import deepcopy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.func import functional_call, grad, vmap

import fedpara as fp
from fedpara.parameterization import compose_state, fit_errors, forms, load

SCHEMES = [
    fp.FedPara(gamma=0.5, nonlinearity="tanh"),
    fp.FedPara(gamma=0.5, conv="reshape"),
    fp.PFedPara(gamma=0.5),
    fp.LowRank(gamma=0.5),
]
each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.name}-{s.nonlinearity}-{s.conv}")


def network(scheme=SCHEMES[0], seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 10))
    return fp.factorize(model, scheme, force=True, init="calibrated")


def images(count=4):
    return torch.randn(count, 3, 5, 5, generator=torch.Generator().manual_seed(1))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 7)
        self.recurrent = nn.LSTM(7, 6, bidirectional=True)
        self.output = nn.Linear(12, 5)

    def forward(self, ids):
        return self.output(self.recurrent(self.embedding(ids))[0])


def tagger(scheme=SCHEMES[0], seed=0):
    torch.manual_seed(seed)
    return fp.factorize(Tagger(), scheme, force=True, init="calibrated")


def sentence():
    return torch.randint(0, 20, (6, 3), generator=torch.Generator().manual_seed(2))


BOTH = pytest.mark.parametrize(("build", "inputs"), [(network, images), (tagger, sentence)])


@each_scheme
@BOTH
@pytest.mark.parametrize("after_forward", [False, True])
def test_a_deep_copy_is_independent(scheme, build, inputs, after_forward):
    model, x = build(scheme), inputs()
    before = model(x).detach() if after_forward else None
    copy = deepcopy(model)
    assert forms(copy) == forms(model)
    assert not {id(p) for p in copy.parameters()} & {id(p) for p in model.parameters()}
    assert torch.equal(copy(x), model(x))
    copy(x).square().mean().backward()
    assert all(p.grad is None for p in model.parameters())
    torch.optim.SGD(copy.parameters(), lr=0.1).step()
    assert not torch.allclose(copy(x), model(x))
    if before is not None:
        assert torch.equal(model(x), before)


@each_scheme
@BOTH
def test_merging_a_copy_leaves_the_original_and_other_copies_intact(scheme, build, inputs):
    """Copies share the class with the weight's property, and torch removes the property from the class."""
    model, x = build(scheme), inputs()
    first = model(x).detach()
    copies = [deepcopy(model), deepcopy(deepcopy(model))]
    merged = fp.merge(copies[0])
    for survivor in (model, *copies):
        assert torch.equal(survivor(x), first)
        assert forms(survivor) == forms(model)
        survivor(x).sum().backward()
    assert not forms(merged)
    again = deepcopy(merged)
    assert torch.allclose(again(x), first, rtol=1e-5, atol=1e-6)
    assert [type(m) for m in again.modules()] == [type(m) for m in merged.modules()]
    fp.factorize(again, scheme, force=True)
    assert not forms(merged)


@each_scheme
@BOTH
def test_state_dict_round_trip(scheme, build, inputs):
    source, target, x = build(scheme, seed=0), build(scheme, seed=1), inputs()
    assert not torch.allclose(source(x), target(x))
    result = target.load_state_dict(source.state_dict())
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert torch.equal(source(x), target(x))
    assert list(target.state_dict()) == list(source.state_dict())
    third = build(scheme, seed=2)
    load(third, source.state_dict())
    assert torch.equal(third(x), source(x))
    assert torch.equal(fp.merge(build(scheme, seed=3), source.state_dict())(x), fp.merge(source)(x))


def test_torchs_names_can_be_loaded_too():
    source, target, x = network(seed=0), network(seed=1), images()
    target.load_state_dict(dict(source.named_parameters()))
    assert torch.equal(source(x), target(x))


def test_a_state_can_be_assigned_and_loaded_in_part():
    source, target, x = network(seed=0), network(seed=1), images()
    target.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(source(x), target(x))
    shared = {name: torch.zeros_like(t) for name, t in source.state_dict().items() if not name.endswith("2")}
    result = target.load_state_dict(shared, strict=False)
    assert len(result.missing_keys) == len(source.state_dict()) - len(shared) == 5
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, shared.get(name, source.state_dict()[name]))


def test_state_dicts_of_parts_use_the_same_names():
    model = tagger()
    whole, part = model.state_dict(), model.recurrent.state_dict()
    assert "weight_ih_l0_reverse.x2" in part
    assert {f"recurrent.{name}" for name in part} == {n for n in whole if n.startswith("recurrent.")}
    other = tagger(seed=1)
    other.recurrent.load_state_dict(part)
    assert torch.equal(other.state_dict()["recurrent.weight_hh_l0.y1"], whole["recurrent.weight_hh_l0.y1"])
    assert not torch.equal(other.state_dict()["output.weight.y1"], whole["output.weight.y1"])
    outer = nn.ModuleDict({"inner": model})
    assert set(outer.state_dict()) == {f"inner.{name}" for name in whole}
    outer.load_state_dict(outer.state_dict())
    prefixed = model.state_dict(prefix="model.")
    assert set(prefixed) == {f"model.{name}" for name in whole}


@BOTH
def test_to_another_type(build, inputs):
    model, x = build(), inputs()
    exact = deepcopy(model).to(torch.float64)
    assert all(t.dtype == torch.float64 for t in exact.state_dict().values())
    x64 = x.double() if x.is_floating_point() else x
    assert torch.allclose(exact(x64).float(), model(x), rtol=1e-4, atol=1e-5)
    merged = fp.merge(exact)
    assert all(p.dtype == torch.float64 for p in merged.parameters())
    back = exact.to(torch.float32)
    assert torch.equal(back(x), model(x))


def test_device_moves_go_through_the_factors():
    model = network().to("meta")
    assert all(p.is_meta for p in model.parameters())
    assert model[0].weight.is_meta
    assert model(images().to("meta")).shape == (4, 10)


@each_scheme
@BOTH
def test_functional_call_of_the_module_and_of_the_composed_state(scheme, build, inputs):
    model, other, x = build(scheme), build(scheme, seed=1), inputs()
    expected, own = other(x).detach(), model(x).detach()
    assert torch.equal(functional_call(model, dict(other.named_parameters()), (x,)), expected)
    composed = compose_state(other.state_dict(), forms(other))
    assert torch.allclose(functional_call(fp.merge(model), composed, (x,)), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(model(x), own)


@each_scheme
@pytest.mark.parametrize("through", ["module", "state"])
def test_vmap_of_grad_equals_a_loop(scheme, through):
    models = [network(scheme, seed).double() for seed in range(3)]
    x = torch.stack([images().double() + i for i in range(3)])
    y = torch.randint(0, 10, (3, 4), generator=torch.Generator().manual_seed(3))
    plain, written = fp.merge(models[0]), forms(models[0])

    def loss(state, x, y):
        if through == "module":
            scores = functional_call(models[0], state, (x,))
        else:
            scores = functional_call(plain, compose_state(state, written), (x,))
        return nn.functional.cross_entropy(scores, y)

    def states(model):
        named = model.named_parameters() if through == "module" else model.state_dict().items()
        return {name: tensor.detach() for name, tensor in named}

    each = [states(model) for model in models]
    stacked = {name: torch.stack([state[name] for state in each]) for name in each[0]}
    together = vmap(grad(loss))(stacked, x, y)
    for i, state in enumerate(each):
        alone = grad(loss)(state, x[i], y[i])
        for name in state:
            assert torch.allclose(together[name][i], alone[name], rtol=1e-9, atol=1e-12), name


@BOTH
def test_autocast(build, inputs):
    model, x = build(), inputs()
    if build is tagger:
        model.recurrent = nn.Identity()
        model.output = fp.factorize(nn.Linear(7, 5), SCHEMES[0], force=True)
    exact = model(x).detach()
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(x)
        rough.float().square().mean().backward()
    assert rough.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())
    assert 0 < (rough.float() - exact).norm() < 0.03 * exact.norm()


@BOTH
def test_safetensors(build, inputs, tmp_path):
    source, target, x = build(seed=0), build(seed=1), inputs()
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    state = load_file(tmp_path / "model.safetensors")
    assert set(state) == set(source.state_dict())
    target.load_state_dict(state)
    assert torch.equal(source(x), target(x))


@each_scheme
def test_a_frozen_weight_stays_frozen(scheme):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 10), nn.Linear(10, 8))
    model[0].weight.requires_grad_(False)
    fp.factorize(model, scheme, force=True)
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, _ in model.named_parameters() if n.startswith("0.parametrizations")}
    before = model[0].weight.clone()
    model(torch.randn(3, 12)).sum().backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    assert torch.equal(model[0].weight, before)
    merged = fp.merge(model)
    assert [p.requires_grad for p in merged.parameters()] == [False, True, True, True]


@pytest.mark.parametrize("scheme", [fp.PFedPara(gamma=0.5), fp.LowRank(gamma=0.5)], ids=lambda s: s.name)
def test_assigning_a_weight_fits_it(scheme):
    torch.manual_seed(0)
    layer = fp.factorize(nn.Linear(12, 10), scheme, force=True)
    factors = [id(p) for p in layer.parameters()]
    assert fit_errors(layer) == {}
    w = fp.merge(fp.factorize(nn.Linear(12, 10), scheme, force=True, init="calibrated")).weight.detach()
    layer.weight = w
    error = float((layer.weight.detach() - w).norm() / w.norm())
    assert error == pytest.approx(fit_errors(layer)["weight"], abs=1e-4)
    assert error < 0.2
    assert [id(p) for p in layer.parameters()] == factors


def test_train_and_eval_and_gradient_checkpointing():
    model, x = network(), images().requires_grad_()
    assert not any(m.training for m in model.eval().modules())
    plain = model(x)
    again = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    assert torch.equal(plain, again)
    again.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
