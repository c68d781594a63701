"""The documentation: its tutorials run, its code runs, and the site builds without network access."""

import json
import os
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from statistics import mean

import pytest

import fedpara as fp
from fedpara.experiments.seeds import half_width

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PRINTED = {
    "factorize": ["times fewer", "merged: a plain"],
    "compare_schemes": ["original", "FedPara, float16 uplink"],
    "personalize": ["pFedPara", "client 3's merged model"],
    "own_algorithm": ["fedavgm", "fednova", "after 30 rounds"],
    "regression": ["FedPara   R2 0.", "MAE"],
    "segmentation": ["FedPara   dice", "IoU"],
    "larger_than_memory": ["MB of data", "the peak memory grew by less than"],
    "language_model": ["FedPara   perplexity", "MB sent"],
    "adapters": ["FedPara's form", "merged into plain layers"],
}
PAGES = [
    "index.md",
    "guides/aggregation.md",
    "guides/algorithms.md",
    "guides/compression.md",
    "guides/data.md",
    "guides/participation.md",
    "guides/robustness.md",
    "guides/privacy.md",
    "guides/run-folders.md",
    "guides/update-form.md",
    "guides/your-code.md",
    "guides/adapters.md",
    "deployment.md",
]
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""The tags that make a browser load something, each with the attribute that says what."""


@pytest.mark.parametrize("name", PRINTED)
def test_a_tutorial_runs(name, tmp_path, monkeypatch):
    """Two rounds of each federation. `make docs` runs them all."""
    simulate = fp.simulate
    monkeypatch.setattr(
        fp, "simulate", lambda *given, rounds, **options: simulate(*given, rounds=2, **options)
    )
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(DOCS / "hooks" / "pictures.py"))["main"]([name, str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.txt", f"{name}.svg"}
    assert all(words in (tmp_path / f"{name}.txt").read_text() for words in PRINTED[name])


def test_every_example_is_a_tutorial():
    pictures = (DOCS / "hooks" / "pictures.py").read_text()
    assert all(f'"{path.name}"' in pictures for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("name", PRINTED)
def test_a_page_shows_all_of_its_printed_output(name):
    """A page includes the output by line numbers: each line once, in order."""
    lines = (DOCS / "tutorials" / f"{name}.txt").read_text().splitlines()
    page = (DOCS / "tutorials" / f"{name}.md").read_text()
    shown: list[int] = []
    for first, last in re.findall(rf'"docs/tutorials/{name}[.]txt(?::(\d+):(\d+))?"', page):
        shown += range(int(first or 1), int(last or len(lines)) + 1)
    assert shown == [*range(1, len(lines) + 1)]


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page):
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, page, "exec"), names)


class Loaded(HTMLParser):
    """A page's text, and the addresses it loads by itself. Links that a reader may follow are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.text = ""

    def handle_data(self, data):
        self.text += data

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag in LOADS and given.get("rel") not in ("canonical", "prev", "next"):
            self.found.append(given.get(LOADS[tag]) or "")


def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path):
    if find_spec("mkdocs") is None or find_spec("mkdocstrings") is None:
        pytest.skip("mkdocs is not installed: make install")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        parser = Loaded()
        parser.feed(page.read_text())
        assert not re.search(r"-8 ?<", parser.text), f"{page} shows the name of a snippet"
        assert not [address for address in parser.found if re.match(r"(https?:)?//", address)], page
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", sheet.read_text()), sheet


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_its_links_lead_to_files(name):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / name).read_text())
    assert not [link for link in links if "://" not in link and not (ROOT / link).exists()]


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("fedpara", "adapters, FedPara's form"),
        ("lora", "adapters, LoRA's form"),
        ("full", "full fine-tuning"),
    ],
)
def test_the_table_of_fine_tuning_has_the_numbers_of_its_runs(method, name):
    """Its rows have five tuned rates and three other seeds, computed from unrounded scores."""
    lines = (ROOT / "results" / "finetune" / "finetune.jsonl").read_text().splitlines()
    runs = [run for run in map(json.loads, lines) if run["method"] == method and run["done"] == run["rounds"]]
    tuned, final = ([run for run in runs if run["stage"] == stage] for stage in ("tune", "final"))
    best = max(tuned, key=lambda run: run["accuracy"])
    assert len({run["lr"] for run in tuned}) == len(tuned) == 5
    assert {run["seed"]: run["lr"] for run in final} == dict.fromkeys((1, 2, 3), best["lr"])
    scores, sent = [100 * run["accuracy"] for run in final], mean(run["bytes"] for run in final)
    row = (
        f"| {name} | {best['trained']:,} | {best['lr']:g} | {100 * best['accuracy']:.2f} "
        f"| {mean(scores):.2f} ± {half_width(scores):.2f} | {sent / 1e9:.2f} GB |"
    )
    assert row in (ROOT / "benchmarks" / "README.md").read_text().splitlines()


