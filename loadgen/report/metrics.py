"""What is measured, by whose definition: the metric catalogue, five conventions, and the statistics of a sample. Pure.

Latencies cover measured requests that ended ok; one for which a metric is undefined is left out of it and of its n. It
must never guess: tokens are the server's own counts, events are never counted as tokens, what is unknown is None.

    ttft      first_token - sent, the first event that carries output
    tpot      (last_token - first_token) / (output_tokens - first_tokens): tokens of the first read are no part of it
    itl       gaps between neighbouring events, pooled over all requests
    e2el      done - sent
    answer    ttft of the answer, where reasoning is told apart from it
    send_lag  sent - scheduled; _from_schedule: from the instant the request was due (no coordinated omission)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from loadgen.rundir import groups, pace
from loadgen.rundir.records import RequestTable

MILLION = 1e6
METRICS = (
    "ttft_ms",
    "tpot_ms",
    "itl_ms",
    "e2el_ms",
    "send_lag_ms",
    "ttft_from_schedule_ms",
    "e2el_from_schedule_ms",
)
PERCENTILES = {"p50": 500, "p90": 900, "p95": 950, "p99": 990, "p99_9": 999}  # in thousandths, so ranks are exact
RATES = ("constant", "poisson", "gamma", "ramp", "steps")  # arrivals that have one, in the mean
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
GOODPUT = "goodput_requests_per_s"  # the name of its rate
ITEMS = "items_per_s"  # the name of the rate of replies that are no texts

COUNTED_US = 1 << 17  # gaps below are counted by their length
# Replies without a pace: of so many the p90 of the others is not the load's, whatever they would have been.
UNKNOWN_RATIO = 0.1
# A server's HTTP process may be late with a token or two; a proxy that waits for its first 4 KiB holds twenty back.
HELD_EVENTS, HELD_RATIO = 4, 0.1  # in the first read; of ttft, what their tokens took

Column = NDArray[np.float64]  # (n,) one value a request, NaN where undefined
PercentileMethod = Literal["linear", "nearest_rank", "index_floor"]


class Counted:
    """Values in ascending order, kept as how many there are of each: gaps between tokens are many more than there are
    lengths of them. To index by places (k,); `np.asarray` gives all of them."""

    def __init__(self, numbers: NDArray[Any], counts: NDArray[np.int64]) -> None:
        """numbers: ascending (m,); counts (m,)."""
        self.numbers, self.counts = numbers, counts
        self._ends = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, places: int | NDArray[np.int64]) -> Any:
        at, n = np.asarray(places), len(self)
        if (at >= n).any() or (at < -n).any():
            raise IndexError(f"a place beyond the {n} values")
        return self.numbers[np.searchsorted(self._ends, np.where(at < 0, at + n, at), side="right")]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(np.repeat(self.numbers, self.counts), dtype)

    def at_most(self, numbers: NDArray[Any]) -> NDArray[np.int64]:
        """How many are not larger than each of `numbers` (k,)."""
        ends: NDArray[np.int64] = np.concatenate(([0], self._ends))
        return ends[np.searchsorted(self.numbers, numbers, side="right")]


Ascending = NDArray[Any] | Counted


class Distribution(NamedTuple):
    """The values of one metric, ascending, in units of `unit_ms` milliseconds (pooled gaps stay whole microseconds)."""

    values: Ascending
    unit_ms: float

    def at_most(self, values: NDArray[Any]) -> NDArray[np.int64]:
        """How many are not larger than each of `values` (k,)."""
        own = self.values
        return own.at_most(values) if isinstance(own, Counted) else np.searchsorted(own, values, side="right")


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of a sample, in milliseconds; None where it has too few values to define them. std divides by
    n - 1."""

    n: int
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    p99_9: float | None = None


def between_ms(table: RequestTable, start: str, end: str) -> Column:
    """`end` minus `start`, two `_ns` columns, in milliseconds; NaN where either never happened."""
    first, last = getattr(table, start), getattr(table, end)
    return np.where((first == -1) | (last == -1), np.nan, (last - first) / 1e6)


def _per_token_ms(total_ms: Column, tokens: NDArray[np.int64], least: int) -> Column:
    """total / tokens where the server counted at least `least` tokens, else NaN."""
    return np.where(tokens >= least, total_ms / np.maximum(tokens, 1), np.nan)


