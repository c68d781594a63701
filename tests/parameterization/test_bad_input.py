"""Bad input: a FedParaError that says what, expected, got and cure, and a model left as it was."""

import pytest
import torch
from snapshot import Snapshot, network
from torch import nn

import fedpara as fp
from fedpara.errors import SchemeError, StateError, UsageError
from fedpara.parameterization import fan_out, fit_errors, forms, plan, write

FEDPARA = fp.FedPara(rank=2)


@pytest.mark.parametrize("init", [None, "fit", "calibrated"])
def test_where_matches_nothing(init):
    model = network()
    before = Snapshot(model)
    with pytest.raises(
        SchemeError, match=r"no weight of Sequential.*0.weight: not chosen.*expected `where`.*inspect"
    ):
        fp.factorize(model, FEDPARA, lambda name, module, parameter: name == "classifier", init=init)
    before.assert_unchanged()


def test_nothing_would_become_smaller():
    layer = nn.Linear(3, 3)
    before = Snapshot(layer)
    with pytest.raises(
        SchemeError, match=r"\(weight: its factors \(12\) would be no smaller than it \(9\).*force=True"
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
            SchemeError, match=r"factorized already \(.*0.weight is made of factors\).*Merge it first"
        ):
            fp.factorize(target, again)
    before.assert_unchanged()
    assert set(forms(fp.factorize(fp.merge(model), again, force=True))) == set(forms(model))


@pytest.mark.parametrize("scheme", [FEDPARA, fp.PFedPara(gamma=0.5), fp.LowRank(ratio=0.5)])
def test_a_one_dimensional_parameter(scheme):
    model = network()
    before = Snapshot(model)
    expected = r"1.bias: \w+ cannot write a weight of shape \(8,\): expected two or more dimensions.*`where`"
    with pytest.raises(SchemeError, match=expected):
        fp.factorize(
            model,
            scheme,
            lambda name, module, parameter: name in {"1", "3"} and parameter == "bias" and scheme,
        )
    with pytest.raises(SchemeError, match=r"no weight of Sequential.*1.weight: one-dimensional"):
        fp.factorize(model, scheme, lambda name, module, parameter: name == "1")
    before.assert_unchanged()
    for shape in ((), (4,), (0, 4), (4, 0, 3)):
        with pytest.raises(SchemeError, match="two or more dimensions"):
            write(scheme, shape)


def test_parameters_that_no_factors_can_make():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(8, 9, dtype=torch.int64), requires_grad=False)

    with pytest.raises(
        SchemeError, match=r"table holds int64: expected floating-point.*Leave this parameter out"
    ):
        fp.factorize(Counts(), FEDPARA, lambda *_: True)
    with pytest.raises(SchemeError, match=r"no weight of Counts.*table: not chosen"):
        fp.factorize(Counts(), FEDPARA)
    with pytest.raises(SchemeError, match=r"0.weight has no shape yet.*Pass one batch"):
        fp.factorize(nn.Sequential(nn.LazyLinear(9)), FEDPARA)


@pytest.mark.parametrize("odd", [None, 1, "fedpara", 0.5], ids=repr)
def test_where_answers_something_else(odd):
    model = network()
    before = Snapshot(model)
    with pytest.raises(
        SchemeError, match=rf"`where` answered {odd!r} for 0.weight: expected True, False or a scheme"
    ):
        fp.factorize(model, FEDPARA, lambda *_: odd)
    before.assert_unchanged()


@pytest.mark.parametrize(
    "init", ["xavier", "he:", "he:big", "he:0", "he:-1", "he:nan", "he:1,2,3", "fit:2", 5]
)
def test_an_init_that_is_none(init):
    model = network()
    before = Snapshot(model)
    with pytest.raises(SchemeError, match=rf"{init!r}.*fan_out|must be a name or a function.*got {init!r}"):
        fp.factorize(model, FEDPARA, init=init)
    before.assert_unchanged()


def test_where_and_init_that_raise_in_the_middle_change_nothing():
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


