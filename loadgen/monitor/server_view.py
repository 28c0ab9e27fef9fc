"""The server's own view of a run: `server.jsonl`, and what it says of the time between the first request and the last.

Written by `loadgen.monitor.sampler` while the run lasts: a header, then one sample a line, of the server's `/metrics`
and of its GPUs. Reading never fails: the view names what is damaged or missing, because a run is no worse for it.
Times are the machine's monotonic clock in nanoseconds, so samples lie beside the records' t = 0.
"""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from backends import foreign_files
from backends.gpus import SLOWDOWNS, GpuSample, reason_names
from backends.untrusted import UNDECODABLE

SCHEMA = "loadgen.server/1"
FILE = "server.jsonl"
MOST_LINE_BYTES = 1 << 20  # of a sample: of a thousand GPUs
MOST_SAMPLES = 1 << 20  # twelve days, one a second
PARTS = ("queue", "validation", "prefill", "inference", "time_per_token", "tpot")  # histograms of a request's parts
# Of NVIDIA's exporter (DCGM), beside a server's own: what held clocks back, in ns of all GPUs of the page together, and
# by what else to know the page. Newer names count by reason.
GPU_SERIES = {
    "gpu_thermal_ns": "DCGM_FI_DEV_THERMAL_VIOLATION DCGM_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS",
    "gpu_power_ns": "DCGM_FI_DEV_POWER_VIOLATION DCGM_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP_NS",
    "gpu_temperatures": "DCGM_FI_DEV_GPU_TEMP",
}
UNREADABLE = (OSError, EOFError, zlib.error)  # a file, packed or not


class SamplesHeader(msgspec.Struct, kw_only=True):
    """First line. `series`: neutral names that were asked for. `gpus`: names, in the order of each sample's GPUs.
    `replicas`: addresses, in the order of each sample's replicas; empty where the server has one page of metrics.
    `error`: what could not be sampled at all, and why."""

    schema: str = SCHEMA
    run_id: str
    series: list[str]
    gpus: list[str]
    replicas: list[str] | UnsetType = UNSET
    error: str | None = None


class ServerSample(msgspec.Struct, kw_only=True):
    """One line: asked for at `at_ns`, all there `took_ms` later. A metric that the server does not show is missing.
    replicas: of each, what `metrics` are the sums of; empty for one that did not answer."""

    at_ns: int
    took_ms: float
    metrics: dict[str, float] = {}
    gpus: list[GpuSample] = []
    replicas: list[dict[str, float]] | UnsetType = UNSET
    error: str | None = None

    @property
    def end_ns(self) -> float:
        return self.at_ns + self.took_ms * 1e6

    @property
    def good(self) -> bool:
        return self.error is None or bool(self.metrics)


class ReplicaStats(msgspec.Struct, kw_only=True):
    """What one of several replicas counted. silent: samples in which it did not answer. lost_s: where it no longer did
    at the end, when in the run it did so last; null: never."""

    url: str
    silent: int
    lost_s: float | UnsetType | None = UNSET
    running_max: int | None = None
    waiting_max: int | None = None
    kv_cache_usage_max_ratio: float | None = None
    preemptions: int | None = None
    prefix_cache_hits: int | None = None
    prompt_tokens: int | None = None
    generation_tokens: int | None = None


