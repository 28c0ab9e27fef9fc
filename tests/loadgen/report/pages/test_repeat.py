"""The page of several runs: its numbers are those of repeat.json, each run is a point that leads to its page."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from loadgen.document import files, html
from loadgen.document.content import Document
from loadgen.report import repeats
from loadgen.report.pages import repeat, several
from loadgen.report.repeats import Repeated
from tests.loadgen.report.pages.contents import blocks_of, links, points, rows
from tests.loadgen.report.pages.test_run import drawn
from tests.loadgen.report.pages.test_sweep import reported
from tests.loadgen.report.test_build import HOSTILE
from tests.loadgen.report.test_repeats import many, run


def page_of(directory: Path, repeated: Repeated | None = None) -> Document:
    repeated = repeated or repeats.read(directory)
    paths = [Path(each.directory) for each in repeated.runs]
    samples = {path.name: repeats.pooled([path]) for path in paths}
    hrefs = [several.href(path, directory) for path in paths]
    return repeat.page(repeated, samples, hrefs, several.origin(paths), ["loadgen", "run", "--repeat", "3"])


def test_numbers_are_those_of_the_json(tmp_path: Path) -> None:
    directory = many(tmp_path / "a", [101, 103, 105])
    repeats.write(directory, repeats.read(directory))
    kept = json.loads((directory / "repeat.json").read_text())["metrics"]
    page = page_of(directory)
    (table,) = blocks_of(page, "numbers")
    by_name = {row[0]: row[1:-1] for row in table.rows}
    for name, of in kept.items():
        if several.label(name) in by_name:
            assert [cell.value for cell in by_name[several.label(name)]] == [of["mean"], of["std"], *of["ci"]]
    assert {"ttft p99, ms", "output tokens/s", "e2el mean, ms"} <= by_name.keys()
    for place, row in enumerate(rows(blocks_of(page, "runs")[0])):
        for name in repeat.BY_RUN:
            assert row[several.plain(name)].value == kept[name]["runs"][place]
    dots, mean = points(drawn(page)["Time to first token"])[0], drawn(page)["Time to first token"].series[0]
    assert list(dots.y) == kept["ttft_p50"]["runs"] == pytest.approx([100, 102, 104], abs=0.5)
    assert list(mean.y) == [kept["ttft_p50"]["mean"]] * 2 and mean.kind == "line"
    assert [mean.low, mean.high] == [[bound] * 2 for bound in kept["ttft_p50"]["ci"]]
    assert page.tone == "good" and page.verdict == "VALID: all 3 runs finished, and each of them can be trusted."


def test_every_run_leads_to_its_page(tmp_path: Path) -> None:
    directory = reported(many(tmp_path / "a", [101, 103, 105]))
    (directory / "2" / "report.html").unlink()
    page = page_of(directory)
    assert links(page) == {"1": "1/report.html", "3": "3/report.html"}
    for series in points(drawn(page)["Requests"]):
        assert series.hrefs == ["1/report.html", "", "3/report.html"]
    files.write(directory / repeat.FILE, repeat.of(directory, repeats.read(directory)))
    assert 'href="3/report.html"' in (directory / "repeat.html").read_text()


def test_a_run_that_was_stopped_has_no_numbers(tmp_path: Path) -> None:
    directory = many(tmp_path / "a", [101, 103], repeat=3)
    run(directory / "3", 105, config={"repeat": 3}, state="interrupted")
    page = page_of(directory)
    shown = rows(blocks_of(page, "runs")[0])
    assert [row["verdict"] for row in shown] == ["VALID", "VALID", "not finished"]
    assert shown[2]["ttft p50"].value is None and shown[1]["ttft p50"].value is not None
    assert list(points(drawn(page)["Requests"])[0].x) == [0, 1]
    assert page.tone == "warning" and "INTERRUPTED" in html.render(page)
    assert "not finished, in no number" in html.render(page) and repeats.UNFINISHED_NOTE in html.render(page)
    assert repeats.INVALID_NOTE in html.render(page)


def test_runs_that_were_all_stopped_are_what_the_numbers_are_of(tmp_path: Path) -> None:
    run(tmp_path / "a" / "1", 101, config={"repeat": 2}, state="interrupted")
    text = html.render(page_of(tmp_path / "a"))
    assert "0 of 2 runs finished; there is nothing to quote." in text
    assert repeats.NONE_FINISHED_NOTE in text and "in no number" not in text
    assert repeats.UNFINISHED_NOTE not in text


def test_one_run_and_names_that_are_hostile(tmp_path: Path) -> None:
    repeated = repeats.read(many(tmp_path / "a", [101]))
    (only,) = repeated.runs
    only = msgspec.structs.replace(only, valid=False, reasons=[HOSTILE], warnings=[HOSTILE])
    repeated = msgspec.structs.replace(repeated, backend=HOSTILE, model=HOSTILE, runs=[only])
    page = page_of(tmp_path / "a", repeated)
    text = html.render(page)
    assert "<script>alert" not in text and all(char.isprintable() or char in "\n\t" for char in text)
    assert page.tone == "bad" and page.verdict.startswith("INVALID")
    assert repeats.ONE_NOTE in text
