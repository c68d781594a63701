"""The runs that `crash.py` and `power_loss.py` kill: every engine, with features that keep something for later."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fedpara.apps import cli
from fedpara.apps.flower.host import host_on
from fedpara.apps.flower.node import respond
from fedpara.engines.flower.policy import Policy
from fedpara.engines.flower.rpc import Packet
from fedpara.experiments import Experiment, resume, run
from fedpara.experiments.config_file import to_toml
from fedpara.experiments.run import lay_out

SHORT: dict[str, Any] = {
    "model": "mlp",
    "clients": 12,
    "cohort": 3,
    "rounds": 6,
    "epochs": None,
    "steps": 2,
    "batch_size": 16,
    "evaluate_every": 2,
    "lr": 0.03,
    "engine": "sequential",
}
FEATURES: dict[str, dict[str, Any]] = {
    "fedavg": {"scheme": "original", "lr": 0.1},
    "scaffold, pfedpara, float16 up": {
        "scheme": "pfedpara",
        "algorithm": "scaffold",
        "link_up": "float16",
        "personal": True,
        "lr": 0.02,
    },
    "fedadam": {"init": "calibrated", "algorithm": "fedadam"},
    "error feedback, differences down": {
        "link_up": "topk(0.05, feedback=True)",
        "link_down": "int4",
        "algorithm": "scaffold",
        "lr": 0.02,
    },
    "sign with feedback both ways": {"link_up": "sign(feedback=True)", "link_down": "sign", "lr": 0.02},
    "rotate": {"rotate": True},
    "products refit": {"products": "refit", "aggregation_error": True},
    "gammas": {"gammas": "0.1, 0.3, 0.5"},
    "privacy of users": {
        "privacy": "user(noise=0.5, clip=0.5, quantile=0.5)",
        "privacy_seed": 7,
        "sampler": "poisson",
        "weights": "uniform",
    },
    "privacy of examples": {"privacy": "example(noise=0.5, clip=1)", "privacy_seed": 7},
    "secure aggregation": {"secure": "secagg(clip=2)", "cohort": 4},
    "adam kept on the client": {"optimizer": "adam", "keep_optimizer": True, "lr": 0.002},
    "ditto": {"algorithm": "ditto", "options": {"lambda_": 0.5}, "personal": True},
    "robust auto, backdoor": {"robust": "auto", "attack": "backdoor", "hostile": 0.25, "cohort": 6},
    "fltrust, colluding": {
        "robust": "fltrust",
        "attack": "alie",
        "hostile": 0.25,
        "cohort": 6,
    },
    "your own model": {"model": "kill_cases:net(width=24)", "scheme": "pfedpara", "personal": True},
}
BATCHED = (
    *("scaffold, pfedpara, float16 up", "error feedback, differences down", "rotate", "products refit"),
    *("gammas", "privacy of users", "adam kept on the client", "ditto", "robust auto, backdoor"),
)
HOSTED = (
    *("scaffold, pfedpara, float16 up", "error feedback, differences down", "products refit"),
    *("secure aggregation", "adam kept on the client", "ditto", "rotate"),
)
RANKED = (
    *("scaffold, pfedpara, float16 up", "error feedback, differences down", "gammas"),
    *("adam kept on the client", "ditto"),
)


def net(width: int) -> nn.Module:
    """A user's model, which the config references."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))


class NodesHere:
    """A transport to three nodes in this process, which answer at once."""

    def __init__(self, folder: Path) -> None:
        self._configs: dict[int, dict[str, str | int]] = {
            node: {"partition-id": node, "num-partitions": 3, "memory": str(folder / f"node-{node}")}
            for node in range(3)
        }
        self._kept: dict[int, dict[str, bytes]] = {node: {} for node in self._configs}
        self._answers: dict[str, Packet] = {}
        self._sent = 0

    def nodes(self) -> dict[int, bytes]:
        return dict.fromkeys(self._configs, b"")

    def send(self, packets: Sequence[tuple[int, Packet]], seconds: float) -> list[str]:
        names = []
        for node, packet in packets:
            self._sent += 1
            names.append(str(self._sent))
            self._answers[names[-1]] = respond(packet, self._configs[node], self._kept[node])
        return names

    def collect(self, ids: Collection[str]) -> dict[str, Packet | str]:
        return {name: self._answers.pop(name) for name in ids if name in self._answers}


@dataclass(frozen=True)
class Case:
    """What is run into a folder, killed and resumed. `command` is a sweep or a tuning of the experiment."""

    engine: str
    feature: str
    experiment: Experiment
    ranks: int = 1
    command: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.engine}: {self.feature}"

    def play(self, path: Path, takes_up: bool) -> None:
        """Run the folder, or go on with it. A command goes on by `fedpara resume` first, if `takes_up`."""
        if self.engine == "flower":
            if not (path / "config.toml").exists():
                lay_out(self.experiment, path)
            resume(path, host=host_on(NodesHere(path.with_name(f"{path.name}-nodes")), Policy()))
            return
        if not self.command:
            resume(path) if (path / "config.toml").exists() else run(self.experiment, path)
            return
        config = path.with_name(f"{path.name}.toml")
        config.write_text(to_toml(self.experiment))
        if takes_up and any(path.rglob("config.toml")):
            cli.app(["resume", str(path)], standalone_mode=False)
        words = [*self.command[1:], "--config", str(config), "--out", str(path)]
        cli.app([self.command[0], *words], standalone_mode=False)


def _cases() -> Iterator[Case]:
    every = {name: Experiment(**{**SHORT, **fields}) for name, fields in FEATURES.items()}
    yield from (Case("sequential", name, experiment) for name, experiment in every.items())
    for name in BATCHED:
        yield Case("batched", name, replace(every[name], engine="batched"))
    for name in HOSTED:
        yield Case("flower", name, replace(every[name], engine="flower"))
    for name in RANKED:
        batched = name == "ditto"
        ranked = replace(every[name], engine="batched") if batched else every[name]
        yield Case("torchrun", f"{name}{', batched' * batched}", ranked, ranks=2)
    base = replace(every["scaffold, pfedpara, float16 up"], personal=False, scheme="fedpara", rounds=3)
    yield Case("command", "fedpara sweep", base, command=("sweep", "--set", "lr=0.02,0.05", "--seeds", "0-1"))
    words = ("--set", "lr=0.02,0.05", "--validation", "0.2", "--seeds", "100", "--final-seeds", "1-2")
    yield Case("command", "fedpara tune", base, command=("tune", *words))


CASES = {case.name: case for case in _cases()}
