"""Experiment: the configuration of one run. `build.py` turns its strings into objects."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from inspect import formatannotation, signature
from numbers import Real
from typing import Any, get_args

from fedpara import algorithms, models, parameterization, references
from fedpara.algorithms.core import Weighting
from fedpara.algorithms.optimizers import OPTIMIZERS
from fedpara.algorithms.schedules import SCHEDULES
from fedpara.attacks import ATTACKS
from fedpara.choices import ENGINES, PRODUCTS, SAMPLERS, SPLITS
from fedpara.engines.settings import Precision, check_share, read_gammas
from fedpara.errors import ConfigError, among
from fedpara.privacy import read_privacy
from fedpara.references import OBJECT, REFERENCE_HINT
from fedpara.robust import DEFENCES
from fedpara.secure import SECURE
from fedpara.tasks import LOSSES, METRICS, Augment
from fedpara.wire import parse_encoding

OWNED = ("owner", "largest", "drawn")
"""Splits whose clients are the owners of the examples."""

TITLES = {"original": "original"} | {name: scheme.title for name, scheme in parameterization.SCHEMES.items()}
"""How reports name the schemes."""
CHOICES: dict[str, Sequence[str]] = {
    "scheme": ("original", *parameterization.SCHEMES),
    "split": SPLITS,
    "model": models.names(),
    "algorithm": algorithms.names(),
    "loss": tuple(LOSSES),
    "metrics": tuple(METRICS),
    "onto": ("frozen",),
    "sampler": SAMPLERS,
    "engine": ENGINES,
    "precision": get_args(Precision),
    "augment": get_args(Augment),
    "weights": get_args(Weighting),
    "products": PRODUCTS,
    "test_owners": ("training", "all"),
}
"""Accepted values by field. A field with the default None may also be left out."""

CALLS: dict[str, dict[str, Callable[..., Any]]] = {
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "robust": DEFENCES,
    "attack": ATTACKS,
    "secure": SECURE,
}
"""Fields that take a factory of the library with its arguments, such as cosine(warmup=5)."""

REFERENCED = (
    *("dataset", "model", "where", "split", "algorithm"),
    *("loss", "metrics", "optimizer", "schedule", "sampler", "robust", "attack"),
)
"""Fields that also take a reference to your function, such as mypkg:unet(width=32). See `fedpara.references`."""

# A resumed run may change these fields. They do not change the computation: engines and precisions differ only in
# rounding, and the last round of a run is always evaluated.
FREE = ("rounds", "engine", "precision", "device", "target", "patience", "epsilon", "aggregation_error")

# Fields that were added after some runs had finished, with the value that those runs used. Such a field enters the
# identity only if its value differs, so that the identities of the older runs stay valid.
LATER: dict[str, Any] = {
    "validation": 0.0,
    "weights": "examples",
    "max_share": None,
    "test_owners": "all",
    "sampler": "uniform",
    "lost": 0.0,
    "bandwidth": None,
    "speed": None,
    "device_deadline": None,
    "onto": None,
    "adapter_alpha": None,
    "train": None,
    "loss": "cross-entropy",
    "metrics": None,
    "optimizer": "sgd",
    "schedule": None,
    "keep_optimizer": False,
    "products": "mean",
    "gammas": None,
    "robust": None,
    "attack": None,
    "hostile": 0.0,
    "secure": None,
    "objects": None,
    "rotate": False,
    "recycle": 0,
    "privacy": None,
    "delta": None,
    "privacy_seed": None,
    "fold_every": None,
}


@dataclass(frozen=True)
class Experiment:
    dataset: str = "digits"
    model: str = "cnn"
    scheme: str = "fedpara"  # original, lowrank, fedpara, pfedpara, kronecker, lowrank-aad, kronecker-aad
    gamma: float | None = None  # 0.1 if rank and ratio are not given either
    gammas: str | None = None  # a gamma per client, such as "0.1, 0.3, 0.5": client i has number i mod 3
    rank: int | None = None
    ratio: float | None = None  # lowrank, kronecker, lowrank-aad, kronecker-aad
    nonlinearity: str | None = None  # tanh
    conv: str = "tensor"  # or reshape
    init: str | None = None  # fan_out, calibrated, he, he:1.4; the default depends on the scheme
    where: str | None = None  # every, inner, early, hybrid:N, all but NAMES (`build_rule`)
    onto: str | None = None  # frozen: adapters on the model's own weights
    adapter_alpha: float | None = None  # scale of the adapters, alpha / rank
    train: str | None = None  # beside the adapters: modules and parameters, such as "classifier, bias"
    loss: str = "cross-entropy"  # one of LOSSES
    metrics: str | None = None  # of METRICS, such as "dice, iou"; the first is the primary one
    algorithm: str = "fedavg"
    options: dict[str, float] = field(default_factory=dict, hash=False)  # of the algorithm: mu, alpha, ...
    share: str = "all"  # fedper: all but the last layer; none: Local; all but head, norm1: by name
    split: str = "dirichlet"  # one of SPLITS; largest, drawn: owners with many examples (`federation.py`)
    alpha: float = 0.5  # of the Dirichlet splits
    clients: int = 100
    keep: int | None = None  # use only the first `keep` clients
    classes_per_client: int = 2  # of the shards split
    data_fraction: float = 1.0  # of each client's training examples
    validation: float = (
        0.0  # fraction of each client's examples to hold out and score instead of the test set
    )
    test_owners: str = "training"  # owner, largest, drawn: whose test examples score the global model; or all
    personal: bool = False  # score each client's own model on its own test data
    cohort: int = 10
    sampler: str = "uniform"  # poisson, by-data: who takes part in a round
    lost: float = 0.0  # the probability that a chosen client is lost
    bandwidth: float | str | None = None  # bytes per second of a client, or lognormal(5e6, 0.5)
    speed: float | str | None = None  # steps per second of a client, or lognormal(20, 0.5)
    device_deadline: float | None = None  # simulated seconds that a round waits for its clients
    rounds: int = 20
    epochs: int | None = 1
    steps: int | None = None
    batch_size: int = 32
    lr: float = 0.1
    lr_decay: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    optimizer: str = "sgd"  # adam, adamw(betas=(0.9, 0.95)): of the clients
    schedule: str | None = None  # of the learning rate: cosine(warmup=5), linear, step_decay(every=30)
    keep_optimizer: bool = False  # keep the optimizer's state on the client between rounds
    jacobian: float = 0.0  # lambda of the Jacobian correction
    jacobian_norm: str = "plain"
    augment: str = "none"  # or crop-flip
    link_up: str = "float32"  # float16, int8, int4, topk(0.01, feedback=True), ...: see `fedpara.wire.Link`
    link_down: str = "float32"
    weights: str = "examples"  # weight updates by their number of examples, or uniform
    max_share: float | None = None  # the largest share of a round's weight that one client may have
    max_norm: float | None = None  # reject updates farther than this from the model
    products: str = "mean"  # of factors; or refit: factors of the mean of the composed weights
    aggregation_error: bool = False  # measure how far the two means are apart
    robust: str | None = None  # against hostile clients: auto, rfa, trimmed-mean(0.2), ...
    attack: str | None = None  # of simulated hostile clients: label-flip, backdoor(target=3), ...
    hostile: float = 0.0  # the share of the clients that are hostile
    secure: str | None = None  # secagg(clip=0.5): the server learns only the sum of the updates
    evaluate_every: int = 1
    target: float | None = None  # stop at this accuracy
    patience: int | None = None  # stop after this many evaluations without a better score
    rotate: bool = False  # train and send one factor of every weight per round, in turn
    fold_every: int | None = (
        None  # rounds after which adapters add their change to their base and start again
    )
    recycle: int = 0  # layers per round that are not sent; the server repeats its last update of them
    privacy: str | None = None  # user(noise=1.1, clip=0.5) hides clients, example(noise=1, clip=1) examples
    epsilon: float | None = None  # the privacy budget: stop before a round that would exceed it
    delta: float | None = None  # of every epsilon; N^-1.1 for N clients, or examples with example(...)
    privacy_seed: int | None = None  # of the noise, for tests: such a run is not private
    seed: int = 0
    engine: str = "auto"
    precision: str | None = None  # float32, tf32, bfloat16: on a GPU
    device: str | None = None  # cpu, cuda, cuda:1; the GPU if there is one
    objects: str | None = None  # digests of what `simulate` was given; set by it only (`object_digests.py`)

    def __post_init__(self) -> None:
        for f in fields(self):
            value: Any = getattr(self, f.name)
            flag = isinstance(value, bool) and bool not in (f.type, *get_args(f.type))
            if isinstance(value, int) and not flag and float in (f.type, *get_args(f.type)):
                value = float(value)  # 1 and 1.0 are the same experiment
                object.__setattr__(self, f.name, value)
            if flag or not isinstance(value, dict if f.name == "options" else f.type):  # type: ignore[arg-type]
                expected = formatannotation(f.type).removesuffix(" | None")
                raise ConfigError(f"{f.name} is {value!r}: expected {expected}.")
            several = f.name == "metrics" and bool(value)
            for text in references.split(str(value)) if several else [value]:
                self._check_name(f.name, text)
        read_gammas(self.gammas)
        for name, (accepted, holds) in RULES.items():
            if not holds(self):
                raise ConfigError(f"{name} is {getattr(self, name)}: expected {accepted}.")
        given: dict[str, Any] = self.options
        options = {name: float(v) if isinstance(v, Real) else v for name, v in given.items()}
        object.__setattr__(self, "options", options)
        if not is_foreign(self.algorithm):  # reading a config does not import what it names
            algorithms.build(self.algorithm, algorithms.Local(), **options)
        if self.steps is not None and self.epochs == Experiment.epochs:  # as in `Local`
            object.__setattr__(self, "epochs", None)

    def _check_name(self, field: str, text: Any) -> None:
        """ConfigError if the field names something of the library that does not exist, or a malformed reference."""
        if text is None:
            return
        if field in REFERENCED and is_foreign(text):
            try:
                if not text.startswith(OBJECT):
                    references.parse(text)
            except ConfigError as error:
                raise ConfigError(f"{field} is {error}") from None
        elif field in ("link_up", "link_down"):
            parse_encoding(text, field)
        elif field == "privacy":
            read_privacy(text)
        elif field == "share":
            check_share(text)
        elif field in CALLS:
            references.library_call(text, CALLS[field], field, REFERENCE_HINT if field in REFERENCED else "")
        elif field in CHOICES and text not in CHOICES[field]:
            yours = f" {REFERENCE_HINT}" * (field in REFERENCED)
            raise ConfigError(f"unknown {field} {text!r}: {among(str(text), CHOICES[field])}{yours}")

    @property
    def references(self) -> dict[str, str]:
        """The fields that name functions of the user. Those of `metrics` are numbered: metrics.0."""
        found: dict[str, str] = {}
        for name in REFERENCED:
            value = getattr(self, name) or ""
            several = name == "metrics"
            for i, text in enumerate(references.split(value) if several else [value]):
                if references.is_reference(text):
                    found[f"{name}.{i}" if several else name] = text
        return found

    @property
    def rounds_decide(self) -> bool:
        """Whether the learning rate depends on `rounds`: the schedule has no `rounds` argument of its own."""
        if self.schedule is None or self.schedule.startswith(OBJECT):
            return False
        if references.is_reference(self.schedule):
            return "rounds" not in (references.parse(self.schedule).keywords or {})
        name, arguments = references.library_call(self.schedule, SCHEDULES, "schedule")
        return "rounds" in signature(SCHEDULES[name]).parameters and arguments.get("rounds") is None

    @property
    def identity(self) -> str:
        """A digest of the fields that decide the result: without FREE ones, and with LATER ones only if they differ.

        `rounds` is free unless a schedule of the learning rate depends on it.
        """
        free = {*FREE} - ({"rounds"} if self.rounds_decide else set())
        values = {name: value for name, value in asdict(self).items() if name not in free}
        if self.split not in OWNED or self.personal:
            values["test_owners"] = LATER["test_owners"]  # the field has no effect on the scores
        decisive = {name: v for name, v in values.items() if name not in LATER or v != LATER[name]}
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def is_foreign(text: str) -> bool:
    """Whether the text names something that is not the library's: a reference, or an object of `simulate`."""
    return text.startswith(OBJECT) or references.is_reference(text)


RULES: dict[str, tuple[str, Callable[[Experiment], bool]]] = {
    "keep": ("1 to the number of clients", lambda e: e.keep is None or 1 <= e.keep <= e.clients),
    "data_fraction": ("a number above 0 and at most 1", lambda e: 0 < e.data_fraction <= 1),
    "validation": (
        "0 (score the test set) or a fraction below 1, such as 0.1",
        lambda e: 0 <= e.validation < 1,
    ),
    "seed": ("0 to 2^63 - 1", lambda e: 0 <= e.seed < 1 << 63),
}
"""Accepted ranges that nothing else checks before they are used."""
