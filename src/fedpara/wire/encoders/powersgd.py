"""powersgd: a matrix of low rank, M ~ P Q^T, from two subspace iterations (Vogels et al.). Biased: use error feedback.

    P = orth(M Q_0),  Q = M^T P,  P = orth(M Q),  Q = M^T P,   Q_0 ~ N(0, 1)

M is the tensor as [first dimension, all others]. P and Q travel in bfloat16. The generator draws Q_0 for every message:
PowerSGD's own warm start would be one more thing to remember.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpara.errors import UpdateRejected, WireError
from fedpara.wire.encoders.core import Layout, Parts
from fedpara.wire.encoders.one_by_one import OneByOne

ITERATIONS = 2


@dataclass(frozen=True)
class PowerSGD(OneByOne):
    rank: int

    @property
    def text(self) -> str:
        return f"powersgd(rank={self.rank})"

    def layout_one(self, shape: torch.Size) -> Layout:
        m, n, r = self._sizes(shape)
        return {"p": (torch.bfloat16, m * r), "q": (torch.bfloat16, n * r)}

    def encode_one(self, x: Tensor, generator: torch.Generator) -> Parts:
        m, n, r = self._sizes(x.shape)
        largest = x.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
        matrix = x.reshape(m, n) / largest  # so that products neither overflow nor vanish
        q = torch.randn(n, r, generator=generator, device=generator.device).to(x.device)
        for _ in range(ITERATIONS):
            p = torch.linalg.qr(matrix @ q).Q
            q = matrix.T @ p
        parts = {"p": p.reshape(-1).to(torch.bfloat16), "q": (q * largest).reshape(-1).to(torch.bfloat16)}
        if not all(bool(part.isfinite().all()) for part in parts.values()):
            raise UpdateRejected(f"a matrix of {m} x {n} overflows in {self.text}: clip the update.")
        return parts

    def decode_one(self, parts: Parts, shape: torch.Size) -> Tensor:
        m, n, r = self._sizes(shape)
        p, q = parts["p"].float().view(m, r), parts["q"].float().view(n, r)
        if not bool(p.isfinite().all() & q.isfinite().all()):
            raise WireError("a factor is infinite or not a number: expected finite values.")
        return (p @ q.T).view(shape)

    def _sizes(self, shape: torch.Size) -> tuple[int, int, int]:
        m = shape[0] if len(shape) else 1
        n = shape.numel() // m
        return m, n, min(self.rank, m, n)
