"""What is published: the wheel, the sdist and the files that describe the project."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import fedpara

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    if find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed: make install")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True)
    return folder


def test_the_wheel_holds_the_package_and_the_command(built):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        scripts = wheel.read(f"fedpara-{fedpara.__version__}.dist-info/entry_points.txt").decode()
        assert f"fedpara-{fedpara.__version__}.dist-info/licenses/LICENSE" in wheel.namelist()
    sources = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src").rglob("*") if p.is_file()}
    assert names == {name for name in sources if "__pycache__" not in name and ".egg-info" not in name}
    assert "fedpara = fedpara_command:main" in scripts


def test_the_sdist_can_be_built_and_tested(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    needed = {
        "pyproject.toml",
        "constraints.txt",
        "Makefile",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CITATION.cff",
    }
    assert needed | {"src/fedpara/__init__.py", "src/fedpara_command.py", "tests/test_dist.py"} <= names
    assert not [name for name in names if re.search(r"__pycache__|^runs/|^data/|[.]venv", name)]


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert fedpara.__version__ == PROJECT["version"] == citation["version"]
    assert citation["license"] == PROJECT["license"]
    assert citation["references"][0]["url"].endswith("2108.06098")


def test_the_changelog_is_in_the_usual_form():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (.*)$", text, re.M)[0] == "[Unreleased]"
    assert f"## [{PROJECT['version']}]" in text
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert {*re.findall(r"^### (.*)$", text, re.M)} <= kinds


def test_the_workflow_calls_the_makefile():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    job = workflow["jobs"]["test"]
    assert job["steps"][-1]["run"] == "make ${{ matrix.target }}"
    targets = job["strategy"]["matrix"]["target"]
    assert targets == re.findall(r"^make ([\w-]+)", (ROOT / ".ci/run").read_text(), re.M)
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)


def test_the_hooks_need_no_network():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in hooks] == ["local"]
    assert all(hook["entry"].startswith(".venv/bin/") for hook in hooks[0]["hooks"])
