"""fedpara export as a user meets it: the merged model, a client's own, and what is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fedpara as fp
from fedpara import data, models
from fedpara.apps import export_source as merged
from fedpara.data import normalise
from fedpara.engines.flower.engine import ACCEPTED
from fedpara.engines.progress import Progress
from fedpara.experiments import Experiment, read_run, run
from fedpara.experiments.build import build, build_model, build_scheme
from fedpara.experiments.storage.checkpoint import Checkpoint, final_checkpoint, write_checkpoint
from fedpara.experiments.storage.client_files import kept_file
from fedpara.experiments.storage.tensor_files import named_digest, read_groups, write_groups
from fedpara.interop import save_state

PERSONAL = {"model": "mlp", "scheme": "pfedpara", "clients": 2, "cohort": 2, "epochs": None, "steps": 1}


@pytest.mark.parametrize("scheme", ["original", "fedpara"])
def test_an_exported_run_is_a_plain_model(cli, tmp_path, scheme):
    experiment = Experiment(
        model="mlp", scheme=scheme, clients=8, cohort=2, rounds=2, epochs=None, steps=2, lr=0.01
    )
    run(experiment, tmp_path / "run")
    code, out, _ = cli("export", "run", "--format", "safetensors", "--json")
    assert code == 0
    report = json.loads(out)
    assert report["path"] == "run/model.merged.safetensors"
    plain = models.mlp(64, classes=10)
    plain.load_state_dict(load_file(tmp_path / report["path"]))
    assert report["parameters"] == sum(p.numel() for p in plain.parameters())

    trained = build_model(experiment, 10, (1, 8, 8), build_scheme(experiment))
    trained.load_state_dict(final_checkpoint(tmp_path / "run").state)
    _, test = data.load("digits")
    images = normalise(test.inputs, test.mean, test.std)
    with torch.no_grad():
        logits = plain(images)
        torch.testing.assert_close(logits, trained(images), rtol=1e-5, atol=1e-5)
    accuracy = float((logits.argmax(1) == test.labels).double().mean())
    assert accuracy == pytest.approx(read_run(tmp_path / "run").accuracy, abs=1e-12)

    code, _, err = cli("export", "run")
    assert code == 2
    assert "model.merged.safetensors exists" in " ".join(err.split())
    assert "--out" in err
    assert "--overwrite" in err
    assert cli("export", "run", "--overwrite")[0] == 0
    assert cli("export", "run", "--out", "other.safetensors")[0] == 0
    assert (tmp_path / "other.safetensors").exists()


def everything(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("scheme", "share"), [("pfedpara", "all"), ("original", "fedper"), ("fedpara", "none")]
)
def test_a_client_exports_its_own_model(cli, tmp_path, scheme, share):
    fields = {"model": "mlp", "scheme": scheme, "share": share, "engine": "sequential", "epochs": None}
    experiment = Experiment(**fields, clients=8, cohort=2, rounds=3, steps=2, lr=0.01)
    run(experiment, tmp_path / "run")
    parts = build(experiment)
    same = {"rounds": 3, "cohort": 2, "share": share, "engine": "sequential"}
    simulated = fp.simulate(parts.task, parts.data, parts.algorithm, **same)
    taken = sorted({client for result in simulated.rounds for client in result.cohort})
    assert 2 < len(taken) < 8
    # A kill between a round's files and its checkpoint leaves such files: they are not the run's, and stay.
    for later in ("0/0-4", "0/7-4", "0/.0123456789abcdef.part"):
        path = tmp_path / "run" / "clients" / f"{later}.safetensors"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"of a later round")
    before = everything(tmp_path / "run")

    code, out, err = cli("export", "run")
    assert (code, out) == (2, "")
    listed = ", ".join(map(str, taken))
    assert f"expected --client with one of the {len(taken)} that have taken part ({listed})." in " ".join(
        err.split()
    )
    never = next(client for client in range(8) if client not in taken)
    code, _, err = cli("export", "run", "--client", never)
    assert (code, f"client {never} has taken part in no round of run" in err) == (2, True)
    assert everything(tmp_path / "run") == before

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
    assert everything(tmp_path / "run") == before


def test_a_run_that_goes_on_is_exported_at_one_checkpoint(cli, tmp_path, monkeypatch):
    run(Experiment(**PERSONAL, rounds=3), tmp_path / "run")
    seen = []

    def moving(path):
        newest = final_checkpoint(path)
        seen.append(newest.round)
        return newest if len(seen) > 1 else Checkpoint(Progress(0, {}, {}, {}), {}, "")

    monkeypatch.setattr(merged, "final_checkpoint", moving)
    assert cli("export", "run", "--client", 0)[0] == 0
    assert seen == [3, 3]


@pytest.mark.parametrize("scheme", ["original", "pfedpara"])
def test_a_file_of_a_run_folder_is_no_model(cli, tmp_path, scheme):
    run(Experiment(**{**PERSONAL, "scheme": scheme, "algorithm": "scaffold"}, rounds=2), tmp_path / "run")
    (kept, *_) = (tmp_path / "run" / "clients").rglob("*.safetensors")
    before = everything(tmp_path)
    for path, what in (
        (tmp_path / "run" / "checkpoint.safetensors", "is a run's checkpoint"),
        (tmp_path / "run" / "checkpoint.previous.safetensors", "is a run's checkpoint"),
        (kept, "is what a client of a run keeps"),
    ):
        code, _, err = cli("export", path)
        assert code == 1
        said = " ".join(err.split())
        assert what in said
        assert "Export the run's folder instead." in said
    assert everything(tmp_path) == before


def test_a_client_that_has_no_model_of_its_own_to_export(cli, tmp_path):
    scaffold = {**PERSONAL, "scheme": "fedpara", "algorithm": "scaffold"}
    run(Experiment(**scaffold, rounds=1), tmp_path / "run")
    assert list((tmp_path / "run" / "clients").rglob("*.safetensors"))
    code, _, err = cli("export", "run", "--client", 0)
    assert code == 2
    assert "no client keeps a part of it" in err
    assert cli("export", "run")[0] == 0
    code, _, err = cli("export", "run/model.merged.safetensors", "--client", 0)
    assert code == 2
    assert "--client expects a run folder" in err


def test_what_clients_keep_may_be_elsewhere(cli, tmp_path):
    run(Experiment(**PERSONAL, rounds=1), tmp_path / "run")
    shutil.move(tmp_path / "run" / "clients", tmp_path / "clients")
    code, _, err = cli("export", "run", "--client", 0)
    assert code == 1
    assert "0-1.safetensors is missing: client 0 kept it in round 1" in err

    write_groups_of_flower(tmp_path / "run", round=1)
    code, _, err = cli("export", "run", "--client", 0)
    assert code == 1
    assert "expected nodes-abc in run. Copy that folder there" in " ".join(err.split())
    (tmp_path / "run" / "nodes-abc" / "0").mkdir(parents=True)
    kept = tmp_path / "clients" / "0" / "0-1.safetensors"
    shutil.copy(kept, tmp_path / "run" / "nodes-abc" / "0" / "1.safetensors")
    assert cli("export", "run", "--client", 0)[0] == 0


def write_groups_of_flower(folder, round):
    """What Flower's server notes of client 0: the round it took; the rest is on the node."""
    (folder / "nodes.txt").write_text("abc\n")
    (folder / "clients" / "0").mkdir(parents=True)
    noted = {ACCEPTED: {"round": torch.tensor(round)}}
    write_groups(kept_file(folder / "clients", 0, round), noted)
    newest = final_checkpoint(folder)
    newest.digests[0] = named_digest(kept_file(folder / "clients", 0, round))
    write_checkpoint(folder, newest)


