"""The page of a search: answer and probes are those of search.json, the bracket narrows, probes lead to their runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadgen.document import files, html
from loadgen.document.content import Document
from loadgen.search import page as search_page
from loadgen.search import results
from loadgen.search.highest import EndReason, Prior, highest_load
from loadgen.search.results import ProbeRun, SearchOptions, SearchResult
from tests.loadgen.report.pages.contents import blocks_of, links, points, rows
from tests.loadgen.report.pages.test_run import drawn
from tests.loadgen.report.test_build import HOSTILE
from tests.loadgen.search.test_highest import probe

SEEN = (  # load, counted, met, verdict
    (10.0, 2000, 1995, "met"), (14.0, 2000, 1500, "missed"), (12.0, 2000, 1990, "met"), (13.0, 900, 888, "unsure"),
)  # fmt: skip
OPTIONS = SearchOptions(slo_ms={"ttft": 500.0}, attain=0.99, axis="rate", budget_s=600.0, config={"gpu": "h200"})


def found(ended: EndReason | None = None, **changes: Any) -> SearchResult:
    alone = ProbeRun(number=1, directory="1", kind="alone", probe=probe(1.0, 4, 4), attained_ratio=1.0)
    runs = [
        ProbeRun(
            number=number, directory=str(number), kind="probe", attained_ratio=met / counted,
            probe=probe(load, counted, met, verdict=verdict), missed={"ttft": 1 - met / counted},
            findings=["INTERRUPTED", "SEND_LAG"] if verdict == "missed" else [],
        )
        for number, (load, counted, met, verdict) in enumerate(SEEN, 2)
    ]  # fmt: skip
    result = SearchResult(
        version="1", options=OPTIONS, backend="vllm", model="m", guess=Prior(load=11.0), probes=[alone, *runs]
    )
    return results.with_answer(
        msgspec.structs.replace(result, **changes), ended or EndReason(code="sure", reason="it is known well enough")
    )


def page_of(result: SearchResult, hrefs: dict[str, str] | None = None, origin: str = "") -> Document:
    return search_page.page(result, hrefs or {}, origin, ["loadgen", "search"])


def test_the_answer_comes_first() -> None:
    result = found()
    page = page_of(result, origin="predicted")
    assert page.verdict == results.sentence(result) and page.tone == "good" and page.sections[0].id == "answer"
    load, share = (row[1:] for row in blocks_of(page, "answer")[0].rows)
    assert result.rate_per_s is not None and 12 < (result.rate_per_s.value or 0) < 14
    assert [cell.value for cell in load] == [getattr(result.rate_per_s, name) for name in ("value", "low", "high")]
    assert [cell.value for cell in share] == [result.attained_ratio, *(result.attained_interval or ())]
    assert {chart.origin for chart in drawn(page).values()} == {"predicted"}


def test_probes_are_those_of_the_json() -> None:
    result = found()
    shown = rows(search_page.probe_table(result, {}))
    for row, run in zip(shown, result.probes, strict=True):
        assert (row["load, requests/s"].value, row["counted"].value) == (run.probe.load, run.probe.counted)
        assert row["met, %"].value == pytest.approx(100 * run.probe.met / run.probe.counted)
        assert row["95 % from"].value < row["met, %"].value <= row["to"].value
    assert [row["verdict"] for row in shown] == ["alone", "met", "missed", "met", "unsure"]
    assert shown[2]["findings"] == "SEND_LAG"  # a search ends its probes itself


def test_the_charts() -> None:
    """Shares by load around the bracket, and the bracket after each probe: it ends as the answer does."""
    result = found()
    charts = drawn(page_of(result))
    shares = charts["Requests that meet the objective"]
    (shade,) = shares.shades
    assert (shade.start, shade.end) == (result.range.low, result.range.high)
    assert {(mark.axis, mark.value) for mark in shares.marks} == {("y", 99.0), ("x", result.range.value)}
    by_name = {series.name: series for series in points(shares)}
    assert list(by_name["met"].x) == [10.0, 12.0] and list(by_name["met"].y) == pytest.approx([99.75, 99.5])
    assert list(by_name["missed"].x) == [14.0] and by_name.keys() == {"met", "missed", "unsure"}
    steps = charts["One probe after another"]
    bracket = steps.series[0]
    assert list(steps.categories) == ["2", "3", "4", "5"]
    assert (bracket.y[-1], (bracket.low or [])[-1], (bracket.high or [])[-1]) == pytest.approx(
        (result.range.value, result.range.low, result.range.high)
    )
    first = highest_load(OPTIONS.goal, Prior(load=11.0), result.loads[:1])
    assert math.isinf(first.high) and (bracket.high or [])[0] == max(14.0, first.value or 0.0)


def test_every_probe_leads_to_its_run(tmp_path: Path) -> None:
    for name in "135":
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.html").touch()
    files.write(tmp_path / search_page.FILE, search_page.of(tmp_path, found()))
    text = (tmp_path / "search.html").read_text()
    assert [f'href="{name}/report.html"' in text for name in "12345"] == [True, False, True, False, True]
    page = page_of(found(), {"3": "3/report.html"})
    assert links(page) == {"3": "3/report.html"}
    assert [series.hrefs for series in points(drawn(page)["One probe after another"])] == [
        ["", ""], ["3/report.html"], [""],
    ]  # fmt: skip


def test_a_search_without_an_answer() -> None:
    result = found(
        EndReason(code="none", reason="a request misses it even where it is alone"), probes=found().probes[:1]
    )
    page = page_of(result)
    assert page.tone == "bad" and page.verdict.startswith("No load meets the objective")
    assert drawn(page) == {}
    assert page_of(found(EndReason(code="budget", reason="the time is over"))).tone == "warning"
    begun = page_of(found(probes=[], guess=None))
    assert begun.verdict.startswith("There is no answer yet") and drawn(begun) == {}


def test_names_stay_data() -> None:
    options = msgspec.structs.replace(OPTIONS, config={HOSTILE: HOSTILE})
    result = found(backend=HOSTILE, model=HOSTILE, options=options, started_from=HOSTILE)
    hostile = msgspec.structs.replace(result.probes[-1], directory=HOSTILE, findings=[HOSTILE], missed={HOSTILE: 0.5})
    text = html.render(page_of(msgspec.structs.replace(result, probes=[*result.probes[:-1], hostile])))
    assert "<script>alert" not in text and all(char.isprintable() or char in "\n\t" for char in text)
