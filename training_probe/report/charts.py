"""The charts of a sweep's page: throughput of a GPU, alone and beside the paper's platforms, memory, times of a step,
scaling, and memory over the first steps. Pure but for the timelines that are read.

A cell without a number is in its charts all the same, with what happened to it in its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from loadgen.document.content import Chart, Mark, Section, Series
from training_probe import paper
from training_probe.paper import TableName
from training_probe.protocol import Timeline
from training_probe.report import tables, timelines
from training_probe.report.tables import MachineColumns, per_gpu
from training_probe.results import GIB, CellResult

MOST_CELLS = 16  # of a chart; more go into the next one
MOST_SAMPLES = 6000  # of the timelines of a page, all together
NEAR_RATIO = 4.0  # a device's memory that is further above the bars would flatten them
CELL = f"method; {tables.SIZES}"


def build(results: Sequence[CellResult], directory: Path) -> Iterator[Section]:
    """Sections of charts, those that have any."""
    sections = (
        Section("throughput", "Throughput", [*_of_parts(results, _throughput)], files("throughput")),
        *(
            Section(
                f"paper-{table}", f"Beside the paper's Table {table}", [*_beside_paper(table, results)],
                files(f"throughput-table-{table}"),
            )
            for table in paper.TABLES
        ),
        Section("memory", "Memory", [*_of_parts(results, _memory)], files("memory")),
        Section("steps", "Time of a step", [*_of_parts(results, _steps)]),
        Section("scaling", "Scaling", [*_scaling(results)], files("scaling")),
        *_timelines(directory),
    )  # fmt: skip
    return (section for section in sections if section.blocks)


def files(stem: str) -> list[str]:
    """Where a section's charts are drawn."""
    return [f"{stem}.svg", f"{stem}.png"]


def _category(result: CellResult) -> str:
    return tables.short_name(result) + ("" if result.state == "ok" else f": {result.state}")


def _of_parts(
    results: Sequence[CellResult], charts: Callable[[str, Sequence[CellResult]], Iterable[Chart]]
) -> Iterator[Chart]:
    """Charts of a model and a task each, none too wide; those without a number are left out."""
    groups: dict[str, list[CellResult]] = {}
    for result in results:
        groups.setdefault(f"{paper.model_name(result.model)}, {result.task}", []).append(result)
    for title, part in groups.items():
        for start in range(0, len(part), MOST_CELLS):
            more = f" ({start // MOST_CELLS + 1})" if len(part) > MOST_CELLS else ""
            for chart in charts(f"{title}{more}", part[start : start + MOST_CELLS]):
                if any(value is not None for series in chart.series for value in series.y):
                    yield chart


def _bars(name: str, values: Sequence[float | None], colour: int, spread: Sequence[float | None] = ()) -> Series:
    """A bar a category; spread: how far its whiskers reach up and down."""
    low = [None if at is None or by is None else at - by for at, by in zip(values, spread, strict=False)]
    high = [None if at is None or by is None else at + by for at, by in zip(values, spread, strict=False)]
    has_spread = any(end is not None for end in high)
    return Series(
        name=name, x=[*range(len(values))], y=values, kind="bars", colour=colour,
        low=low if has_spread else None, high=high if has_spread else None,
    )  # fmt: skip


def _throughput(title: str, part: Sequence[CellResult]) -> Iterator[Chart]:
    on = tables.machine(part[0]).on
    spread = [
        None if per_gpu(each) is None or each.tokens_per_s_std is None else each.tokens_per_s_std / each.gpus
        for each in part
    ]
    series = _bars("tokens/s", [per_gpu(each) for each in part], 0, spread)
    yield Chart(
        title=f"Tokens/s of a {on}: {title}", x_label=CELL, y_label=f"speed of a {on} (tokens/s)", series=[series],
        categories=[*map(_category, part)],
        note="Whiskers: standard deviation over the runs." if series.high else "One run of each cell: no spread.",
    )  # fmt: skip
    ratios = {name: [getattr(each, name) if each.state == "ok" else None for each in part] for name in _SHARES}
    yield Chart(
        title=f"Share of the peak's FLOPs: {title}", x_label=CELL, y_label="share of the peak (%)",
        series=[
            _bars(_SHARES[name], [None if each is None else 100 * each for each in values], number)
            for number, (name, values) in enumerate(ratios.items())
        ],
        categories=[*map(_category, part)],
    )  # fmt: skip


