"""The commands and their options, declared without the modules that do the work.

Help and parsing work without torch. A command imports its work, and torch, once its options are valid.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from fedpara.apps.terminal.interrupt import starting
from fedpara.choices import (
    ATTACKS,
    CLASSES,
    DATASETS,
    DEFAULTS,
    DEFENCES,
    ENGINES,
    LOSSES,
    METRICS,
    MODELS,
    REFERENCE,
    SAMPLERS,
    SCHEMES,
    SPLITS,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Folder of the data sets; default: FEDPARA_DATA, then the cache."),
]
Track = Annotated[str, typer.Option(help="Also log to tensorboard, mlflow or wandb.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; default: the GPU if there is one.")]


def inspect(
    model: Annotated[str, typer.Argument(help="A library model, or package.module:function.")],
    scheme: Annotated[str, typer.Option(help=", ".join(SCHEMES[1:]))] = "fedpara",
    gamma: Annotated[
        float | None, typer.Option(help="Size: from the smallest full rank (0) to dense (1).")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Inner rank, instead of gamma.")] = None,
    ratio: Annotated[
        float | None, typer.Option(help="Share of the dense parameters to keep (lowrank).")
    ] = None,
    nonlinearity: Annotated[str | None, typer.Option(help="Applied to each factor product: tanh.")] = None,
    conv: Annotated[
        str, typer.Option(help="Convolutions: tensor (Prop. 3) or reshape (Prop. 1).")
    ] = "tensor",
    classes: Annotated[
        int | None, typer.Option(help=f"Number of classes; default: {CLASSES}, or that of your function.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--every", help="Factorize every weight, not only those the model's rule selects.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also factorize weights that do not get smaller.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show each layer's shape, scheme, rank, maximal rank and parameters, and the totals.

    Example: fedpara inspect vgg16 --scheme fedpara --gamma 0.1 --classes 10
    """
    with starting():
        from fedpara.apps.inspect import inspect as work
    work(model, scheme, gamma, rank, ratio, nonlinearity, conv, classes, every, force, as_json)


