"""Gates over training: what breaks a limit by hand, what fails only in B, micro-benchmarks and breakdowns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest

from loadgen.document import html, terminal
from tests.training_probe.measured import HOSTILE, result
from tests.training_probe.pages import charts_of, numbers_of
from training_probe import cli
from training_probe import compare as comparison
from training_probe.breakdown.attribution import PASSES, Attribution, PassTimes
from training_probe.breakdown.run import Breakdown
from training_probe.conditions import Conditions
from training_probe.grid import cell
from training_probe.points import Collective, Copy, Gemm, Measured, Point, measured
from training_probe.report.build import build
from training_probe.results import BREAKDOWN_FILE, CellResult, ResultsError, append, read


def swept(directory: Path, *results: CellResult) -> Path:
    directory.mkdir(parents=True)
    for each in results:
        append(directory, each)
    return directory


def of_runs(*runs: float, method: str = "Z3", **said: Any) -> CellResult:
    return result(
        method, float(np.mean(runs)), runs=list(runs), said={"mfu_ratio": float(np.mean(runs)) / 2000, **said}
    )


def gate(a: Path, b: Path, *limits: str, junit: Path | None = None) -> int:
    words = [word for limit in limits for word in ("--fail-if", limit)]
    return cli.invoke(["compare", str(a), str(b), *words, *(["--junit", str(junit)] if junit else [])])


def test_speed_mfu_and_memory_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = swept(tmp_path / "a", of_runs(990, 1000, 1010))
    b = swept(tmp_path / "b", of_runs(890, 900, 910))
    c = swept(tmp_path / "c", of_runs(985, 1000, 1015, peak_memory_gb=32.5))
    assert gate(a, b, "tokens_per_s<-3%") == gate(a, b, "mfu_ratio<-3%") == 5
    assert gate(a, b, "tokens_per_s<-15%", "mfu_ratio<-15%") == 0
    assert gate(b, a, "tokens_per_s<-0%", "mfu_ratio<-0%") == 0  # faster
    assert gate(a, c, "tokens_per_s<-3%") == 0
    assert gate(a, c, "peak_memory_gb>+1.5GiB", "peak_memory_gb>+4%") == 0
    capsys.readouterr()
    junit = tmp_path / "junit.xml"
    assert gate(a, c, "peak_memory_gb>+0.5GiB", "peak_memory_gb>+2%", junit=junit) == 5
    assert "peak_memory_gb is 31.50 in A and 32.50 in B, +1 GiB: beyond the limit." in capsys.readouterr().out
    (suite,) = ElementTree.parse(junit).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "2", "0")


def test_mfu_has_the_interval_of_the_speed() -> None:
    speed = comparison.speed_contrast(of_runs(990, 1000, 1010), of_runs(890, 900, 910))
    mfu = comparison.in_proportion(speed, 0.5, 0.45)
    assert mfu.ratio_ci == pytest.approx(speed.ratio_ci)
    assert comparison.in_proportion(speed, None, 0.45).ratio_ci is None


def test_one_run_has_the_noise_of_its_steps_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = {"runs": 1, "steps": 100, "step_ms": 500.0, "step_ms_std": 25.0}
    a, b = (of_runs(speed, **said) for speed in (1000.0, 980.0))
    reach = 1.96 * math.sqrt(2) * 0.05 / 10
    expected = [0.98 * math.exp(-reach), 0.98 * math.exp(reach)]
    assert comparison.speed_contrast(a, b).ratio_ci == pytest.approx(expected)
    of_a, of_b = swept(tmp_path / "a", a), swept(tmp_path / "b", b)
    assert gate(of_a, of_b, "tokens_per_s<-1%") == 0 and gate(of_a, of_b, "tokens_per_s<-0.5%") == 5
    assert f"warning: {comparison.ONE_RUN}" in " ".join(capsys.readouterr().out.split())
    silent = swept(tmp_path / "c", result(tokens_per_s=900.0))
    assert gate(silent, silent, "tokens_per_s<-1%") == 4  # nothing says how noisy it is


@pytest.mark.parametrize(
    ("of_a", "of_b", "code"),
    [
        ({}, {"outcome": "oom", "reason": "no room"}, 5), ({}, {"outcome": "crashed"}, 5),
        ({}, {"said": {"valid": False}}, 4), ({"said": {"valid": False}}, {}, 4),
        ({"outcome": "oom"}, {"outcome": "oom"}, 0), ({"outcome": "oom"}, {}, 0), ({}, None, 4),
    ],
)  # fmt: skip
def test_how_cells_ended(of_a: dict[str, Any], of_b: dict[str, Any] | None, code: int, tmp_path: Path) -> None:
    kept = of_runs(990, 1000, 1010)
    a = swept(tmp_path / "a", kept, result("Z2", **of_a))
    b = swept(tmp_path / "b", kept, *([] if of_b is None else [result("Z2", **of_b)]))
    assert gate(a, b, "peak_memory_gb>+1%") == code


def loaded(of: CellResult) -> CellResult:
    """As measured while others took half of the ranks' cores."""
    taken = Conditions(seconds=10.0, cores=2, others_ratio=0.5, idle_ratio=0.1)
    return msgspec.structs.replace(of, conditions=taken)


