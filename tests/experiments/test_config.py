"""Experiment: configs survive a write and a read, and mistakes are rejected with their line."""

import re
import tomllib
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpara.algorithms import Local
from fedpara.data import FederatedData
from fedpara.errors import ConfigError, SchemeError
from fedpara.experiments import Experiment
from fedpara.experiments.build import build, build_algorithm, build_scheme
from fedpara.experiments.config import FREE
from fedpara.experiments.config_file import read_toml, to_toml, with_values
from fedpara.experiments.presets import PRESETS, preset
from fedpara.parameterization import FedPara, LowRank, PFedPara

positive = st.floats(1e-30, 1e30)
maybe = {
    "lr": positive,
    "alpha": positive | st.sampled_from([float("inf"), np.float64("inf"), np.float64(0.3), 2]),
    "gamma": st.floats(0, 1),
    "max_norm": positive | st.just(float("inf")),
    "target": st.floats(0.001, 1),
    "dataset": st.text(max_size=20).map(lambda text: text.replace(":", "")) | st.just("a.b:c(d='\u007f')"),
    "rounds": st.integers(1, 10**12),
    "seed": st.integers(0, 2**62),
    "personal": st.booleans(),
    "nonlinearity": st.none() | st.just("tanh"),
}


work = st.sampled_from(
    [{}, {"steps": 2}, {"epochs": 1, "steps": 2}, {"epochs": None, "steps": 3}, {"epochs": 5}]
)
mus = st.none() | st.floats(0, 1e10) | st.sampled_from([1, np.float32(0.1), np.float64(0.1), np.int64(2)])


@settings(deadline=None, max_examples=100)
@given(values=st.fixed_dictionaries({}, optional=maybe), work=work, mu=mus)
def test_a_config_survives_a_write_and_a_read(tmp_path_factory, values, work, mu):
    values |= work
    if mu is not None:
        values |= {"algorithm": "fedprox", "options": {"mu": mu}}
    experiment = Experiment(**values)
    path = tmp_path_factory.getbasetemp() / "config.toml"
    path.write_text(to_toml(experiment), encoding="utf-8")
    assert read_toml(path) == experiment
    assert read_toml(path).identity == experiment.identity


@pytest.mark.parametrize("work", [{"epochs": 2, "steps": 3}, {"epochs": None}])
def test_epochs_and_steps_exclude_each_other(work):
    with pytest.raises(ConfigError, match="expected one of the two"):
        build_algorithm(Experiment(**work))


def test_every_preset_survives_a_write_and_a_read(tmp_path):
    for each in PRESETS.values():
        for experiment in each.runs.values():
            (tmp_path / "config.toml").write_text(to_toml(experiment))
            assert read_toml(tmp_path / "config.toml") == experiment


OTHER = {
    "dataset": "mnist",
    "model": "mlp",
    "scheme": "pfedpara",
    "gamma": 0.3,
    "rank": 4,
    "ratio": 0.5,
    "nonlinearity": "tanh",
    "conv": "reshape",
    "init": "fan_out",
    "algorithm": "fedadam",
    "options": {"mu": 0.5},
    "share": "none",
    "split": "iid",
    "alpha": 0.1,
    "clients": 50,
    "keep": 20,
    "classes_per_client": 3,
    "data_fraction": 0.5,
    "personal": True,
    "cohort": 5,
    "rounds": 7,
    "epochs": 7,
    "steps": 3,
    "batch_size": 7,
    "lr": 0.2,
    "lr_decay": 0.9,
    "momentum": 0.9,
    "weight_decay": 0.1,
    "clip": 1.0,
    "jacobian": 1.0,
    "jacobian_norm": "squared",
    "augment": "crop-flip",
    "link_up": "int8",
    "link_down": "int8",
    "max_norm": 1.0,
    "evaluate_every": 5,
    "target": 0.5,
    "seed": 1,
    "engine": "sequential",
    "precision": "tf32",
    "device": "cpu",
    "where": "every",
    "validation": 0.1,
    "weights": "uniform",
    "max_share": 0.5,
    "robust": "median",
    "attack": "sign-flip",
    "hostile": 0.2,
    "products": "refit",
    "gammas": "0.1, 0.3",
    "aggregation_error": True,
    "test_owners": "all",
    "sampler": "poisson",
    "lost": 0.3,
    "bandwidth": "lognormal(5e6, 0.5)",
    "speed": 20.0,
    "device_deadline": 60.0,
    "patience": 10,
    "onto": "frozen",
    "adapter_alpha": 8.0,
    "train": "classifier, bias",
    "loss": "mypkg:focal(gamma=2.0)",
    "metrics": "top-5, mypkg:worst(k=2, name='a,b')",
    "optimizer": "adamw(betas=(0.9, 0.95))",
    "schedule": "step_decay(30)",
    "keep_optimizer": True,
    "secure": "secagg(clip=0.5)",
    "objects": "model 1234",
    "rotate": True,
    "recycle": 2,
    "fold_every": 5,
    "privacy": "user(noise=1.1, clip=0.5)",
    "epsilon": 4.0,
    "delta": 1e-6,
    "privacy_seed": 3,
}


