"""One description of a load, for a run, a prediction, a plan and a manifest alike: what is sent, and when. Pure."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from loadgen.load import arrivals
from loadgen.load.arrivals import Arrival, Streams
from loadgen.load.choices import Cancels
from loadgen.load.lengths import Law, Lengths, Stream, WorkloadError
from loadgen.load.sessions import Sessions, SessionShapes, Turns
from loadgen.load.shapes import DrawnShapes, Prefix, Shapes, TraceShapes
from loadgen.rundir import Phase

if TYPE_CHECKING:  # numpy is loaded to draw: options are read without it
    import numpy as np
    from numpy.typing import NDArray

    from loadgen.load.traces import Trace

TYPICAL = 1000  # requests that show what is usual
USUAL_PACE_MS = 40.0  # between two tokens of a reply


class TraceSource(msgspec.Struct, frozen=True, kw_only=True):
    """Requests as somebody had them, from a file; options as `traces.read` has them. longest_tokens: what prompt and
    reply may be together; longer requests are left out, and counted."""

    path: str
    format: str | None = None
    speed: float = 1.0
    limit: int | None = None
    from_s: float = 0.0
    block_tokens: int | None = None
    longest_tokens: int | None = None

    def read(self) -> Trace:
        """Raises WorkloadError. The file is read once, though its length is looked at before the server's is known."""
        if self.longest_tokens is None:
            return _file(self)
        return _fitting(msgspec.structs.replace(self, longest_tokens=None), self.longest_tokens)


@functools.lru_cache(maxsize=1)
def _file(source: TraceSource) -> Trace:
    from loadgen.load import traces

    return traces.read(Path(source.path), source.format, source.speed, source.limit, source.from_s, source.block_tokens)


@functools.lru_cache(maxsize=1)
def _fitting(source: TraceSource, longest_tokens: int) -> Trace:
    return _file(source).up_to(longest_tokens)


@functools.lru_cache(maxsize=1)
def _trace_shapes(source: TraceSource) -> TraceShapes:
    return TraceShapes(source.read())


