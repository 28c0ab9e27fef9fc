"""The page of a search whose probes are known, in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from loadgen.document import files
from loadgen.search import page, results
from tests.browser.chromium import SCHEMES, WIDTHS, Chromium
from tests.loadgen.report.pages.test_sweep import reported
from tests.loadgen.report.test_repeats import many
from tests.loadgen.search.test_page import found
from tests.support.waiting import until

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five probes, each with the page of a run."""
    made = reported(many(tmp_path_factory.mktemp("search") / "s", [101.0] * 5))
    results.write(made, found())
    files.write(made / page.FILE, page.of(made, results.read(made)))
    return made


@pytest.mark.parametrize(("width", "scheme"), [(WIDTHS[0], SCHEMES[0]), (WIDTHS[-1], SCHEMES[1])])
def test_nothing_is_wrong(chromium: Chromium, directory: Path, width: int, scheme: str) -> None:
    assert chromium.faults(directory / "search.html", width, scheme) == []


@pytest.mark.always
def test_numbers_are_those_of_the_json(chromium: Chromium, directory: Path) -> None:
    kept = results.read(directory)
    chromium.open(directory / "search.html")
    assert chromium.text(".verdict") == results.sentence(kept)
    load, share = chromium.rows("answer")
    assert load[1:] == [kept.range.value, kept.range.low, kept.range.high]
    assert share[1:] == [kept.attained_ratio, *(kept.attained_interval or ())]
    for row, run in zip(chromium.rows("probes"), kept.probes, strict=True):
        assert (row[0], row[1], row[6], row[7]) == (
            run.directory, run.probe.load, run.probe.counted, run.probe.requests,
        )  # fmt: skip


def test_a_probe_leads_to_its_run(chromium: Chromium, directory: Path) -> None:
    chart = chromium.open(directory / "search.html").chart("Requests that meet the objective")
    assert "met = 99.75" in chart.press(Keys.HOME) and "probe 2" in chart.readout
    assert "unsure = 98.67" in chart.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert "missed = 75" in chart.press(Keys.END)
    chart.press(Keys.ENTER)
    until(lambda: chromium.driver.current_url == (directory / "3" / "report.html").as_uri())
