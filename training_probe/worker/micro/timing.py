"""How long one launch takes. Samples are means over enough launches that neither the clock nor an event counts.

On a GPU: events in the stream around each sample. Where the host enqueues launches slower than the GPU runs them, the
GPU is kept busy ahead of each sample until the host is done, so it then runs launch after launch, and the host's own
speed does not show. Where the host is faster the GPU does not rest: after a rest it is faster than it can be for long.
Matrix products are kept apart, as triton's do_bench keeps them: without a pause they would be held by the power limit.
Warmed up they are without one, as there: a GPU that the limit has slowed stays slow at what would not have slowed it.
On the CPU, and where a launch returns when its work is done: the monotonic clock.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from training_probe.points import MIN_SAMPLES, Measured, Point, Task, measured, size_text

WARMUP_S = {"cuda": 0.2, "cpu": 0.02}
SAMPLE_S = {"cuda": 2e-3, "cpu": 5e-4}  # at least this long: an event resolves half a microsecond
# What a GPU computes heats it: for a tenth of a second it is faster than its power limit lets it be for long.
SETTLING_S, SETTLED_SAMPLE_S = 0.7, 1e-2
APART_S = 1e-4  # what is timed of launches kept apart: events resolve half a percent of it
CLEARED_BYTES = 256 << 20  # as triton's do_bench writes, or twice the cache
MAX_LAUNCHES = 256  # of a sample; with all its samples in flight it stays a queue that the driver holds
MAX_WARMUPS = 20_000
AHEAD, LEAST_AHEAD_S, MOST_AHEAD_S = 2.0, 5e-5, 0.05  # how long the GPU is kept busy: times what enqueuing takes
# A point whose median is not settled by the samples that it has by default is sampled on, for a second in all. It is
# where its standard error is a quarter of the twentieth that `findings` warns beyond, so that half of the 95 % interval
# is half of that; and of fewer than 11 samples the percentiles, which tell the error, are those of single ones.
SETTLED_ERROR_RATIO, SETTLED_SAMPLES, MOST_SAMPLED_S = 0.0125, 11, 1.0
TRIES, MOST_LATE_RATIO = 4, 0.1  # of samples that the host enqueued too late; more, and all are taken again
# From how many the time of enqueuing is taken, while the GPU is busy with something else: the first after a wait may
# take the host ten times as long. Fewer where the GPU would work on them for longer than this.
FEW_LAUNCHES, FEW_S = 64, 0.02
CALIBRATION_CYCLES = 2_000_000
BUSY_CYCLES = 40_000_000  # 20 ms of a fast GPU
REASON_CHARACTERS = 300
HOST_BOUND = "the host enqueued its launches too late: its own speed may be in the time"
OOM_SIGNS = ("out of memory", "can't allocate memory")  # of a GPU, of the host
MEMORY = Path("/proc/meminfo")
BUFFERS = 4096  # at most, of a pool that is rotated through
HOST_CACHE_BYTES = 32 << 20  # of a CPU: as much as most have
SERVER_CACHE_BYTES = 256 << 20  # of the CPU beside a GPU

Launch = Callable[[], object]


class MeasurementStopped(Exception):
    """The device or the other ranks are beyond use: no further point can be measured in this process."""


class Ranks(Protocol):
    """What processes that measure together agree on."""

    def slowest(self, seconds: Sequence[float]) -> list[float]: ...
    def meet(self) -> None: ...


class Alone:
    """One process."""

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        return list(seconds)

    def meet(self) -> None:
        pass


@dataclass(frozen=True)
class Plan:
    """How often a point is launched."""

    launches: int
    samples: int

    @staticmethod
    def of(once_s: float, task: Task, sample_s: float) -> Plan:
        launches = min(MAX_LAUNCHES, max(1, round(sample_s / max(once_s, 1e-9))))
        affordable = task.samples
        if task.budget_s is not None:
            affordable = max(MIN_SAMPLES, int(task.budget_s / max(once_s * launches, 1e-9)))
        return Plan(launches, max(2, min(task.samples, affordable)))


def timed(
    point: Point,
    launch: Launch,
    task: Task,
    *,
    in_stream: bool,
    ranks: Ranks | None = None,
    correct: bool | None = None,
    clear: Launch | None = None,
) -> Measured:
    """Warms up and measures. in_stream: the launches are asynchronous work in the GPU's current stream, else `launch`
    returns when it is over. ranks: the others that launch it too; then the slowest counts, sample by sample. clear:
    what the GPU does between launches, which keeps them apart and is not timed; only with in_stream, without ranks."""
    together = ranks or Alone()
    synchronise = torch.cuda.synchronize if task.device == "cuda" else lambda: None
    launch()
    synchronise()
    once_s = _span(launch, 1, synchronise, together)
    heats = task.device == "cuda" and ranks is None and clear is None
    warmup_s, sample_s = (SETTLING_S, SETTLED_SAMPLE_S) if heats else (WARMUP_S[task.device], SAMPLE_S[task.device])
    warmups = min(MAX_WARMUPS, max(1, int(warmup_s / max(once_s, 1e-9))))
    once_s = _span(launch, warmups, synchronise, together)
    if clear is not None:
        return _apart(point, launch, clear, once_s, task)
    plan = Plan.of(once_s, task, sample_s)
    samples_s: list[float] = []
    late = False
    began = time.perf_counter()
    while True:
        if in_stream:
            more_s, were_late = _by_events(launch, plan, once_s, together)
            late = late or were_late
        else:
            more_s = _by_clock(launch, plan, synchronise, together)
        samples_s += together.slowest(more_s)
        result = measured(point, samples_s, plan.launches, correct, HOST_BOUND if late else "")
        spent_s = together.slowest([time.perf_counter() - began])[0]  # all ranks must go on, or none
        more = 0 if task.budget_s is None else _wanted(result, spent_s)
        if more < 2:
            return result
        plan = Plan(plan.launches, more)


def _wanted(result: Measured, spent_s: float) -> int:
    """How many samples are to follow, after so many seconds. Their number grows by half each time: who looks after each
    sample stops at the first one at which the median happens to look settled."""
    if (
        result.samples >= SETTLED_SAMPLES
        and result.error_ratio is not None
        and result.error_ratio <= SETTLED_ERROR_RATIO
    ):
        return 0
    affordable = int((MOST_SAMPLED_S - spent_s) * result.samples / max(spent_s, 1e-9))
    return min(max(2, result.samples // 2), affordable)


def _span(launch: Launch, count: int, synchronise: Callable[[], None], ranks: Ranks) -> float:
    """Seconds of a launch, on the slowest rank."""
    ranks.meet()
    began = time.perf_counter()
    for _ in range(count):
        launch()
    synchronise()
    return ranks.slowest([(time.perf_counter() - began) / count])[0]


def _by_events(launch: Launch, plan: Plan, once_s: float, ranks: Ranks) -> tuple[list[float], bool]:
    """Seconds of a launch, sample by sample, and whether the host was too slow for them. once_s: about what a launch
    takes, the host's part included."""

    def trains(ahead_s: float, waits: bool) -> tuple[list[float], list[bool]]:
        cycles = int(ahead_s * _cycles_per_s())

        def ahead() -> None:
            torch.cuda._sleep(cycles)
            launch()  # lines GPUs up where there are several; not timed

        return _trains(ahead, launch, plan, waits, ranks)

    enqueue_s = ranks.slowest([_enqueuing(launch, once_s)])[0]
    if 2 * enqueue_s < once_s:  # each is enqueued long before the one ahead of it ends
        return in_time(*trains(LEAST_AHEAD_S, False))
    ahead_s = AHEAD * enqueue_s * plan.launches
    for _ in range(TRIES):
        samples_s, late = trains(min(MOST_AHEAD_S, max(LEAST_AHEAD_S, ahead_s)), True)
        if sum(late) <= MOST_LATE_RATIO * len(late):
            break
        ahead_s *= 2
    return in_time(samples_s, late)


