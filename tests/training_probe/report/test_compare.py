"""Two sweeps side by side: ratios by hand, intervals that cover the truth as often as they claim."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import numpy as np
import pytest

from loadgen.document import terminal
from tests.training_probe.measured import HOSTILE, result
from training_probe import compare as measurements
from training_probe.report import compare
from training_probe.results import CellResult, ResultsError, append

# Of the columns of a row; those of speeds by their own alone.
HEADS = [f"{column.group} {column.head}" if "GiB" in column.group else column.head for column in compare.COLUMNS]


def text_of(comparison: compare.Comparison, width: int) -> str:
    return terminal.render(measurements.Compared("Training", comparison, dict(measurements.SPEEDS)).page([], []), width)


def of_runs(*runs: float) -> CellResult:
    said = {"tokens_per_s_std": statistics.stdev(runs) if len(runs) > 1 else None}
    return result(tokens_per_s=statistics.fmean(runs), runs=list(runs), said=said)


def test_a_sweep_does_not_differ_from_itself() -> None:
    found = [of_runs(990, 1000, 1010), result("Z2", outcome="oom")]
    ratio, interval = compare.speed_ratio(found[0], found[0])
    assert ratio == 1
    assert interval is not None and interval[0] < 1 < interval[1]
    row = dict(zip(HEADS, compare.row(found[0], found[0]), strict=True))
    assert row["B / A"] == "1.000" and row["shows"] == compare.SAME
    assert row["allocated GiB B - A"] == row["reserved GiB B - A"] == "0.000"
    text = text_of(compare.sweeps(found, found, "A", "B"), 160)
    assert "Ended differently" not in text and "Only in" not in text


def test_ratio_and_interval_by_hand() -> None:
    ratio, interval = compare.speed_ratio(of_runs(990, 1000, 1010), of_runs(1188, 1200, 1212))
    assert ratio == pytest.approx(1.2)
    assert interval is not None
    # both: s = 1 %, n = 3; 4 degrees of freedom, t = 2.776
    reach = 2.776 * math.sqrt(2 * 0.01**2 / 3)
    assert interval == pytest.approx([1.2 * math.exp(-reach), 1.2 * math.exp(reach)])
    assert "B is faster" in compare.row(of_runs(990, 1000, 1010), of_runs(1188, 1200, 1212))
    assert "B is slower" in compare.row(of_runs(1188, 1200, 1212), of_runs(990, 1000, 1010))


def test_intervals_cover_the_true_ratio_at_least_as_often_as_they_claim() -> None:
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(2000):
        a, b = rng.normal(1000, 10, 3), rng.normal(1100, 40, 3)
        _, interval = compare.speed_ratio(of_runs(*map(float, a)), of_runs(*map(float, b)))
        assert interval is not None
        covered += interval[0] <= 1.1 <= interval[1]
    assert 0.945 <= covered / 2000 <= 0.995


@pytest.mark.parametrize("one", [of_runs(1000.0), result(tokens_per_s=1000.0)])
def test_no_spread_no_interval(one: CellResult) -> None:
    assert compare.speed_ratio(one, of_runs(990, 1000, 1010)) == (1, None)
    row = dict(zip(HEADS, compare.row(one, of_runs(990, 1000, 1010)), strict=True))
    assert (row["B / A"], row["95 % CI"], row["shows"]) == ("1.000", "", "")


def test_runs_without_any_spread_have_a_point_for_an_interval() -> None:
    assert compare.speed_ratio(of_runs(10, 10), of_runs(20, 20)) == (2, [2, 2])


def test_what_changed_and_what_is_missing_is_named() -> None:
    a = [result("Z3"), result("Z2", outcome="oom", reason="no room"), result("Q"), result("R", gpus=4)]
    b = [result("Z3", said={"valid": False}), result("Z2", 5000.0), result("R", gpus=2)]
    lines = text_of(compare.sweeps(a, b, "A", "B"), 160).splitlines()
    changed, only_a, only_b = (lines.index(head) for head in ("Ended differently:", "Only in A:", "Only in B:"))
    assert lines[changed + 2 : only_a] == [f"{a[0].cell}: ok | invalid", f"{a[1].cell}: oom (no room) | ok", ""]
    assert lines[only_a + 2 : only_b] == [a[2].cell, a[3].cell, ""]
    assert lines[only_b + 2 : lines.index("", only_b + 2) if "" in lines[only_b + 2 :] else None] == [b[2].cell]
    row = dict(zip(HEADS, compare.row(a[0], b[0]), strict=True))
    assert row["B / A"] == ""  # an invalid speed is compared with nothing


def test_memory_is_b_minus_a_and_another_searched_batch_is_shown() -> None:
    a = result("Z3", micro_batch=None, said={"batch_size": 16, "peak_memory_gb": 30.0})
    b = result("Z3", micro_batch=None, said={"batch_size": 32, "peak_memory_gb": 45.5, "peak_reserved_gb": None})
    row = dict(zip(HEADS, compare.row(a, b), strict=True))
    assert row["allocated GiB B - A"] == "15.50"
    assert row["reserved GiB B - A"] == "-"
    assert "(BS 16 -> 32)" in row["cell"]
    assert "(BS 16 -> 32)" in text_of(compare.sweeps([a], [b], "A", "B"), 160)


def test_text_from_elsewhere_is_not_obeyed() -> None:
    a, b = result(model="x\x1b[2J"), result(model="x\x1b[2J", outcome="crashed", reason=HOSTILE)
    text = text_of(compare.sweeps([a], [b], HOSTILE, "B"), 120)
    assert "\x1b" not in text and "\r" not in text and "\u202e" not in text


def test_versions_that_differ_are_said() -> None:
    a, b = (
        result(said={"versions": {"torch": "2.11", "numpy": "2"}}),
        result(said={"versions": {"torch": "2.13", "numpy": "2"}}),
    )
    text = text_of(compare.sweeps([a], [b], "A", "B"), 120)
    assert "only A: torch 2.11\n" in text and "only B: torch 2.13\n" in text


def test_directories_are_read_and_a_missing_one_is_a_sentence(tmp_path: Path) -> None:
    append(tmp_path, of_runs(1, 2))
    assert f"A: {tmp_path}, 1 cells" in text_of(measurements.compare(tmp_path, tmp_path).as_text, 200)
    with pytest.raises(ResultsError, match="cannot read"):
        measurements.compare(tmp_path, tmp_path / "none")
