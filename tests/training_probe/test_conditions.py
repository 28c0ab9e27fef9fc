"""What else went on while something was measured: known answers from a /proc that is none, and a real load beside."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.gpus import CLOCK_REASONS
from training_probe.conditions import Conditions, Ticks, Watch, between, ticks, worst
from training_probe.findings import LOADED_RATIO, of_cells
from training_probe.grid import Cell
from training_probe.results import of_cell

TRIES, LEAST_SEEN = 20, 19  # 95 %


def test_the_ticks_of_the_cores_that_may_be_used_and_of_our_processes(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text(
        "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 10 1 5 70 3 2 1 8 99 99\n"
        "cpu1 20 0 5 60 0 0 0 15 0 0\ncpu2 7 7 7 7 7 7 7 7 7 7\n"
        "intr 5\n"
    )
    mine = f"S {os.getppid()} 1 1 0 -1 0 0 0 0 0 30 12 1 1 20 0 1 0 5"
    for pid, text in {
        "7": f"7 (a (b) c) {mine}",
        "8": f"8 (x) {mine}",
        "9": "9 (y) S 1 1 1 0 -1 0 0 0 0 0 500 500 0",
    }.items():
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "stat").write_text(text)
    assert ticks([0, 1], tmp_path) == Ticks(whole=200, busy=19 + 25, stolen=23, own=84)
    assert ticks([0, 1], tmp_path / "nowhere") is None


def test_the_shares_of_others_of_nobody_and_of_a_hypervisor() -> None:
    before = Ticks(whole=1000, busy=400, stolen=10, own=100)
    assert between(before, Ticks(whole=1200, busy=550, stolen=14, own=200)) == (0.25, 0.23, 0.02)
    assert between(before, before) == (None, None, None)
    assert between(before, Ticks(whole=1200, busy=450, stolen=10, own=160)) == (-0.05, 0.75, 0.0)  # ticks are coarse


@given(st.tuples(*[st.integers(0, 10**6)] * 4), st.tuples(*[st.integers(0, 10**6)] * 4))
def test_a_share_is_one(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    others, *shares = between(Ticks(*before), Ticks(*after))
    assert others is None or -1 <= others <= 1
    assert all(share is None or 0 <= share <= 1 for share in shares)


def test_the_worst_of_several_spans() -> None:
    first = Conditions(
        seconds=1, cores=8, others_ratio=0.1, idle_ratio=0.4, sm_clock_ratio=0.9, thermal_ratio=0.0,
        clock_reasons=("sw_power_cap",),
    )  # fmt: skip
    second = Conditions(
        seconds=2, cores=4, others_ratio=0.02, idle_ratio=0.1, steal_ratio=0.3, sm_clock_ratio=0.6,
        clock_reasons=("gpu_idle", "sw_power_cap"),
    )  # fmt: skip
    expected = Conditions(
        seconds=1, cores=8, others_ratio=0.1, idle_ratio=0.4, steal_ratio=0.3, sm_clock_ratio=0.6, thermal_ratio=0.0,
        clock_reasons=("gpu_idle", "sw_power_cap"),
    )  # fmt: skip
    assert worst([first, second]) == worst([second, first]) == expected  # what is of the most loaded and its own
    assert worst([]) is None


# A GPU.


class Nvml(types.ModuleType):
    """pynvml of one GPU. held_ns: what the counters of heat and power have when read time and again; None: this driver
    has none. reasons: likewise, of its clocks. since_535: whether these have their newer name."""

    NVML_PERF_POLICY_POWER, NVML_PERF_POLICY_THERMAL = pynvml.NVML_PERF_POLICY_POWER, pynvml.NVML_PERF_POLICY_THERMAL
    NVML_CLOCK_SM, NVMLError = pynvml.NVML_CLOCK_SM, pynvml.NVMLError

    def __init__(self, thermal_ns: Sequence[int] | None, reasons: Sequence[int], *, since_535: bool = True) -> None:
        super().__init__("pynvml")
        self._held = {
            self.NVML_PERF_POLICY_THERMAL: None if thermal_ns is None else iter(thermal_ns),
            self.NVML_PERF_POLICY_POWER: None if thermal_ns is None else iter([0] * len(thermal_ns)),
        }
        self._reasons, self._since_535 = iter(reasons), since_535

    def nvmlDeviceGetViolationStatus(self, gpu: object, policy: int) -> types.SimpleNamespace:
        counter = self._held[policy]
        if counter is None:
            raise self.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return types.SimpleNamespace(referenceTime=0, violationTime=next(counter))

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: object) -> int:
        if not self._since_535:
            raise self.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return next(self._reasons)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: object) -> int:
        return next(self._reasons)

    def nvmlDeviceGetClockInfo(self, gpu: object, kind: int) -> int:
        return 990

    def nvmlDeviceGetMaxClockInfo(self, gpu: object, kind: int) -> int:
        return 1980


IDLE, POWER_CAP = pynvml.nvmlClocksEventReasonGpuIdle, pynvml.nvmlClocksEventReasonSwPowerCap
HOT, BRAKE = pynvml.nvmlClocksEventReasonHwThermalSlowdown, pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown


def watched(monkeypatch: pytest.MonkeyPatch, nvml: Nvml) -> tuple[Conditions, list[str]]:
    """What is known of a span of a second, and the codes of the findings of a cell in it."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    clock = iter([50.0, 51.0])
    monkeypatch.setattr("training_probe.conditions.time.monotonic", lambda: next(clock))
    conditions = msgspec.structs.replace(Watch(object()).stop(), others_ratio=None, steal_ratio=None)
    result = of_cell(Cell(model="tiny"), platform="here", outcome="ok", valid=True, conditions=conditions)
    return conditions, [finding.code for finding in of_cells([result])]


