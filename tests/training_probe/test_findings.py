"""Reasons to distrust what was measured: known answers, those of a busy machine that were once reported as ok among
them."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from backends.gpus import SLOWDOWNS
from training_probe.conditions import Conditions
from training_probe.findings import Traced, of_breakdowns, of_cells, of_points, sentence, verdict_of
from training_probe.grid import Cell
from training_probe.points import Collective, Copy, Dtype, Gemm, Measured, Point, measured
from training_probe.protocol import Step
from training_probe.results import CellResult, RunResult, of_cell

US = 1e-6


def cell(*speeds: float, **fields: Any) -> CellResult:
    result = of_cell(Cell(model="tiny", device="cpu"), platform="here", outcome="ok", valid=True)
    result.tokens_per_s_runs, result.tokens_per_s = list(speeds), statistics.fmean(speeds)
    result.tokens_per_s_std = statistics.stdev(speeds) if len(speeds) > 1 else None
    for name, value in fields.items():
        setattr(result, name, value)
    return result


def stepped(spread: float, *speeds: float, runs: int = 1, **fields: Any) -> CellResult:
    """A cell whose steps' standard deviation is `spread` of a step; percentiles as of a normal distribution."""
    reach = 10 * 2.563 / 2 * spread
    steps = {"step_ms": 10.0, "step_ms_std": 10 * spread, "step_ms_p10": 10 - reach, "step_ms_p90": 10 + reach}
    return cell(*(speeds or (100.0,)), runs=runs, **{**steps, **fields})


def swept(steps_s: Sequence[float]) -> CellResult:
    """A cell as a sweep has it after one run of such steps."""
    timed = tuple(
        Step(step=number, phase="timed", step_s=step_s, forward_s=None, backward_s=None, optimizer_s=0.0)
        for number, step_s in enumerate(steps_s)
    )
    result = cell(1000.0)
    result.add_runs([RunResult(tokens_per_s=1000.0, steps=len(steps_s), timed=timed)])
    return result


def conditions(cores: int = 2, reasons: tuple[str, ...] = (), **shares: float) -> Conditions:
    return Conditions(seconds=10.0, cores=cores, clock_reasons=reasons, **shares)


def copy(kib: int, median_us: float, spread: float = 0.01, **fields: Any) -> Measured:
    return point(Copy(route="h2h", size_bytes=kib << 10), median_us, spread, **fields)


def gemm(
    rows: int, median_ms: float, spread: float = 0.01, n: int = 512, k: int = 512, dtype: Dtype = "fp32"
) -> Measured:
    return point(Gemm(m=rows, n=n, k=k, dtype=dtype), 1e3 * median_ms, spread)


def point(of: Point, median_us: float, spread: float = 0.01, **fields: Any) -> Measured:
    """Whose standard deviation is `spread` of its median."""
    reach = 2.563 / 2 * spread
    median_s = median_us * US
    return Measured(
        point=of, outcome="ok", samples=50, median_s=median_s, p10_s=median_s * (1 - reach),
        p90_s=median_s * (1 + reach), **fields,
    )  # fmt: skip


