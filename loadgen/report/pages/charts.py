"""The charts of runs: latencies, the run over time, ttft by prompt length, and how tokens of the slowest requests came.

Every function takes one run or several. Of one, each curve has a colour and a name of its own; of several, each run has
a colour, and its curves are switched together by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.document.content import Chart, Mark, Series, Shade, number
from loadgen.monitor.server_view import ServerSample
from loadgen.report import metrics, sessions, slices, text
from loadgen.report.finding import share
from loadgen.report.metrics import CONVENTIONS, Convention, Summary
from loadgen.report.pages import intervals, parts, series
from loadgen.report.pages.parts import Curve, rounded
from loadgen.report.pages.series import Values
from loadgen.report.schema import Report
from loadgen.rundir import Manifest
from loadgen.rundir.records import RequestTable

LATENCIES = {
    "ttft_ms": "Time to first token (ttft)",
    "tpot_ms": "Time per output token (tpot)",
    "itl_ms": "Gaps between events (itl)",
    "e2el_ms": "End-to-end latency (e2el)",
}
QUEUE = ("running", "waiting", "paused")  # of the server's own series
KV_CACHE, PREEMPTIONS = "kv_cache_usage_ratio", "preemptions"
TIME, SECONDS = "time", "time since the load began (s)"
MOST_EVENTS, LONGEST_GAPS = 150, 40  # of a request's tokens
FEWEST_BINS, IN_A_BIN = 20, 10  # of a rate: fewer requests in each would be noise
FEWEST_POINTS = 500  # of each run, however many are on a page
THINNED = (
    f"Of more than {{most}} points: of {series.MOST_BUCKETS} equal parts of the axis the lowest and the highest, and "
    "evenly up to {most} of the others."
)

Kind = Literal["line", "step", "points"]
Samples = Sequence[tuple[float, ServerSample]]  # at what second of the run


@dataclass(frozen=True)
class Shown:
    """A run on a page. samples: what the server and its GPUs showed while it lasted. place: among those of the page,
    from 0. under_way: the measured requests with those of a warm-up that handed its slots over; None: the measured."""

    name: str
    report: Report
    manifest: Manifest
    measured: RequestTable
    samples: Samples = ()
    place: int = 0
    under_way: RequestTable | None = None

    @property
    def rules(self) -> Convention:
        return CONVENTIONS[self.report.convention]

    @cached_property
    def in_blocks(self) -> list[RequestTable]:
        """As its intervals see it."""
        return intervals.parts(self.measured, self.report.arrival)

    @property
    def origin(self) -> str:
        return text.origin(self.report)

    @property
    def end_s(self) -> float:
        return series.end_s(self.measured)


Runs = Sequence[Shown]
Drawn = tuple[str, Kind, NDArray[Any], NDArray[Any]]  # one curve: what, how, x, y


def latency_titles(runs: Runs) -> dict[str, str]:
    """Those of `LATENCIES` that replies can have: without texts the last alone."""
    return LATENCIES if any(run.report.items is None for run in runs) else {"e2el_ms": LATENCIES["e2el_ms"]}


def latencies(runs: Runs) -> list[Chart]:
    """A CDF of each metric in `LATENCIES`, with what is in none; of one run with its p50 and p99."""
    lost = [_lost(run, alone=len(runs) == 1) for run in runs if run.report.requests.failed]
    found = [
        parts.cdf(
            title,
            [
                Curve(
                    name if len(runs) == 1 else run.name,
                    metrics.sample(run.measured, f"{name}_ms", run.rules),
                    run.place,
                    run.origin,
                )
                for run in runs
            ],
            f"{name} (ms)",
            id=name,
        )
        for name, title in ((metric.removesuffix("_ms"), title) for metric, title in latency_titles(runs).items())
    ]
    return [
        msgspec.structs.replace(
            chart,
            marks=_percentiles(runs[0].report.metrics[metric]) if len(runs) == 1 else (),
            note=" ".join(filter(None, [*lost, chart.note])),
        )
        for metric, chart in zip(latency_titles(runs), found, strict=True)
    ]


def _lost(run: Shown, *, alone: bool) -> str:
    """The requests that are in no curve, and what share of all they are."""
    ok, failed = run.report.requests.ok, run.report.requests.failed
    of = "" if alone else f"{run.name}: "
    return f"{of}{ok} requests; {failed} more failed and are in no curve: {share(failed, ok + failed)}."


def _percentiles(summary: Summary) -> list[Mark]:
    """p50 and p99 as lines across a CDF."""
    known = {"p50": summary.p50, "p99": summary.p99}
    return [Mark("x", value, f"{name} {number(value)} ms") for name, value in known.items() if value is not None]


def over_time(runs: Runs) -> tuple[list[Chart], list[str]]:
    """Charts over one axis of time. Those of the server and its GPUs only where one of the runs has samples of them,
    and holds anything but zero; and the titles of those that do not."""
    charts = [
        msgspec.structs.replace(_chart(runs, "Requests a second", "requests/s", _rates), id="rates"),
        _chart(runs, "In flight", "requests, sessions" if _in_sessions(runs) else "requests", _in_flight),
        _ttft(runs),
        _chart(runs, "Server's requests", "requests", lambda run: _sampled(run, QUEUE)),
        _chart(runs, "KV cache", "used (%)", _kv_cache),
        _chart(runs, "Preemptions", "preemptions/s", _preemptions),
        msgspec.structs.replace(_chart(runs, "GPU power", "power (W)", _power), id="power"),
    ]
    there = [chart for number, chart in enumerate(charts) if chart.series or number < 3]
    empty = [chart.title for chart in there[3:] if not any(any(series.y) for series in chart.series)]
    return [chart for chart in there if chart.title not in empty], empty


def _in_sessions(runs: Runs) -> bool:
    return any(bool((run.measured.turn > 0).any()) for run in runs)


def _chart(runs: Runs, title: str, y_label: str, curves: Callable[[Shown], Sequence[Drawn]]) -> Chart:
    most = _most(runs)
    drawn, whole = [], True
    for run in runs:
        for place, (what, kind, x, y) in enumerate(curves(run)):
            kept = series.thinned(np.asarray(x, np.float64), np.asarray(y, np.float64), most)
            whole = whole and len(kept) == len(x)
            drawn.append(_series(runs, run, place, (what, kind, x[kept], y[kept])))
    return Chart(
        title=title,
        x_label=SECONDS,
        y_label=y_label,
        series=drawn,
        origin=_origin(runs),
        shades=_shades(runs),
        sync=TIME,
        note="" if whole else THINNED.format(most=most),
    )


def _most(runs: Runs) -> int:
    return max(FEWEST_POINTS, series.MOST_OTHERS // len(runs))


def _series(runs: Runs, run: Shown, number: int, drawn: Drawn, labels: Sequence[str] | None = None) -> Series:
    what, kind, x, y = drawn
    alone = len(runs) == 1
    return Series(
        name=what if alone else f"{run.name}: {what}",
        x=rounded(x),
        y=rounded(y),
        kind=kind,
        labels=labels,
        group="" if alone else run.name,
        colour=number if alone else run.place,
        dashed=number % 2 == 1,
    )


def _origin(runs: Runs) -> str:
    return parts.shared_origin(run.origin for run in runs)


def _shades(runs: Runs) -> list[Shade]:
    """Phases of the load and stalls of a run; of several runs nobody could tell whose they are."""
    if len(runs) > 1:
        return []
    report = runs[0].report
    window = report.steady.window if report.steady is not None else None
    steady = [] if window is None else [Shade(window.from_s, window.to_s, "steady state")]
    return [*steady, *(Shade(phase.start_s, phase.end_s, phase.name) for phase in report.phases)] + [
        Shade(stall.start_s, stall.end_s, "server stalled", "bad") for stall in report.stalls
    ]


def _rates(run: Shown) -> list[Drawn]:
    flows: Mapping[str, NDArray[np.int64]] = series.flows(run.measured)
    ended = run.measured.done_ns != -1
    if (failed := ended & ~run.measured.ok).any():
        flows = {**flows, "failed": run.measured.done_ns[failed]}
    drawn: list[Drawn] = []
    bins = min(series.MOST_BINS, max(FEWEST_BINS, len(run.measured) // IN_A_BIN))
    for what, at_ns in flows.items():
        edges, per_s = series.rates(at_ns, run.end_s, bins)
        drawn.append((what, "step", edges, np.append(per_s, per_s[-1:])))
    return drawn


def _in_flight(run: Shown) -> list[Drawn]:
    measured = run.measured
    lines = {"requests in flight": series.in_flight(measured if run.under_way is None else run.under_way)}
    if _in_sessions([run]):
        lines["sessions open"] = metrics.under_way(*sessions.opened(measured))
        lines["sessions thinking"] = metrics.under_way(*sessions.thinking(measured))
    return [(what, "step", at_s, count) for what, (at_s, count) in lines.items()]


def _ttft(runs: Runs) -> Chart:
    """ttft of each request at its due time."""
    values = [(run, *series.ttft(run.measured, run.rules)) for run in runs]
    dots = [(run, rows, run.measured.scheduled_ns[rows] / 1e9, ttft_ms) for run, rows, ttft_ms in values]
    chart = _dots(runs, dots, "ttft of each request, at its due time", SECONDS)
    return msgspec.structs.replace(chart, shades=_shades(runs), sync=TIME)


def by_prompt(runs: Runs) -> Chart | None:
    """ttft against prompt length; None where prompts are about one length."""
    dots = []
    for run in runs:
        prompts = slices.prompts(run.measured, run.rules)
        if prompts is not None:
            order = np.argsort(prompts.tokens, kind="stable")
            dots.append((run, prompts.rows[order], prompts.tokens[order].astype(np.float64), prompts.ttft_ms[order]))
    return _dots(runs, dots, "ttft by prompt length", "prompt length (tokens)") if dots else None


def _dots(runs: Runs, dots: Sequence[tuple[Shown, NDArray[np.int64], Values, Values]], title: str, x: str) -> Chart:
    """ttft in ms of rows (n,) at x (n,), a dot a request."""
    most = _most(runs)
    drawn, whole = [], True
    for run, rows, at, ttft_ms in dots:
        kept = series.thinned(at, ttft_ms, most)
        whole = whole and len(kept) == len(at)
        labels = [f"request {key}" for key in run.measured.id[rows[kept]].tolist()]
        drawn.append(_series(runs, run, 0, ("ttft", "points", at[kept], ttft_ms[kept]), labels))
    return Chart(
        title=title,
        x_label=x,
        y_label="ttft (ms)",
        series=drawn,
        origin=_origin(runs),
        log=("y",),
        note="" if whole else THINNED.format(most=most),
    )


def _inside(run: Shown) -> Samples:
    return [(at_s, sample) for at_s, sample in run.samples if 0 <= at_s <= run.end_s]


def _sampled(run: Shown, names: Sequence[str]) -> list[Drawn]:
    """The server's own series of those names, as far as it has them."""
    inside = _inside(run)
    drawn: list[Drawn] = []
    for name in names:
        points = [(at_s, sample.metrics[name]) for at_s, sample in inside if name in sample.metrics]
        if points:
            drawn.append((name, "line", *_columns(points)))
    return drawn


