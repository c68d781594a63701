"""What a prepared study costs, and which cells of the paper it fills."""

from collections.abc import Iterable
from typing import Any

from fedpara.experiments.config import Experiment
from fedpara.experiments.paper import STUDIES
from fedpara.experiments.paper.sizes import gpu_minutes
from fedpara.experiments.studies.tune import trial_runs
from fedpara.experiments.studies.tuned.plan import Plan


def cost(plan: Plan, seeds: int | None = None) -> dict[str, Any]:
    """The number of trials and of final runs, and the GPU minutes if each run has the GPU to itself."""
    trials = [e for tuning in plan.tunings for e in trial_runs(tuning.trials, tuning.seeds).values()]
    finals = [e for t in plan.tunings for e in t.methods.values() for _ in t.finals(seeds)]
    finals += [e for e in plan.reused for _ in plan.seeds[:seeds]]
    minutes = sum(map(gpu_minutes, (*trials, *finals)))
    return {
        "title": plan.title,
        "trials": len(trials),
        "final_runs": len(finals),
        "gpu_minutes": round(minutes, 1),
    }


def filled_cells(plans: Iterable[Plan]) -> list[tuple[str, str, str]]:
    """(study, row, column) of the paper's cells whose experiments are all among the final runs of these plans."""
    listed = list(plans)
    done: dict[str, int] = {}
    for experiment in (
        *(e for plan in listed for t in plan.tunings for e in t.filled.values()),
        *(e for plan in listed for e in plan.reused),
    ):
        done[experiment.identity] = max(experiment.rounds, done.get(experiment.identity, 0))

    def has(experiment: Experiment) -> bool:
        return done.get(experiment.identity, 0) >= experiment.rounds

    return [
        (study.name, cell.row, cell.column)
        for study in STUDIES.values()
        for cell in study.cells
        if cell.experiments and all(map(has, cell.experiments))
    ]
