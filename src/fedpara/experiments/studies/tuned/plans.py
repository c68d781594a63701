"""The prepared studies by name, in the recommended order of running them.

CIFAR-10 has seven trials of 60 rounds per method. CIFAR-100 has four of 40 rounds: the recipe, and the values that won
or tied on CIFAR-10. Its clients hold 1,000 examples and 104 of them are held out, so that no batch is short. The text
has four trials of 60 rounds for the same reason: 208 of 2,000 windows are held out. The personal models try five rates
with three seeds, because a client holds out only a few examples.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedpara.choices import TUNED
from fedpara.errors import ConfigError, among
from fedpara.experiments.config import Experiment
from fedpara.experiments.paper import STUDIES
from fedpara.experiments.paper.personal import METHODS as PERSONAL
from fedpara.experiments.paper.recipe import SCENARIOS, TEXTS, experiment
from fedpara.experiments.paper.text import MODELS as TEXT_MODELS
from fedpara.experiments.paper.vision import MAIN, SCHEMES, vgg
from fedpara.experiments.studies.tuned.plan import Plan, Tuning, miniature, unique

RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
THREE = (100, 101, 102)
"""Trial seeds where one seed holds out few examples."""
FIVE = (1, 2, 3, 4, 5)
"""Final seeds of the personal models, as many as the paper's repeats."""
WRITERS = 30
PERSONAL_NOTE = (
    "Tuned: each method has its own learning rate. Every repeat draws its ten writers from the 50 with the most "
    "examples (scenario 3: other shards), so the repeats differ in their data too."
)
TEXT_NOTE = (
    "Tuned: the clients are those of Acar et al., whom the paper cites: 100 clients of 2,000 training and 400 test "
    "windows. IID is LEAF's sampler, whose test windows overlap training windows; the tuned methods of "
    '"Shakespeare, 100 roles IID" are without overlap.'
)


def _vgg16(setting: str) -> dict[str, Experiment]:
    """The paper's three methods, and a dense VGG16 as small as FedPara at gamma 0.1."""
    names = {"original": "original", "lowrank": "low-rank", "fedpara": "FedPara"}
    found = {name: vgg(setting, **SCHEMES[row]) for name, row in names.items()}
    return {**found, "narrow": replace(found["original"], model="vgg16-narrow")}


def _fills(setting: str) -> dict[str, Experiment]:
    """The experiments that each method fills. No table of the paper has the narrow network."""
    return {name: e for name, e in _vgg16(setting).items() if name != "narrow"}


def _cifar10(kind: str, validation: float) -> Tuning:
    setting = f"CIFAR-10 {kind}"
    clips, starts = {"clip": [1.0, 10.0]}, {"init": ["he:1.0", "he:1.4"]}
    return Tuning(
        f"cifar10-{_word(kind)}",
        _vgg16(setting),
        {"lr": [0.2, 0.05], "weight_decay": [5e-4, 2e-3]},
        {"original": clips, "lowrank": starts, "fedpara": {"init": ["he:1.0", "he:2.0"]}, "narrow": clips},
        validation=validation,
        rounds=60,
        fills=_fills(setting),
    )


def _cifar100(kind: str, validation: float) -> Tuning:
    setting = f"CIFAR-100 {kind}"
    clip = {"clip": [1.0 if kind == "non-IID" else 10.0]}
    return Tuning(
        f"cifar100-{_word(kind)}",
        _vgg16(setting),
        {"lr": [0.05], "weight_decay": [5e-4]},
        {"original": clip, "lowrank": {"init": ["he:1.4"]}, "fedpara": {"init": ["he:2.0"]}, "narrow": clip},
        validation=validation,
        fills=_fills(setting),
    )


def _word(kind: str) -> str:
    return kind.lower().replace("-", "")


def _scenario(number: int, **changes: Any) -> dict[str, Experiment]:
    """The four methods. Writers are drawn by the seed; the shards of scenario 3 depend on it already."""
    drawn = {} if number == 3 else {"split": "drawn"}
    name = SCENARIOS[number - 1]
    return {
        method.lower(): experiment(name, "mlp", **{**values, **drawn, **changes})
        for method, values in PERSONAL.items()
    }


