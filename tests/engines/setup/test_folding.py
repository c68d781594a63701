"""The update form: every few rounds the base takes in the product, and the factors start again."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from flower_nodes import BASE

import fedpara as fp
from fedpara import models
from fedpara.apps.export_source import read_run_or_state
from fedpara.engines.server.folds import begun
from fedpara.errors import ConfigError
from fedpara.experiments import resume, run
from fedpara.experiments.run import lay_out
from fedpara.experiments.storage.checkpoint import final_checkpoint
from fedpara.files import read_tensors
from fedpara.parameterization import AwareKronecker, AwareLowRank, Kronecker, compose_state
from fedpara.wire import encode

SCHEMES = {
    "lowrank": fp.LowRank(ratio=0.2),
    "fedpara": fp.FedPara(rank=3),
    "kronecker": Kronecker(ratio=0.2),
    "lowrank-aad": AwareLowRank(ratio=0.2),
    "kronecker-aad": AwareKronecker(ratio=0.2),
}
FOLDING = replace(BASE, fold_every=2, scheme="lowrank", engine="sequential", rounds=5, lr=0.3)


def adapted(scheme="lowrank", network=None, **options):
    torch.manual_seed(0)
    plain = network() if network else models.mlp(64, hidden=32, classes=10)
    return fp.factorize(plain, SCHEMES[scheme], onto="frozen", train="*", **options)


def simulated(world, scheme="lowrank", **options):
    """(the run, the server's state after each round)"""
    seen = []
    options = {
        "rounds": 5,
        "fold_every": 2,
        "on_round": lambda result: seen.append(result.progress),
        **options,
    }
    algorithm = options.pop("algorithm", world.algorithm(lr=0.3))
    model = options.pop("model", None) or adapted(scheme)
    return world.simulate(model, algorithm, **options), seen


def product(state, weight):
    """X Y^T in NumPy."""
    x, y = (state[f"{weight}.{factor}"].double().numpy() for factor in "xy")
    return x @ y.T


def test_golden_the_base_takes_in_the_product_and_the_factors_start_again(world, engine):
    found, seen = simulated(world, engine=engine)
    session, weights = found.session, ("fc1.weight", "fc2.weight")
    for t, progress in enumerate(seen, 1):
        assert len(progress.folds.sizes) == (t - 1) // 2
        after = begun(session, progress)
        for weight in weights:
            before, base = (p.folds.state[f"{weight}.base"].double().numpy() for p in (progress, after))
            if t % 2 == 0:
                np.testing.assert_allclose(base, before + product(progress.x, weight), rtol=0, atol=1e-6)
                assert not after.x[f"{weight}.x"].any()
                assert np.abs(product(progress.x, weight)).max() > 1e-3
                assert after.x[f"{weight}.y"].abs().max() <= base.shape[1] ** -0.5
            else:
                assert np.array_equal(base, before)
                assert torch.equal(after.x[f"{weight}.x"], progress.x[f"{weight}.x"])
        others = [name for name in progress.x if name.endswith("bias")]
        assert all(torch.equal(after.x[name], progress.x[name]) for name in others)
    starts = [session.folding.start(k) for k in (1, 1, 2)]
    assert all(torch.equal(starts[0][name], starts[1][name]) for name in starts[0])
    assert not torch.equal(starts[0]["fc1.weight.y"], starts[2]["fc1.weight.y"])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_fold_changes_no_weight(world, scheme):
    found, seen = simulated(world, scheme, rounds=2)
    after = begun(found.session, seen[-1])
    assert len(after.folds.sizes) == 1
    one, other = (compose_state(p.model, found.session.program.forms) for p in (seen[-1], after))
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-6)
    start = found.session.program.initial
    assert not torch.equal(after.folds.state["fc1.weight.base"], start["fc1.weight.base"])