def _kv_cache(run: Shown) -> list[Drawn]:
    return [("KV cache", kind, at_s, 100 * used) for _, kind, at_s, used in _sampled(run, [KV_CACHE])]


def _preemptions(run: Shown) -> list[Drawn]:
    """A counter: from a sample to the next, how much it grew a second; the last stretch has an end of its own."""
    points = [(at_s, s.metrics[PREEMPTIONS]) for at_s, s in run.samples if PREEMPTIONS in s.metrics]
    grown = [
        (max(0.0, from_s), min(to_s, run.end_s), max(0.0, later - earlier) / (to_s - from_s))
        for (from_s, earlier), (to_s, later) in pairwise(points)
        if to_s > max(0.0, from_s) and from_s <= run.end_s
    ]
    if not grown:
        return []
    _, end_s, per_s = grown[-1]
    return [("preemptions", "step", *_columns([*((from_s, each) for from_s, _, each in grown), (end_s, per_s)]))]


def _power(run: Shown) -> list[Drawn]:
    """Each GPU's."""
    points: dict[int, list[tuple[float, float]]] = {}
    for at_s, sample in _inside(run):
        for gpu in sample.gpus:
            if gpu.power_w is not None:
                points.setdefault(gpu.index, []).append((at_s, gpu.power_w))
    return [(f"GPU {index}", "line", *_columns(each)) for index, each in sorted(points.items())]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[Values, Values]:
    at_s, values = zip(*points, strict=True)
    return np.array(at_s, np.float64), np.array(values, np.float64)