def _personal(name: str, methods: Mapping[str, Experiment], validation: float = 0.1, **more: Any) -> Tuning:
    tried = {"lr": list(RATES)}
    fixed = {"one_at_a_time": False, "rounds": 50, "seeds": THREE, "final_seeds": FIVE}
    return Tuning(name, methods, tried, validation=validation, **{**fixed, **more})


def _of_paper(number: int) -> Tuning:
    """A fifth of a writer's examples are about 33. A tenth of these would be too few for a choice."""
    recipe = {
        method.lower(): experiment(SCENARIOS[number - 1], "mlp", **values)
        for method, values in PERSONAL.items()
    }
    held_out = 0.2 if number == 2 else 0.1
    return _personal(
        f"personal-{number}",
        _scenario(number),
        held_out,
        fills=recipe,
        title=SCENARIOS[number - 1],
        note=PERSONAL_NOTE,
    )


def _pfedpara() -> Tuning:
    """Variants that the paper leaves open, in scenario 1: gamma, the initial deviation of W2, and the layers."""
    base = _scenario(1)["pfedpara"]
    changed: dict[str, dict[str, Any]] = {
        **{f"gamma-{gamma:g}": {"gamma": gamma} for gamma in (0.25, 0.5, 0.75)},
        **{f"w2-{start:g}": {"init": f"private:{start:g}"} for start in (0.3, 2.0)},
        **{
            f"only-{layer}": {"where": f"all but {other}"}
            for layer, other in (("fc1", "fc2"), ("fc2", "fc1"))
        },
    }
    methods = {name: replace(base, **values) for name, values in changed.items()}
    return _personal("pfedpara", methods, fills={}, title="Scenario 1, variants of pFedPara")


def _writers() -> Tuning:
    methods = _scenario(1, clients=WRITERS, cohort=WRITERS)
    return _personal("writers", methods, fills={}, title=f"Scenario 1 with {WRITERS} writers")


def _text(name: str, dataset: str, split: str, setting: str | None) -> Tuning:
    recipe = {
        "original": "original",
        "lowrank": "low-rank",
        "fedpara": "FedPara, γ 0",
    }
    of_paper = {
        name: experiment(setting or TEXTS[0], "lstm", **TEXT_MODELS[row][3]) for name, row in recipe.items()
    }
    start = {"init": ["calibrated"]}
    return Tuning(
        name,
        {n: replace(e, dataset=dataset, split=split, data_fraction=1.0) for n, e in of_paper.items()},
        {"lr": [0.5, 2.0]},
        {"original": {"clip": [5.0]}, "lowrank": start, "fedpara": start},
        validation=0.104,
        rounds=60,
        fills={} if setting is None else of_paper,
        note=TEXT_NOTE,
    )


def _resnet() -> Tuning:
    runs = {cell.row: cell.experiments[0] for cell in STUDIES["resnet"].cells if cell.column == "accuracy"}
    return Tuning(
        "resnet",
        {"original": runs["original"], "fedpara": runs["γ 0.1"]},
        {"lr": [0.03]},
        {"original": {"weight_decay": [1e-3]}, "fedpara": {"jacobian": [0.0]}},
        validation=0.1,
        rounds=10,
        final_seeds=(1,),
        title="ResNet18, CIFAR-10 IID",
    )


def _cells(study: str, *rows: str, column: str = "") -> tuple[Experiment, ...]:
    """The experiments of a table: of the named rows in this order, then of all others."""
    cells = [cell for cell in STUDIES[study].cells if column in ("", cell.column)]
    first = [cell for row in rows for cell in cells if cell.row == row]
    return tuple(unique(e for cell in (*first, *cells) for e in cell.experiments))


def _without(experiments: tuple[Experiment, ...], tuned: Tuning) -> tuple[Experiment, ...]:
    """The experiments that are not methods of a tuning, because a tuning has its own final runs."""
    methods = {(e.identity, e.rounds) for e in tuned.methods.values()}
    return tuple(e for e in experiments if (e.identity, e.rounds) not in methods)