def test_the_identity_covers_every_field_except_the_free_ones():
    assert OTHER.keys() == {field.name for field in fields(Experiment)}
    base = Experiment(algorithm="fedprox", split="owner")
    for name, value in OTHER.items():
        changed = replace(base, **{name: value})
        assert changed != base, name
        assert (changed.identity == base.identity) == (name in FREE), name


BAD = {
    "scheme": ("fedpera", "did you mean 'fedpara'"),
    "split": ("dirichelet", "did you mean 'dirichlet'"),
    "model": ("vgg", "did you mean 'vgg16'"),
    "algorithm": ("fedavgg", "did you mean 'fedavg'"),
    "engine": ("seqential", "did you mean 'sequential'"),
    "share": ("fedpr", "did you mean 'fedper'"),
    "augment": ("crop_flip", "did you mean 'crop-flip'"),
    "data_fraction": (0.0, "above 0 and at most 1"),
    "validation": (1.0, "a fraction below 1, such as 0.1"),
    "weights": ("exampels", "did you mean 'examples'"),
    "test_owners": ("trained", "did you mean 'training'"),
    "keep": (101, "1 to the number of clients"),
    "seed": (1 << 63, "0 to 2^63 - 1"),
    "lr": ("fast", "expected float"),
    "gamma": ("small", "expected float."),
    "personal": (1, "expected bool"),
    "clip": (True, "clip is True: expected float."),
    "rounds": (True, "rounds is True: expected int."),
    "batch_size": (2.5, "expected int"),
    "options": ({"mu": 0.1}, "fedavg has no hyper-parameter 'mu'"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_a_bad_value_is_rejected(name):
    value, text = BAD[name]
    with pytest.raises(ConfigError, match=re.escape(text)):
        Experiment(**{name: value})


def test_the_algorithms_options_are_checked():
    with pytest.raises(ConfigError, match="mu"):
        Experiment(algorithm="fedprox", options={"mu": -1.0})


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("lr = 0.1\nlrr = 3\n", 2, "unknown key 'lrr': did you mean 'lr'?"),
        ("# a comment\n\n  colour = 'red'\n", 3, "unknown key 'colour'"),
        ("mu = 0.1\n", 1, "unknown key 'mu': it is an option of an algorithm, so its name is options.mu"),
        ("cohort = 5\n'clinets' = 3\n", 2, "did you mean 'clients'?"),
        ("rounds = 3\nlr = 'fast'\n", 2, "lr is 'fast': expected float"),
        ("rounds = 3\nvalidation = -1\n", 2, "validation is -1"),
        ("rounds = 3\nscheme = 'fedpera'\n", 2, "unknown scheme 'fedpera'"),
        ("algorithm = 'fedprox'\n[options]\nnu = 1.0\n", 3, "no hyper-parameter 'nu'"),
        ("algorithm = 'fedprox'\noptions.nu = 1.0\n", 2, "no hyper-parameter 'nu'"),
    ],
)
def test_a_mistake_in_a_config_file_is_reported_with_its_line(tmp_path, text, line, says):
    path = tmp_path / "my.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_toml(path)
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert says in str(caught.value)