_SHARES = {"mfu_ratio": "MFU", "hfu_ratio": "HFU (with what is recomputed)"}


def _memory(title: str, part: Sequence[CellResult]) -> Iterator[Chart]:
    series = [
        _bars("predicted (allocated)", [each.predicted_memory_gb for each in part], 1),
        _bars("allocated", [each.peak_memory_gb for each in part], 0),
        _bars("reserved", [each.peak_reserved_gb for each in part], 2),
    ]
    sizes = {each.device_memory_gb for each in part if each.device_memory_gb}
    top = max((value for each in series for value in each.y if value is not None), default=0.0)
    size = sizes.pop() if len(sizes) == 1 else None
    near = size is not None and size < NEAR_RATIO * top
    yield Chart(
        title=f"Peak memory: {title}", x_label=CELL,
        y_label=f"memory of the {tables.machine(part[0]).on} that had most (GiB)",
        series=series, categories=[*map(_category, part)],
        marks=[Mark(axis="y", value=size, label="device")] if near and size else [],
        note="Predicted is what is to be allocated, computed before the run.",
    )  # fmt: skip


def _steps(title: str, part: Sequence[CellResult]) -> Iterator[Chart]:
    shown = [*map(_category, part)]
    yield Chart(
        title=f"Time of a step: {title}", x_label=CELL, y_label="time (ms)", categories=shown,
        series=[_bars("step", [each.step_ms for each in part], 0, [each.step_ms_std for each in part])],
        note="Mean of the timed steps of rank 0; whiskers: standard deviation over the steps of all runs.",
    )  # fmt: skip
    phases = ("forward_ms", "backward_ms", "optimizer_ms")
    yield Chart(
        title=f"Phases of a step: {title}", x_label=CELL, y_label="time (ms)", categories=shown, stacked=True,
        series=[
            _bars(phase.removesuffix("_ms"), [getattr(each, phase) for each in part], number)
            for number, phase in enumerate(phases)
        ],
    )  # fmt: skip


def _beside_paper(table: TableName, results: Sequence[CellResult]) -> Iterator[Chart]:
    """Tokens/s of a GPU, by the rows of one of the paper's tables that were tried here."""
    matched = tables.matched(table, results)
    machines = list(dict.fromkeys(each for ours in matched.values() for each in ours))
    for model in dict.fromkeys(line.model for line in matched):
        yield _of_table(table, model, {line: of for line, of in matched.items() if line.model == model}, machines)


def _of_table(table: TableName, model: str, matched: tables.Matched, machines: Sequence[MachineColumns]) -> Chart:
    platforms = [name for name in paper.PLATFORMS if any(name in line.printed for line in matched)]
    series = [
        _bars(str(each), [None if (of := ours.get(each)) is None else per_gpu(of) for ours in matched.values()], at)
        for at, each in enumerate(machines)
    ]
    for name in platforms:
        printed = [line.printed.get(name) for line in matched]
        bars = _bars(f"{name}, {paper.GPUS} GPUs (paper)", [*map(tables.printed_per_gpu, printed)], len(series))
        ends = ["OOM" if row is not None and row.oom else "" for row in printed]
        series.append(msgspec.structs.replace(bars, labels=ends))
    return Chart(
        title=f"As Table {table} of {paper.SOURCE}: {paper.TITLES[table]}, {model.upper()}",
        x_label=f"method; {tables.ROW_SIZES}",
        y_label="speed of a GPU (tokens/s)",
        series=series,
        categories=[tables.row_name(line, [*ours.values()]) for line, ours in matched.items()],
        note="Without a bar: out of memory, or not tried.",
    )


