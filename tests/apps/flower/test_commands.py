"""`fedpara flower`: the files it writes and its error messages. No Flower process is started."""

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from fedpara.apps.flower import simulation as flower_drive
from fedpara.apps.flower import up as flower_up
from fedpara.apps.flower.app_folder import CLIENT, SERVER
from fedpara.apps.flower.run_config import DEFAULT_OUT, read
from fedpara.engines.flower.policy import Policy
from fedpara.errors import ConfigError, RunError
from fedpara.experiments import Experiment, read_run, resume, run
from fedpara.experiments.storage.checkpoint import final_checkpoint

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")
x509 = pytest.importorskip("cryptography.x509")

TINY = ["--set", "model=mlp", "--set", "clients=3", "--set", "cohort=3"]


@pytest.mark.parametrize("command", ["init", "certs", "up"])
def test_help_shows_an_example(cli, command):
    code, out, _ = cli("flower", command, "--help")
    assert code == 0
    assert f"Example: fedpara flower {command} " in " ".join(out.split())


def test_init_writes_a_valid_flower_app(cli, tmp_path):
    assert cli("flower", "init", "app")[0] == 0
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == []
    assert project["tool"]["flwr"]["app"]["components"] == {
        "serverapp": f"{SERVER}:app",
        "clientapp": f"{CLIENT}:app",
    }
    from flwr.cli.config_utils import load_and_validate

    _, warnings = load_and_validate(tmp_path / "app" / "pyproject.toml")
    assert warnings == []
    settings = read(project["tool"]["flwr"]["app"]["config"])
    assert settings.experiments() == {(tmp_path / DEFAULT_OUT): Experiment(engine="flower")}
    assert settings.policy == Policy()
    code, _, err = cli("flower", "init", "app")
    assert code == 2
    assert "not empty" in err


@pytest.mark.parametrize("place", ["file", "file/app"])
def test_init_reports_an_impossible_folder(cli, tmp_path, place):
    (tmp_path / "file").write_text("mine")
    code, out, err = cli("flower", "init", place)
    assert (code, out) == (2, "")
    assert f"the folder {place} cannot be made" in err
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_config_describes_experiments_and_a_policy(tmp_path):
    settings = read(
        {
            "preset": "quickstart",
            "rounds": 7,
            "out": str(tmp_path),
            "batch-size": 8,
            "deadline": 5,
            "min-replies": 2,
        }
    )
    runs = settings.experiments()
    assert [path.name for path in runs] == ["original", "lowrank", "fedpara", "pfedpara"]
    assert {(run.rounds, run.batch_size, run.engine) for run in runs.values()} == {(7, 8, "flower")}
    assert (settings.policy.deadline, settings.policy.minimum) == (5, 2)
    assert read({"data-dir": "~/sets"}).data_dir == Path.home() / "sets"
    assert read({"keys": "~/nodes.toml"}).keys == Path.home() / "nodes.toml"
    assert settings.keys is None
    options = read({"algorithm": "fedadam", "options": "server_lr=0.5 beta1=0.8"})
    assert options.experiments()[options.out[0]].options == {"server_lr": 0.5, "beta1": 0.8}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ruonds": 3}, "unknown run-config ruonds"),
        ({"rounds": "many"}, "rounds is 'many'"),
        ({"deadline": "soon"}, "deadline is 'soon'"),
        ({"deadline": -1}, "deadline is -1"),
        ({"min-replies": 1.9}, "min-replies is 1.9: expected a whole number"),
        ({"oversample": -1}, "oversample is -1"),
        ({"preset": "quikstart"}, "did you mean 'quickstart'"),
        ({"preset": "quickstart", "config": "a.toml"}, "both given"),
        ({"options": "mu"}, "expected name=number"),
    ],
)
def test_an_invalid_run_config(given, says):
    with pytest.raises(ConfigError, match=says):
        read(given).experiments()


def test_certificates_that_openssl_accepts(cli, tmp_path):
    code, out, _ = cli(
        "flower", "certs", "keys", "--host", "fl.example.org", "--host", "127.0.0.1", "--nodes", "2"
    )
    assert code == 0
    folder = tmp_path / "keys"
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "ca.crt",
        "ca.key",
        "server.pem",
        "server.key",
        "node-0",
        "node-0.pub",
        "node-1",
        "node-1.pub",
        "nodes.toml",
    }
    private = {"ca.key", "server.key", "node-0", "node-1"}
    assert {
        line.split()[0].removeprefix("keys/") for line in out.splitlines() if "private" in line
    } == private
    assert {line.split()[0].removeprefix("keys/") for line in out.splitlines()} == names
    for path in folder.iterdir():
        private = path.suffix not in (".crt", ".pem", ".pub", ".toml")
        assert stat.S_IMODE(path.stat().st_mode) == (0o600 if private else 0o644), path
    server = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
    ca = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    server.verify_directly_issued_by(ca)
    named = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert named.get_values_for_type(x509.DNSName) == ["fl.example.org"]
    assert [str(address) for address in named.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert (folder / "node-0.pub").read_text().startswith("ecdsa-sha2-nistp384 ")
    assert (folder / "node-0").read_text() != (folder / "node-1").read_text()


def test_a_host_name_may_be_longer_than_a_common_name(cli, tmp_path):
    host = ".".join(["node"] * 20)
    assert cli("flower", "certs", "keys", "--host", host)[0] == 0
    server = x509.load_pem_x509_certificate((tmp_path / "keys" / "server.pem").read_bytes())
    named = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert named.get_values_for_type(x509.DNSName) == [host]


def test_certificates_are_never_overwritten(cli, tmp_path):
    assert cli("flower", "certs", "keys", "--host", "a.example")[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "keys").iterdir()}
    code, _, err = cli("flower", "certs", "keys", "--host", "b.example")
    assert code == 2
    assert "is not overwritten" in err
    assert before == {path: path.read_bytes() for path in (tmp_path / "keys").iterdir()}


