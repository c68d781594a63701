"""Model names on the command line: a library model, or a custom model as package.module:function."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedpara import models
from fedpara.errors import UsageError


def is_custom(name: str) -> bool:
    """Whether the name is a custom model's; if so, its module may be in the working directory."""
    custom = ":" in name
    if custom and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return custom


def refuse_users(given: Mapping[str, Any]) -> None:
    """UsageError for a custom model: every rank and node builds an experiment's model from its name."""
    if ":" in str(given.get("model")):
        raise UsageError(
            f"{given['model']!r} is a custom model, and an experiment takes library models only: "
            f"{', '.join(models.names())}. "
            "Use it with `fedpara inspect`, `fedpara export` or, in Python, fedpara.simulate."
        )