def _naive_decode_ms(table: RequestTable) -> Column:
    """As others have it: (last token - first token) / (output tokens - 1); NaN for a reply in one event."""
    decode_ms = np.where(table.events >= 2, between_ms(table, "first_token_ns", "last_token_ns"), np.nan)
    return _per_token_ms(decode_ms, table.output_tokens - 1, 1)


def _decode_ms(table: RequestTable) -> Column:
    paced = (table.first_tokens >= 0) & (table.events >= 2)
    decode_ms = np.where(paced, between_ms(table, "first_token_ns", "last_token_ns"), np.nan)
    return _per_token_ms(decode_ms, table.output_tokens - table.first_tokens, 1)


def paceless(table: RequestTable) -> NDArray[np.bool_]:
    """Replies (n,) of two tokens or more, by the server's count, whose pace cannot be known: `hidden` or `bent`."""
    return table.ok & (table.output_tokens >= 2) & (table.events > 0) & (table.first_tokens < 0)


def is_unknown(those: NDArray[np.bool_], table: RequestTable) -> bool:
    """Whether `those` replies (n,) are so many that a metric without them says nothing of the load."""
    return int(those.sum()) > UNKNOWN_RATIO * int((table.ok & (table.events > 0)).sum())


def bent(table: RequestTable) -> NDArray[np.bool_]:
    """Which of `paceless` (n,) came in too few reads: reads made their gaps, and their first token's time."""
    found = paceless(table)
    for row in np.flatnonzero(found).tolist():
        found[row] = pace.is_bent(table.itl_us[table.itl_offsets[row] : table.itl_offsets[row + 1]].tolist())
    return found


def held(table: RequestTable) -> NDArray[np.bool_]:
    """Replies (n,) with a pace whose first read brought so many events that most of a token's time, several times over,
    is in their ttft: something held their beginning back."""
    found = np.zeros(len(table), np.bool_)
    before = 0
    for part in table.blocks():
        begins, ends = part.itl_offsets[:-1], part.itl_offsets[1:]
        rows = np.flatnonzero(part.ok & (part.first_tokens >= HELD_EVENTS) & (ends - begins >= HELD_EVENTS))
        pauses = np.append(np.flatnonzero(part.itl_us), len(part.itl_us))
        at_once = np.minimum(pauses[np.searchsorted(pauses, begins[rows])], ends[rows]) - begins[rows]
        late_ms = at_once * _decode_ms(part)[rows]
        found[before + rows] = (at_once + 1 >= HELD_EVENTS) & (late_ms > HELD_RATIO * _TTFT(part)[rows])
        before += len(part)
    return found


def price_per_million(gpu_hour_price: float | None, gpus: int | None, per_s: float | None) -> float | None:
    """What a million cost of what these GPUs make so many of a second; None where one of the three is not known."""
    if gpu_hour_price is None or gpus is None or not per_s:
        return None
    return gpu_hour_price * gpus / 3600 / per_s * MILLION


def _pooled_gaps(table: RequestTable) -> Distribution:
    """Every gap between neighbouring events of the ok requests, each one sample; none where most are made by reads."""
    without = bent(table)
    made_between = is_unknown(without, table) or groups.clock_us(table) is not None
    return _NO_GAPS if made_between else _gaps(table, without)


def _gaps(table: RequestTable, without: NDArray[np.bool_]) -> Distribution:
    short, longer = np.zeros(COUNTED_US + 1, np.int64), [np.empty(0, np.uint32)]
    before = 0
    for part in table.blocks():
        rows = part.ok & ~without[before : before + len(part)]
        kept = part.itl_us if rows.all() else part.itl_us[np.repeat(rows, np.diff(part.itl_offsets))]
        before += len(part)
        short += np.bincount(np.minimum(kept, COUNTED_US), minlength=COUNTED_US + 1)
        longer.append(kept[kept >= COUNTED_US])
    lengths_us = np.flatnonzero(short[:-1])
    longer_us, counts = np.unique(np.concatenate(longer), return_counts=True)
    numbers = np.concatenate((lengths_us, longer_us.astype(np.int64)))
    return Distribution(Counted(numbers, np.concatenate((short[lengths_us], counts))), 1e-3)