_IID, _NONIID = _cifar10("IID", 0.104), _cifar10("non-IID", 0.1)
_IID_100, _NONIID_100 = _cifar100("IID", 0.104), _cifar100("non-IID", 0.1)
_RESNET = _resnet()


def _gammas(name: str, tuned: Tuning, setting: str, *first: str) -> Plan:
    rest = _without(_cells("gamma-sweep", *first, column=setting), tuned)
    return Plan(name, f"gammas: {setting}", reused=rest, needs=(tuned.name,))


_LISTED = (
    Plan("cifar10-iid", "four methods: CIFAR-10 IID", (_IID,)),
    Plan("cifar10-noniid", "four methods: CIFAR-10 non-IID", (_NONIID,)),
    Plan(
        "personal",
        "personal models: scenarios 1 to 3, variants of pFedPara, more writers",
        (
            *map(_of_paper, (1, 2, 3)),
            _pfedpara(),
            _writers(),
        ),
    ),
    Plan("cifar100-noniid", "four methods: CIFAR-100 non-IID", (_NONIID_100,)),
    Plan("cifar100-iid", "four methods: CIFAR-100 IID", (_IID_100,)),
    Plan(
        "lstm",
        "LSTM: the clients of Acar et al.",
        (
            _text("lstm-noniid", "shakespeare-100", "owner", "Shakespeare non-IID"),
            _text("lstm-iid-mixed", "shakespeare-100-mixed", "iid", "Shakespeare IID"),
            _text("lstm-iid", "shakespeare-100", "iid", None),
        ),
    ),
    Plan(
        "jacobian",
        "tanh, and readings of the Jacobian correction",
        reused=_without(tuple(unique((*_cells("techniques"), *_cells("jacobian")))), _IID),
        needs=(_IID.name,),
    ),
    _gammas("gamma", _IID, MAIN),
    _gammas("gamma-noniid", _NONIID, "CIFAR-10 non-IID", "γ 0.3", "γ 0.6", "γ 0.9"),
    Plan(
        "variants",
        "Pufferfish, quantization, other algorithms",
        reused=_without(
            tuple(
                unique(
                    (*_cells("pufferfish", column="accuracy"), *_cells("quantization"), *_cells("optimizers"))
                )
            ),
            _IID,
        ),
        needs=(_IID.name,),
    ),
    Plan(
        "long-run",
        "a thousand rounds",
        reused=_cells("long-run", "original", "γ 0.1", "γ 0.5", column="1,000 rounds"),
        needs=(_IID.name,),
    ),
    _gammas("gamma-cifar100-noniid", _NONIID_100, "CIFAR-100 non-IID", "γ 0.4"),
    _gammas("gamma-cifar100-iid", _IID_100, "CIFAR-100 IID", "γ 0.4"),
    Plan("resnet", "ResNet18", (_RESNET,), _without(_cells("resnet"), _RESNET), (_RESNET.name,)),
)

PLANS = {f"{TUNED}{plan.name}": plan for plan in _LISTED}
TUNINGS = {tuning.name: tuning for plan in _LISTED for tuning in plan.tunings}


def plan_of(name: str, scale: str = "paper") -> Plan:
    if name not in PLANS:
        raise ConfigError(f"unknown study {name!r}: {among(name, PLANS)}")
    if scale not in ("paper", "tiny"):
        raise ConfigError(f"scale is {scale!r}: expected paper or tiny.")
    return miniature(PLANS[name]) if scale == "tiny" else PLANS[name]


def tuning_of(name: str, scale: str = "paper") -> Tuning | None:
    """The tuning whose folders have this name, if it is one of these."""
    if name not in TUNINGS:
        return None
    (found,) = (
        (t for t in miniature(Plan("", "", (TUNINGS[name],))).tunings)
        if scale == "tiny"
        else (TUNINGS[name],)
    )
    return found