class ServerStats(msgspec.Struct, kw_only=True):
    """What the server counted; None where it has no such series. Largest values are those of samples, a second apart.

    covered: there is a good sample before the first request and one after the last reply; else counts are of less than
    the run. problem: what could not be sampled at all. failure: the most frequent reason of the failed samples.
    """

    samples: int = 0
    failed: int = 0
    covered: bool = False
    problem: str | None = None
    failure: str | None = None
    running_max: int | None = None
    waiting_max: int | None = None
    paused_max: int | None = None  # requests: preempted, and waiting to go on
    kv_cache_usage_max_ratio: float | None = None
    kv_reserved_max_tokens: int | None = None  # what a batch might have come to need, not what it used
    preemptions: int | None = None
    prefix_cache_hits: int | None = None  # tokens
    prefix_cache_queries: int | None = None  # tokens
    prompt_tokens: int | None = None
    generation_tokens: int | None = None
    ttft_mean_ms: float | None = None
    itl_mean_ms: float | None = None
    e2el_mean_ms: float | None = None
    ended: int | UnsetType | None = UNSET  # requests in the histogram of e2el
    adapters_running_max: int | UnsetType = UNSET  # that requests which ran together were for, at the samples
    adapters_waiting_max: int | UnsetType = UNSET
    adapters_loaded_max: int | UnsetType = UNSET
    parts_ms: dict[str, float] | UnsetType = UNSET  # means of other histograms, by their neutral names
    gpu_thermal_s: float | UnsetType = UNSET  # how long heat held clocks of GPUs back, each GPU's time counted
    gpu_power_s: float | UnsetType = UNSET  # likewise, the power limit
    replicas: list[ReplicaStats] | UnsetType = UNSET  # where there are several


class GpuPeak(msgspec.Struct, kw_only=True, omit_defaults=True):
    """thermal_ratio, power_ratio: share of the time in which heat, or the power limit, held its clocks back. slowdowns:
    reasons of the driver for slow clocks, at the samples. processes: that were on it at once; others: that came or went
    meanwhile."""

    index: int
    name: str
    memory_peak_bytes: int | None
    thermal_ratio: float | None = None
    power_ratio: float | None = None
    slowdowns: list[str] = []
    processes: int | None = None
    others: int = 0


class GpuStats(msgspec.Struct, kw_only=True):
    """The GPUs together: the peak is of their sum at one time, power and energy are sums, of the run alone.

    energy_from: "counter" is the GPUs' own energy counters, "power" the trapezoids under their power samples.
    """

    each: list[GpuPeak]
    memory_peak_bytes: int | None
    power_mean_w: float | None
    energy_j: float | None
    energy_from: Literal["counter", "power"] | None


class ServerView(msgspec.Struct, kw_only=True):
    server: ServerStats | None = None
    gpus: GpuStats | None = None


def read(directory: Path, run_id: str, t0_ns: int, end_ns: int) -> ServerView | None:
    """What `server.jsonl` says of the run whose schedule began at `t0_ns` and whose last reply ended at `end_ns`.

    It covers the samples from the last good one before t = 0, which is taken between warm-up and load, to the first
    good one after the end. Only energy is corrected for time outside the run. None when nothing was sampled.
    """
    try:
        header, samples, problem = _decode(_lines(directory), run_id)
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        return ServerView(
            server=ServerStats(problem=f"{FILE} cannot be read: {getattr(error, 'strerror', None) or error}")
        )
    if header is None:
        return ServerView(server=ServerStats(problem=problem))
    problem = problem or header.error
    before = [at for at, sample in enumerate(samples) if sample.good and sample.end_ns <= t0_ns]
    after = [at for at, sample in enumerate(samples) if sample.good and sample.at_ns >= end_ns]
    window = samples[before[-1] if before else 0 : after[0] + 1 if after else len(samples)]
    view = ServerView(gpus=_gpus(header, window, t0_ns, end_ns))
    if not header.series:
        view.server = ServerStats(problem=problem) if problem else None
        return view
    view.server = _server(window, header.replicas or (), t0_ns)
    view.server.covered = bool(before and after)
    view.server.problem = problem
    if problem is None and any(sample.good for sample in window) and not any(sample.metrics for sample in window):
        view.server.problem = "GET /metrics shows none of the series that this kind of server has"
    return view


def samples(directory: Path, run_id: str) -> list[ServerSample]:
    """The good samples of that run in `server.jsonl`, as far as they can be read; none without it."""
    try:
        return [sample for sample in _decode(_lines(directory), run_id)[1] if sample.good]
    except UNREADABLE:
        return []


