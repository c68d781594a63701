"""Contract: the Flower engine equals the sequential engine, with nodes in this process and without Flower."""

import os
import shutil
from collections import Counter
from dataclasses import replace

import pytest
import torch
from flower_nodes import BASE, CASES, Nodes, host, log, run_on_nodes, run_sequentially, same_results

from fedpara.apps.flower.simulation import follow
from fedpara.engines.flower.policy import Policy
from fedpara.errors import RunError
from fedpara.experiments import read_run
from fedpara.experiments.run import resume
from fedpara.experiments.storage.node_memory import NodeMemory


@pytest.mark.parametrize("case", CASES)
def test_flower_equals_the_sequential_engine(tmp_path, case):
    experiment = replace(BASE, **CASES[case])
    run_sequentially(experiment, tmp_path / "a")
    transport = run_on_nodes(experiment, tmp_path / "b")
    assert same_results(tmp_path / "a", tmp_path / "b")
    asked = {"hello": 3, "train": 9} | ({"score": experiment.clients} if experiment.personal else {})
    assert Counter(kind for kind, *_ in transport.asked) == asked


def test_lost_clients_are_not_asked_and_slow_ones_are_refused(tmp_path):
    experiment = replace(BASE, algorithm="scaffold", rounds=8, sampler="poisson", lost=0.3, patience=8)
    experiment = replace(experiment, bandwidth="lognormal(2e4, 1)", speed=10, device_deadline=2.0)
    run_sequentially(experiment, tmp_path / "a")
    transport = run_on_nodes(experiment, tmp_path / "b", policy=Policy(deadline=100, wait=5, minimum=2))
    run_on_nodes(experiment, tmp_path / "c")
    assert same_results(tmp_path / "a", tmp_path / "c")
    metrics = read_run(tmp_path / "b").metrics
    reasons = Counter(entry["reason"].split(" ")[2] for line in metrics for entry in line["refused"])
    assert reasons["lost"] > 0
    assert reasons.total() > reasons["lost"], "no client was too slow"
    trained = Counter(round for kind, round, *_ in transport.asked if kind == "train")
    for line in metrics:
        lost = sum("lost" in entry["reason"] for entry in line["refused"])
        assert trained[line["round"]] == line["clients"] + len(line["refused"]) - lost
    assert any("usable update" in note or "no clients" in note for line in metrics for note in line["notes"])


@pytest.mark.parametrize("case", ["scaffold", "pfedpara", "local", "ditto"])
def test_only_an_accepted_update_changes_a_clients_memory(tmp_path, case):
    """A reply is lost in round 2 of 4; its client continues from its earlier memory."""
    experiment = replace(BASE, rounds=4, cohort=5, **CASES[case])
    run_sequentially(
        experiment,
        tmp_path / "a",
        lambda round, reply: (
            replace(reply, message=None, reason="lost") if (round, reply.client) == (2, 1) else reply
        ),
    )
    transport = Nodes(tmp_path / "nodes")
    transport.change = lambda request, packet: "lost" if (request.round, request.client) == (2, 1) else packet
    run_on_nodes(experiment, tmp_path / "b", transport)
    assert same_results(tmp_path / "a", tmp_path / "b")
    assert read_run(tmp_path / "b").metrics[1]["refused"] == [{"client": 1, "reason": "lost"}]


class Crash(Exception):
    pass


@pytest.mark.parametrize("case", ["fedavg", "pfedpara-scaffold", "ditto"])
@pytest.mark.parametrize("sent", [False, True])
def test_a_killed_server_resumes_to_the_same_bits(tmp_path, case, sent):
    """Killed in round 3, before or after its clients trained. The nodes return with other ids."""
    experiment = replace(BASE, rounds=4, cohort=4, **CASES[case])
    run_sequentially(experiment, tmp_path / "a")
    transport = Nodes(tmp_path / "nodes")

    def crash(request, packet):
        if request.round == 3 and (not sent or request.client == 4):
            raise Crash
        return packet

    transport.change = crash
    with pytest.raises(Crash):
        run_on_nodes(experiment, tmp_path / "b", transport)
    again = Nodes(tmp_path / "nodes", first=200)
    run_on_nodes(experiment, tmp_path / "b", again)
    assert same_results(tmp_path / "a", tmp_path / "b")
    assert "resumed after round 2" in log(tmp_path / "b")


def test_nodes_keep_the_memory_of_the_previous_checkpoint(tmp_path):
    """The newest checkpoint is damaged, so server and clients go back by one."""
    experiment = replace(BASE, cohort=5, **CASES["pfedpara-scaffold"])
    run_sequentially(replace(experiment, rounds=4), tmp_path / "a")
    transport = run_on_nodes(experiment, tmp_path / "b")
    (tmp_path / "b" / "checkpoint.safetensors").write_bytes(b"cut")
    resume(tmp_path / "b", rounds=4, engine="flower", host=host(transport))
    assert same_results(tmp_path / "a", tmp_path / "b")
    kept = sorted(path.name for path in (tmp_path / "b-nodes" / "node-0").rglob("*.safetensors"))
    assert kept == [f"{round}.safetensors" for round in (2, 2, 3, 3, 4, 4)]