def defined(values: Column) -> Distribution:
    """The values that are not NaN, in milliseconds."""
    return Distribution(np.sort(values[~np.isnan(values)]), 1.0)


_NO_GAPS = Distribution(np.empty(0), 1.0)


def _request_means_by_token(table: RequestTable) -> Distribution:
    """A request's mean gap, counted once for each of its gaps."""
    means = _naive_decode_ms(table)
    rows = np.flatnonzero(~np.isnan(means) & table.ok)
    rows = rows[np.argsort(means[rows])]
    return Distribution(Counted(means[rows], table.output_tokens[rows] - 1), 1.0)


def _between(start: str, end: str) -> Callable[[RequestTable], Column]:
    return lambda table: between_ms(table, start, end)


_TTFT, _E2EL = _between("sent_ns", "first_token_ns"), _between("sent_ns", "done_ns")


@dataclass(frozen=True, kw_only=True)
class Convention:
    """One tool's definitions applied to our records; those that it does not state are our own. `differs`: what to
    expect, and what the records cannot give."""

    name: str
    ttft: Callable[[RequestTable], Column] = _TTFT
    tpot: Callable[[RequestTable], Column] = _decode_ms
    e2el: Callable[[RequestTable], Column] = _E2EL
    itl: Callable[[RequestTable], Distribution] = _pooled_gaps
    percentile: PercentileMethod = "linear"
    from_zero: bool = False  # throughput: from t = 0 instead of from the first request sent
    differs: str


CONVENTIONS: dict[str, Convention] = {
    convention.name: convention
    for convention in (
        Convention(name="loadgen", differs="This tool's own definitions (METHODOLOGY.md)."),
        Convention(
            name="vllm",
            tpot=_naive_decode_ms,
            e2el=_between("sent_ns", "last_token_ns"),
            differs=(
                "vllm bench serve: tpot divides by all tokens but one, however many came with the first read; e2el "
                "ends at the last event with output, not at the end of the reply. Not "
                "reproducible: its start stamp, taken before the request waits for a connection and for the client's "
                "event loop; empty chunks, which its completions client counts as events; its std divides by n."
            ),
        ),
        Convention(
            name="guidellm",
            tpot=lambda t: _per_token_ms(between_ms(t, "sent_ns", "last_token_ns"), t.output_tokens, 1),
            itl=_request_means_by_token,
            percentile="nearest_rank",
            differs=(
                "guidellm: tpot includes the time to the first token and divides by all tokens; itl is each request's "
                "mean gap, weighted by its tokens, so stalls within a request vanish; percentiles are nearest-rank. "
                "Not reproducible: its wall-clock stamps and the way it averages throughput over time (here: total "
                "over duration)."
            ),
        ),
        Convention(
            name="aiperf",
            tpot=lambda t: np.full(len(t), np.nan),
            e2el=_between("sent_ns", "last_token_ns"),
            itl=lambda t: defined(_naive_decode_ms(t)[t.ok]),  # one mean gap an ok request
            differs=(
                "aiperf: itl is what others call tpot, one mean a request; there is no tpot; e2el (request "
                "latency) ends at the last event with output. Not reproducible: its token counts, made by its own "
                "tokenizer unless told otherwise, and the number of tokens in a first event that carries several."
            ),
        ),
        Convention(
            name="mlperf",
            ttft=_between("scheduled_ns", "first_token_ns"),
            tpot=lambda t: _per_token_ms(between_ms(t, "first_token_ns", "done_ns"), t.output_tokens - 1, 1),
            e2el=_between("scheduled_ns", "done_ns"),
            itl=lambda t: _NO_GAPS,
            percentile="index_floor",
            from_zero=True,
            differs=(
                "MLPerf LoadGen: ttft and e2el count from the instant the request was due; there is no itl; a "
                "percentile is the sample at floor(n p); throughput counts from t = 0. Not reproducible: its own "
                "schedule and early-stopping verdict; its Server scenario counts one request fewer."
            ),
        ),
    )
}
_BY_NO_CONVENTION = {
    "send_lag_ms": _between("scheduled_ns", "sent_ns"),
    "ttft_from_schedule_ms": _between("scheduled_ns", "first_token_ns"),
    "e2el_from_schedule_ms": _between("scheduled_ns", "done_ns"),
}


