"""What the live view shows of a run, made from beside it once a second; the clients do nothing for it but count."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

from loadgen.clock import now_ns
from loadgen.live_view import MAX_SPARK, Picture
from loadgen.monitor.frame import Frame, lines
from loadgen.monitor.messages import Expected, Live, View
from loadgen.monitor.server_view import ServerSample
from loadgen.monitor.totals import CountedRecord, Totals
from loadgen.rundir import Manifest
from loadgen.rundir.outcomes import AS_PLANNED

RECENT_S = 10.0
RATE_FRAMES = 10  # the rate shown is that of the last ones, a second each
QUANTILES = {"p50": 0.50, "p99": 0.99}


class Recent:
    """ttft of the replies that ended in the last RECENT_S seconds."""

    def __init__(self) -> None:
        self._ended: deque[tuple[int, float]] = deque()  # done_ns since t = 0, ttft in ms

    def add(self, record: CountedRecord) -> None:
        sent, first, done = record.sent_ns, record.first_token_ns, record.done_ns
        if record.phase == "measured" and record.outcome == "ok" and None not in (sent, first, done):
            assert sent is not None and first is not None and done is not None
            self._ended.append((done, (first - sent) / 1e6))
            while self._ended[0][0] < done - RECENT_S * 1e9:  # also of a run in the background, which nobody looks at
                self._ended.popleft()

    def quantiles(self, now_ns: float) -> dict[str, float | None]:
        """By the names of QUANTILES; None where no reply ended. now_ns: since t = 0."""
        since = now_ns - RECENT_S * 1e9
        return quantiles([ttft for done, ttft in self._ended if done > since])


def quantiles(values: Sequence[float]) -> dict[str, float | None]:
    """By the names of QUANTILES, with linear interpolation, as the report has them."""
    ordered = sorted(values)

    def quantile(part: float) -> float | None:
        if not ordered:
            return None
        at = part * (len(ordered) - 1)
        below = ordered[math.floor(at)]
        return below + (at % 1) * (ordered[math.ceil(at)] - below)

    return {name: quantile(part) for name, part in QUANTILES.items()}


class Course:
    """How a run goes: makes the frames, each of what came since the one before."""

    def __init__(self, expected: Expected, manifest: Manifest) -> None:
        self._expected, self._manifest = expected, manifest
        self._before = Live(planned=None, in_flight=0)
        self._tokens: deque[float | None] = deque(maxlen=MAX_SPARK)
        self._recent: deque[tuple[float, float]] = deque(maxlen=RATE_FRAMES)  # tokens, in how many seconds
        self._ttft: dict[str, deque[float | None]] = {name: deque(maxlen=MAX_SPARK) for name in QUANTILES}

    def frame(
        self, live: Live, totals: Totals, ttft_ms: Mapping[str, float | None], sample: ServerSample | None
    ) -> Frame:
        """ttft_ms: the quantiles of the last seconds."""
        manifest = self._manifest
        passed_s = live.elapsed_s - self._before.elapsed_s
        if passed_s > 0.1:  # the last beat of a run may come just after another
            events = max(0, live.events - self._before.events)
            self._tokens.append(events / passed_s * totals.tokens_per_event)
            self._recent.append((events * totals.tokens_per_event, passed_s))
            for name, value in ttft_ms.items():
                self._ttft[name].append(value)
            self._before = live
        failed = {name: count for name, count in totals.outcomes.items() if count and name not in AS_PLANNED}
        if live.failed > sum(failed.values()):  # their records are still to come, or on other machines
            failed["others" if failed else "in all"] = live.failed - sum(failed.values())
        ratio = self._done_ratio(live, totals)
        return Frame(
            server=f"{manifest.backend} {manifest.model}",
            load=manifest.arrival,
            emulated=manifest.emulated,
            stopping=live.stopping,
            elapsed_s=live.elapsed_s,
            left_s=self._left_s(live, totals, ratio),
            done_ratio=ratio,
            planned=live.planned,
            sent=live.done + live.in_flight,
            done=live.done,
            in_flight=live.in_flight,
            falling_per_s=live.falling_per_s,
            failed=failed,
            tokens_per_s=sum(tokens for tokens, _ in self._recent) / (sum(each for _, each in self._recent) or 1.0),
            tokens_history=tuple(self._tokens),
            ttft_ms=ttft_ms,
            ttft_history={name: tuple(history) for name, history in self._ttft.items()},
            cpu_ratio=live.cpu_ratio,
            loop_lag_ms=live.loop_lag_ms,
            sample=sample,
            sample_age_s=0.0 if sample is None else (now_ns() - sample.end_ns) / 1e9,
        )

    def _done_ratio(self, live: Live, totals: Totals) -> float | None:
        """The share of requests that is done, with what replies in flight have shown; the share of the time where
        nobody knows how many requests there are."""
        if live.planned is None:
            duration_s = self._expected.duration_s
            return None if not duration_s else min(1.0, live.elapsed_s / duration_s)
        reply_events = totals.events_per_reply or self._expected.reply_tokens
        under_way = min(live.in_flight, live.events_in_flight / reply_events) if reply_events else 0.0
        return min(1.0, (live.done + under_way) / max(1, live.planned))

    def _left_s(self, live: Live, totals: Totals, ratio: float | None) -> float | None:
        """Until the last request is due, and a reply takes what replies took; else as long as such a part of the run
        took."""
        sent_until_s = self._expected.duration_s if live.planned is None else self._expected.last_due_s
        if sent_until_s is not None and sent_until_s > live.elapsed_s and not live.stopping:
            return sent_until_s - live.elapsed_s + (totals.reply_s or 0.0)
        if not ratio or ratio < 0.01 or live.stopping:
            return None
        return live.elapsed_s * (1 - ratio) / ratio


class Drawing:
    """The view of one run. `recent` is to be given its records."""

    def __init__(self, view: View, manifest: Manifest) -> None:
        self.recent = Recent()
        self._course, self._picture = Course(view.expected, manifest), Picture(view.fd)

    def show(self, live: Live, totals: Totals, sample: ServerSample | None) -> None:
        latest = live.latest_ttft_ms
        ttft_ms = quantiles(latest) if latest else self.recent.quantiles(live.elapsed_s * 1e9)
        self._picture.show(partial(lines, self._course.frame(live, totals, ttft_ms, sample)))

    def end(self, erase: bool) -> None:
        self._picture.end(erase)
