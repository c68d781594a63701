"""Accuracy on MNIST with user-level privacy: original weights, FedPara, and FedPara with one factor per round.

    python benchmarks/privacy.py --out DIR --data-dir DATA --jobs 2   on the CPU: 63 runs, a minute or two each
    python benchmarks/privacy.py --out DIR --smoke                    tiny, on generated data

For every epsilon the noise follows from the budget. A grid of learning rates and clips is tried at epsilon 4, and one
of rates without privacy, on examples that the clients hold out. All methods get the same trials. The best setting of
each then trains on all examples with other seeds, for every epsilon, and is scored on the test set after its last
round. Tuning is not part of epsilon.

The noise is seeded, so that the table can be repeated: epsilon is what the same runs cost with secret noise. Finished
runs are skipped, so an interrupted call continues where it stopped. The table is printed and written to DIR/table.md.
"""

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

from fedpara.apps.run import run_all
from fedpara.apps.studies.jobs import player
from fedpara.experiments import Experiment, Summary, read_run
from fedpara.experiments.build import build_model, build_scheme
from fedpara.experiments.studies.sweep import take_up
from fedpara.experiments.studies.tune import Play
from fedpara.privacy import noise_for

METHODS: dict[str, dict[str, object]] = {
    "original": {"scheme": "original"},
    "FedPara, all factors": {"scheme": "fedpara", "gamma": 0.1},
    "FedPara, one factor a round": {"scheme": "fedpara", "gamma": 0.1, "rotate": True},
}
DELTA = 1e-5
VALIDATION = 0.1


@dataclass(frozen=True)
class Plan:
    """What is compared. An epsilon of None is a run without privacy."""

    base: Experiment
    epsilons: tuple[float | None, ...] = (None, 2.0, 4.0, 8.0)
    tuned_at: float = 4.0  # the epsilon of the private trials
    lrs: tuple[float, ...] = (0.1, 0.3, 1.0)
    clips: tuple[float, ...] = (0.3, 1.0)
    seeds: int = 3

    def noise(self, epsilon: float) -> float:
        base = self.base
        return round(noise_for(epsilon, DELTA, base.cohort / base.clients, base.rounds) + 5e-4, 3)

    def experiment(self, method: str, epsilon: float | None, lr: float, clip: float, seed: int) -> Experiment:
        made = replace(self.base, **METHODS[method], lr=lr, seed=seed)  # type: ignore[arg-type]
        if epsilon is None:
            return made
        private = f"user(noise={self.noise(epsilon)}, clip={clip})"
        return replace(made, privacy=private, delta=DELTA, privacy_seed=seed)

    def tried(self, epsilon: float | None) -> float | None:
        """The epsilon of the trials that choose the setting."""
        return None if epsilon is None else self.tuned_at

    def trials(self, epsilon: float | None) -> list[tuple[float, float]]:
        """Pairs of a learning rate and a clip. Without privacy nothing is clipped."""
        return list(product(self.lrs, self.clips if epsilon is not None else self.clips[:1]))


def full(model: str, clients: int, cohort: int, rounds: int, seeds: int) -> Plan:
    base = Experiment(
        dataset="mnist",
        model=model,
        split="dirichlet",
        alpha=0.5,
        clients=clients,
        cohort=cohort,
        rounds=rounds,
        epochs=1,
        batch_size=10,
        sampler="poisson",
        weights="uniform",
        evaluate_every=rounds,
    )
    return Plan(base, seeds=seeds)


def smoke() -> Plan:
    plan = full("mlp", 40, 10, 3, 1)
    base = replace(plan.base, dataset="generated:mnist", engine="sequential", device="cpu")
    return replace(plan, base=base, epsilons=(None, 4.0, 8.0), lrs=(0.1,), clips=(0.3, 1.0))


def play_all(runs: dict[Path, Experiment], data_dir: Path | None, play: Play) -> None:
    """Carries out what is left of the runs. A learning rate that diverges loses, and the others go on."""
    finished = take_up(runs, data_dir)
    left = {str(path): path for path in runs if path not in finished}
    for name, error in play(left)[1].items() if left else ():
        print(f"{name}: {error}", flush=True)


def name_of(method: str, epsilon: float | None) -> str:
    words = method.replace(",", "").replace(" ", "-").lower()
    return f"{words}/epsilon-{'none' if epsilon is None else f'{epsilon:g}'}"