@pytest.mark.parametrize("there", [False, True])
def test_certificates_are_written_all_or_none(cli, tmp_path, monkeypatch, there):
    if there:
        (tmp_path / "keys").mkdir()
    made = os.open

    def open_(path, *words):
        if str(path).endswith("node-1"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return made(path, *words)

    monkeypatch.setattr(os, "open", open_)
    code, out, err = cli("flower", "certs", "keys", "--host", "a.example")
    assert (code, out) == (1, "")
    assert err == "fedpara: No space left on device\n"
    assert [path.name for path in tmp_path.rglob("*")] == ["keys"] * there
    monkeypatch.setattr(os, "open", made)
    assert cli("flower", "certs", "keys", "--host", "a.example")[0] == 0


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["certs", "keys"], 2, "Missing option '--host'"),
        (["certs", "keys", "--host", "a", "--nodes", "0"], 2, "Invalid value for '--nodes'"),
        (["certs", "keys", "--host", ""], 2, "--host '': expected an IP address or an ASCII name"),
        (["certs", "keys", "--host", "a.example", "--host", "ä b"], 2, "--host 'ä b': expected"),
        (["up", *TINY, "--deadline", "-1"], 2, "deadline is -1.0: expected"),
        (["up", *TINY, "--min-replies", "4"], 2, "min_replies is 4: expected 1 to the cohort of 3"),
        (["up", *TINY, "--oversample", "1"], 2, "oversample is 1"),
        (["up", "--nodes", "4", "--set", "clients=3", "--set", "cohort=3"], 2, "4 nodes for 3 clients"),
        (["up", "--set", "rounds"], 2, "expected name=value"),
        (["up", "--set", "model=os:getcwd"], 2, "'os:getcwd' returned str: expected a torch.nn.Module"),
        (["up", "--set", "modle=mlp"], 2, "did you mean 'model'"),
        (["up", "quickstart"], 2, "write one of them as a --config"),
        (
            ["up", *TINY, "--node-config", "folder=a b"],
            2,
            "--node-config 'folder=a b': expected key=value pairs",
        ),
        (["up", *TINY, "--node-config", "memory='/tmp'"], 2, "memory are set for each node."),
    ],
)
def test_mistakes(cli, tmp_path, words, code, says):
    found, out, err = cli("flower", *words)
    assert (found, out) == (code, "")
    assert says in err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_experiment_is_rejected(cli, tmp_path):
    """Options that are not given have their defaults, which may differ from the folder's."""
    there = Experiment(model="mlp", clients=3, cohort=3, rounds=2, engine="flower")
    run(replace(there, engine="sequential"), tmp_path / "try")
    before = {path: path.read_bytes() for path in (tmp_path / "try").rglob("*") if path.is_file()}
    for words, says in (
        (
            [],
            "model is 'mlp' there and 'cnn' here, clients is 3 there and 100 here, cohort is 3 there and 10 here)",
        ),
        (["--set", "rounds=5"], "model is 'mlp' there"),
        ([*TINY, "--set", "model=cnn"], "(model is 'mlp' there and 'cnn' here)"),
        ([*TINY, "--set", "target=0.5"], "target is None there and 0.5 here)"),
        ([*TINY, "--set", "rounds=1"], "rounds is 1: expected at least the 2 that are done in try."),
    ):
        code, out, err = cli("flower", "up", "--nodes", 2, *words, "--out", "try")
        assert (code, out) == (2, "")
        assert says in err
        assert ("choose another folder" in err) == ("there" in says)
    after = {path: path.read_bytes() for path in (tmp_path / "try").rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.parametrize("words", [[*TINY, "--set", "rounds=2"], ["--config", "try/config.toml"]])
def test_a_finished_run_of_this_experiment_is_reported(cli, tmp_path, words):
    run(Experiment(model="mlp", clients=3, cohort=3, rounds=2, engine="sequential"), tmp_path / "try")
    code, out, err = cli("flower", "up", "--nodes", 2, *words, "--out", "try", "--json")
    assert code == 0, err
    assert "try already holds this experiment, finished after round 2: nothing to run." in err
    assert json.loads(out)["rounds"] == 2


def test_a_folder_with_other_examples_is_rejected_before_flower_starts(cli, tmp_path, monkeypatch):
    run(Experiment(model="mlp", clients=3, cohort=3, rounds=2, engine="sequential"), tmp_path / "try")
    (tmp_path / "try" / "data.json").write_text('{"blake2b": "another"}')
    monkeypatch.setattr(flower_up, "_federate", lambda *_: pytest.fail("Flower was started"))
    code, _, err = cli("flower", "up", "--nodes", 2, *TINY, "--set", "rounds=3", "--out", "try")
    assert (code, "was started with different examples" in err) == (1, True)


def without_its_last_checkpoint(folder):
    """A run killed between a round's metrics and its checkpoint."""
    done = Experiment(model="mlp", clients=3, cohort=3, rounds=3, engine="sequential")
    run(done, folder)
    (folder / "checkpoint.previous.safetensors").replace(folder / "checkpoint.safetensors")
    assert (read_run(folder).rounds, final_checkpoint(folder).round) == (3, 2)


def test_a_round_without_its_checkpoint_is_repeated(cli, tmp_path, monkeypatch):
    without_its_last_checkpoint(tmp_path / "try")

    def federate(experiment, out, *_):
        return resume(out, rounds=experiment.rounds, engine="sequential")

    monkeypatch.setattr(flower_up, "_federate", federate)
    code, out, err = cli("flower", "up", "--nodes", 2, *TINY, "--set", "rounds=3", "--out", "try", "--json")
    assert code == 0, err
    assert "try already holds this experiment up to round 2: resuming to round 3." in err
    assert json.loads(out)["rounds"] == final_checkpoint(tmp_path / "try").round == 3


def test_a_run_without_its_last_checkpoint_is_not_finished(tmp_path):
    without_its_last_checkpoint(tmp_path / "try")
    with (
        subprocess.Popen([sys.executable, "-c", ""]) as submitted,
        pytest.raises(RunError, match=r"ended the run in .* before its last round"),
    ):
        flower_drive.follow(tmp_path / "try", submitted, tmp_path / "run.log", 3, None)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("Started\nRun 7 failed.\n", "Run 7 failed."),
        (
            "╭─ Error ─────────╮\n│ The SuperLink   │\n│ cannot be read. │\n╰─────────────────╯\n",
            "The SuperLink cannot be read.",
        ),
        ("Run 7 failed.\n\n---- 12:00\n", "Run 7 failed."),
        ("", "nothing."),
    ],
)
def test_the_cause_is_flowers_last_text(tmp_path, said, shown):
    (tmp_path / "run.log").write_text(said)
    assert f"Its last message: {shown} Finished" in flower_drive._why(
        tmp_path / "log.txt", tmp_path / "run.log"
    )


