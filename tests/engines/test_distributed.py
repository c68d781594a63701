"""Two gloo ranks give the bits of one process, and a rank that fails or dies ends the run.

Run as a script, this file is one rank: it writes its results into the given folder.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from two_ranks import ENVIRONMENT, ended, ranks

import fedpara as fp
from fedpara import algorithms, data, models
from fedpara.apps import cli
from fedpara.engines.distributed.process_group import all_gather
from fedpara.errors import FedParaError, RunError
from fedpara.experiments import Experiment, read_run, resume, run
from fedpara.experiments.config_file import to_toml
from fedpara.experiments.storage.tensor_files import read_tensors

BIN = Path(sys.executable).parent
CLIENTS = 7

CASES = {
    "fedavg": ("original", "fedavg", "sequential"),
    "scaffold": ("original", "scaffold", "sequential"),
    "pfedpara": ("pfedpara", "fedavg", "sequential"),
    "fedavg-batched": ("original", "fedavg", "batched"),
    "pfedpara-scaffold-batched": ("pfedpara", "scaffold", "batched"),
    "scaffold-poisson": ("original", "scaffold", "batched"),
    "ditto-batched": ("original", "ditto", "batched"),
    "fedavg-cosine": ("original", "fedavg", "sequential"),
    "fedavg-private": ("original", "fedavg", "sequential"),
    "fedavg-private-secure": ("original", "fedavg", "sequential"),
    "fedavg-folded": ("lowrank", "fedavg", "batched"),
}
FACTS = ("number", "refused", "clock", "train_loss", "bytes_up", "bytes_down", "accuracy", "loss", "before")
OPTIONS = {
    "scaffold-poisson": {"sampler": "poisson", "lost": 0.3, "rounds": 5, "devices": fp.Devices(speed=2)},
    "fedavg-private": {
        "sampler": "poisson",
        "weights": "uniform",
        "personal": False,
        "privacy": fp.privacy.User(1.0, 0.3, quantile=0.5),
        "privacy_seed": 1,
    },
    "fedavg-private-secure": {
        "sampler": "poisson",
        "weights": "uniform",
        "personal": False,
        "privacy": fp.privacy.User(1.0, 0.3),
        "privacy_seed": 1,
        "secure": "secagg(clip=0.3)",
        "link": fp.Link(),
    },
    "fedavg-folded": {"fold_every": 1},
}

TINY = Experiment(
    model="mlp",
    scheme="pfedpara",
    init="calibrated",
    algorithm="scaffold",
    link_up="float16",
    personal=True,
    clients=8,
    cohort=4,
    rounds=5,
    epochs=None,
    steps=2,
    batch_size=16,
    lr=0.02,
)


def simulated(case="fedavg", poison=False, **options):
    scheme, algorithm, engine = CASES[case]
    torch.manual_seed(0)
    model = models.mlp(64, hidden=16, classes=10)
    if scheme == "pfedpara":
        model = fp.factorize(model, fp.PFedPara(gamma=0.1))
    elif scheme == "lowrank":
        model = fp.factorize(model, fp.LowRank(rank=2), onto="frozen", train="*")
    train, test = data.load("digits")
    rows = [range(12 * k, 12 * k + 5 + k) for k in range(CLIENTS)]
    if poison:
        train = replace(train, inputs=torch.full_like(train.inputs, float("nan"), dtype=torch.float32))
    federation = fp.FederatedData(train, [row[:-2] for row in rows], test_clients=[row[-2:] for row in rows])
    schedule = fp.cosine(warmup=1) if case == "fedavg-cosine" else None
    local = algorithms.Local(lr=0.05, batch_size=4, schedule=schedule)
    return fp.simulate(
        fp.Task(model, test=test.subset(range(50))),
        federation,
        algorithms.build(algorithm, local),
        **{
            "rounds": 3,
            "cohort": 5,
            "engine": engine,
            "link": fp.Link(up="float16"),
            **OPTIONS.get(case, {}),
            **options,
        },
    )


def facts(result):
    """As JSON gives them back."""
    rows = [[getattr(r, name) for name in (*FACTS, "after", "cohort")] for r in result.rounds]
    return json.loads(json.dumps(rows))


def simulations(folder, rank):
    """What one rank does in the tests of `fp.simulate`. It writes the results into the folder."""
    found = {}
    for case in CASES:
        result = simulated(case)
        found[case] = {"facts": facts(result), "engine": result.engine}
        save_file(result.state, folder / f"{case}-{rank}.safetensors")
        for client in range(CLIENTS):
            try:
                save_file(result.client_state(client), folder / f"{case}-client{client}-{rank}.safetensors")
            except RunError as error:
                found[case][str(client)] = str(error)
    fresh = simulated("fedavg-private-secure", privacy_seed=None)
    save_file(fresh.state, folder / f"fresh-{rank}.safetensors")

    def fails(result):
        if rank == 1:
            raise ZeroDivisionError("on this rank alone")

    mistakes = {
        "poison": lambda: simulated(poison=True),
        "one fails": lambda: simulated(on_round=fails),
        "seeds": lambda: simulated(seed=rank),
        "rounds": lambda: simulated(rounds=1 + rank),
    }
    for name, mistake in mistakes.items():
        try:
            mistake()
        except Exception as error:
            found[name] = [type(error).__name__, str(error)]
    found["and on"] = facts(simulated())
    found["stopped"] = facts(simulated(rounds=9, on_round=lambda result: rank == 0 or result.number < 2))
    held = sys.modules["torch.distributed.nn.functional"].broadcast.__defaults__
    found["held"] = [type(default).__name__ for default in held]
    (folder / f"{rank}.json").write_text(json.dumps(found))


def commands():
    """A run into the default folder, then one into a folder that is already used."""
    cli.app(["run", "--config", "tiny.toml", "--json"], standalone_mode=False)
    sys.argv = ["fedpara", "run", "--out", "runs"]
    cli.main()


def await_rounds(folder, count, processes):
    """Wait until the folder has this many more rounds."""

    def done():
        path = folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    goal = done() + count
    while done() < goal:
        assert all(process.poll() is None for process in processes), ended(processes)
        time.sleep(0.02)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """(the folder, what each rank found, how each ended)"""
    folder = tmp_path_factory.mktemp("two")
    (folder / "tiny.toml").write_text(to_toml(TINY))
    with ranks(__file__, str(folder), cwd=folder) as processes:
        results = ended(processes)
    assert [code for code, *_ in results] == [2, 2], results
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], results


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_give_the_bits_of_one_process(two, case):
    folder, found, _ = two
    alone = simulated(case)
    for rank in range(2):
        assert json.dumps(found[rank][case]["facts"]) == json.dumps(facts(alone))
        assert same(load_file(folder / f"{case}-{rank}.safetensors"), alone.state)
        assert found[rank][case]["engine"].startswith(f"{alone.engine.split(':')[0]}: 2 ranks (gloo), each: ")
    for client in range(CLIENTS):
        own = load_file(folder / f"{case}-client{client}-{client % 2}.safetensors")
        assert same(own, alone.client_state(client))


def test_ranks_agree_on_noise_that_has_no_seed(two):
    """Of the clients' noise under secure aggregation, and of the server's."""
    states = [load_file(two[0] / f"fresh-{rank}.safetensors") for rank in range(2)]
    assert same(*states)
    assert not same(states[0], load_file(two[0] / "fedavg-private-secure-0.safetensors"))


def test_on_round_of_any_rank_ends_the_run_on_all(two):
    assert [len(rank["stopped"]) for rank in two[1]] == [2, 2], "only rank 1 returns False, after round 2"


@pytest.mark.parametrize("case", CASES)
def test_a_client_memory_is_on_one_rank_and_the_other_names_it(two, case):
    folder, found, _ = two
    for client in range(CLIENTS):
        other = 1 - client % 2
        if case.startswith("fedavg"):
            assert (folder / f"{case}-client{client}-{other}.safetensors").exists()
        else:
            assert f"on rank {client % 2}, and this is rank {other}" in found[other][case][str(client)]


def test_an_error_on_one_rank_is_raised_on_all(two):
    with pytest.raises(FedParaError) as alone:
        simulated(poison=True)
    first, second = two[1]
    assert first["poison"] == second["poison"] == [type(alone.value).__name__, str(alone.value)]
    assert second["one fails"] == ["ZeroDivisionError", "on this rank alone"]
    assert first["one fails"] == ["RunError", "rank 1 failed: ZeroDivisionError: on this rank alone"]


def test_ranks_with_different_settings_are_rejected(two):
    for found in two[1]:
        assert found["seeds"][0] == found["rounds"][0] == "RunError"
        assert "rank 1 has a different model, cohort or seed than rank 0 in round 1" in found["seeds"][1]
        assert "out of step: the scores of all clients, round 2" in found["rounds"][1]


def test_nothing_keeps_the_process_group_alive_at_the_end(two):
    """Otherwise its threads would live on and sometimes abort the process at exit."""
    _, found, _ = two
    assert [rank["held"] for rank in found] == [["NoneType"]] * 2


def test_the_ranks_continue_together_after_an_error(two):
    assert two[1][0]["and on"] == two[1][1]["and on"] == facts(simulated())


def ends_like(path, reference, prolonged=False):
    """The two runs ended with the same bits. An extended run also has everyone's score where it ended first."""
    a, b = (read_tensors(p / "checkpoint.safetensors") for p in (path, reference))
    if prolonged:
        ours, theirs = (read_run(p).metrics for p in (path, reference))
        last = [line.pop("everyone", None) for line in ours][-1]
        assert last == [line.pop("everyone", None) for line in theirs][-1]
        assert ours == theirs
        assert a[1].pop("metrics") != b[1].pop("metrics")
    else:
        for name in ("metrics.jsonl", "clients.jsonl"):
            assert (path / name).read_bytes() == (reference / name).read_bytes()
    assert read_run(path).by_client == read_run(reference).by_client != {}
    assert a[1] == b[1]
    assert same(a[0], b[0])


