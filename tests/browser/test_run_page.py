"""The page of a run that was made, and of two over each other, in a real browser: what it shows is what the records
say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from loadgen.report import build, metrics
from loadgen.report.metrics import CONVENTIONS
from loadgen.report.pages.charts import LATENCIES
from loadgen.report.pages.run import RATES
from tests.browser.chromium import SCHEMES, WIDTHS, Chromium

pytestmark = pytest.mark.browser
LOADGEN = (sys.executable, "-c", "from loadgen.cli import main; main()")


def loadgen(*argv: str) -> None:
    done = subprocess.run([*LOADGEN, *argv], capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 4), done.stderr  # a machine that is busy makes the client late, a verdict


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on the embedded server, one that was predicted, and the page of both."""
    folder = tmp_path_factory.mktemp("runs")
    load = ("--requests", "60", "--input-tokens", "uniform:16:200", "--output-tokens", "uniform:4:12", "--seed", "3")
    loadgen("run", *load, "--arrival", "poisson:60", "--no-calibrate", "--warmup", "1", "--out", str(folder / "made"))
    loadgen(
        "predict", "--gpu", "h200", "--model", "7b", *load, "--arrival", "poisson:60", "--out", str(folder / "ahead")
    )
    both = (str(folder / "made"), str(folder / "ahead"))
    loadgen("report", *both, "--html", "--out", str(folder / "runs.html"))
    return folder


@pytest.mark.parametrize("page", ["made/report.html", "ahead/report.html", "runs.html"])
@pytest.mark.parametrize(("width", "scheme"), [(WIDTHS[0], SCHEMES[0]), (WIDTHS[-1], SCHEMES[1])])
def test_nothing_is_wrong(chromium: Chromium, directory: Path, page: str, width: int, scheme: str) -> None:
    path = directory / page
    chromium.open(path, width, scheme)
    chromium.draw_all()
    chromium.unfold()
    assert chromium.errors() == []
    assert chromium.requests() == [path.as_uri()]
    assert chromium.overflow_px() <= 0
    assert chromium.axe() == []


def cells(chromium: Chromium, caption: str) -> dict[str, dict[str, float]]:
    """The exact numbers of a table, by row and column."""
    found: dict[str, dict[str, float]] = chromium.script(
        """
        const table = [...document.querySelectorAll("table")].find(t => t.parentElement.ariaLabel === arguments[0]);
        const headers = [...table.tHead.rows[0].cells].map(cell => cell.textContent);
        return Object.fromEntries([...table.tBodies[0].rows].map(row => [row.cells[0].textContent, Object.fromEntries(
          [...row.cells].map((cell, i) => [headers[i], cell.dataset.value]).filter(([_, value]) => value)
            .map(([name, value]) => [name, Number(value)]))]));
        """,
        caption,
    )
    return found


@pytest.mark.always
def test_numbers_read_from_the_page_are_those_of_report_json(chromium: Chromium, directory: Path) -> None:
    report: dict[str, Any] = json.loads((directory / "made/report.json").read_bytes())
    chromium.open(directory / "made/report.html")
    latency, intervals = cells(chromium, "Latency"), cells(chromium, "Latency with intervals")
    for name, summary in report["metrics"].items():
        for statistic in ("n", "mean", "p50", "p90", "p95", "p99", "p99_9", "max"):
            assert latency[name.removesuffix("_ms")][statistic.replace("_", ".")] == summary[statistic]
    assert intervals["ttft"] == {name: report["metrics"]["ttft_ms"][name] for name in ("mean", "p50", "p99")}
    throughput = {name: row["value"] for name, row in cells(chromium, "Throughput").items()}
    assert throughput == {RATES[name]: value for name, value in report["throughput"].items()}
    assert cells(chromium, "Requests by outcome")["ok"]["requests"] == report["requests"]["ok"] == 60


@pytest.mark.parametrize("up", [0.5, 0.9, 0.99])
def test_hover_over_a_cdf_reads_the_quantile_of_the_records(chromium: Chromium, directory: Path, up: float) -> None:
    measured = build.from_directory(directory / "made")[1].measured()
    chromium.open(directory / "made/report.html")
    for metric, title in LATENCIES.items():
        readout = chromium.chart(title).hover(0.5, up)
        found = re.match(r"p([\d.]+) = ([\d.,]+) ms$", readout)
        assert found, readout
        sample = metrics.sample(measured, metric, CONVENTIONS["loadgen"])
        exact = metrics.percentile(sample.values, round(10 * float(found[1])), "nearest_rank") * sample.unit_ms
        assert float(found[1]) == pytest.approx(100 * up, abs=1.1)
        assert float(found[2].replace(",", "")) == pytest.approx(exact, rel=1e-3)


def test_every_chart_says_where_its_numbers_come_from(chromium: Chromium, directory: Path) -> None:
    both = "emulated and predicted"
    for page, origin in {"made/report.html": "emulated", "ahead/report.html": "predicted", "runs.html": both}.items():
        chromium.open(directory / page)
        marks = chromium.script("return [...document.querySelectorAll('figcaption')].map(f => f.lastChild.textContent)")
        assert len(marks) >= 8 and set(marks) == {origin}
        assert chromium.text("h1 .origin").lower() == origin


def test_charts_over_time_share_their_cursor(chromium: Chromium, directory: Path) -> None:
    chromium.open(directory / "made/report.html")
    queue, rate = chromium.chart("In flight"), chromium.chart("Requests a second")
    readout = rate.hover(0.5, 0.5)
    assert "offered" in readout and "finished" in readout
    at = re.match(r"time since the load began = ([\d.]+) s", readout)
    assert at and re.match(rf"time since the load began = {at[1]} s: \d+ requests$", queue.readout)


def test_each_of_several_runs_is_switched(chromium: Chromium, directory: Path) -> None:
    chart = chromium.open(directory / "runs.html").chart("Time to first token (ttft)")
    names = [key.text for key in chart.figure.find_elements("css selector", ".key")]
    assert names == ["made (emulated)", "ahead (predicted)"]
    assert all(name in chart.hover(0.5, 0.5) for name in names)
    for name, other in (names, reversed(names)):
        before = chart.pixels()
        chart.button(name).click()
        readout = chart.hover(0.5, 0.4)
        assert name not in readout and other in readout and chart.pixels() != before
        chart.button(name).click()
    over_time = chromium.chart("Requests a second")
    assert [key.text for key in over_time.figure.find_elements("css selector", ".key")] == names
    link = next(a for a in chromium.all("td a") if a.text == names[0])
    assert link.get_attribute("href") == (directory / "made/report.html").as_uri()


def test_the_slowest_requests_can_be_found(chromium: Chromium, directory: Path) -> None:
    chromium.open(directory / "made/report.html")
    slowest = cells(chromium, "The 20 requests of the longest e2el")
    report: dict[str, Any] = json.loads((directory / "made/report.json").read_bytes())
    first = next(row for row in slowest if row.startswith("1. "))
    assert len(slowest) == 20 and slowest[first]["e2el, ms"] == report["metrics"]["e2el_ms"]["max"]
    chart = chromium.chart("Token timelines of the slowest requests")
    assert "request" in chart.press(Keys.HOME)
