"""An exported model gives torch's outputs at any batch size, or nothing is written."""

import logging
import resource
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import onnxruntime
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedpara as fp
from fedpara import data, models
from fedpara.errors import FedParaError, MissingExtraError, StateError, UsageError
from fedpara.interop import Preprocessing, SavedState, build_target, export, read_state
from fedpara.parameterization import forms

HERE = Path(fp.__file__).parent
CNN = {"name": "cnn", "classes": 10, "shape": [1, 8, 8]}


def factorized(name: str, shape: tuple[int, ...]) -> tuple[nn.Module, SavedState]:
    torch.manual_seed(0)
    model = models.build(name, classes=10, shape=shape)
    fp.factorize(model, fp.FedPara(gamma=0.1, nonlinearity="tanh"), models.rule(name), init="calibrated")
    description = {"name": name, "classes": 10, "shape": list(shape)}
    return model.eval(), SavedState(model.state_dict(), forms(model), description)


def onnx_outputs(path, x: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


def outputs(path, format: str, x: Tensor) -> Tensor:
    return onnx_outputs(path, x) if format == "onnx" else torch.export.load(path).module()(x)


@pytest.fixture
def torch_log(caplog):
    """torch's loggers do not propagate to the root, where caplog listens."""
    logging.getLogger("torch").addHandler(caplog.handler)
    yield caplog
    logging.getLogger("torch").removeHandler(caplog.handler)


def test_safetensors_needs_no_model(tmp_path):
    model, saved = factorized("cnn", (1, 8, 8))
    plain = fp.merge(model)

    report = export(SavedState(saved.state, saved.forms), tmp_path / "m.safetensors")

    written = load_file(report.path)
    assert written.keys() == plain.state_dict().keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in plain.state_dict().items())
    assert report.parameters == sum(p.numel() for p in plain.parameters())
    assert (report.bytes, report.max_difference) == ((tmp_path / "m.safetensors").stat().st_size, None)


def test_merged_safetensors_keep_their_description(tmp_path):
    model, saved = factorized("cnn", (1, 8, 8))
    export(saved, tmp_path / "m.safetensors")
    again = read_state(tmp_path / "m.safetensors")
    assert (again.forms, again.model) == ({}, CNN)

    report = export(again, tmp_path / "m.pt2", "pt2")

    x = torch.randn(5, 1, 8, 8)
    program = torch.export.load(report.path).module()
    torch.testing.assert_close(program(x), model(x))
    assert report.max_difference <= 1e-5
    assert str(HERE).encode() not in report.path.read_bytes()


