"""Jacobian correction (appendix B): a penalty that pulls the stepped factors towards the dense step.

    R = L + lambda/2 ||D||,   D = W' - (W - eta J_W),   W' = compose(F + a),   a = -eta J_F,   J_F = (dW/dF)^T J_W

J_W is the gradient of the loss at the composed weight. It counts as a constant: one pass through the network gives it,
and only the composition is differentiated twice. The paper does not say over what the norm is taken:

    plain     the sum over layers of each layer's norm
    squared   the sum of its square
    network   one norm over all layers: sqrt(sum of the squares)

W = join(V), V = inner(F): products, which are linear in every factor, then an elementwise function. The correction
takes V and J_V = (dW/dV)^T J_W from the plain gradient and adds products (left) and elementwise terms (right):

    d = inner(F + a) - inner(F)                               D = join(V + d) - join(V) + eta J_W
    (f, u) = the gradient of <d(F, a), b>                     (v, b) = the gradient of |D|^2 / 2 in (V, d)
    w = (d inner / dF) u                                      q = the gradient of <J_V(V), w> in V
    the gradient of |D|^2 / 2 = f + (d inner / dF)^T (v - eta q) - eta (the gradient of <J_V, w(F)> in F)

d and f are sums of products with a change, such as dX Y^T + (X + dX) dY^T, and not differences of products. So products
in 16 bits are as accurate here as in the composition. Elementwise terms are computed in 32 bits or more.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.func import grad_and_value, vjp

from fedpara.parameterization.naming import BASE
from fedpara.parameterization.schemes import Form, Scheme
from fedpara.state import State

Norm = Literal["plain", "squared", "network"]
Tensors = tuple[Tensor, ...]
T = TypeVar("T")


def corrected_grad(
    loss: Callable[[State], Tensor],
    state: Mapping[str, Tensor],
    forms: Mapping[str, Form],
    *,
    eta: float | Tensor,
    lambda_: float = 1.0,
    norm: Norm = "plain",
) -> tuple[State, Tensor]:
    """The gradient of L + lambda * penalty at `state`, and L.

    `loss` is a function of the plain model's state (composed weights). It runs one forward and one backward pass
    for any lambda. Lambda 0 gives the ordinary gradient.
    """
    return corrected_backward(grad_and_value(loss), state, forms, eta=eta, lambda_=lambda_, norm=norm)


def corrected_backward(
    backward: Callable[[State], tuple[State, T]],
    state: Mapping[str, Tensor],
    forms: Mapping[str, Form],
    *,
    eta: float | Tensor,
    lambda_: float,
    norm: Norm,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> tuple[State, T]:
    """The gradient of L + lambda * penalty at `state`, and what `backward` returns beside the gradient of L.

    `backward` computes the gradient of L from the plain model's state (composed weights). Weights are composed and
    corrected inside `autocast()`, as in a plain step.
    """
    names = {weight: [f"{weight}.{factor}" for factor in form.factors] for weight, form in forms.items()}
    bases = {weight: f"{weight}.{BASE}" for weight in forms}
    taken = {*bases.values()}.union(*names.values())
    plain: State = {name: tensor for name, tensor in state.items() if name not in taken}
    layers: dict[str, _Layer] = {}
    with autocast():
        for weight, form in forms.items():
            base = state.get(bases[weight], form.base)
            layers[weight] = _Layer(form, tuple(state[name] for name in names[weight]), base)
            plain[weight] = layers[weight].w
    j_plain, beside = backward(plain)
    gradient = {**j_plain, **{base: j_plain[weight] for weight, base in bases.items()}}
    found: dict[str, tuple[Tensors, Tensor]] = {}
    with autocast():
        for weight, layer in layers.items():
            gradient |= zip(names[weight], layer.gradient(j_plain[weight]), strict=True)
            if lambda_:
                found[weight] = layer.correction(eta)
    squares = [squared for _, squared in found.values()]
    for weight, (correction, squared) in found.items():
        over = torch.stack(squares).sum() if norm == "network" else squared
        scale = lambda_ * (1.0 if norm == "squared" else _inverse_root(over) / 2)
        for name, change in zip(names[weight], correction, strict=True):
            gradient[name] = gradient[name] + scale * change
    return {name: gradient[name] for name in state}, beside


class _Layer:
    """One weight, composed in the steps that its gradient and its correction share."""

    def __init__(self, form: Form, factors: Tensors, base: Tensor | None) -> None:
        self.form, self.factors = form, factors
        self.v, self.to_factors = vjp(lambda *f: tuple(form.inner(f)), *factors)  # type: ignore[misc]
        self.w, self.to_inner = vjp(lambda *v: form.joined(v, base), *self.v)  # type: ignore[misc]

    def gradient(self, j_w: Tensor) -> Tensors:
        """J_F"""
        self.j_w, self.j_v = j_w, self.to_inner(j_w)
        self.j_f = self.to_factors(self.j_v)
        return self.j_f  # type: ignore[no-any-return]

    def correction(self, eta: float | Tensor) -> tuple[Tensors, Tensor]:
        """(the gradient of |D|^2 / 2, |D|^2), after `gradient`"""
        form, factors = self.form, self.factors
        narrow = self.v[0].dtype
        wide = torch.promote_types(narrow, torch.float32)
        j_w = self.j_w.to(wide)

        def distance(*vd: Tensor) -> Tensor:
            v, d = _halves([tensor.to(wide) for tensor in vd])
            moved = [one + change for one, change in zip(v, d, strict=True)]
            return (form.joined(moved) - form.joined(v) + eta * j_w).to(narrow)

        def j_v(*v: Tensor) -> Tensors:
            return vjp(form.joined, tuple(tensor.to(wide) for tensor in v))[1](j_w)[0]  # type: ignore[no-any-return]

        a = tuple(-eta * j for j in self.j_f)
        d, to_both = vjp(lambda *fa: _change(form, *_halves(fa)), *factors, *a)  # type: ignore[misc]
        distances, to_vd = vjp(distance, *self.v, *d)  # type: ignore[misc]
        v, b = _halves(to_vd(distances))
        f, u = _halves(to_both(b))
        w, to_these = vjp(lambda *f: _derivative(form, f, u), *factors)  # type: ignore[misc]
        q = vjp(j_v, *self.v)[1](tuple(one.to(wide) for one in w))
        through = self.to_factors(tuple(x - (eta * y).to(narrow) for x, y in zip(v, q, strict=True)))
        along = to_these(self.j_v)
        parts = zip(f, through, along, strict=True)
        return tuple(x + y - eta * z for x, y, z in parts), distances.to(wide).square().sum()


def _change(form: Form, at: Sequence[Tensor], by: Sequence[Tensor]) -> Tensors:
    """inner(at + by) - inner(at)"""
    return _telescoped(form, at, by, [one + change for one, change in zip(at, by, strict=True)])


def _derivative(form: Form, at: Sequence[Tensor], by: Sequence[Tensor]) -> Tensors:
    """(d inner / dF) by, at F = `at`"""
    return _telescoped(form, at, by, at)


def _telescoped(form: Form, at: Sequence[Tensor], by: Sequence[Tensor], then: Sequence[Tensor]) -> Tensors:
    """The sum of the products with one factor from `by`, the factors before it from `then`, those after it from `at`.

        dX Y^T + X' dY^T = [dX X'] [Y dY]^T,   and with the core [T 0; dT T'] for a kernel

    This is one product of twice the rank, which writes the large matrix once.
    """
    each = 3 if form.is_kernel else 2
    bilinear = not form.is_kernel and type(form.scheme).product is not Scheme.product
    found: list[Tensor] = []
    blocks: list[Tensor] = []
    for i in range(0, len(at), each):
        (_, y, *t), (dx, dy, *dt), (x, _, *moved) = (factors[i : i + each] for factors in (at, by, then))
        if bilinear:
            product = form.scheme.product
            found.append(product(dx, y, form.shape) + product(x, dy, form.shape))
            continue
        blocks += [torch.cat([dx, x], 1), torch.cat([y, dy], 1)]
        if t:
            rows = (torch.cat([t[0], torch.zeros_like(t[0])], 1), torch.cat([dt[0], moved[0]], 1))
            blocks.append(torch.cat(rows))
    return tuple(found or form.inner(blocks))


def _halves(both: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    return both[: len(both) // 2], both[len(both) // 2 :]


def _inverse_root(squared: Tensor) -> Tensor:
    """1 / sqrt, and 0 at 0, where the factors already follow the dense step."""
    positive = squared > 0
    return torch.where(positive, torch.where(positive, squared, 1.0).rsqrt(), 0.0)
