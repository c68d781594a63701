"""Mistakes in calls of `factorize` and `merge`: a clear error and an unchanged model."""

import pytest
import torch
from snapshot import Snapshot, network
from torch import nn

import fedpara as fp
from fedpara.errors import SchemeError, StateError, UsageError
from fedpara.parameterization import fan_out, fit_errors, forms, plan

FEDPARA = fp.FedPara(rank=2)


@pytest.mark.parametrize("init", [None, "fit", "calibrated"])
def test_where_matches_nothing(init):
    model = network()
    before = Snapshot(model)
    with pytest.raises(
        SchemeError,
        match=r"no weight of Sequential.*0.weight: not chosen.*`where` must choose.*inspect.*'original'",
    ):
        fp.factorize(model, FEDPARA, lambda name, module, parameter: name == "classifier", init=init)
    before.assert_unchanged()


def test_nothing_would_become_smaller():
    layer = nn.Linear(3, 3)
    before = Snapshot(layer)
    with pytest.raises(
        SchemeError,
        match=r"\(weight: its factors \(12\) would be no smaller than the weight \(9\).*force=True",
    ):
        fp.factorize(layer, fp.FedPara(gamma=0.5))
    before.assert_unchanged()
    (choice,) = [c for c in plan(layer, fp.FedPara(gamma=0.5)) if c.name == "weight"]
    assert (choice.form, choice.parameters) == (None, 9)
    assert set(forms(fp.factorize(layer, fp.FedPara(gamma=0.5), force=True))) == {"weight"}


def test_a_model_without_parameters():
    with pytest.raises(SchemeError, match=r"no weight of ReLU was factorized \(it has none\)"):
        fp.factorize(nn.ReLU(), FEDPARA)


@pytest.mark.parametrize("again", [fp.FedPara(gamma=0.1), fp.LowRank(ratio=0.5)])
def test_a_factorized_model_is_not_factorized_again(again):
    model = fp.factorize(network(), FEDPARA)
    before = Snapshot(model)
    for target in (model, nn.Sequential(model)):
        with pytest.raises(
            SchemeError, match=r"already factorized \(.*0.weight has factors\): merge it first"
        ):
            fp.factorize(target, again)
    before.assert_unchanged()
    assert set(forms(fp.factorize(fp.merge(model), again, force=True))) == set(forms(model))


@pytest.mark.parametrize("scheme", [FEDPARA, fp.PFedPara(gamma=0.5), fp.LowRank(ratio=0.5)])
@pytest.mark.parametrize("answer", ["True", "scheme"])
def test_one_dimensional_parameters_stay_dense(scheme, answer):
    model = network()
    before = Snapshot(model)
    with pytest.raises(SchemeError, match=r"no weight of Sequential.*1.weight: one-dimensional"):
        fp.factorize(
            model,
            scheme,
            lambda name, module, parameter: name == "1" and (True if answer == "True" else scheme),
        )
    before.assert_unchanged()


def test_integer_parameters_stay_dense():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(8, 9, dtype=torch.int64), requires_grad=False)

    with pytest.raises(SchemeError, match=r"no weight of Counts.*table: not floating-point"):
        fp.factorize(Counts(), FEDPARA, lambda *_: True)
    with pytest.raises(SchemeError, match=r"no weight of Counts.*table: not chosen"):
        fp.factorize(Counts(), FEDPARA)


@pytest.mark.parametrize("odd", [None, "fedpara", fp.FedPara], ids=repr)
def test_where_returns_something_else(odd):
    model = network()
    before = Snapshot(model)
    with pytest.raises(
        SchemeError, match=rf"the scheme of 0.weight is {odd!r}: expected a scheme.*True or False"
    ):
        fp.factorize(model, FEDPARA, lambda *_: odd)
    before.assert_unchanged()


@pytest.mark.parametrize("init", ["xavier", "he:", "he:big", "he:0", "he:-1", "he:1,2,3", "fit:2"])
def test_an_unknown_init(init):
    model = network()
    before = Snapshot(model)
    with pytest.raises(SchemeError, match=rf"unknown init {init!r}.*fan_out"):
        fp.factorize(model, FEDPARA, init=init)
    before.assert_unchanged()


def test_an_error_inside_where_or_init_changes_nothing():
    model = network()
    before = Snapshot(model)
    calls = []

    def init(form, generator):
        calls.append(form.shape)
        if len(calls) == 3:
            raise ZeroDivisionError("the third weight")
        return fan_out(form, generator)

    def where(name, module, parameter):
        if name == "4":
            raise KeyError("the last layer")
        return parameter == "weight" and name != "1"

    with pytest.raises(ZeroDivisionError, match="third"):
        fp.factorize(model, FEDPARA, init=init)
    assert calls == [(8, 3, 3, 3), (10, 72), (32, 10)]
    before.assert_unchanged()
    with pytest.raises(KeyError, match="last layer"):
        fp.factorize(model, FEDPARA, where)
    before.assert_unchanged()


