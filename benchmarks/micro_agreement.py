"""Whether `training_probe micro` agrees with others and with itself: matrix products beside triton.testing.do_bench,
copies beside a bare loop of cudaMemcpy, in turns on one GPU.

    PYTHONPATH=. python benchmarks/micro_agreement.py        # needs torch with CUDA, and triton for the products

A line each: our median and theirs (each the median of the repeats), the median of each repeat's ratio ours / theirs,
since a machine's speed changes between repeats, and how far our own repeats lie apart and, in brackets, theirs, each on
memory of its own. The last line is all of it as JSON. Exit code 1 where a ratio is off by more than 5 %, or our repeats
by more than 2 %. Small copies are shown and not judged: there the call of PyTorch counts, which the bare loop has not.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch

from training_probe.micro.cli import BUDGET_S, PRODUCT_BUDGET_S, PRODUCT_SAMPLES, SAMPLES
from training_probe.points import Copy, Dtype, Gemm, Point, Route, Task, size_text
from training_probe.worker.micro import gemm, memcpy
from training_probe.worker.micro.timing import clearing, timed

MOST_OFF_RATIO, MOST_SPREAD_RATIO = 0.05, 0.02
SHAPES = ((666, 11008, 4096), (4096, 4096, 4096), (4096 + 13, 11008, 4096), (10624, 11008, 4096), (8192, 8192, 8192))
PAGEABLE: tuple[tuple[Route, bool], ...] = (("h2d", False), ("d2h", False))
ROUTES: tuple[tuple[Route, bool], ...] = (("h2d", True), ("d2h", True), *PAGEABLE, ("d2d", False))
SIZES = (64 << 10, 1 << 20, 16 << 20, 256 << 20)
JUDGED_BYTES = 1 << 20
POOL_BYTES = 512 << 20  # of a bare loop's source and of its target: more than any cache
BARE_LAUNCHES_S, BARE_SAMPLES = 0.02, 7
MOST_BARE_LAUNCHES, AHEAD_CYCLES = 500, 20_000  # a queue that the driver holds, enqueued in 10 us each at 2 GHz
KINDS = {"h2d": 1, "d2h": 2, "d2d": 3}  # cudaMemcpyKind


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", nargs="+", choices=get_args(Dtype), default=["bf16"])
    parser.add_argument("--only", choices=["gemm", "memcpy", "pageable"])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("micro_agreement: torch sees no GPU.", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {options.repeats} repeats in turns")
    rows = []
    if options.only in (None, "gemm"):
        for dtype in options.dtype:
            rows += [products(shape, dtype, device, options.repeats) for shape in SHAPES]
    if options.only != "gemm":
        bare = Bare()
        for route, pinned in PAGEABLE if options.only == "pageable" else ROUTES:
            for size in SIZES:
                rows.append(copies(Copy(route=route, pinned=pinned, size_bytes=size), bare, device, options.repeats))
    failed = [row["what"] for row in rows if not row["ok"]]
    print(
        f"{len(rows) - len(failed)} of {len(rows)} within the limits"
        + (f"; not: {', '.join(failed)}" if failed else "")
    )
    print(json.dumps({"device": torch.cuda.get_device_name(device), "torch": str(torch.__version__), "rows": rows}))
    return 1 if failed else 0


def products(shape: tuple[int, int, int], dtype: Dtype, device: torch.device, repeats: int) -> dict[str, Any]:
    """Ours and do_bench's, of the same torch call; do_bench clears the cache before each launch."""
    from triton.testing import do_bench

    m, n, k = shape
    point = Gemm(m=m, n=n, k=k, dtype=dtype)
    launch = gemm.launch_of(point, device)

    def theirs() -> float:
        return float(do_bench(launch, warmup=700, rep=round(1000 * PRODUCT_BUDGET_S), return_mode="median")) / 1000

    return in_turns(f"{dtype} {m} x {n} x {k}", point, lambda: ours(point, launch, device), theirs, repeats, True)


def copies(point: Copy, bare: Bare, device: torch.device, repeats: int) -> dict[str, Any]:
    what, judged = f"{point.label} {size_text(point.size_bytes)}", point.size_bytes >= JUDGED_BYTES
    row = in_turns(what, point, lambda: ours_of_copy(point, device), lambda: bare.seconds(point), repeats, judged)
    torch.cuda.empty_cache()
    return row


def ours(point: Gemm, launch: Callable[[], object], device: torch.device) -> float:
    task = Task(device="cuda", points=[point], samples=PRODUCT_SAMPLES, budget_s=PRODUCT_BUDGET_S)
    seconds = timed(point, launch, task, in_stream=True, clear=clearing(device)).median_s
    assert seconds is not None
    return seconds


def ours_of_copy(point: Copy, device: torch.device) -> float:
    task = Task(device="cuda", points=[point], samples=SAMPLES, budget_s=BUDGET_S["cuda"])
    result = next(memcpy.measure(task, device))
    assert result.median_s is not None, result.reason
    return result.median_s


