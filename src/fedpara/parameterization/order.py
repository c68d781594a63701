"""Ordered factors: the same weight, with the most important columns first.

    matrix   X Y^T = U S V^T            X = U sqrt(S),  Y = V sqrt(S)
    kernel   T x_1 X x_2 Y (HOSVD)      X = a U1,  Y = b U2,  T = T' / (a b);  a and b keep the norms of X and Y

The first r columns of ordered matrix factors are the best matrix of rank r (Eckart-Young). Those of a kernel are its
truncated HOSVD. Only small matrices are decomposed: the QR factors of X and Y come first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedpara.parameterization.schemes import Form


def ordered(form: Form, factors: Sequence[Tensor]) -> list[Tensor]:
    """Factors of the same inner weights, in the order of `form.factors`."""
    each = 3 if form.is_kernel else 2
    parts = [[f.double() for f in factors[i : i + each]] for i in range(0, len(factors), each)]
    made = [_kernel(*part) if form.is_kernel else _matrix(*part) for part in parts]
    found = [factor for part in made for factor in part]
    return [new.to(old).contiguous() for new, old in zip(found, factors, strict=True)]


def _matrix(x: Tensor, y: Tensor) -> list[Tensor]:
    (qx, rx), (qy, ry) = torch.linalg.qr(x), torch.linalg.qr(y)
    u, s, vh = torch.linalg.svd(rx @ ry.mT, full_matrices=False)
    rank = x.shape[1]
    return [_wide(qx @ u * s.sqrt(), rank), _wide(qy @ vh.mT * s.sqrt(), rank)]


def _kernel(x: Tensor, y: Tensor, t: Tensor) -> list[Tensor]:
    (qx, rx), (qy, ry) = torch.linalg.qr(x), torch.linalg.qr(y)
    core = torch.einsum("ac,cd...,bd->ab...", rx, t, ry)
    u1 = torch.linalg.svd(core.flatten(1), full_matrices=False)[0]
    u2 = torch.linalg.svd(core.transpose(0, 1).flatten(1), full_matrices=False)[0]
    core = torch.einsum("ac,ab...,bd->cd...", u1, core, u2)
    a, b = (float(old.norm() / q.shape[1] ** 0.5) or 1.0 for old, q in ((x, u1), (y, u2)))
    rank = t.shape[0]
    spare = (0, 0) * (core.dim() - 2)
    core = pad(core, (*spare, 0, rank - core.shape[1], 0, rank - core.shape[0]))
    return [_wide(a * qx @ u1, rank), _wide(b * qy @ u2, rank), core / (a * b)]


def _wide(columns: Tensor, rank: int) -> Tensor:
    """With zero columns up to the rank: a side shorter than the rank needs no more."""
    return pad(columns, (0, rank - columns.shape[1]))
