"""Jacobian correction against float64 references: in every form, norm and precision, under vmap and compile."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

import fedpara as fp
from fedpara.parameterization import (
    Kronecker,
    compose_state,
    corrected_backward,
    corrected_grad,
    forms,
)

NORMS = ("plain", "squared", "network")
SCHEMES = {
    "linear": (fp.FedPara(rank=2), False),
    "linear, tanh": (fp.FedPara(rank=2, nonlinearity="tanh"), False),
    "Prop. 3": (fp.FedPara(gamma=0.5), True),
    "Prop. 3, tanh": (fp.FedPara(gamma=0.5, nonlinearity="tanh"), True),
    "Prop. 1, reshaped": (fp.FedPara(gamma=0.5, conv="reshape"), True),
    "pFedPara": (fp.PFedPara(gamma=0.5, nonlinearity="tanh"), True),
    "low-rank": (fp.LowRank(gamma=0.5), True),
    "Kronecker": (Kronecker(ratio=0.5), True),
}
every_scheme = pytest.mark.parametrize(("scheme", "conv"), SCHEMES.values(), ids=SCHEMES)
every_norm = pytest.mark.parametrize("norm", NORMS)


def problem(scheme, seed=0, conv=False, layers=1):
    torch.manual_seed(seed)
    linear = [nn.Linear(11, 9), *(nn.Linear(9, 9) for _ in range(layers - 1))]
    model: nn.Module = nn.Sequential(*linear)
    if conv:
        model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(24, 5))
    model = fp.factorize(model.double(), scheme, force=True)
    x = torch.randn(4, 3, 4, 4, dtype=torch.float64) if conv else torch.randn(4, 11, dtype=torch.float64)
    y = torch.randint(0, 5, (4,))
    plain = fp.merge(model)

    def loss(state, x=x, y=y):
        return nn.functional.cross_entropy(functional_call(plain, state, (x,)), y)

    return {k: v.detach() for k, v in model.state_dict().items()}, forms(model), loss


def brute_force(state, forms_, loss, eta, lambda_, norm):
    """Prop. 1 only: the chain rule written out (J_X1 = (J_W * W2) Y1, ...), differentiated by differences."""
    weight = {name: nn.Parameter(t) for name, t in compose_state(state, forms_).items()}
    value = loss(weight)
    j = dict(zip(weight, torch.autograd.grad(value, list(weight.values())), strict=True))

    def total(s):
        result, distances = float(loss(compose_state(s, forms_))), []
        for name in forms_:
            x1, y1, x2, y2 = (s[f"{name}.{f}"].numpy() for f in ("x1", "y1", "x2", "y2"))
            j_w = j[name].numpy()
            w1, w2 = x1 @ y1.T, x2 @ y2.T
            j1, j2 = j_w * w2, j_w * w1
            stepped = ((x1 - eta * j1 @ y1) @ (y1 - eta * j1.T @ x1).T) * (
                (x2 - eta * j2 @ y2) @ (y2 - eta * j2.T @ x2).T
            )
            distances.append(np.linalg.norm(stepped - (w1 * w2 - eta * j_w)))
        over = {"plain": sum, "squared": lambda d: sum(np.square(d)), "network": np.linalg.norm}[norm]
        return result + lambda_ / 2 * over(distances)

    gradient = {}
    for name, tensor in state.items():
        gradient[name] = torch.zeros_like(tensor)
        for index in np.ndindex(*tensor.shape):
            up, down = ({**state, name: tensor.clone()} for _ in range(2))
            up[name][index] += 1e-6
            down[name][index] -= 1e-6
            gradient[name][index] = (total(up) - total(down)) / 2e-6
    return gradient


@every_norm
@pytest.mark.parametrize("lambda_", [1.0, 10.0])
def test_against_brute_force(norm, lambda_):
    state, forms_, loss = problem(fp.FedPara(rank=2), layers=2)
    ours, value = corrected_grad(loss, state, forms_, eta=0.3, lambda_=lambda_, norm=norm)
    expected = brute_force(state, forms_, loss, 0.3, lambda_, norm)
    assert torch.allclose(value, loss(compose_state(state, forms_)))
    for name in state:
        assert torch.allclose(ours[name], expected[name], rtol=1e-5, atol=1e-7), name


def test_lambda_0_is_the_plain_gradient():
    state, forms_, loss = problem(fp.FedPara(gamma=0.5, nonlinearity="tanh"), conv=True)
    ours, _ = corrected_grad(loss, state, forms_, eta=0.1, lambda_=0.0)
    plain = torch.func.grad(lambda s: loss(compose_state(s, forms_)))(state)
    for name in state:
        assert torch.allclose(ours[name], plain[name])


def test_a_stepped_factor_that_follows_the_dense_step_is_not_corrected():
    """At J_W = 0 the penalty and its gradient are 0, not NaN."""
    state, forms_, loss = problem(fp.FedPara(rank=2))
    for norm in NORMS:
        ours, _ = corrected_grad(lambda s: 0.0 * loss(s), state, forms_, eta=0.1, lambda_=1.0, norm=norm)
        assert all(tensor.eq(0).all() for tensor in ours.values()), norm


def by_definition(state, forms_, j, eta, norm):
    """The gradient of 1/2 ||compose(F - eta J_F) - (W - eta J_W)|| by differentiating these words twice."""
    state = {name: tensor.detach().requires_grad_() for name, tensor in state.items()}
    squares = []
    for name, form in forms_.items():
        factors = [state[f"{name}.{factor}"] for factor in form.factors]
        w = form.compose(factors)
        j_f = torch.autograd.grad(w, factors, j[name], create_graph=True)
        stepped = form.compose([f - eta * g for f, g in zip(factors, j_f, strict=True)])
        squares.append((stepped - (w - eta * j[name])).square().sum())
    if norm == "network":
        squares = [sum(squares)]
    total = sum(square if norm == "squared" else square.sqrt() for square in squares) / 2
    gradients = torch.autograd.grad(total, list(state.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(state, gradients, strict=True))


def correction(backward, state, forms_, **options):
    """The gradient of the penalty alone."""
    given = {"lambda_": 1.0, **options}
    ours, plain = (
        corrected_backward(backward, state, forms_, **given | {"lambda_": x})[0] for x in (1.0, 0.0)
    )
    return {name: tensor - plain[name] for name, tensor in ours.items()}


@every_norm
@every_scheme
def test_against_the_definition(scheme, conv, norm):
    state, forms_, loss = problem(scheme, conv=conv, layers=2)
    j, _ = grad_and_value(loss)(compose_state(state, forms_))
    ours = correction(grad_and_value(loss), state, forms_, eta=0.3, norm=norm)
    expected = by_definition(state, forms_, j, 0.3, norm)
    for name in state:
        assert torch.allclose(ours[name], expected[name], rtol=1e-8, atol=1e-12), name


@every_norm
@every_scheme
@pytest.mark.parametrize("eta", [0.1, 1e-3])
def test_16_bits_are_as_accurate_as_in_the_composition(scheme, conv, norm, eta):
    """A difference of products would be off by a multiple of the correction at the small eta."""
    exact, forms_, loss = problem(scheme, conv=conv, layers=2)
    j, _ = grad_and_value(loss)(compose_state(exact, forms_))

    def backward(plain):
        return {name: j[name].to(tensor) for name, tensor in plain.items()}, None

    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    state = {name: tensor.float() for name, tensor in exact.items()}
    # A large lambda, so that the plain gradient is small beside it.
    ours, _ = corrected_backward(backward, state, forms_, eta=eta, lambda_=1e6, norm=norm, autocast=autocast)
    plain, _ = corrected_backward(backward, state, forms_, eta=eta, lambda_=0.0, norm=norm, autocast=autocast)
    expected = by_definition(exact, forms_, j, eta, norm)
    off, size = (
        torch.cat([tensor.reshape(-1) for tensor in tensors]).norm()
        for tensors in (
            [(ours[name] - plain[name]) / 1e6 - expected[name] for name in state],
            [expected[name] for name in state],
        )
    )
    assert off < 0.04 * size


@every_norm
@every_scheme
def test_vmap_equals_a_loop(scheme, conv, norm):
    state, forms_, loss = problem(scheme, conv=conv, layers=2)
    stacked = {k: torch.stack([v, v * 1.1, v * 0.7]) for k, v in state.items()}
    etas = torch.tensor([0.1, 0.2, 0.0], dtype=torch.float64)
    batched, _ = vmap(lambda s, eta: corrected_grad(loss, s, forms_, eta=eta, norm=norm))(stacked, etas)
    for i, eta in enumerate(etas.tolist()):
        one, _ = corrected_grad(loss, {k: v[i] for k, v in stacked.items()}, forms_, eta=eta, norm=norm)
        for name in state:
            assert torch.allclose(batched[name][i], one[name])


def test_compiles_without_a_graph_break():
    state, forms_, loss = problem(fp.FedPara(rank=2))
    compiled = torch.compile(
        lambda s: corrected_grad(loss, s, forms_, eta=0.1)[0], fullgraph=True, backend="aot_eager"
    )
    expected, _ = corrected_grad(loss, state, forms_, eta=0.1)
    for name, tensor in compiled(state).items():
        assert torch.allclose(tensor, expected[name])


def test_kernels_as_a_gpu_composes_them():
    """Channels-last, with padded ranks."""
    state, forms_, loss = problem(fp.FedPara(gamma=0.5, nonlinearity="tanh"), conv=True)
    last = {name: replace(form, channels_last=True) for name, form in forms_.items()}
    expected, ours = (corrected_grad(loss, state, written, eta=0.1)[0] for written in (forms_, last))
    for name in state:
        assert torch.allclose(ours[name], expected[name])