NETWORK = "from torch import nn\ndef build():\n    return nn.Linear(3, 2)\n"


@pytest.mark.parametrize("format", ["safetensors", "pt2"])
def test_a_state_that_is_not_the_models_is_refused(cli, tmp_path, format):
    save_file({"a": torch.zeros(3)}, tmp_path / "foreign.safetensors")
    (tmp_path / "theirs_too.py").write_text(NETWORK)
    before = everything(tmp_path)
    for model, missing in (
        ("mlp", "fc1.weight, fc1.bias, fc2.weight, fc2.bias"),
        ("theirs_too:build", "weight, bias"),
    ):
        words = ["--format", format, "--model", model, *["--shape", "3"] * (":" in model)]
        code, out, err = cli("export", "foreign.safetensors", *words)
        assert (code, out) == (1, "")
        assert f"the state does not fit the model {model}; missing: {missing}; too many: a." in err
    assert {
        name: content for name, content in everything(tmp_path).items() if name.suffix != ".pyc"
    } == before


def test_a_state_for_other_examples_is_refused_until_their_shape_is_said(cli, tmp_path):
    save_file(models.mlp(64, classes=10).state_dict(), tmp_path / "small.safetensors")
    code, _, err = cli("export", "small.safetensors", "--model", "mlp")
    assert code == 1
    assert "of another shape: fc1.weight (256, 64), which is (256, 784) there" in err
    assert cli("export", "small.safetensors", "--model", "mlp", "--shape", "1,8,8")[0] == 0
    code, _, err = cli(
        "export", "small.safetensors", "--model", "mlp", "--shape", "1,8,8", "--classes", 3, "--overwrite"
    )
    assert (code, "fc2.weight (10, 256), which is (3, 256) there" in err) == (1, True)


