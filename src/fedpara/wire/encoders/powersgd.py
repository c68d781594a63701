"""powersgd: a matrix of low rank, M ~ P Q^T, from two subspace iterations (Vogels et al.). Biased: use error feedback.

    P = orth(M Q_0),  Q = M^T P,  P = orth(M Q),  Q = M^T P,   Q_0 ~ N(0, 1)

M is the tensor as [first dimension, all others]. P and Q travel in bfloat16. The generator draws Q_0 for every message:
PowerSGD's own warm start would need state between messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpara.errors import UpdateRejected, WireError
from fedpara.wire.encoders.core import Layout, Parts

ITERATIONS = 2


@dataclass(frozen=True)
class PowerSGD:
    rank: int

    @property
    def text(self) -> str:
        return f"powersgd(rank={self.rank})"

    def layout(self, shapes: Sequence[torch.Size]) -> Layout:
        sizes = [self._sizes(shape) for shape in shapes]
        return {
            "p": (torch.bfloat16, sum(m * r for m, _, r in sizes)),
            "q": (torch.bfloat16, sum(n * r for _, n, r in sizes)),
        }

    def uniforms(self, shapes: Sequence[torch.Size]) -> int:
        return 0

    def encode(self, tensors: Sequence[Tensor], generator: torch.Generator) -> Parts:
        factors = [self._factors(tensor, generator) for tensor in tensors]
        p, q = (torch.cat(side).to(torch.bfloat16) for side in zip(*factors, strict=True))
        if not bool(p.isfinite().all() & q.isfinite().all()):
            raise UpdateRejected(f"a matrix overflows in {self.text}: clip the update, or use a wider link.")
        return {"p": p, "q": q}

    def decode(self, parts: Parts, shapes: Sequence[torch.Size]) -> list[Tensor]:
        sizes = [self._sizes(shape) for shape in shapes]
        p, q = parts["p"].float(), parts["q"].float()
        if not bool(p.isfinite().all() & q.isfinite().all()):
            raise WireError("a factor is infinite or not a number: expected finite values.")
        lefts, rights = p.split([m * r for m, _, r in sizes]), q.split([n * r for _, n, r in sizes])
        return [
            (left.view(m, r) @ right.view(n, r).T).view(shape)
            for left, right, (m, n, r), shape in zip(lefts, rights, sizes, shapes, strict=True)
        ]

    def _factors(self, x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        m, n, r = self._sizes(x.shape)
        largest = x.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
        matrix = x.reshape(m, n) / largest  # otherwise products could overflow or vanish
        q = torch.randn(n, r, generator=generator, device=generator.device).to(x.device)
        for _ in range(ITERATIONS):
            p = torch.linalg.qr(matrix @ q).Q
            q = matrix.T @ p
        return p.reshape(-1), (q * largest).reshape(-1)

    def _sizes(self, shape: torch.Size) -> tuple[int, int, int]:
        m = shape[0] if len(shape) else 1
        n = shape.numel() // m
        return m, n, min(self.rank, m, n)
