"""Experiment: one run, written down. Strings become objects in `build.py` and nowhere else."""

import hashlib
import json
import re
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from numbers import Real
from pathlib import Path
from typing import Any, get_args, get_type_hints

from fedpara import algorithms, models
from fedpara.choices import ENGINES, SPLITS
from fedpara.engines.batched.step import Precision
from fedpara.engines.program import Share
from fedpara.engines.task import Augment
from fedpara.errors import ConfigError, among

SCHEMES = ("original", "lowrank", "fedpara", "pfedpara")
OWNED = ("owner", "largest")
"""Splits whose clients are the owners of the examples."""
WEIGHTS = ("examples", "uniform")
TEST_OWNERS = ("training", "all")
WHERE = r"every|early|hybrid:\d+"

# What may differ between a run and its continuation: a run's last round is always evaluated, and an engine or a
# precision rounds in its own way.
FREE = ("rounds", "engine", "precision", "target")

# Fields that were added after runs had been kept, each with the value that all those runs had. Such a field counts
# for the identity only where its value differs from this one: so every kept run keeps its identity.
LATER: dict[str, Any] = {"validation": 0.0, "weights": "examples", "max_share": None, "test_owners": "all"}

_SPEAKS_OF = r"^(\w+) is |^unknown key '([^']+)'|^unknown (\w+) |hyper-parameter '([^']+)'"


@dataclass(frozen=True)
class Experiment:
    dataset: str = "digits"
    model: str = "cnn"
    scheme: str = "fedpara"  # original, lowrank, fedpara, pfedpara
    gamma: float | None = None  # 0.1 where neither rank nor ratio is given
    rank: int | None = None
    ratio: float | None = None  # lowrank only
    nonlinearity: str | None = None  # tanh
    conv: str = "tensor"  # or reshape
    init: str | None = None  # fan_out, calibrated, he, he:1.4; each scheme has its own default
    where: str | None = None  # every, early, hybrid:N in place of the model's own rule (`build_rule`)
    algorithm: str = "fedavg"
    options: dict[str, float] = field(default_factory=dict, hash=False)  # the algorithm's own: mu, alpha, ...
    share: str = "all"  # fedper: all but the last layer; none: Local
    split: str = "dirichlet"  # one of SPLITS; largest: the owners with the most examples
    alpha: float = 0.5  # of the Dirichlet splits
    clients: int = 100
    keep: int | None = None  # of these only the first so many are in the federation
    classes_per_client: int = 2  # of the shards split
    data_fraction: float = 1.0  # of each client's training examples
    validation: float = (
        0.0  # hold out this share of each client's examples, and score them in place of the test set
    )
    test_owners: str = "training"  # owner and largest: whose test examples score the global model; or all
    personal: bool = False  # score each client's own model on its own test data
    cohort: int = 10
    rounds: int = 20
    epochs: int | None = 1
    steps: int | None = None
    batch_size: int = 32
    lr: float = 0.1
    lr_decay: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    jacobian: float = 0.0  # lambda of the Jacobian correction
    jacobian_norm: str = "plain"
    augment: str = "none"  # or crop-flip
    link_up: str = "float32"
    link_down: str = "float32"
    weights: str = "examples"  # how updates are weighted in the mean: by examples, or uniform
    max_share: float | None = None  # the largest share of a round's weight that one client may have
    max_norm: float | None = None  # refuse updates further than this from the model
    evaluate_every: int = 1
    target: float | None = None  # stop once this accuracy is met
    seed: int = 0
    engine: str = "auto"
    precision: str | None = None  # float32, tf32, bfloat16: of the batched engine on a GPU

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for f in fields(self):
            value = getattr(self, f.name)
            _check_type(f.name, value, hints[f.name])
            if float in (hints[f.name], *get_args(hints[f.name])) and value is not None:
                object.__setattr__(self, f.name, _as_float(f.name, value))
        options = {name: _as_float(str(name), value) for name, value in self.options.items()}
        object.__setattr__(self, "options", options)
        if self.steps is not None and self.epochs == Experiment.epochs:  # as `Local` takes it
            object.__setattr__(self, "epochs", None)
        if (self.epochs is None) == (self.steps is None):
            raise ConfigError(f"epochs is {self.epochs} and steps is {self.steps}: expected one of the two.")
        _known("scheme", self.scheme, SCHEMES)
        _known("split", self.split, SPLITS)
        _known("model", self.model, models.names())
        _known("algorithm", self.algorithm, algorithms.names())
        _known("engine", self.engine, ENGINES)
        if self.precision is not None:
            _known("precision", self.precision, get_args(Precision))
        _known("share", self.share, get_args(Share))
        _known("augment", self.augment, get_args(Augment))
        _known("weights", self.weights, WEIGHTS)
        _known("test_owners", self.test_owners, TEST_OWNERS)
        _check_options(self.algorithm, self.options)
        if self.where is not None and not re.fullmatch(WHERE, self.where):
            raise ConfigError(
                f"unknown where {self.where!r}: expected every, early, or hybrid:5 with any number."
            )
        if self.scheme == "original" and any(v is not None for v in (self.gamma, self.rank, self.ratio)):
            raise ConfigError("scheme 'original' has no gamma, rank or ratio: leave them out.")
        for name in ("clients", "cohort", "rounds", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: expected at least 1.")
        if self.split not in OWNED and self.cohort > self.clients:
            raise ConfigError(
                f"a cohort of {self.cohort} from {self.clients} clients: expected no more than there are."
            )
        if self.keep is not None and not self.cohort <= self.keep <= self.clients:
            raise ConfigError(
                f"keep is {self.keep}: expected at least the cohort of {self.cohort} and at most the "
                f"{self.clients} clients."
            )
        if not self.alpha > 0:
            raise ConfigError(
                f"alpha is {self.alpha}: expected a positive number. Small is skewed, large is even."
            )
        if not 0 < self.data_fraction <= 1:
            raise ConfigError(f"data_fraction is {self.data_fraction}: expected above 0 and at most 1.")
        if not 0 <= self.validation < 1:
            raise ConfigError(
                f"validation is {self.validation}: expected 0 (score the test set) or a share below 1, such as 0.1."
            )
        if self.max_share is not None and not 0 < self.max_share <= 1:
            raise ConfigError(f"max_share is {self.max_share}: expected above 0 and at most 1, such as 0.2.")
        if self.target is not None and not 0 < self.target <= 1:
            raise ConfigError(
                f"target is {self.target}: expected an accuracy above 0 and at most 1, such as 0.8."
            )
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"seed is {self.seed}: expected 0 to 2^63 - 1.")

    @property
    def identity(self) -> str:
        """A digest of everything that decides what is computed. FREE fields may change on resume: engines and
        precisions compute the same and round differently. LATER fields count where they are used.
        """
        values = {name: value for name, value in asdict(self).items() if name not in FREE}
        if (
            self.split not in OWNED or self.personal
        ):  # no such owners, or each client is scored on its own data
            values["test_owners"] = LATER["test_owners"]
        decisive = {name: v for name, v in values.items() if name not in LATER or v != LATER[name]}
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def to_toml(experiment: Experiment) -> str:
    """Every field that is set, one line each."""
    values = asdict(experiment)
    options = values.pop("options")
    lines = [f"{name} = {_literal(value)}" for name, value in values.items() if value is not None]
    if options:
        lines += ["", "[options]", *(f"{name} = {_literal(value)}" for name, value in options.items())]
    return "\n".join(lines) + "\n"


