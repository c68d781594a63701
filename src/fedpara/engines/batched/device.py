"""The precision of a device."""

import torch

from fedpara.engines.settings import Precision
from fedpara.errors import ConfigError


def precision_on(device: torch.device, asked: Precision | None) -> Precision:
    """The requested precision, or the narrowest that the device has. Configures torch for it."""
    if device.type != "cuda":
        return "float32"
    narrow = torch.cuda.is_bf16_supported(including_emulation=False)
    if asked == "bfloat16" and not narrow:
        raise ConfigError(f"{torch.cuda.get_device_name(device)} has no bfloat16: use tf32 or float32.")
    chosen = asked or ("bfloat16" if narrow else "tf32")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = chosen != "float32"
    torch.backends.cudnn.benchmark = True
    return chosen
