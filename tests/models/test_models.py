"""Golden counts of the paper's models, and what every engine needs from a model: vmap(grad), a seed, a rule."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrize

from fedpara import models
from fedpara.errors import ConfigError
from fedpara.models.lstm import LSTMLayer

SHAPES = {
    "vgg16": (3, 32, 32),
    "resnet18": (3, 8, 8),
    "resnet18-gn": (3, 8, 8),
    "lstm": (12,),
    "mlp": (1, 8, 8),
    "deep-mlp": (1, 8, 8),
    "cnn": (1, 8, 8),
}
# Each variant and the model it varies.
VARIANTS = {
    **dict.fromkeys(("vgg16-nodrop", "vgg16-gn2", "vgg16-gn2-nodrop", "vgg16-nobias"), "vgg16"),
    "vgg16-narrow": "vgg16-nobias",
    "vgg16-half": "vgg16-nobias",
    "vgg16-tiny": "vgg16-nobias",
    "resnet18-tiny": "resnet18",
    "lstm-tiny": "lstm",
}


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def examples(name: str, count: int) -> Tensor:
    if name == "lstm":
        return torch.randint(0, 10, (count, *SHAPES[name]))
    return torch.randn(count, *SHAPES[name])


def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1, torch.tensor(labels)


def selected(model: nn.Module, rule: Callable[[str, nn.Module, str], object]) -> dict[str, object]:
    found = {}
    for name, module in model.named_modules():
        for parameter, _ in module.named_parameters(recurse=False):
            if (value := rule(name, module, parameter)) is not False:
                found[f"{name}.{parameter}"] = value
    return found


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (lambda: models.vgg16(classes=10), 15_253_578),
        (lambda: models.build("vgg16-narrow", classes=10, shape=(3, 32, 32)), 1_492_710),
        (lambda: models.build("vgg16-half", classes=10, shape=(3, 32, 32)), 3_816_426),
        (lambda: models.vgg16(classes=100), 15_299_748),
        (lambda: models.resnet18(classes=10), 11_173_962),
        (lambda: models.resnet18(classes=10, norm="group"), 11_173_962),
        (lambda: models.lstm(weight_norm=False), 819_920),
        (lambda: models.lstm(), 819_920 + 4 * 1024),
        (lambda: models.mlp(784, 256, 62), 216_894),
        (lambda: models.cnn(), 261_066),
    ],
)
def test_golden_parameter_counts(model: Callable[[], nn.Module], count: int) -> None:
    with torch.device("meta"):
        assert parameters(model()) == count


def test_every_registered_model_is_tested_here() -> None:
    assert set(models.names()) == {*SHAPES, *VARIANTS}


def test_variants_differ_from_their_model_as_named() -> None:
    def modules(name: str, kind: type[nn.Module]) -> list[nn.Module]:
        return [m for m in models.build(name, classes=10, shape=(3, 32, 32)).modules() if isinstance(m, kind)]

    with torch.device("meta"):
        for name in ("vgg16-nodrop", "vgg16-gn2", "vgg16-gn2-nodrop"):
            assert {m.p for m in modules(name, nn.Dropout)} == {0.0 if "nodrop" in name else 0.5}  # type: ignore[union-attr]
            assert {m.num_groups for m in modules(name, nn.GroupNorm)} == {2 if "gn2" in name else 32}  # type: ignore[union-attr]
        assert {conv.bias for conv in modules("vgg16-nobias", nn.Conv2d)} == {None}  # type: ignore[union-attr]
        for name, wide in VARIANTS.items():
            shape = models.usual_shape(name)
            small, whole = (models.build(one, classes=10, shape=shape) for one in (name, wide))
            no_bias = {f"{n}.bias" for n, m in whole.named_modules() if isinstance(m, nn.Conv2d)}
            left_out = no_bias if name == "vgg16-nobias" else set()
            assert list(small.state_dict()) == [key for key in whole.state_dict() if key not in left_out]
            assert (parameters(small) < parameters(whole) / 50) == name.endswith("tiny")


@pytest.mark.parametrize("name", SHAPES)
def test_output_is_one_score_per_class(name: str) -> None:
    torch.manual_seed(0)
    model = models.build(name, classes=10, shape=SHAPES[name]).eval()
    with torch.no_grad():
        scores = model(examples(name, 3))
    assert scores.shape == (3, 10)
    assert scores.isfinite().all()
    assert not torch.equal(scores[0], scores[1])


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 5, 9)])
def test_cnn_takes_small_images(shape: tuple[int, ...]) -> None:
    assert models.build("cnn", classes=7, shape=shape)(torch.randn(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("name", ["vgg16", "resnet18", "resnet18-gn"])
def test_image_models_take_other_channels(name: str) -> None:
    with torch.device("meta"):
        assert models.build(name, classes=10, shape=(1, 32, 32))(torch.empty(2, 1, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("name", SHAPES)
def test_same_seed_same_bits(name: str) -> None:
    def draw(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return models.build(name, classes=10, shape=SHAPES[name]).state_dict()

    first, again, other = draw(3), draw(3), draw(4)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", SHAPES)
def test_vmap_of_grad_equals_one_client_after_another(name: str) -> None:
    torch.manual_seed(0)
    clients = [models.build(name, classes=10, shape=SHAPES[name]).double().eval() for _ in range(2)]
    stacked, buffers = stack_module_state(clients)
    x = torch.stack([examples(name, 2) for _ in clients])
    x = x.double() if x.is_floating_point() else x
    y = torch.randint(0, 10, (2, 2))
    base = clients[0]

    def loss(state: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(base, (state, buffers), (x,)), y)

    batched = vmap(grad(loss))(stacked, buffers, x, y)
    for client, model in enumerate(clients):
        alone = torch.autograd.grad(F.cross_entropy(model(x[client]), y[client]), list(model.parameters()))
        for (key, _), gradient in zip(model.named_parameters(), alone, strict=True):
            torch.testing.assert_close(batched[key][client], gradient)


def test_dropout_of_vgg16_differs_between_clients_under_vmap() -> None:
    model = models.vgg16().get_submodule("classifier").train()
    x = torch.randn(4, 512).expand(2, 4, 512)
    scores = vmap(model, randomness="different")(x)
    assert not torch.equal(scores[0], scores[1])


def test_lstm_without_weight_norm_is_torchs() -> None:
    torch.manual_seed(0)
    ours = models.lstm(weight_norm=False)
    theirs = nn.LSTM(8, 256, num_layers=2)
    state = {
        f"{key}_l{depth}": value
        for depth, layer in enumerate(ours.layers)
        for key, value in layer.state_dict().items()
    }
    theirs.load_state_dict(state)
    characters = torch.randint(0, 80, (5, 80))
    outputs, _ = theirs(ours.embedding(characters.T))
    torch.testing.assert_close(ours.layers(ours.embedding(characters.T)), outputs)
    torch.testing.assert_close(ours(characters), ours.fc(outputs[-1]))


def test_weight_norm_starts_with_the_same_outputs() -> None:
    torch.manual_seed(0)
    normed = models.lstm(hidden=32)
    plain = models.lstm(hidden=32, weight_norm=False)
    shared = {key: value for key, value in normed.state_dict().items() if "gain" not in key}
    plain.load_state_dict(shared)
    characters = torch.randint(0, 80, (3, 20))
    torch.testing.assert_close(normed(characters), plain(characters))


def test_weight_norm_ignores_the_scale_of_v_and_follows_the_gain() -> None:
    torch.manual_seed(0)
    layer = LSTMLayer(8, 16, weight_norm=True)
    x = torch.randn(5, 3, 8)
    before = layer(x)
    with torch.no_grad():
        layer.weight_ih.mul_(torch.logspace(-3, 3, 64).unsqueeze(1))
        layer.weight_hh.mul_(0.01)
    torch.testing.assert_close(layer(x), before)
    with torch.no_grad():
        assert layer.gain_hh is not None
        layer.gain_hh.mul_(2)
    assert not torch.allclose(layer(x), before, atol=1e-3)


def test_parametrized_lstm_weights_keep_the_scale_and_are_computed_once() -> None:
    class Counted(nn.Module):
        calls = 0

        def forward(self, v: Tensor) -> Tensor:
            Counted.calls += 1
            return 100 * v

    torch.manual_seed(0)
    model = models.lstm(hidden=16)
    characters = torch.randint(0, 80, (3, 20))
    before = model(characters)
    for layer in model.layers:
        parametrize.register_parametrization(layer, "weight_ih", Counted(), unsafe=True)
        parametrize.register_parametrization(layer, "weight_hh", Counted(), unsafe=True)
    Counted.calls = 0
    torch.testing.assert_close(model(characters), before)
    assert Counted.calls == 4


def test_rules_select_the_right_weights() -> None:
    with torch.device("meta"):
        vgg, recurrent, mlp = models.vgg16(), models.lstm(), models.mlp()
        torchs = nn.GRU(4, 4, num_layers=2, bidirectional=True)
    assert len(selected(vgg, models.convolutions)) == 13
    assert all(key.startswith("features.") for key in selected(vgg, models.convolutions))
    assert set(selected(vgg, models.linears)) == {f"classifier.{index}.weight" for index in (1, 4, 6)}
    assert len(selected(vgg, models.everything)) == 16
    weights = {f"layers.{depth}.weight_{which}" for depth in (0, 1) for which in ("ih", "hh")}
    assert set(selected(recurrent, models.recurrent)) == weights
    assert set(selected(recurrent, models.everything)) == weights | {"embedding.weight", "fc.weight"}
    assert len(selected(torchs, models.recurrent)) == 8
    assert set(selected(mlp, models.linears)) == {"fc1.weight", "fc2.weight"}
    assert not selected(mlp, models.recurrent)


def test_resnet_layers_returns_its_two_values() -> None:
    with torch.device("meta"):
        found = selected(models.resnet18(), models.resnet_layers("early", "rest"))
    early = {"conv1.weight", "layer1.0.conv1.weight"} | {
        f"layer{stage}.0.shortcut.0.weight" for stage in (2, 3, 4)
    }
    assert {key for key, value in found.items() if value == "early"} == early
    assert sum(value == "rest" for value in found.values()) == 15
    assert len(found) == 20


def test_hybrid_leaves_the_first_convolutions() -> None:
    with torch.device("meta"):
        model = models.vgg16()
    every = list(selected(model, models.convolutions))
    assert list(selected(model, models.hybrid(model, 10))) == every[10:]
    assert list(selected(model, models.hybrid(model, 0))) == every


def test_inner_leaves_the_first_and_the_last_layer() -> None:
    with torch.device("meta"):
        model = models.vgg16()
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert list(selected(model, models.inner(model))) == [f"{name}.weight" for name in layers[1:-1]]
    assert (layers[0], layers[-1]) == ("features.0", "classifier.6")


def test_default_rules() -> None:
    rules = {name: models.rule(name) for name in models.names()}
    assert rules.pop("lstm") is rules.pop("lstm-tiny") is models.recurrent
    assert rules.pop("mlp") is rules.pop("deep-mlp") is models.linears
    assert set(rules.values()) == {models.convolutions}


@pytest.mark.parametrize(
    ("name", "layer"),
    [("vgg16", "classifier.6"), ("resnet18", "fc"), ("lstm", "fc"), ("mlp", "fc2"), ("deep-mlp", "fc3")],
)
def test_last_layer_is_the_output_layer(name: str, layer: str) -> None:
    with torch.device("meta"):
        model = models.build(name, classes=10, shape=SHAPES[name])
    assert models.last_layer(model) == {f"{layer}.weight", f"{layer}.bias"}


def test_last_layer_follows_the_names_of_the_state_dict() -> None:
    model = models.mlp(4, 3, 2)
    parametrize.register_parametrization(model.get_submodule("fc2"), "weight", nn.Identity())
    assert models.last_layer(model) == {"fc2.parametrizations.weight.original", "fc2.bias"}
    assert models.last_layer(nn.Linear(2, 2)) == {"weight", "bias"}


def test_last_layer_needs_a_linear_layer() -> None:
    with pytest.raises(ConfigError, match="no linear layer"):
        models.last_layer(nn.Conv2d(1, 1, 1))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: models.build("vgg61", classes=10, shape=(3, 32, 32)), "did you mean 'vgg16'"),
        (lambda: models.rule("resnet"), "did you mean 'resnet18'"),
        (lambda: models.build("vgg16", classes=10, shape=(1, 28, 28)), "sides of 32 to 63"),
        (lambda: models.build("lstm", classes=10, shape=(1, 8, 8)), "sequence of characters"),
        (lambda: models.build("cnn", classes=10, shape=(64,)), "channels, height, width"),
        (lambda: models.build("mlp", classes=10, shape=()), "any shape"),
        (lambda: models.build("mlp", classes=0, shape=(4,)), "0 classes"),
        (lambda: models.build("cnn", classes=10, shape=(1, 1, 1)), "sides of 2 or more"),
    ],
)
def test_wrong_names_and_shapes(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        call()


@pytest.mark.parametrize(("name", "lr"), [("cnn", 0.02), ("mlp", 0.1)])
def test_twenty_steps_on_digits_lower_the_loss(name: str, lr: float) -> None:
    torch.manual_seed(0)
    model = models.build(name, classes=10, shape=(1, 8, 8))
    images, labels = digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for step in range(20):
        batch = slice(32 * step, 32 * (step + 1))
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
