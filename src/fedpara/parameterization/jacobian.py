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

from fedpara.parameterization import compose
from fedpara.parameterization.naming import BASE
from fedpara.parameterization.schemes import Form, Scheme
from fedpara.state import State

Norm = Literal["plain", "squared", "network"]
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
            layers[weight] = _Layer(form, [state[name] for name in names[weight]], base)
            plain[weight] = layers[weight].w
    j_plain, beside = backward(plain)
    gradient = {**j_plain, **{base: j_plain[weight] for weight, base in bases.items()}}
    found: dict[str, tuple[list[Tensor], Tensor]] = {}
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
    """One weight, composed in the steps that its gradient and its correction share.

    Factors, inner weights and their gradients are stacked: [inner weight, ...].
    """

    def __init__(self, form: Form, factors: list[Tensor], base: Tensor | None) -> None:
        each = 3 if form.is_kernel else 2
        self.form, self.f = form, tuple(torch.stack(factors[letter::each]) for letter in range(each))
        self.v, self.to_factors = vjp(lambda *f: _inner(form, f), *self.f)  # type: ignore[misc]
        self.w, self.to_inner = vjp(lambda *v: form.joined(_in_shape(form, v), base), *self.v.unbind())  # type: ignore[misc]

    def gradient(self, j_w: Tensor) -> list[Tensor]:
        """J_F"""
        self.j_w, self.j_v = j_w, torch.stack(self.to_inner(j_w))
        self.j_f = self.to_factors(self.j_v)
        return _unstacked(self.j_f)

    def correction(self, eta: float | Tensor) -> tuple[list[Tensor], Tensor]:
        """(the gradient of |D|^2 / 2, |D|^2), after `gradient`"""
        form, narrow = self.form, self.v.dtype
        wide = torch.promote_types(narrow, torch.float32)
        j_w = _as_products(form, self.j_w, self.v).to(wide)

        def distance(*vd: Tensor) -> Tensor:
            v, d = _halves([tensor.to(wide) for tensor in vd])
            moved = [one + change for one, change in zip(v, d, strict=True)]
            return (form.joined(moved) - form.joined(v) + eta * j_w).to(narrow)

        def j_v(*v: Tensor) -> tuple[Tensor, ...]:
            return vjp(lambda *v: form.joined(v), *(tensor.to(wide) for tensor in v))[1](j_w)  # type: ignore[no-any-return]

        a = tuple(-eta * j for j in self.j_f)
        d, to_both = vjp(lambda *fa: _change(form, *_halves(fa)), *self.f, *a)  # type: ignore[misc]
        distances, to_inner = vjp(distance, *self.v.unbind(), *d.unbind())  # type: ignore[misc]
        v, b = _halves(to_inner(distances))
        f, u = _halves(to_both(torch.stack(b)))
        w, to_these = vjp(lambda *f: _derivative(form, f, u), *self.f)  # type: ignore[misc]
        q = vjp(j_v, *self.v.unbind())[1](tuple(one.to(wide) for one in w.unbind()))
        j = torch.stack([x - (eta * y).to(narrow) for x, y in zip(v, q, strict=True)])
        total = [x + y - eta * z for x, y, z in zip(f, self.to_factors(j), to_these(self.j_v), strict=True)]
        return _unstacked(total), distances.to(wide).square().sum()


def _inner(form: Form, f: Sequence[Tensor]) -> Tensor:
    """The inner weights, with their axes in the order in which the products write them."""
    if form.is_kernel:
        return compose.stacked_kernels(f[0], f[1], f[2], form.channels_last)
    if _is_matrix(form):
        return f[0] @ f[1].mT
    return torch.stack([form.scheme.product(x, y, form.shape) for x, y in zip(*f, strict=True)])


def _is_matrix(form: Form) -> bool:
    """Whether an inner weight is X Y^T."""
    return type(form.scheme).product is Scheme.product


def _in_shape(form: Form, v: Sequence[Tensor]) -> list[Tensor]:
    """The inner weights in the shape of W."""
    last = form.is_kernel and form.channels_last
    return [w.movedim(-1, 1) if last else w.reshape(form.shape) for w in v]


def _as_products(form: Form, w: Tensor, v: Tensor) -> Tensor:
    """A tensor in the shape of W, with its axes in the order of the stacked inner weights v."""
    return w.movedim(1, -1) if form.is_kernel and form.channels_last else w.reshape(v.shape[1:])


def _change(form: Form, at: Sequence[Tensor], by: Sequence[Tensor]) -> Tensor:
    """inner(at + by) - inner(at)"""
    return _telescoped(form, at, by, [one + change for one, change in zip(at, by, strict=True)])


def _derivative(form: Form, at: Sequence[Tensor], by: Sequence[Tensor]) -> Tensor:
    """(d inner / dF) by, at F = `at`"""
    return _telescoped(form, at, by, at)


def _telescoped(form: Form, at: Sequence[Tensor], by: Sequence[Tensor], then: Sequence[Tensor]) -> Tensor:
    """The sum of the products with one factor from `by`, the factors before it from `then`, those after it from `at`.

        dX Y^T + X' dY^T = [dX X'] [Y dY]^T,   and with the core [T 0; dT T'] for a kernel

    This is one product of twice the rank, which writes the large matrix once.
    """
    (_, y, *t), (dx, dy, *dt), (x, _, *moved) = at, by, then
    if not form.is_kernel and not _is_matrix(form):
        return _inner(form, (dx, y)) + _inner(form, (x, dy))
    blocks = [torch.cat([dx, x], 2), torch.cat([y, dy], 2)]
    for old, change, new in zip(t, dt, moved, strict=True):
        rows = torch.cat([old, torch.zeros_like(old)], 2), torch.cat([change, new], 2)
        blocks.append(torch.cat(rows, 1))
    return _inner(form, blocks)


def _halves(both: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return list(both[: len(both) // 2]), list(both[len(both) // 2 :])


def _unstacked(f: Sequence[Tensor]) -> list[Tensor]:
    """The factors in the order of `form.factors`."""
    return [factor for inner in zip(*(one.unbind() for one in f), strict=True) for factor in inner]


def _inverse_root(squared: Tensor) -> Tensor:
    """1 / sqrt, and 0 at 0, where the factors already follow the dense step."""
    positive = squared > 0
    return torch.where(positive, torch.where(positive, squared, 1.0).rsqrt(), 0.0)
