"""Geometry: the inner products of a round's composed updates, which are all that a weighing defence needs.

    gram[i, j] = <u_i, u_j>,   ||sum_i a_i u_i - sum_i b_i u_i||^2 = (a - b)^T gram (a - b)

So an iteration such as Weiszfeld's runs on n x n numbers, whatever the size of the model.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """`gram` [n, n] and the weights `w` [n] of the algorithm's mean, which sum to 1, both in float64 on the host.

    With a clean set, `trusted` is (<u_i, u_0> for each client, ||u_0||) of the server's own update u_0.
    """

    gram: Tensor
    w: Tensor
    trusted: tuple[Tensor, float] | None = None
    past: Tensor | None = None
    """each client's standing before this round, for a defence that remembers (`Defence.remember`)"""
    residual: tuple[Tensor, Tensor] | None = None
    """(<r_li, r_lj> [layers, n, n], how many numbers each layer has [layers]), r_i = the update minus a median of
    updates, for a defence with a `Defence.reference`"""

    def __len__(self) -> int:
        return len(self.w)

    @property
    def norms(self) -> Tensor:
        return self.gram.diag().clamp_min(0).sqrt()

    @property
    def cosines(self) -> Tensor:
        return cosines_of(self.gram)

    @property
    def squared_distances(self) -> Tensor:
        squares = self.gram.diag()
        return (squares[:, None] + squares - 2 * self.gram).clamp_min(0)

    def distances_to(self, a: Tensor) -> Tensor:
        """||u_i - sum_j a_j u_j|| for each i."""
        return (self.gram.diag() - 2 * self.gram @ a + a @ self.gram @ a).clamp_min(0).sqrt()

    def scaled(self, by: Tensor) -> "Geometry":
        """The geometry of the updates by_i u_i."""
        trusted = None if self.trusted is None else (self.trusted[0] * by, self.trusted[1])
        return Geometry(self.gram * by[:, None] * by, self.w, trusted, self.past)  # medians do not scale


def among(g: Geometry, kept: Tensor) -> Geometry:
    """The geometry of some of the updates, whose weights sum to 1 again."""
    w = g.w[kept]
    trusted = None if g.trusted is None else (g.trusted[0][kept], g.trusted[1])
    past = None if g.past is None else g.past[kept]
    residual = None if g.residual is None else (g.residual[0][:, kept][:, :, kept], g.residual[1])
    return Geometry(g.gram[kept][:, kept], w / w.sum(), trusted, past, residual)


def cosines_of(gram: Tensor) -> Tensor:
    """[..., n, n] from inner products"""
    lengths = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt().clamp_min(1e-300)
    return (gram / lengths[..., :, None] / lengths[..., None, :]).clamp(-1, 1)


def median(values: Tensor) -> Tensor:
    """The median; the mean of the two middle values if there are two."""
    return values.quantile(0.5)
