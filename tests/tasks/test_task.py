"""A custom loss, metric or input structure works on every engine; a wrong one is named before the first round."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedpara as fp
from fedpara import algorithms
from fedpara.data import Examples
from fedpara.errors import ConfigError
from fedpara.tasks import LOSSES, METRICS, losses, metrics

ENGINES = ("sequential", "batched")
X = torch.randn(46, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1) + 0.1 * X[:, 0] ** 2
ROWS = [range(17), range(17, 30), range(30, 46)]


def squared(output, target):
    return (output[:, 0] - target).square()


def simulate(task, train=None, engine="sequential", **options):
    data = fp.FederatedData(train or Examples(X, Y), ROWS, test=train or Examples(X, Y))
    options = {"rounds": 2, "cohort": 3, **options}
    return fp.simulate(task, data, algorithms.fedavg(lr=0.05, batch_size=8), engine=engine, **options)


def linear(inputs=3):
    torch.manual_seed(0)
    return nn.Linear(inputs, 1)


class Pair(nn.Module):
    """Takes its inputs as two arguments, a and b, and returns a dict."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(2, 4), nn.Linear(1, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, a, b):
        return {"sum": self.head(torch.tanh(self.left(a) + self.right(b)))[:, 0]}


def of_dicts(output, target):
    return (output["sum"] - target["y"]).square() * target["weight"], target["weight"]


TREES = {
    "dict": {"a": X[:, :2], "b": X[:, 2:]},
    "tuple": (X[:, :2], X[:, 2:]),
}


