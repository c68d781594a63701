"""The page in a real browser: it draws, reacts to the mouse, fits a phone, and logs no errors."""

import importlib.util
import shutil
from pathlib import Path

import pytest

from fedpara.experiments.storage.catalog import Library
from fedpara.report.own import sections
from fedpara.report.own import tables as own_tables
from fedpara.report.page import own_page, page

_spec = importlib.util.spec_from_file_location("browser", Path(__file__).parent / "browser.py")
browser = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(browser)

pytestmark = pytest.mark.skipif(browser.CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def opened(library, tables, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    file = folder / "page.html"
    file.write_text(page(library, tables), encoding="utf-8")
    window = browser.Browser(file, folder / "profile")
    yield window
    window.close()


def curves(window):
    return window.run("[...document.querySelectorAll('#chart .curve')].map(c => c.dataset.series)")


def test_hovering_shows_every_series(opened):
    assert sorted(curves(opened)) == ["FedPara γ 0.1", "low-rank", "original"]
    assert opened.run("document.querySelector('.tip').hidden")
    x, y = opened.middle("#chart svg")
    opened.move(x, y)
    opened.wait_for("!document.querySelector('.tip').hidden")
    text = opened.run("document.querySelector('.tip').innerText")
    assert text.splitlines()[0] == "round 1"
    assert all(name in text for name in ("FedPara γ 0.1", "low-rank", "original"))
    shown = opened.run("data.series.map(s => s.mean[0].toFixed(2))")
    assert all(number in text for number in shown)
    opened.move(2, 2)
    opened.wait_for("document.querySelector('.tip').hidden")
    assert opened.errors == []


def test_the_legend_hides_and_shows_a_series(opened):
    first = opened.run("document.querySelector('#legend button').innerText.trim()")
    opened.click("#legend button")
    assert first not in curves(opened)
    assert len(curves(opened)) == 2
    opened.click("#legend button")
    assert len(curves(opened)) == 3
    assert opened.errors == []


def test_every_axis_and_log_scale_draws(opened):
    axes = opened.run("[...document.querySelectorAll('#axis button')].map(b => b.innerText)")
    assert axes == ["rounds", "bytes", "2 Mbps", "10 Mbps", "50 Mbps"]
    lines = set()
    for number in range(1, len(axes) + 1):
        opened.click(f"#axis button:nth-child({number})")
        for _ in range(2):
            opened.click("#log")
            points = opened.run(
                "[...document.querySelectorAll('.curve')].map(c => c.getAttribute('points')).join()"
            )
            assert "NaN" not in points
            lines.add(points)
    assert len(lines) == 2 * len(axes), "each draws a different chart"
    opened.click("#axis button:nth-child(1)")
    assert opened.errors == []


def test_a_number_opens_its_runs(opened):
    opened.click("#capacity-cnn td.run button")
    assert opened.run("document.querySelector('#detail').open")
    text = opened.run("document.querySelector('#detail').innerText")
    assert "generated:cifar10" in text
    assert "torch" in text
    opened.click("#detail .close")
    assert not opened.run("document.querySelector('#detail').open")
    assert opened.errors == []


@pytest.mark.parametrize("width", [360, 768, 1400])
def test_the_page_fits_its_window(opened, width):
    opened.resize(width, 800)
    opened.settle()
    assert opened.run("document.documentElement.scrollWidth") <= width
    drawn = opened.run("document.querySelector('#chart svg').getBoundingClientRect().width")
    assert 0.6 * width < drawn or width > 1120
    opened.resize(1100, 900)
    assert opened.errors == []


def test_the_theme_follows_the_system_and_the_button(opened):
    def shade():
        return opened.run("getComputedStyle(document.body).backgroundColor")

    opened.prefer("light")
    light = shade()
    opened.prefer("dark")
    dark = shade()
    assert light != dark
    opened.click("#theme")
    assert shade() == light
    opened.click("#theme")
    assert shade() == dark
    assert opened.errors == []


def test_tables_match_those_of_the_terminal(opened, tables):
    for table in tables:
        shown = opened.run(
            f"[...document.querySelectorAll('#{table.study.name} td.ours')].map(c => c.textContent)"
        )
        expected = [table.at(row, column) for row in table.study.rows for column in table.study.columns]
        assert shown == [entry.text for entry in expected if entry is not None]
    assert opened.errors == []


def test_a_folder_named_like_a_script_does_not_blank_the_page(runs, tmp_path):
    for path in runs.iterdir():
        shutil.copytree(path, tmp_path / "<!--<script>" / path.name)
    file = tmp_path / "page.html"
    file.write_text(page(Library.of(tmp_path / "<!--<script>"), []), encoding="utf-8")
    window = browser.Browser(file, tmp_path / "profile")
    try:
        assert len(curves(window)) == 3
        assert window.errors == []
    finally:
        window.close()


def test_a_page_of_other_runs_draws_its_intervals_and_names_no_paper(library, tmp_path):
    found = sections(library)
    file = tmp_path / "page.html"
    file.write_text(own_page(library, own_tables(found, library), found), encoding="utf-8")
    window = browser.Browser(file, tmp_path / "profile")
    try:
        assert window.run("document.title") == "Runs of fedpara"
        assert "paper" not in window.run("document.body.innerText").lower()
        assert window.run("document.querySelectorAll('#chart .band').length") == len(curves(window)) == 3
        for number in range(1, 6):
            window.click(f"#axis button:nth-child({number})")
            assert "NaN" not in window.run("document.querySelector('#chart').innerHTML")
        window.move(*window.middle("#chart svg"))
        window.wait_for("document.querySelector('.tip').innerText.includes(' ± ')")
        window.click("#runs-1 td.run button")
        assert "torch" in window.run("document.querySelector('#detail').innerText")
        assert window.errors == []
    finally:
        window.close()
