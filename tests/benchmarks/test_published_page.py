"""The page of published rows: predicted against measured with the diagonal, and the errors of published.json."""

from __future__ import annotations

import json
import math

import msgspec
import pytest

from benchmarks import published
from benchmarks.published import METRICS, NAMES, Predicted, Result
from benchmarks.published import page as published_page
from benchmarks.published.runs import Means
from loadgen.document import html
from tests.benchmarks.test_published import ROW
from tests.loadgen.report.pages.contents import blocks_of, points
from tests.loadgen.report.pages.test_run import drawn
from tests.loadgen.report.test_build import HOSTILE


def result(source: str, run: str, predicted: float, measured: float, reason: str = "") -> Result:
    """As far off in every metric."""
    row = msgspec.structs.replace(ROW, run=run)
    return Result(source, row, Means(*[predicted] * len(METRICS)), Means(*[measured] * len(METRICS)), reason)


@pytest.fixture
def predicted() -> Predicted:
    """Three rows a source, off by -10, 0 and +30 %; of the first, one more that is not predicted."""
    results = {
        source.name: [result(source.name, name, value, 10.0) for name, value in (("a", 9.0), ("b", 10.0), ("c", 13.0))]
        for source in published.sources()
    }
    first = published.sources()[0].name
    results[first].append(result(first, "d", math.nan, 10.0, HOSTILE))
    return Predicted(results, {source.name: [] for source in published.sources()})


def test_errors_are_those_of_the_json(predicted: Predicted) -> None:
    kept = json.loads(published.as_json(predicted, 0))["sources"]
    page = published_page.page(predicted, ["loadgen", "predict"])
    table, _, left_out = blocks_of(page, "errors")
    titles = {source.title: source.name for source in published.sources()}
    for title, metric, rows, median, bias, worst, run, target, verdict in table.rows:
        of = kept[titles[title]]["errors"][metric]
        assert [cell.value for cell in (rows, median, bias, worst, target)] == [
            of[name] for name in ("rows", "median", "bias", "worst", "target")
        ]
        assert run == of["worst_run"] == "c" and verdict == ("met" if of["median"] <= of["target"] else "missed")
    assert len(table.rows) == len(titles) * len(METRICS)
    assert len(left_out.items) == 1 and left_out.items[0].text == HOSTILE
    assert page.origin == "predicted" and page.tone == "good"  # medians of 10 % are within every target


def test_every_row_is_a_point_with_its_name(predicted: Predicted) -> None:
    page = published_page.page(predicted, [])
    charts = drawn(page)
    assert charts.keys() == set(NAMES.values())
    for chart in charts.values():
        assert chart.origin == "predicted" and set(chart.log_now) == {"x", "y"}
        for series in points(chart):
            assert sorted(zip(series.x, series.y, strict=True)) == [(10, 9), (10, 10), (10, 13)]
            assert {label.partition(",")[0] for label in series.labels} == set("abc")
        diagonal = next(series for series in chart.series if series.dashed)
        assert list(diagonal.x) == list(diagonal.y) == pytest.approx([9 / 1.3, 13 * 1.3])


def test_names_stay_data(predicted: Predicted) -> None:
    first = next(iter(predicted.results))
    predicted.results[first].append(result(first, HOSTILE, 10.0, 10.0))
    text = html.render(published_page.page(predicted, [HOSTILE]))
    assert "<script>alert" not in text and all(char.isprintable() or char in "\n\t" for char in text)
