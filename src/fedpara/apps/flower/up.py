"""The work of `fedpara flower up`: a federation on this machine."""

import shlex
import tomllib
from pathlib import Path
from typing import Any

from fedpara.apps.flower.processes import require
from fedpara.apps.flower.run_config import difference, policy_of
from fedpara.apps.named_model import refuse_users
from fedpara.apps.run import finish
from fedpara.apps.terminal.progress import Show, say
from fedpara.engines.progress import Schedule
from fedpara.errors import ConfigError, UsageError
from fedpara.experiments import Experiment, Summary, read_run
from fedpara.experiments.build import build
from fedpara.experiments.config import read_toml, with_values
from fedpara.experiments.presets import preset as find_preset
from fedpara.experiments.run import lay_out, look_over
from fedpara.experiments.storage.summary import read_config


def up(
    preset: str | None,
    config: Path | None,
    said: list[str],
    nodes: int,
    out: Path,
    policy: dict[str, Any],
    data_dir: Path | None,
    as_json: bool,
) -> None:
    experiment = _experiment(preset, config, said)
    there = _refuse_another(out, experiment)
    if nodes < 1 or nodes > experiment.clients:
        raise ConfigError(f"{nodes} nodes for {experiment.clients} clients: expected 1 to as many.")
    # The server checks its policy too, but a federation would be up by then and the folder laid out.
    policy_ = policy_of(policy)
    data = build(experiment, data_dir).data
    policy_.schedule(Schedule(experiment.rounds, len(data), experiment.cohort, data.size))
    require()
    if there is None:
        lay_out(experiment, out, data_dir=data_dir)
    elif _is_finished(out, experiment.rounds, data_dir):
        finish(out, {"flower": read_run(out)}, as_json)
        return
    with Show("flower", experiment.rounds) as show:
        summary = _federate(experiment, out, nodes, policy, data_dir, show)
    finish(out, {"flower": summary}, as_json)


def _federate(
    experiment: Experiment, out: Path, nodes: int, policy: dict[str, Any], data_dir: Path | None, show: Show
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
