"""Experiments as TOML files, and the values that files and the command line give."""

import json
import re
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from fedpara.algorithms.registry import options
from fedpara.errors import ConfigError, among
from fedpara.experiments.config import Experiment

_FIELD_IN_ERROR = r"^(\w+) is |^unknown key '([^']+)'|^unknown (\w+) |hyper-parameter '([^']+)'"


def to_toml(experiment: Experiment) -> str:
    """Every field that is set, one line each."""
    values = asdict(experiment)
    options = values.pop("options")
    lines = [f"{name} = {_literal(value)}" for name, value in values.items() if value is not None]
    if options:
        lines += ["", "[options]", *(f"{name} = {_literal(value)}" for name, value in options.items())]
    return "\n".join(lines) + "\n"


def read_toml(path: Path, base: Experiment | None = None) -> Experiment:
    """The experiment in a TOML file, on top of `base`. Errors name the line of the field."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # -sig: some editors write a byte order mark
        given = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, or not TOML
        raise ConfigError(f"{path} is not TOML: {error}.") from None
    try:
        return with_values(base or Experiment(), given)
    except ConfigError as error:
        raise ConfigError(f"{path}{_line_of(text, error)}: {error}") from None


def with_values(base: Experiment, given: dict[str, Any]) -> Experiment:
    """`base` with some fields replaced. A given rank or ratio replaces gamma, given steps replace epochs."""
    names = [f.name for f in fields(Experiment)]
    for name in given:
        if name not in names and name in options():
            raise ConfigError(
                f"unknown key {name!r}: it is an option of an algorithm, so its name is options.{name}, or {name} in a "
                "table [options]."
            )
        if name not in names:
            raise ConfigError(f"unknown key {name!r}: {among(name, names)}")
    changed = dict(given)
    sizes = {"gamma", "rank", "ratio"}
    if sizes & given.keys():
        changed = {**dict.fromkeys(sizes), **changed}
    if given.get("scheme") == "original":
        changed = {**dict.fromkeys((*sizes, "nonlinearity", "init")), **changed}
    if given.get("steps") is not None:
        changed.setdefault("epochs", None)
    if given.get("epochs") is not None:
        changed.setdefault("steps", None)
    return replace(base, **changed)


def read_value(text: str) -> Any:
    """A TOML value; text that is not valid TOML is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def read_options(given: Iterable[str]) -> dict[str, float]:
    """The algorithm's hyper-parameters from strings such as mu=0.1."""
    options: dict[str, float] = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            options[name.strip()] = float(value)
        except ValueError:
            raise ConfigError(
                f"option {text!r}: expected name=number, such as mu=0.1. An algorithm of your own takes other values "
                "in its name, such as --algorithm \"mypkg:mine(mode='b')\"."
            ) from None
    return options


def _literal(value: bool | int | float | str) -> str:
    """A TOML literal. JSON and TOML agree except on infinity and the DEL character."""
    if isinstance(value, float):
        return float.__repr__(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _line_of(text: str, error: ConfigError) -> str:
    """The line of the field that the error is about, if it is in the file."""
    found = re.search(_FIELD_IN_ERROR, str(error))
    key = next(filter(None, found.groups())) if found else None
    for number, line in enumerate(text.splitlines(), 1):
        if key and re.match(rf"\s*(?:\w+\.)*[\"']?{re.escape(key)}[\"']?\s*[=.]", line):
            return f", line {number}"
    return ""
