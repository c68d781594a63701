"""Models built from descriptions and targets, and clear errors for wrong ones."""

import sys

import pytest
import torch
from torch import nn

from fedpara import models
from fedpara.errors import ConfigError, UsageError
from fedpara.interop import build_target, rebuild

OWN = """
from torch import nn

def build_model():
    return nn.Linear(3, 2)

def needs(width):
    return nn.Linear(3, width)

def number():
    return 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_networks.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("import a_package_nobody_has")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "own_networks"
    sys.modules.pop("own_networks", None)


@pytest.mark.parametrize("name", models.names())
def test_every_model_of_the_package_is_rebuilt(name):
    shape = (16,) if name.startswith("lstm") else (3, 32, 32)
    with torch.device("meta"):
        model = rebuild({"name": name, "classes": 7, "shape": list(shape)})
        expected = models.build(name, classes=7, shape=shape)
    assert [(n, p.shape) for n, p in model.named_parameters()] == [
        (n, p.shape) for n, p in expected.named_parameters()
    ]


def test_a_target_that_a_description_names_is_not_imported(own):
    with pytest.raises(UsageError, match="never run: pass --model own_networks:build_model if you trust it"):
        rebuild({"target": f"{own}:build_model", "shape": [3]})
    assert own not in sys.modules


def test_a_target_is_imported_and_called(own):
    model = build_target(f"{own}:build_model")
    assert isinstance(model, nn.Linear)
    assert model.weight.shape == (2, 3)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("own_networks", "expected package.module:function"),
        (":build_model", "expected package.module:function"),
        ("own_networks:", "expected package.module:function"),
        ("own_networks:build model", "expected package.module:function"),
        ("own_networks:build_modle", "has no function 'build_modle'. Did you mean 'build_model'"),
        ("own_networks:__name__", "is str: expected a function"),
        ("own_networks:needs", "missing a required argument: 'width'.* the function is needs"),
        ("own_networks:number", "returned int: expected a torch.nn.Module"),
        ("own_nowhere:build", "cannot be imported .*Run from the module's folder"),
        ("own_broken:build", "ModuleNotFoundError: No module named 'a_package_nobody_has'"),
        (".relative:build", "expected package.module:function"),
    ],
)
def test_a_wrong_target_is_explained(own, target, text):
    with pytest.raises(UsageError, match=text):
        build_target(target)


def test_an_unknown_model_name():
    with pytest.raises(ConfigError, match="did you mean 'vgg16'"):
        rebuild({"name": "vgg", "classes": 10, "shape": [3, 32, 32]})