def in_time(taken_s: list[float], late: list[bool], trains: int = 1) -> tuple[list[float], bool]:
    """Samples, each the mean of as many trains, without those that the host was late for; where these are most, with
    them, and that it was too slow."""
    kept = [
        [
            seconds
            for seconds, is_late in zip(taken_s[at : at + trains], late[at : at + trains], strict=True)
            if not is_late
        ]
        for at in range(0, len(taken_s), trains)
    ]
    samples_s = [statistics.fmean(sample) for sample in kept if sample]
    if 2 * sum(late) <= len(late) and len(samples_s) >= 2:
        return samples_s, False
    return in_time(taken_s, [False] * len(late), trains)[0], True


def _apart(point: Point, launch: Launch, clear: Launch, once_s: float, task: Task) -> Measured:
    """Short trains with `clear` ahead of each: a sample is the mean of all in about SETTLED_SAMPLE_S. once_s: about
    what a launch takes, the host's part included."""
    clear_s = max(1e-6, _span(clear, FEW_LAUNCHES, torch.cuda.synchronize, Alone()))
    launches = _in_a_train(once_s)
    enqueue_s = _enqueuing(launch, once_s)

    def clears(launches: int) -> int:
        return max(1, math.ceil(AHEAD * enqueue_s * launches / clear_s))

    few = _trains(partial(_repeated, clear, clears(launches)), launch, Plan(launches, 3), True, Alone())[0]
    once_s = statistics.median(few)  # the GPU's part alone
    launches = _in_a_train(once_s)
    waits = 2 * launches * enqueue_s > clear_s + launches * once_s
    count = clears(launches) if waits else 1
    for _ in range(TRIES):
        ahead, train_s = partial(_repeated, clear, count), count * clear_s + launches * once_s
        trains = max(1, round(SETTLED_SAMPLE_S / train_s))
        _span(launch, math.ceil(SETTLING_S / max(once_s, enqueue_s)), torch.cuda.synchronize, Alone())
        samples = Plan.of(trains * train_s, task, 0).samples
        taken_s, late = _trains(ahead, launch, Plan(launches, samples * trains), waits, Alone())
        if sum(late) <= MOST_LATE_RATIO * len(late):
            break
        count *= 2
    samples_s, too_slow = in_time(taken_s, late, trains)
    return measured(point, samples_s, launches * trains, None, HOST_BOUND if too_slow else "")