def test_no_gate_passes_an_invalid_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = swept(tmp_path / "good", of_runs(990, 1000, 1010))
    bad = swept(tmp_path / "bad", loaded(of_runs(990, 1000, 1010)))
    assert build(read(bad), {}).verdict == "INVALID" and build(read(good), {}).verdict == "VALID"
    for a, b in ((bad, bad), (good, bad), (bad, good)):
        assert gate(a, b, "tokens_per_s<-3%") == 4
        sides = [side for side, path in (("A", a), ("B", b)) if path == bad]
        out = capsys.readouterr().out
        assert all(f"{side} is INVALID: LOADED (invalid)" in out for side in sides)
        assert cli.invoke(["compare", str(a), str(b), "--html", str(tmp_path / f"{a.name}-{b.name}.html")]) == 0
        out = capsys.readouterr().out
        assert [line[0] for line in out.splitlines() if " is INVALID: " in line] == sides
        page = comparison.compare(a, b).page([], [])
        assert page.tone == "bad" and all(f"{side} is INVALID." in page.verdict for side in sides)
    assert gate(good, good, "tokens_per_s<-3%") == 0 and "INVALID" not in capsys.readouterr().out


def test_figures_of_an_invalid_sweep_say_so(tmp_path: Path) -> None:
    for name, made in (("good", of_runs(990, 1000, 1010)), ("bad", loaded(of_runs(990, 1000, 1010)))):
        directory = swept(tmp_path / name, made)
        cli.invoke(["report", str(directory)])
        svgs = list(directory.rglob("*.svg"))
        assert svgs and all(("INVALID" in svg.read_text()) == (name == "bad") for svg in svgs)


def test_nothing_in_common_does_not_pass(tmp_path: Path) -> None:
    a, b = swept(tmp_path / "a", result("Z2", outcome="oom")), swept(tmp_path / "b", result("Z3"))
    assert gate(a, b, "tokens_per_s<-3%") == 4


# Sweeps as text.


def text_of(tmp_path: Path, a: list[CellResult], b: list[CellResult]) -> str:
    return terminal.render(comparison.compare(swept(tmp_path / "a", *a), swept(tmp_path / "b", *b)).page([], []), 200)


def row_of(tmp_path: Path, a: CellResult, b: CellResult) -> dict[str, str]:
    """The row of the cells in both; those of speeds are by their own heads alone."""
    found = comparison.compare(swept(tmp_path / "a", a), swept(tmp_path / "b", b)).table
    heads = [f"{each.group} {each.head}" if "GiB" in each.group else each.head for each in comparison.COLUMNS]
    return dict(zip(heads, *found.texts(), strict=True))