@pytest.mark.parametrize("format", ["safetensors", "onnx", "pt2"])
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, format):
    """The process may write files of up to 4 kB; torch's file writer would abort it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(FedParaError, match=rf"m\.{format} could not be written.*File too large") as error:
            export(models.mlp(), tmp_path / f"m.{format}", format, example=torch.randn(2, 784))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ".part" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_model_is_exported_in_eval_mode_and_not_changed(tmp_path):
    layers = [nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.Dropout(), nn.Flatten()]
    model = fp.factorize(nn.Sequential(*layers), fp.FedPara(gamma=0.1), force=True).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    report = export(model, tmp_path / "m.pt2", "pt2", example=torch.randn(1, 3, 8, 8))

    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    x = torch.randn(3, 3, 8, 8)
    torch.testing.assert_close(torch.export.load(report.path).module()(x), fp.merge(model).eval()(x))


def test_onnx_gives_the_outputs_of_torch_at_any_batch_size(tmp_path, torch_log, recwarn):
    model, saved = factorized("cnn", (1, 8, 8))
    report = export(saved, tmp_path / "m.onnx", "onnx")
    assert [r.getMessage() for r in torch_log.records if r.levelno >= logging.WARNING] == []
    assert len(recwarn) == 0

    for batch in (1, 7):
        x = torch.randn(batch, 1, 8, 8)
        torch.testing.assert_close(onnx_outputs(report.path, x), model(x), atol=1e-5, rtol=1e-4)
    assert 0 <= report.max_difference <= 1e-4
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx"]
    assert str(HERE).encode() not in report.path.read_bytes()


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_raw_inputs_give_the_outputs_of_normalised_ones(tmp_path, format, dtype):
    model, saved = factorized("cnn", (3, 8, 8))
    mean, std = (0.5, 0.25, 0.125), (0.25, 0.5, 0.3)
    raw = torch.randint(256, (7, 3, 8, 8), dtype=torch.uint8)
    raw = raw if dtype == "uint8" else raw / 255
    saved = replace(saved, preprocessing=Preprocessing(mean, std, dtype))

    report = export(saved, tmp_path / "m", format)
    bare = export(saved, tmp_path / "bare", format, normalise=False)

    assert (report.inputs, report.normalises) == (((dtype, (3, 8, 8)),), True)
    assert (bare.inputs, bare.normalises) == ((("float32", (3, 8, 8)),), False)
    assert report.preprocessing == bare.preprocessing == saved.preprocessing
    assert report.parameters == bare.parameters
    normalised = data.normalise(raw, mean, std)
    for batch in (1, 7):
        expected = model(normalised[:batch])
        torch.testing.assert_close(outputs(report.path, format, raw[:batch]), expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(
            outputs(bare.path, format, normalised[:batch]), expected, atol=1e-5, rtol=1e-4
        )


def test_the_check_includes_the_normalisation(tmp_path, monkeypatch):
    """A file that normalises differently is not written."""
    _, saved = factorized("cnn", (1, 8, 8))
    saved = replace(saved, preprocessing=Preprocessing((0.5,), (0.1,)))
    module = sys.modules["fedpara.interop.export"]  # the package exports the function by this name
    write = module._write_pt2

    def write_other(network, inputs, path):
        other = deepcopy(network)
        other.mean += 0.1
        return write(other, inputs, path)

    monkeypatch.setattr(module, "_write_pt2", write_other)
    with pytest.raises(FedParaError, match="pt2 model differs from torch"):
        export(saved, tmp_path / "m.pt2", "pt2")
    assert list(tmp_path.iterdir()) == []


def test_a_preprocessing_has_a_mean_and_a_std_per_channel():
    _, saved = factorized("cnn", (3, 8, 8))
    with pytest.raises(StateError, match=r"mean \[0.5\] does not fit inputs of shape \[3, 8, 8\]"):
        replace(saved, preprocessing=Preprocessing((0.5,), (0.1,)))
    with pytest.raises(StateError, match="expected a mean and a std per channel"):
        Preprocessing((0.5,), (0.1, 0.2))
    with pytest.raises(StateError, match="one of the types uint8"):
        Preprocessing((0.5,), (0.1,), "complex64")


def test_onnx_takes_the_integers_of_an_lstm(tmp_path):
    model, saved = factorized("lstm", (2,))
    report = export(saved, tmp_path / "m.onnx", "onnx")
    x = torch.randint(10, (5, 2))
    torch.testing.assert_close(onnx_outputs(report.path, x), model(x), atol=1e-5, rtol=1e-4)


class Positions(nn.Module):
    """A network with a parameter of its own beside its layers, as most transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.places = nn.Parameter(torch.randn(4, 8))

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids) + self.places


@pytest.mark.parametrize("format", ["safetensors", "onnx", "pt2"])
def test_a_network_that_starts_with_an_embedding_takes_integers(tmp_path, format):
    model, x = Positions().eval(), torch.randint(10, (5, 4))
    saved = SavedState(model.state_dict(), {}, {"target": "mine:Positions", "shape": [4]})
    report = export(saved, tmp_path / "m", format, model=model)
    assert report.inputs == (("int64", (4,)),)
    if format != "safetensors":
        torch.testing.assert_close(outputs(report.path, format, x), model(x))


def test_a_custom_model_is_built_only_by_its_user(tmp_path):
    model = fp.factorize(models.mlp(), fp.FedPara(gamma=0.1))
    saved = SavedState(
        model.state_dict(), forms(model), {"target": "fedpara.models:mlp", "shape": [1, 28, 28]}
    )
    with pytest.raises(UsageError, match=r"never run: .* model=build_target\('fedpara\.models:mlp'\)"):
        export(saved, tmp_path / "m.pt2", "pt2")
    report = export(saved, tmp_path / "m.pt2", "pt2", model=build_target("fedpara.models:mlp"))
    x = torch.randn(3, 1, 28, 28)
    torch.testing.assert_close(torch.export.load(report.path).module()(x), model(x))


@pytest.mark.parametrize("format", ["safetensors", "pt2"])
def test_a_state_that_does_not_fit_its_model_is_refused_in_every_format(tmp_path, format):
    foreign = {"features.0.weight": torch.zeros(3), "a": torch.zeros(3)}
    generator = torch.get_rng_state()
    with pytest.raises(
        StateError,
        match=r"the model cnn; missing: .* and \d+ more; unexpected: a; wrong shape: features.0",
    ):
        export(SavedState(foreign, {}, CNN), tmp_path / "m", format)
    assert format == "pt2" or torch.equal(torch.get_rng_state(), generator)
    with pytest.raises(
        StateError, match=r"the model Linear; missing: weight, bias; unexpected: features.0.weight, a"
    ):
        export(SavedState(foreign, {}, CNN), tmp_path / "m", format, model=nn.Linear(3, 2))
    assert list(tmp_path.iterdir()) == []


