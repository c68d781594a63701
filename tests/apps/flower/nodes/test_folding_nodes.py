"""The update form on Flower: a node folds the base of its clients from what it receives, and stores it."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from flower_nodes import BASE, Nodes, host, log, run_on_nodes, run_sequentially, same_results

from fedpara.engines.flower.rpc import Request, from_packet
from fedpara.engines.program import make_program
from fedpara.engines.server.broadcast import broadcast
from fedpara.engines.server.folds import begun, folds_after
from fedpara.engines.server.rounds import initial_progress
from fedpara.engines.setup.private_run import open_session
from fedpara.errors import RunError, WireError
from fedpara.experiments import read_run, resume, run
from fedpara.experiments.build import build
from fedpara.experiments.storage.checkpoint import final_checkpoint

FOLDING = replace(BASE, fold_every=2, scheme="lowrank", engine="flower", rounds=8, cohort=2, lr=0.3)
CASES = {
    "lowrank": {},
    "fedpara, copies of the base": {"scheme": "fedpara", "fold_every": 1, "rounds": 12},
    "fixed factors": {"scheme": "kronecker-aad", "ratio": 0.2, "link_down": "int8", "link_up": "int8"},
    "personal scores": {"personal": True, "fold_every": 3},
}


class Counting(Nodes):
    """Counts the bytes of each request, and the copies of a base."""

    def __init__(self, *words, **options):
        super().__init__(*words, **options)
        self.sent, self.copies = Counter(), 0

    def send(self, packets, seconds):
        requests = [from_packet(packet, Request, 1 << 30) for _, packet in packets]
        self.sent.update({(r.kind, r.round, r.client): len(r.message) for r in requests})
        self.copies += sum(b"fc1.weight.base" in request.message for request in requests)
        return super().send(packets, seconds)


@pytest.mark.parametrize("case", CASES)
def test_flower_equals_the_sequential_engine_and_sends_the_bytes_it_counts(tmp_path, case):
    experiment = replace(FOLDING, **CASES[case])
    run_sequentially(experiment, tmp_path / "a")
    transport = run_on_nodes(experiment, tmp_path / "b", Counting(tmp_path / "nodes"))
    assert same_results(tmp_path / "a", tmp_path / "b")
    metrics = read_run(tmp_path / "b").metrics
    for line in metrics:
        of_round = [n for (kind, t, _), n in transport.sent.items() if (kind, t) == ("train", line["round"])]
        assert sum(of_round) == line["down"]
    if experiment.personal:
        scored = [n for (kind, *_), n in transport.sent.items() if kind == "score"]
        assert sum(scored) == metrics[-1]["everyone"]["bytes_down"]
    assert (transport.copies > 0) is ("copies" in case)
    folds = final_checkpoint(tmp_path / "b").progress.folds
    assert (len(folds.messages) < len(folds.sizes)) is ("copies" in case), "older folds are no longer needed"


@pytest.mark.parametrize("lost", [3, 4])
def test_a_client_whose_update_was_not_accepted_is_sent_the_folds_again(tmp_path, lost):
    """In the first or the second round of a period; its node may have the new base already."""
    experiment = replace(FOLDING, cohort=5, rounds=6)
    run_sequentially(
        experiment,
        tmp_path / "a",
        lambda round, reply: (
            replace(reply, message=None, reason="lost") if (round, reply.client) == (lost, 1) else reply
        ),
    )
    transport = Nodes(tmp_path / "nodes")
    transport.change = lambda request, packet: (
        "lost" if (request.round, request.client) == (lost, 1) else packet
    )
    run_on_nodes(experiment, tmp_path / "b", transport)
    assert same_results(tmp_path / "a", tmp_path / "b")


class Crash(Exception):
    pass


@pytest.mark.parametrize("at", [3, 4])
def test_a_killed_server_resumes_to_the_same_bits(tmp_path, at):
    """Killed in the first or the second round of a period, after some clients have trained."""
    experiment = replace(FOLDING, cohort=4, rounds=6)
    run_sequentially(experiment, tmp_path / "a")
    transport, trained = Nodes(tmp_path / "nodes"), []

    def crash(request, packet):
        trained.append(request.round)
        if trained.count(at) == 3:
            raise Crash
        return packet

    transport.change = crash
    with pytest.raises(Crash):
        run_on_nodes(experiment, tmp_path / "b", transport)
    run_on_nodes(experiment, tmp_path / "b", Nodes(tmp_path / "nodes", first=200))
    assert same_results(tmp_path / "a", tmp_path / "b")


def test_nodes_keep_the_base_of_the_previous_checkpoint(tmp_path):
    """The newest checkpoint, of the first round after a fold, is damaged."""
    experiment = replace(FOLDING, cohort=5, rounds=5)
    run_sequentially(replace(experiment, rounds=7), tmp_path / "a")
    transport = run_on_nodes(experiment, tmp_path / "b")
    (tmp_path / "b" / "checkpoint.safetensors").write_bytes(b"cut")
    resume(tmp_path / "b", rounds=7, engine="flower", host=host(transport))
    assert "resumed after round 4" in log(tmp_path / "b")
    assert same_results(tmp_path / "a", tmp_path / "b")


def test_a_base_that_is_not_where_the_run_needs_it_is_named(tmp_path):
    """On a node that lost its disk; in the folder of another engine; on nodes when another engine resumes."""
    experiment = replace(FOLDING, cohort=5, rounds=4)
    transport = run_on_nodes(experiment, tmp_path / "a")
    for path in (tmp_path / "a-nodes" / "node-1").rglob("*.safetensors"):
        path.unlink()
    resume(tmp_path / "a", rounds=5, engine="flower", host=host(transport))
    assert "client 1 refused: the client's memory of round 2 is not on this node" in log(tmp_path / "a")
    with pytest.raises(RunError, match=r"are on Flower's nodes .* resume with --engine flower"):
        resume(tmp_path / "a", rounds=6, engine="sequential")
    for name, fields in {"folds": {}, "differences": {"fold_every": None, "link_down": "int4"}}.items():
        run(replace(experiment, engine="sequential", rounds=3, **fields), tmp_path / name)
        with pytest.raises(RunError, match="so no Flower node has them: resume with --engine sequential"):
            resume(tmp_path / name, rounds=4, engine="flower", host=host(transport))


def test_missing_repeated_and_foreign_folds_are_refused(tmp_path):
    experiment = replace(FOLDING, fold_every=1)
    parts = build(experiment, None)
    session = open_session(
        make_program(parts.task.model), parts.algorithm, parts.link, seed=experiment.seed, fold_every=1
    )
    progress, messages = initial_progress(session), []
    for t in (1, 2, 3):
        progress = begun(session, progress)
        messages.append(broadcast(session, progress, t)[0])
        x = {name: tensor + 0.1 * t for name, tensor in progress.x.items()}
        progress = replace(progress, round=t, x=x, folds=folds_after(progress, []))
    first, second, own = map(bytes, messages[-1].to(0))
    (model, _), base = session.add_folds(first + second + own, 3, None, 0)
    expected = {**session.read_down(messages[-1], 3)[0]}
    assert model.keys() == expected.keys()
    assert all(torch.equal(model[name], tensor) for name, tensor in expected.items())
    _, earlier = session.add_folds(first + bytes(messages[1]), 2, None, 0)
    assert torch.equal(
        session.add_folds(second + own, 3, earlier, 1)[1]["fc1.weight.base"], base["fc1.weight.base"]
    )
    copy = bytes(messages[-1].copy)
    assert torch.equal(
        session.add_folds(copy + own, 3, None, 0)[1]["fc1.weight.base"], base["fc1.weight.base"]
    )
    for body in (own, second + own, first + first + own, second + first + own, copy + copy + own, b""):
        with pytest.raises(WireError):
            session.add_folds(body, 3, None, 0)
