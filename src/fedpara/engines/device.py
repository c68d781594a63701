"""The device of an engine or a node, and its precision."""

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fedpara.engines.settings import Precision
from fedpara.errors import ConfigError
from fedpara.trees import Tree

NARROW = (torch.bfloat16, torch.float16)


def find_device(asked: str | None = None) -> torch.device:
    """The device with that name, such as "cuda:1"; by default the current GPU if there is one, else the CPU."""
    name = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def shown(device: torch.device) -> str:
    """The device's name for messages: the CPU, or cuda:0."""
    return "the CPU" if device.type == "cpu" else str(device)


def precision_on(device: torch.device, asked: Precision | None) -> Precision:
    """The requested precision, by default the narrowest that the device supports. Configures torch for it."""
    if device.type != "cuda":
        return "float32"
    narrow = torch.cuda.is_bf16_supported(including_emulation=False)
    if asked == "bfloat16" and not narrow:
        raise ConfigError(f"{torch.cuda.get_device_name(device)} has no bfloat16: use tf32 or float32.")
    chosen = asked or ("bfloat16" if narrow else "tf32")
    if device.index is not None:
        torch.cuda.set_device(device)  # Triton's kernels and CUDA graphs run on the current device
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = chosen != "float32"
    torch.backends.cudnn.benchmark = True
    return chosen


def eager_precision_on(device: torch.device, asked: Precision | None) -> Precision:
    """`precision_on` for a loop over clients: float32 by default.

    cuDNN does not time its algorithms here: each new batch size would be timed again, and results would vary.
    """
    chosen = precision_on(device, asked or "float32")
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = False
    return chosen


def eager_device(asked: str | None) -> torch.device:
    """`find_device`, with torch configured for float32."""
    device = find_device(asked)
    eager_precision_on(device, "float32")
    return device


def widened(output: Tree) -> Tree:
    """The output with its 16-bit numbers in float32."""
    if isinstance(output, Tensor):  # every step calls this, and tree_map is slow
        return output.float() if output.dtype in NARROW else output
    return tree_map(lambda t: t.float() if isinstance(t, Tensor) and t.dtype in NARROW else t, output)