def test_safetensors_calls_no_function_that_a_file_names(tmp_path):
    target = {"target": "nowhere.at_all:build"}
    export(SavedState(nn.Linear(3, 2).state_dict(), {}, target), tmp_path / "m.safetensors")
    assert read_state(tmp_path / "m.safetensors").model == target


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(30, 20), nn.Linear(30, 20)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x) + self.b(y), self.a(x)


def test_a_model_of_several_inputs_and_outputs(tmp_path):
    model = fp.factorize(TwoInputs(), fp.FedPara(rank=2))
    saved = SavedState(model.state_dict(), forms(model))
    example = (torch.randn(2, 30), torch.randn(2, 30))
    report = export(saved, tmp_path / "m.pt2", "pt2", model=TwoInputs(), example=example)
    program = torch.export.load(report.path).module()
    x, y = torch.randn(4, 30), torch.randn(4, 30)
    for given, expected in zip(program(x, y), model(x, y), strict=True):
        torch.testing.assert_close(given, expected)


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Alphabet(nn.Linear):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"scores": super().forward(x)}


def test_failed_exports_are_explained_and_write_nothing(tmp_path):
    example = torch.randn(2, 3)
    with pytest.raises(
        UsageError, match=r"Branching cannot be exported as pt2.*Safetensors needs no tracing"
    ):
        export(Branching(3, 2), tmp_path / "m.pt2", "pt2", example=example)
    with pytest.raises(UsageError, match="cannot be exported as pt2"):
        export(nn.Linear(4, 2), tmp_path / "m.pt2", "pt2", example=example)
    with pytest.raises(UsageError, match="returns dict: expected a tensor"):
        export(Alphabet(3, 2), tmp_path / "m.pt2", "pt2", example=example)
    with pytest.raises(UsageError, match="pass `example`"):
        export(nn.Linear(3, 2), tmp_path / "m.pt2", "pt2")
    with pytest.raises(UsageError, match="give the plain model"):
        export(SavedState(nn.Linear(3, 2).state_dict()), tmp_path / "m.pt2", "pt2")
    with pytest.raises(StateError, match="does not fit the model"):
        export(SavedState(nn.Linear(3, 2).state_dict(), {}, CNN), tmp_path / "m.pt2", "pt2")
    with pytest.raises(UsageError, match="unknown format 'tflite': expected one of safetensors, onnx, pt2"):
        export(nn.Linear(3, 2), tmp_path / "m", "tflite")
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_that_onnxruntime_does_not_run(tmp_path):
    example = torch.randn(2, 3, dtype=torch.bfloat16)
    with pytest.raises(UsageError, match=r"Linear does not run in onnxruntime.*model\.float\(\)") as found:
        export(nn.Linear(3, 2).bfloat16(), tmp_path / "m.onnx", "onnx", example=example)
    assert ".part" not in str(found.value)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_cannot_be_copied_are_named(tmp_path):
    with pytest.warns(FutureWarning):
        normed = nn.utils.weight_norm(nn.Linear(3, 2))
    normed(torch.randn(2, 3))
    with pytest.raises(UsageError, match="weight is computed from other tensors"):
        export(normed, tmp_path / "m.safetensors")


def test_an_export_under_autocast_keeps_the_type(tmp_path):
    model, saved = factorized("cnn", (1, 8, 8))
    with torch.autocast("cpu", torch.bfloat16):
        export(saved, tmp_path / "a.safetensors")
        export(model, tmp_path / "b.safetensors")
    for name in ("a", "b"):
        assert {t.dtype for t in load_file(tmp_path / f"{name}.safetensors").values()} == {torch.float32}


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand(x.shape[0], 2)


def test_a_difference_above_the_tolerance_is_refused(tmp_path):
    example = torch.randn(2, 3)
    with pytest.raises(FedParaError, match=r"pt2 model differs from torch by .* Nothing was written"):
        export(Noisy(3, 2), tmp_path / "m.pt2", "pt2", example=example)
    assert list(tmp_path.iterdir()) == []
    assert 0 < export(Noisy(3, 2), tmp_path / "m.pt2", "pt2", example=example, tolerance=2).max_difference < 2


def test_a_file_is_overwritten_only_on_request(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        export(nn.Linear(3, 2), path)
    assert path.read_text() == "mine"
    export(nn.Linear(3, 2), path, overwrite=True)
    assert load_file(path).keys() == {"weight", "bias"}


@pytest.mark.parametrize("package", ["onnx", "onnxruntime", "onnxscript"])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"{package}: install .* pip install '\.\[onnx\]'"):
        export(nn.Linear(3, 2), tmp_path / "m.onnx", "onnx", example=torch.randn(2, 3))
    assert list(tmp_path.iterdir()) == []
