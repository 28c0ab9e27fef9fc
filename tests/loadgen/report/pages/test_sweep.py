"""The page of a sweep: its numbers are those of sweep.json, every point leads to its run, names stay data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from loadgen.document import files, html
from loadgen.document.content import Document, Link
from loadgen.report import build, sweeps
from loadgen.report.pages import several
from loadgen.report.pages import sweep as sweep_page
from loadgen.report.sweeps import BY_TOKENS, INTERACTIVITY, PER_GPU, IdleWait, Swept
from tests.loadgen.report.pages.contents import blocks_of, links, points
from tests.loadgen.report.pages.test_run import drawn
from tests.loadgen.report.test_build import HOSTILE
from tests.loadgen.report.test_sweeps import run, swept_directory


def reported(directory: Path) -> Path:
    """With the reports and pages of its runs."""
    for path in directory.iterdir():
        if path.is_dir():
            build.write(path, *build.from_directory(path))
    return directory


def page_of(directory: Path, swept: Swept | None = None) -> Document:
    swept = swept or sweeps.read(directory)
    runs = [each.directory for each in swept.runs]
    hrefs = {each: several.href(directory / each, directory) for each in runs}
    return sweep_page.page(swept, sweeps.samples(directory, swept), hrefs, several.origin(directory / r for r in runs))


def test_numbers_are_those_of_the_json(tmp_path: Path) -> None:
    directory = reported(swept_directory(tmp_path / "s", gpus=True))
    swept = sweeps.read(directory)
    sweeps.write(directory, swept)
    kept = json.loads((directory / "sweep.json").read_text())
    page = page_of(directory)
    (table,) = blocks_of(page, "points")
    assert [row[0].text for row in table.rows] == kept["plan"]["values"]
    for row, point in zip(table.rows, kept["points"], strict=True):
        cells = dict(zip(table.headers, row, strict=True))
        for heading, metric in sweeps.columns(swept):
            assert cells[heading].value == point["metrics"][metric]["mean"]
        assert cells["requests ok"].value == point["requests_ok"]
        assert cells["verdict"] == "VALID"
    assert page.verdict.startswith("VALID") and page.tone == "good"
    charts = drawn(page)
    front = charts["Output tokens, a GPU"]
    drawn_points = [(x, y) for series in points(front) for x, y in zip(series.x, series.y, strict=True)]
    assert sorted(drawn_points) == sorted(
        (point["metrics"][INTERACTIVITY]["mean"], point["metrics"][BY_TOKENS[0] + PER_GPU]["mean"])
        for point in kept["points"]
    )
    assert {chart.origin for chart in charts.values()} == {"predicted"} == {page.origin}


def test_every_point_leads_to_the_page_of_its_run(tmp_path: Path) -> None:
    directory = reported(swept_directory(tmp_path / "s"))
    shutil.rmtree(directory / "rate-2")
    (directory / "rate-1" / "report.html").unlink()  # as of an older version
    page = page_of(directory)
    for chart in drawn(page).values():
        if chart.quantile:
            continue
        for series in points(chart):
            for label, href in zip(series.labels or (), series.hrefs or (), strict=True):
                assert href == {"rate 4": "rate-4/report.html", "rate 1": ""}[label]
    found = links(page)
    assert found == {"4": "rate-4/report.html", "rate-4": "rate-4/report.html"}
    assert all((directory / href).is_file() for href in found.values())
    assert "2 of 3 runs finished" in page.verdict and page.tone == "warning"


def test_points_of_several_runs_have_intervals_and_lead_to_all_of_them(tmp_path: Path) -> None:
    directory = reported(swept_directory(tmp_path / "s", repeat=3, values=("1", "2")))
    page = page_of(directory)
    (ttft,) = (chart for chart in drawn(page).values() if chart.title == "Time to first token")
    p50 = points(ttft)[0]
    reach = 4.303 / 3**0.5  # Student's t, two degrees of freedom; the values differ by one
    assert list(p50.y) == pytest.approx([101, 101]) and p50.hrefs == ["#runs", "#runs"]
    assert list(p50.low or ()) == pytest.approx([101 - reach] * 2, abs=1e-3)
    single = points(ttft)[1]
    assert sorted(single.y) == pytest.approx([100, 100, 101, 101, 102, 102]) and single.group == p50.group
    assert single.hrefs == [f"{run}/report.html" for run in single.labels or ()]
    (runs,) = blocks_of(page, "runs")
    assert len(runs.rows) == 6 and all(isinstance(row[0], Link) for row in runs.rows)


def test_a_way_that_turns_back_is_drawn_in_pieces(tmp_path: Path) -> None:
    """As the list has it 1, 2, 4; throughput falls at the last one."""
    directory = swept_directory(tmp_path / "s")
    swept = sweeps.read(directory)
    last = swept.points[-1]
    slower = msgspec.structs.replace(last.metrics[BY_TOKENS[0]], mean=5.0, runs=[5.0])
    last = msgspec.structs.replace(last, metrics={**last.metrics, BY_TOKENS[0]: slower})
    swept.points = [*swept.points[:-1], last]
    chart = drawn(page_of(directory, swept))["Time to first token"]
    lines = [series for series in chart.series if series.kind == "line" and series.group == "p50"]
    first, second = (point.metrics[BY_TOKENS[0]].mean for point in swept.points[:2])
    assert [list(line.x) for line in lines] == [[first, second], [5.0, second]]
    for series in chart.series:
        assert list(series.x) == sorted(series.x)


def test_what_is_wrong_stands_first(tmp_path: Path) -> None:
    directory = swept_directory(tmp_path / "s")
    shutil.rmtree(directory / "rate-4")
    run(directory / "rate-4", "4", state="interrupted")
    swept = sweeps.read(directory)
    swept.waits = {"rate-1": IdleWait(by="metrics", idle=False, waited_s=60.0, detail="3 running")}
    broken = msgspec.structs.replace(swept.runs[1], valid=False, reasons=["SEND_LAG: the client was late"])
    swept.runs = [swept.runs[0], broken, *swept.runs[2:]]
    page = page_of(directory, swept)
    assert page.tone == "bad" and page.verdict.startswith("INVALID: 2 of 3 runs finished, and 1 of them")
    text = html.render(page)
    for words in ("SEND_LAG", "the client was late", "3 running", "rate-4", "not finished, in no number"):
        assert words in text, words


def test_names_stay_data(tmp_path: Path) -> None:
    directory = swept_directory(tmp_path / "s")
    swept = sweeps.read(directory)
    swept.backend = swept.model = HOSTILE
    swept.argv = ["loadgen", HOSTILE]
    swept.plan = msgspec.structs.replace(swept.plan, varies=HOSTILE, unit=HOSTILE)
    swept.points = [msgspec.structs.replace(point, value=HOSTILE) for point in swept.points]
    swept.runs = [msgspec.structs.replace(each, reasons=[HOSTILE], warnings=[HOSTILE]) for each in swept.runs]
    text = html.render(sweep_page.page(swept, {HOSTILE: {}}, {}, ""))
    assert "<img" not in text and "<script>alert" not in text
    assert all(char.isprintable() or char in "\n\t" for char in text)


def test_the_file(tmp_path: Path) -> None:
    directory = reported(swept_directory(tmp_path / "s"))
    swept = sweeps.read(directory)
    files.write(directory / sweep_page.FILE, sweep_page.of(directory, swept))
    text = (directory / "sweep.html").read_text()
    for name in ("rate-1", "rate-2", "rate-4"):
        assert f'href="{name}/report.html"' in text
    nothing = msgspec.structs.replace(swept, points=[], runs=[], pareto={name: [] for name in BY_TOKENS})
    assert "no data" in html.render(sweep_page.page(nothing, {}, {}, ""))


def test_an_invalid_point_looks_invalid_and_is_on_no_front(tmp_path: Path) -> None:
    directory = reported(swept_directory(tmp_path / "s"))
    swept = sweeps.read(directory)
    best = swept.pareto[BY_TOKENS[0]][-1]
    swept.points = [
        msgspec.structs.replace(point, valid=False) if point.value == best else point for point in swept.points
    ]
    assert best not in sweeps.front(swept.points, BY_TOKENS[0])
    swept.pareto = {name: sweeps.front(swept.points, name) for name in BY_TOKENS}
    front = next(chart for chart in drawn(page_of(directory, swept)).values() if "interactivity" in chart.x_label)
    (invalid,) = [series for series in front.series if series.name.startswith("INVALID")]
    assert invalid.names == [best] and invalid.dashed and invalid.labels == [f"rate {best}, INVALID"]
    assert all(best not in (series.names or ()) for series in front.series if series is not invalid)