def _lines(directory: Path) -> Iterator[bytes]:
    """Reads the file, or the one that was packed with gzip, as records may be. Raises UNREADABLE."""
    plain = directory / FILE
    if plain.exists() or not (packed := plain.with_name(f"{FILE}.gz")).exists():
        yield from foreign_files.lines(plain, most_bytes=MOST_LINE_BYTES)
        return
    with foreign_files.opened(packed) as stored, gzip.open(stored) as file:
        while line := file.readline(MOST_LINE_BYTES):
            yield line


def _decode(lines: Iterator[bytes], run_id: str) -> tuple[SamplesHeader | None, list[ServerSample], str | None]:
    """Header and samples as far as they can be read, and what is wrong. A last line cut in two is left out."""
    samples: list[ServerSample] = []
    try:
        header = msgspec.json.decode(next(lines, b""), type=SamplesHeader)
    except UNDECODABLE:
        return None, samples, f"{FILE} does not begin with a {SCHEMA} header"
    if header.schema != SCHEMA:
        return None, samples, f"{FILE} has another schema than {SCHEMA}"
    if header.run_id != run_id:
        return None, samples, f"{FILE} is of another run"
    decode = msgspec.json.Decoder(ServerSample).decode
    for number, line in enumerate(lines, 2):
        if not line.endswith(b"\n"):
            break
        if number > MOST_SAMPLES:
            return header, samples, f"{FILE} has over {MOST_SAMPLES} samples, and the others were not read"
        try:
            samples.append(decode(line))
        except UNDECODABLE:
            return header, samples, f"{FILE} line {number} is not a sample"
    return header, samples, None


_Metrics = Sequence[dict[str, float]]  # one a sample, in their order


def _largest(shown: _Metrics, name: str) -> float | None:
    return max((metrics[name] for metrics in shown if name in metrics), default=None)


def _rise(shown: _Metrics, name: str) -> float | None:
    """How much a counter grew. None when the server never showed it or began anew. A counter that it does not show yet
    is 0: with labels, Prometheus' libraries show it once it has counted."""
    values = [metrics[name] for metrics in shown if name in metrics]
    if not values:
        return None
    if name not in shown[0]:
        values.insert(0, 0.0)
    return None if any(later < earlier for earlier, later in pairwise(values)) else values[-1] - values[0]


def _replica(url: str, place: int, window: Sequence[ServerSample], t0_ns: int) -> ReplicaStats:
    answers = [(sample.at_ns, shown[place]) for sample in window if len(shown := sample.replicas or []) > place]
    shown = [metrics for _, metrics in answers if metrics]
    lost_s: float | UnsetType | None = UNSET
    if answers and not answers[-1][1]:
        lost_s = next((max(1e-3, (at_ns - t0_ns) / 1e9) for at_ns, metrics in reversed(answers) if metrics), None)
    counters = ("preemptions", "prefix_cache_hits", "prompt_tokens", "generation_tokens")
    return ReplicaStats(
        url=url,
        silent=len(answers) - len(shown),
        lost_s=lost_s,
        running_max=_whole(_largest(shown, "running")),
        waiting_max=_whole(_largest(shown, "waiting")),
        kv_cache_usage_max_ratio=_largest(shown, "kv_cache_usage_ratio"),
        **{name: _whole(_rise(shown, name)) for name in counters},
    )


