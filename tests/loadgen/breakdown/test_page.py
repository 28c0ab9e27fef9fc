"""The page of a breakdown: its bars and tables are those of breakdown.json, beside the paper's."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from loadgen.breakdown import page as breakdown_page
from loadgen.breakdown import tables
from loadgen.breakdown.tables import Kernel, StepBreakdown
from loadgen.document import files, html
from tests.loadgen.report.pages.contents import blocks_of
from tests.loadgen.report.pages.test_run import drawn
from tests.loadgen.report.test_build import HOSTILE


def measured(**changes: object) -> StepBreakdown:
    kept = StepBreakdown(
        emulated=False, backend="vllm 0.9", model="llama", hardware="1 x GPU", batch=8, prompt_tokens=512,
        context_tokens=600.0, step_ms=10.0, kinds={"GEMM": 6.0, "Attention": 3.0, "Idle": 1.0},
        parts={"Attention blocks": 4.0, "FFN blocks": 5.0, "Between steps": 1.0}, layers=32, steps=20,
        delimited_by="execute annotations", form="graph", kernels=(Kernel("gemm_kernel", "GEMM", 6.0, 64.0),),
    )  # fmt: skip
    return msgspec.structs.replace(kept, **changes)


def test_bars_and_tables_add_up_to_the_step() -> None:
    breakdown = tables.beside_paper(measured())
    page = breakdown_page.page(breakdown, ["loadgen", "breakdown"])
    assert page.verdict == "A decode step takes 10.00 ms: GEMM 60%, Attention 30%, Idle 10%." and page.tone == "plain"
    paper = breakdown.paper
    assert paper is not None
    for number, of, theirs in (("X", breakdown.kinds, paper.kinds), ("XI", breakdown.parts, paper.parts)):
        chart = drawn(page)[f"Table {number} of an average step"]
        assert chart.stacked and list(chart.categories) == ["measured", "the paper"] and chart.origin == ""
        assert {s.name: s.y[0] for s in chart.series if s.y[0]} == of
        assert {s.name: s.y[1] for s in chart.series if s.y[1]} == {name: ms for name, ms in theirs.items() if ms}
    rows = {row[0]: [cell.value for cell in row[1:]] for row in blocks_of(page, "kinds")[0].rows}
    assert rows["Comp."][:2] == [9.0, 90.0] and rows["Step"][:3] == [10.0, 100.0, paper.step_ms]
    assert rows["Comp. GEMM"] == [6.0, 60.0, paper.kinds["GEMM"], 100 * paper.kinds["GEMM"] / paper.step_ms]
    rows = {row[0]: row[1].value for row in blocks_of(page, "parts")[0].rows}
    assert rows["32 x Attention blocks"] == 4.0 and rows["Step"] == 10.0
    assert [row[0] for row in blocks_of(page, "kernels")[0].rows] == ["gemm_kernel"]


def test_no_two_large_parts_have_one_colour() -> None:
    kinds = {name: 0.01 * at for at, name in enumerate(tables.KINDS, 1)}
    kinds["GEMM"] = 10 - sum(kinds.values()) + kinds["GEMM"]
    (chart, *_) = blocks_of(breakdown_page.page(measured(kinds=kinds)), "bars")
    solid = [series.colour for series in chart.series if not series.dashed]
    assert len(set(solid)) == len(solid) == breakdown_page.COLOURS
    assert next(series.colour for series in chart.series if series.name == "GEMM") == 0


def test_modelled_is_emulated_and_much_that_is_unknown_a_warning() -> None:
    page = breakdown_page.page(measured(emulated=True))
    assert page.origin == "emulated" and {chart.origin for chart in drawn(page).values()} == {"emulated"}
    assert breakdown_page.page(measured(kinds={"Unrecognised": 5.0, "GEMM": 5.0})).tone == "warning"


def test_the_file_and_names_that_are_hostile(tmp_path: Path) -> None:
    kernels = (Kernel(HOSTILE, "GEMM", 6.0, 1.0),)
    made = breakdown_page.of(tmp_path, measured(backend=HOSTILE, notes=(HOSTILE,), kernels=kernels))
    files.write(tmp_path / breakdown_page.FILE, made, figures=True)
    text = (tmp_path / "breakdown.html").read_text()
    assert (tmp_path / "breakdown.png").read_bytes().startswith(b"\x89PNG")
    assert "<script>alert" not in text and all(char.isprintable() or char in "\n\t" for char in text)
    assert json.loads(tables.to_json(measured()))["step_ms"] == 10.0 and 'data-value="10.0"' in text
    assert "The command" not in text and html.render(breakdown_page.page(measured(), ["loadgen"])).count("The command")
