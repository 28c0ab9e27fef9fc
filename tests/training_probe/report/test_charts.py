"""A sweep's page as data: numbers are the report's own, names hold the sizes, and nothing of it is markup."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadgen.document import html
from loadgen.document.content import Chart, Code, Document, Series, Text
from tests.training_probe.measured import HOSTILE, result
from tests.training_probe.pages import blocks, charts_of, numbers_of
from training_probe import paper
from training_probe.protocol import TIMELINE_FILE, Timeline
from training_probe.report import build, charts, document
from training_probe.results import CellResult


def sweep() -> list[CellResult]:
    more = {"step_ms": 350.0, "step_ms_std": 7.0, "forward_ms": 30.0, "predicted_memory_gb": 33.0}
    more |= {"device_memory_gb": 80.0}
    return [
        result("Z3", 4000.0, said=more, runs=[3980.0, 4000.0, 4020.0]),
        result("Z2", outcome="oom", reason="no room", said={"predicted_memory_gb": 90.0, "device_memory_gb": 80.0}),
        result("F+Z2", 700.0, said={"valid": False}),
        *(result("Q", 1000.0 * count, gpus=count, micro_batch=2, seq_len=512) for count in (1, 2)),
        result("Q", 3000.0, gpus=2, micro_batch=4, seq_len=512, engine="ddp"),
    ]


def page_of(results: list[CellResult], directory: Path) -> Document:
    return build.document(results, {"argv": ["sweep", "--model", "7b", "--out", "x"]}).page(directory)


def series(chart: Chart, name: str) -> Series:
    return next(each for each in chart.series if each.name == name)


def test_throughput_is_of_a_gpu_and_names_hold_the_sizes(tmp_path: Path) -> None:
    found = sweep()
    chart = charts_of(page_of(found, tmp_path))["Tokens/s of a GPU: 7b, pretrain"]
    assert chart.from_zero and not chart.log and chart.series[0].kind == "bars"
    assert chart.categories == [
        "Z3 8x s350 b1", "Z2 8x s350 b1: oom", "F+Z2 8x s350 b1: invalid", "Q 1x s512 b2", "Q 2x s512 b2",
        "ddp Q 2x s512 b4",
    ]  # fmt: skip
    report = msgspec.to_builtins(build.build(found, {}))["results"]
    expected = [
        each["tokens_per_s"] / each["gpus"] if each["outcome"] == "ok" and each["valid"] else None for each in report
    ]
    assert list(chart.series[0].y) == expected == [500.0, None, None, 1000.0, 1000.0, 1500.0]
    assert chart.series[0].high is not None and chart.series[0].high[0] == 500 + 12.5 / 8


def test_memory_says_what_is_predicted_and_shows_what_ran_out(tmp_path: Path) -> None:
    chart = charts_of(page_of(sweep(), tmp_path))["Peak memory: 7b, pretrain"]
    assert [each.name for each in chart.series] == ["predicted (allocated)", "allocated", "reserved"]
    assert [each.y[1] for each in chart.series] == [90.0, None, None]
    assert [each.y[0] for each in chart.series] == [33.0, 31.5, 40.25]
    assert [(mark.axis, mark.value) for mark in chart.marks] == [("y", 80.0)]


def test_the_papers_platforms_stand_beside_this_one_per_gpu(tmp_path: Path) -> None:
    title = f"As Table III of {paper.SOURCE}: {paper.TITLES['III']}, 7B"
    chart = charts_of(page_of(sweep(), tmp_path))[title]
    assert chart.categories[1] == "Z3 s350 b1"
    assert series(chart, "NVIDIA H200, 8 GPUs").y == [None, 500.0, None]
    assert series(chart, "A800, 8 GPUs (paper)").y[1] == pytest.approx(5491.4 / 8)
    assert series(chart, "RTX4090, 8 GPUs (paper)").y[0] is None  # out of memory there


def test_steps_have_their_spread_and_scaling_its_ideal(tmp_path: Path) -> None:
    found = charts_of(page_of(sweep(), tmp_path))
    step = found["Time of a step: 7b, pretrain"].series[0]
    assert step.low is not None and step.high is not None
    assert (step.low[0], step.y[0], step.high[0]) == (343.0, 350.0, 357.0)
    measured, ideal = found[f"Scaling, as Figure 4 of {paper.SOURCE}"].series
    assert list(measured.y) == list(ideal.y) == [1000.0, 2000.0]
    assert ideal.dashed and ideal.name.endswith(": ideal")


def test_many_cells_are_in_several_charts(tmp_path: Path) -> None:
    found = [result("Z3", 100.0 * batch, micro_batch=batch) for batch in range(1, 40)]
    shown = [chart for title, chart in charts_of(page_of(found, tmp_path)).items() if title.startswith("Tokens/s of")]
    assert [len(chart.categories) for chart in shown] == [16, 16, 7]
    assert [y for chart in shown for y in chart.series[0].y] == [100.0 * batch / 8 for batch in range(1, 40)]


def test_a_timeline_keeps_its_peak_and_says_what_it_left_out(tmp_path: Path) -> None:
    each = [1 << 30] * 100_000
    each[54_321] = 9 << 30
    times = [1e-3 * at for at in range(len(each))]
    recorded = Timeline(categories=["weights", "activations"], time_s=times, bytes=[each, each], steps_s=[0.0, 40.0])
    cell = tmp_path / "trials" / "one" / "timeline"
    cell.mkdir(parents=True)
    (cell / TIMELINE_FILE).write_bytes(msgspec.json.encode(recorded))
    chart = charts_of(page_of(sweep(), tmp_path))["Memory of the first steps: one"]
    total = series(chart, "all")
    peak = int(np.argmax(np.array(total.y)))
    assert (total.x[peak], total.y[peak], series(chart, "weights").y[peak]) == (54.321, 18.0, 9.0)
    assert len(total.x) <= charts.MOST_SAMPLES + 2
    assert "Of 100,000 allocations" in chart.note and "18 GiB" in chart.note
    assert [mark.label for mark in chart.marks] == ["step 1", "step 2"]


def test_the_first_line_counts_and_findings_follow(tmp_path: Path) -> None:
    page = page_of(sweep(), tmp_path)
    assert (page.verdict, page.tone) == (
        "6 cells: 5 ok (1 of them INVALID), 1 oom. INVALID: numbers of it are no measurement.",
        "bad",
    )
    assert page.sections[0].title == "Findings"
    assert page_of([result()], tmp_path).tone == "good"
    assert page_of([result(), result("Z2", outcome="oom")], tmp_path).tone == "good"
    faster = [result("Q", 1000.0, gpus=1), result("Q", 4500.0, gpus=4)]
    page = page_of(faster, tmp_path)
    finding = page.sections[0].blocks[0]
    assert page.tone == "warning" and isinstance(finding, Text) and "112 % of the tokens/s a GPU" in finding.text


def test_numbers_of_tables_are_exact(tmp_path: Path) -> None:
    found = [result("Z3", 1234.567891, said={"mfu_ratio": 0.123456789})]
    assert {1234.567891, 12.3456789, 31.5, 40.25, 8, 350, 1, 5491.4} <= set(numbers_of(page_of(found, tmp_path)))


def test_the_command_is_there_and_a_way_to_repeat_it(tmp_path: Path) -> None:
    codes = [block.text for block in blocks(page_of(sweep(), tmp_path)) if isinstance(block, Code)]
    assert codes[0] == "training_probe sweep --model 7b --out x"
    assert codes[1] == "training_probe sweep --model 7b --out again"
    assert not document.repeated(["sweep", 3]) and not document.repeated(None) and not document.repeated("sweep")
    quoted = document.repeated(["sweep", "--model", "a; rm -rf $HOME"])[0]
    assert isinstance(quoted, Code) and quoted.text == "training_probe sweep --model 'a; rm -rf $HOME'"


class Tags(HTMLParser):
    """Every element and attribute of a file."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {tag, *(f"{tag} {name}" for name, _ in attrs)}


