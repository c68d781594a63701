"""i, f, o = sigmoid, g = tanh of  W_ih x_t + b_ih + W_hh h + b_hh;   c = f c + i g;   h = o tanh(c)

The next-character model of the Shakespeare experiments (appendix C.2): two layers of 256, 80 characters and
819,920 parameters. The paper does not state the embedding size; it is 8 here. Weight normalisation adds one gain
per row:

    W = gain V / ||V||     (row by row)

It uses matrix products because `torch.func.vmap` does not support the fused kernels of `nn.LSTM`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def unrolled(projected: Tensor, w_hh: Tensor) -> Tensor:
    """Every h [T, B, H] from W_ih x + b of every character [T, B, 4H] and W_hh [4H, H]."""
    h = c = projected.new_zeros(projected.shape[1], w_hh.shape[1], dtype=w_hh.dtype)
    outputs = []
    for p in projected.unbind(0):
        i, f, g, o = (p + h @ w_hh.T).chunk(4, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    return torch.stack(outputs)


class LSTMLayer(nn.Module):
    """One layer, from [T, B, I] to [T, B, H], time first. Names, gate order and initialisation are torch's.

    `weight_ih` and `weight_hh` hold V. Each gain is a separate parameter that starts at the row norm of V, so W
    keeps its scale when V is factorized. `forward` reads each weight once, because reading a factorized weight
    composes it.
    """

    recurrence: Callable[[Tensor, Tensor], Tensor] = staticmethod(unrolled)

    def __init__(self, inputs: int, hidden: int, weight_norm: bool) -> None:
        super().__init__()
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden, inputs))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden, hidden))
        self.bias_ih = nn.Parameter(torch.empty(4 * hidden))
        self.bias_hh = nn.Parameter(torch.empty(4 * hidden))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(hidden**-0.5), hidden**-0.5)
        self.gain_ih = _row_norms(self.weight_ih) if weight_norm else None
        self.gain_hh = _row_norms(self.weight_hh) if weight_norm else None

    def forward(self, x: Tensor) -> Tensor:
        w_ih = _normalized(self.weight_ih, self.gain_ih)
        w_hh = _normalized(self.weight_hh, self.gain_hh)
        return self.recurrence(F.linear(x, w_ih, self.bias_ih + self.bias_hh), w_hh)


class CharacterLSTM(nn.Module):
    def __init__(
        self, classes: int, vocabulary: int, embedding: int, hidden: int, layers: int, weight_norm: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        widths = [embedding] + [hidden] * layers
        self.layers = nn.Sequential(*(LSTMLayer(i, hidden, weight_norm) for i in widths[:-1]))
        self.fc = nn.Linear(hidden, classes)

    def forward(self, characters: Tensor) -> Tensor:
        outputs = self.layers(self.embedding(characters.T))
        scores: Tensor = self.fc(outputs[-1])
        return scores


def lstm(
    classes: int = 80,
    vocabulary: int = 80,
    embedding: int = 8,
    hidden: int = 256,
    layers: int = 2,
    weight_norm: bool = True,
) -> CharacterLSTM:
    """int64 [B, T] to the scores [B, classes] of the next character."""
    return CharacterLSTM(classes, vocabulary, embedding, hidden, layers, weight_norm)


def _row_norms(v: Tensor) -> nn.Parameter:
    return nn.Parameter(v.detach().norm(dim=1))


def _normalized(v: Tensor, gain: Tensor | None) -> Tensor:
    return v if gain is None else gain.unsqueeze(1) * F.normalize(v, dim=1)
