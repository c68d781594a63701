"""The keys of `flwr run --run-config`: the experiment's fields in kebab-case, and the server's own settings.

An empty string means unset. Flower has no absent values and rejects keys that the app does not list.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedpara.engines.flower.policy import Policy
from fedpara.errors import ConfigError
from fedpara.experiments import Experiment
from fedpara.experiments.config_file import read_options, read_toml, with_values
from fedpara.experiments.presets import preset

POLICY = {
    "deadline": "deadline",
    "min-replies": "minimum",
    "oversample": "oversample",
    "wait": "wait",
    "hello": "hello",
    "poll": "poll",
    "threads": "threads",
}
COUNTS = ("min-replies", "oversample", "threads")
OWN = ("preset", "config", "out", "data-dir", "keys", *POLICY)
FIELDS = {field.name.replace("_", "-"): field.name for field in fields(Experiment) if field.name != "engine"}
DEFAULT_OUT = "runs/flower"


@dataclass(frozen=True)
class Settings:
    """A parsed run config. `out` is one folder, or several existing run folders; `keys` is the keys file."""

    out: tuple[Path, ...]
    data_dir: Path | None
    keys: Path | None
    policy: Policy
    preset: str
    config: str
    given: dict[str, Any]

    def experiments(self) -> dict[Path, Experiment]:
        """The new experiments by run folder."""
        (out,) = self.out
        changed = {**self.given, "engine": "flower"}
        if self.preset and self.config:
            raise ConfigError("preset and config are both given: choose one.")
        if not self.preset:
            base = read_toml(Path(self.config).expanduser()) if self.config else Experiment()
            return {out: with_values(base, changed)}
        runs = {name: with_values(run, changed) for name, run in preset(self.preset).runs.items()}
        return {out / name if len(runs) > 1 else out: run for name, run in runs.items()}

    @property
    def names_an_experiment(self) -> bool:
        """Whether this config describes an experiment; otherwise it resumes the folders of `out`."""
        return bool(self.preset or self.config or self.given.keys() - {"rounds"})


def served(k: Any, n: Any, where: str) -> tuple[int, int]:
    """(k, n): a node serves the clients i with i % n == k. ConfigError for other values."""
    if type(k) is not int or type(n) is not int or not 0 <= k < n:
        raise ConfigError(f"{where} has {k!r} of {n!r}: expected whole numbers, such as 0 of 3.")
    return k, n


def defaults() -> dict[str, str]:
    """Every key, unset except for `out`."""
    return {**dict.fromkeys((*OWN, *FIELDS), ""), "out": DEFAULT_OUT}


def config_of(experiment: Experiment) -> dict[str, str | int | float]:
    """The run config of an experiment: the fields that differ from their defaults."""
    values = {key: getattr(experiment, name) for key, name in FIELDS.items()}
    standard = {key: getattr(Experiment(), name) for key, name in FIELDS.items()}
    changed = {key: v for key, v in values.items() if v != standard[key] and v is not None}
    if "options" in changed:
        changed["options"] = " ".join(f"{name}={value}" for name, value in changed["options"].items())
    return changed


def read(run_config: Mapping[str, Any]) -> Settings:
    """The settings from Flower's run config. ConfigError for an unknown key."""
    values = {name: value for name, value in run_config.items() if value != ""}
    unknown = sorted(values.keys() - {*OWN, *FIELDS})
    if unknown:
        raise ConfigError(f"unknown run-config {', '.join(unknown)}: `fedpara flower init` lists every key.")
    given = {FIELDS[name]: value for name, value in values.items() if name in FIELDS}
    if "options" in given:
        given["options"] = read_options(str(given["options"]).split())
    data_dir, keys = values.get("data-dir"), values.get("keys")
    return Settings(
        tuple(
            Path(line).expanduser().absolute() for line in str(values.get("out", DEFAULT_OUT)).splitlines()
        ),
        Path(str(data_dir)).expanduser() if data_dir else None,
        Path(str(keys)).expanduser() if keys else None,
        policy_of({name: value for name, value in values.items() if name in POLICY}),
        str(values.get("preset", "")),
        str(values.get("config", "")),
        given,
    )


def policy_of(values: Mapping[str, Any]) -> Policy:
    """The policy from its run-config keys."""
    for name, value in values.items():
        kinds, expected = ([int], "a whole number") if name in COUNTS else ([int, float], "a number")
        if type(value) not in kinds:
            raise ConfigError(f"{name} is {value!r}: expected {expected}.")
    return Policy(**{POLICY[name]: value for name, value in values.items()})