def column(table: RequestTable, metric: str, convention: Convention) -> Column:
    """One value a request, in milliseconds (n,); `itl_ms`, which has many a request, is not a column."""
    by_name = {"ttft_ms": convention.ttft, "tpot_ms": convention.tpot, "e2el_ms": convention.e2el, **_BY_NO_CONVENTION}
    if metric not in by_name:
        raise ValueError(f"{metric} is not a metric with one value a request")
    return by_name[metric](table)


def fair_column(table: RequestTable, metric: str, convention: Convention) -> Column:
    """`column`, but NaN for all where too many have no value that can be known: the others are not a fair sample."""
    own = convention.name == "loadgen" and metric == "tpot_ms"
    if own and is_unknown(paceless(table), table):
        return np.full(len(table), np.nan)
    return column(table, metric, convention)


def sample(measured: RequestTable, metric: str, convention: Convention) -> Distribution:
    """The defined values of a metric over the requests that ended ok."""
    if metric == "itl_ms":
        return convention.itl(measured)
    return defined(fair_column(measured, metric, convention)[measured.ok])


def percentile(values: Ascending, thousandths: int, method: PercentileMethod) -> float:
    """A percentile of ascending `values` (n >= 1); `linear` interpolates as numpy does by default."""
    n = len(values)
    if method == "nearest_rank":
        return float(values[max(0, -(-n * thousandths // 1000) - 1)])
    if method == "index_floor":
        return float(values[min(n - 1, n * thousandths // 1000)])
    below, rest = divmod((n - 1) * thousandths, 1000)
    low, high = float(values[below]), float(values[min(n - 1, below + 1)])
    return low + (high - low) * (rest / 1000)


def summary_of(values: NDArray[Any], rules: Convention) -> Summary:
    """Summarizes the values that are defined, as a convention has their percentiles."""
    return summary(defined(values), rules.percentile)


def summary(measured: Distribution, method: PercentileMethod) -> Summary:
    values, unit = measured
    n = len(values)
    if n == 0:
        return Summary(n=0)
    numbers, counts = (values.numbers, values.counts) if isinstance(values, Counted) else (values, None)
    mean = float(np.average(numbers, weights=counts))
    squares = (numbers - mean) ** 2
    total = squares.sum() if counts is None else squares @ counts
    return Summary(
        n=n,
        mean=mean * unit,
        std=float(np.sqrt(total / (n - 1))) * unit if n > 1 else None,
        min=float(values[0]) * unit,
        max=float(values[-1]) * unit,
        **{name: percentile(values, p, method) * unit for name, p in PERCENTILES.items()},
    )


def duration_s(measured: RequestTable, convention: Convention) -> float | None:
    """Seconds that throughput divides by, from the first request sent to the last reply ended, whatever its outcome (as
    `vllm bench`); None when nothing was sent or nothing ended."""
    sent, done = measured.sent_ns[measured.sent_ns != -1], measured.done_ns[measured.done_ns != -1]
    if len(sent) == 0 or len(done) == 0:
        return None
    seconds = (int(done.max()) - (0 if convention.from_zero else int(sent.min()))) / 1e9
    return seconds if seconds > 0 else None


def items(measured: RequestTable) -> NDArray[np.int64] | None:
    """How many texts each request had that was answered with a vector or a score for each, (n,); None where replies are
    texts."""
    if not measured.items:
        return None
    return np.array([measured.items.get(number, 0) for number in measured.id.tolist()], np.int64)


def counts(measured: RequestTable) -> dict[str, int | None]:
    """What the requests that ended ok came to, by the names of the rates. Where replies are no texts there are items,
    and no output tokens."""
    ok, of_texts = measured.ok, items(measured)
    prompt, output = total(measured.prompt_tokens[ok]), total(measured.output_tokens[ok])
    rest = {"output_tokens_per_s": output} if of_texts is None else {ITEMS: int(of_texts[ok].sum())}
    both = None if prompt is None or output is None else prompt + output
    return {"requests_per_s": int(ok.sum()), **rest, "total_tokens_per_s": both}


def total(counts: NDArray[np.int64]) -> int | None:
    """Sum of the counts that the server gave; None when it gave none."""
    known = counts[counts != -1]
    return int(known.sum()) if len(known) else None


def good(measured: RequestTable, slos_ms: Mapping[str, float], convention: Convention) -> NDArray[np.bool_]:
    """Which requests (n,) ended ok and meet every limit. Below two output tokens any tpot is met; unknown meets none.

    Raises ValueError for a limit on anything but ttft, tpot and e2el (the names of `vllm bench serve --goodput`).
    """
    meets = measured.ok
    for name, limit_ms in slos_ms.items():
        if name not in GOODPUT_METRICS:
            raise ValueError(f"goodput has no limit on {name!r}; use {', '.join(GOODPUT_METRICS)}.")
        values = column(measured, f"{name}_ms", convention)
        if name == "tpot":
            values = np.where((measured.output_tokens == 0) | (measured.output_tokens == 1), 0.0, values)
        meets &= values <= limit_ms  # NaN compares false: undefined is not good
    return meets


def good_count(measured: RequestTable, slos_ms: Mapping[str, float], convention: Convention) -> int | None:
    """How many requests are `good`; None where too many have a ttft or tpot that is limited and cannot be known. Raises
    ValueError."""
    count = int(good(measured, slos_ms, convention).sum())
    unknown = ("tpot" in slos_ms and is_unknown(paceless(measured), measured)) or (
        "ttft" in slos_ms and (is_unknown(bent(measured), measured) or groups.clock_us(measured) is not None)
    )
    return None if unknown and convention.name == "loadgen" else count


def send_spread_ms(measured: RequestTable) -> tuple[int, float | None]:
    """How many requests were due at t = 0, and the time from the first of them sent to the last (None below two)."""
    burst = measured.sent_ns[(measured.scheduled_ns == 0) & (measured.sent_ns != -1)]
    due = int((measured.scheduled_ns == 0).sum())
    return due, float(burst.max() - burst.min()) / 1e6 if len(burst) > 1 else None


def under_way(begin_ns: NDArray[np.int64], end_ns: NDArray[np.int64]) -> tuple[Column, NDArray[np.int64]]:
    """When the number of what is under way changed, in seconds, ascending, and what it was from then on, (n + m,) each;
    from when `begin_ns` (n,), to when `end_ns` (m <= n,)."""
    at_ns = np.concatenate((begin_ns, end_ns))
    change = np.concatenate((np.ones(len(begin_ns), np.int64), -np.ones(len(end_ns), np.int64)))
    order = np.argsort(at_ns, kind="stable")  # what begins as another ends is beside it for that instant
    return at_ns[order] / 1e9, np.cumsum(change[order])


def peak_events_per_s(measured: RequestTable) -> float | None:
    """Events in the busiest second, counted in whole seconds from the first event; None without events.

    A run whose events all fall within one second is divided by the time they took, at least a tenth of a second.
    """
    started = measured.first_token_ns != -1
    if not started.any():
        return None
    first = int(measured.first_token_ns[started].min())
    last = int(measured.last_token_ns.max())
    counts = np.zeros((last - first) // 1_000_000_000 + 1, np.int64)
    for part in measured.blocks():
        counts += _events_by_second(part, first, len(counts))
    if len(counts) == 1:
        return float(counts[0]) / max((last - first) / 1e9, 0.1)
    return float(counts.max())


def event_times_us(table: RequestTable, since_ns: int = 0) -> NDArray[np.int64]:
    """When each event of each reply arrived, in microseconds since `since_ns`, one reply's after another's but for the
    first events, which come first; shape (all events,)."""
    begin_us = (table.first_token_ns - since_ns) // 1000
    walked = np.concatenate(([0], np.cumsum(table.itl_us, dtype=np.int64)))
    later_us = walked[1:] + np.repeat(begin_us - walked[table.itl_offsets[:-1]], np.diff(table.itl_offsets))
    return np.concatenate((begin_us[table.first_token_ns != -1], later_us))


def _events_by_second(table: RequestTable, first_ns: int, seconds: int) -> NDArray[np.int64]:
    """How many events fall into each second since `first_ns` (seconds,)."""
    times_us = event_times_us(table, first_ns)
    return np.bincount(np.clip(times_us // 1_000_000, 0, seconds - 1), minlength=seconds)