def tuned(plan: Plan, out: Path, data_dir: Path | None, play: Play) -> dict[str, tuple[float, float]]:
    """The best pair of each method, with and without privacy, on held-out examples of one seed."""
    folders: dict[str, dict[tuple[float, float], Path]] = {}
    runs: dict[Path, Experiment] = {}
    for method, epsilon in product(METHODS, (None, plan.tuned_at)):
        name = name_of(method, epsilon)
        for lr, clip in plan.trials(epsilon):
            path = out / "tuning" / name / f"lr={lr:g},clip={clip:g}"
            folders.setdefault(name, {})[lr, clip] = path
            runs[path] = replace(plan.experiment(method, epsilon, lr, clip, 0), validation=VALIDATION)
    play_all(runs, data_dir, play)
    return {
        name: max(paths, key=lambda pair, paths=paths: score(read_run(paths[pair])))  # type: ignore[misc]
        for name, paths in folders.items()
    }


def setting(
    plan: Plan, chosen: dict[str, tuple[float, float]], method: str, epsilon: float | None
) -> tuple[float, float]:
    """(lr, clip) of a method at an epsilon"""
    return chosen[name_of(method, plan.tried(epsilon))]


def score(run: Summary) -> float:
    return -1.0 if run.final is None else run.final


def compare(plan: Plan, out: Path, data_dir: Path | None, play: Play) -> str:
    chosen = tuned(plan, out, data_dir, play)
    folders: dict[str, list[Path]] = {}
    runs: dict[Path, Experiment] = {}
    for (method, epsilon), seed in product(product(METHODS, plan.epsilons), range(1, 1 + plan.seeds)):
        name = name_of(method, epsilon)
        path = out / "final" / name / f"seed={seed}"
        folders.setdefault(name, []).append(path)
        runs[path] = plan.experiment(method, epsilon, *setting(plan, chosen, method, epsilon), seed)
    play_all(runs, data_dir, play)
    found = {name: [read_run(path) for path in paths] for name, paths in folders.items()}
    return table(plan, found, chosen)


def table(plan: Plan, found: dict[str, list[Summary]], chosen: dict[str, tuple[float, float]]) -> str:
    heads = ["no privacy" if e is None else f"epsilon {e:g} (z {plan.noise(e)})" for e in plan.epsilons]
    lines = [
        f"{plan.base.clients} clients, cohort {plan.base.cohort}, {plan.base.rounds} rounds, delta {DELTA:g}, "
        f"{plan.base.model}; accuracy in %, {plan.seeds} seeds; in brackets the chosen lr and clip.",
        "",
        " | ".join(["| method", "numbers sent a round", *heads, ""]).rstrip(),
        "|---" * (2 + len(heads)) + "|",
    ]
    for method in METHODS:
        cells = []
        for epsilon in plan.epsilons:
            name = name_of(method, epsilon)
            lr, clip = setting(plan, chosen, method, epsilon)
            how = f"{lr:g}" if epsilon is None else f"{lr:g}, {clip:g}"
            cells.append(f"{spread(100 * score(run) for run in found[name])} ({how})")
        lines.append(" | ".join([f"| {method}", f"{sent(plan, method):,.0f}", *cells, ""]).rstrip())
    return "\n".join(lines)


def spread(values: Iterable[float]) -> str:
    some = list(values)
    return f"{fmean(some):.1f}" + (f" ± {stdev(some):.1f}" if len(some) > 1 else "")


def sent(plan: Plan, method: str) -> float:
    """The numbers that a client sends in a round, on average over the turns of a rotation."""
    experiment = plan.experiment(method, None, 0.1, 1.0, 0)
    model = build_model(experiment, 10, (1, 28, 28), build_scheme(experiment))
    whole = sum(parameter.numel() for parameter in model.parameters())
    if not experiment.rotate:
        return whole
    from fedpara.algorithms import fedavg
    from fedpara.engines.program import make_program
    from fedpara.engines.setup.rotation import make_rotation

    program = make_program(model)
    places = make_rotation(program, fedavg()).places
    return whole - sum(program.initial[name].numel() * (1 - 1 / k) for name, (_, k) in places.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--minutes", type=float, help="stop after this time; the same call continues")
    parser.add_argument("--model", default="fedpara.models:mlp(inputs=784, hidden=64)")
    parser.add_argument("--clients", type=int, default=2000)
    parser.add_argument("--cohort", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lrs", type=float, nargs="+", default=Plan.lrs)
    parser.add_argument("--clips", type=float, nargs="+", default=Plan.clips)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    plan = full(given.model, given.clients, given.cohort, given.rounds, given.seeds)
    plan = smoke() if given.smoke else replace(plan, lrs=tuple(given.lrs), clips=tuple(given.clips))
    with player(given.jobs, given.minutes, given.data_dir, engines={plan.base.engine}) as play:
        in_turn: Play = lambda paths: run_all(paths, given.data_dir, "none")  # noqa: E731
        made = compare(plan, given.out, given.data_dir, play or in_turn)
    (given.out / "table.md").write_text(made + "\n")
    print(made)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # also after --minutes
        sys.exit(130)
