"""Architecture: who may import whom, what `import fedpara` costs, and what no file may hold."""

import ast
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import fedpara

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "fedpara"
MODULES = sorted(PACKAGE.rglob("*.py"))
LINT = "import sys; sys.path.insert(0, 'src'); from importlinter.cli import lint_imports_command as c; c()"

each_module = pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))


def python(code: str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True)


@pytest.fixture
def checkout(tmp_path):
    """A copy of what the import rules read, to break."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(PACKAGE, tmp_path / "src" / "fedpara", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    return python(LINT, "--no-cache", "--no-logo", cwd=folder)


def test_the_import_rules_hold():
    report = lint(ROOT)
    assert report.returncode == 0, report.stdout + report.stderr
    assert "0 broken" in report.stdout


def test_the_import_rules_can_be_broken(checkout):
    """One offender a rule, and every rule finds its own."""
    offenders = {
        "A layer imports only from layers below it": ("models", "import fedpara.data"),
        "interop knows weights and models, not federations": ("interop", "from fedpara import wire"),
        "report reads only experiments": ("report", "from fedpara.models import vgg16"),
        "flwr only in apps.flower and secure": ("wire", "def late():\n    import flwr.common"),
        "matplotlib only in report": ("apps", "from matplotlib import pyplot"),
        "typer and rich only in apps": ("engines", "import rich.progress"),
    }
    for package, line in offenders.values():
        folder = checkout / "src" / "fedpara" / package
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
        (folder / "offender.py").write_text(line + "\n")
    report = lint(checkout)
    assert report.returncode == 1, report.stdout + report.stderr
    for rule in offenders:
        assert f"{rule} BROKEN" in report.stdout


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("errors.py", "import fedpara.state"),
        ("state.py", "from fedpara.parameterization import forms"),
        ("parameterization", "from fedpara import models"),
        ("algorithms", "from fedpara.wire import Link"),
        ("data", "import fedpara.engines"),
        ("experiments", "import fedpara.report"),
    ],
)
def test_the_layers_are_the_ones_of_the_design(checkout, package, line):
    target = checkout / "src" / "fedpara" / package
    if target.suffix == ".py":
        target.write_text(target.read_text() + f"\n{line}\n")
    else:
        (target / "offender.py").write_text(line + "\n")
    report = lint(checkout)
    assert "A layer imports only from layers below it BROKEN" in report.stdout, report.stdout + report.stderr


def test_the_places_where_each_heavy_package_belongs_stay_open(checkout):
    places = {
        "apps/flower/more.py": "import flwr, typer, rich\nimport fedpara.report, fedpara.interop, fedpara.engines",
        "report/drawn.py": "import matplotlib\nfrom fedpara.experiments import store",
        "interop/more.py": "from fedpara import models, parameterization, state, errors",
        "engines/more.py": "from fedpara import algorithms, data, models, wire",
    }
    for place, lines in places.items():
        path = checkout / "src" / "fedpara" / place
        path.parent.mkdir(exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(lines + "\n")
    report = lint(checkout)
    assert report.returncode == 0, report.stdout + report.stderr


def test_the_public_names_cost_torch_numpy_and_safetensors_only():
    code = """
import sys, torch, numpy.random, safetensors.torch
before = {name.partition(".")[0] for name in sys.modules}
from fedpara import *
after = {name.partition(".")[0] for name in sys.modules}
print(*sorted(after - before - sys.stdlib_module_names))
print(*sorted(after & {"sklearn", "matplotlib", "typer", "rich", "flwr", "PIL", "pandas", "onnx", "peft"}))
"""
    result = python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:2] == ["fedpara", ""]


def test_import_fedpara_loads_a_name_at_its_first_use():
    code = """
import sys, fedpara
assert {*fedpara.__all__, "data", "models", "__version__"} <= {*dir(fedpara)}
assert not hasattr(fedpara, "nonsense")
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "safetensors"}))
print(fedpara.data.names()[0], fedpara.simulate.__module__, vars(fedpara)["simulate"] is fedpara.simulate)
"""
    result = python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "\ndigits fedpara.experiments.simulate True\n"


def test_public_names_are_sorted_and_there():
    packages = [path.parent for path in MODULES if path.name == "__init__.py"]
    assert PACKAGE in packages
    for folder in packages:
        name = ".".join(["fedpara", *folder.relative_to(PACKAGE).parts])
        package = import_module(name)
        names = getattr(package, "__all__", [])
        assert names == sorted(names, key=lambda n: (not n.isupper(), n[0].islower(), n)), name
        assert all(hasattr(package, public) for public in names), name
    assert set(fedpara.__all__) == {
        *("Devices", "Examples", "Experiment", "FedPara", "FedParaError", "FederatedData", "Link", "LowRank"),
        *("Metric", "PFedPara", "Task", "factorize", "lognormal", "merge", "metric", "simulate"),
        *("constant", "cosine", "linear", "step_decay", "Kronecker", "AwareLowRank", "AwareKronecker"),
    }


@each_module
def test_a_module_has_a_docstring_and_one_job(path):
    source = path.read_text()
    assert ast.get_docstring(ast.parse(source)), f"{path} does not say what it is for"
    assert len(source.splitlines()) <= 350, f"{path} has two jobs"


TESTS = sorted((ROOT / "tests").rglob("*.py"))


@pytest.mark.parametrize("folder", sorted({path.parent for path in [*MODULES, *TESTS]}), ids=lambda p: p.name)
def test_a_folder_is_small_enough_to_take_in(folder):
    assert len(list(folder.glob("*.py"))) <= 15, f"{folder} holds too many files"


def test_nothing_unpickles():
    """A pickle is a program: it runs when it is loaded. Tests may round-trip their own bytes in one line."""
    unpickling = re.compile(
        r"pickle[.]load(?!s[(]pickle[.]dumps[(])|(?<!safetensors[.])\btorch[.]load[(]|[.]Unpickler\b"
    )
    files = [*MODULES, *sorted((ROOT / "tests").rglob("*.py"))]
    assert [str(p) for p in files if unpickling.search(p.read_text())] == []
    assert [str(p) for p in MODULES if re.search(r"^\s*(import|from) pickle\b", p.read_text(), re.M)] == []
    for line in ("pickle." + "load(file)", "pickle." + "loads(content)", "x = torch." + "load(path)"):
        assert unpickling.search(line)
