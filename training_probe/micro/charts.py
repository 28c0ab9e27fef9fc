"""The charts of a micro-benchmark's page: speed and time over sizes, with the spread of the samples: from the tenth to
the ninetieth percentile of their times. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from loadgen.document.content import Chart, Mark, Section, Series
from training_probe.micro.tables import MS, NAMES, TERA, US, WAYS, peaks
from training_probe.points import GB, Collective, Copy, Dtype, Gemm, Measured, bus_factor, size_text
from training_probe.report.charts import files

SPREAD = "Spread: from 10 % to 90 % of the samples of a point."
MIB = 1 << 20


Spread = tuple[float, float | None, float | None]  # in the middle, low, high


@dataclass
class CurvePoints:
    """A line over sizes while it is collected: points of x, y and what hover shows."""

    points: list[tuple[float, Spread, str]] = field(default_factory=list)

    def series(self, name: str, colour: int) -> Series:
        ordered = sorted(self.points)
        middle, low, high = zip(*(spread for _, spread, _ in ordered), strict=True)
        return Series(
            name=name, x=[x for x, _, _ in ordered], y=middle, low=low, high=high, colour=colour,
            labels=[label for _, _, label in ordered], kind="line" if len(ordered) > 1 else "points",
        )  # fmt: skip


Lines = dict[str, CurvePoints]  # by name


def build(results: Sequence[Measured], device_name: str) -> Iterator[Section]:
    """Sections of charts, those that have any."""
    timed = [result for result in results if result.outcome == "ok" and result.median_s]
    sections = (
        Section("products", "Matrix products over M", [*_gemm(timed, device_name)], files("gemm")),
        Section("copies", "Memory copies over size", [*_memcpy(timed)], files("memcpy")),
        Section("collectives", "Collectives over size", [*_collectives(timed)], files("collectives")),
    )
    return (section for section in sections if section.blocks)


def _times(result: Measured, unit: float) -> Spread:
    """A launch's times, in the unit."""
    assert result.median_s is not None
    low, high = (None if end is None else end * unit for end in (result.p10_s, result.p90_s))
    return result.median_s * unit, low, high


def _speeds(result: Measured, amount: float) -> Spread:
    """The amount over the times: the ends are those of the times, the other way round."""
    assert result.median_s is not None
    low, high = (amount / end if end else None for end in (result.p90_s, result.p10_s))
    return amount / result.median_s, low, high


def _series(lines: Lines) -> list[Series]:
    return [line.series(name, colour) for colour, (name, line) in enumerate(lines.items())]


def _gemm(results: Sequence[Measured], device_name: str) -> Iterator[Chart]:
    """A chart a dtype. The roof is the peak of the data sheet, and the fastest product of this run."""
    known = peaks(results, device_name)
    curves: dict[Dtype, Lines] = {}
    for result in results:
        point = result.point
        if isinstance(point, Gemm) and not point.peak:
            line = curves.setdefault(point.dtype, {}).setdefault(point.curve or f"N{point.n}_K{point.k}", CurvePoints())
            shape = f"{point.m} x {point.n} x {point.k}"
            line.points.append((point.m, _speeds(result, point.flops / TERA), shape))
    for dtype, lines in curves.items():
        roofs = {"data sheet": known.catalog.get(dtype), "measured peak": known.measured.get(dtype)}
        yield Chart(
            title=f"Matrix products, {dtype}", x_label="M, rows; N and K by the line's name", y_label="speed (TFLOP/s)",
            series=_series(lines), log=["x", "y"], note=SPREAD, from_zero=False,
            marks=[Mark(axis="y", value=speed / TERA, label=name) for name, speed in roofs.items() if speed],
        )  # fmt: skip


def _memcpy(results: Sequence[Measured]) -> Iterator[Chart]:
    speeds: Lines = {}
    times: Lines = {}
    for result in results:
        if isinstance(result.point, Copy):
            size_bytes, name = result.point.size_bytes, result.point.label
            _add(speeds, name, size_bytes, _speeds(result, size_bytes / GB))
            _add(times, name, size_bytes, _times(result, US))
    if times:
        yield _over_size("Memory copies: throughput", "speed (GB/s)", speeds)
        yield _over_size("Memory copies: latency", "time (us)", times)


def _collectives(results: Sequence[Measured]) -> Iterator[Chart]:
    speeds: dict[str, Lines] = {}
    times: dict[str, Lines] = {}
    for result in results:
        point = result.point
        if isinstance(point, Collective):
            way, size_bytes = f"{WAYS[point.p2p] or 'gloo'}, {point.ranks} ranks", point.size_bytes
            moved = size_bytes * bus_factor(point.name, point.ranks)
            _add(speeds.setdefault(point.name, {}), way, size_bytes, _speeds(result, moved / GB))
            _add(times.setdefault(point.name, {}), way, size_bytes, _times(result, MS))
    for name in times:
        yield _over_size(f"{NAMES[name]}: throughput", "bus bandwidth (GB/s)", speeds[name])
        yield _over_size(f"{NAMES[name]}: latency", "time (ms)", times[name])


def _add(to: Lines, name: str, size_bytes: int, value: Spread) -> None:
    to.setdefault(name, CurvePoints()).points.append((size_bytes / MIB, value, size_text(size_bytes)))


def _over_size(title: str, y_label: str, lines: Lines) -> Chart:
    return Chart(
        title=title, x_label="size (MiB)", y_label=y_label, series=_series(lines), log=["x", "y"], log_now=["x", "y"],
        sync="sizes", note=SPREAD,
    )  # fmt: skip
