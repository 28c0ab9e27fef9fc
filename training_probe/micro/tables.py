"""The tables of a micro-benchmark, beside the paper's numbers where it printed any. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from loadgen.document.content import Cell, Column, Number, Table, cell_text
from training_probe.flops import peak_flops
from training_probe.micro.presets import TABLE_12
from training_probe.paper import LEADING, SOURCE
from training_probe.points import GB, Collective, Copy, Dtype, Gemm, Measured, Point, size_text
from training_probe.report.layout import Remarks, exact, titled

MS, US = 1e3, 1e6
TERA = 1e12
THEIRS = f"{LEADING}, Table XII"
WAYS: dict[bool | None, str] = {True: "P2P on", False: "P2P off", None: ""}  # None: gloo, which has no P2P
NAMES = {
    "allreduce": "AllReduce", "allgather": "AllGather", "reducescatter": "ReduceScatter", "reduce": "Reduce",
    "broadcast": "Broadcast", "alltoall": "AllToAll", "sendrecv": "SendRecv",
}  # fmt: skip


@dataclass(frozen=True)
class Peaks:
    """FLOP/s by dtype: from data sheets (`catalog`), and of the fastest product of this very run (`measured`)."""

    catalog: dict[Dtype, float]
    measured: dict[Dtype, float]


def peaks(results: Sequence[Measured], device_name: str) -> Peaks:
    """What is known of each dtype. A large product is in every run, so the fastest is no accident of small ones."""
    catalog: dict[Dtype, float] = {}
    best: dict[Dtype, float] = {}
    for result in results:
        if isinstance(result.point, Gemm):
            dtype = result.point.dtype
            known = peak_flops(device_name, dtype)
            if known is not None:
                catalog[dtype] = known
            if result.flops_per_s is not None:
                best[dtype] = max(best.get(dtype, 0.0), result.flops_per_s)
    return Peaks(catalog, best)


def share(speed: float | None, peak: float | None) -> float | None:
    """A ratio; None where either is not known."""
    return None if speed is None or not peak else speed / peak


def build(results: Sequence[Measured], device_name: str) -> list[Table]:
    """A table for each kind that there is."""
    makers: dict[type[Point], Callable[[Sequence[Measured]], Table]] = {
        Gemm: partial(_gemm, device_name=device_name), Copy: _memcpy, Collective: _collectives,
    }  # fmt: skip
    of_kind = ((make, [each for each in results if isinstance(each.point, kind)]) for kind, make in makers.items())
    return [make(chosen).without_empty() for make, chosen in of_kind if chosen]


def _beside(number: Cell, result: Measured, remarks: Remarks) -> Cell:
    """The number, or a word for how the point ended, with its reason's mark."""
    if result.outcome == "ok" and not result.reason:
        return number
    shown = (cell_text(number) or result.outcome) + remarks.mark(result.reason)
    return exact(shown, number.value) if isinstance(number, Number) else shown


def _gemm(results: Sequence[Measured], device_name: str) -> Table:
    known, remarks = peaks(results, device_name), Remarks()
    rows = []
    for result in results:
        point = result.point
        assert isinstance(point, Gemm)
        theirs = TABLE_12.get((point.m, point.n, point.k)) if point.dtype in ("bf16", "fp16") else None
        speed = result.flops_per_s
        rows.append((
            point.dtype, f"{point.m}", f"{point.n}", f"{point.k}",
            *_times(result, MS), _beside(_number(speed, TERA), result, remarks),
            _percent(share(speed, known.catalog.get(point.dtype))),
            _percent(share(speed, known.measured.get(point.dtype))),
            f"{theirs[0]:.3f}" if theirs else "", f"{theirs[1]:.1f}" if theirs else "", "large" if point.peak else "",
        ))  # fmt: skip
    columns = (
        Column("dtype", left=True), Column("M"), Column("N"), Column("K"),
        *_time_columns("ms"), Column("TFLOP/s"),
        Column("data sheet", "% of peak"), Column("measured", "% of peak"),
        Column("ms", THEIRS, optional=True), Column("% of peak", THEIRS, optional=True),
        Column("", left=True),
    )  # fmt: skip
    caption = [
        "C[M, N] = A[M, K] B[N, K]^T on normal random data; 2 M N K FLOPs.",
        "Measured peak: the fastest product of its dtype in this run; the large one that is always there is marked.",
    ]
    if any(row[11] for row in rows):
        caption.append(f"Beside them what {SOURCE} printed, means of 320.")
    without = sorted({result.point.dtype for result in results if isinstance(result.point, Gemm)} - set(known.catalog))
    if without and device_name != "CPU":
        caption.append(f"No peak from a data sheet is known here for {', '.join(without)} on {device_name}.")
    return titled("micro-gemm", "Matrix products", columns, tuple(rows), tuple(caption), tuple(remarks.numbers))


