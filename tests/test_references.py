"""References: what is accepted, what a function gets, and one sentence for each mistake."""

import sys

import pytest
from own_code import forget, write_package

from fedpara import references
from fedpara.errors import ConfigError
from fedpara.references import is_reference, parse
from fedpara.source_files import combined_digest, portable_files, source_digests


@pytest.fixture
def own(tmp_path, monkeypatch):
    write_package(tmp_path, "named")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    forget("named")


@pytest.mark.parametrize(
    ("text", "keywords"),
    [
        ("a:f", None),
        ("a.b.c:f()", {}),
        ("a:f(width=32, depth=-4)", {"width": 32, "depth": -4}),
        ("a:f(x=1.5, name='b, c', sides=(1, 2), on=None, more={'k': [True]})",
         {"x": 1.5, "name": "b, c", "sides": (1, 2), "on": None, "more": {"k": [True]}}),
    ],
)  # fmt: skip
def test_a_reference_has_a_module_a_function_and_keywords(text, keywords):
    found = parse(text)
    assert (found.module, found.function, found.keywords) == (text.partition(":")[0], "f", keywords)


@pytest.mark.parametrize(
    "text",
    ["a:", ":f", "a:f(1)", "a:f(x=y)", "a:f(x=g())", "a:f(**x)", "a:f.g", "a:1", "a b:f", "a:f(x=1", ".a:f", "a..b:f",
     "a:f(x={[]: 1})", "a:lambda: 0", "a:f\nimport os"],
)  # fmt: skip
def test_nothing_but_literals_is_accepted(text):
    with pytest.raises(ConfigError, match=r"expected package\.module:function"):
        parse(text)


@pytest.mark.parametrize(
    "text", ["generated:mnist", "hub:a/b@1", "load:a.b:c", "hybrid:5", "cnn", "dirichlet"]
)
def test_the_librarys_names_are_not_references(text):
    assert not is_reference(text)


def test_a_function_gets_only_what_its_signature_names(own):
    net = references.call(
        "named.networks:net(width=8)", offered={"classes": 3, "shape": (1, 8, 8), "seed": 0}
    )
    assert net[1].out_features == 8
    assert net[3].out_features == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nowhere_at_all:f", r"ModuleNotFoundError: No module named 'nowhere_at_all'\): looked in .*, on PYTHONPATH"),
        ("named.networks:nett", "module 'named.networks' has no function 'nett'. Did you mean 'net'?"),
        ("named.networks:mat", r"has no function 'mat'\.$"),  # math is a module there
        ("named.reading:digits(cuont=3)", r"unexpected keyword argument 'cuont'\): the function is digits\(count"),
        ("named.networks:net(classes=2)", "missing a required argument: 'shape'"),
        ("named.networks:nn", "is module: expected a function"),
        ("named.reading:digits(count='a')", "failed: TypeError: "),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(own, text, says):
    with pytest.raises(ConfigError, match=says) as error:
        references.call(text)
    assert "\n" not in str(error.value)


def test_source_files_are_the_package_and_the_modules_beside_it(own):
    files = {
        "named/__init__.py",
        "named/methods.py",
        "named/networks.py",
        "named/reading.py",
        "helping_named.py",
    }
    assert source_digests(["named.networks:net"]).keys() == files
    assert portable_files(["named.networks:net(width=3)"]).keys() == files
    before = combined_digest(["named.networks:net"])
    (own / "helping_named.py").write_text("COUNT = 201\n")
    assert combined_digest(["named.networks:net"]) != before
    assert combined_digest([]) == ""


def test_an_installed_package_does_not_travel(own):
    assert "numpy/__init__.py" in source_digests(["numpy:zeros"])
    assert portable_files(["numpy:zeros", "json:dumps", "fedpara.models:mlp"]) == {}
