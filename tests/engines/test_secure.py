"""Secure aggregation in simulations: the same model as in the clear, within the rounding of fixed point."""

from dataclasses import replace

import pytest
import torch
from torch import nn

pytest.importorskip("flwr")

import fedpara as fp
from fedpara.engines.secure import stages
from fedpara.errors import ConfigError
from fedpara.secure import SecAgg

WIDE = SecAgg(clip=8.0, bits=26)


def runs(world, engine, scheme="fedpara", algorithm="fedavg", **how):
    options = {"rounds": 3, "cohort": 4, "engine": engine, **how}
    return [
        world.simulate(world.model(scheme), world.algorithm(algorithm), secure=secure, **options)
        for secure in (None, WIDE)
    ]


def distance(a, b):
    return max(float((a.state[name] - b.state[name]).abs().max()) for name in a.state)


@pytest.mark.parametrize(
    ("scheme", "algorithm", "how"),
    [
        ("original", "fedavg", {}),
        ("fedpara", "fedavg", {"weights": "uniform"}),
        ("pfedpara", "fedavg", {}),
        ("fedpara", "fedadam", {}),
        ("fedpara", "fedprox", {"link": fp.Link(down="float16"), "max_share": 0.3}),
    ],
)
def test_the_model_equals_the_plain_one_within_quantization(world, engine, scheme, algorithm, how):
    plain, secure = runs(world, engine, scheme, algorithm, **how)
    rounds = 3 if algorithm != "fedadam" else 300  # Adam divides by the size of a change
    assert distance(plain, secure) <= 20 * rounds * WIDE.step
    assert [r.train_loss for r in secure.rounds] == pytest.approx([r.train_loss for r in plain.rounds], 1e-3)
    if scheme == "pfedpara":
        private, other = (run.memory.get(run.rounds[-1].cohort[0])["private"] for run in (plain, secure))
        assert all(torch.allclose(private[name], other[name], atol=1e-4) for name in private)


def test_lost_clients_leave_the_mean_as_in_a_plain_run(world, engine):
    plain, secure = runs(world, engine, cohort=6, rounds=4, lost=0.15)
    lost = [{client for client, _ in result.refused} for result in plain.rounds]
    assert [{client for client, _ in result.refused} for result in secure.rounds] == lost
    assert any(lost)
    assert not any(result.notes for result in secure.rounds)
    assert distance(plain, secure) <= 80 * WIDE.step


def test_the_bytes_of_every_stage_are_counted(world, monkeypatch):
    counted = {}
    stage = stages.Simulated.stage

    def recorded(self, name, round, bodies, message, personal):
        down = sum(map(len, bodies.values())) + (len(bodies) * len(message) if name == "masked" else 0)
        for reply in stage(self, name, round, bodies, message, personal):
            counted[name, "up"] = counted.get((name, "up"), 0) + len(reply.message)
            yield reply
        counted[name, "down"] = down

    monkeypatch.setattr(stages.Simulated, "stage", recorded)
    run = world.simulate(world.model(), rounds=1, cohort=4, secure="secagg")
    assert run.rounds[0].bytes_up == sum(n for (_, way), n in counted.items() if way == "up")
    assert run.rounds[0].bytes_down == sum(n for (_, way), n in counted.items() if way == "down")
    numbers = sum(tensor.numel() for tensor in run.state.values())
    assert counted["masked", "up"] == pytest.approx(
        4 * 3 * numbers, rel=0.1
    )  # 22 bits and 4 clients: 3 bytes


def test_a_skipped_round_keeps_the_model_and_says_why(world, engine):
    run = world.simulate(
        world.model("pfedpara"), rounds=3, cohort=4, engine=engine, lost=0.7, secure="secagg(threshold=1)"
    )
    skipped = [result for result in run.rounds if any("gave no sum" in note for note in result.notes)]
    assert skipped
    assert "clients sent their masked update: expected at least 4 (threshold 1)" in skipped[0].notes[0]
    assert "the model stays unchanged" in skipped[0].notes[-1]
    assert all(result.memories == () for result in skipped)


def test_clipping_bounds_what_a_client_can_change(world):
    start = world.model()
    x = {name: tensor.clone() for name, tensor in start.state_dict().items()}
    run = world.simulate(start, world.algorithm(lr=1.0), rounds=1, cohort=4, secure="secagg(clip=0.01)")
    moved = sum(float((run.state[name] - x[name]).square().sum()) for name in x) ** 0.5
    assert 0.002 < moved <= 0.0101


def test_simulated_devices_and_poisson_cohorts(world):
    devices = fp.Devices(bandwidth=1e5, speed=20.0, deadline=1e3)
    run = world.simulate(
        world.model(), rounds=5, cohort=3, sampler="poisson", devices=devices, secure="secagg"
    )
    assert run.rounds[-1].clock > 0
    few = [r for r in run.rounds if len(r.cohort) < 3]
    assert all("too few for secure aggregation" in r.notes[0] for r in few)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize(
    ("algorithm", "how", "why"),
    [
        ("scaffold", {}, "'scaffold' sends more than the model"),
        ("single", {}, "'fedavg' needs each one"),
        ("fedavg", {"link": fp.Link(up="int8")}, "link_up is 'int8'"),
        ("fedavg", {"max_norm": 1.0}, "max_norm checks each update"),
        ("fedavg", {"cohort": 2}, "expected 3 clients or more"),
        ("fedavg", {"share": "none"}, "shares no parameter"),
        ("fedavg", {"network": Norm}, "use a model without BatchNorm"),
        ("fedavg", {"secure": "secagg(threshold=0.4)"}, "threshold is 0.4: expected a share above 0.5"),
        ("fedavg", {"secure": "secagg(bits=4)"}, "bits is 4: expected a whole number, 8 to 32"),
        ("fedavg", {"secure": "secagg(clip=0)"}, "clip is 0: expected a norm above 0"),
        ("fedavg", {"secure": "paillier"}, "unknown secure 'paillier': known: secagg."),
    ],
)
def test_what_cannot_be_summed_is_refused_before_a_folder_is_made(world, tmp_path, algorithm, how, why):
    how = dict(how)
    network = how.pop("network", None)
    made = world.algorithm("fedavg" if algorithm == "single" else algorithm)
    if algorithm == "single":
        made = replace(made, aggregate=lambda x, server, updates, clients: (updates[0].y, server))
    with pytest.raises(ConfigError) as error:
        world.simulate(
            world.model(network=network), made, out=tmp_path / "run", **{"secure": "secagg", **how}
        )
    assert why in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_run_folder_resumes_to_the_same_bits(world, tmp_path):
    def run(out, **how):
        return world.simulate(
            world.model("pfedpara"), rounds=4, cohort=4, lost=0.2, secure=SecAgg(clip=2.0), out=out, **how
        )

    whole = run(tmp_path / "whole")
    run(tmp_path / "half", on_round=lambda result: result.number < 2)
    resumed = run(tmp_path / "half")
    assert all(torch.equal(whole.state[name], resumed.state[name]) for name in whole.state)
    lines = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "half")]
    assert lines[0] == lines[1]
    assert "secagg(clip=2.0)" in (tmp_path / "whole" / "config.toml").read_text()
    assert "cannot check a single update" in (tmp_path / "whole" / "log.txt").read_text()
