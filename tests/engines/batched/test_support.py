"""Which models run batched, and the reasons why others do not."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout
from torch.nn.utils import parametrize

import fedpara as fp
from fedpara import algorithms, data, models
from fedpara.engines.memory import InMemory
from fedpara.engines.program import make_program
from fedpara.engines.session import Session
from fedpara.engines.settings import Settings
from fedpara.engines.simulate import build_engine
from fedpara.errors import ConfigError, RunError

BATCHED = Settings(rounds=1, cohort=2, engine="batched")


def test_a_model_that_vmap_does_not_support_runs_sequentially_with_a_reason(digits):
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 10)

        def forward(self, x):
            return self.fc(x.flatten(1)) * (1.0 if float(x.sum()) > 0 else 2.0)

    train, test = digits
    task = fp.Task(Reads(), test=test)
    federation = fp.FederatedData(train, data.iid(train.targets, 4, 0))
    session = Session(make_program(task.model), algorithms.fedavg(lr=0.1), fp.Link(), 0)
    engine = build_engine(BATCHED, session, task, federation, InMemory())
    assert engine.name == "sequential"
    assert "not batched" in engine.why
    assert ".item()" in engine.why


def test_auto_on_a_cpu_batches_matrix_products_but_not_convolutions(digits):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    train, _ = digits
    federation = fp.FederatedData(train, data.iid(train.targets, 6, 0))

    def engine(model, cohort=5):
        run = fp.simulate(
            fp.Task(model), federation, algorithms.fedavg(lr=0.01, steps=1), rounds=1, cohort=cohort
        )
        return run.engine

    assert engine(models.mlp(64, 24, 10)).startswith("batched: 5 lanes on cpu, eager")
    assert "stacked convolutions are slower on a CPU" in engine(
        models.build("cnn", classes=10, shape=(1, 8, 8))
    )
    assert "this cohort fills 4 lanes; on a CPU fewer than 5 are slower" in engine(
        models.mlp(64, 24, 10), cohort=4
    )
    assert "this cohort fills 1 lane; on a CPU" in engine(models.mlp(64, 24, 10), cohort=1)


class Centred(nn.Module):
    """Its output for an example depends on the others in the batch."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        x = x.flatten(1)
        return self.fc(x - x.mean(0))


@pytest.mark.parametrize(("sizes", "ran"), [([8] * 1100, "batched"), ([8] * 1099 + [9], "sequential")])
def test_a_layer_that_mixes_the_batch_sees_no_padding(digits, sizes, ran):
    train, model = digits[0], Centred()
    federation = fp.FederatedData(train, [list(range(size)) for size in sizes])
    session = Session(make_program(model), algorithms.fedavg(lr=0.1, batch_size=4), fp.Link(), 0)
    engine = build_engine(BATCHED, session, fp.Task(model), federation, InMemory())
    assert engine.name == ran
    if ran == "sequential":
        assert "; not batched: short batches are padded" in engine.why