def in_turns(
    what: str, point: Point, mine: Callable[[], float], theirs: Callable[[], float], repeats: int, judged: bool
) -> dict[str, Any]:
    """Ours, theirs, ours, theirs, ...: a GPU that warms up warms up for both."""
    pairs = [(mine(), theirs()) for _ in range(repeats)]
    sides = list(zip(*pairs, strict=True))
    own, other = map(statistics.median, sides)
    spread, their_spread = ((max(side) - min(side)) / statistics.median(side) for side in sides)
    ratio = statistics.median(ours_s / theirs_s for ours_s, theirs_s in pairs)
    ok = not judged or (abs(ratio - 1) <= MOST_OFF_RATIO and spread <= MOST_SPREAD_RATIO)
    speed = point.flops / own / 1e12 if isinstance(point, Gemm) else point.size_bytes / own / 1e9
    unit = "TFLOP/s" if isinstance(point, Gemm) else "GB/s"
    print(
        f"{what:<26} ours {own * 1e6:10.2f} us  theirs {other * 1e6:10.2f} us  ratio {ratio:.3f}  "
        f"repeats within {100 * spread:.1f} % ({100 * their_spread:.1f} %)  {speed:8.1f} {unit}"
        f"{'' if judged else '  (not judged)'}{'' if ok else '  <-- off'}",
        flush=True,
    )
    return {"what": what, "ours_s": own, "theirs_s": other, "ratio": ratio, "spread_ratio": spread,
            "their_spread_ratio": their_spread, "judged": judged, "ok": ok}  # fmt: skip


class Bare:
    """cudaMemcpy through ctypes, on memory of its own, from another place of it each time."""

    def __init__(self) -> None:
        torch.cuda.init()
        torch.empty(1, device="cuda")
        self._cuda = ctypes.CDLL(_loaded("libcudart"))
        self._libc = ctypes.CDLL(None)
        self._pinned = self._made("cudaMallocHost")
        self._device = [self._made("cudaMalloc") for _ in range(2)]
        ctypes.memset(self._pinned, 1, POOL_BYTES)

    def _made(self, allocate: str) -> ctypes.c_void_p:
        pointer = ctypes.c_void_p()
        self._ask(allocate, ctypes.byref(pointer), ctypes.c_size_t(POOL_BYTES))
        return pointer

    def _ask(self, function: str, *arguments: Any) -> None:
        code = getattr(self._cuda, function)(*arguments)
        if code:
            raise RuntimeError(f"{function} returned {code}")

    def seconds(self, point: Copy) -> float:
        """Median seconds of one copy."""
        if point.pinned or point.route == "d2d":
            return self._median_s(point, self._pinned)
        pageable = ctypes.c_void_p()  # anew each time, as ours: its pages may lie better or worse
        if self._libc.posix_memalign(ctypes.byref(pageable), 4096, ctypes.c_size_t(POOL_BYTES)):
            raise MemoryError
        try:
            ctypes.memset(pageable, 1, POOL_BYTES)
            return self._median_s(point, pageable)
        finally:
            self._libc.free(pageable)

    def _median_s(self, point: Copy, host: ctypes.c_void_p) -> float:
        target, source = {
            "h2d": (self._device[0], host), "d2h": (host, self._device[0]), "d2d": (self._device[0], self._device[1]),
        }[point.route]  # fmt: skip
        size, kind = ctypes.c_size_t(point.size_bytes), KINDS[point.route]
        assert target.value is not None and source.value is not None
        places = POOL_BYTES // point.size_bytes
        offsets = [at * point.size_bytes for at in range(min(places, 4096))]
        pairs = [(ctypes.c_void_p(target.value + at), ctypes.c_void_p(source.value + at)) for at in offsets]
        by_events = point.pinned or point.route == "d2d"
        run = self._by_events if by_events else self._by_clock
        once_s = run(pairs, size, kind, 4)
        launches = min(MOST_BARE_LAUNCHES, max(4, round(BARE_LAUNCHES_S / once_s)))
        run(pairs, size, kind, launches)
        return statistics.median(run(pairs, size, kind, launches) for _ in range(BARE_SAMPLES))

    def _by_clock(self, pairs: list[Any], size: ctypes.c_size_t, kind: int, launches: int) -> float:
        copy, wait = self._cuda.cudaMemcpy, self._cuda.cudaStreamSynchronize
        self._ask("cudaDeviceSynchronize")
        began = time.perf_counter()
        for at in range(launches):
            target, source = pairs[at % len(pairs)]
            copy(target, source, size, kind)
            wait(None)
        return (time.perf_counter() - began) / launches

    def _by_events(self, pairs: list[Any], size: ctypes.c_size_t, kind: int, launches: int) -> float:
        begin, end, span_ms = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_float()
        for event in (begin, end):
            self._ask("cudaEventCreate", ctypes.byref(event))
        self._ask("cudaDeviceSynchronize")
        torch.cuda._sleep(launches * AHEAD_CYCLES)  # or a small copy is over before the next is enqueued
        self._ask("cudaEventRecord", begin, None)
        for at in range(launches):
            target, source = pairs[at % len(pairs)]
            self._cuda.cudaMemcpyAsync(target, source, size, kind, None)
        self._ask("cudaEventRecord", end, None)
        self._ask("cudaEventSynchronize", end)
        self._ask("cudaEventElapsedTime", ctypes.byref(span_ms), begin, end)
        for event in (begin, end):
            self._ask("cudaEventDestroy", event)
        return span_ms.value / 1000 / launches


def _loaded(name: str) -> str:
    """The path of a library that this process has loaded already."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if Path(path).name.startswith(name):
            return path
    raise FileNotFoundError(f"{name} is not loaded")


if __name__ == "__main__":
    sys.exit(main())
