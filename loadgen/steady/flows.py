"""The records of a run as `keeping_up` looks at them. Pure but for a file of lengths, which a law may name."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from loadgen.load import lengths
from loadgen.load.load import parse_arrival, parse_streams
from loadgen.rundir import Manifest
from loadgen.rundir.outcomes import OUTCOMES
from loadgen.rundir.records import RequestTable
from loadgen.steady.keeping_up import Flow
from loadgen.steady.window import Stamps

RATED = ("constant", "poisson", "gamma")  # arrivals with one rate throughout
JUDGED = (*RATED, "ramp", "steps", "trace")  # arrivals that come whether or not others have ended
UNANSWERED = ("timeout", "cancelled", "node_lost")  # outcomes of requests that a server still had to answer
LAW_DRAWS = 16_384  # of which its mean is taken
AS_ASKED_RATIO = 0.01  # replies of other lengths than asked do not follow the law

Spans = tuple[NDArray[np.int64], NDArray[np.int64]]


def of_requests(measured: RequestTable, manifest: Manifest) -> Flow | None:
    """None where arrivals are no flow of their own: in closed loops, bursts, and of the turns of sessions."""
    kind = manifest.arrival.partition(":")[0]
    if kind not in JUDGED or (measured.turn > 0).any():
        return None
    unanswered = np.isin(measured.outcome, [OUTCOMES.index(outcome) for outcome in UNANSWERED])
    rows = np.flatnonzero((measured.ok | measured.abandoned | unanswered) & (measured.sent_ns != -1))
    rows = rows[np.argsort(measured.sent_ns[rows], kind="stable")]
    arrived_s = measured.sent_ns[rows] / 1e9
    ok = (measured.ok | measured.abandoned)[rows]
    streamed = bool((measured.events[rows] > 1).any())
    first_s = measured.first_token_ns[rows] / 1e9 if streamed else arrived_s
    known = measured.output_tokens[rows]
    asked = np.where(measured.abandoned, measured.events, measured.asked_tokens)[rows]
    tokens = np.where(known > 0, known, asked).astype(np.float64)
    flow = Flow(
        arrived_s=arrived_s,
        first_s=np.where(ok, np.maximum(first_s, arrived_s), np.inf),
        done_s=np.where(ok, measured.done_ns[rows] / 1e9, np.inf),
        tokens=tokens if tokens.any() else None,
        rate_per_s=_rate_per_s(manifest.arrival),
        mean_tokens=_mean_tokens(manifest, tokens[ok], measured.asked_tokens[rows][ok]),
    )
    return _with_unrecorded(flow, measured.id[rows], measured.id, manifest.requests_planned)


def _with_unrecorded(flow: Flow, ids: NDArray[np.int64], recorded: NDArray[np.int64], planned: int | None) -> Flow:
    """With the requests that a killed client had under way, of which it left no record: sent, and begun to be answered,
    as those around them were, by their numbers. ids: of the flow's requests; recorded: of all."""
    ended = np.isfinite(flow.done_s)
    if planned is None or len(recorded) >= planned or not ended.any() or ids.min() < 0 or ids.max() >= planned:
        return flow
    lost = np.setdiff1d(np.arange(ids[ended].max()), recorded)
    place = np.argsort(ids[ended])

    def between(column: NDArray[np.float64]) -> NDArray[np.float64]:
        around = column[ended][place]
        return np.concatenate((column, np.interp(lost, ids[ended][place], around)))

    arrived_s, first_s = between(flow.arrived_s), between(flow.first_s)
    order = np.argsort(arrived_s, kind="stable")
    endless, usual = np.full(len(lost), np.inf), np.full(len(lost), 0.0 if flow.tokens is None else flow.tokens.mean())
    return flow._replace(
        arrived_s=arrived_s[order],
        first_s=np.maximum(first_s, arrived_s)[order],
        done_s=np.concatenate((flow.done_s, endless))[order],
        tokens=None if flow.tokens is None else np.concatenate((flow.tokens, usual))[order],
    )


def of_sessions(spans: Spans, manifest: Manifest) -> Flow | None:
    """The flow of whole conversations, from the begin to the end of each."""
    kind = manifest.arrival.partition(":")[0]
    if kind not in JUDGED:
        return None
    order = np.argsort(spans[0], kind="stable")
    begin_s, end_s = spans[0][order] / 1e9, spans[1][order] / 1e9
    return Flow(begin_s, begin_s, end_s, rate_per_s=_rate_per_s(manifest.arrival))


def slots(arrival: str) -> int | None:
    """How many a closed loop keeps in flight, at the most; None where there is none."""
    kind, _, text = arrival.partition(":")
    if kind != "concurrency":
        return None
    try:
        streams = parse_streams(text)
    except ValueError:  # a manifest may be anybody's
        return None
    return max(streams.first, streams.last)


