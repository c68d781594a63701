"""`fedpara export --client`: one client's own model, from a run with private tensors."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import fedpara as fp
from fedpara.apps import export_source
from fedpara.engines.flower.engine import ACCEPTED
from fedpara.engines.progress import Progress
from fedpara.experiments import Experiment, run
from fedpara.experiments.build import build
from fedpara.experiments.storage.checkpoint import Checkpoint, final_checkpoint, write_checkpoint
from fedpara.experiments.storage.client_files import memory_file
from fedpara.experiments.storage.tensor_files import named_digest, read_memory, write_memory

PERSONAL = {"model": "mlp", "scheme": "pfedpara", "clients": 2, "cohort": 2, "epochs": None, "steps": 1}


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("scheme", "share"), [("pfedpara", "all"), ("original", "fedper"), ("fedpara", "none")]
)
def test_each_client_has_its_own_model(cli, tmp_path, scheme, share):
    fields = {"model": "mlp", "scheme": scheme, "share": share, "engine": "sequential", "epochs": None}
    experiment = Experiment(**fields, clients=8, cohort=2, rounds=3, steps=2, lr=0.01)
    run(experiment, tmp_path / "run")
    parts = build(experiment)
    same = {"rounds": 3, "cohort": 2, "share": share, "engine": "sequential"}
    simulated = fp.simulate(parts.task, parts.data, parts.algorithm, **same)
    taken = sorted({client for result in simulated.rounds for client in result.cohort})
    assert 2 < len(taken) < 8
    # A run killed between a round's files and its checkpoint leaves such files behind.
    for later in ("0/0-4", "0/7-4", "0/.0123456789abcdef.part"):
        path = tmp_path / "run" / "clients" / f"{later}.safetensors"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"of a later round")
    before = contents(tmp_path / "run")

    code, out, err = cli("export", "run")
    assert (code, out) == (2, "")
    expected = (
        f"expected --client with one of the {len(taken)} that took part ({', '.join(map(str, taken))})."
    )
    assert f"run has a model per client: {expected}" in " ".join(err.split())
    never = next(client for client in range(8) if client not in taken)
    code, _, err = cli("export", "run", "--client", never)
    assert (code, f"run has no model of client {never}: {expected}" in " ".join(err.split())) == (2, True)
    assert contents(tmp_path / "run") == before

    states = []
    for client in taken:
        code, out, _ = cli("export", "run", "--client", client, "--json")
        assert code == 0
        path = json.loads(out)["path"]
        assert path == f"run/model-client-{client}.merged.safetensors"
        states.append(load_file(tmp_path / path))
        own = simulated.client_state(client)
        plain = own if scheme == "original" else fp.merge(parts.task.model, own).state_dict()
        assert states[-1].keys() == plain.keys()
        for name, tensor in plain.items():
            torch.testing.assert_close(states[-1][name], tensor, rtol=1e-5, atol=1e-6)
        (tmp_path / path).unlink()
    assert any(not torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert contents(tmp_path / "run") == before


def test_a_run_in_progress_is_exported_at_a_single_checkpoint(cli, tmp_path, monkeypatch):
    run(Experiment(**PERSONAL, rounds=3), tmp_path / "run")
    seen = []

    def moving(path):
        newest = final_checkpoint(path)
        seen.append(newest.round)
        return newest if len(seen) > 1 else Checkpoint(Progress(0, {}, {}, {}), {}, "")

    monkeypatch.setattr(export_source, "final_checkpoint", moving)
    assert cli("export", "run", "--client", 0)[0] == 0
    assert seen == [3, 3]


def test_a_run_without_private_parts_has_no_client_models(cli, tmp_path):
    scaffold = {**PERSONAL, "scheme": "fedpara", "algorithm": "scaffold"}
    run(Experiment(**scaffold, rounds=1), tmp_path / "run")
    assert list((tmp_path / "run" / "clients").rglob("*.safetensors"))
    code, _, err = cli("export", "run", "--client", 0)
    assert (code, "run trained one model without private parts: leave out --client." in err) == (2, True)
    assert cli("export", "run")[0] == 0
    code, _, err = cli("export", "run/model.merged.safetensors", "--client", 0)
    assert (code, "does not take --client: a run folder takes --client" in err) == (2, True)


def test_client_memory_of_a_flower_node_is_found_in_a_copy(cli, tmp_path):
    run(Experiment(**PERSONAL, rounds=1), tmp_path / "run")
    shutil.move(tmp_path / "run" / "clients", tmp_path / "clients")
    code, _, err = cli("export", "run", "--client", 0)
    assert code == 1
    assert "0-1.safetensors cannot be read" in err

    write_server_note(tmp_path / "run", round=1)
    code, _, err = cli("export", "run", "--client", 0)
    assert code == 2
    assert "is only on its node: copy the folder nodes-abc from the `memory` of the node's config to" in err
    (tmp_path / "run" / "nodes-abc" / "0").mkdir(parents=True)
    code, _, err = cli("export", "run", "--client", 0)
    assert code == 1
    assert "run/nodes-abc/0/1.safetensors" in " ".join(err.split())
    kept = tmp_path / "clients" / "0" / "0-1.safetensors"
    shutil.copy(kept, tmp_path / "run" / "nodes-abc" / "0" / "1.safetensors")
    assert cli("export", "run", "--client", 0)[0] == 0


def write_server_note(folder, round):
    """What Flower's server keeps of client 0: the round it accepted. The node keeps the tensors."""
    (folder / "nodes.txt").write_text("abc\n")
    (folder / "clients" / "0").mkdir(parents=True)
    note = {ACCEPTED: {"round": torch.tensor(round)}}
    write_memory(memory_file(folder / "clients", 0, round), note)
    newest = final_checkpoint(folder)
    newest.digests[0] = named_digest(memory_file(folder / "clients", 0, round))
    write_checkpoint(folder, newest)