def _in_a_train(once_s: float) -> int:
    return min(MAX_LAUNCHES, max(1, round(APART_S / max(once_s, 1e-9))))


def _repeated(launch: Launch, count: int) -> None:
    for _ in range(count):
        launch()


def _enqueuing(launch: Launch, once_s: float) -> float:
    """Seconds that the host needs for a launch, which takes about once_s in all. The GPU is busy meanwhile: a queue
    that is short never fills."""
    count = min(FEW_LAUNCHES, max(1, round(FEW_S / max(once_s, 1e-9))))
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    began = time.perf_counter()
    for _ in range(count):
        launch()
    enqueued = time.perf_counter()
    torch.cuda.synchronize()
    return (enqueued - began) / count


def _trains(ahead: Launch, launch: Launch, plan: Plan, waits: bool, ranks: Ranks) -> tuple[list[float], list[bool]]:
    """Samples of a train of launches each, `ahead` before it, and of each whether it was not yet enqueued when the GPU
    was done with `ahead`, on any rank: the others then wait for that one. waits: for each sample's end; else the queue
    fills, enqueuing waits for the GPU, and nothing is late."""
    marks, enqueuing_s = [], []
    for _ in range(plan.samples):
        ranks.meet()
        busy, begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        busy.record()
        began = time.perf_counter()
        ahead()
        begin.record()
        for _ in range(plan.launches):
            launch()
        end.record()
        enqueuing_s.append(time.perf_counter() - began)
        marks.append((busy, begin, end))
        if waits:
            end.synchronize()
    torch.cuda.synchronize()
    late = [
        float(waits and busy.elapsed_time(begin) / 1000 < spent_s)
        for (busy, begin, _), spent_s in zip(marks, enqueuing_s, strict=True)
    ]
    samples_s = [begin.elapsed_time(end) / 1000 / plan.launches for _, begin, end in marks]
    return samples_s, [one > 0 for one in ranks.slowest(late)]