def test_files_that_are_not_configs_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_toml(tmp_path)
    (tmp_path / "torn.toml").write_text("lr = \n")
    with pytest.raises(ConfigError, match=r"is not TOML: .*line 1"):
        read_toml(tmp_path / "torn.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_toml(tmp_path / "binary.toml")


def test_a_given_size_replaces_the_one_in_the_base():
    base = Experiment(gamma=0.3)
    assert with_values(base, {"rank": 4}) == replace(base, gamma=None, rank=4)
    assert with_values(base, {"scheme": "original"}).gamma is None
    assert with_values(base, {"steps": 5}).epochs is None
    assert with_values(with_values(base, {"steps": 5}), {"epochs": 2}) == replace(base, epochs=2)
    assert with_values(base, {}) == base


def test_scheme_names_become_schemes():
    assert build_scheme(Experiment(scheme="original")) is None
    assert build_scheme(Experiment()) == FedPara(gamma=0.1)
    assert build_scheme(Experiment(rank=3, nonlinearity="tanh")) == FedPara(rank=3, nonlinearity="tanh")
    assert build_scheme(Experiment(scheme="pfedpara", gamma=0.5)) == PFedPara(gamma=0.5)
    assert build_scheme(Experiment(scheme="lowrank", ratio=0.2)) == LowRank(ratio=0.2)
    for wrong in ({"ratio": 0.5}, {"scheme": "lowrank", "nonlinearity": "tanh"}, {"gamma": 1.5}):
        with pytest.raises((ConfigError, SchemeError)):
            build_scheme(Experiment(**wrong))


def test_fields_become_the_algorithm_and_its_local_part():
    words = {"lr": 0.3, "lr_decay": 0.9, "batch_size": 7, "momentum": 0.5, "weight_decay": 0.1}
    words |= {"clip": 2.0, "jacobian": 1.0, "jacobian_norm": "squared", "epochs": 3}
    local = build_algorithm(Experiment(algorithm="fedprox", options={"mu": 0.7}, **words)).local
    assert asdict(local) == {**asdict(Local()), **words, "steps": None}


@pytest.mark.parametrize(
    "words",
    [
        {"dataset": "digit"},
        {"link_up": "float8"},
        {"jacobian_norm": "cubed"},
        {"init": "zeros"},
        {"conv": "fold"},
        {"model": "vgg16"},
        {"split": "owner"},
        {"clients": 5000},
        {"lr": -1.0},
        {"momentum": 1.0},
        {"clients": 0},
        {"alpha": 0.0},
        {"where": "first"},
        {"where": "hybrid:x"},
    ],
)
def test_build_rejects_bad_values(words):
    with pytest.raises((ConfigError, SchemeError)):
        build(Experiment(**words))


def test_data_fraction_applies_to_each_client():
    whole, half = (build(Experiment(clients=10, data_fraction=f)).data for f in (1.0, 0.5))
    for client in range(10):
        assert half.size(client) == max(1, round(whole.size(client) / 2))
        assert set(half.clients[client].tolist()) <= set(whole.clients[client].tolist())


def test_the_seed_determines_the_model_and_the_split():
    parts = [build(Experiment(model="mlp", scheme="original", clients=10, seed=s)) for s in (0, 0, 1)]
    weights = [part.task.model.state_dict()["fc1.weight"] for part in parts]
    assert (weights[0] == weights[1]).all()
    assert not (weights[0] == weights[2]).all()
    assert parts[0].data.clients == parts[1].data.clients
    assert parts[0].data.clients != parts[2].data.clients


def test_an_unknown_preset_suggests_the_nearest_name():
    assert set(preset("quickstart").runs) == {"original", "lowrank", "fedpara", "pfedpara"}
    with pytest.raises(ConfigError, match="did you mean 'quickstart'"):
        preset("quikstart")


def test_config_toml_is_plain_toml():
    written = tomllib.loads(to_toml(Experiment(gamma=0.25, algorithm="fedprox", options={"mu": 0.5})))
    assert written["gamma"] == 0.25
    assert written["options"] == {"mu": 0.5}
    assert "rank" not in written


def test_an_int_and_the_equal_float_are_the_same_experiment():
    whole = Experiment(lr=1, alpha=1, algorithm="fedprox", options={"mu": 1})
    assert whole.identity == Experiment(lr=1.0, alpha=1.0, algorithm="fedprox", options={"mu": 1.0}).identity
    assert type(whole.lr) is type(whole.options["mu"]) is float


@pytest.mark.parametrize(
    "text", ["seed = 1" + "0" * 5000, "lr = " + "[" * 20_000], ids=["digits", "brackets"]
)
def test_a_hostile_config_file_is_rejected(tmp_path, text):
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(ConfigError, match="is not TOML"):
        read_toml(tmp_path / "config.toml")


def test_a_byte_order_mark_is_ignored(tmp_path):
    (tmp_path / "config.toml").write_text("\ufefflr = 0.5\n", encoding="utf-8")
    assert read_toml(tmp_path / "config.toml").lr == 0.5


@pytest.mark.parametrize("words", [{"nonlinearity": "tanh"}, {"init": "he"}, {"gamma": 0.1}])
def test_the_original_scheme_rejects_factor_options(words):
    with pytest.raises(ConfigError, match=r"scheme 'original' has no .*: leave it out"):
        build_scheme(Experiment(scheme="original", **words))
    changed = with_values(Experiment(scheme="fedpara", **words), {"scheme": "original"})
    assert build_scheme(changed) is None


def test_the_digest_covers_the_bytes_of_the_examples():
    parts = build(Experiment(model="mlp", scheme="original"))
    train = parts.data.train
    other = replace(train, inputs=train.inputs + (torch.arange(len(train)) == 7)[:, None, None, None])

    def digest(examples):
        return replace(parts, data=FederatedData(examples, parts.data.clients)).digest

    assert digest(train) == parts.digest
    assert digest(other) != parts.digest
    for odd in (train.subset([]), replace(train, inputs=train.inputs.bfloat16(), mean=None, std=None)):
        assert digest(odd) != parts.digest
