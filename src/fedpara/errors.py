"""The errors that fedpara raises, and helpers for their messages.

    FedParaError
    ├── UsageError            a value that can never work: the call or the config must change
    │   ├── SchemeError       gamma, rank or scheme that does not fit a weight
    │   └── ConfigError       a field, preset or file of an experiment
    ├── StateError            tensors whose names, shapes or types do not fit the model
    ├── DataError             a data set that is missing, truncated or damaged
    ├── WireError             bytes that are not a valid message
    │   ├── PrivacyError      a private factor was about to enter a message
    │   └── UpdateRejected    a valid message whose content is not acceptable
    ├── RunError              a run that cannot be started, continued or finished
    └── MissingExtraError     an optional package that is not installed

Each message says what is wrong, what is accepted and how to fix it.
The command line turns `UsageError` into exit code 2 and every other error into exit code 1.
"""

from collections.abc import Collection, Mapping
from difflib import get_close_matches


def in_a_line(error: Exception) -> str:
    """Another library's exception in one line: its class and the first line of its message."""
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def among(name: str, known: Collection[str]) -> str:
    """What follows a colon: the list of known names, after "did you mean ...?" if one of them is close to `name`."""
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    return (f"did you mean {close[0]!r}? K" if close else "k") + f"nown: {', '.join(known)}."


def install(extra: str) -> str:
    """How to install one of fedpara's extras."""
    return f"install fedpara's extra {extra!r}; in a checkout: pip install '.[{extra}]'."


class FedParaError(Exception):
    pass


class UsageError(FedParaError):
    pass


class SchemeError(UsageError):
    pass


class ConfigError(UsageError):
    pass


class StateError(FedParaError):
    pass


class DataError(FedParaError):
    pass


class WireError(FedParaError):
    pass


class PrivacyError(WireError):
    pass


class UpdateRejected(WireError):
    pass


class RunError(FedParaError):
    pass


class MissingExtraError(FedParaError):
    pass


def of_several(failed: Mapping[str, FedParaError], of: int) -> RunError:
    """One error that names each failed run, out of `of` runs."""
    details = " ".join(f"{name}: {error}" for name, error in failed.items())
    rest = ", the others are done" * (len(failed) < of)
    return RunError(f"{len(failed)} of {of} runs failed{rest}. {details}")
