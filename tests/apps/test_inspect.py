"""`fedpara inspect`: how a scheme factorizes a model."""

import json

import pytest


def test_the_table_for_people(cli):
    code, out, _ = cli("inspect", "vgg16", "--scheme", "fedpara", "--gamma", "0.1", "--classes", "10")
    assert code == 0
    assert "1,545,442" in out
    assert "original 15,253,578 parameters, 9.87 times as many" in out
    row = next(line for line in out.splitlines() if "512 x 512 x 3 x 3" in line)
    assert "fedpara" in row
    assert "dense (" in out


def test_the_json_for_programs(cli):
    code, out, _ = cli("inspect", "vgg16", "--gamma", "0.1", "--json")
    assert code == 0
    report = json.loads(out)
    assert list(report) == ["parameters", "original_parameters", "ratio", "layers"]
    assert (report["parameters"], report["original_parameters"]) == (1_545_442, 15_253_578)
    assert report["ratio"] == pytest.approx(1_545_442 / 15_253_578)
    for layer in report["layers"]:
        assert list(layer) == ["name", "shape", "scheme", "rank", "max_rank", "parameters"]
    assert sum(layer["parameters"] for layer in report["layers"]) == report["parameters"]
    written = [layer for layer in report["layers"] if layer["scheme"] == "fedpara"]
    assert len(written) == 13
    assert all(layer["rank"] ** 2 >= layer["max_rank"] for layer in written)
    dense = [layer for layer in report["layers"] if layer["scheme"] == "dense"]
    assert all(layer["rank"] is None for layer in dense)


def test_size_options_and_their_default(cli):
    plain, rank, low = (
        json.loads(cli("inspect", "mlp", *options, "--json")[1])
        for options in ([], ["--rank", "3"], ["--scheme", "lowrank", "--ratio", "0.2"])
    )
    assert plain == json.loads(cli("inspect", "mlp", "--gamma", "0.1", "--json")[1])
    assert {layer["rank"] for layer in rank["layers"] if layer["scheme"] == "fedpara"} == {3}
    assert low["ratio"] == pytest.approx(0.2, abs=0.03)


def test_a_custom_model(cli, tmp_path):
    (tmp_path / "theirs.py").write_text(
        "from torch import nn\n"
        "def build():\n    return nn.Sequential(nn.Linear(100, 80), nn.ReLU(), nn.Linear(80, 3))\n"
        "def broken():\n    raise KeyError('weights')\n"
        "number = 3\n"
    )
    code, out, _ = cli("inspect", "theirs:build", "--gamma", "0", "--json")
    assert code == 0
    layers = {layer["name"]: layer for layer in json.loads(out)["layers"]}
    assert layers["0.weight"]["shape"] == [80, 100]
    assert layers["0.weight"]["rank"] == 9
    assert layers["2.weight"]["scheme"] == "dense"
    code, out, _ = cli("inspect", "theirs:build")
    assert code == 0
    assert "dense (" in out
    for target, says in (
        ("theirs:biuld", "Did you mean 'build'"),
        ("theirs:broken", "KeyError"),
        ("theirs:number", "is int: expected a function"),
        ("nowhere:build", "No module named 'nowhere'"),
        ("theirs:", "expected package.module:function"),
    ):
        code, out, err = cli("inspect", target)
        assert (code, out) == (2, "")
        assert says in err


def test_no_memory_is_allocated_for_the_weights(cli):
    code, out, _ = cli("inspect", "mlp", "--classes", 999_999_999_999, "--json")
    assert code == 0
    assert json.loads(out)["original_parameters"] == 785 * 256 + 257 * 999_999_999_999


def test_a_function_keeps_its_own_number_of_classes(cli, tmp_path, monkeypatch):
    code = "from fedpara.models import mlp\n\ndef net(classes=5):\n    return mlp(8, 16, classes)\n\nNET = net()\n"
    (tmp_path / "nets.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    shapes = [cli("inspect", "nets:net", *more, "--json")[1] for more in ([], ["--classes", "3"])]
    assert [json.loads(text)["layers"][-1]["shape"] for text in shapes] == [[5], [3]]
    code, _, err = cli("inspect", "nets:NET")
    assert code == 2
    assert "'nets:NET' is a model: name a function that returns a new one." in err