def _server(window: Sequence[ServerSample], replicas: Sequence[str], t0_ns: int) -> ServerStats:
    good = [sample.metrics for sample in window if sample.good]
    parts = [
        [shown[place] for sample in window if len(shown := sample.replicas or []) > place and shown[place]]
        for place in range(len(replicas))
    ] or [good]

    def largest(name: str) -> float | None:
        return _largest(good, name)

    def rise(name: str) -> float | None:
        """That of all replicas: the sum of what was shown falls when one of them dies."""
        risen = [grown for part in parts if (grown := _rise(part, name)) is not None]
        return sum(risen) if risen else None

    def mean_ms(name: str) -> float | None:
        seconds, count = rise(f"{name}_sum"), rise(f"{name}_count")
        return 1000 * seconds / count if seconds is not None and count else None

    def most(name: str) -> int | UnsetType:
        value = largest(name)
        return UNSET if value is None else round(value)

    def held_s(name: str) -> float | UnsetType:
        held_ns = rise(name)
        return UNSET if held_ns is None else held_ns / 1e9

    parts_ms = {name: mean for name in PARTS if (mean := mean_ms(f"{name}_seconds")) is not None}
    reasons = Counter(sample.error for sample in window if sample.error is not None)
    return ServerStats(
        samples=len(window),
        failed=reasons.total(),
        failure=next((reason for reason, _ in reasons.most_common(1)), None),
        running_max=_whole(largest("running")),
        waiting_max=_whole(largest("waiting")),
        paused_max=_whole(largest("paused")),
        kv_cache_usage_max_ratio=largest("kv_cache_usage_ratio"),
        kv_reserved_max_tokens=_whole(largest("kv_reserved_tokens")),
        preemptions=_whole(rise("preemptions")),
        prefix_cache_hits=_whole(rise("prefix_cache_hits")),
        prefix_cache_queries=_whole(rise("prefix_cache_queries")),
        prompt_tokens=_whole(rise("prompt_tokens")),
        generation_tokens=_whole(rise("generation_tokens")),
        ttft_mean_ms=mean_ms("ttft_seconds"),
        itl_mean_ms=mean_ms("itl_seconds"),
        e2el_mean_ms=mean_ms("e2el_seconds"),
        ended=UNSET if (ended := rise("e2el_seconds_count")) is None else round(ended),
        adapters_running_max=most("adapters_running"),
        adapters_waiting_max=most("adapters_waiting"),
        adapters_loaded_max=most("adapters_loaded"),
        parts_ms=parts_ms or UNSET,
        gpu_thermal_s=held_s("gpu_thermal_ns"),
        gpu_power_s=held_s("gpu_power_ns"),
        replicas=[
            _replica(url, place, window, t0_ns) for place, url in enumerate(replicas) if not _is_of_gpus(parts[place])
        ]
        or UNSET,
    )


def _is_of_gpus(shown: _Metrics) -> bool:
    """Whether a page is of GPUs alone, and no replica's."""
    return bool(shown) and all(name in GPU_SERIES for metrics in shown for name in metrics)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _gpus(header: SamplesHeader, window: Sequence[ServerSample], t0_ns: int, end_ns: int) -> GpuStats | None:
    first = next((sample.gpus for sample in window if sample.gpus), None)
    if first is None:
        return None
    indices = [gpu.index for gpu in first]
    names = dict(zip(indices, header.gpus, strict=False))
    memory, power, counters = (
        [_points(window, index, name) for index in indices] for name in ("memory_used_bytes", "power_w", "energy_mj")
    )
    sums: dict[int, list[float]] = {}
    for points in memory:
        for at_ns, used in points:
            sums.setdefault(at_ns, []).append(used)
    energy_j: float | None = None
    energy_from: Literal["counter", "power"] | None = None
    within = [_within(points, t0_ns, end_ns) for points in power]
    power_w = sum(map(_mean_w, within)) if all(within) else None
    if all(_spans(points, window) and points[0][1] <= points[-1][1] for points in counters):
        counted = list(map(_counted, counters, power, within))
        energy_j, energy_from = sum(joules for joules, _ in counted), "counter"
        if all(seconds > 0 for _, seconds in counted):
            power_w = sum(joules / seconds for joules, seconds in counted)
    elif all(_spans(points, window) for points in power):
        energy_j, energy_from = sum(map(_joules, within)), "power"
    return GpuStats(
        each=[_gpu(window, index, names.get(index, ""), points) for index, points in zip(indices, memory, strict=True)],
        memory_peak_bytes=_whole(max((sum(used) for used in sums.values() if len(used) == len(indices)), default=None)),
        power_mean_w=power_w,
        energy_j=energy_j,
        energy_from=energy_from,
    )