def privacy(
    clients: Annotated[int, typer.Option(help="Number of clients, N.")],
    cohort: Annotated[int, typer.Option(help="Expected clients per round, q N.")],
    rounds: Annotated[int, typer.Option(help="Number of rounds.")],
    epsilon: Annotated[float | None, typer.Option(help="Budget: compute the noise that it needs.")] = None,
    noise: Annotated[
        float | None, typer.Option(help="Noise multiplier: compute its cost, or how long a budget lasts.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Delta; default: N^-1.1.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compute the noise that a privacy budget needs, and what a run with user-level privacy costs.

    Example: fedpara privacy --epsilon 4 --delta 1e-6 --clients 1000 --cohort 100 --rounds 200
    """
    with starting():
        from fedpara.apps.privacy import privacy as work
    work(clients, cohort, rounds, epsilon, noise, delta, as_json)


def _show_defaults(command: Callable[..., Any]) -> Callable[..., Any]:
    """Show the default of each field in the help. The option has none: a preset or config may set the field."""
    for name, hint in get_type_hints(command, include_extras=True).items():
        if name in DEFAULTS:
            option = hint.__metadata__[0]
            option.help = f"{option.help}  [default: {DEFAULTS[name]}]"
    return command


@_show_defaults
def run(
    preset: Annotated[str | None, typer.Argument(help="A preset, such as quickstart.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file of fields; command-line options override it.")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(DATASETS)}; generated:NAME (synthetic), hub:OWNER/NAME@REVISION; or {REFERENCE}"
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help=f"{', '.join(MODELS)}; or {REFERENCE}, such as mypkg:unet(width=32)")
    ] = None,
    scheme: Annotated[str | None, typer.Option(help=", ".join(SCHEMES))] = None,
    gamma: Annotated[
        float | None, typer.Option(help="Size: from the smallest full rank (0) to dense (1).")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Inner rank, instead of gamma.")] = None,
    ratio: Annotated[
        float | None,
        typer.Option(help="Share of the dense parameters, instead of gamma: low-rank and Kronecker schemes."),
    ] = None,
    nonlinearity: Annotated[str | None, typer.Option(help="Applied to each factor product: tanh.")] = None,
    init: Annotated[
        str | None, typer.Option(help="fan_out, calibrated, he, fit; he:1.4 scales by 1.4")
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            help=f"Weights to factorize: every, inner, early, hybrid:N, all but NAMES, or a rule {REFERENCE}."
        ),
    ] = None,
    onto: Annotated[
        str | None, typer.Option(help="frozen: train factors as adapters on the model's own frozen weights.")
    ] = None,
    adapter_alpha: Annotated[float | None, typer.Option(help="Scale of the adapters: alpha / rank.")] = None,
    train: Annotated[
        str | None, typer.Option(help="What else trains beside adapters, such as 'classifier, bias'.")
    ] = None,
    loss: Annotated[str | None, typer.Option(help=f"{', '.join(LOSSES)}; or {REFERENCE}")] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(METRICS)}; or {REFERENCE}; repeatable, the first is the primary one."),
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help=f"fedavg, fedprox, scaffold, feddyn, fedadam, ...; or {REFERENCE}")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="An option of the algorithm, such as mu=0.1; repeatable.")
    ] = None,
    share: Annotated[
        str | None,
        typer.Option(
            help="all, fedper (all but the layer registered last), none (Local), or 'all but head, norm1'."
        ),
    ] = None,
    split: Annotated[str | None, typer.Option(help=f"{', '.join(SPLITS)}; or {REFERENCE}")] = None,
    alpha: Annotated[float | None, typer.Option(help="Concentration of the Dirichlet splits.")] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    cohort: Annotated[int | None, typer.Option(help="Clients per round.")] = None,
    sampler: Annotated[
        str | None, typer.Option(help=f"Who takes part: {', '.join(SAMPLERS)}; or {REFERENCE}")
    ] = None,
    lost: Annotated[
        float | None, typer.Option(help="Probability that a chosen client is lost in a round, such as 0.3.")
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(help="Bytes per second of a client, for a simulated clock: 5e6, lognormal(5e6, 0.5)."),
    ] = None,
    speed: Annotated[
        str | None, typer.Option(help="Local steps per second of a client, for the same clock.")
    ] = None,
    device_deadline: Annotated[
        float | None, typer.Option(help="Simulated seconds that a round waits for its clients.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Local epochs per round.")] = None,
    steps: Annotated[int | None, typer.Option(help="Local steps per round, instead of epochs.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples per local step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Local learning rate.")] = None,
    lr_decay: Annotated[float | None, typer.Option(help="Factor on the learning rate per round.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum of sgd.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay of the local optimizer.")] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help=f"Local optimizer: sgd, adam, adamw, 'adamw(betas=(0.9, 0.95))'; or {REFERENCE}"),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="Schedule of the learning rate: 'cosine(warmup=5)', linear, constant, 'step_decay(every=30)'; or "
            f"{REFERENCE}"
        ),
    ] = None,
    keep_optimizer: Annotated[
        bool | None, typer.Option(help="Keep the optimizer's state on the client between rounds.")
    ] = None,
    clip: Annotated[float | None, typer.Option(help="Largest gradient norm.")] = None,
    jacobian: Annotated[
        float | None, typer.Option(help="Weight (lambda) of the Jacobian correction.")
    ] = None,
    augment: Annotated[str | None, typer.Option(help="none, crop-flip")] = None,
    validation: Annotated[
        float | None,
        typer.Option(
            help="Hold out this share of each client's examples, such as 0.1, and score those instead of the test set."
        ),
    ] = None,
    personal: Annotated[bool | None, typer.Option(help="Score each client's own model.")] = None,
    link_up: Annotated[
        str | None,
        typer.Option(
            help="Encoding of uploads: float32, float16, bfloat16, int8, int4, int2, ternary, sign, topk(0.01), "
            "stc(0.01), eden, grid(0.5), powersgd; with error feedback: topk(0.01, feedback=True)."
        ),
    ] = None,
    link_down: Annotated[
        str | None,
        typer.Option(
            help="Encoding of downloads: the same choices. Below 8 bits the server sends differences. "
            "Of those tried on CIFAR-10, grid(0.25) was best, and grid(0.125, halve=86) on uneven clients."
        ),
    ] = None,
    secure: Annotated[
        str | None,
        typer.Option(
            help="Secure aggregation, so that the server sees only sums: secagg, 'secagg(clip=0.5)'."
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Stop when the primary metric reaches this, such as an accuracy of 0.8."),
    ] = None,
    patience: Annotated[
        int | None, typer.Option(help="Stop after this many evaluations without a better score.")
    ] = None,
    evaluate_every: Annotated[int | None, typer.Option(help="Rounds between evaluations.")] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="How updates are weighted: examples (by each client's number), uniform."),
    ] = None,
    max_share: Annotated[
        float | None,
        typer.Option(help="The largest share of a round's weight one client may have, such as 0.2."),
    ] = None,
    max_norm: Annotated[
        float | None, typer.Option(help="Reject updates further than this from the model.")
    ] = None,
    gammas: Annotated[
        str | None,
        typer.Option(help='A gamma per client, such as "0.1, 0.3, 0.5": client i has number i mod 3.'),
    ] = None,
    products: Annotated[
        str | None,
        typer.Option(
            help="How factors are averaged: mean, or refit (factors nearest to the mean of the composed weights)."
        ),
    ] = None,
    aggregation_error: Annotated[
        bool | None,
        typer.Option(help="Measure how far the mean of factors is from the mean of weights, per round."),
    ] = None,
    robust: Annotated[
        str | None,
        typer.Option(help=f"Defence against hostile clients: {', '.join(DEFENCES)}; or {REFERENCE}"),
    ] = None,
    attack: Annotated[
        str | None,
        typer.Option(help=f"What simulated hostile clients do: {', '.join(ATTACKS)}; or {REFERENCE}"),
    ] = None,
    hostile: Annotated[
        float | None, typer.Option(help="Share of the clients that are hostile, such as 0.2.")
    ] = None,
    rotate: Annotated[
        bool | None, typer.Option(help="Train and send one factor of every weight per round, in turn.")
    ] = None,
    fold_every: Annotated[
        int | None,
        typer.Option(help="Rounds after which adapters add their change to their base and start again."),
    ] = None,
    recycle: Annotated[
        int | None,
        typer.Option(
            help="Layers per round that clients do not send; the server repeats its last update of them."
        ),
    ] = None,
    privacy: Annotated[
        str | None,
        typer.Option(
            help="'user(noise=1.1, clip=0.5)' or 'example(noise=1, clip=1)'. `fedpara privacy` computes the noise."
        ),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Privacy budget: stop before a round that would exceed it.")
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(
            help="Delta of every epsilon; default: N^-1.1 for N clients, or examples for example-level privacy."
        ),
    ] = None,
    privacy_seed: Annotated[
        int | None,
        typer.Option(help="Draw the noise from this seed, for tests: the run is then not private."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every random draw.")] = None,
    engine: Annotated[str | None, typer.Option(help=", ".join(ENGINES))] = None,
    precision: Annotated[str | None, typer.Option(help="float32, tf32, bfloat16 (default on a GPU)")] = None,
    device: Device = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default: a new one under runs/.")] = None,
    data_dir: DataDir = None,
    track: Track = "none",
    as_json: Json = False,
) -> None:
    """Run an experiment and save it in a run folder.

    Example: fedpara run --dataset digits --scheme fedpara --gamma 0.1 --rounds 20 --out runs/first
    """
    given = {name: value for name, value in locals().items() if value is not None}
    for name in ("preset", "config", "option", "out", "data_dir", "track", "as_json"):
        given.pop(name, None)
    if metric:
        given["metrics"] = ", ".join(given.pop("metric"))
    with starting():
        from fedpara.apps.run import run as work
    work(preset, config, given, option, out, data_dir, track, as_json)


def resume(
    folder: Annotated[Path, typer.Argument(help="A run folder, or a folder of run folders.")],
    rounds: Annotated[int | None, typer.Option(help="Run up to this round instead.")] = None,
    engine: Annotated[str | None, typer.Option(help=", ".join(ENGINES))] = None,
    precision: Annotated[str | None, typer.Option(help="float32, tf32, bfloat16")] = None,
    device: Device = None,
    data_dir: DataDir = None,
    track: Track = "none",
    as_json: Json = False,
) -> None:
    """Resume a run, or every run in a folder.

    With the same engine, precision and thread count, the result equals that of an uninterrupted run, bit for bit.

    Example: fedpara resume runs/first
    """
    with starting():
        from fedpara.apps.run import resume as work
    work(folder, rounds, engine, precision, device, data_dir, track, as_json)