def _scaling(results: Sequence[CellResult]) -> Iterator[Chart]:
    series = []
    for number, part in enumerate(tables.scaled(results)):
        first = part[0]
        name = f"{paper.model_name(first.model)} {first.task} {tables.engine(first)} {first.method}"
        name += f" s{first.seq_len} b{first.batch_size}"
        gpus = [float(each.gpus) for each in part]
        speeds = [each.tokens_per_s for each in part]
        ideal = [(first.tokens_per_s or 0.0) / first.gpus * count for count in gpus]
        series.append(Series(name=name, x=gpus, y=speeds, colour=number, labels=[each.cell for each in part]))
        series.append(Series(name=f"{name}: ideal", x=gpus, y=ideal, colour=number, dashed=True))
    if series:
        on = "processes" if all(each.device == "cpu" for each in results) else "GPUs"
        shares = [_share_of_ideal(*pair) for pair in zip(series[::2], series[1::2], strict=True)]
        yield Chart(
            title="Scaling efficiency", x_label=on, y_label="share of the ideal (%)", series=shares,
            marks=[Mark(axis="y", value=100.0, label="ideal")],
        )  # fmt: skip
        yield Chart(
            title=f"Scaling, as Figure 4 of {paper.SOURCE}", x_label=on, y_label="speed of all together (tokens/s)",
            series=series, log=["x", "y"], note="Ideal: as many times the tokens/s of the fewest as there are more.",
        )  # fmt: skip


def _share_of_ideal(measured: Series, ideal: Series) -> Series:
    shares = [100 * y / most if y is not None and most else None for y, most in zip(measured.y, ideal.y, strict=True)]
    names = ["" if share is None else f"{share:.0f} %" for share in shares]
    return msgspec.structs.replace(measured, y=shares, names=names)


def _timelines(directory: Path) -> Iterator[Section]:
    """Over time, and over allocations and releases, where what is short in time can be seen too."""
    by_cell = [*timelines.read(directory)]
    for name, recorded in by_cell:
        stem = "timeline-" + (re.sub(r"[^A-Za-z0-9.+-]+", "_", name).strip("._") or "cell")
        charts = _timeline(name, recorded, max(50, MOST_SAMPLES // len(by_cell) // 4))
        yield Section(stem, f"Memory of the first steps: {name}", [*charts], files(stem))


def _timeline(name: str, of: Timeline, stretches: int) -> Iterator[Chart]:
    gib = np.array(of.bytes, dtype=np.float64).reshape(len(of.categories), -1) / GIB
    time_s = np.array(of.time_s, dtype=np.float64) - of.time_s[0]
    total = gib.sum(axis=0)
    seen = timelines.extremes(total, stretches)
    rows = [("all", total), *zip(of.categories, gib, strict=True)]
    begins_s = np.maximum(0.0, np.array(of.steps_s, dtype=np.float64) - of.time_s[0])
    event = np.arange(len(time_s), dtype=np.float64)
    left_out = "" if len(seen) == len(total) else (
        f" Of {len(total):,} allocations and releases those with the most and the least of {stretches:,} stretches."
    )  # fmt: skip
    for title, x, begins, unit in (
        (f"Memory of the first steps: {name}", time_s, begins_s, "time (s)"),
        ("The same over allocations and releases", event, np.interp(begins_s, time_s, event), "allocations, releases"),
    ):
        yield Chart(
            title=title, x_label=unit, y_label="allocated (GiB)",
            series=[
                Series(
                    name=name, x=np.round(x[seen], 6).tolist(), y=np.round(values[seen], 4).tolist(), kind="step",
                    colour=number,
                )
                for number, (name, values) in enumerate(rows)
            ],
            marks=[Mark("x", begin, f"step {place}") for place, begin in enumerate(begins.tolist(), 1)],
            note=f"Of rank 0, by what it is for; the peak is {total.max():.4g} GiB.{left_out}",
        )  # fmt: skip