def test_without_a_fold_only_the_first_download_differs_from_adapters(world, engine):
    plain = world.simulate(adapted(), world.algorithm(lr=0.3), rounds=3, engine=engine)
    found, _ = simulated(world, rounds=3, fold_every=3, engine=engine)
    assert all(torch.equal(tensor, found.state[name]) for name, tensor in plain.state.items())
    for one, other in zip(plain.rounds, found.rounds, strict=True):
        assert one.bytes_up == other.bytes_up
        assert (one.bytes_down > other.bytes_down) is (one.number == 1), "start(0) is not sent"
        assert one.number == 1 or one.bytes_down == other.bytes_down


@pytest.mark.parametrize(("scheme", "every", "link"), [("lowrank", 2, "float32"), ("fedpara", 1, "float16")])
def test_golden_bytes_of_folds_that_a_client_missed(world, engine, scheme, every, link):
    found, seen = simulated(
        world, scheme, rounds=8, fold_every=every, cohort=2, engine=engine, link=fp.Link(down=link)
    )
    session, last, sizes, copies = found.session, {}, [], 0
    x = session.program.start(session.program.shared)
    rest = {name for name in x if name.endswith("bias")}
    dense = {name: t for name, t in session.program.initial.items() if name.endswith("base")}
    for t, result in enumerate(found.rounds, 1):
        if t > 1 and (t - 1) % every == 0:
            factors = {name: tensor for name, tensor in x.items() if name not in rest}
            sizes.append(len(encode(factors, session.header(t - 1), link)))
        sent = {name: tensor for name, tensor in x.items() if name in rest or (t - 1) % every}
        message, copy = len(encode(sent, session.header(t), link)), len(encode(dense, session.header(t)))
        missed = [sum(sizes[last.get(client, 0) :]) for client in result.cohort]
        assert result.bytes_down == sum(message + min(m, copy) for m in missed)
        copies += sum(m > copy for m in missed)
        last |= dict.fromkeys(result.cohort, len(sizes))
        x = seen[t - 1].x
    assert any(missed)
    assert (copies > 0) is (scheme == "fedpara"), "many folds take more bytes than the base"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_engines_agree(world, scheme):
    runs = [
        simulated(world, scheme, engine=engine, cohort=6, federation=world.personal)[0]
        for engine in ("sequential", "batched")
    ]
    assert runs[1].engine.startswith("batched")
    for name, tensor in runs[0].state.items():
        torch.testing.assert_close(tensor, runs[1].state[name], rtol=1e-4, atol=1e-5)
    for one, other in zip(runs[0].rounds, runs[1].rounds, strict=True):
        assert (one.bytes_up, one.bytes_down) == (other.bytes_up, other.bytes_down)
        assert (one.before, one.after) == pytest.approx((other.before, other.after), abs=1e-6)
    assert runs[0].rounds[-1].everyone.score == pytest.approx(runs[1].rounds[-1].everyone.score, abs=1e-6)


def test_kernels_fold_too(world, engine):
    torch.manual_seed(0)
    network = models.build("cnn", classes=10, shape=(1, 8, 8))
    found, seen = simulated(
        world, "fedpara", model=adapted("fedpara", lambda: network), rounds=3, engine=engine
    )
    assert any(t.dim() == 4 for t in seen[-1].folds.state.values())
    assert not any(result.refused for result in found.rounds)


@pytest.mark.parametrize("link", ["float16", "int8"])
def test_both_ends_fold_what_the_message_holds(world, engine, link):
    (one, seen), (two, _) = (
        simulated(world, engine=engine, link=fp.Link(up=link, down=link)) for _ in range(2)
    )
    assert all(torch.equal(one.state[name], two.state[name]) for name in one.state)
    before = seen[1]
    after, weight = begun(one.session, before), "fc1.weight"
    exact = before.folds.state[f"{weight}.base"].double().numpy() + product(before.x, weight)
    gap = np.abs(after.folds.state[f"{weight}.base"].double().numpy() - exact).max()
    assert 0 < gap < 0.05 * np.abs(product(before.x, weight)).max()


