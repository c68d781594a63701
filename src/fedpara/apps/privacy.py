"""The work of `fedpara privacy`: which noise a budget needs, and what a run costs."""

import json
from typing import Any

import typer

from fedpara.algorithms.local import COUNT, POSITIVE, check
from fedpara.apps.terminal.table import empty_table, print_table
from fedpara.errors import ConfigError, UsageError
from fedpara.privacy import epsilon as spent
from fedpara.privacy import epsilon_rdp, noise_for, rounds_within
from fedpara.privacy.accountant import default_delta
from fedpara.privacy.kinds import check_noise
from fedpara.privacy.spending import delta_in_words


def privacy(
    clients: int,
    cohort: int,
    rounds: int,
    epsilon: float | None,
    noise: float | None,
    delta: float | None,
    as_json: bool,
) -> None:
    found = plan(clients, cohort, rounds, epsilon, noise, delta)
    if as_json:
        typer.echo(json.dumps(found))
        return
    z = found["noise"]
    table = empty_table(["rounds"], ["epsilon (PLD)", "epsilon (RDP)"])
    for line in found["costs"]:
        table.add_row(str(line["rounds"]), f"{line['epsilon']:.3f}", f"{line['epsilon_rdp']:.3f}")
    print_table(table)
    if noise is None:
        typer.echo(
            f"noise {z:.4g} keeps {rounds} rounds within epsilon {epsilon:g} at delta {found['delta']:.3g}"
            + delta_in_words(found["delta"])
        )
    elif epsilon is not None:
        some = found["affordable"]
        typer.echo(
            f"epsilon {epsilon:g} at delta {found['delta']:.3g} lasts for {some} rounds"
            + (" or more" if some == rounds else "")
        )
        if not some:
            return
    typer.echo(
        f"the mean update gets noise of standard deviation {z / cohort:.3g} * clip in every coordinate"
    )
    typer.echo(
        f"run it: fedpara run --privacy 'user(noise={z:.4g}, clip=0.5)' --delta {found['delta']:.3g} --sampler poisson "
        f"--weights uniform --clients {clients} --cohort {cohort} --rounds {rounds}"
        + (f" --epsilon {epsilon:g}" if epsilon is not None else "")
    )


def plan(
    clients: int, cohort: int, rounds: int, epsilon: float | None, noise: float | None, delta: float | None
) -> dict[str, Any]:
    """The noise, and the cost after a quarter, half and all of the rounds."""
    check(COUNT, clients=clients, cohort=cohort, rounds=rounds)
    check(POSITIVE, epsilon=epsilon, delta=delta)
    if noise is not None:
        check_noise(noise, "--noise")
    if cohort > clients:
        raise ConfigError(f"a cohort of {cohort} from {clients} clients: choose a smaller cohort.")
    if epsilon is None and noise is None:
        raise UsageError("give --epsilon to compute the noise, or --noise to compute its cost.")
    delta, sampling = default_delta(clients) if delta is None else delta, cohort / clients
    if not delta < 1:
        raise ConfigError(f"delta is {delta}: expected a number above 0 and below 1.")
    z = noise
    if z is None:
        assert epsilon is not None
        z = round(noise_for(epsilon, delta, sampling, rounds) + 5e-5, 4)
    found: dict[str, Any] = {"noise": z, "delta": delta, "sampling": sampling, "rounds": rounds}
    if epsilon is not None:
        found["affordable"] = rounds_within(z, sampling, epsilon, delta, rounds)
    found["costs"] = [
        {
            "rounds": t,
            "epsilon": spent(z, sampling, t, delta),
            "epsilon_rdp": epsilon_rdp(z, sampling, t, delta),
        }
        for t in sorted({1, -(-rounds // 4), -(-rounds // 2), rounds})
    ]
    return found