def test_a_weight_that_is_not_finite_cannot_be_fitted():
    model = network()
    with torch.no_grad():
        model[3].weight[2, 5] = float("nan")
    model[3].weight.data[0, 0] = float("inf")
    classes = [type(m) for m in model.modules()]
    with pytest.raises(
        SchemeError, match=r"3.weight: 2 of 720 entries are NaN or infinite: expected .* another init"
    ):
        fp.factorize(model, FEDPARA, lambda n, m, p: n == "3" and p == "weight", init="fit")
    assert [type(m) for m in model.modules()] == classes
    assert [n for n, _ in model[3].named_parameters()] == ["weight", "bias"]


class Sealed(nn.Linear):
    """Refuses the subclass that torch makes to hold a weight's property."""

    def __init_subclass__(cls) -> None:
        raise TypeError("sealed")


class Transparent(nn.Module):
    """Looks through to what it wraps, so that torch finds `weight` there still after it took it away here."""

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
def test_a_registration_that_fails_midway_is_taken_back(stubborn, error, init):
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


def test_there_is_nothing_to_merge():
    with pytest.raises(SchemeError, match=r"Sequential holds no factorized weight.*Factorize it first"):
        fp.merge(network())


def test_assigning_a_weight_of_another_shape():
    layer = fp.factorize(nn.Linear(16, 14), FEDPARA)
    before = Snapshot(layer)
    with pytest.raises(SchemeError, match=r"shape \(14, 16\) cannot be fitted to one of \(14, 15\)"):
        layer.weight = torch.zeros(14, 15)
    before.assert_unchanged()
    assert fit_errors(layer) == {}


def test_one_except_clause_catches_them_all():
    assert issubclass(SchemeError, UsageError)
    assert issubclass(UsageError, fp.FedParaError)
    assert issubclass(StateError, fp.FedParaError)


def test_a_padding_row_stays():
    model = nn.Sequential(nn.Embedding(50, 30, padding_idx=0), nn.Linear(30, 30))
    fp.factorize(model, FEDPARA)
    assert set(forms(model)) == {"1.weight"}
    assert not model[0].weight[0].any()


def test_a_sparse_embedding_is_refused_by_name():
    model = nn.Sequential(nn.Embedding(50, 30, sparse=True), nn.Linear(30, 30))
    with pytest.raises(SchemeError, match=r"gradient of 0\.weight is sparse.* sparse=False"):
        fp.factorize(model, FEDPARA)
    assert not forms(model)
    fp.factorize(model, FEDPARA, lambda name, module, parameter: name == "1")


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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": None}, "model is of type NoneType: expected torch's Module"),
        ({"model": nn.Linear}, "model is the class Linear"),
        ({"scheme": fp.FedPara}, r"the scheme is <class .*FedPara.*>.* such as FedPara\(gamma=0.1\)"),
        ({"where": "linear"}, "`where` is 'linear': expected a function"),
        ({"where": lambda *_: fp.FedPara}, "`where` answered <class .*FedPara"),
        ({"generator": 0}, "generator is of type int: expected torch's Generator"),
        ({"init": lambda form, generator: None}, r"factors of shapes \['NoneType'\]"),
        (
            {"init": lambda form, generator: [torch.full(s, float("nan")) for s in form.factors.values()]},
            "returned NaN or infinity",
        ),
    ],
)
def test_an_argument_of_another_kind(given, said):
    layer = nn.Linear(64, 64)
    before = Snapshot(layer)
    with pytest.raises(SchemeError, match=said):
        fp.factorize(**{"model": layer, "scheme": FEDPARA, **given})
    before.assert_unchanged()


def test_an_initialiser_may_return_one_tensor_twice():
    def alike(form, generator):
        x, y = (torch.randn(shape) for shape in list(form.factors.values())[:2])
        return [x, y, x, y]

    layer = fp.factorize(nn.Linear(64, 64, bias=False), FEDPARA, init=alike)
    x1, _, x2, _ = layer.parameters()
    with torch.no_grad():
        x1 += 1
    assert not torch.equal(x1, x2)


def test_merge_is_for_a_model():
    with pytest.raises(SchemeError, match="model is of type NoneType"):
        fp.merge(None)
