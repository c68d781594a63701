"""fedpara flower: the app for `flwr run`, certificates, a federation on this machine."""

import shlex
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpara.apps.flower_processes import require
from fedpara.apps.flower_settings import difference, terms_of
from fedpara.apps.named_model import refuse_users
from fedpara.apps.plain_help import PlainGroup
from fedpara.apps.progress import Show, say
from fedpara.apps.run import finish
from fedpara.engines.loop import Schedule
from fedpara.engines.terms import Terms
from fedpara.errors import ConfigError, UsageError
from fedpara.experiments import Experiment, Summary, read_run
from fedpara.experiments.build import build
from fedpara.experiments.config import read_toml, with_values
from fedpara.experiments.presets import preset as find_preset
from fedpara.experiments.run import lay_out, look_over
from fedpara.experiments.summary import read_config

app = typer.Typer(
    cls=PlainGroup,
    help="Flower: real federations, over TLS, with node keys.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def init(folder: Annotated[Path, typer.Argument(help="A new folder.")]) -> None:
    """Write the folder that `flwr run` takes: the installed package is the app.

    Example: fedpara flower init my-federation
    """
    from fedpara.apps.flower_app import write_app

    write_app(folder)
    typer.echo(f"{folder}: flwr run {folder} --run-config 'preset=\"quickstart\" rounds=20'")


@app.command()
def certs(
    folder: Annotated[Path, typer.Argument(help="Where the files go.")],
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address of the server; several are fine.")
    ] = None,
    nodes: Annotated[int, typer.Option(help="How many node keys.")] = 3,
) -> None:
    """Make a CA, a server certificate and node keys. Nothing is overwritten.

    Example: fedpara flower certs certificates --host fl.example.org --host 10.0.0.5 --nodes 3
    """
    from fedpara.apps.flower_certs import PUBLIC, make_certificates

    for path in make_certificates(folder, host or [], nodes):
        typer.echo(f"{path}{'' if path.suffix in PUBLIC else '  private'}")


@app.command()
def up(
    preset: Annotated[str | None, typer.Argument(help="A preset of one run.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file of fields.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="A field: rounds=3, model=mlp.")] = None,
    nodes: Annotated[int, typer.Option(help="SuperNodes; each serves its share of the clients.")] = 3,
    out: Annotated[
        Path, typer.Option(help="The run's folder; one that holds this experiment is gone on with.")
    ] = Path("runs/flower"),
    deadline: Annotated[float, typer.Option(help="Seconds a round.")] = Terms.deadline,
    min_replies: Annotated[int, typer.Option(help="Good replies a round needs.")] = Terms.minimum,
    oversample: Annotated[int, typer.Option(help="Clients asked beyond the cohort.")] = Terms.oversample,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets lie.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The last line of stdout is one JSON object.")
    ] = False,
) -> None:
    """Start a SuperLink and nodes on loopback with TLS and node keys, run the experiment, stop them.

    Example: fedpara flower up --nodes 3 --set dataset=digits --set model=mlp --set clients=3 --set cohort=3
    """
    experiment = _experiment(preset, config, set_ or [])
    there = _refuse_another(out, experiment)
    if nodes < 1 or nodes > experiment.clients:
        raise ConfigError(f"{nodes} nodes for {experiment.clients} clients: expected 1 to as many.")
    # The server checks its terms too, but a federation would be up by then and the folder laid out.
    terms = {"deadline": deadline, "min-replies": min_replies, "oversample": oversample}
    granted = terms_of(terms)
    clients = len(build(experiment, data_dir).data)
    granted.schedule(Schedule(experiment.rounds, clients, experiment.cohort))
    require()
    if there is None:
        lay_out(experiment, out, data_dir=data_dir)
    elif _is_finished(out, experiment.rounds, data_dir):
        finish(out, {"flower": read_run(out)}, as_json)
        return
    with Show("flower", experiment.rounds) as show:
        summary = _federate(experiment, out, nodes, terms, data_dir, show)
    finish(out, {"flower": summary}, as_json)


def _federate(
    experiment: Experiment, out: Path, nodes: int, terms: dict[str, Any], data_dir: Path | None, show: Show
) -> Summary:
    from fedpara.apps.flower_drive import follow
    from fedpara.apps.flower_federation import Federation
    from fedpara.apps.flower_node import RUNS
    from fedpara.apps.flower_processes import Processes

    given = {"out": str(out.absolute()), "rounds": experiment.rounds, **terms}
    env = {RUNS: str(out.absolute())}
    if data_dir is not None:
        given["data-dir"] = env["FEDPARA_DATA"] = str(data_dir.absolute())
    with Processes() as processes:
        federation = Federation(processes.folder(), nodes, processes, given, env)
        federation.start_link()
        federation.register()
        for i in range(nodes):
            federation.start_node(i)
        submitted = federation.submit()
        return follow(out, submitted, federation.folder / "run.log", experiment.rounds, show, say)


def _is_finished(out: Path, rounds: int, data_dir: Path | None) -> bool:
    """Says so, or from where it goes on. What is wrong with the folder the server would say in Flower's own log."""
    done, finished = look_over(out, rounds, "flower", None, data_dir)
    if finished:
        say(f"{out} holds this experiment already, finished after round {done}: nothing is run.")
    else:
        say(f"{out} holds this experiment already, up to round {done}: going on to {rounds}.")
    return finished


def _refuse_another(out: Path, experiment: Experiment) -> Experiment | None:
    """What `out` holds; ConfigError where it is another experiment, but for its rounds."""
    if not (out / "config.toml").exists():
        return None
    there = read_config(out)
    told = difference(there, experiment)
    if told:
        words = ["fedpara", "flower", "up", "--config", str(out / "config.toml"), "--out", str(out)]
        raise ConfigError(
            f"{out} holds a run of another experiment, and nothing is overwritten: {told}. Choose another --out; or go "
            f"on with that one: {shlex.join(words)}."
        )
    return there


def _experiment(preset: str | None, config: Path | None, said: list[str]) -> Experiment:
    given = {**dict(_field(text) for text in said), "engine": "flower"}
    refuse_users(given)
    if preset is None:
        return with_values(read_toml(config) if config else Experiment(), given)
    if config is not None:
        raise UsageError("give a preset or a --config, not both: a preset is a config of its own.")
    runs = find_preset(preset).runs
    if len(runs) > 1:
        raise UsageError(
            f"{preset} is {len(runs)} runs ({', '.join(runs)}), and a federation runs one: write one of them as a "
            "--config, or use `flwr run` on the folder that `fedpara flower init` writes."
        )
    return with_values(next(iter(runs.values())), given)


def _field(text: str) -> tuple[str, Any]:
    """name=value; a value that is no TOML is a text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set {text!r}: expected name=value, such as rounds=3.")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value
