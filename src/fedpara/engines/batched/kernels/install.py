"""Replaces layers of an engine's copy of the model, and the forms of its weights, by ones that are fast over lanes."""

from collections.abc import Mapping

import torch
from torch import nn

from fedpara.engines.batched.kernels.norm import use_lane_norms
from fedpara.engines.batched.kernels.pool import use_mean_pooling
from fedpara.parameterization import Form


def install_kernels(plain: nn.Module, scorer: nn.Module, device: torch.device, compiled: bool) -> None:
    """Replaces layers in place: `plain` trains in lanes on a GPU, `scorer` scores one model at a time."""
    # Imported here because they register ops with torch, which a CPU does not need.
    from fedpara.engines.batched.kernels.conv import use_lane_convs
    from fedpara.engines.batched.kernels.lstm import use_lane_lstm
    from fedpara.engines.batched.kernels.norm_ops import use_fused_norms
    from fedpara.engines.batched.kernels.ops import pays_on

    hopper = pays_on(device)
    use_mean_pooling(plain)
    use_lane_lstm(plain, hopper)
    use_lane_lstm(scorer)
    if hopper:
        use_lane_convs(plain)
    if compiled:
        use_lane_norms(plain)
    if hopper and compiled:
        use_fused_norms(plain)


def fast_forms(forms: Mapping[str, Form], device: torch.device) -> Mapping[str, Form]:
    """The forms as a compiled step composes them."""
    if device.type != "cuda":
        return forms
    from fedpara.engines.batched.kernels.hadamard import fused
    from fedpara.engines.batched.kernels.ops import pays_on

    return fused(forms) if pays_on(device) else forms