def test_another_clients_file_is_rejected(cli, tmp_path):
    run(Experiment(**PERSONAL, rounds=1), tmp_path / "run")
    paths = [memory_file(tmp_path / "run" / "clients", client, 1) for client in range(2)]
    shutil.copyfile(*paths)
    code, _, err = cli("export", "run", "--client", 1)
    assert (code, "client 0, round 1: expected that of client 1" in " ".join(err.split())) == (1, True)


def test_another_runs_file_is_rejected(cli, tmp_path):
    """A whole file of this client and round, but not the one in the checkpoint."""
    run(Experiment(**PERSONAL, rounds=1), tmp_path / "run")
    path = memory_file(tmp_path / "run" / "clients", 0, 1)
    groups = read_memory(path)
    next(iter(groups["private"].values())).add_(1)
    write_memory(path, groups, origin=(0, 1))
    code, _, err = cli("export", "run", "--client", 0)
    assert code == 1
    assert "0-1.safetensors is not the file that the checkpoint" in " ".join(err.split())


def test_an_older_file_does_not_replace_a_missing_newest_one(cli, tmp_path):
    run(Experiment(**PERSONAL, rounds=3), tmp_path / "run")
    kept = final_checkpoint(tmp_path / "run").memories
    client, round = next((c, r) for c, r in kept.items() if r == 3)
    path = memory_file(tmp_path / "run" / "clients", client, round)
    path.rename(path.with_name(f"{client}-{round - 1}.safetensors"))
    code, _, err = cli("export", "run", "--client", client)
    assert code == 1
    assert f"{client}-3.safetensors cannot be read" in "".join(err.split("\n"))


def test_a_personal_model_is_exported_by_client_and_the_servers_without(cli, tmp_path):
    fields = {"model": "mlp", "algorithm": "ditto", "engine": "sequential", "epochs": None, "steps": 2}
    experiment = Experiment(**fields, clients=4, cohort=2, rounds=2, lr=0.01)
    run(experiment, tmp_path / "run")
    parts = build(experiment)
    result = fp.simulate(
        parts.task,
        parts.data,
        parts.algorithm,
        rounds=2,
        cohort=2,
        share=experiment.share,
        engine="sequential",
    )
    client = result.rounds[-1].cohort[0]
    for words, state in (((), result.state), (("--client", client), result.client_state(client))):
        code, out, err = cli("export", "run", *words, "--json")
        assert code == 0, err
        exported = load_file(tmp_path / json.loads(out)["path"])
        merged = fp.merge(parts.task.model, state).state_dict()
        assert exported.keys() == merged.keys()
        assert all(torch.allclose(exported[name], merged[name], atol=1e-6) for name in merged)