def codes(found: list[Any]) -> list[tuple[str, str]]:
    return [(finding.code, finding.severity) for finding in found]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (cell(100.0, 101.0, 102.0), []),
        (cell(100.0), []),  # one run, and a version that kept no percentiles of steps
        (cell(100.0, 112.0), [("NOISY", "warning")]),
        (cell(346.0, 69.0), [("NOISY", "invalid")]),  # once reported as ok
        (cell(100.0, 105.4), [("NOISY", "warning")]),  # 1.96 x 3.82 / sqrt(2) is 5.3, the mean 102.7
        (cell(100.0, 104.9), []),
        (stepped(0.08, steps=9), [("NOISY", "warning")]),  # within 5.2 %
        (stepped(0.08, steps=11), []),  # within 4.7 %: as steps are added the mean is known better
        (stepped(0.08, steps=9, runs=3), []),
        (stepped(0.4, steps=100), [("NOISY", "warning")]),
        (stepped(0.24, steps=1000), []),  # 1.5 %
        (stepped(0.26, steps=1000), [("NOISY", "warning")]),  # 1.6 %, but something slows some of them
        (stepped(0.3, 100.0, 101.0, 102.0, runs=3, steps=1000), [("NOISY", "warning")]),  # no better for steady runs
        (stepped(0.55, steps=1000), [("NOISY", "invalid")]),  # no number of steps makes a value of it
        (stepped(0.55, steps=11), [("NOISY", "invalid")]),
        (stepped(0.55, steps=10), [("NOISY", "warning")]),
        (stepped(0.4, steps=10, step_ms_p10=None, step_ms_p90=None), [("NOISY", "warning")]),  # an older version's
        (  # the runs' spread is no better for the steps'
            stepped(3.5, 346.0, 69.0, runs=2, steps=4),
            [("NOISY", "invalid")],
        ),
        (
            cell(100.0, conditions=conditions(others_ratio=0.02, steal_ratio=0.0, thermal_ratio=0.0, power_ratio=0.9)),
            [],
        ),
        (cell(100.0, conditions=conditions(others_ratio=0.3)), [("LOADED", "warning")]),
        (cell(100.0, conditions=conditions(steal_ratio=0.02)), [("LOADED", "warning")]),
        (cell(100.0, conditions=Conditions(seconds=0.2, cores=2, others_ratio=0.07, steal_ratio=0.05)), []),  # 3 ticks
        (cell(100.0, conditions=Conditions(seconds=0.2, cores=2, others_ratio=0.11)), [("LOADED", "warning")]),
        (cell(100.0, conditions=conditions(others_ratio=0.2, idle_ratio=0.1)), [("LOADED", "warning")]),
        (cell(100.0, conditions=conditions(others_ratio=0.5, idle_ratio=0.1)), [("LOADED", "invalid")]),
        (cell(100.0, conditions=conditions(steal_ratio=0.4, idle_ratio=0.1)), [("LOADED", "invalid")]),
        (
            cell(100.0, conditions=conditions(others_ratio=0.2, steal_ratio=0.2, idle_ratio=0.1)),
            [("LOADED", "invalid")],
        ),
        (cell(100.0, conditions=conditions(others_ratio=0.5, idle_ratio=0.5)), [("LOADED", "warning")]),  # a core idle
        (cell(100.0, conditions=conditions(96, others_ratio=0.5, idle_ratio=0.02)), [("LOADED", "warning")]),  # two
        (cell(100.0, conditions=conditions(others_ratio=0.5)), [("LOADED", "warning")]),  # of a version without idle
        (cell(100.0, conditions=conditions(thermal_ratio=0.1)), [("THROTTLED", "warning")]),
        (cell(100.0, conditions=conditions(reasons=("gpu_idle", "sw_power_cap", "applications_clocks_setting"))), []),
        *(
            (cell(100.0, conditions=conditions(reasons=("sw_power_cap", reason))), [("THROTTLED", "warning")])
            for reason in SLOWDOWNS
        ),
    ],
)
def test_cells(result: CellResult, expected: list[tuple[str, str]]) -> None:
    found = of_cells([result])
    assert codes(found) == expected
    assert verdict_of(found) == ("INVALID" if "invalid" in dict(expected).values() else "VALID")
    failed = msgspec.structs.replace(result, outcome="crashed")
    assert of_cells([failed]) == []


def test_a_finding_names_the_worst_of_many() -> None:
    results = [cell(100.0, 100.0 + 8 * number, cell=f"c{number}") for number in range(7)]
    (found,) = of_cells(results)
    assert found.message == (
        "6 of 7 cells are not known to 5 % (c6 +-38 %; c5 +-33 %; c4 +-27 %; and 3 more; 95 % intervals), so "
        "smaller differences mean nothing."
    )
    assert sentence(found) == f"NOISY (warning): {found.message} {found.advice}"


def test_what_a_gpus_driver_says_of_its_clocks_is_named() -> None:
    (found,) = of_cells(
        [cell(1.0, cell="c", conditions=conditions(reasons=("gpu_idle", "hw_slowdown", "hw_thermal_slowdown")))]
    )
    assert found.message.endswith("in 1 of 1 cells: c hw_slowdown, hw_thermal_slowdown.")


