"""`fedpara flower init` and `fedpara flower up`: an app folder, and a federation on this machine."""

import shlex
from pathlib import Path
from typing import Any

import typer

from fedpara.apps.flower.app_folder import write_app
from fedpara.apps.flower.processes import require
from fedpara.apps.flower.run_config import config_of, policy_of
from fedpara.apps.run import finish, one_experiment
from fedpara.apps.terminal.progress import Show, say
from fedpara.engines.progress import Schedule
from fedpara.errors import ConfigError, UsageError
from fedpara.experiments import Experiment, Summary, read_run
from fedpara.experiments.build import build
from fedpara.experiments.config_file import read_value
from fedpara.experiments.node_data import is_own
from fedpara.experiments.run import lay_out, rounds_done
from fedpara.experiments.storage.run_folder import refuse_another
from fedpara.source_files import portable_files

PLACES = ("partition-id", "num-partitions", "client", "clients", "memory")
"""Keys of a node's config that say which clients it serves and where it keeps their memory."""


def init(folder: Path, config: Path | None, fields: list[str]) -> None:
    experiment = one_experiment(None, config, dict(map(_field, fields)))
    write_app(folder, config_of(experiment), portable_files(experiment.references.values()))
    named = config is not None or bool(fields)
    example = "rounds=20" if named else 'preset="quickstart" rounds=20'
    place = shlex.quote(str(folder))
    typer.echo(f"{place}: flwr run {place} --run-config '{example}'")


def up(
    preset: str | None,
    config: Path | None,
    fields: list[str],
    nodes: int,
    node_config: str,
    out: Path,
    policy: dict[str, Any],
    data_dir: Path | None,
    as_json: bool,
) -> None:
    experiment = one_experiment(preset, config, {**dict(map(_field, fields)), "engine": "flower"})
    there = (out / "config.toml").exists()
    if there:
        refuse_another(out, experiment, free=("rounds", "engine"))
    data = build(experiment, data_dir).data
    if nodes > len(data):
        raise ConfigError(f"{nodes} nodes for {len(data)} clients: expected at most one node per client.")
    if is_own(experiment.dataset) and len(data) > nodes:
        raise ConfigError(
            f"{nodes} nodes bring the data of one client each, and clients is {len(data)}: set clients={nodes}."
        )
    # The server checks its policy too, but only once the federation is running.
    policy_of(policy).schedule(Schedule(experiment.rounds, len(data), experiment.cohort, data.size))
    require()
    _check_node_config(node_config)
    if not there:
        lay_out(experiment, out, data_dir=data_dir)
    elif _is_finished(out, experiment.rounds, data_dir):
        finish(out, {"flower": read_run(out)}, as_json)
        return
    with Show("flower", experiment.rounds) as show:
        summary = _federate(experiment, out, nodes, node_config, policy, data_dir, show)
    finish(out, {"flower": summary}, as_json)


def _check_node_config(text: str) -> None:
    """UsageError unless Flower can read it: a node would only write that to its log, and start again."""
    from click import ClickException
    from flwr.common.config import parse_config_args

    try:
        found = parse_config_args([text])
    except (ClickException, ValueError):
        found = {}
    if text and (not found or not found.keys().isdisjoint(PLACES)):
        raise UsageError(
            f"--node-config {text!r}: expected key=value pairs with quotes around text, such as "
            f"'folder=\"/data/site-{{node}}\"'. {', '.join(PLACES)} are set for each node."
        )


def _federate(
    experiment: Experiment,
    out: Path,
    nodes: int,
    node_config: str,
    policy: dict[str, Any],
    data_dir: Path | None,
    show: Show,
) -> Summary:
    from fedpara.apps.flower.federation import Federation
    from fedpara.apps.flower.node import RUNS
    from fedpara.apps.flower.processes import Processes
    from fedpara.apps.flower.simulation import follow

    given = {"out": str(out.absolute()), "rounds": experiment.rounds, **policy}
    env = {RUNS: str(out.absolute())}
    if data_dir is not None:
        given["data-dir"] = env["FEDPARA_DATA"] = str(data_dir.absolute())
    with Processes() as processes:
        sources = portable_files(experiment.references.values())
        federation = Federation(
            processes.folder(), nodes, processes, given, env, sources=sources, node_config=node_config
        )
        federation.start_link()
        federation.register()
        started = [federation.start_node(i) for i in range(nodes)]
        return follow(
            out,
            federation.submit(),
            federation.folder / "run.log",
            experiment.rounds,
            show,
            lambda: federation.restart_ended(started),
        )


def _is_finished(out: Path, rounds: int, data_dir: Path | None) -> bool:
    """Whether nothing is left to run. Raises errors here, because the server would only write them to Flower's log."""
    done, finished = rounds_done(out, rounds, "flower", None, data_dir)
    if finished:
        say(f"{out} already holds this experiment, finished after round {done}: nothing to run.")
    else:
        say(f"{out} already holds this experiment up to round {done}: resuming to round {rounds}.")
    return finished


def _field(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set {text!r}: expected name=value, such as rounds=3.")
    return name.strip(), read_value(value)
