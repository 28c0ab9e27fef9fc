"""Which points: the paper's (arXiv 2311.03687, section VII) and those of a line of options. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from training_probe.grid import Device
from training_probe.points import (
    Collective,
    Copy,
    Dtype,
    Gemm,
    MicroError,
    Name,
    Route,
    size_text,
    whole_elements,
)

GemmPreset = Literal["paper-fig11", "paper-table12"]
CopyPreset = Literal["paper-fig12"]
CollectivePreset = Literal["paper-fig13", "paper-fig14", "paper-fig15"]

TITLES: dict[str, str] = {
    "paper-fig11": "Figure 11, GEMM over M",
    "paper-table12": "Table XII, the first GEMM of the MLP",
    "paper-fig12": "Figure 12, memory copies",
    "paper-fig13": "Figure 13, AllGather with and without P2P",
    "paper-fig14": "Figure 14, ReduceScatter with and without P2P",
    "paper-fig15": "Figure 15, AllGather, ReduceScatter and Reduce",
}
# Table XII on an A800, (m, n, k): milliseconds and percent of its peak, the mean of 320 measurements.
TABLE_12: dict[tuple[int, int, int], tuple[float, float]] = {
    (666, 11008, 4096): (0.289, 66.6),
    (10624, 11008, 4096): (3.870, 79.4),
}
TABLE_12_SAMPLES = 320
FIG_11_M = range(4096, 16384 + 1, 512)
UNALIGNED = 13  # more rows than a multiple of what tensor cores take
_FIG_11 = (  # curve, n, k, further rows
    ("N4096_K4096", 4096, 4096, 0),
    ("N11008_K4096", 11008, 4096, 0),
    ("N16384_K16384", 16384, 16384, 0),
    ("unaligned_N11008_K4096", 11008, 4096, UNALIGNED),
)
# Collectives of each figure, and whether it sets P2P on and off beside each other.
_FIGURES: dict[str, tuple[tuple[Name, ...], bool]] = {
    "paper-fig13": (("allgather",), True),
    "paper-fig14": (("reducescatter",), True),
    "paper-fig15": (("allgather", "reducescatter", "reduce"), False),
}

SIZES = tuple(1 << power for power in range(10, 31, 2))  # 1 KiB to 1 GiB
CPU_SIZES = tuple(size for size in SIZES if size <= 64 << 20)
PEAK_SIDE: dict[Device, int] = {"cuda": 8192, "cpu": 1024}
MAX_SIDE, MAX_BYTES = 1 << 20, 1 << 36
COLLECTIVES: tuple[Name, ...] = get_args(Name)
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def gemms(
    device: Device,
    *,
    m: Sequence[int] = (),
    n: Sequence[int] = (),
    k: Sequence[int] = (),
    dtypes: Sequence[Dtype] = (),
    preset: GemmPreset | None = None,
) -> list[Gemm]:
    """Every combination, by default small ones that a CPU takes seconds for. A large product comes
    first for each dtype. Raises MicroError."""
    cpu = device == "cpu"
    shapes: list[tuple[int, int, int, str]]
    if cpu and set(dtypes) == {"tf32"}:
        raise MicroError("tf32 is of NVIDIA's GPUs; name another --dtype.")
    if preset is not None and (m or n or k):
        raise MicroError(f"--preset {preset} has sizes of its own; leave --m, --n and --k out.")
    if preset == "paper-fig11":
        shapes = [(rows + more, wide, deep, curve) for curve, wide, deep, more in _FIG_11 for rows in FIG_11_M]
    elif preset == "paper-table12":
        shapes = [(*shape, "") for shape in TABLE_12]
    else:
        rows_of = m or ((128, 256, 512, 1024) if cpu else (1024, 2048, 4096, 8192, 16384))
        side = (512,) if cpu else (4096,)
        shapes = [(a, b, c, f"N{b}_K{c}") for b in n or side for c in k or side for a in rows_of]
    for flag, at in (("--m", 0), ("--n", 1), ("--k", 2)):
        for shape in shapes:
            if not 1 <= int(shape[at]) <= MAX_SIDE:
                raise MicroError(f"{flag} is {shape[at]}; it must be from 1 to {MAX_SIDE}.")
    big = PEAK_SIDE[device]
    kinds: Sequence[Dtype] = dtypes or (("fp32", "bf16") if cpu and preset is None else ("bf16",))
    points: list[Gemm] = []
    for dtype in dict.fromkeys(kinds):
        points.append(Gemm(m=big, n=big, k=big, dtype=dtype, peak=True))
        points += [Gemm(m=a, n=b, k=c, dtype=dtype, curve=curve) for a, b, c, curve in shapes]
    return list(dict.fromkeys(points))


def copies(device: Device, *, sizes: Sequence[int] = (), preset: CopyPreset | None = None) -> list[Copy]:
    """Every route that there is, each over all sizes. Without a GPU it is the host's own memory. Raises MicroError."""
    if preset is not None and sizes:
        raise MicroError(f"--preset {preset} has sizes of its own; leave --sizes out.")
    routes: list[tuple[Route, bool]] = [("h2d", True), ("d2h", True), ("h2d", False), ("d2h", False)]
    if device == "cpu":
        routes = [("h2h", False)]
    elif preset is None:
        routes.append(("d2d", False))
    every = sizes or (CPU_SIZES if device == "cpu" else SIZES)
    return [
        Copy(route=route, pinned=pinned, size_bytes=size) for route, pinned in routes for size in sorted(set(every))
    ]