def test_the_stand_in_has_nothing_that_pynvml_lacks() -> None:
    assert [name for name in vars(Nvml) if name.startswith("nvml") and not callable(getattr(pynvml, name, None))] == []
    for bit, name in CLOCK_REASONS.items():
        assert getattr(pynvml, "nvmlClocksEventReason" + name.title().replace("_", "")) == bit


def test_heat_that_holds_clocks_back_is_told_by_its_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    conditions, codes = watched(monkeypatch, Nvml([7_000_000_000, 7_250_000_000], [0, 0]))
    assert (conditions.thermal_ratio, conditions.power_ratio, conditions.sm_clock_ratio) == (0.25, 0.0, 0.5)
    assert (codes, conditions.clock_reasons) == (["THROTTLED"], ())


def test_heat_that_did_not_hold_clocks_back_meanwhile_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    conditions, codes = watched(monkeypatch, Nvml([7_000_000_000, 7_000_000_000], [POWER_CAP, POWER_CAP | IDLE]))
    assert (conditions.thermal_ratio, codes) == (0.0, [])
    assert conditions.clock_reasons == ("gpu_idle", "sw_power_cap")


@pytest.mark.parametrize("since_535", [True, False])
@pytest.mark.parametrize(
    ("reasons", "names", "expected"),
    [
        ([0, HOT | POWER_CAP], ("sw_power_cap", "hw_thermal_slowdown"), ["THROTTLED"]),
        ([BRAKE, IDLE], ("gpu_idle", "hw_power_brake_slowdown"), ["THROTTLED"]),
        ([POWER_CAP, POWER_CAP], ("sw_power_cap",), []),
    ],
)
def test_drivers_without_the_counter_have_reasons(
    reasons: list[int], names: tuple[str, ...], expected: list[str], since_535: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    conditions, codes = watched(monkeypatch, Nvml(None, reasons, since_535=since_535))
    assert (conditions.thermal_ratio, conditions.clock_reasons, codes) == (None, names, expected)


# A load beside.


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_a_load_beside_is_seen_on_nearly_every_try() -> None:
    cores = len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(max(1, cores // 8))]
    try:
        time.sleep(0.2)
        watch, seen = Watch(), 0
        for _ in range(TRIES):
            watch.start()
            time.sleep(0.1)
            seen += (watch.stop().others_ratio or 0.0) > LOADED_RATIO
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert seen >= LEAST_SEEN