def timelines(run: Shown, rows: NDArray[np.int64]) -> Chart:
    """When each event of these requests (r,) arrived since the request was sent; a row a request, in their order."""
    firsts: list[tuple[float, int, str]] = []
    others: list[tuple[float, int, str]] = []
    whole = True
    for rank, row in enumerate(rows.tolist(), 1):
        sent_ns, key = int(run.measured.sent_ns[row]), int(run.measured.id[row])
        at_s = (run.measured.arrivals_ns(row) - sent_ns) / 1e9
        kept = thinned_events(at_s)
        whole = whole and len(kept) == len(at_s)
        points = [(float(at_s[event]), rank, f"request {key}, event {event + 1}") for event in kept.tolist()]
        firsts += points[:1]
        others += points[1:]
    drawn = []
    for place, (what, points) in enumerate({"first event": firsts, "later events": others}.items()):
        points.sort()
        x, y, labels = zip(*points, strict=True) if points else ((), (), ())
        drawn.append(
            Series(name=what, x=rounded(np.array(x)), y=list(y), kind="points", labels=list(labels), colour=1 - place)
        )
    rule = (
        f"Of a reply of more than {MOST_EVENTS} events: the first, the last, those around its {LONGEST_GAPS} longest "
        "gaps, and evenly some of the others."
    )
    return Chart(
        title="Token timelines of the slowest requests",
        x_label="time since the request was sent (s)",
        y_label="rank in the table",
        series=drawn,
        origin=run.origin,
        note="" if whole else rule,
    )


def thinned_events(at_s: Values) -> NDArray[np.int64]:
    """Which of the events at those times (n,) to draw."""
    if len(at_s) <= MOST_EVENTS:
        return np.arange(len(at_s))
    longest = np.argsort(np.diff(at_s), kind="stable")[-LONGEST_GAPS:]
    others = np.arange(0, len(at_s), -(-len(at_s) // (MOST_EVENTS - 2 * LONGEST_GAPS)))
    return np.unique(np.concatenate((longest, longest + 1, others, [len(at_s) - 1])))
