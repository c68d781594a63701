"""The commands that run several experiments, and their options."""

from pathlib import Path
from typing import Annotated

import typer

from fedpara.apps.commands import DataDir, Device, Json, Track
from fedpara.apps.terminal.interrupt import starting
from fedpara.choices import (
    ENGINES,
    FRONTIER_RUNS,
    PAPER_RESULTS,
    PAPER_RUNS,
    RESULTS,
    ROBUSTNESS,
    TUNED,
    TUNED_RUNS,
)
from fedpara.errors import ConfigError, UsageError

Jobs = Annotated[int, typer.Option(min=1, help="Number of runs in processes side by side.")]
Minutes = Annotated[
    float | None,
    typer.Option(min=0, help="Interrupt the runs after so many minutes; the same command continues."),
]

PAPER, PREPARED = "a study of the paper", f"{TUNED}*"
TAKEN_BY = {
    **dict.fromkeys(("attack", "defence", "first_seed", "part"), ("robustness",)),
    "validation": ("robustness", "frontier", "fedmud"),
    "configs": ("frontier", "fedmud"),
    "list": ("frontier", PAPER),
    **dict.fromkeys(
        ("only", "engine", "precision", "keep", "jobs", "minutes"), ("frontier", "fedmud", PAPER, PREPARED)
    ),
    "rounds": ("robustness", "frontier", "fedmud", PAPER),
}
"""The studies that read each option of `reproduce`."""


