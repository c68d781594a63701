"""The model that a user names: one of the library's, or package.module:function of their own."""

import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fedpara import models
from fedpara.errors import UsageError


def is_own(name: str) -> bool:
    """Whether it names the user's own. Such a module may lie in the folder that the program was called in."""
    if ":" not in name:
        if name not in models.names():
            close = get_close_matches(name, models.names(), n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise UsageError(
                f"unknown model {name!r}: expected one of {', '.join(models.names())}, or package.module:function of "
                f"your own.{hint}"
            )
        return False
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return True


def refuse_own(given: Mapping[str, Any]) -> None:
    """UsageError for a model that no config can name: every rank and node builds it from its name."""
    name = given.get("model")
    if isinstance(name, str) and ":" in name:
        raise UsageError(
            f"model {name!r} is none of the library's, and an experiment takes those only: "
            f"{', '.join(models.names())}. `fedpara inspect` and `fedpara export` take one "
            "of your own, and so does fedpara.simulate in Python."
        )