def test_only_a_check_that_was_made_is_claimed(cli, tmp_path):
    save_file(models.mlp(64, classes=10).state_dict(), tmp_path / "mine.safetensors")
    code, out, _ = cli("export", "mine.safetensors", "--out", "again.safetensors")
    assert (code, "torch" in out, "every tensor is as it was written" in out) == (0, False, True)
    code, out, _ = cli("export", "mine.safetensors", "--out", "b.safetensors", "--json")
    assert (code, json.loads(out)["max_difference"]) == (0, None)
    words = ["--model", "mlp", "--shape", "1,8,8", "--format", "pt2"]
    assert (
        "checked against torch: largest difference of outputs" in cli("export", "mine.safetensors", *words)[1]
    )


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--shape", "a,b"], "--shape"),
        (["--shape", "3,3"], "--shape"),
        (["--model", "X"], "--model"),
        (["--model", "mlp", "--classes", "10"], "--model and --classes"),
    ],
)
def test_what_describes_a_file_is_not_for_a_run(cli, tmp_path, words, names):
    run(Experiment(**{**PERSONAL, "scheme": "original"}, rounds=1), tmp_path / "run")
    before = everything(tmp_path)
    code, out, err = cli("export", "run", *words)
    assert (code, out) == (2, "")
    assert f"run is a run folder, whose files say which model it trained: leave out {names}, meant for" in err
    assert everything(tmp_path) == before


def test_what_describes_no_model_is_not_for_a_file(cli, tmp_path):
    save_file({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}, tmp_path / "a.safetensors")
    (tmp_path / "theirs_too.py").write_text(NETWORK)
    code, _, err = cli("export", "a.safetensors", "--shape", "3", "--classes", 2)
    assert (code, "--classes and --shape without --model" in err) == (2, True)
    code, _, err = cli("export", "a.safetensors", "--model", "theirs_too:build", "--classes", 2)
    assert (code, "--classes is for a model of the library" in err) == (2, True)
    assert cli("export", "a.safetensors", "--model", "theirs_too:build")[0] == 0


HOSTILE = """
from pathlib import Path
from torch import nn

Path(__file__).with_name("imported").touch()

def build():
    Path(__file__).with_name("called").touch()
    return nn.Linear(3, 2)
"""