def collectives(
    device: Device,
    ranks: int,
    *,
    names: Sequence[Name] = (),
    sizes: Sequence[int] = (),
    p2p: Sequence[bool] = (),
    preset: CollectivePreset | None = None,
) -> list[Collective]:
    """Collectives over `ranks` processes, with P2P on, off or both, in this order; the CPU knows none of it. Raises
    MicroError."""
    if preset is not None and (names or sizes or p2p):
        raise MicroError(f"--preset {preset} has its own collectives and sizes; leave --op, --sizes and --p2p out.")
    if device == "cpu" and p2p:
        raise MicroError("P2P is between GPUs; leave --p2p out.")
    chosen, both = _FIGURES[preset] if preset else (tuple(names) or COLLECTIVES, True)
    ways: list[bool | None] = list(dict.fromkeys(p2p)) or ([True, False] if both else [True])
    if device == "cpu":
        ways = [None]
    least = whole_elements(1, ranks)
    if sizes and min(sizes) < least:
        raise MicroError(
            f"--sizes names {size_text(min(sizes))}; {ranks} ranks share at least {size_text(least)}, one fp32 each."
        )
    rounded = sorted({whole_elements(size, ranks) for size in sizes or (CPU_SIZES if device == "cpu" else SIZES)})
    return [
        Collective(name=name, size_bytes=size, ranks=ranks, p2p=way)
        for way in ways for name in dict.fromkeys(chosen) for size in rounded
    ]  # fmt: skip


def size(text: str) -> int:
    """Bytes of "4096", "64K", "64KB", "64KiB", "1G": always powers of 1024. Raises MicroError."""
    cleaned = text.strip().upper()
    digits = cleaned.rstrip("KMGIB ")
    unit = cleaned[len(digits) :].strip().removesuffix("B").removesuffix("I")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 12) or unit not in _UNITS:
        raise MicroError(f"'{text}' is no size; write bytes, or a number with K, M or G, such as 64K.")
    size_bytes = int(digits) * _UNITS[unit]
    if not 1 <= size_bytes <= MAX_BYTES:
        raise MicroError(f"'{text}' is no size here; it must be from 1 byte to {size_text(MAX_BYTES)}.")
    return size_bytes