def test_a_sweep_does_not_differ_from_itself(tmp_path: Path) -> None:
    found = of_runs(990, 1000, 1010)
    row = row_of(tmp_path / "row", found, found)
    assert row["B / A"] == "1.000" and row["shows"] == "no difference shown"
    assert row["allocated GiB B - A"] == row["reserved GiB B - A"] == "0.000"
    both = [found, result("Z2", outcome="oom")]
    text = text_of(tmp_path, both, both)
    assert "Ended differently" not in text and "Only in" not in text


def test_a_speed_that_differs_has_its_interval(tmp_path: Path) -> None:
    slow, fast = of_runs(990, 1000, 1010), of_runs(1188, 1200, 1212)
    reach = 2.776 * math.sqrt(2 * 0.01**2 / 3)  # both: s = 1 %, n = 3; 4 degrees of freedom, t = 2.776
    row = row_of(tmp_path / "up", slow, fast)
    assert row["95 % CI"] == f"[{1.2 * math.exp(-reach):.3f}, {1.2 * math.exp(reach):.3f}]"
    assert (row["B / A"], row["shows"]) == ("1.200", "B is better")
    assert row_of(tmp_path / "down", fast, slow)["shows"] == "B is worse"


def test_no_spread_no_interval(tmp_path: Path) -> None:
    row = row_of(tmp_path, result(tokens_per_s=1000.0), of_runs(990, 1000, 1010))
    assert (row["B / A"], row["95 % CI"], row["shows"]) == ("1.000", "", "")


def test_what_changed_and_what_is_missing_is_named(tmp_path: Path) -> None:
    a = [result("Z3"), result("Z2", outcome="oom", reason="no room"), result("Q"), result("R", gpus=4)]
    b = [result("Z3", said={"valid": False}), result("Z2", 5000.0), result("R", gpus=2)]
    lines = text_of(tmp_path, a, b).splitlines()
    changed, only_a, only_b = (lines.index(head) for head in ("Ended differently:", "Only in A:", "Only in B:"))
    assert lines[changed + 2 : only_a] == [f"{a[0].cell}: ok | invalid", f"{a[1].cell}: oom (no room) | ok", ""]
    assert lines[only_a + 2 : only_b] == [a[2].cell, a[3].cell, ""]
    assert lines[only_b + 2 :] == [b[2].cell]
    row = row_of(tmp_path / "row", a[0], b[0])
    assert row["B / A"] == ""  # an invalid speed is compared with nothing


def test_memory_is_b_minus_a_and_another_searched_batch_is_shown(tmp_path: Path) -> None:
    a = result("Z3", micro_batch=None, said={"batch_size": 16, "peak_memory_gb": 30.0})
    b = result("Z3", micro_batch=None, said={"batch_size": 32, "peak_memory_gb": 45.5, "peak_reserved_gb": None})
    row = row_of(tmp_path, a, b)
    assert row["allocated GiB B - A"] == "15.50"
    assert row["reserved GiB B - A"] == "-"
    assert "(BS 16 -> 32)" in row["cell"]


def test_text_from_elsewhere_is_not_obeyed(tmp_path: Path) -> None:
    a, b = result(model="x\x1b[2J"), result(model="x\x1b[2J", outcome="crashed", reason=HOSTILE)
    text = text_of(tmp_path, [a], [b])
    assert "\x1b" not in text and "\r" not in text and "\u202e" not in text


def test_versions_that_differ_are_said(tmp_path: Path) -> None:
    a, b = ([result(said={"versions": {"torch": torch, "numpy": "2"}})] for torch in ("2.11", "2.13"))
    text = text_of(tmp_path, a, b)
    assert "only A: torch 2.11\n" in text and "only B: torch 2.13\n" in text


def test_directories_are_read_and_a_missing_one_is_a_sentence(tmp_path: Path) -> None:
    a = swept(tmp_path / "a", of_runs(1, 2))
    assert comparison.compare(a, a).sides[0] == f"A: {a}, 1 cells; NVIDIA H200; 30 + 100 steps x 3"
    with pytest.raises(ResultsError, match="cannot read"):
        comparison.compare(a, tmp_path / "none")