def _gpu(window: Sequence[ServerSample], index: int, name: str, memory: Points) -> GpuPeak:
    seen = [gpu for sample in window for gpu in sample.gpus if gpu.index == index]
    reasons, processes = 0, [set(gpu.processes) for gpu in seen if gpu.processes is not None]
    for gpu in seen:
        reasons |= gpu.clock_reasons
    return GpuPeak(
        index=index,
        name=name,
        memory_peak_bytes=_whole(max((used for _, used in memory), default=None)),
        thermal_ratio=_held_ratio(_points(window, index, "thermal_ns")),
        power_ratio=_held_ratio(_points(window, index, "power_ns")),
        slowdowns=[each for each in reason_names(reasons) if each in SLOWDOWNS],
        processes=max(map(len, processes), default=None),
        others=len(processes[0].union(*processes) - processes[0].intersection(*processes)) if processes else 0,
    )


def _held_ratio(counter: Points) -> float | None:
    """By how much a counter of ns grew, as a share of the time between its first and its last reading."""
    if len(counter) < 2 or counter[-1][1] < counter[0][1]:
        return None
    return min(1.0, (counter[-1][1] - counter[0][1]) / (counter[-1][0] - counter[0][0]))


Points = Sequence[tuple[int, float]]  # when (ns) and how much


def _points(window: Sequence[ServerSample], index: int, name: str) -> Points:
    """One value of one GPU, where it is known."""
    return [
        (sample.at_ns, value)
        for sample in window
        for gpu in sample.gpus
        if gpu.index == index and (value := getattr(gpu, name)) is not None
    ]


def _spans(points: Points, window: Sequence[ServerSample]) -> bool:
    """Whether a value is known at both ends of the window, so that what happened between them can be told."""
    return len(points) > 1 and points[0][0] == window[0].at_ns and points[-1][0] == window[-1].at_ns


def _within(power: Points, t0_ns: int, end_ns: int) -> Points:
    """Power samples (ns, W) of the run alone. It begins and ends at once, so what was sampled outside says nothing of
    it: up to its first sample and from its last, it had their power. Without any, the mean of those outside."""
    if not power:
        return []
    begin_ns, finish_ns = max(t0_ns, int(power[0][0])), min(end_ns, int(power[-1][0]))
    inside = [(at_ns, watts) for at_ns, watts in power if t0_ns <= at_ns <= end_ns]
    if not inside:
        mean_w = _mean_w(power)
        return [(begin_ns, mean_w), (max(begin_ns, finish_ns), mean_w)]
    return [(begin_ns, inside[0][1]), *inside, (finish_ns, inside[-1][1])]


def _counted(counter: Points, power: Points, within: Points) -> tuple[float, float]:
    """Energy of the run, and of how many seconds of it: of a counter (ns, mJ) that was read before and after it, less
    what was used in between, at the power that was sampled outside."""
    counted_j = (counter[-1][1] - counter[0][1]) / 1000
    if not power:
        return counted_j, (counter[-1][0] - counter[0][0]) / 1e9
    before_j = (within[0][0] - counter[0][0]) / 1e9 * power[0][1]
    after_j = (counter[-1][0] - within[-1][0]) / 1e9 * power[-1][1]
    return max(0.0, counted_j - max(0.0, before_j) - max(0.0, after_j)), (within[-1][0] - within[0][0]) / 1e9


def _joules(points: Points) -> float:
    """The area under power samples (ns, W), straight lines between them."""
    return sum((b_ns - a_ns) / 1e9 * (a_w + b_w) / 2 for (a_ns, a_w), (b_ns, b_w) in pairwise(points))


def _mean_w(points: Points) -> float:
    """The mean over time: the last sample of a run lies closer to the one before it."""
    span_s = (points[-1][0] - points[0][0]) / 1e9
    return _joules(points) / span_s if span_s > 0 else points[0][1]