@pytest.mark.parametrize("format", ["safetensors", "onnx", "pt2"])
def test_code_that_a_file_names_is_not_run(cli, tmp_path, monkeypatch, format):
    """Attack: a state that someone sends, and the module it names where Python finds it."""
    name = f"hostile_{format}"
    (tmp_path / f"{name}.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = {"target": f"{name}:build", "shape": [3]}
    save_state(tmp_path / "sent.safetensors", nn.Linear(3, 2).state_dict(), {}, model=model)
    words = ("export", "sent.safetensors", "--format", format, "--out", f"out.{format}")
    code, _, err = cli(*words)
    if format == "safetensors":  # which needs no network
        assert code == 0
    else:
        assert code == 2
        assert f"names '{name}:build' as its model" in err
        assert f"pass --model {name}:build if you trust it" in err
        assert not (tmp_path / f"out.{format}").exists()
    assert not (tmp_path / "imported").exists()
    assert not (tmp_path / "called").exists()
    code, _, err = cli(*words, "--model", f"{name}:build", "--shape", "3", "--overwrite")
    assert code == 0, err
    assert (tmp_path / "called").exists()


def test_a_damaged_run_is_not_taken_for_one_that_has_not_begun(cli, tmp_path):
    run(Experiment(**{**PERSONAL, "scheme": "original"}, rounds=2), tmp_path / "run")
    for name in ("checkpoint.safetensors", "checkpoint.previous.safetensors"):
        (tmp_path / "run" / name).write_bytes(b"garbage")
    code, _, err = cli("export", "run")
    assert (code, "first round" in err) == (1, False)
    for name in ("checkpoint.safetensors", "checkpoint.previous.safetensors"):
        assert f"run/{name} cannot be read" in err


@pytest.mark.parametrize("more", [[], ["--overwrite"]])
def test_a_folder_is_no_name_for_a_file(cli, tmp_path, more):
    run(Experiment(**{**PERSONAL, "scheme": "original"}, rounds=1), tmp_path / "run")
    (tmp_path / "models").mkdir()
    code, _, err = cli("export", "run", "--format", "pt2", "--out", "models", *more)
    assert (code, "models is a folder: expected the name of a file, such as models/model.pt2." in err) == (
        2,
        True,
    )
    assert list((tmp_path / "models").iterdir()) == []


def test_no_file_of_a_run_is_replaced(cli, tmp_path):
    run(Experiment(**PERSONAL, rounds=2), tmp_path / "run")
    (tmp_path / "link").symlink_to("run")
    before = everything(tmp_path / "run")
    kept = next((tmp_path / "run" / "clients").rglob("*.safetensors"))
    own = [f"run/{path.name}" for path in (tmp_path / "run").iterdir() if path.is_file()]
    assert "run/checkpoint.safetensors" in own
    for name in (*own, "link/config.toml", "run/nodes.txt", "run/clients/new.safetensors", kept):
        code, _, err = cli("export", "run", "--client", 0, "--out", name, "--overwrite")
        assert (code, "is a name of the run's own in" in " ".join(err.split())) == (2, True), (name, err)
    assert everything(tmp_path / "run") == before
    for _ in range(2):
        assert cli("export", "run", "--client", 0, "--out", "run/mine.safetensors", "--overwrite")[0] == 0


def test_what_cannot_be_exported_is_said(cli, tmp_path):
    lay = Experiment(model="mlp", scheme="original", clients=8, cohort=2, rounds=1, epochs=None, steps=1)
    run(lay, tmp_path / "run")
    for arguments, code, says in (
        (["nowhere"], 2, "does not exist"),
        (["run", "--format", "tflite"], 2, "unknown format 'tflite'"),
        ([tmp_path], 2, "not a run folder"),
        ([tmp_path / "run" / "config.toml"], 1, "expected a whole safetensors file"),
    ):
        found, _, err = cli("export", *arguments)
        assert (found, says in err) == (code, True), err
    for damaged in ("{}", "[]", '{"name": "mlp", "classes": "x", "shape": [64]}'):
        (tmp_path / "run" / "model.json").write_text(damaged)
        code, _, err = cli("export", "run")
        assert (code, "model.json is damaged: expected" in err) == (1, True), err
    (tmp_path / "run" / "model.json").unlink()
    code, _, err = cli("export", "run")
    assert code == 1
    assert "model.json cannot be read" in err
    (tmp_path / "run" / "checkpoint.safetensors").unlink()
    code, _, err = cli("export", "run")
    assert code == 1
    assert "no readable checkpoint" in err


@pytest.mark.parametrize("side", [10**12, 10**19, 10**400])
def test_a_size_that_no_network_has_is_damage(cli, tmp_path, side):
    run(Experiment(**{**PERSONAL, "scheme": "original"}, rounds=1), tmp_path / "run")
    described = {"name": "mlp", "classes": 10, "shape": [1, 8, side]}
    (tmp_path / "run" / "model.json").write_text(json.dumps(described))
    code, _, err = cli("export", "run")
    assert (code, "model.json is damaged: " in err) == (1, True), err


def test_a_checkpoint_of_another_config_is_not_exported(cli, tmp_path):
    """The same tensors under tanh are another model, and nobody would know."""
    run(Experiment(**{**PERSONAL, "scheme": "fedpara"}, rounds=1), tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    config.write_text('nonlinearity = "tanh"\n' + config.read_text())
    code, _, err = cli("export", "run")
    assert (code, "belongs to another config than run/config.toml" in err) == (1, True), err
    assert not (tmp_path / "run" / "model.merged.safetensors").exists()


def test_an_older_model_is_not_exported_in_the_place_of_the_newest(cli, tmp_path):
    run(Experiment(**PERSONAL, rounds=3), tmp_path / "run")
    newest = tmp_path / "run" / "checkpoint.safetensors"
    content = bytearray(newest.read_bytes())
    content[-3] ^= 1
    newest.write_bytes(content)
    code, _, err = cli("export", "run", "--client", 0)
    assert code == 1
    assert "The one before it is of round 2: `fedpara resume run` goes back to it" in " ".join(err.split())
    assert cli("resume", "run")[0] == 0
    assert cli("export", "run", "--client", 0)[0] == 0


def test_anothers_part_is_not_exported_as_a_clients_own(cli, tmp_path):
    run(Experiment(**PERSONAL, rounds=1), tmp_path / "run")
    paths = [kept_file(tmp_path / "run" / "clients", client, 1) for client in range(2)]
    shutil.copyfile(*paths)
    code, _, err = cli("export", "run", "--client", 1)
    assert (code, "kept by client 0, round 1: expected that of client 1" in " ".join(err.split())) == (
        1,
        True,
    )


def test_another_runs_part_is_not_exported_as_a_clients_own(cli, tmp_path):
    """Whole, and of that client and round, but not what the checkpoint counts on."""
    run(Experiment(**PERSONAL, rounds=1), tmp_path / "run")
    path = kept_file(tmp_path / "run" / "clients", 0, 1)
    groups = read_groups(path)
    next(iter(groups["private"].values())).add_(1)
    write_groups(path, groups, whose=(0, 1))
    code, _, err = cli("export", "run", "--client", 0)
    assert code == 1
    assert "0-1.safetensors is not the file that the checkpoint counts on" in " ".join(err.split())


def test_a_clients_older_part_is_not_exported_in_the_place_of_its_newest(cli, tmp_path):
    run(Experiment(**PERSONAL, rounds=3), tmp_path / "run")
    kept = final_checkpoint(tmp_path / "run").kept
    client, round = next((c, r) for c, r in kept.items() if r == 3)
    path = kept_file(tmp_path / "run" / "clients", client, round)
    path.rename(path.with_name(f"{client}-{round - 1}.safetensors"))
    code, _, err = cli("export", "run", "--client", client)
    assert code == 1
    assert f"{client}-3.safetensors is missing" in "".join(err.split("\n"))
