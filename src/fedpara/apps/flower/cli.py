"""`fedpara flower`: an app for `flwr run`, certificates, a federation on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from fedpara.apps.terminal.interrupt import starting
from fedpara.apps.terminal.plain_help import PlainGroup
from fedpara.choices import DEADLINE, MIN_REPLIES, OVERSAMPLE

app = typer.Typer(
    cls=PlainGroup,
    help="Flower: real federations over TLS, with node keys.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    config: Annotated[Path | None, typer.Option(help="A TOML file of fields.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A field, such as model=mypkg:unet; repeatable. Modules that fields name are copied into the app.",
        ),
    ] = None,
) -> None:
    """Write the app folder that `flwr run` takes.

    Example: fedpara flower init my-federation --set model=mlp --set rounds=20
    """
    with starting():
        from fedpara.apps.flower.up import init as work
    work(folder, config, set_ or [])


@app.command()
def certs(
    folder: Annotated[Path, typer.Argument(help="Folder for the files.")],
    host: Annotated[
        list[str], typer.Option(help="Name or address by which nodes reach the server; repeatable.")
    ],
    nodes: Annotated[int, typer.Option(min=1, help="Number of node keys.")] = 3,
) -> None:
    """Make a CA, a server certificate and node keys. Existing files are not overwritten.

    Example: fedpara flower certs certificates --host fl.example.org --host 10.0.0.5 --nodes 3
    """
    with starting():
        from fedpara.apps.flower.certificates import PUBLIC, make_certificates

    for path in make_certificates(folder, host, nodes):
        typer.echo(f"{path}{'' if path.suffix in PUBLIC else '  private'}")


@app.command()
def up(
    preset: Annotated[str | None, typer.Argument(help="A preset with a single run.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file of fields.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A field, such as rounds=3; repeatable.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of SuperNodes, which share the clients.")] = 3,
    node_config: Annotated[
        str,
        typer.Option(
            help="Values for your data function, as in a SuperNode's --node-config; {node} is the node's number."
        ),
    ] = "",
    out: Annotated[Path, typer.Option(help="Run folder; a run of the same experiment is resumed.")] = Path(
        "runs/flower"
    ),
    deadline: Annotated[float, typer.Option(help="Seconds per round.")] = DEADLINE,
    min_replies: Annotated[int, typer.Option(help="Valid replies a round needs.")] = MIN_REPLIES,
    oversample: Annotated[int, typer.Option(help="Clients asked in addition to the cohort.")] = OVERSAMPLE,
    secure: Annotated[
        str | None,
        typer.Option(
            help="Secure aggregation, so that the server sees only sums: secagg, 'secagg(clip=0.5)'."
        ),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data sets.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")
    ] = False,
) -> None:
    """Run an experiment on a SuperLink and nodes on this machine, with TLS and node keys.

    Example: fedpara flower up --nodes 3 --set dataset=digits --set model=mlp --set clients=3 --set cohort=3
    """
    with starting():
        from fedpara.apps.flower.up import up as work
    policy = {"deadline": deadline, "min-replies": min_replies, "oversample": oversample}
    fields = [*(set_ or []), *([f"secure={secure}"] if secure else [])]
    work(preset, config, fields, nodes, node_config, out, policy, data_dir, as_json)
