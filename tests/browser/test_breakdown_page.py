"""The pages of a modelled decode step and of published rows beside what is predicted, in a real browser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from benchmarks import published
from benchmarks.published import Predicted
from benchmarks.published import page as published_page
from loadgen import cli
from loadgen.document import html
from tests.benchmarks.test_published_page import result
from tests.browser.chromium import SCHEMES, WIDTHS, Chromium

pytestmark = pytest.mark.browser
OFF = (("a", 80.0, 100.0), ("b", 220.0, 200.0), ("c", 400.0, 400.0))  # row, predicted, measured


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("modelled")
    assert cli.invoke(["breakdown", "--preset", "paper-table10", "--out", str(made / "b")]) == 0
    results = {each.name: [result(each.name, *row) for row in OFF] for each in published.sources()}
    predicted = Predicted(results, {each.name: [("more", results[each.name])] for each in published.sources()})
    page = published_page.page(predicted, ["python", "-m", "benchmarks.published", "--out", "published"])
    (made / "published.html").write_text(html.render(page), encoding="utf-8")
    return made


@pytest.mark.parametrize("page", ["b/breakdown.html", "published.html"])
@pytest.mark.parametrize(("width", "scheme"), [(WIDTHS[0], SCHEMES[0]), (WIDTHS[-1], SCHEMES[1])])
def test_nothing_is_wrong(chromium: Chromium, directory: Path, page: str, width: int, scheme: str) -> None:
    assert chromium.faults(directory / page, width, scheme) == []


@pytest.mark.always
def test_the_step_is_that_of_the_json(chromium: Chromium, directory: Path) -> None:
    kept = json.loads((directory / "b" / "breakdown.json").read_bytes())
    chromium.open(directory / "b" / "breakdown.html")
    rows = {row[0]: row[1:] for row in chromium.rows("kinds")}
    assert rows["Step"][0] == kept["step_ms"] and rows["Comp. GEMM"][0] == kept["kinds"]["GEMM"]
    assert f"GEMM = {kept['kinds']['GEMM']:.3f} ms" in chromium.chart("Table X of an average step").press(Keys.HOME)
    assert chromium.text("figcaption .origin") == "emulated"


def test_rows_are_points_with_names(chromium: Chromium, directory: Path) -> None:
    chart = chromium.open(directory / "published.html").chart("ttft")
    assert "a, off by -20.0%" in chart.press(Keys.HOME) and "b, off by +10.0%" not in chart.readout
    assert "c, off by +0.0%" in chart.press(Keys.END)
    assert chart.button("log x").get_attribute("aria-pressed") == "true"
    assert [row[3] for row in chromium.rows("errors")] == pytest.approx([0.1] * 4 * len(published.sources()))
