"""The model that a user names: one of the library's, or package.module:function of their own."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedpara import models
from fedpara.errors import UsageError, among


def is_users(name: str) -> bool:
    """Whether it names the user's own. Such a module may lie in the folder that the program was called in."""
    if ":" not in name:
        if name not in models.names():
            raise UsageError(
                f"unknown model {name!r}: {among(name, models.names())} Or give package.module:function of your own."
            )
        return False
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return True


def refuse_users(given: Mapping[str, Any]) -> None:
    """UsageError for a model that no config can name: every rank and node builds it from its name."""
    name = given.get("model")
    if isinstance(name, str) and ":" in name:
        raise UsageError(
            f"model {name!r} is none of the library's, and an experiment takes those only: "
            f"{', '.join(models.names())}. `fedpara inspect` and `fedpara export` take one "
            "of your own, and so does fedpara.simulate in Python."
        )
