"""What pages share: numbers of curves are short and in order, and an origin is never lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.document import content
from loadgen.document.content import Number
from loadgen.report import text
from loadgen.report.contrast import SAME
from loadgen.report.finding import Finding
from loadgen.report.metrics import Distribution, Summary
from loadgen.report.pages import parts
from loadgen.report.pages.parts import Curve


@given(st.lists(st.floats(-1e12, 1e12), max_size=50))
def test_numbers_of_curves_keep_five_digits(values: list[float]) -> None:
    short = parts.rounded(np.array(values))
    for value, rounded in zip(values, short, strict=True):
        assert rounded == pytest.approx(value, rel=5.01e-5, abs=1e-300)
        assert (
            rounded is not None and len(f"{rounded:.15g}".lstrip("-0.").replace(".", "").split("e")[0].rstrip("0")) <= 5
        )
    ascending = parts.rounded(np.sort(np.array(values)))
    assert ascending == sorted(ascending, key=float)  # type: ignore[arg-type]


def test_what_is_not_finite_is_a_gap() -> None:
    assert parts.rounded(np.array([1.0, np.nan, np.inf, 0.0])) == [1.0, None, None, 0.0]


def test_cells_show_the_report_and_hold_the_exact_number() -> None:
    assert content.cell(1234.5678) == Number("1,235", 1234.5678)
    assert content.cell(None) == Number("-", None)
    assert parts.interval((1.0, 2.5)) == "1.00 to 2.50" and parts.interval(None) == "-"
    table = text.with_column(text.summaries("latency", {"ttft": Summary(n=2, mean=3.25)}), "off by", {"ttft": "1 %"})
    assert table.headers[-2:] == ["max", "off by"] and table.rows[0][-1] == "1 %"
    assert [cell for cell in table.rows[0] if isinstance(cell, Number)][:2] == [Number("2", 2.0), Number("3.25", 3.25)]


def test_an_origin_is_never_lost() -> None:
    assert parts.shared_origin([]) == parts.shared_origin(["", ""]) == ""
    assert parts.shared_origin(["predicted", "predicted"]) == "predicted"
    assert parts.shared_origin(["", "predicted", "emulated"]) == "partly emulated and predicted"
    assert parts.shared_origin(["predicted", "emulated"]) == "emulated and predicted"
    curves = [
        Curve("a", Distribution(np.array([1.0]), 1.0)),
        Curve("b", Distribution(np.array([2.0]), 1.0), 1, "emulated"),
    ]
    chart = parts.cdf("title", curves, "ttft (ms)")
    assert chart.origin == "partly emulated" and chart.quantile and chart.note == ""
    assert [(one.group, one.colour) for one in chart.series] == [("a", 0), ("b", 1)]


def test_many_runs_share_a_chart_and_its_size() -> None:
    values = np.sort(np.random.default_rng(0).exponential(1, 10_000))
    chart = parts.cdf("title", [Curve(str(each), Distribution(values, 1.0), each) for each in range(20)], "ms")
    assert all(len(one.x) <= parts.LEAST_STEPS + 3 for one in chart.series)
    assert f"within 1/{parts.LEAST_STEPS} of the exact share" in chart.note
    assert {one.x[-1] for one in chart.series} == {parts.rounded(values)[-1]}


def test_findings_have_their_tone() -> None:
    severities = ("invalid", "warning", "info")
    found = [Finding(code="CODE", severity=each, message=SAME, advice="Do it.") for each in severities]  # type: ignore[arg-type]
    items = text.listed(found).items
    assert [(item.head, item.tone) for item in items] == [
        ("invalid CODE", "bad"), ("warning CODE", "warning"), ("info CODE", "plain")
    ]  # fmt: skip
