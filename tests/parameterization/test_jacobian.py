"""Jacobian correction against a float64 brute-force version, and under vmap and compile."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

import fedpara as fp
from fedpara.parameterization import compose_state, corrected_grad, forms


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


@pytest.mark.parametrize("norm", ["plain", "squared", "network"])
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
    for norm in ("plain", "squared", "network"):
        ours, _ = corrected_grad(lambda s: 0.0 * loss(s), state, forms_, eta=0.1, lambda_=1.0, norm=norm)
        assert all(tensor.eq(0).all() for tensor in ours.values()), norm


@pytest.mark.parametrize(
    "scheme", [fp.FedPara(gamma=0.5, nonlinearity="tanh"), fp.PFedPara(gamma=0.5)], ids=str
)
def test_vmap_equals_a_loop(scheme):
    state, forms_, loss = problem(scheme, conv=True)
    stacked = {k: torch.stack([v, v * 1.1, v * 0.7]) for k, v in state.items()}
    batched, _ = vmap(lambda s: corrected_grad(loss, s, forms_, eta=0.1))(stacked)
    for i in range(3):
        one, _ = corrected_grad(loss, {k: v[i] for k, v in stacked.items()}, forms_, eta=0.1)
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
