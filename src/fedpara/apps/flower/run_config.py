"""What `flwr run --run-config` says: the experiment's own fields in kebab-case, and what a federation adds.

An empty text means "not given": Flower knows no absent values, and refuses keys that the app does not list.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedpara.engines.flower.policy import Policy
from fedpara.errors import ConfigError
from fedpara.experiments import Experiment
from fedpara.experiments.config import read_options, read_toml, with_values
from fedpara.experiments.presets import preset

TERMS = {
    "deadline": "deadline",
    "min-replies": "minimum",
    "oversample": "oversample",
    "wait": "wait",
    "hello": "hello",
    "poll": "poll",
    "threads": "threads",
}
COUNTS = ("min-replies", "oversample", "threads")
MOST_THREADS = 4096
OWN = ("preset", "config", "out", "data-dir", "keys", *TERMS)
FIELDS = {field.name.replace("_", "-"): field.name for field in fields(Experiment) if field.name != "engine"}
DEFAULT_OUT = "runs/flower"


@dataclass(frozen=True)
class Settings:
    """`out` is one folder, or several that hold runs already, a line each. `keys` says which node may serve whom."""

    out: tuple[Path, ...]
    data_dir: Path | None
    keys: Path | None
    policy: Policy
    preset: str
    config: str
    given: dict[str, Any]

    def experiments(self) -> dict[Path, Experiment]:
        """By folder."""
        if len(self.out) > 1:
            raise ConfigError("out names several folders: expected one for a new run.")
        (out,) = self.out
        changed = {**self.given, "engine": "flower"}
        if self.preset and self.config:
            raise ConfigError("preset and config are both given: a preset is a config of its own.")
        if not self.preset:
            base = read_toml(Path(self.config).expanduser()) if self.config else Experiment()
            return {out: with_values(base, changed)}
        runs = {name: with_values(run, changed) for name, run in preset(self.preset).runs.items()}
        return {out / name if len(runs) > 1 else out: run for name, run in runs.items()}

    @property
    def names_an_experiment(self) -> bool:
        return bool(self.preset or self.config or self.given.keys() - {"rounds"})


def difference(there: Experiment, asked: Experiment, free: Container[str] = ("rounds", "engine")) -> str:
    """In which fields a folder's experiment is not the one asked for, but for what may change as it goes on."""
    pairs = ((f.name, getattr(there, f.name), getattr(asked, f.name)) for f in fields(Experiment))
    told = [f"{name} is {a!r} there and {b!r} here" for name, a, b in pairs if a != b and name not in free]
    return ", ".join(told)


def defaults() -> dict[str, str]:
    return {**dict.fromkeys((*OWN, *FIELDS), ""), "out": DEFAULT_OUT}


def read(run_config: Mapping[str, Any]) -> Settings:
    said = {name: value for name, value in run_config.items() if value != ""}
    unknown = sorted(said.keys() - {*OWN, *FIELDS})
    if unknown:
        raise ConfigError(f"unknown run-config {', '.join(unknown)}: `fedpara flower init` lists every key.")
    given = {FIELDS[name]: value for name, value in said.items() if name in FIELDS}
    if "options" in given:
        given["options"] = read_options(str(given["options"]).split())
    data_dir, keys = said.get("data-dir"), said.get("keys")
    return Settings(
        tuple(Path(line).expanduser().absolute() for line in str(said.get("out", DEFAULT_OUT)).splitlines()),
        Path(str(data_dir)).expanduser() if data_dir else None,
        Path(str(keys)).expanduser() if keys else None,
        policy_of({name: value for name, value in said.items() if name in TERMS}),
        str(said.get("preset", "")),
        str(said.get("config", "")),
        given,
    )


def policy_of(said: Mapping[str, Any]) -> Policy:
    """By their run-config names. ConfigError for what no federation could keep to."""
    given = {TERMS[name]: (_count if name in COUNTS else _number)(name, said[name]) for name in said}
    return Policy(**given)  # type: ignore[arg-type]


def _count(name: str, value: Any) -> int:
    if isinstance(_number(name, value), float) and not value.is_integer():
        raise ConfigError(f"{name} is {value}: expected a whole number.")
    if name == "threads" and value > MOST_THREADS:
        raise ConfigError(f"{name} is {value}: expected at most {MOST_THREADS}.")
    return int(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"run-config {name} is {value!r}: expected a number.")
    return value