def changes(arrival: str) -> bool:
    """Whether the load itself does, so that no part of it is steady."""
    kind, _, text = arrival.partition(":")
    return kind in ("ramp", "steps", "trace") or (kind == "concurrency" and ":" in text)


def kept(table: RequestTable, manifest: Manifest) -> RequestTable:
    """The measured requests, and those of a warm-up that were under way beside them since it handed its slots over."""
    measured = table.measured()
    if not manifest.hands_over or not len(measured):
        return measured
    mask = table.done_ns > _first_sent_ns(measured)
    mask[len(table) - len(measured) :] = True
    return table.select(mask)


def _first_sent_ns(measured: RequestTable) -> int:
    sent_ns = measured.sent_ns[measured.sent_ns != -1]
    return int(sent_ns.min()) if len(sent_ns) else 0


def stamps(measured: RequestTable, manifest: Manifest) -> Stamps:
    """The times of the requests that ended ok. measured: with what `kept` adds to them, where a warm-up handed over."""
    handed_s = _first_sent_ns(measured.measured()) / 1e9 if manifest.hands_over else None
    first_ns, last_ns = measured.first_token_ns, measured.last_token_ns
    if not (first_ns != -1).any():  # replies came whole
        first_ns = last_ns = measured.done_ns
    rows = np.flatnonzero(measured.ok & (measured.sent_ns != -1) & (first_ns != -1))
    rows = rows[np.argsort(measured.sent_ns[rows], kind="stable")]
    times = (measured.sent_ns, first_ns, last_ns, measured.done_ns)
    sent_s, first_s, last_s, done_s = (each[rows] / 1e9 for each in times)
    tokens = np.maximum(measured.output_tokens[rows], 0).astype(np.float64)
    counted, asked = measured.prompt_tokens[rows], measured.asked_prompt_tokens[rows]
    prompt_tokens = np.maximum(np.where(counted >= 0, counted, asked), 0).astype(np.float64)
    return Stamps(
        rows, sent_s, first_s, last_s, done_s, tokens, slots(manifest.arrival), prompt_tokens, session_s(measured),
        handed_s, _mean_tokens(manifest, tokens, measured.asked_tokens[rows]),
    )  # fmt: skip


def session_s(measured: RequestTable) -> float:
    """How long the usual session lasts; 0 of single requests."""
    rows = np.flatnonzero(measured.ok & (measured.session >= 0))
    if not (measured.turn[rows] > 1).any():
        return 0.0
    numbers, session = np.unique(measured.session[rows], return_inverse=True)
    begin_ns, end_ns = np.full(len(numbers), np.iinfo(np.int64).max), np.zeros(len(numbers), np.int64)
    np.minimum.at(begin_ns, session, measured.sent_ns[rows])
    np.maximum.at(end_ns, session, measured.done_ns[rows])
    return float(np.median(end_ns - begin_ns)) / 1e9


def cut(seen: Stamps, measured: RequestTable, to_s: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """When each reply's tokens end and how many they are, (n,) each, those after `to_s` left out."""
    last_s, tokens = seen.last_s.copy(), seen.tokens.copy()
    for at in np.flatnonzero((seen.first_s < to_s) & (seen.last_s > to_s)).tolist():
        arrived_ns = measured.arrivals_ns(int(seen.rows[at]))
        if len(arrived_ns) > 1:  # gaps may not be kept
            tokens[at] *= np.count_nonzero(arrived_ns <= to_s * 1e9) / len(arrived_ns)
            last_s[at] = to_s
    return last_s, tokens


def _rate_per_s(arrival: str) -> float | None:
    if arrival.partition(":")[0] not in RATED:
        return None
    try:
        return parse_arrival(arrival).rate or None
    except ValueError:  # a manifest may be anybody's
        return None


def _mean_tokens(manifest: Manifest, tokens: NDArray[np.float64], asked: NDArray[np.int64]) -> float | None:
    """The mean of the law that replies were drawn by; None where there is none, or replies were not as asked."""
    text, thinking = (manifest.config.get(name) for name in ("output_tokens", "thinking_tokens"))
    others = ("dataset", "trace", "workload")
    if not isinstance(text, str | int) or any(manifest.config.get(name) for name in others) or not asked.any():
        return None
    if abs(tokens - asked).sum() > AS_ASKED_RATIO * asked.sum():
        return None
    means = [_law_mean(str(each)) for each in (text, thinking) if each is not None]
    return None if None in means else sum(each for each in means if each is not None)


@functools.lru_cache(maxsize=64)
def _law_mean(text: str) -> float | None:
    try:
        law = lengths.parse(text)
        return float(lengths.Lengths(law, 0, "output").first(LAW_DRAWS).mean()) if law.kind != "file" else None
    except lengths.WorkloadError:
        return None