def _by_clock(launch: Launch, plan: Plan, synchronise: Callable[[], None], ranks: Ranks) -> list[float]:
    samples_s = []
    for _ in range(plan.samples):
        synchronise()
        ranks.meet()
        began = time.perf_counter()
        for _ in range(plan.launches):
            launch()
        samples_s.append((time.perf_counter() - began) / plan.launches)
    return samples_s


def _cycles_per_s() -> float:
    """Cycles of the GPU's sleep a second, now: its clock moves."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    torch.cuda._sleep(CALIBRATION_CYCLES)
    end.record()
    end.synchronize()
    return CALIBRATION_CYCLES / max(1e-6, float(begin.elapsed_time(end)) / 1000)


def clearing(device: torch.device) -> Launch | None:
    """What overwrites a GPU's cache; None on the CPU."""
    if device.type != "cuda":
        return None
    # Of words, as there: bytes are stored four at a time, which takes longer and gives the GPU more of a rest.
    words = max(CLEARED_BYTES, 2 * cache_bytes(device)) // torch.int32.itemsize
    written = torch.empty(words, dtype=torch.int32, device=device)
    return lambda: written.zero_()


def attempted(point: Point, measure: Callable[[], Measured]) -> Measured:
    """What `measure` gives, or why it cannot. Raises MeasurementStopped with the point's end, after which nothing more
    can be done on the device."""
    try:
        return measure()
    except Exception as error:
        reason = " ".join(str(error).split())[:REASON_CHARACTERS] or type(error).__name__
        if isinstance(error, torch.OutOfMemoryError) or any(sign in reason.lower() for sign in OOM_SIGNS):
            return Measured(point=point, outcome="oom", reason=reason)
        if _beyond_use(error):
            raise MeasurementStopped(reason) from error
        if isinstance(error, RuntimeError | NotImplementedError | ValueError | TypeError | AttributeError):
            return Measured(point=point, outcome="unsupported", reason=reason)
        raise MeasurementStopped(f"{type(error).__name__}: {reason}") from error
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _beyond_use(error: Exception) -> bool:
    """A CUDA error of its own makes all later work fail too; one that a library returned (cuBLAS: not supported) does
    not. After a failed collective nobody knows where the other ranks are."""
    accelerator: Any = getattr(torch, "AcceleratorError", ())
    if isinstance(error, accelerator):
        return True
    reason = str(error)
    of_cuda = "CUDA error:" in reason and "CUBLAS_STATUS" not in reason
    return of_cuda or type(error).__name__ == "DistBackendError"


def rotation(set_bytes: int, cache_bytes: int) -> int:
    """How many sets of buffers are together twice as large as the cache, so that none is met there again."""
    return min(BUFFERS, max(2, -(-2 * cache_bytes // set_bytes)))


def in_turns(launches: Iterable[Launch]) -> Launch:
    """One after the other, for ever."""
    turns: Iterator[Launch] = itertools.cycle(list(launches))
    return lambda: next(turns)()


def cache_bytes(device: torch.device) -> int:
    """The cache that inputs are rotated through. A GPU reports its own."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return HOST_CACHE_BYTES


def lacking(host_bytes: int) -> str:
    """Why the host cannot hold that much, a clause; empty where it can, or nobody knows. Linux gives what it does not
    have, and kills a process when that is touched, perhaps another one."""
    try:
        meminfo = MEMORY.read_text()
    except OSError:
        return ""
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable" and host_bytes > (available := int(value.split()[0]) << 10):
            return f"out of memory: {size_text(host_bytes)} are needed and the host has {size_text(available)}"
    return ""
