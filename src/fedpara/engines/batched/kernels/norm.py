"""GroupNorm of channels-last images, as sums that read memory in order.

    k[b, c] = one pixel of x;   s[b, c] = sum over pixels of x - k,   q[b, c] = sum over pixels of (x - k)^2
    channel   mean_c = k + s / n,   m_c = q - s^2 / n            (n pixels; m_c is n times the channel's variance)
    group     mean = mean of mean_c,   variance = (sum of m_c / n + sum of (mean_c - mean)^2) / channels
    y = a x + d,  a = weight / sqrt(variance + eps),  d = bias - mean a

A compiler reduces torch's GroupNorm group by group, so that a thread reads two of 64 neighbours and skips the rest. The
shift k keeps the variance exact if the mean is much larger than the deviation: E[x^2] - mean^2 is off by a quarter at a
ratio of 1,000. The backward pass has the same form: two sums over pixels per channel, then one pass.
"""

import torch
from torch import Tensor, nn


class LanesGroupNorm(nn.GroupNorm):
    def forward(self, input: Tensor) -> Tensor:
        if input.dim() != 4 or torch.finfo(input.dtype).bits > 32:
            return super().forward(input)
        x, n = input.float(), input.shape[2:].numel()
        k = x[:, :, :1, :1].detach()  # mean and variance do not depend on it
        shifted = x - k
        s, q = shifted.sum((2, 3)), shifted.square().sum((2, 3))
        m_c, mean_c = (q - s.square() / n).clamp(min=0.0), k[:, :, 0, 0] + s / n
        mean = self._of_channel(self._of_group(mean_c))
        variance = self._of_group(m_c / n + (mean_c - mean).square())
        a = self._of_channel((variance + self.eps).rsqrt())
        if self.affine:
            a = a * self.weight
        d = -mean * a + (self.bias if self.affine else 0.0)
        # In the input's type, as BatchNorm under autocast: what follows then reads and writes half as much.
        return (x * a[..., None, None] + d[..., None, None]).to(input.dtype)

    def _of_group(self, values: Tensor) -> Tensor:
        return values.unflatten(1, (self.num_groups, -1)).mean(2)  # type: ignore[no-any-return]

    def _of_channel(self, values: Tensor) -> Tensor:
        return values.repeat_interleave(self.num_channels // self.num_groups, 1)


def use_lane_norms(model: nn.Module) -> nn.Module:
    """Replaces every GroupNorm in place; parameters and their names stay."""
    for module in model.modules():
        if type(module) is nn.GroupNorm:
            module.__class__ = LanesGroupNorm
    return model