SEEN = {
    "64 KiB in 7,993 us beside 256 KiB in 30": of_points([copy(64, 7993), copy(256, 30)]),
    "a product of 256 rows in 8 ms beside 512 and 1024": of_points(
        [gemm(128, 1.3), gemm(256, 8.00), gemm(512, 2.7), gemm(1024, 5.2)]
    ),
    "a product of a side of 256 in 8 ms beside one of 512": of_points(
        [gemm(256, 8.00, n=256, k=256), gemm(512, 2.7, n=512, k=512)]
    ),
    "a product of 256 in 8 ms alone, whose samples vary": of_points([gemm(256, 8.00, 0.6)]),
    "346 and 69 tokens/s in two runs": of_cells([cell(346.0, 69.0)]),
    "69 tokens/s in one run of 8 steps, others on the cores": of_cells(
        [
            cell(
                69.0, runs=1, steps=8, step_ms=900.0, step_ms_std=150.0, step_ms_p10=700.0, step_ms_p90=1100.0,
                conditions=conditions(others_ratio=0.66, idle_ratio=0.02),
            )
        ]
    ),
    "a step that is faster under the profiler": of_breakdowns({"a": Traced(1.0, 0.9, 3, 0.01)}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEN)
def test_what_was_once_reported_as_ok_is_no_measurement(name: str) -> None:
    assert verdict_of(SEEN[name]) == "INVALID"


def test_points_that_take_longer_than_larger_ones() -> None:
    assert codes(of_points([copy(64, 7993), copy(256, 30), copy(1024, 90)])) == [("NON_MONOTONE", "invalid")]
    assert codes(of_points([copy(64, 40), copy(4096, 30)])) == [("NON_MONOTONE", "warning")]
    assert of_points([copy(64, 30), copy(128, 20), copy(4096, 100)]) == []  # twice the size may be another algorithm's
    assert codes(of_points([copy(64, 50), copy(128, 20), copy(4096, 100)])) == [("NON_MONOTONE", "invalid")]
    ring = point(Collective(name="allreduce", size_bytes=1 << 30, ranks=2), 10)
    assert of_points([copy(64, 7993), ring]) == []
    assert of_points([msgspec.structs.replace(copy(64, 7993), outcome="oom"), copy(256, 30)]) == []


def test_products_are_compared_with_those_that_are_larger_on_every_side() -> None:
    slow = gemm(256, 8.00)
    assert codes(of_points([slow, gemm(1024, 0.5)])) == [("NON_MONOTONE", "invalid")]
    assert codes(of_points([slow, gemm(1024, 0.5, n=1024, k=1024)])) == [("NON_MONOTONE", "invalid")]
    assert of_points([slow, gemm(1024, 0.5, dtype="bf16")]) == []
    assert of_points([slow, gemm(65536, 0.5, k=256)]) == []  # a narrow one is another kernel's
    assert of_points([gemm(256, 8.00, n=511), gemm(1024, 0.5)]) == []  # no tensor core takes a side of 511


def test_points_that_vary_and_the_load_over_all_of_them() -> None:
    assert codes(of_points([copy(64, 10, 0.2), copy(256, 30)])) == [("NOISY", "warning")]
    assert of_points([copy(64, 10, 0.14), copy(256, 30)]) == []  # of 50 samples: the median is known to within 4.9 %
    assert codes(of_points([copy(64, 10, 0.15), copy(256, 30)])) == [("NOISY", "warning")]
    many = [msgspec.structs.replace(copy(64, 10, spread), samples=2000) for spread in (0.24, 0.26, 0.6)]
    assert [codes(of_points([each])) for each in many] == [[], [("NOISY", "warning")], [("NOISY", "invalid")]]
    assert codes(of_points([copy(64, 10, 0.6)])) == [("NOISY", "invalid")]
    assert codes(of_points([msgspec.structs.replace(copy(64, 10, 0.6), samples=5)])) == [("NOISY", "warning")]
    short = conditions(others_ratio=0.3)
    quiet, loaded = msgspec.structs.replace(short, seconds=90.0, others_ratio=0.0), msgspec.structs.replace(short)
    assert of_points([copy(64, 10, conditions=loaded), copy(256, 30, conditions=quiet)]) == []  # 3 % of all the time
    assert codes(of_points([copy(64, 10, conditions=loaded), copy(256, 30)])) == [("LOADED", "warning")]
    rounded = msgspec.structs.replace(short, seconds=0.06)  # three ticks up and three down are none
    less = msgspec.structs.replace(rounded, others_ratio=-0.28)
    assert of_points([copy(64 << at, 10 << at, conditions=less if at % 2 else rounded) for at in range(6)]) == []
    five = msgspec.structs.replace(short, seconds=0.1, others_ratio=0.25)  # ticks; four points may have six
    none = msgspec.structs.replace(five, others_ratio=0.0)
    assert of_points([copy(64 << at, 10 << at, conditions=none if at else five) for at in range(4)]) == []
    assert codes(of_points([copy(64 << at, 10 << at, conditions=none if at > 1 else five) for at in range(4)])) == [
        ("LOADED", "warning")
    ]
    most = conditions(others_ratio=0.5, idle_ratio=0.05)
    assert codes(of_points([copy(64, 10, conditions=most), copy(256, 30, conditions=most)])) == [("LOADED", "invalid")]
    hot = msgspec.structs.replace(quiet, clock_reasons=("hw_thermal_slowdown",))
    (found,) = of_points([copy(64, 10, conditions=hot), copy(256, 30, conditions=quiet)])
    assert found.code == "THROTTLED" and found.message.endswith("clocks of a GPU: all points hw_thermal_slowdown.")


def test_what_the_profiler_costs() -> None:
    assert of_breakdowns({"a": Traced(1.0, 1.2, 3, 0.02), "b": Traced(1.0, 0.97, 3)}, {}) == []
    (found,) = of_breakdowns({"a": Traced(1.0, 0.5, 3), "b": Traced(1.0, 1.2, 3)}, {})
    assert (found.code, found.severity) == ("PROFILER_COST", "invalid") and "a 2 times: both are noise" in found.message
    (found,) = of_breakdowns({"a": Traced(1.0, 1.8, 3)}, {})
    assert (found.code, found.severity) == ("PROFILER_COST", "warning") and "a 1.8 times" in found.message


@pytest.mark.parametrize(
    ("traced", "expected"),
    [
        (Traced(1.0, 0.9, 3, 0.02), [("PROFILER_COST", "invalid")]),  # by chance at most 7 %
        (Traced(1.0, 0.9, 3, 0.08), [("NOISY", "warning")]),  # by chance up to 28 %
        (Traced(1.0, 0.9, 50, 0.08), [("PROFILER_COST", "invalid")]),  # up to 3 %
        (Traced(1.0, 0.4, 3, 0.8), [("PROFILER_COST", "invalid"), ("NOISY", "warning")]),  # a step has no time at all
        (Traced(1.0, 0.9, 1), [("PROFILER_COST", "invalid")]),  # of a version that kept no spread
        (Traced(1.0, 1.1, 11, 0.9), [("NOISY", "invalid")]),
        (Traced(1.0, 1.1, 3, 0.9), [("NOISY", "warning")]),
    ],
)
def test_a_step_within_the_noise_of_steps_is_not_faster_under_the_profiler(
    traced: Traced, expected: list[tuple[str, str]]
) -> None:
    assert codes(of_breakdowns({"a": traced}, {})) == expected


def test_a_load_beside_a_breakdown() -> None:
    step = Traced(1.0, 1.1, 3, 0.2)
    seen = {"a": conditions(others_ratio=0.5)}
    assert codes(of_breakdowns({"a": step}, seen)) == [("NOISY", "warning"), ("LOADED", "warning")]
    seen = {"a": conditions(others_ratio=0.5, idle_ratio=0.0)}
    assert codes(of_breakdowns({"a": step}, seen)) == [("LOADED", "invalid"), ("NOISY", "warning")]


def test_one_slow_step_of_a_first_sweep_makes_it_no_failure() -> None:
    """A stall in one of 8 steps moves their ninetieth percentile, and in one of 11 still their mean. Steps that are
    slow time and again show from 11 on."""

    assert codes(of_cells([swept([*[0.1] * 7, 3.0])])) == [("NOISY", "warning")]
    assert codes(of_cells([swept([*[0.1] * 10, 0.3])])) == [("NOISY", "warning")]  # their mean is 18 % longer for it
    assert codes(of_cells([swept([*[0.1] * 99, 0.3])])) == []
    assert codes(of_cells([swept([*[0.1, 0.5] * 6])])) == [("NOISY", "invalid")]


@pytest.mark.parametrize("spread", [0.06, 0.1, 0.12])
def test_samples_of_a_quiet_virtual_machine_have_no_finding(spread: float) -> None:
    """Of microseconds and of single steps: they vary by more than 5 % where nothing else is at work."""
    struck = 0
    for seed in range(200):
        draw = random.Random(seed)
        samples_s = [100 * US * draw.gauss(1, spread) for _ in range(50)]
        struck += bool(of_points([measured(Copy(route="h2h", size_bytes=1 << 20), samples_s, 10)]))
        struck += bool(of_cells([swept([draw.gauss(0.02, 0.02 * spread) for _ in range(100)])]))
    assert struck <= 10


@pytest.mark.parametrize("values", [5, 11, 50, 400])
def test_the_error_of_a_median_is_how_far_medians_are_apart(values: int) -> None:
    draw = random.Random(values)
    found = [measured(Copy(route="h2h", size_bytes=1), [draw.gauss(1, 0.1) for _ in range(values)], 1)
             for _ in range(1000)]  # fmt: skip
    apart = statistics.stdev(each.median_s or 0.0 for each in found)
    stated = statistics.fmean(each.error_ratio or 0.0 for each in found)
    low, high = (0.65, 0.8) if values == 5 else (0.8, 1.1)  # percentiles of 5 values are too near to each other
    assert low < stated / apart < high


@pytest.mark.parametrize("samples", [50, 2000])
@pytest.mark.parametrize("loaded", [False, True])
def test_a_noisy_machine_has_a_finding_and_a_quiet_one_has_none(loaded: bool, samples: int) -> None:
    """A model of both, of four sizes as results:scripts/noise_told.jsonl has them: samples that vary by 2 %, and the
    same where every fifth loses its core for a while. Of many samples the median is known all the same: their spread
    tells."""
    noisy = 0
    for seed in range(200):
        draw = random.Random(seed)
        points = [
            measured(
                Copy(route="h2h", size_bytes=1 << power),
                [
                    US * (1 << power - 16) * draw.gauss(1, 0.02)
                    * (draw.uniform(1.5, 3) if loaded and draw.random() < 0.2 else 1)
                    for _ in range(samples)
                ],
                10,
            )
            for power in (16, 18, 22, 24)
        ]  # fmt: skip
        noisy += bool(of_points(points))
    assert noisy >= 190 if loaded else noisy <= 10


@pytest.mark.parametrize("processes", [0, 1, 2, 4])
def test_a_first_sweep_beside_a_load_is_told_and_beside_a_process_a_core_it_is_no_measurement(processes: int) -> None:
    """A model of a sweep of 8 steps by two ranks on two cores: the kernel shares the cores evenly, a step waits for
    the slower rank, and what a rank waits goes to the load."""
    warned, invalid = 0, 0
    for seed in range(200):
        draw = random.Random(seed)
        share = min(1.0, 2 / (2 + processes))
        steps_ms = [
            100 / min(share * draw.uniform(0.8, 1) if processes else share for _ in range(2)) * draw.gauss(1, 0.02)
            for _ in range(8)
        ]
        own = 100 * len(steps_ms) / sum(steps_ms)
        others = (1 - own) * draw.uniform(0.9, 1) if processes else draw.uniform(0, 0.03)
        tenths = statistics.quantiles(steps_ms, n=10, method="inclusive")
        result = cell(
            1e5 / statistics.fmean(steps_ms), runs=1, steps=8, step_ms=statistics.fmean(steps_ms),
            step_ms_std=statistics.stdev(steps_ms), step_ms_p10=tenths[0], step_ms_p90=tenths[-1],
            conditions=conditions(others_ratio=others, idle_ratio=max(0.0, 1 - own - others), steal_ratio=0.0),
        )  # fmt: skip
        findings = of_cells([result])
        warned += bool(findings)
        invalid += verdict_of(findings) == "INVALID"
    assert warned >= 190 if processes else warned <= 10
    if processes != 1:  # beside one it may be either
        assert invalid >= 190 if processes else invalid == 0