# Micro-benchmarks.


def points(directory: Path, *results: Measured) -> Path:
    directory.mkdir()
    (directory / "micro.jsonl").write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in results))
    return directory


def timed(point: Point, mean_s: float, seed: int = 0, correct: bool | None = None) -> Measured:
    return measured(point, np.random.default_rng(seed).normal(mean_s, 0.02 * mean_s, 50).tolist(), 3, correct)


GEMM = Gemm(m=64, n=64, k=64, dtype="bf16")
COPY = Copy(route="h2d", pinned=True, size_bytes=1 << 20)
REDUCE = Collective(name="allreduce", size_bytes=1 << 20, ranks=4, p2p=True)


@pytest.mark.parametrize("point", [GEMM, COPY, REDUCE])
def test_micro_benchmarks(point: Point, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, same = points(tmp_path / "a", timed(point, 1e-3)), points(tmp_path / "b", timed(point, 1e-3, 1))
    slower = points(tmp_path / "c", timed(point, 1.11e-3, 2))
    rate = comparison.RATES[type(point)]
    assert gate(a, same, "median_ms>+3%", f"{rate}<-3%") == 0
    assert comparison.WITHIN in capsys.readouterr().out
    assert (
        gate(a, slower, "median_ms>+3%") == gate(a, slower, f"{rate}<-3%") == gate(a, slower, "median_ms>+0.05ms") == 5
    )
    assert gate(slower, a, "median_ms>+0%", f"{rate}<-0%") == 0
    other = "bytes_per_s" if rate == "flops_per_s" else "flops_per_s"
    assert gate(a, same, f"{other}<-3%") == 2


def test_the_interval_of_medians_covers_the_truth() -> None:
    covered = 0
    for at in range(500):
        interval = comparison.median_contrast(timed(GEMM, 1e-3, 2 * at), timed(GEMM, 1.1e-3, 2 * at + 1)).ratio_ci
        assert interval is not None
        covered += interval[0] <= 1.1 <= interval[1]
    assert 0.92 <= covered / 500 <= 0.98


def test_a_wrong_result_does_not_pass(tmp_path: Path) -> None:
    a = points(tmp_path / "a", timed(REDUCE, 1e-3))
    assert gate(a, points(tmp_path / "b", timed(REDUCE, 1e-3, correct=False)), "median_ms>+50%") == 4
    assert gate(a, points(tmp_path / "c", Measured(point=REDUCE, outcome="crashed")), "median_ms>+50%") == 5


# Breakdowns.


def traced(directory: Path, step_s: float, backward_s: float) -> Path:
    rest = (step_s - backward_s) / 2
    windows = [
        PassTimes(
            phase=phase, overall_s=seconds, compute_s=seconds, exposed_communication_s=0, exposed_memcpy_s=0, idle_s=0,
            communication_s=0, memcpy_s=0,
        )
        for phase, seconds in zip(PASSES, (rest, backward_s, rest), strict=True)
    ]  # fmt: skip
    attribution = Attribution(device="cuda", steps=3, step_s=step_s, windows=windows, shares=[])
    asked = cell("Z3", model="7b", gpus=8, micro_batch=2)
    made = Breakdown(cell=asked, platform="NVIDIA H200", outcome="ok", attribution=attribution)
    directory.mkdir()
    (directory / BREAKDOWN_FILE).write_bytes(msgspec.json.encode(made) + b"\n")
    return directory


def test_breakdowns_are_compared_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = traced(tmp_path / "a", 1.0, 0.5), traced(tmp_path / "b", 1.02, 0.6)
    assert gate(a, b, "step_ms>+3%", "forward_ms>+1%") == 0
    assert gate(a, b, "backward_ms>+19%") == gate(a, b, "backward_ms>+90ms") == 5
    out = capsys.readouterr().out
    assert f"warning: {comparison.POINT}" in out
    assert "backward_ms is 500.0 in A and 600.0 in B, +20.0 %: beyond the limit." in out
    assert cli.invoke(["compare", str(a), str(b)]) == 0
    assert "backward (ms)" in capsys.readouterr().out


def test_kinds_are_not_mixed(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="hold different measurements"):
        comparison.compare(traced(tmp_path / "a", 1, 0.5), points(tmp_path / "b", timed(GEMM, 1)))


# As a page.


def test_a_page_has_ratios_with_intervals_and_says_which_are_better(tmp_path: Path) -> None:
    a = swept(tmp_path / "a", of_runs(990, 1000, 1010), of_runs(1000, 1001, method="Z2"), of_runs(500, 510, method="R"))
    b = swept(tmp_path / "b", of_runs(890, 900, 910), of_runs(1000, 1001, method="Z2"), of_runs(900, 910, method="R"))
    assert cli.invoke(["compare", str(a), str(b), "--html", str(tmp_path / "c.html")]) == 0
    made = comparison.compare(a, b)
    page = made.page([], [])
    assert page.verdict == "tokens/s of 3 in both: 1 better, 1 worse, 1 no difference shown."
    chart = charts_of(page)["tokens/s"]
    assert not chart.from_zero and [mark.value for mark in chart.marks] == [0.0]
    changes = [each["tokens_per_s"] for each in made.changes.values()]
    assert {series.name for series in chart.series} == {"B is better", "B is worse", "no difference shown"}
    assert not [measure for measure in made.measures if measure in html.render(page)]
    for series in chart.series:
        (at,) = series.x
        low, high = changes[at].ratio_ci
        assert [*series.low, *series.y, *series.high] == [100 * (end - 1) for end in (low, changes[at].ratio, high)]
    assert set(numbers_of(page)) >= {value for each in changes for value in (each.a, each.b, each.difference)}
    assert "data-value" in (tmp_path / "c.html").read_text()


def test_a_page_names_what_ended_otherwise_and_what_a_limit_found(tmp_path: Path) -> None:
    a = swept(tmp_path / "a", of_runs(990, 1000, 1010), result("Z2"), result("Q"))
    b = swept(tmp_path / "b", of_runs(890, 900, 910), result("Z2", outcome="oom", reason="no room"))
    made = comparison.compare(a, b)
    page = made.page(made.judged(["tokens_per_s<-3%"]), [])
    assert page.tone == "bad"
    assert ": beyond the limit." in html.render(page)
    assert {"The gate", "Ended differently", "Only in A"} <= {section.title for section in page.sections}


@pytest.mark.parametrize(("kind", "shown"), [("micro", "1 worse"), ("breakdown", "1 no interval")])
def test_other_kinds_have_pages_too(kind: str, shown: str, tmp_path: Path) -> None:
    if kind == "micro":
        a, b = points(tmp_path / "a", timed(GEMM, 1e-3)), points(tmp_path / "b", timed(GEMM, 1.2e-3, 1))
    else:
        a, b = traced(tmp_path / "a", 1.0, 0.5), traced(tmp_path / "b", 1.02, 0.6)
    page = comparison.compare(a, b).page([], [])
    assert page.verdict.endswith(f"of 1 in both: {shown}.")
    measures = {"micro": ["median_ms", "flops_per_s"], "breakdown": comparison.TIMES}[kind]
    assert {*charts_of(page)} <= {comparison.LABELS[measure] for measure in measures}
    page_text = html.render(page)
    assert not [measure for measure in measures if measure in page_text]


def test_a_page_that_cannot_be_written_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = swept(tmp_path / "a", result())
    assert cli.invoke(["compare", str(a), str(a), "--html", str(tmp_path / "none" / "c.html")]) == 2
    assert "cannot write --html" in capsys.readouterr().err
    (tmp_path / "c.html").touch()
    assert cli.invoke(["compare", str(a), str(a), "--html", str(tmp_path / "c.html")]) == 2
    assert "nothing was overwritten" in capsys.readouterr().err
