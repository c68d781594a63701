"""The commands and their options, declared without the modules that do the work.

Parsing and help need no torch. A command imports its work, and torch with it, once its options are valid.
"""

from pathlib import Path
from typing import Annotated

import typer

from fedpara.apps.terminal.interrupt import starting
from fedpara.choices import (
    CLASSES,
    DATASETS,
    ENGINES,
    FORMATS,
    MODELS,
    PAPER_RESULTS,
    PAPER_RUNS,
    SPLITS,
)

Json = Annotated[bool, typer.Option("--json", help="The last line of stdout is one JSON object.")]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Where data sets lie; else FEDPARA_DATA, else the cache.")
]
Track = Annotated[str, typer.Option(help="Also log to tensorboard, mlflow or wandb.")]


def inspect(
    model: Annotated[str, typer.Argument(help="A model of the library, or package.module:function.")],
    scheme: Annotated[str, typer.Option(help="fedpara, pfedpara or lowrank.")] = "fedpara",
    gamma: Annotated[
        float | None, typer.Option(help="Between the smallest full rank (0) and dense size (1).")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="The inner rank, in place of gamma.")] = None,
    ratio: Annotated[float | None, typer.Option(help="Share of the dense parameters (lowrank).")] = None,
    nonlinearity: Annotated[str | None, typer.Option(help="tanh")] = None,
    conv: Annotated[str, typer.Option(help="tensor (Prop. 3) or reshape (Prop. 1).")] = "tensor",
    classes: Annotated[int, typer.Option(help="Classes of a library model.")] = 10,
    every: Annotated[
        bool, typer.Option("--every", help="Every weight, not only those of the model's rule.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Also weights that do not become smaller.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for programs.")] = False,
) -> None:
    """A table of layers: shape, scheme, rank, maximal rank, parameters, and totals.

    Example: fedpara inspect vgg16 --scheme fedpara --gamma 0.1 --classes 10
    """
    with starting():
        from fedpara.apps.inspect import inspect as work
    work(model, scheme, gamma, rank, ratio, nonlinearity, conv, classes, every, force, as_json)


def run(
    preset: Annotated[str | None, typer.Argument(help="A preset, such as quickstart.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file of fields; options given here win.")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(DATASETS)}; generated:NAME (a drawn one), hub:OWNER/NAME@REVISION"),
    ] = None,
    model: Annotated[str | None, typer.Option(help=", ".join(MODELS))] = None,
    scheme: Annotated[str | None, typer.Option(help="original, lowrank, fedpara, pfedpara")] = None,
    gamma: Annotated[
        float | None, typer.Option(help="Between the smallest full rank (0) and dense size (1).")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="The inner rank, in place of gamma.")] = None,
    nonlinearity: Annotated[str | None, typer.Option(help="tanh")] = None,
    init: Annotated[
        str | None, typer.Option(help="fan_out, calibrated, he, fit; he:1.4 is 1.4 times larger")
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="fedavg, fedprox, scaffold, feddyn, fedadam, ...")
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help="The algorithm's own: mu=0.1, alpha=0.1.")] = None,
    share: Annotated[
        str | None, typer.Option(help="all, fedper (all but the last layer), none (Local)")
    ] = None,
    split: Annotated[str | None, typer.Option(help=", ".join(SPLITS))] = None,
    alpha: Annotated[float | None, typer.Option(help="Of the Dirichlet splits.")] = None,
    clients: Annotated[int | None, typer.Option(help="Among which the examples are split.")] = None,
    cohort: Annotated[int | None, typer.Option(help="Clients a round.")] = None,
    rounds: int | None = None,
    epochs: Annotated[int | None, typer.Option(help="Local epochs a round.")] = None,
    steps: Annotated[int | None, typer.Option(help="Local steps a round, in place of epochs.")] = None,
    batch_size: int | None = None,
    lr: float | None = None,
    lr_decay: Annotated[float | None, typer.Option(help="A round.")] = None,
    momentum: float | None = None,
    weight_decay: float | None = None,
    clip: Annotated[float | None, typer.Option(help="Gradient norm.")] = None,
    jacobian: Annotated[float | None, typer.Option(help="lambda of the Jacobian correction.")] = None,
    augment: Annotated[str | None, typer.Option(help="none, crop-flip")] = None,
    validation: Annotated[
        float | None,
        typer.Option(
            help="Hold out this share of each client's examples, such as 0.1, and score them in place of the test set."
        ),
    ] = None,
    personal: Annotated[bool | None, typer.Option(help="Score each client's own model.")] = None,
    link_up: Annotated[str | None, typer.Option(help="float32, float16, bfloat16, int8")] = None,
    link_down: Annotated[str | None, typer.Option(help="The same.")] = None,
    target: Annotated[float | None, typer.Option(help="Stop at this accuracy, such as 0.8.")] = None,
    evaluate_every: Annotated[int | None, typer.Option(help="Rounds between evaluations.")] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="Of the updates in their mean: examples (each client's number), uniform"),
    ] = None,
    max_share: Annotated[
        float | None, typer.Option(help="The most of a round's weight that one client may have, such as 0.2.")
    ] = None,
    max_norm: Annotated[float | None, typer.Option(help="Refuse updates further away than this.")] = None,
    seed: int | None = None,
    engine: Annotated[str | None, typer.Option(help=", ".join(ENGINES))] = None,
    precision: Annotated[str | None, typer.Option(help="float32, tf32, bfloat16 (default on a GPU)")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; by default under runs/.")] = None,
    data_dir: DataDir = None,
    track: Track = "none",
    as_json: Json = False,
) -> None:
    """Run an experiment into a folder.

    Example: fedpara run --dataset digits --scheme fedpara --gamma 0.1 --rounds 20 --out runs/first
    """
    given = {name: value for name, value in locals().items() if value is not None}
    for name in ("preset", "config", "option", "out", "data_dir", "track", "as_json"):
        given.pop(name, None)
    with starting():
        from fedpara.apps.run import run as work
    work(preset, config, given, option, out, data_dir, track, as_json)


