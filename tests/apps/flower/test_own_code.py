"""Flower with the user's own code: it travels in the app, and both ends check that it is the same."""

import sys
import tomllib
from dataclasses import replace

import pytest
from flower_nodes import Nodes, log, run_on_nodes, run_sequentially, same_results
from own_code import fields, forget, write_package

from fedpara.apps.flower.run_config import read
from fedpara.engines.flower.rpc import Packet
from fedpara.errors import RunError
from fedpara.experiments import Experiment

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

NAME = "sites"
EXPERIMENT = Experiment(**fields(NAME), clients=4, cohort=2, rounds=2, batch_size=16, gamma=0.0, lr=0.05)
FILES = {"sites/__init__.py", "sites/methods.py", "sites/networks.py", "sites/reading.py", "helping_sites.py"}


@pytest.fixture
def own(tmp_path, monkeypatch):
    write_package(tmp_path, NAME)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    forget(NAME)


def test_nodes_run_the_users_code(own):
    run_sequentially(EXPERIMENT, own / "one")
    run_on_nodes(EXPERIMENT, own / "many")
    assert same_results(own / "one", own / "many")


def test_a_federation_of_the_user(own):
    brought = replace(EXPERIMENT, dataset="sites.reading:federation", split="dirichlet", clients=100)
    run_sequentially(brought, own / "one")
    run_on_nodes(brought, own / "many")
    assert same_results(own / "one", own / "many")


BREAKING = """
from fedpara.data import FederatedData
from sites.reading import digits

def load(client):
    if client == 1:
        raise OSError("the disk is gone")
    return digits()[0].subset(range(client, 200, 4))

def federation():
    return FederatedData.of(load, clients=4)
"""


def test_a_client_whose_data_cannot_be_read_is_refused_with_the_same_reason(own):
    (own / "sites" / "breaking.py").write_text(BREAKING)
    brought = replace(
        EXPERIMENT, dataset="sites.breaking:federation", split="dirichlet", clients=100, cohort=4
    )
    run_sequentially(brought, own / "one")
    run_on_nodes(brought, own / "many")
    assert same_results(own / "one", own / "many")
    assert "client 1 refused: its data could not be read: OSError: the disk is gone" in log(own / "many")


def test_a_node_with_another_source_is_refused(own):
    transport = Nodes(own / "nodes", count=2)

    def other(request, packet):
        changed = {"sources": "0" * 64} if request.kind == "hello" else {}
        return Packet({**packet.facts, **changed}, packet.body)

    transport.change = other
    with pytest.raises(RunError, match="0 of the round's 2 clients have a node"):
        run_on_nodes(EXPERIMENT, own / "run", transport)
    says = "refused: its copy of the modules that the experiment references differs from the server's"
    assert says in log(own / "run")


def test_init_copies_the_modules(cli, own):
    given = [
        word
        for name, value in fields(NAME).items()
        if name != "options"
        for word in ("--set", f"{name}={value}")
    ]
    assert cli("flower", "init", "app", *given, "--set", "rounds=7")[0] == 0
    written = {path.relative_to(own / "app").as_posix() for path in (own / "app").rglob("*.py")}
    assert written == FILES | {"fedpara_server.py", "fedpara_client.py"}
    assert (own / "app/sites/networks.py").read_bytes() == (own / "sites/networks.py").read_bytes()
    project = tomllib.loads((own / "app" / "pyproject.toml").read_text())
    (experiment,) = read(project["tool"]["flwr"]["app"]["config"]).experiments().values()
    assert experiment.references == EXPERIMENT.references
    assert experiment.rounds == 7
    code, _, err = cli("flower", "init", "other", "--set", "model=nowhere:net")
    assert (code, (own / "other").exists()) == (2, False)
    assert "cannot be imported" in err
