"""Contract: `score_clients` scores each client's own model as plain torch does, and changes no file."""

from dataclasses import replace

import pytest
import torch
from flower_nodes import BASE, CASES, Nodes, host, log

from fedpara.apps.flower import node as flower_node
from fedpara.data import normalise
from fedpara.engines.flower.policy import Policy
from fedpara.engines.flower.rpc import Packet, Response, from_packet, to_packet
from fedpara.errors import WireError
from fedpara.experiments import read_run
from fedpara.experiments.build import build
from fedpara.experiments.run import lay_out, resume
from fedpara.experiments.storage.checkpoint import final_checkpoint
from fedpara.experiments.storage.node_memory import NodeMemory
from fedpara.tasks import Score
from fedpara.wire import make_message, pack


class Finished:
    """A finished run on nodes in this process, and its engine."""

    def __init__(self, experiment, folder, policy=None):
        self.folder, self.transport, self.experiment = folder, Nodes(folder.parent / "nodes"), experiment
        lay_out(experiment, folder)
        made = host(self.transport, policy)

        def keeping(session, *words):
            self.session = session
            self.engine, schedule = made(session, *words)
            return self.engine, schedule

        resume(folder, engine="flower", host=keeping)
        self.transport.asked.clear()

    def message(self):
        progress, session = final_checkpoint(self.folder).progress, self.session
        groups = {"": {**progress.x, **progress.buffers}, **session.algorithm.broadcast(progress.server)}
        return make_message(
            pack(groups), session.header(progress.round), session.link.down, None, session.exact
        )

    def scores(self, clients=range(5)):
        return list(self.engine.score_clients(self.experiment.rounds, list(clients), self.message()))

    def files(self):
        return {path: path.read_bytes() for path in self.folder.parent.rglob("*") if path.is_file()}


def expected(finished, client):
    """(correct, examples) by hand: the shared state and the client's private tensors, on its test data."""
    parts = build(finished.experiment)
    state = {**parts.task.model.state_dict(), **finished.session.program.initial}
    progress = final_checkpoint(finished.folder).progress
    state |= {**progress.x, **progress.buffers}
    if finished.session.stateful and (accepted := finished.engine._accepted(client)):
        run = (finished.folder / "nodes.txt").read_text().strip()
        node = finished.folder.parent / "nodes" / f"node-{client % 3}"
        state |= NodeMemory(node, run, client).get(accepted)["private"]
    parts.task.model.load_state_dict(state)
    parts.task.model.eval()
    test = parts.data.client_test(client)
    with torch.no_grad():
        said = parts.task.model(normalise(test.inputs, test.mean, test.std)).argmax(1)
    return int((said == test.targets).sum()), len(test)


@pytest.mark.parametrize("case", ["fedavg", "pfedpara", "pfedpara-scaffold", "local"])
def test_each_clients_own_model_is_scored(tmp_path, case):
    """Some clients took part before the last round, some never."""
    experiment = replace(BASE, rounds=2, cohort=2, **{**CASES[case], "personal": True, "link_up": "float32"})
    finished = Finished(experiment, tmp_path / "run")
    before = finished.files()
    replies = finished.scores()
    assert [reply.client for reply in replies] == [0, 1, 2, 3, 4]
    for reply in replies:
        assert (
            round(reply.before.values["accuracy"] * reply.before.examples),
            reply.before.examples,
        ) == expected(finished, reply.client)
        assert (reply.message, reply.reason, reply.after) == (None, "", None)
    assert [(kind, client) for kind, _, client, _ in finished.transport.asked] == [
        ("score", i) for i in range(5)
    ]
    assert len({reply.before.values["accuracy"] for reply in replies}) > 1
    assert finished.files() == before


def spoilt(change):
    return lambda request, packet: change(packet) if request.client == 1 else packet


PERSONAL = replace(BASE, rounds=1, personal=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (spoilt(lambda p: to_packet(Response(1, 1))), "is empty: expected a score or a reason"),
        (spoilt(lambda p: Packet(p.facts, bytes(9))), "a message of 9 bytes: expected at most 0"),
        (
            spoilt(lambda p: to_packet(replace(from_packet(p, Response, 0), client=2))),
            "for client 2 in round 1",
        ),
        (
            spoilt(lambda p: to_packet(Response(1, 1, before=Score(3, {"accuracy": 3.0, "loss": 0.0})))),
            "an accuracy of 3.0",
        ),
        (spoilt(lambda p: "node gone"), "node gone"),
    ],
)
def test_a_bad_score_becomes_a_reason_and_the_others_count(tmp_path, change, says):
    finished = Finished(PERSONAL, tmp_path / "run")
    finished.transport.change = change
    replies = finished.scores()
    assert says in replies[1].reason
    assert replies[1].before is None
    assert all(reply.before is not None for reply in replies if reply.client != 1)


def test_a_client_without_a_node_gets_a_reason(tmp_path):
    finished = Finished(PERSONAL, tmp_path / "run")
    finished.transport.configs.clear()
    began = finished.transport.now
    for reply in finished.scores():
        assert (reply.reason, reply.before, reply.reached) == ("no node serves it", None, False)
    assert 5 <= finished.transport.now - began < 10, "nodes have `wait` seconds to appear, in total"


def test_a_hanging_node_costs_a_single_deadline(tmp_path):
    """Clients are asked in groups of the cohort's size; the hanging node's other clients are skipped."""
    finished = Finished(replace(PERSONAL, cohort=1), tmp_path / "run")
    finished.transport.change = lambda request, packet: None if request.client % 3 == 1 else packet
    began = finished.transport.now
    reasons = [reply.reason for reply in finished.scores()]
    assert reasons == ["", "no reply within 100 s", "", "", "its node 101 did not answer"]
    assert finished.transport.now - began < 110


def test_oversampling_asks_every_client_for_its_score(tmp_path):
    finished = Finished(
        replace(PERSONAL, cohort=2), tmp_path / "run", Policy(deadline=100, wait=5, oversample=1)
    )
    finished.transport.delay = lambda request: 3.0 * request.client
    assert all(reply.before is not None for reply in finished.scores())


def test_a_late_score_is_not_a_late_update(tmp_path):
    finished = Finished(PERSONAL, tmp_path / "run")
    finished.transport.delay = lambda request: 101.0 if request.client == 1 else 0.0
    assert finished.scores()[1].reason == "no reply within 100 s"
    finished.transport.now += 10
    finished.transport.delay = lambda request: 0.0
    resume(tmp_path / "run", rounds=2, engine="flower", host=lambda *_: (finished.engine, _[3]))
    assert read_run(tmp_path / "run").rounds == 2
    assert "too late" not in log(tmp_path / "run")


def test_clients_without_test_data_say_so(tmp_path, monkeypatch):
    finished = Finished(replace(BASE, rounds=1), tmp_path / "run")
    assert all("personal evaluation needs each client's test data" in r.reason for r in finished.scores())
    monkeypatch.setattr(flower_node.Site, "data", lambda *_, **__: (None, None))
    assert {reply.reason for reply in finished.scores()} == {"it has no test data"}


def test_a_negative_number_of_examples_is_refused():
    packet = to_packet(Response(0, 1, before=Score(-3, {"accuracy": 0.5})))
    with pytest.raises(WireError, match="before covers -3 examples: expected none or more"):
        from_packet(packet, Response, 1 << 20)
