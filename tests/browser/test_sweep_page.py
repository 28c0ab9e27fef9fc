"""The page of a small sweep on the embedded server, in a real browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from loadgen import cli
from loadgen.report import sweeps
from tests.browser.chromium import SCHEMES, WIDTHS, Chromium
from tests.support.waiting import until

pytestmark = pytest.mark.browser
LOAD = ("--gpu", "h200", "--model", "7b", "--input-tokens", "64", "--output-tokens", "8", "--no-calibrate")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sweep") / "s"
    line = ["sweep", *LOAD, "--rates", "20", "60", "--requests", "30", "--warmup", "1", "--out", str(out)]
    assert cli.invoke(line) in (0, 4)  # a machine that is busy makes the client late, a verdict
    return out


@pytest.fixture(scope="module")
def swept(directory: Path) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((directory / "sweep.json").read_bytes())
    return kept


@pytest.mark.parametrize(("width", "scheme"), [(WIDTHS[0], SCHEMES[0]), (WIDTHS[-1], SCHEMES[1])])
def test_nothing_is_wrong(chromium: Chromium, directory: Path, width: int, scheme: str) -> None:
    assert chromium.faults(directory / "sweep.html", width, scheme) == []


@pytest.mark.always
def test_numbers_are_those_of_the_json(chromium: Chromium, directory: Path, swept: dict[str, Any]) -> None:
    chromium.open(directory / "sweep.html")
    columns = [metric for _, metric in sweeps.columns(sweeps.read(directory))]
    for row, point in zip(chromium.rows("points"), swept["points"], strict=True):
        value, _verdict, runs, ok, failed, *means, _findings = row
        counts = len(point["runs"]), point["requests_ok"], point["requests_failed"]
        assert (value, runs, ok, failed) == (point["value"], *counts)
        assert means == [point["metrics"][metric]["mean"] for metric in columns]
    assert chromium.text(".verdict").startswith(("VALID", "INVALID"))
    assert chromium.text("h1 .origin") == "predicted"
    assert len(chromium.all("figcaption .origin")) == len(chromium.all("figure"))


@pytest.mark.parametrize(("keys", "value"), [((Keys.HOME,), 0), ((Keys.END,), -1)])
def test_a_point_of_the_curve_leads_to_its_run(
    chromium: Chromium, directory: Path, swept: dict[str, Any], keys: tuple[str, ...], value: int
) -> None:
    """From left to right: what a user sees of the slowest point and of the fastest."""
    by_speed = sorted(swept["points"], key=lambda point: point["metrics"][sweeps.INTERACTIVITY]["mean"])
    chart = chromium.open(directory / "sweep.html").chart("Output tokens, a GPU")
    assert f"rate {by_speed[value]['value']}" in chart.press(*keys)
    chart.press(Keys.ENTER)
    run = directory / by_speed[value]["runs"][0] / "report.html"
    until(lambda: chromium.driver.current_url == run.as_uri())
    assert chromium.errors() == []


def test_the_tables_lead_to_every_run(chromium: Chromium, directory: Path, swept: dict[str, Any]) -> None:
    chromium.open(directory / "sweep.html")
    for section in ("points", "runs"):
        found = {link.get_attribute("href") for link in chromium.all(f"#{section} td a")}
        assert found == {(directory / run["directory"] / "report.html").as_uri() for run in swept["runs"]}
    assert all((directory / run["directory"] / "report.html").exists() for run in swept["runs"])
