"""A breakdown's page as data: what is stacked sums to what was traced, and every part of the model is in it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from loadgen.document.content import Chart, Document, Link, Table
from tests.training_probe.breakdown.test_run import NAIVE, traced
from tests.training_probe.pages import blocks, charts_of, numbers_of
from training_probe.breakdown import charts, report, tables
from training_probe.breakdown.run import Breakdown


def page_of(found: list[Breakdown], directory: Path) -> Document:
    return report.document(found, {"platform": "NVIDIA H200"}).page(directory)


def heights(chart: Chart) -> list[float]:
    """Of the stacks."""
    return [sum(values) for values in zip(*(each.y for each in chart.series), strict=True)]  # type: ignore[arg-type]


def test_stacks_sum_to_the_step_and_its_passes(tmp_path: Path) -> None:
    found = charts_of(page_of([traced(NAIVE)], tmp_path))
    assert all(chart.stacked and chart.from_zero for chart in found.values())
    step, passes = found["Passes of a step"], found["What a pass is made of"]
    assert step.categories == ["Naive 4x s350 b2"]
    assert heights(step) == pytest.approx([100.0])
    assert heights(passes) == pytest.approx([30.0, 60.0, 10.0])
    assert passes.categories == [f"Naive 4x s350 b2: {phase}" for phase in ("forward", "backward", "optimizer")]


def test_every_part_is_in_the_chart_of_parts(tmp_path: Path) -> None:
    parts = charts_of(page_of([traced(NAIVE)], tmp_path))["Parts of the model"]
    assert heights(parts) == pytest.approx([24.0, 48.5, 0.0])  # computation alone
    named = {each.name: [*each.y] for each in parts.series}
    assert named["recomputed"] == [0, 12.0, 0] and named["MLP"] == [12.0, 16.0, 0]
    assert named["outside the layers"] == [0, 0.5, 0]
    in_layers = [part for own in charts.OF_A_LAYER.values() for part in own]
    assert sorted([*in_layers, *charts.OUTSIDE]) == sorted(tables.PARTS)


def test_a_cell_that_failed_is_a_finding_and_in_no_chart(tmp_path: Path) -> None:
    failed = traced(msgspec.structs.replace(NAIVE, method="F", attention="flash"), "oom")
    page = page_of([traced(NAIVE), failed], tmp_path)
    assert page.verdict == "2 traced cells: 1 ok, 1 oom."
    assert page.sections[0].title == "Findings"
    assert len(charts_of(page)["Passes of a step"].categories) == 1
    assert not charts_of(page_of([failed], tmp_path))


def test_a_trace_that_is_there_is_a_link_and_numbers_are_exact(tmp_path: Path) -> None:
    page = page_of([traced(NAIVE)], tmp_path)
    assert {12.0, 40.0, 9.92, 36.26} <= {round(value, 9) for value in numbers_of(page) if value is not None}
    (tmp_path / "t.json.gz").touch()
    for each, linked in ((page, False), (page_of([traced(NAIVE)], tmp_path), True)):
        cells = [cell for block in blocks(each) if isinstance(block, Table) for row in block.rows for cell in row]
        assert any(isinstance(cell, Link) and cell.href == "./t.json.gz" for cell in cells) is linked
