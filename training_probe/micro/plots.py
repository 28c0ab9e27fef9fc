"""Which figures the points of a micro-benchmark give, and what is in each. Imports matplotlib (through `figures`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from training_probe.micro.tables import MS, NAMES, TERA, US, WAYS, peaks
from training_probe.points import GB, Collective, Copy, Dtype, Gemm, Measured
from training_probe.report import figures
from training_probe.report.figures import Lines

Series = dict[str, list[tuple[float, float]]]


def draw(directory: Path, results: Sequence[Measured], device_name: str, platform: str) -> dict[str, str]:
    """Writes the figures (PNG and SVG); the SVGs' names with what they show. Raises OSError."""
    timed = [result for result in results if result.outcome == "ok"]
    shown = {}
    for name, title, panels in (
        ("gemm", "Matrix products over M", _gemm(timed, device_name)),
        ("memcpy", "Memory copies", _memcpy(timed)),
        ("collectives", "Collectives", _collectives(timed)),
    ):
        if panels:
            title = f"{title}: {platform}"
            figures.lines(panels, title, directory / name)
            shown[f"{name}.svg"] = title
    return shown


def _gemm(results: Sequence[Measured], device_name: str) -> list[Lines]:
    """A panel a dtype: the share of the peak of the data sheet, else of the measured one, else TFLOP/s."""
    known = peaks(results, device_name)
    curves: dict[Dtype, Series] = {}
    for result in results:
        point = result.point
        if isinstance(point, Gemm) and not point.peak and result.flops_per_s:
            curve = point.curve or f"N{point.n}_K{point.k}"
            curves.setdefault(point.dtype, {}).setdefault(curve, []).append((point.m, result.flops_per_s))
    panels = []
    for dtype, lines in curves.items():
        catalog, best = known.catalog.get(dtype), known.measured.get(dtype)
        if catalog or best:
            unit, label = (catalog or best or 1.0) / 100, f"% of {'data sheet' if catalog else 'measured'} peak"
        else:
            unit, label = TERA, "TFLOP/s"
        limits = {"measured peak": best / unit} if catalog and best else {}
        scaled = {name: sorted((x, y / unit) for x, y in line) for name, line in lines.items()}
        panels.append(Lines(dtype, "M, rows (tokens)", label, scaled, limits=limits))
    return panels


def _memcpy(results: Sequence[Measured]) -> list[Lines]:
    times: Series = {}
    speeds: Series = {}
    for result in results:
        if isinstance(result.point, Copy) and result.median_s and result.bytes_per_s:
            label, size = result.point.label, result.point.size_bytes
            times.setdefault(label, []).append((size, result.median_s * US))
            speeds.setdefault(label, []).append((size, result.bytes_per_s / GB))
    return _pair("", times, speeds, "speed, GB/s", US) if times else []


def _collectives(results: Sequence[Measured]) -> list[Lines]:
    times: dict[str, Series] = {}
    speeds: dict[str, Series] = {}
    for result in results:
        point = result.point
        if isinstance(point, Collective) and result.median_s and result.bus_bytes_per_s:
            way = WAYS[point.p2p] or "gloo"
            times.setdefault(point.name, {}).setdefault(way, []).append((point.size_bytes, result.median_s * MS))
            speeds.setdefault(point.name, {}).setdefault(way, []).append(
                (point.size_bytes, result.bus_bytes_per_s / GB)
            )
    return [
        panel
        for name in times
        for panel in _pair(f"{NAMES[name]}: ", times[name], speeds[name], "busbw, GB/s", MS)
    ]  # fmt: skip


def _pair(name: str, times: Series, speeds: Series, unit: str, time_unit: float) -> list[Lines]:
    """Latency beside throughput, as in the paper."""
    in_ms = "ms" if time_unit == MS else "us"
    latency, throughput = (f"{name}{what}" if name else what.capitalize() for what in ("latency", "throughput"))
    return [
        Lines(latency, "size", f"time, {in_ms}", times, sizes=True),
        Lines(throughput, "size", unit, speeds, sizes=True),
    ]