def sweep(
    preset: Annotated[str | None, typer.Argument(help="A preset with a single run.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file of fields; the values of --set override it.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A field and its values, such as lr=0.02,0.1; repeatable. options.mu=0.1,1 varies an option of the "
            "algorithm.",
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds, such as 0-4 or 0,2,5; default: the experiment's.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the run folders.")] = Path("runs/sweep"),
    data_dir: DataDir = None,
    track: Track = "none",
    jobs: Jobs = 1,
    minutes: Minutes = None,
    as_json: Json = False,
) -> None:
    """Run every combination of some values and seeds, and compare the settings in a table.

    The same command resumes interrupted runs and skips finished ones.

    Example: fedpara sweep --config base.toml --set lr=0.02,0.1 --set scheme=fedpara,lowrank --seeds 0-4
    """
    with starting():
        from fedpara.apps.studies.sweep import sweep as work
    work(preset, config, set_ or [], seeds, out, data_dir, track, jobs, minutes, as_json)


def tune(
    preset: Annotated[
        str | None, typer.Argument(help="A preset. If it has several runs, each is a method.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file of fields; --method and --set override it.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="A method and its fields, such as fedpara:scheme=fedpara,gamma=0.1; repeatable. Default: one method, "
            "the config."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A field and the values to try, such as lr=0.02,0.1; repeatable. fedpara:init=he:1,he:2 are values "
            "for one method.",
        ),
    ] = None,
    one_at_a_time: Annotated[
        bool,
        typer.Option(
            "--one-at-a-time", help="Try the config and each value alone; default: all combinations."
        ),
    ] = False,
    validation: Annotated[
        float | None,
        typer.Option(help="Fraction of each client's examples to hold out; default: the config's, or 0.1."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds of a trial; default: the config's.")
    ] = None,
    seeds: Annotated[
        str, typer.Option("--seeds", "--seed", help="Seeds of the trials, such as 100 or 100-102.")
    ] = "100",
    final_seeds: Annotated[
        str | None,
        typer.Option(help="Seeds of the final runs, such as 1-3; default: no final runs."),
    ] = None,
    final_rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds of a final run; default: the config's.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the trials and final runs.")] = Path("runs/tune"),
    data_dir: DataDir = None,
    track: Track = "none",
    jobs: Jobs = 1,
    minutes: Minutes = None,
    as_json: Json = False,
) -> None:
    """Choose the best of some settings by validation, and score it on the test set with other seeds.

    Every method gets the same number of trials. The same command resumes interrupted runs and skips finished ones.

    Example: fedpara tune --config base.toml --method original:scheme=original --method fedpara:scheme=fedpara
    --set lr=0.05,0.1,0.2 --rounds 60 --final-seeds 1-3 --final-rounds 200
    """
    with starting():
        from fedpara.apps.studies.tune import tune as work
    work(
        preset,
        config,
        method or [],
        set_ or [],
        one_at_a_time,
        validation,
        rounds,
        seeds,
        final_seeds,
        final_rounds,
        out,
        data_dir,
        track,
        jobs,
        minutes,
        as_json,
    )


def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of tables and figures; --list shows them.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List all names and what they cost.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds; default: the paper's.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Number of rounds; default: the paper's.")] = None,
    only: Annotated[
        str | None, typer.Option(help="Run only runs whose name contains this text or matches this pattern.")
    ] = None,
    scale: Annotated[str, typer.Option(help="paper, or tiny (a miniature on generated data).")] = "paper",
    out: Annotated[Path, typer.Option(help="Folder for new run folders and the figure.")] = PAPER_RUNS,
    results: Annotated[
        Path, typer.Option(help="Folder of finished runs, which are not repeated.")
    ] = PAPER_RESULTS,
    data_dir: DataDir = None,
    engine: Annotated[str | None, typer.Option(help=", ".join(ENGINES))] = None,
    precision: Annotated[str | None, typer.Option(help="float32, tf32, bfloat16 (default on a GPU)")] = None,
    device: Device = None,
    keep: Annotated[
        Path | None,
        typer.Option(help="Copy every finished run here, without checkpoints and client memories."),
    ] = None,
    attack: Annotated[
        list[str] | None, typer.Option(help="robustness: run only this attack; may be repeated.")
    ] = None,
    defence: Annotated[
        list[str] | None,
        typer.Option(help="robustness: run only this defence, none or auto; may be repeated."),
    ] = None,
    first_seed: Annotated[int | None, typer.Option(min=0, help="robustness: the first seed.")] = None,
    validation: Annotated[
        bool,
        typer.Option(
            "--validation",
            help="robustness, frontier, fedmud: the trials, scored on held-out training examples.",
        ),
    ] = False,
    part: Annotated[
        str,
        typer.Option(help="robustness: write to a file of this part; other processes may use the folder."),
    ] = "",
    configs: Annotated[
        Path | None,
        typer.Option(
            help="frontier, fedmud: write the config of every missing run here and print its command."
        ),
    ] = None,
    jobs: Jobs = 1,
    minutes: Minutes = None,
    as_json: Json = False,
) -> None:
    """Run what a table or figure of the paper needs, print paper | ours, and draw the figure.

    Names that begin with tuned- are prepared studies: settings are chosen by validation, and final runs fill the
    tables of `fedpara report results`. --seeds limits the final seeds, and --only selects parts.

    Other names: robustness, the table of attacks and defences; frontier, accuracy against bytes; fedmud, FedMUD's
    protocol. Their scales are digits and cifar10; frontier also has cifar10-noniid and cifar100-noniid, and their
    links are chosen by the longer trials of cifar10-noniid-links and cifar100-noniid-links.

    Finished runs are skipped; interrupted runs are resumed.

    Example: fedpara reproduce capacity-cnn --only cifar10-iid
    """
    prepared = [name for name in names or [] if name.startswith(TUNED)]
    if prepared and len(prepared) < len(names or []):
        raise UsageError(f"{prepared[0]} is a prepared study: name it in a command without other studies.")
    study = names[0] if names in (["robustness"], ["frontier"], ["fedmud"]) else PAPER
    _refuse_ignored(
        PREPARED if prepared else study,
        rounds=rounds,
        attack=attack,
        defence=defence,
        first_seed=first_seed,
        part=part,
        validation=validation,
        configs=configs,
        only=only,
        list=list_,
        engine=engine,
        precision=precision,
        keep=keep,
        jobs=jobs if jobs > 1 else None,
        minutes=minutes,
    )
    if names == ["robustness"]:
        with starting():
            from fedpara.apps.studies.robustness import robustness
        robustness(
            scale,
            seeds,
            first_seed,
            rounds,
            attack or [],
            defence or [],
            validation,
            part,
            device,
            ROBUSTNESS if out == PAPER_RUNS else out,
            data_dir,
            as_json,
        )
        return
    if names in (["frontier"], ["fedmud"]):
        with starting():
            from fedpara.apps.studies.frontier import frontier
        frontier(
            names[0],
            "digits" if scale == "paper" else scale,
            "validation" if validation else "test",
            list_,
            seeds,
            rounds,
            only,
            FRONTIER_RUNS if out == PAPER_RUNS else out,
            RESULTS if results == PAPER_RESULTS else results,
            data_dir,
            {"engine": engine, "precision": precision, "device": device},
            keep,
            configs,
            jobs,
            minutes,
            as_json,
        )
        return
    given = {"engine": engine, "precision": precision, "device": device}
    if prepared:
        with starting():
            from fedpara.apps.studies.tuned import Place, tuned
        place = Place(
            TUNED_RUNS if out == PAPER_RUNS else out,
            RESULTS if results == PAPER_RESULTS else results,
            keep,
            data_dir,
        )
        tuned(prepared, seeds, only, scale, place, given, jobs, minutes, as_json)
        return
    with starting():
        from fedpara.apps.studies.reproduce import reproduce as work
    work(
        names, list_, seeds, rounds, only, scale, out, results, data_dir, given, keep, jobs, minutes, as_json
    )


def _refuse_ignored(study: str, **options: object) -> None:
    """ConfigError for an option that the study would ignore."""
    for name, value in options.items():
        takers = TAKEN_BY[name]
        given = value is not None and value is not False and value != ""
        if given and study not in takers:
            raise ConfigError(f"--{name.replace('_', '-')} is for {' or '.join(takers)}: leave it out.")