def _memcpy(results: Sequence[Measured]) -> Table:
    remarks, rows = Remarks(), []
    for result in results:
        point = result.point
        assert isinstance(point, Copy)
        speed = _beside(_number(result.bytes_per_s, GB), result, remarks)
        rows.append((point.label, size_text(point.size_bytes), *_times(result, US), speed))
    columns = (Column("copy", left=True), Column("size"), *_time_columns("us"), Column("GB/s"))
    routes = {result.point.route for result in results if isinstance(result.point, Copy)}
    caption = ["H: host, D: device; GB/s: 1e9 bytes, each byte counted once."]
    if "d2d" in routes:
        caption.append("A copy within the device reads and writes: its memory moves twice as much.")
    if "h2h" in routes:
        caption.append("There is no GPU: these are copies within the host's memory.")
    return titled("micro-memcpy", "Memory copies", columns, tuple(rows), tuple(caption), tuple(remarks.numbers))


def _collectives(results: Sequence[Measured]) -> Table:
    remarks = Remarks()
    by_way: dict[bool | None, dict[tuple[str, int], Measured]] = {}
    ranks = set()
    for result in results:
        assert isinstance(result.point, Collective)
        point = result.point
        ranks.add(point.ranks)
        by_way.setdefault(point.p2p, {})[point.name, point.size_bytes] = result
    keys = dict.fromkeys(key for each in by_way.values() for key in each)
    columns = [Column("collective", left=True), Column("size")]
    for way in by_way:
        columns += [
            Column(head, WAYS[way]) for head in ("us", "10 %", "90 %", "algbw GB/s", "busbw GB/s")
        ]  # fmt: skip
    rows = []
    for name, size in keys:
        row: list[Cell] = [name, size_text(size)]
        for each in by_way.values():
            there = each.get((name, size))
            row += _collective(there, remarks) if there else [""] * 5
        rows.append(tuple(row))
    caption = (
        f"{' and '.join(map(str, sorted(ranks)))} ranks, fp32; a time is the slowest rank's.",
        "Sizes, algorithm and bus bandwidth as nccl-tests defines them.",
    )
    return titled(
        "micro-collectives", "Collectives", tuple(columns), tuple(rows), tuple(caption), tuple(remarks.numbers)
    )


def _collective(result: Measured, remarks: Remarks) -> list[Cell]:
    times = _times(result, US)[:3]
    return [*times, _beside(_number(result.bytes_per_s, GB), result, remarks), _number(result.bus_bytes_per_s, GB)]


def _time_columns(unit: str) -> tuple[Column, ...]:
    return Column(unit), Column("10 %"), Column("90 %"), Column("n")


def _times(result: Measured, unit: float) -> tuple[Cell, Cell, Cell, Cell]:
    """Median, tenth and ninetieth percentile in the unit, and how many samples; nothing of a point that is not ok."""
    if result.outcome != "ok":
        return "", "", "", ""
    samples = str(result.samples) if result.samples else ""
    return _scaled(result.median_s, unit), _scaled(result.p10_s, unit), _scaled(result.p90_s, unit), samples


def _scaled(seconds: float | None, unit: float) -> Cell:
    return "" if seconds is None else exact(_figures(seconds * unit), seconds * unit)


def _number(value: float | None, unit: float) -> Cell:
    return "" if value is None else exact(_figures(value / unit), value / unit)


def _figures(value: float) -> str:
    """Four significant figures, none of a whole part dropped."""
    return f"{value:.0f}" if value >= 1000 else f"{value:#.4g}"


def _percent(ratio: float | None) -> Cell:
    return "" if ratio is None else exact(f"{100 * ratio:.1f}", 100 * ratio)