def test_rank_0_chooses_the_folder_and_prints(two):
    folder, _, (first, second) = two
    (path,) = (folder / "runs").iterdir()
    row = json.loads(first[1])
    assert row["run"] == str(path.relative_to(folder))
    assert row["rounds"] == TINY.rounds
    assert "2 ranks (gloo), each: " in row["engine"]
    assert "round 5/5" in first[2].splitlines()[-2]
    assert first[2].splitlines()[-1].startswith("fedpara: runs is not empty and holds no run")
    assert second[1] == second[2] == ""
    run(TINY, folder / "alone")
    ends_like(path, folder / "alone")


def test_a_dead_rank_ends_the_run_and_any_number_of_ranks_resumes_it(tmp_path):
    folder = tmp_path / "run"
    run(replace(TINY, rounds=2), folder)
    with ranks("-m", "fedpara", "resume", "run", "--rounds", "100000", cwd=tmp_path) as processes:
        await_rounds(folder, 8, processes)
        processes[1].kill()
        (code, _, output), _ = ended(processes)
    assert code == 1, output
    assert "fedpara: rank 1 no longer responds at " in output
    assert "resume with `fedpara resume run`" in output
    assert "Traceback" not in output
    assert "stopped: RunError: rank 1 no longer responds" in log(folder)
    kept = Counter(path.name.split("-")[0] for path in (folder / "clients").glob("*/*.safetensors"))
    assert max(kept.values()) <= 4, "every rank removes files that no checkpoint needs"

    words = [BIN / "torchrun", "--nproc-per-node", "2", "--no-python", BIN / "fedpara", "resume", "run"]
    with subprocess.Popen(words, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE) as torchrun:
        await_rounds(folder, 2, [torchrun])
        torchrun.terminate()
        torchrun.communicate(timeout=120)
    assert torchrun.returncode
    assert "stopped: Terminated: SIGTERM" in log(folder)

    rounds = read_run(folder).rounds + 2
    resume(folder, rounds=rounds)
    assert log(folder).count("resumed after round") == 3
    run(replace(TINY, rounds=rounds), tmp_path / "alone")
    ends_like(folder, tmp_path / "alone", prolonged=True)


def log(folder):
    return (folder / "log.txt").read_text()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpus_exchange_bytes_with_nccl(tmp_path):
    """One GPU allows only one rank."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    try:
        content = bytes(range(256)) * 5
        assert all_gather(content, 1, torch.device("cuda", 0)) == [content]
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    simulations(Path(sys.argv[1]), int(os.environ["RANK"]))
    commands()