def resume(
    folder: Annotated[Path, typer.Argument(help="A run folder, or a folder of run folders.")],
    rounds: Annotated[int | None, typer.Option(help="Go on to this round instead.")] = None,
    engine: Annotated[str | None, typer.Option(help=", ".join(ENGINES))] = None,
    precision: Annotated[str | None, typer.Option(help="float32, tf32, bfloat16")] = None,
    data_dir: DataDir = None,
    track: Track = "none",
    as_json: Json = False,
) -> None:
    """Go on with a run where it stopped; with the same engine and precision and the same number of threads, to the same
    bits as if it had not.

    Example: fedpara resume runs/first
    """
    with starting():
        from fedpara.apps.run import resume as work
    work(folder, rounds, engine, precision, data_dir, track, as_json)


def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(help="Tables and figures by name; --list shows them.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="All names, with what they cost.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Repeats; else as many as the paper made.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds, in place of the paper's.")] = None,
    only: Annotated[
        str | None, typer.Option(help="Run only those whose name has this piece or fits this pattern.")
    ] = None,
    scale: Annotated[str, typer.Option(help="paper, or tiny: a miniature on generated data.")] = "paper",
    out: Annotated[Path, typer.Option(help="Where new run folders and the figure go.")] = PAPER_RUNS,
    results: Annotated[
        Path, typer.Option(help="Where finished runs are kept; they are not run again.")
    ] = PAPER_RESULTS,
    data_dir: DataDir = None,
    engine: Annotated[str | None, typer.Option(help=", ".join(ENGINES))] = None,
    precision: Annotated[str | None, typer.Option(help="float32, tf32, bfloat16 (default on a GPU)")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The last line of stdout is one JSON object.")
    ] = False,
) -> None:
    """Run what a table or figure of the paper needs, then print paper | ours and draw the figure.

    Runs that are there are skipped, those that were cut go on.

    Example: fedpara reproduce capacity-cnn --only cifar10-iid
    """
    with starting():
        from fedpara.apps.reproduce import reproduce as work
    work(names, list_, seeds, rounds, only, scale, out, results, data_dir, engine, precision, as_json)


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file, page.html unless told; for png and svg a folder, figures. An existing file is replaced "
            "if its ending is the format's. Nothing is written into a run folder."
        ),
    ] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help=", ".join(FORMATS) + "; else by the file's ending.")
    ] = None,
    scale: Annotated[
        str, typer.Option(help="paper, or tiny: hold miniatures against the paper's tables.")
    ] = "paper",
) -> None:
    """Everything the runs say: tables as paper | ours, and curves.

    Example: fedpara report results --out page.html
    """
    with starting():
        from fedpara.apps.report import report as work
    work(runs, out, format_, scale)


def export(
    source: Annotated[
        Path, typer.Argument(help="A run folder, or a .safetensors state saved by the library.")
    ],
    client: Annotated[
        int | None,
        typer.Option(
            help="Whose own model, of a run with private parts (pFedPara, FedPer, Local): what it keeps, in the "
            "shared part as averaged last. The next round begins with it, and `before` in metrics.jsonl scores such."
        ),
    ] = None,
    format: Annotated[str, typer.Option("--format", help="safetensors, onnx or pt2.")] = "safetensors",
    out: Annotated[Path | None, typer.Option(help="The file to write; by default beside the source.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="The model of a bare state: a name or package.module:function, which is imported and called. A "
            "function that only the file names never is."
        ),
    ] = None,
    classes: Annotated[
        int | None,
        typer.Option(help=f"Its classes, of a model of the library: {CLASSES} unless given."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="The shape of one example, such as 3,32,32: ONNX and pt2 trace with it."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Write the merged model: plain layers, no factors.

    Example: fedpara export runs/first --format onnx
    """
    with starting():
        from fedpara.apps.export import export as work
    work(source, client, format, out, model, classes, shape, overwrite, as_json)
