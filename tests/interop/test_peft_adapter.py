"""Adapters in both directions: PEFT composes our weights, and we compose PEFT's."""

import json
from collections import OrderedDict
from dataclasses import dataclass

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedpara as fp
from fedpara import models
from fedpara.errors import SchemeError, StateError, UsageError
from fedpara.interop.peft import base_state, read_adapter, write_adapter
from fedpara.parameterization import compose_state, forms


class Network(nn.Module):
    """Names with a common ending, strip and 1x1 kernels, grouped and one-dimensional convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(48, 40)
        self.head = nn.Sequential(OrderedDict(fc=nn.Linear(40, 30), last=nn.Linear(30, 20)))
        self.conv = nn.Conv2d(16, 24, 3)
        self.strip = nn.Conv2d(24, 32, (3, 1))
        self.grouped = nn.Conv2d(32, 48, 3, groups=2)
        self.point = nn.Conv2d(48, 48, 1)
        self.line = nn.Conv1d(48, 48, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.point(self.grouped(self.strip(self.conv(x))))
        scores: Tensor = self.head(self.fc(self.line(y.flatten(2)).mean(2)))
        return scores


LAYERS = ["fc", "head.fc", "head.last", "conv", "strip", "grouped", "point", "line"]


def delta(model: peft.PeftModel, layer: str) -> Tensor:
    weight: Tensor = model.base_model.model.get_submodule(layer).get_delta_weight("default")
    return weight.detach()


def close(a: Tensor, b: Tensor) -> None:
    """Equal up to float32 rounding of sums in another order, relative to the largest entry."""
    torch.testing.assert_close(a, b, rtol=0, atol=2e-6 * float(b.abs().max()))


@pytest.mark.parametrize("conv", ["tensor", "reshape"])
@pytest.mark.parametrize("gamma", [0.2, 0.9])
def test_peft_composes_the_weights_of_our_adapter(tmp_path, conv, gamma):
    torch.manual_seed(0)
    model = fp.factorize(Network(), fp.FedPara(gamma=gamma, conv=conv), force=True)
    assert {f"{layer}.weight" for layer in LAYERS} == forms(model).keys()
    assert len({form.rank for form in forms(model).values()}) > 2

    write_adapter(tmp_path, model)
    base = Network()
    base.load_state_dict(base_state(model.state_dict(), forms(model)))
    adapted = peft.PeftModel.from_pretrained(base, tmp_path).eval()

    for layer in LAYERS:
        close(delta(adapted, layer), fp.merge(model).get_submodule(layer).weight.detach())
    x = torch.randn(2, 16, 9, 9)
    with torch.no_grad():
        given, expected = adapted(x), model(x)
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_only_the_factorized_layers_are_adapted(tmp_path):
    """Only `fc`, although `head.fc` has the same ending."""
    model = fp.factorize(Network(), fp.FedPara(gamma=0.5), where=lambda n, m, p: n == "fc" and p == "weight")
    write_adapter(tmp_path, model.state_dict(), forms(model))
    adapted = peft.PeftModel.from_pretrained(Network(), tmp_path)
    assert [n for n, m in adapted.base_model.model.named_modules() if hasattr(m, "get_delta_weight")] == [
        "fc"
    ]
    close(delta(adapted, "fc"), model.fc.weight.detach())


def test_a_rank_belongs_to_its_own_layer(tmp_path):
    """`fc` has a different rank; `head.fc`, with the same ending, has the common one."""
    ranks = {"fc": 3, "head.fc": 2, "head.last": 2}
    model = fp.factorize(
        Network(),
        fp.FedPara(gamma=0),
        where=lambda n, m, p: n in ranks and p == "weight" and fp.FedPara(rank=ranks[n]),
    )
    write_adapter(tmp_path, model)
    adapted = peft.PeftModel.from_pretrained(Network(), tmp_path)
    for layer, rank in ranks.items():
        module = adapted.base_model.model.get_submodule(layer)
        assert (module.r["default"], module.scaling["default"]) == (rank, 1.0)
        close(delta(adapted, layer), model.get_submodule(layer).weight.detach())


def test_a_whole_model_goes_through_peft(tmp_path):
    torch.manual_seed(0)
    model = models.resnet18(norm="group")
    fp.factorize(model, fp.FedPara(gamma=0.1), models.convolutions, init="calibrated")
    write_adapter(tmp_path, model)
    base = models.resnet18(norm="group")
    base.load_state_dict(base_state(model.state_dict(), forms(model)))
    plain = peft.PeftModel.from_pretrained(base, tmp_path).merge_and_unload()
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(plain(x), fp.merge(model)(x), rtol=1e-4, atol=1e-4)


def peft_adapter(folder, effective: bool, **options) -> peft.PeftModel:
    torch.manual_seed(0)
    config = peft.LoHaConfig(
        target_modules=LAYERS,
        use_effective_conv2d=effective,
        init_weights=False,
        **{"r": 4, "alpha": 6} | options,
    )
    model = peft.get_peft_model(Network(), config)
    model.save_pretrained(folder)
    return model


PATTERNS = {"rank_pattern": {"head.fc": 3, "conv": 2}, "alpha_pattern": {"^fc": 1, "conv": 20}}


@pytest.mark.parametrize("effective", [True, False])
@pytest.mark.parametrize("options", [{}, PATTERNS, {"alpha": 0}, {"r": 40}], ids=str)
def test_we_compose_the_weights_of_pefts_adapter(tmp_path, effective, options):
    adapted = peft_adapter(tmp_path, effective, **options)

    deltas = compose_state(*read_adapter(tmp_path, Network()))

    assert deltas.keys() == {f"{layer}.weight" for layer in LAYERS}
    for layer in LAYERS:
        close(deltas[f"{layer}.weight"], delta(adapted, layer))


def test_without_a_base_the_shapes_are_the_adapters_own(tmp_path):
    adapted = peft_adapter(tmp_path, True)
    deltas = compose_state(*read_adapter(tmp_path))
    assert {name: tuple(weight.shape) for name, weight in deltas.items()} == {
        "fc.weight": (40, 48),
        "head.fc.weight": (30, 40),
        "head.last.weight": (20, 30),
        "conv.weight": (24, 16, 3, 3),
        "strip.weight": (32, 24, 3, 1),
        "grouped.weight": (48, 16, 3, 3),
        "point.weight": (48, 48),
        "line.weight": (48, 48, 3, 1),
    }
    for layer in LAYERS:
        close(deltas[f"{layer}.weight"].flatten(), delta(adapted, layer).flatten())


@pytest.mark.parametrize("conv", ["tensor", "reshape"])
def test_what_is_written_is_read_again(tmp_path, conv):
    model = fp.factorize(Network(), fp.FedPara(gamma=0.4, conv=conv))
    write_adapter(tmp_path, model)
    state, read = read_adapter(tmp_path, Network())
    for weight, form in forms(model).items():
        assert (read[weight].shape, read[weight].rank) == (form.shape, form.rank)
        if weight != "point.weight":
            for factor in form.factors:
                assert torch.equal(state[f"{weight}.{factor}"], model.state_dict()[f"{weight}.{factor}"])
    close(compose_state(state, read)["point.weight"], model.point.weight.detach())


def test_the_config_is_what_peft_would_write(tmp_path):
    peft_adapter(tmp_path / "theirs", True)
    write_adapter(tmp_path / "ours", fp.factorize(Network(), fp.FedPara(gamma=0.4)))
    theirs, ours = (
        json.loads((tmp_path / f / "adapter_config.json").read_text()) for f in ("theirs", "ours")
    )
    assert ours.keys() <= theirs.keys()
    assert (ours["peft_type"], ours["use_effective_conv2d"], ours["alpha"]) == ("LOHA", True, ours["r"])
    assert ours["rank_pattern"] == ours["alpha_pattern"]


@pytest.mark.parametrize(
    "scheme",
    [fp.FedPara(gamma=0.4, nonlinearity="tanh"), fp.PFedPara(gamma=0.4), fp.LowRank(gamma=0.4)],
    ids=str,
)
def test_only_fedpara_without_nonlinearity_is_an_adapter(tmp_path, scheme):
    with pytest.raises(SchemeError, match="FedPara without nonlinearity"):
        write_adapter(tmp_path / "a", fp.factorize(Network(), scheme))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (nn.Sequential(nn.Embedding(40, 40)), r"0.weight belongs to a layer of type Embedding"),
        (nn.Sequential(nn.ConvTranspose2d(16, 16, 3)), r"of type ConvTranspose2d"),
        (
            nn.Sequential(nn.Conv3d(16, 16, 3)),
            r"0.weight \(16, 16, 3, 3, 3\) is not the `weight` of a Linear",
        ),
        (nn.Linear(40, 40), r"weight \(40, 40\) is not the `weight` of a Linear.* inside a model"),
    ],
)
def test_layers_that_peft_does_not_know_are_refused(tmp_path, model, text):
    with pytest.raises(SchemeError, match=text):
        write_adapter(tmp_path, fp.factorize(model, fp.FedPara(gamma=0.1)))


def attention(name, module, parameter):
    return name.endswith("out_proj") and parameter == "weight"


def feed_forward(name, module, parameter):
    return name.endswith(("linear1", "linear2")) and parameter == "weight"


@pytest.mark.parametrize("where", [attention, feed_forward])
def test_layers_that_bypass_peft_are_refused(tmp_path, where):
    model = nn.Sequential(nn.TransformerEncoderLayer(40, 4, 80))
    with pytest.raises(SchemeError, match=r"is read directly by its \w+"):
        write_adapter(tmp_path / "a", fp.factorize(model, fp.FedPara(gamma=0.1), where))
    assert not (tmp_path / "a").exists()


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@dataclass(frozen=True)
class Own(fp.FedPara):
    def join(self, inner):
        return 2 * super().join(inner)


def test_weights_with_more_than_their_factors_are_refused(tmp_path):
    model = fp.factorize(Network(), fp.FedPara(gamma=0.1))
    nn.utils.parametrize.register_parametrization(model.fc, "weight", Doubled())
    with pytest.raises(SchemeError, match="another parametrization on top"):
        write_adapter(tmp_path / "a", model)
    with pytest.raises(SchemeError, match="FedPara without nonlinearity"):
        write_adapter(tmp_path / "a", fp.factorize(Network(), Own(gamma=0.1)))


def test_a_file_in_place_of_the_folder(tmp_path):
    model = fp.factorize(Network(), fp.FedPara(gamma=0.1))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be made"):
        write_adapter(tmp_path / "file", model)


def test_kernels_of_two_styles_are_refused(tmp_path):
    def where(name, module, parameter):
        return parameter == "weight" and fp.FedPara(gamma=0.1, conv="reshape" if name == "conv" else "tensor")

    model = fp.factorize(Network(), fp.FedPara(gamma=0.1), where)
    with pytest.raises(SchemeError, match="mix conv"):
        write_adapter(tmp_path, model)


def test_no_factorized_weight_and_an_existing_adapter(tmp_path):
    with pytest.raises(UsageError, match="no factorized weight"):
        write_adapter(tmp_path, Network())
    with pytest.raises(UsageError, match="a state and its forms"):
        write_adapter(tmp_path, Network().state_dict())
    model = fp.factorize(Network(), fp.FedPara(gamma=0.1))
    write_adapter(tmp_path, model)
    with pytest.raises(UsageError, match="holds an adapter"):
        write_adapter(tmp_path, model)
    write_adapter(tmp_path, model, overwrite=True)


def set_config(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder, change):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (
            lambda f: (f / "adapter_config.json").unlink(),
            "expected a LoHa or LoRA adapter with adapter_config.json",
        ),
        (
            lambda f: (f / "adapter_config.json").write_text("["),
            "expected a LoHa or LoRA adapter with adapter_config.json",
        ),
        (lambda f: (f / "adapter_config.json").write_text("[]"), "expected a LoHa or LoRA adapter"),
        (lambda f: (f / "adapter_model.safetensors").unlink(), "expected a whole safetensors file"),
        (lambda f: set_config(f, peft_type="IA3"), "peft_type is 'IA3', not 'LOHA' or 'LORA'"),
        (lambda f: set_config(f, r=5), "rank 5, and its tensors have rank 4"),
        (lambda f: set_config(f, alpha="6"), "TypeError"),
        (lambda f: set_config(f, rank_pattern=["fc"]), "AttributeError"),
        (lambda f: set_config(f, alpha_pattern={"(": 2}), "unterminated subpattern"),
        (
            lambda f: change_tensors(f, lambda t: t.update({"base_model.model.head.bias": torch.ones(2)})),
            r"head has the tensors \['bias'\]",
        ),
        (
            lambda f: change_tensors(f, lambda t: t.pop("base_model.model.fc.hada_w2_b")),
            r"fc has the tensors \[",
        ),
        (
            lambda f: change_tensors(
                f, lambda t: t.update({"base_model.model.fc.hada_w2_b": torch.ones(4, 7)})
            ),
            r"wrong shape: fc.weight.y2 \(7, 4\) instead of \(48, 4\)",
        ),
        (
            lambda f: change_tensors(f, lambda t: t.update({"base_model.model.conv.hada_t1": torch.ones(4)})),
            "unexpected: conv.weight.t1, conv.weight.t2",
        ),
    ],
)
def test_a_damaged_adapter_is_refused(tmp_path, damage, text):
    peft_adapter(tmp_path, True)
    damage(tmp_path)
    with pytest.raises(StateError, match=text):
        read_adapter(tmp_path)


def test_an_adapter_of_another_model_is_refused(tmp_path):
    peft_adapter(tmp_path, True)
    with pytest.raises(StateError, match=r"KeyError: 'conv\.weight'.*made for this base"):
        read_adapter(tmp_path, nn.Linear(3, 2))
    other = Network()
    other.fc = nn.Linear(50, 40)
    with pytest.raises(
        StateError, match=r"fc has shape \(40, 48\) in the adapter and \(40, 50\) in the base"
    ):
        read_adapter(tmp_path, other)