def test_what_others_wrote_is_no_markup(tmp_path: Path) -> None:
    nasty = f"</script><script>alert(1)</script><img src=x onerror=alert(1)>{HOSTILE}"
    manifest = {
        "run_id": nasty, "version": [nasty], "preset": nasty, "argv": ["sweep", nasty], "platform": nasty,
        "machine": {"hostname": nasty, "platform": {nasty: 1}, "cpu_count": nasty, "python": 3},
        "environment": {nasty: nasty}, "driver": nasty, "started_unix_s": nasty,
    }  # fmt: skip
    found = [
        result("Z3", model=nasty, platform=nasty, said={"versions": {nasty: nasty}, "optimizer": nasty}),
        result("Z2", model=nasty, outcome="crashed", reason=nasty, said={"log": nasty}),
    ]
    plain, hostile = (
        html.render(build.document(results, of).page(tmp_path))
        for results, of in (([result("Z3"), result("Z2", outcome="crashed", reason="x")], {}), (found, manifest))
    )
    extra = Tags(hostile).found - Tags(plain).found
    assert extra <= {"pre", "pre tabindex", "code", "div class"}
    assert "\x1b" not in hostile and "\u202e" not in hostile


@pytest.mark.parametrize("started", ["x", -1, 1e300, None, True])
def test_a_time_that_is_none_is_left_out(started: object) -> None:
    assert build.surroundings({"started_unix_s": started})["started"] in ("", "1970-01-01 00:00:01 UTC")


def test_cells_that_were_not_reached_are_a_finding(tmp_path: Path) -> None:
    manifest = {"cells": [{}, {}, {}]}
    (found,) = build.document([result()], manifest).findings
    assert found.startswith("2 of 3 cells were not reached")
    assert not build.document([result()], {"cells": "abc"}).findings
