"""The pages of repeats and of their comparison, in a real browser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from loadgen import cli
from loadgen.document import files
from loadgen.report import compare, repeats
from loadgen.report.pages import repeat
from tests.browser.chromium import SCHEMES, WIDTHS, Chromium
from tests.loadgen.report.pages.test_sweep import reported
from tests.loadgen.report.test_repeats import many
from tests.support.waiting import until

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Repeats `a`, slower ones `b`, and the page of a gate on them."""
    made = tmp_path_factory.mktemp("compared")
    for name, firsts in (("a", [101, 103, 102]), ("b", [121, 123, 122])):
        runs = reported(many(made / name, firsts))
        repeats.write(runs, repeats.read(runs))
        files.write(runs / repeat.FILE, repeat.of(runs, repeats.read(runs)))
    line = ["compare", str(made / "a"), str(made / "b"), "--fail-if", "ttft_p99>+5%", "--html", str(made / "c.html")]
    assert cli.invoke(line) == 5
    return made


@pytest.mark.parametrize("page", ["a/repeat.html", "c.html"])
@pytest.mark.parametrize(("width", "scheme"), [(WIDTHS[0], SCHEMES[0]), (WIDTHS[-1], SCHEMES[1])])
def test_nothing_is_wrong(chromium: Chromium, directory: Path, page: str, width: int, scheme: str) -> None:
    assert chromium.faults(directory / page, width, scheme) == []


@pytest.mark.always
def test_repeats_are_those_of_the_json(chromium: Chromium, directory: Path) -> None:
    kept = json.loads((directory / "a" / "repeat.json").read_bytes())["metrics"]
    chromium.open(directory / "a" / "repeat.html")
    means = {row[0]: row[1:] for row in chromium.rows("numbers")}
    *numbers, each = means["ttft p99, ms"]
    assert numbers == [kept["ttft_p99"]["mean"], kept["ttft_p99"]["std"], *kept["ttft_p99"]["ci"]]
    assert len(str(each).split()) == len(kept["ttft_p99"]["runs"])
    assert [row[3] for row in chromium.rows("runs")] == kept["ttft_p50"]["runs"]
    chart = chromium.chart("Requests")
    assert chart.press(Keys.HOME).startswith("1: ")
    chart.press(Keys.END, Keys.ENTER)
    until(lambda: chromium.driver.current_url == (directory / "a" / "3" / "report.html").as_uri())


@pytest.mark.always
def test_differences_are_those_of_the_comparison(chromium: Chromium, directory: Path) -> None:
    compared = compare.compare(directory / "a", directory / "b")
    chromium.open(directory / "c.html")
    assert chromium.text(".verdict") == "Gate: B is worse than A by more than a limit allows."
    change = compared.metrics["ttft_ms"]["p99"]
    row = next(row for row in chromium.rows("numbers") if row[0] == "ttft p99, ms")
    expected = [change.a, change.b, change.difference, *change.difference_ci, change.ratio, *change.ratio_ci]
    assert row[1:] == [*expected, "B is higher"]
    percent = 100 * (change.ratio - 1)
    chart = chromium.chart("B over A, less 1")
    assert f"B is worse = {percent:.2f}" in chart.press(Keys.HOME, Keys.ARROW_RIGHT)
    assert {state for state, _, _ in chromium.rows("gate")} == {"ok", "BEYOND"}


def test_distributions_are_over_each_other(chromium: Chromium, directory: Path) -> None:
    p50 = [repeats.pooled(repeats.directories(directory / name))["ttft_ms"] for name in "ab"]
    medians = [of.values[(len(of.values) - 1) // 2] * of.unit_ms for of in p50]
    chart = chromium.open(directory / "c.html").chart("Time to first token (ttft)")
    readout = chart.hover(0.5, 0.5)
    assert readout.startswith("p50:")
    assert [float(text.split()[0]) for text in readout.split("= ")[1:]] == pytest.approx(medians, rel=0.005)