class Sealed(nn.Linear):
    """Refuses the subclass that torch makes to hold a weight's property."""

    def __init_subclass__(cls) -> None:
        raise TypeError("sealed")


class Transparent(nn.Module):
    """Forwards attributes to the module inside, so torch still finds a `weight` after it removed this one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 14))
        self.scale = nn.Parameter(torch.ones(()))
        self.inner = inner

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


@pytest.mark.parametrize(
    ("stubborn", "error"),
    [(lambda: Sealed(16, 14), TypeError), (lambda: Transparent(nn.Linear(16, 14)), AssertionError)],
    ids=["sealed", "transparent"],
)
@pytest.mark.parametrize("init", [None, "calibrated"])
def test_a_registration_that_fails_midway_is_undone(stubborn, error, init):
    torch.manual_seed(0)
    shared = nn.Linear(10, 20)
    model = nn.Sequential(shared, nn.Embedding(20, 10), nn.LSTM(20, 8), stubborn(), nn.Linear(16, 14))
    model[1].weight = shared.weight
    before = Snapshot(model)
    x = torch.randn(3, 2, 20)
    recurrent = model[2](x)[0].detach()
    with pytest.raises(error):
        fp.factorize(model, FEDPARA, init=init)
    before.assert_unchanged()
    assert model[1].weight is shared.weight
    assert torch.equal(model[2](x)[0], recurrent)
    fp.factorize(model, FEDPARA, lambda n, m, p: n in {"0", "2"} and p.startswith("weight"))
    assert {"0.weight", "1.weight", "2.weight_ih_l0"} <= set(forms(model))


def test_merging_a_plain_model_copies_it():
    model = network()
    copy = fp.merge(model)
    assert copy is not model
    assert all(torch.equal(copy.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_assigning_a_weight_of_another_shape():
    layer = fp.factorize(nn.Linear(16, 14), FEDPARA)
    before = Snapshot(layer)
    with pytest.raises(RuntimeError, match=r"\[14, 16\]"):
        layer.weight = torch.zeros(14, 15)
    before.assert_unchanged()
    assert fit_errors(layer) == {}


def test_one_except_clause_catches_all_errors():
    assert issubclass(SchemeError, UsageError)
    assert issubclass(UsageError, fp.FedParaError)
    assert issubclass(StateError, fp.FedParaError)


def test_a_padding_row_stays():
    model = nn.Sequential(nn.Embedding(50, 30, padding_idx=0), nn.Linear(30, 30))
    fp.factorize(model, FEDPARA)
    assert set(forms(model)) == {"1.weight"}
    assert not model[0].weight[0].any()


def test_a_sparse_embedding_stays_dense():
    model = fp.factorize(nn.Sequential(nn.Embedding(50, 30, sparse=True), nn.Linear(30, 30)), FEDPARA)
    assert set(forms(model)) == {"1.weight"}
    with pytest.raises(SchemeError, match="its gradient is sparse"):
        fp.factorize(nn.Embedding(50, 30, sparse=True), FEDPARA)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_torchs_old_weight_norm_is_not_merged():
    old = nn.Sequential(nn.utils.weight_norm(nn.Linear(30, 30)), nn.Linear(30, 30))
    fp.factorize(old, FEDPARA, lambda name, module, parameter: name == "1")
    with pytest.raises(
        SchemeError, match=r"0.weight is computed.*torch.nn.utils.parametrizations.weight_norm"
    ):
        fp.merge(old)
    new = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(30, 30)), nn.Linear(30, 30))
    fp.factorize(new, FEDPARA, lambda name, module, parameter: name == "1")
    x = torch.randn(2, 30)
    torch.testing.assert_close(fp.merge(new)(x), new(x))


def test_an_initialiser_may_return_one_tensor_twice():
    def alike(form, generator):
        x, y = (torch.randn(shape) for shape in list(form.factors.values())[:2])
        return [x, y, x, y]

    layer = fp.factorize(nn.Linear(64, 64, bias=False), FEDPARA, init=alike)
    x1, _, x2, _ = layer.parameters()
    with torch.no_grad():
        x1 += 1
    assert not torch.equal(x1, x2)


def test_a_rule_that_is_no_function_is_named():
    with pytest.raises(SchemeError, match="where is 'early': expected a function"):
        fp.factorize(nn.Linear(8, 8), fp.LowRank(rank=2), where="early")