@pytest.mark.parametrize("inputs", TREES)
def test_engines_agree_on_inputs_targets_and_outputs_of_several_tensors(inputs):
    train = Examples(TREES[inputs], {"y": Y, "weight": torch.rand(46, generator=torch.Generator()) + 0.5})
    runs = [simulate(fp.Task(Pair(), loss=of_dicts), train, engine) for engine in ENGINES]
    assert [run.engine.split(":")[0] for run in runs] == [*ENGINES]
    assert runs[0].score == pytest.approx(runs[1].score, rel=1e-5)
    assert runs[0].rounds[1].train_loss == pytest.approx(runs[1].rounds[1].train_loss, rel=1e-5)
    for name, tensor in runs[0].state.items():
        torch.testing.assert_close(tensor, runs[1].state[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_first_metric_is_the_primary_one(engine):
    rmse = fp.metric(higher_is_better=False, finish=lambda sums, weight: float((sums / weight).sqrt()))(
        squared
    )
    task = fp.Task(
        linear(), loss=squared, metrics={"rmse": rmse, "r2": "r2", "half": lambda o, t: o[:, 0] / 2}
    )
    run = simulate(task, engine=engine, rounds=4)
    assert (task.primary, task.higher_is_better) == ("rmse", False)
    assert [*run.rounds[0].scores] == ["rmse", "r2", "half", "loss"]
    for result in run.rounds:
        assert result.score == result.scores["rmse"] == pytest.approx(result.scores["loss"] ** 0.5)
    assert run.rounds[-1].scores["r2"] > run.rounds[0].scores["r2"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_target_of_a_metric_where_lower_is_better_stops_the_run(engine):
    whole = [
        r.scores["mae"] for r in simulate(fp.Task(linear(), loss="mse", metrics=["mae"]), rounds=6).rounds
    ]
    goal = whole[2] * 1.0001
    task = fp.Task(linear(), loss="mse", metrics=["mae"])
    assert len(simulate(task, engine=engine, rounds=6, target=goal).rounds) == 3


def test_a_named_loss_equals_the_same_function():
    named, own = (simulate(fp.Task(linear(), loss=loss)) for loss in ("mse", squared))
    assert all(torch.equal(tensor, own.state[name]) for name, tensor in named.state.items())


def test_test_data_may_be_given_like_a_clients_data():
    run = simulate(fp.Task(linear(), loss="mse", test=(X.numpy(), Y.numpy())))
    assert run.score == simulate(fp.Task(linear(), loss="mse", test=Examples(X, Y))).score


WRONG_LOSSES = {
    "a scalar": (lambda o, t: F.mse_loss(o[:, 0], t), "the loss returned a single number for 2 examples"),
    "a Python number": (lambda o, t: 0.5, "the loss returned float"),
    "nothing": (lambda o, t: None, "the loss returned NoneType"),
    "too short": (lambda o, t: squared(o, t)[:1], r"the loss returned \[1\] for 2 examples"),
    "a table": (lambda o, t: (o - t[:, None]).square(), r"the loss returned \[2, 1\] for 2 examples"),
    "a scalar weight": (lambda o, t: (squared(o, t), torch.tensor(2.0)), "the loss returned a single number"),
    "NaN": (lambda o, t: squared(o, t) * float("nan"), "the loss of the first example is nan"),
    "an error": (lambda o, t: F.cross_entropy(o, t, reduction="none"), "the loss failed: "),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("wrong", WRONG_LOSSES)
def test_a_wrong_loss_is_one_sentence_before_the_first_round(wrong, engine):
    loss, words = WRONG_LOSSES[wrong]
    with pytest.raises(ConfigError, match=words) as caught:
        simulate(fp.Task(linear(), loss=loss), engine=engine)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (lambda o, t: o.mean(), "metric 'mine' returned a single number for 2 examples"),
        (lambda o, t: o[:1], r"metric 'mine' returned \[1, 1\] for 2 examples"),
        (lambda o, t: o @ t, "metric 'mine' failed: "),
    ],
)
def test_a_wrong_metric_is_named(metric, words):
    with pytest.raises(ConfigError, match=words):
        simulate(fp.Task(linear(), loss="mse", metrics={"mine": metric}))


@pytest.mark.parametrize("name", sorted({*LOSSES, *METRICS}))
def test_a_message_says_what_each_named_loss_and_metric_takes(name):
    """The lists are complete."""
    assert all(
        name in takes for known, takes in ((LOSSES, losses.TAKES), (METRICS, metrics.TAKES)) if name in known
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"loss": "next-token"},
            r"the loss 'next-token' failed on output float32 \[2, 1\] .* takes logits \[N, length",
        ),
        ({"loss": "mse", "metrics": ["dice"]}, "metric 'dice' failed on output .* where it takes logits"),
    ],
)
def test_a_loss_or_metric_that_does_not_fit_says_what_it_takes(fields, words):
    with pytest.raises(ConfigError, match=words):
        simulate(fp.Task(linear(), **fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loss": "msee"}, "unknown loss 'msee'.*mse"),
        ({"metrics": ["acuracy"]}, "unknown metric 'acuracy'.*accuracy"),
        ({"metrics": "r2"}, r"metrics is 'r2': expected a list, such as \['r2'\]"),
        ({"metrics": ["loss"]}, "always measured"),
        ({"metrics": ["r2", sum]}, "metrics holds .*sum.* without a name: give a dict"),
    ],
)
def test_an_unknown_name_is_rejected_when_the_task_is_made(fields, words):
    with pytest.raises(ConfigError, match=words):
        fp.Task(linear(), **fields)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_that_becomes_nan_refuses_the_client_and_the_round_goes_on(engine):
    sick = Y.clone()
    sick[20] = float("nan")
    data = fp.FederatedData(Examples(X, sick), ROWS)
    run = fp.simulate(
        fp.Task(linear(), loss="mse"),
        data,
        algorithms.fedavg(lr=0.05, batch_size=8),
        rounds=1,
        cohort=3,
        engine=engine,
    )
    assert [(client, "diverged" in reason) for client, reason in run.rounds[0].refused] == [(1, True)]


@dataclass
class Output:
    logits: torch.Tensor
    cache: object = None


class WithOutput(nn.Linear):
    """Returns an object, as the models of Hugging Face do."""

    def forward(self, x):
        return Output(super().forward(x), object())


def test_an_output_may_be_any_object_that_the_loss_reads():
    def loss(output, target):
        return (output.logits[:, 0] - target).square()

    states = []
    for engine in ENGINES:
        torch.manual_seed(0)
        run = simulate(fp.Task(WithOutput(3, 1), loss=loss), engine=engine)
        assert run.engine.startswith(engine)
        states.append(run.state)
    for name, expected in states[0].items():
        torch.testing.assert_close(states[1][name], expected)
    with pytest.raises(ConfigError, match="on output Output and targets float32"):
        simulate(fp.Task(WithOutput(3, 1), loss="mse"))


def test_a_model_or_loss_that_cannot_train_is_named():
    with pytest.raises(ConfigError, match=r"model is the class Linear: expected a torch\.nn\.Module"):
        fp.Task(nn.Linear)
    with pytest.raises(ConfigError, match="the loss has parameters of its own, which would not train"):
        fp.Task(linear(), loss=nn.PReLU())