def test_a_late_round_does_not_remove_a_newer_one(tmp_path):
    """A client hung in round 5 while it finished round 6, which may still be accepted."""
    memory = NodeMemory(tmp_path, "a", 0)
    held = {round: {"private": {"w": torch.full((2,), float(round))}} for round in (1, 3, 5, 6, 8)}
    for round, accepted in ((1, 0), (3, 1), (6, 3), (5, 3)):
        memory.put(round, held[round], accepted)
    assert torch.equal(memory.get(6)["private"]["w"], held[6]["private"]["w"])
    assert sorted(path.stem for path in memory.folder.iterdir()) == ["1", "3", "5", "6"]
    memory.put(8, held[8], 6)
    assert sorted(path.stem for path in memory.folder.iterdir()) == ["5", "6", "8"]


def test_a_memory_file_under_another_name_is_rejected(tmp_path):
    one, other = (NodeMemory(tmp_path, "a", client) for client in (0, 1))
    for memory in (one, other):
        memory.put(1, {"private": {"w": torch.full((2,), float(memory.client))}}, 0)
    shutil.copyfile(*(memory.folder / "1.safetensors" for memory in (one, other)))
    with pytest.raises(RunError, match="the memory of client 0, round 1: expected that of client 1, round 1"):
        other.get(1)
    shutil.copyfile(one.folder / "1.safetensors", one.folder / "2.safetensors")
    with pytest.raises(RunError, match="expected that of client 0, round 2"):
        one.get(2)


def test_a_missing_memory_is_logged(tmp_path):
    transport = run_on_nodes(replace(BASE, cohort=5, **CASES["scaffold"]), tmp_path / "a")
    for path in (tmp_path / "a-nodes" / "node-1").rglob("*.safetensors"):
        path.unlink()
    resume(tmp_path / "a", rounds=4, engine="flower", host=host(transport))
    assert read_run(tmp_path / "a").metrics[3]["clients"] == 3
    for client in (1, 4):
        assert f"client {client} refused: the client's memory of round 3 is not on this node" in log(
            tmp_path / "a"
        )


def test_a_failing_run_does_not_stop_the_others(tmp_path):
    pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")
    from fedpara.apps.flower.server_app import run_folders

    for name in ("a", "b"):
        run_on_nodes(BASE, tmp_path / name)
    for name in ("checkpoint.safetensors", "checkpoint.previous.safetensors"):
        (tmp_path / "a" / name).write_bytes(b"torn")
    with pytest.raises(RunError, match="1 of 2 runs failed, the others are done"):
        run_folders(dict.fromkeys((tmp_path / "a", tmp_path / "b"), 4), None, host(Nodes(tmp_path / "nodes")))
    assert read_run(tmp_path / "b").rounds == 4


def test_a_stopped_run_is_not_waited_for(tmp_path):
    """Flower is still running, with other folders."""
    run_on_nodes(BASE, tmp_path / "a")
    with (tmp_path / "a" / "log.txt").open("a") as file:
        file.write("2030-01-01T00:00:00Z stopped: RunError: of an earlier start\n")

    class Flower:
        def poll(self):
            with (tmp_path / "a" / "log.txt").open("a") as file:
                file.write("2030-01-01T00:00:00Z stopped: RunError: client 1 diverged in round 4\n")

    with pytest.raises(RunError, match=r"^client 1 diverged in round 4$"):
        follow(tmp_path / "a", Flower(), tmp_path / "run.log", 5, None)


def test_a_run_with_client_memory_stays_on_its_engine(tmp_path):
    run_on_nodes(replace(BASE, **CASES["scaffold"]), tmp_path / "a")
    with pytest.raises(RunError, match="resume with --engine flower"):
        resume(tmp_path / "a", rounds=4, engine="sequential")
    run_sequentially(replace(BASE, rounds=5), tmp_path / "b")
    run_on_nodes(BASE, tmp_path / "c")
    resume(tmp_path / "c", rounds=4, engine="sequential")
    resume(tmp_path / "c", rounds=5, engine="flower", host=host(Nodes(tmp_path / "nodes")))
    assert same_results(tmp_path / "b", tmp_path / "c")


@pytest.mark.parametrize("run", ["", "a/../../b", "a\n", "A", "0" * 65])
def test_a_run_name_cannot_lead_out_of_the_folder(tmp_path, run):
    with pytest.raises(RunError, match="expected hexadecimal digits"):
        NodeMemory(tmp_path, run, 0)


def test_only_stale_temporary_files_are_removed(tmp_path):
    memory = NodeMemory(tmp_path, "a", 0)
    memory.folder.mkdir(parents=True)
    names = ("1 (copy).safetensors", ".now.part", ".old.part")
    copy, writing, old = (memory.folder / name for name in names)
    for path in (copy, writing, old):
        path.touch()
    os.utime(old, (0, 0))
    memory.put(2, {"private": {"w": torch.ones(1)}}, 1)
    assert (copy.exists(), writing.exists(), old.exists()) == (True, True, False)