def test_the_cause_is_the_servers_own_error_if_it_raised_one(tmp_path):
    (tmp_path / "run.log").write_text(
        "Traceback (most recent call last):\n  raise RunError(\n"
        "fedpara.errors.RunError: try was started on another base.\n"
        "ERROR : Exit Code: 201\n\nFor more information, visit: <https://flower.ai/201.html>\n"
    )
    assert flower_drive._why(tmp_path / "log.txt", tmp_path / "run.log") == "try was started on another base."


def test_a_folder_in_use_is_reported_before_a_federation_starts(cli, tmp_path):
    run(Experiment(model="mlp", clients=3, cohort=3, rounds=1, engine="sequential"), tmp_path / "try")
    with (tmp_path / "try" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code, out, err = cli("flower", "up", "--nodes", 2, *TINY, "--set", "rounds=2", "--out", "try")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("fedpara: try is in use by another process")


def test_the_server_names_the_difference_too(tmp_path):
    from fedpara.apps.flower.server_app import _laid_out

    run(Experiment(model="mlp", clients=3, cohort=3, rounds=1), tmp_path / "try")
    with pytest.raises(ConfigError, match=r"\(clients is 3 there and 4 here\): choose another folder"):
        _laid_out(
            read({"out": str(tmp_path / "try"), "model": "mlp", "clients": 4, "cohort": 3, "rounds": 7})
        )


def test_the_guide_makes_a_folder_before_using_it():
    """A SuperLink does not create the folder of its --database; it fails with a traceback."""
    guide = Path(__file__).parents[3] / "docs" / "deployment.md"
    commands = [line for line in guide.read_text().splitlines() if line.startswith("    ")]
    first = next(line for line in commands if "/var/lib/fedpara" in line)
    assert first.split() == ["mkdir", "-p", "/var/lib/fedpara"]


def test_a_client_imports_only_what_training_needs():
    code = (
        "import sys; import fedpara.apps.flower.client_app\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules} & {'ray', 'sklearn', 'scipy', 'matplotlib', "
        "'pandas', 'datasets', 'peft', 'onnx', 'PIL', 'uvicorn', 'fastapi', 'sqlalchemy'}))"
    )
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (got.returncode, got.stdout.strip()) == (0, ""), got.stderr
