"""Model names on the command line: a library model, or a custom model as package.module:function."""

import sys
from pathlib import Path


def is_custom(name: str) -> bool:
    """Whether the name is a custom model's; if so, its module may be in the working directory."""
    custom = ":" in name
    if custom and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return custom
