"""BatchNorm over the examples of a padded batch: statistics over its first `size` rows.

    k = the first pixel;   z = x - k,   s = sum z / n,   var = sum z^2 / n - s^2     (n = size * positions)
    y = a z + (bias - a s),   a = weight / sqrt(var + eps)
    running_mean += m (k + s - running_mean),   running_var += m (var n / (n - 1) - running_var)

`m` is the momentum, or 1 / (batches so far) for momentum None. `masked_norms` replaces BatchNorm layers in an engine's
copy of the model. `size` is a tensor, so that the step can be stacked, compiled and captured. Sums are in float32 for
16-bit inputs, as in torch, and the shift k keeps the variance exact if the mean is large. Both sums take one pass over
channels-last images, and so do those of the backward pass; under vmap torch's layer takes several, over copies in
another order. On a CPU, full batches use torch's own layer, except with momentum None, which vmap does not support.
"""

import torch
from torch import Tensor, nn


class _Masked(nn.modules.batchnorm._BatchNorm):
    size: Tensor  # int64, set before each step: examples in the batch
    width: int | None  # rows of a padded batch; None if every batch is full

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not self._applies(input):
            return super().forward(input)
        self._check_input_dim(input)
        rows = len(input)
        x = input if input.dtype.itemsize >= 4 else input.float()
        over = [0, *range(2, x.dim())]
        across = (1, -1, *[1] * (x.dim() - 2))
        k = x[
            (slice(1), slice(None), *[slice(1)] * (x.dim() - 2))
        ].detach()  # the result does not depend on it
        z = x - k
        counted, size = z, torch.full_like(self.size, rows)
        if self.width is not None:
            size = self.size
            counts = (torch.arange(rows, device=x.device) < size).view(-1, *[1] * (x.dim() - 1))
            counted = torch.where(counts, z, 0.0)
        n = size.clamp(min=1).to(x.dtype) * x[0, 0].numel()
        s = counted.sum(over) / n
        var = (counted.square().sum(over) / n - s.square()).clamp(min=0.0)
        if self.track_running_stats:
            mean, unbiased = k.flatten() + s.detach(), var.detach() * (n / (n - 1).clamp(min=1))
            self._track(mean, unbiased)
        scale = (var + self.eps).rsqrt()
        a = scale if self.weight is None else scale * self.weight
        d = -s * a if self.bias is None else self.bias - s * a
        return (z * a.view(across) + d.view(across)).to(input.dtype)

    def _applies(self, input: Tensor) -> bool:
        """A model may fold other dimensions into the first one, whose rows are then not the batch's examples."""
        if self.width is None:
            return self.momentum is None or input.is_cuda
        return len(input) == self.width

    def _track(self, mean: Tensor, var: Tensor) -> None:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        m: float | Tensor = self.momentum  # type: ignore[assignment]
        for running, now in ((self.running_mean, mean), (self.running_var, var)):
            assert running is not None
            if self.momentum is None:
                m = 1.0 / self.num_batches_tracked.to(running.dtype)
            running.copy_(running + m * (now.to(running.dtype) - running))


class _Masked1d(_Masked, nn.BatchNorm1d):
    pass


class _Masked2d(_Masked, nn.BatchNorm2d):
    pass


class _Masked3d(_Masked, nn.BatchNorm3d):
    pass


MASKED: dict[type[nn.Module], type[_Masked]] = {
    nn.BatchNorm1d: _Masked1d,
    nn.BatchNorm2d: _Masked2d,
    nn.BatchNorm3d: _Masked3d,
}


def masked_norms(model: nn.Module) -> dict[str, _Masked]:
    """Replaces the model's BatchNorm layers in place and returns them by name."""
    found: dict[str, _Masked] = {}
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    for name, module in model.named_modules():
        if type(module) in MASKED:
            module.__class__ = MASKED[type(module)]
            module.width = None
            size = torch.zeros((), dtype=torch.int64, device=device)
            module.register_buffer("size", size, persistent=False)
        if isinstance(module, _Masked):
            found[name] = module
    return found
