"""Two sweeps side by side: ratios by hand, intervals that cover the truth as often as they claim."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import numpy as np
import pytest

from tests.training_probe.measured import HOSTILE, result
from training_probe.report import compare
from training_probe.results import CellResult, ResultsError, append


def of_runs(*runs: float) -> CellResult:
    said = {"tokens_per_s_std": statistics.stdev(runs) if len(runs) > 1 else None}
    return result(tokens_per_s=statistics.fmean(runs), runs=list(runs), said=said)


def test_a_sweep_does_not_differ_from_itself() -> None:
    found = [of_runs(990, 1000, 1010), result("Z2", outcome="oom")]
    compared = compare.build(found, found, "A", "B")
    row = compared.cells[0]
    assert row.ratio == 1
    assert row.ratio_ci[0] < 1 < row.ratio_ci[1]
    assert row.shows == compare.SAME
    assert row.allocated_gb.difference == row.reserved_gb.difference == 0
    assert (compared.changed, compared.only_in_a, compared.only_in_b) == ([], [], [])


def test_ratio_and_interval_by_hand() -> None:
    ratio, interval = compare.speed_ratio(of_runs(990, 1000, 1010), of_runs(1188, 1200, 1212))
    assert ratio == pytest.approx(1.2)
    assert interval is not None
    # both: s = 1 %, n = 3; 4 degrees of freedom, t = 2.776
    reach = 2.776 * math.sqrt(2 * 0.01**2 / 3)
    assert interval == pytest.approx([1.2 * math.exp(-reach), 1.2 * math.exp(reach)])
    row = compare.build([of_runs(990, 1000, 1010)], [of_runs(1188, 1200, 1212)], "A", "B").cells[0]
    assert row.shows == "B is faster"
    row = compare.build([of_runs(1188, 1200, 1212)], [of_runs(990, 1000, 1010)], "A", "B").cells[0]
    assert row.shows == "B is slower"


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
    row = compare.build([one], [of_runs(990, 1000, 1010)], "A", "B").cells[0]
    assert row.ratio == 1
    assert row.ratio_ci is None and row.shows is None


def test_runs_without_any_spread_have_a_point_for_an_interval() -> None:
    assert compare.speed_ratio(of_runs(10, 10), of_runs(20, 20)) == (2, [2, 2])


def test_what_changed_and_what_is_missing_is_named() -> None:
    a = [result("Z3"), result("Z2", outcome="oom", reason="no room"), result("Q"), result("R", gpus=4)]
    b = [result("Z3", said={"valid": False}), result("Z2", 5000.0), result("R", gpus=2)]
    compared = compare.build(a, b, "A", "B")
    assert [(row.cell.split("_")[3], row.a, row.b) for row in compared.changed] == [
        ("Z3", "ok", "invalid"), ("Z2", "oom", "ok"),
    ]  # fmt: skip
    assert compared.cells[0].ratio is None  # an invalid speed is compared with nothing
    assert [name.split("_")[3:5] for name in compared.only_in_a] == [["Q", "8x"], ["R", "4x"]]
    assert [name.split("_")[3:5] for name in compared.only_in_b] == [["R", "2x"]]
    text = compare.render(compared, 160)
    assert "oom (no room) | ok" in text
    assert "Only in A:" in text and "Only in B:" in text


def test_memory_is_b_minus_a_and_another_searched_batch_is_shown() -> None:
    a = result("Z3", micro_batch=None, said={"batch_size": 16, "peak_memory_gb": 30.0})
    b = result("Z3", micro_batch=None, said={"batch_size": 32, "peak_memory_gb": 45.5, "peak_reserved_gb": None})
    compared = compare.build([a], [b], "A", "B")
    row = compared.cells[0]
    assert row.allocated_gb.difference == 15.5
    assert row.reserved_gb.difference is None
    assert "(BS 16 -> 32)" in compare.render(compared, 160)


def test_text_from_elsewhere_is_not_obeyed() -> None:
    a, b = result(model="x\x1b[2J"), result(model="x\x1b[2J", outcome="crashed", reason=HOSTILE)
    text = compare.render(compare.build([a], [b], HOSTILE, "B"), 120)
    assert "\x1b" not in text and "\r" not in text and "\u202e" not in text


def test_versions_that_differ_are_said() -> None:
    a, b = (
        result(said={"versions": {"torch": "2.11", "numpy": "2"}}),
        result(said={"versions": {"torch": "2.13", "numpy": "2"}}),
    )
    text = compare.render(compare.build([a], [b], "A", "B"), 120)
    assert "only A: torch 2.11\n" in text and "only B: torch 2.13\n" in text


def test_directories_are_read_and_a_missing_one_is_a_sentence(tmp_path: Path) -> None:
    append(tmp_path, of_runs(1, 2))
    assert len(compare.compare(tmp_path, tmp_path).cells) == 1
    with pytest.raises(ResultsError, match="cannot read"):
        compare.compare(tmp_path, tmp_path / "none")
