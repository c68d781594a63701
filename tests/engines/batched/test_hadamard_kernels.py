"""The fused composition equals the forms' own in weights and gradients, also for stacked clients."""

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

import fedpara as fp
from fedpara.engines.batched.kernels.hadamard import FusedForm, fits, fused
from fedpara.engines.batched.kernels.ops import OPS, pays_on
from fedpara.engines.program import make_program
from fedpara.parameterization import compose_state

LANES = 3
CPU = torch.device("cpu")
gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and pays_on(torch.device("cuda"))), reason="needs a Hopper GPU and Triton"
)
SCHEMES = {
    "fedpara": fp.FedPara(gamma=0.3),
    "pfedpara": fp.PFedPara(gamma=0.3),
    "reshaped": fp.FedPara(gamma=0.3, conv="reshape"),
}


def problem(scheme, onto=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.Flatten(), nn.Linear(256, 10))
    program = make_program(fp.factorize(net, scheme, onto=onto) if onto else fp.factorize(net, scheme))
    forms = {name: form.on(CPU, channels_last=True) for name, form in program.forms.items()}
    trained = {name: program.initial[name] for name in program.parameters}
    state = {name: t + 0.1 * torch.randn(LANES, *t.shape) for name, t in trained.items()}
    return forms, state


def composed(state, forms):
    with torch.autocast("cpu", torch.bfloat16):
        return compose_state(state, forms)


def gradients(state, forms):
    def loss(state):
        torch.manual_seed(1)
        return sum((w.float() * torch.randn(w.shape)).sum() for w in composed(state, forms).values())

    return vmap(grad(loss), randomness="same")(state)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("onto", [None, "frozen"])
def test_weights_gradients_and_layout_equal_the_forms_own(scheme, onto):
    forms, state = problem(scheme, onto)
    ours = fused(forms)
    assert all(isinstance(form, FusedForm) for form in ours.values())
    one = {name: t[0] for name, t in state.items()}
    for name, theirs in composed(one, forms).items():
        found = composed(one, ours)[name]
        torch.testing.assert_close(found.float(), theirs.float(), rtol=2e-2, atol=2e-2)
        assert found.stride() == theirs.stride()
    expected = gradients(state, forms)
    for name, g in gradients(state, ours).items():
        assert float((g - expected[name]).norm()) < 0.02 * float(expected[name].norm()), name


def test_products_in_float32_are_the_forms_own():
    forms, state = problem(SCHEMES["fedpara"])
    one = {name: t[0] for name, t in state.items()}
    for name, w in compose_state(one, forms).items():
        assert torch.equal(compose_state(one, fused(forms))[name], w)


def test_other_forms_do_not_fit():
    for scheme in (fp.FedPara(gamma=0.3, nonlinearity="tanh"), fp.LowRank(gamma=0.3)):
        assert not any(map(fits, problem(scheme)[0].values()))


def drawn(lanes, m, n, r, device="cpu", dtype=torch.float64):
    torch.manual_seed(0)
    sizes = (lanes, 2, m, r), (lanes, 2, n, r), (lanes, m, n)
    return [torch.randn(size, device=device).to(dtype) for size in sizes]


def by_definition(a, y, dw, shift):
    a, y = a.double().requires_grad_(), y.double().requires_grad_()
    w1, w2 = (a @ y.mT).unbind(1)
    w = w1 * (w2 + shift)
    return w.detach(), *torch.autograd.grad(w, (a, y), dw.double())


@pytest.mark.parametrize("shift", [0.0, 1.0])
@pytest.mark.parametrize("mapped", [(0, 0), (0, None), (None, 0), (1, 2)], ids=str)
def test_the_op_equals_its_definition_under_vmap(shift, mapped):
    a, y, dw = drawn(LANES, 6, 5, 3)
    given = [t[0] if dim is None else t.movedim(0, dim) for t, dim in zip((a, y), mapped, strict=True)]
    each = [t[:1].expand_as(t) if dim is None else t for t, dim in zip((a, y), mapped, strict=True)]

    def loss(a, y, dw):
        return (OPS.lanes_hadamard(a, y, shift) * dw).sum()

    w, da, dy = by_definition(*each, dw, shift)
    torch.testing.assert_close(vmap(lambda a, y: OPS.lanes_hadamard(a, y, shift), mapped)(*given), w)
    found = vmap(grad(loss, argnums=(0, 1)), (*mapped, 0))(*given, dw)
    for ours, theirs in zip(found, (da, dy), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_vmap_of_inputs_that_have_lanes_already():
    a, y, _dw = (t.unflatten(0, (2, 2)) for t in drawn(4, 6, 5, 3))
    w = vmap(lambda a, y: OPS.lanes_hadamard(a, y, 0.0))(a, y)
    torch.testing.assert_close(w[1], OPS.lanes_hadamard(a[1], y[1], 0.0))


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("shift", [0.0, 1.0])
@pytest.mark.parametrize(
    "size",
    [
        (576, 64, 16),
        (4608, 512, 48),
        (4608, 512, 88),
        (4608, 512, 128),
        (10, 512, 24),
        (100, 300, 128),
        (7, 5, 8),
    ],
    ids=str,
)
def test_the_kernels_equal_float64(size, shift):
    a, y, dw = drawn(2, *size, "cuda", torch.bfloat16)
    found = OPS.lanes_hadamard(a, y, shift), *OPS.lanes_hadamard_backward(a, y, dw, shift)
    for ours, theirs in zip(found, by_definition(a, y, dw, shift), strict=True):
        assert float((ours.double() - theirs).norm()) < 5e-3 * float(theirs.norm())