def read_toml(path: Path, base: Experiment | None = None) -> Experiment:
    """The experiment a file describes, on top of `base`. An unknown key is named with its line."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read the config {path}: it is not text. Expected TOML in UTF-8.") from None
    try:
        given = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # tomllib's own is a ValueError
        raise ConfigError(f"{path} is not TOML: {error}.") from None
    try:
        return with_values(base or Experiment(), given)
    except ConfigError as error:
        raise ConfigError(f"{path}{_line_of(text, error)}: {error}") from None


def with_values(base: Experiment, given: dict[str, Any]) -> Experiment:
    """`base` with some fields replaced. Giving rank or ratio drops gamma, giving steps drops epochs."""
    names = [f.name for f in fields(Experiment)]
    for name in given:
        if name not in names:
            raise ConfigError(f"unknown key {name!r}: {among(name, names)}")
    changed = dict(given)
    sizes = {"gamma", "rank", "ratio"}
    if sizes & given.keys():
        changed = {**dict.fromkeys(sizes), **changed}
    if given.get("scheme") == "original":
        changed = {**dict.fromkeys((*sizes, "nonlinearity", "init")), **changed}
    if given.get("steps") is not None and given.get("epochs") is not None:
        raise ConfigError(
            f"epochs is {given['epochs']} and steps is {given['steps']}: expected one of the two."
        )
    if given.get("steps") is not None:
        changed.setdefault("epochs", None)
    if "epochs" in given and given["epochs"] is not None:
        changed.setdefault("steps", None)
    return replace(base, **changed)


def read_options(given: Iterable[str]) -> dict[str, float]:
    """An algorithm's own hyper-parameters, such as mu=0.1."""
    options: dict[str, float] = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            options[name.strip()] = float(value)
        except ValueError:
            raise ConfigError(f"option {text!r}: expected name=number, such as mu=0.1.") from None
    return options


def _check_type(name: str, value: Any, expected: Any) -> None:
    allowed = (
        get_args(expected) if get_args(expected) and not str(expected).startswith("dict") else (expected,)
    )
    plain = tuple(dict if str(kind).startswith("dict") else kind for kind in allowed)
    accepted = (*plain, int) if float in plain else plain
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in plain):
        kinds = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in plain)
        raise ConfigError(f"{name} is {value!r}: expected {kinds}.")


def _as_float(name: str, value: Any) -> Any:
    """1 and 1.0 are one experiment, and numpy's numbers are written as Python's."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(
            f"{name} is a number of {len(str(value))} digits: expected one that float32 holds."
        ) from None


def _check_options(algorithm: str, options: dict[str, float]) -> None:
    for name in options:
        if not isinstance(name, str):
            raise ConfigError(f"an option is named {name!r}: expected a word, such as 'mu'.")
    for name in {"name", "local"} & options.keys():  # the words `build` keeps for itself
        raise ConfigError(f"{algorithm} has no hyper-parameter {name!r}.")
    algorithms.build(algorithm, algorithms.Local(), **options)


def _known(what: str, value: str, known: tuple[str, ...] | list[str]) -> None:
    if value not in known:
        raise ConfigError(f"unknown {what} {value!r}: {among(value, known)}")


def _literal(value: bool | int | float | str) -> str:
    """JSON's words are TOML's, but for infinity and one character."""
    if isinstance(value, float):
        return float.__repr__(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _line_of(text: str, error: ConfigError) -> str:
    """Where the key stands that the error speaks of."""
    spoken = re.search(_SPEAKS_OF, str(error))
    key = next(filter(None, spoken.groups())) if spoken else None
    for number, line in enumerate(text.splitlines(), 1):
        if key and re.match(rf"\s*(?:\w+\.)*[\"']?{re.escape(key)}[\"']?\s*[=.]", line):
            return f", line {number}"
    return ""