@functools.lru_cache(maxsize=1)
def _turns(sessions: Sessions, count: int, seed: int) -> Turns:
    return sessions.drawn(count, seed)


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """requests: how many at the most; duration_s: until when they are sent; None: no such limit. streams: a closed loop
    instead of `arrival`. trace: arrivals and lengths as somebody had them; in a closed loop its lengths alone.
    sessions: then `requests` is how many of them, and they are what arrives and what a closed loop keeps going; prompt
    lengths are what a turn adds. cancel_ratio: of the requests that the client gives up. The same seed gives the same
    requests at the same times."""

    arrival: Arrival
    input_tokens: Law
    output_tokens: Law
    requests: int | None = None
    duration_s: float | None = None
    streams: Streams | None = None
    prefix: Prefix | None = None
    trace: TraceSource | None = None
    sessions: Sessions | None = None
    cancel_ratio: float = 0.0
    seed: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether all prompts have one length and share nothing."""
        return self.input_tokens.kind == "fixed" and not (self.prefix or self.trace or self.sessions)

    @property
    def shares(self) -> bool:
        """Whether prompts begin like earlier ones, as far as the load says so."""
        if self.trace is not None:
            return self.trace.read().block_tokens > 0
        return self.prefix is not None or self.sessions is not None

    @property
    def keeps_arriving(self) -> bool:
        """Whether single requests come at times of their own, so that a server may fall behind them."""
        burst = self.arrival.kind == "burst" and self.trace is None
        return not (burst or self.streams is not None or self.sessions is not None)

    @property
    def when(self) -> str:
        """The arrivals in a word, as manifests and reports have it."""
        if self.streams is not None:
            return f"concurrency:{self.streams}"
        return str(self.arrival) if self.trace is None else f"trace:{self.trace.read().format}"

    def within(self, longest_tokens: int | None) -> Load:
        """Of a load with a trace: without the requests that are longer, and with its number of requests. Raises
        WorkloadError."""
        assert self.trace is not None
        trace = msgspec.structs.replace(self.trace, longest_tokens=longest_tokens)
        return msgspec.structs.replace(self, trace=trace, requests=len(trace.read()))

    def due_ns(self) -> NDArray[np.int64]:
        """When each request is due, or each session begins, ns since t = 0, ascending; empty for a closed loop, where
        replies decide."""
        import numpy as np

        if self.streams is not None:
            return np.empty(0, np.int64)
        if self.trace is not None:
            due_ns = self.trace.read().due_ns
            return due_ns if self.duration_s is None else due_ns[due_ns < self.duration_s * 1e9]
        return arrivals.draw(self.arrival, self.requests, self.duration_s, self.seed)

    @property
    def planned(self) -> int | None:
        """How many requests it has; None where that hangs on the server."""
        if (turns := self.turns()) is not None:
            ends = self.arrival.stretches and self.streams is None  # perhaps before all sessions have begun
            return int(turns.first[len(self.due_ns())]) if ends else turns.total
        if self.streams is None:
            return len(self.due_ns())
        if self.duration_s is not None:
            return None
        return self.requests if self.trace is None else len(self.trace.read())

    @property
    def left_out(self) -> str:
        """What of the trace, or of the conversations, is not sent, and why, as a clause; empty for none."""
        if self.sessions is not None:
            return self.sessions.left_out
        return "" if self.trace is None else str(self.trace.read().left_out)

    @property
    def notes(self) -> tuple[str, ...]:
        """What of the trace is played otherwise than it stands there, or to be doubted: sentences without their end."""
        return () if self.trace is None else self.trace.read().notes

    @property
    def at_once(self) -> int:
        """Requests in flight together at the least: the burst, or the closed loop's most."""
        if self.streams is not None:
            return min(self.streams.most, self.requests or self.streams.most)
        return (self.requests or 0) if self.arrival.kind == "burst" and self.trace is None else 1

    def events_per_s(self, pace_ms: float | None, *, streamed: bool = True) -> float:
        """The most events a second that it brings with it, from a server that keeps up. pace_ms: between two events of
        a reply, at the least; None: as is usual. streamed: a reply has an event a token; else one. Raises
        WorkloadError."""
        import numpy as np

        reply = self.typical_tokens()[1] if streamed else 1
        pace_s = (pace_ms or USUAL_PACE_MS) / 1000 if streamed else 1.0
        if self.streams is not None:
            return self.at_once / pace_s
        if self.arrival.kind == "burst" and self.trace is None:
            return min(self.at_once / pace_s, (self.planned or 0) * reply)
        due_s = self.due_ns() / 1e9
        if not len(due_s):
            return 0.0
        tokens = reply * (self.planned or len(due_s)) / len(due_s)  # of a request, or of a session with its turns
        life_s = max(1.0, tokens * pace_s)  # over which the events of what came together are spread
        busiest = int(np.unique(due_s // life_s, return_counts=True)[1].max())
        return min(busiest * tokens / life_s, len(due_s) / pace_s)

    def turns(self) -> Turns | None:
        """The turns of its sessions."""
        return None if self.sessions is None else _turns(self.sessions, self.requests or 0, self.seed)

    def cancels(self) -> Cancels | None:
        """Which requests the client gives up; None where it gives none up."""
        return Cancels(self.cancel_ratio, self.seed) if self.cancel_ratio else None

    def shapes(self) -> Shapes:
        """What each request asks for. Raises WorkloadError."""
        if self.trace is not None:
            return _trace_shapes(self.trace)
        drawn = DrawnShapes(self.input_tokens, self.output_tokens, self.prefix, self.seed)
        return drawn if (turns := self.turns()) is None else SessionShapes(turns, drawn)

    def typical_tokens(self) -> tuple[int, int]:
        """Prompt and reply of a request as most are: the medians of the first ones. Of conversations, whose lengths a
        load does not know, what a usual request has. Raises WorkloadError."""
        import numpy as np

        if self.sessions is not None and self.sessions.turns is None:
            return self.input_tokens.least, self.output_tokens.least
        shapes = self.shapes()
        first = [shapes.shape(number) for number in range(min(self.planned or TYPICAL, TYPICAL))]
        prompt, reply = np.median([each[:2] for each in first], axis=0) if first else (1, 1)
        return int(prompt), int(reply)

    def longest_tokens(self) -> int:
        """Prompt and reply of the longest request, at the most. Raises WorkloadError where nothing bounds it."""
        if self.trace is not None:
            trace = self.trace.read()
            return int((trace.input_tokens + trace.output_tokens).max(initial=0))
        if isinstance(shapes := self.shapes(), SessionShapes):
            return shapes.longest_tokens()
        return self._most("input") + self._most("output")

    def longest_reply_tokens(self) -> int | None:
        """Of all its replies; None where nothing bounds them. Raises WorkloadError for a file that cannot be read."""
        if self.trace is not None:
            return int(self.trace.read().output_tokens.max(initial=0))
        if self.output_tokens.kind == "fixed":
            return self.output_tokens.least
        return Lengths(self.output_tokens, self.seed, "output").most(self._drawn)

    def shortest_prompt_tokens(self, warmup: int) -> int:
        """Of the prompts that are drawn, at the least; `warmup` requests take the lengths of the first. Raises
        WorkloadError."""
        if self.input_tokens.kind == "fixed":
            return self.input_tokens.least
        drawn = self._drawn
        return Lengths(self.input_tokens, self.seed, "input").least(None if drawn is None else max(drawn, warmup))

    @property
    def _drawn(self) -> int | None:
        """Requests whose lengths may be drawn, at the most; None where that hangs on the server."""
        return self.planned if self.streams is None or self.duration_s is None else self.requests

    def _most(self, name: Stream) -> int:
        law = self.input_tokens if name == "input" else self.output_tokens
        if law.kind == "fixed":
            return law.least
        most = Lengths(law, self.seed, name).most(self._drawn)
        if most is None:
            raise WorkloadError(
                f"how many requests a closed loop sends in --duration is not known, so --{name}-tokens {law} needs "
                "bounds: add :MIN:MAX."
            )
        return most

    def phases(self) -> list[Phase]:
        """The parts of the load that are reported by themselves; none where it is the same throughout."""
        if self.streams is not None:
            return self.streams.phases() if self.sessions is None else self.streams.phases("sessions")
        if self.trace is not None:
            return []
        return self.arrival.phases() if self.sessions is None else self.arrival.phases("sessions")