@pytest.mark.parametrize("change", [{}, {"scheme": "kronecker-aad", "ratio": 0.2, "engine": "batched"}])
def test_a_run_resumes_with_the_same_bits_and_exports_plain_layers(tmp_path, change):
    experiment = replace(FOLDING, **change)
    run(experiment, tmp_path / "whole")
    for rounds in (2, 3):  # just before and just after a fold
        run(replace(experiment, rounds=rounds), tmp_path / f"a{rounds}")
        resume(tmp_path / f"a{rounds}", rounds=5)
        ends = [
            read_tensors(tmp_path / name / "checkpoint.safetensors")[0] for name in ("whole", f"a{rounds}")
        ]
        assert ends[0].keys() == ends[1].keys()
        assert all(torch.equal(ends[1][name], tensor) for name, tensor in ends[0].items())
    progress = final_checkpoint(tmp_path / "whole").progress
    assert len(progress.folds.sizes) == 2
    assert set(progress.folds.last) <= set(range(experiment.clients))
    saved = read_run_or_state(tmp_path / "whole").saved
    expected = compose_state(progress.model, saved.forms)
    merged = saved.merged()
    assert all(torch.equal(merged[name], tensor) for name, tensor in expected.items())
    assert merged["fc1.weight"].shape == expected["fc1.weight"].shape


def test_simulate_resumes_a_folder_and_its_export_needs_no_code(world, tmp_path):
    def again(rounds):
        return simulated(world, rounds=rounds, on_round=None, out=tmp_path / "a")[0]

    again(3)
    resumed, whole = again(5), simulated(world)[0]
    assert all(torch.equal(tensor, resumed.state[name]) for name, tensor in whole.state.items())
    merged = read_run_or_state(tmp_path / "a").saved.merged()
    assert torch.equal(merged["fc1.weight"], fp.merge(adapted(), whole.state).fc1.weight)


BAD = {
    "original": ({"scheme": "original"}, "this model has none"),
    "private": ({"scheme": "pfedpara", "personal": True}, "parts of this model are private"),
    "scaffold": ({"algorithm": "scaffold"}, "use fedavg or fedprox"),
    "fedadam": ({"algorithm": "fedadam"}, "use fedavg or fedprox"),
    "kept": ({"keep_optimizer": True}, "keep_optimizer depends on the factors"),
    "jacobian": ({"jacobian": 1.0}, "jacobian depends on the factors"),
    "feedback": ({"link_up": "topk(0.1, feedback=True)"}, "and no feedback"),
    "differences": ({"link_down": "sign"}, "int8 or more down"),
    "refit": ({"products": "refit"}, "fold_every and products"),
    "robust": ({"robust": "median"}, "that robust follows"),
    "rotate": ({"rotate": True}, "that rotate follows"),
    "error": ({"aggregation_error": True}, "that aggregation_error follows"),
    "zero": ({"fold_every": 0}, "fold_every is 0"),
}


@pytest.mark.parametrize(("change", "expected"), BAD.values(), ids=BAD)
def test_a_mistake_leaves_no_folder(tmp_path, change, expected):
    with pytest.raises(ConfigError, match=expected):
        lay_out(replace(FOLDING, **change), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_restart_draws_with_the_initialiser_of_the_model(world):
    slow = world.algorithm(lr=0.001)
    found, seen = simulated(world, model=adapted(init="calibrated:3"), rounds=3, algorithm=slow)
    after = begun(found.session, seen[1])
    default = simulated(world, rounds=3, algorithm=slow)[1][2]
    assert after.x["fc1.weight.y"].std() > 3 * default.x["fc1.weight.y"].std()
    drawn = adapted(init=lambda form, generator: [torch.ones(shape) for shape in form.factors.values()])
    with pytest.raises(ConfigError, match="use a named initialiser"):
        simulated(world, model=drawn)
    half = adapted()
    half.fc1.parametrizations.weight.original1.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"some factors of fc1.weight are frozen"):
        simulated(world, model=half)
