"""What is measured by `training_probe micro`, what comes of it, and the files between the command and the processes
with torch. Pure; imported on both sides.

The command writes `task.json` (Task) and starts the processes. They write `about.json` (About) and append one line of
`points.jsonl` (Measured) as each point ends, so that a process that dies loses nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from backends.exit_codes import UserError
from training_probe.conditions import Conditions

TASK_FILE, ABOUT_FILE, POINTS_FILE, LOG_FILE = "task.json", "about.json", "points.jsonl", "log.txt"

Kind = Literal["gemm", "memcpy", "collectives"]
Dtype = Literal["bf16", "fp16", "fp32", "tf32", "int8", "fp8"]
Route = Literal["h2d", "d2h", "d2d", "h2h"]  # h: host, d: device
Name = Literal["allreduce", "allgather", "reducescatter", "reduce", "broadcast", "alltoall", "sendrecv"]
PointOutcome = Literal["ok", "wrong", "unsupported", "oom", "crashed", "timeout"]

Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]

ELEMENT_BYTES = 4  # collectives move fp32
MIN_SAMPLES = 5
NORMAL_DECILES = 2.563  # standard deviations between the tenth and the ninetieth percentile of a normal distribution
MEDIAN_ERROR = 1.2533  # the standard error of a median to that of a mean, of normal values: sqrt(pi / 2)
GB = 1e9  # of bandwidths, as nccl-tests and NVIDIA count them; sizes are in KiB, MiB, GiB


class MicroError(UserError, ValueError):
    """A user's mistake, or a directory that cannot be read. One sentence."""


class Gemm(msgspec.Struct, frozen=True, kw_only=True, tag="gemm", tag_field="kind"):
    """C[m, n] = A[m, k] B[n, k]^T, as a linear layer does. curve: of a figure. peak: the large product that is
    in every run, so that what is fastest there is near what the device can reach."""

    m: Count
    n: Count
    k: Count
    dtype: Dtype
    curve: str = ""
    peak: bool = False

    @property
    def flops(self) -> int:
        """A multiply-add is 2."""
        return 2 * self.m * self.n * self.k


class Copy(msgspec.Struct, frozen=True, kw_only=True, tag="memcpy", tag_field="kind"):
    """pinned: whether the host's memory is page-locked; nothing to d2d."""

    route: Route
    pinned: bool = False
    size_bytes: Count

    @property
    def label(self) -> str:
        memory = {"h2h": "", "d2d": ""}.get(self.route, " pinned" if self.pinned else " pageable")
        return f"{self.route.upper().replace('2', ' to ')}{memory}"


class Collective(msgspec.Struct, frozen=True, kw_only=True, tag="collective", tag_field="kind"):
    """size_bytes: nccl-tests' size: all that a rank ends with in an AllGather, all that it begins with in the others.
    p2p: whether NCCL may use it; None where there is no NCCL."""

    name: Name
    size_bytes: Count
    ranks: Count
    p2p: bool | None = None


Point = Gemm | Copy | Collective

# Bus bandwidth is algorithm bandwidth times this, so that it can be laid beside the links' own: nccl-tests,
# doc/PERFORMANCE.md. n: ranks.
_ROOTED = ("reduce", "broadcast", "sendrecv")


def bus_factor(name: Name, ranks: int) -> float:
    if name == "allreduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if name in _ROOTED else (ranks - 1) / ranks


def whole_elements(size_bytes: int, ranks: int) -> int:
    """The size, rounded down to what `ranks` ranks can share evenly; at least one element a rank."""
    share = ELEMENT_BYTES * ranks
    return max(share, size_bytes // share * share)


def spread_of(p10: float | None, p90: float | None, value: float | None) -> float | None:
    """The standard deviation of values, over the one that is reported of them. It is taken from percentiles, which a
    single slow value does not move. None where one of the three is not known."""
    return None if not value or p10 is None or p90 is None else (p90 - p10) / NORMAL_DECILES / value


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What one launch measures. samples: measurements of each point. budget_s: a point whose samples would take longer
    has fewer, but never under MIN_SAMPLES, and one whose median they do not settle has more; None: that many, however
    long it takes."""

    device: Literal["cuda", "cpu"]
    points: list[Point]
    samples: int
    budget_s: float | None = None
    seed: int = 0


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What it was measured on. l2_bytes: the cache that inputs are rotated through; None where it is not known."""

    device_name: str
    l2_bytes: int | None = None
    versions: dict[str, str] = {}


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One point. Times are of one launch: each of the `samples` is the mean of `launches`, on the slowest
    rank. correct: whether the result of a collective was as it must be; None: not checked. Outcome other than ok:
    `reason` is why; of an ok one, what is to be kept in mind."""

    point: Point
    outcome: PointOutcome
    reason: str = ""
    samples: int = 0
    launches: int = 0
    median_s: Seconds | None = None
    p10_s: Seconds | None = None
    p90_s: Seconds | None = None
    correct: bool | None = None
    conditions: Conditions | None = None

    @property
    def spread_ratio(self) -> float | None:
        """The standard deviation of the samples, to their median."""
        return spread_of(self.p10_s, self.p90_s, self.median_s)

    @property
    def error_ratio(self) -> float | None:
        """The standard error of the median, to it. It takes samples to be independent of each other. Where slow phases
        last for many samples it is too small; how much processes differ from each other it does not know at all."""
        if self.spread_ratio is None or not self.samples:
            return None
        return MEDIAN_ERROR * self.spread_ratio / math.sqrt(self.samples)

    @property
    def flops_per_s(self) -> float | None:
        return self.point.flops / self.median_s if self.median_s and isinstance(self.point, Gemm) else None

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes a second: a copy's, each byte once, or a collective's algorithm bandwidth as nccl-tests has it."""
        if not self.median_s or self.outcome != "ok" or isinstance(self.point, Gemm):
            return None
        return self.point.size_bytes / self.median_s

    @property
    def bus_bytes_per_s(self) -> float | None:
        if self.bytes_per_s is None or not isinstance(self.point, Collective):
            return None
        return self.bytes_per_s * bus_factor(self.point.name, self.point.ranks)


def measured(
    point: Point, samples_s: Sequence[float], launches: int, correct: bool | None = None, remark: str = ""
) -> Measured:
    """samples_s: at least two, seconds of one launch each. remark: what is to be kept in mind of them."""
    tenths = statistics.quantiles(samples_s, n=10, method="inclusive")
    wrong = correct is False
    return Measured(
        point=point,
        outcome="wrong" if wrong else "ok",
        reason="the result is not what it must be" if wrong else remark,
        samples=len(samples_s),
        launches=launches,
        median_s=statistics.median(samples_s),
        p10_s=tenths[0],
        p90_s=tenths[-1],
        correct=correct,
    )


def label_of(point: Point) -> str:
    """What tells it from the others of a measurement."""
    if isinstance(point, Gemm):
        curve = f", {point.curve}" if point.curve else ""
        return f"{point.dtype} {point.m} x {point.n} x {point.k}{curve}{', peak' if point.peak else ''}"
    if isinstance(point, Copy):
        return f"{point.label}, {size_text(point.size_bytes)}"
    p2p = {True: ", P2P on", False: ", P2P off", None: ""}[point.p2p]
    return f"{point.name}, {size_text(point.size_bytes)}, {point.ranks} ranks{p2p}"


def size_text(size_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= size:
            return f"{size_bytes / size:.4g} {unit}"
    return f"{size_bytes} B"