def hardest(output, target):
    """Only the hardest fifth of the batch counts."""
    each = torch.nn.functional.cross_entropy(output, target, reduction="none")
    return each * (each >= each.sort().values[len(each) * 4 // 5])


def focal(output, target):
    each = torch.nn.functional.cross_entropy(output, target, reduction="none")
    return each * (1 - torch.exp(-each)) ** 2


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("loss", "sizes", "ran"), [
    (hardest, (9, 8, 8), "sequential"),
    (hardest, (8, 8, 8), "batched"),
    (focal, (9, 8, 8), "batched"),
])  # fmt: skip
def test_a_loss_that_mixes_the_batch_sees_no_padding(digits, loss, sizes, ran, seed):
    torch.manual_seed(seed)
    owners = torch.randperm(len(digits[0])).split([*sizes, len(digits[0]) - sum(sizes)])[:-1]
    federation = fp.FederatedData(digits[0], [rows.tolist() for rows in owners])
    task = fp.Task(models.mlp(64, 16, 10), loss=loss)
    session = Session(make_program(task.model), algorithms.fedavg(lr=0.1, batch_size=4), fp.Link(), 0)
    engine = build_engine(BATCHED, session, task, federation, InMemory())
    assert engine.name == ran
    assert (ran == "sequential") == ("the loss of an example depends on the others" in engine.why)


class Shifted(nn.Module):
    """Adding one number to all outputs changes no loss: the gradient of `shift` is pure rounding."""

    def __init__(self):
        super().__init__()
        self.fc, self.shift = nn.Linear(64, 10), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.fc(x.flatten(1)) + self.shift


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_rounding_is_not_mistaken_for_a_layer_that_mixes_the_batch(digits, optimizer):
    algorithm = algorithms.fedavg(lr=0.1, batch_size=4, optimizer=optimizer)
    session = Session(make_program(Shifted()), algorithm, fp.Link(), 0)
    federation = fp.FederatedData(digits[0], [[0, 1, 2], [3, 4]])
    engine = build_engine(BATCHED, session, fp.Task(session.program.model), federation, InMemory())
    assert engine.name == "batched", engine.why


class Noisy(Centred):
    def forward(self, x):
        return dropout(self.fc(dropout(x.flatten(1), 0.5, self.training)), 0.5, self.training)


def test_random_layers_are_not_mistaken_for_layers_that_mix_the_batch(digits):
    reasons = []
    for model in (Noisy(), nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))):
        federation = fp.FederatedData(digits[0], [[0, 1, 2], [3, 4]])
        session = Session(make_program(model), algorithms.fedavg(lr=0.1, batch_size=2), fp.Link(), 0)
        reasons.append(build_engine(BATCHED, session, fp.Task(model), federation, InMemory()).why)
    assert "has random layers other than nn.Dropout" in reasons[0]
    assert "not batched" not in reasons[1]


class BySize(Centred):
    def forward(self, x):
        return self.fc(x.flatten(1)) / len(x)


@pytest.mark.parametrize("model", [Centred(), BySize()])
@pytest.mark.parametrize("first", [0, 255])
def test_layers_that_mix_the_batch_are_found_despite_blank_examples_or_batch_size(digits, model, first):
    train = digits[0]
    inputs = train.inputs.clone()
    inputs[0] = first
    federation = fp.FederatedData(replace(train, inputs=inputs), [[0, 1, 2], [3, 4]])
    session = Session(make_program(model), algorithms.fedavg(lr=0.1, batch_size=2), fp.Link(), 0)
    assert build_engine(BATCHED, session, fp.Task(model), federation, InMemory()).name == "sequential"


class Tenth(nn.Module):
    def forward(self, weight):
        return weight * 0.1


def test_a_parametrization_on_top_of_the_factors_runs_sequentially(world):
    """The batched engine composes weights from their forms only, so such a model runs one client at a time."""
    model = world.model("fedpara")
    parametrize.register_parametrization(model.fc1, "weight", Tenth())
    runs = [world.simulate(model, engine=name) for name in ("sequential", "batched")]
    assert "fc1.weight has another parametrization on top of its factors" in runs[1].engine
    assert all(torch.equal(tensor, runs[1].state[name]) for name, tensor in runs[0].state.items())
    with pytest.raises(ConfigError, match="another parametrization on top"):
        world.simulate(model, world.algorithm(jacobian=1.0))


def test_a_branch_that_a_loss_takes_later_ends_the_run_with_advice(digits):
    late = []

    def loss(output, target):
        each = torch.nn.functional.cross_entropy(output, target, reduction="none")
        return each * (2.0 if late and bool(each.mean() > 0) else 1.0)

    federation = fp.FederatedData(digits[0], [range(8), range(8, 16)])
    task = fp.Task(models.mlp(64, 16, 10), loss=loss)
    with pytest.raises(RunError, match=r"round 2: .* branches on a value.* Use the sequential engine"):
        fp.simulate(
            task, federation, algorithms.fedavg(lr=0.1, batch_size=4), rounds=3, cohort=2, engine="batched",
            on_round=lambda result: late.append(result.number),
        )  # fmt: skip