def test_the_tables_of_defences_on_cifar10_have_the_numbers_of_their_runs():
    lines = (ROOT / "results" / "robustness" / "outcomes-cifar10.jsonl").read_text().splitlines()
    runs = {(run["attack"], run["defence"], run["seed"]): run for run in map(json.loads, lines)}
    page = (DOCS / "guides" / "robustness.md").read_text().replace("**", "").splitlines()

    def lost(attack, defence):
        return [
            100 * (runs["none", "none", seed]["accuracy"] - runs[attack, defence, seed]["accuracy"])
            for seed in (81, 82)
        ]

    def success(run):
        return "" if run["backdoor"] is None else f" ({100 * run['backdoor']:.0f})"

    def scored(run):
        return "ended" if run["ended"] else f"{100 * run['accuracy']:.1f}{success(run)}"

    for attack in dict.fromkeys(attack for attack, defence, _ in runs if defence == "auto"):
        cells = scored(runs[attack, "none", 80]), ", ".join(scored(runs[attack, "auto", s]) for s in (81, 82))
        assert f"| {attack} | {cells[0]} | {cells[1]} | {mean(lost(attack, 'auto')):.1f} |" in page
    for attack in ("label-flip", "backdoor(scale=5)", "alie(1.5)"):
        row = f"| {attack} |"
        for defence in ("auto", "centred-clip", "rfa", "multi-krum", "flame"):
            one, other = lost(attack, defence)
            doors = [runs[attack, defence, seed]["backdoor"] for seed in (81, 82)]
            tail = "" if doors[0] is None else f" ({100 * mean(doors):.0f})"
            row += f" {mean((one, other)):.1f}: {one:.1f}, {other:.1f}{tail} |"
        assert row in page


@pytest.mark.parametrize("seeds", [range(90, 95), range(80, 85)], ids=["auto", "others"])
def test_the_tables_of_defences_on_digits_have_the_numbers_of_their_runs(seeds):
    lines = (ROOT / "results" / "robustness" / "outcomes.jsonl").read_text().splitlines()
    runs = {(run["attack"], run["defence"], run["seed"]): run for run in map(json.loads, lines)}
    page = (DOCS / "guides" / "robustness.md").read_text().replace("**", "")
    rows = page.split(f"seeds {seeds[0]} to {seeds[-1]}:\n\n")[1].split("\n\n")[0].splitlines()
    header, *body = (
        [cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows if "---" not in row
    )

    def cell(attack, defence):
        found = [runs[attack, defence.replace("no defence", "none"), seed] for seed in seeds]
        sound = [run for run in found if not run["ended"]]
        if not sound:
            return "ended"
        text = f"{100 * mean(run['accuracy'] for run in sound):.1f}"
        if attack.startswith("backdoor"):
            doors = [100 * run["backdoor"] for run in sound]
            text += f" ({mean(doors):.0f}, {max(doors):.0f})"
        return text + (f", {len(found) - len(sound)} ended" if len(sound) < len(found) else "")

    assert len(body) == 12
    for attack, *cells in body:
        assert cells == [cell(attack, defence) for defence in header[1:]], attack
