"""One description of a load, for a run, a prediction, a plan and a manifest alike: what is sent, and when. Arrival laws
are drawn in full before the clock starts; closed loops may grow. Pure."""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from backends.untrusted import escaped
from loadgen.load.choices import Adapters, Cancels, Priorities
from loadgen.load.images import Images
from loadgen.load.lengths import Law, Lengths, Stream, WorkloadError
from loadgen.load.sessions import Sessions, SessionShapes
from loadgen.load.shapes import DrawnShapes, Prefix, Shapes, TraceShapes
from loadgen.load.turns import Turns
from loadgen.rundir import MOST_PHASES, Phase

if TYPE_CHECKING:  # numpy is loaded to draw: options are read without it
    import numpy as np
    from numpy.typing import NDArray

    from loadgen.load.traces import Trace

TYPICAL = 1000  # requests that show what is usual
USUAL_PACE_MS = 40.0  # between two tokens of a reply
ArrivalKind = Literal["burst", "constant", "poisson", "gamma", "ramp", "steps"]
FORMS = "burst, constant:R, poisson:R, gamma:R:CV, ramp:R0:R1:SECONDS or steps:R@S,R@S,..."
RAMP_PHASES = 5  # that a ramp is reported in
LEAST_A_SLOT = 2  # measured requests, for a warm-up to hand its slots over


class Stretch(msgspec.Struct, frozen=True):
    """Some seconds in which the rate, in requests/s, goes evenly from one value to another."""

    seconds: float
    first: float
    last: float

    @property
    def requests(self) -> float:
        """How many are due in it, in the mean."""
        return self.seconds * (self.first + self.last) / 2


class Arrival(msgspec.Struct, frozen=True):
    """An arrival law. `rate` in requests/s; `cv`: coefficient of variation of the gaps (gamma), 1 = Poisson. ramp and
    steps are Poisson arrivals whose rate changes as `stretches` say, and end with the last of them."""

    kind: ArrivalKind
    rate: float = 0.0
    cv: float = 1.0
    stretches: tuple[Stretch, ...] = ()

    def __str__(self) -> str:
        if self.kind == "ramp":
            (ramp,) = self.stretches
            return f"ramp:{ramp.first:g}:{ramp.last:g}:{ramp.seconds:g}"
        if self.kind == "steps":
            return "steps:" + ",".join(f"{step.first:g}@{step.seconds:g}" for step in self.stretches)
        parts = {"burst": "", "gamma": f":{self.rate:g}:{self.cv:g}"}
        return self.kind + parts.get(self.kind, f":{self.rate:g}")

    @property
    def lasts_s(self) -> float | None:
        """When the law itself ends; None where it goes on."""
        return sum(each.seconds for each in self.stretches) if self.stretches else None

    def phases(self, what: str = "requests") -> list[Phase]:
        """The parts in which a changing rate is reported; none where it is one law throughout. what: arrives."""
        if self.kind == "ramp":
            (ramp,) = self.stretches
            return _ramp_phases(ramp.first, ramp.last, ramp.seconds, f"{what}/s")
        ends = list(itertools.accumulate((each.seconds for each in self.stretches), initial=0.0))
        return [
            Phase(f"{each.first:g} {what}/s", start, end)
            for each, (start, end) in zip(self.stretches, itertools.pairwise(ends), strict=True)
        ]


def _ramp_phases(first: float, last: float, seconds: float, unit: str) -> list[Phase]:
    def at(part: int) -> tuple[float, float]:
        return first + (last - first) * part / RAMP_PHASES, seconds * part / RAMP_PHASES

    pairs = itertools.pairwise(map(at, range(RAMP_PHASES + 1)))
    return [Phase(f"{low:g} to {high:g} {unit}", start, end) for (low, start), (high, end) in pairs]


_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"


def parse_arrival(text: str) -> Arrival:
    """'burst', 'constant:R', 'poisson:R', 'gamma:R:CV', 'ramp:R0:R1:SECONDS' or 'steps:R@S,R@S,...'. Raises ValueError
    with one sentence."""
    kind, _, rest = text.partition(":")
    numbers = rest.replace("@", ":").replace(",", ":") if kind == "steps" else rest
    forms = {
        "burst": "", "constant": _NUMBER, "poisson": _NUMBER, "gamma": f"{_NUMBER}:{_NUMBER}",
        "ramp": f"{_NUMBER}:{_NUMBER}:{_NUMBER}", "steps": f"{_NUMBER}@{_NUMBER}(,{_NUMBER}@{_NUMBER})*",
    }  # fmt: skip
    if kind not in forms or re.fullmatch(forms[kind], rest) is None or (kind == "burst" and text != kind):
        raise ValueError(f"arrival '{escaped(text)}' is not understood; use {FORMS} with R in requests per second.")
    values = [float(word) for word in numbers.split(":") if word]
    if kind == "burst":
        return Arrival("burst")
    if kind == "ramp":
        arrival = Arrival("ramp", stretches=(Stretch(values[2], values[0], values[1]),))
    elif kind == "steps":
        if len(values) > 2 * MOST_PHASES:
            raise ValueError(f"arrival steps has {len(values) // 2} steps; it may have {MOST_PHASES}.")
        pairs = zip(values[::2], values[1::2], strict=True)
        arrival = Arrival("steps", stretches=tuple(Stretch(seconds, rate, rate) for rate, seconds in pairs))
    elif kind == "gamma":
        arrival = Arrival("gamma", values[0], values[1])
    else:
        arrival = Arrival("constant" if kind == "constant" else "poisson", values[0])
    if arrival.stretches:
        if (
            min(each.seconds for each in arrival.stretches) <= 0
            or sum(each.requests for each in arrival.stretches) <= 0
        ):
            raise ValueError(f"arrival '{escaped(text)}' needs seconds above zero and a rate above zero somewhere.")
    elif arrival.rate <= 0 or arrival.cv <= 0:
        raise ValueError(f"arrival '{text}' needs a rate and a variation above zero.")
    return arrival


def draw_arrivals(arrival: Arrival, requests: int | None, duration_s: float | None, seed: int) -> NDArray[np.int64]:
    """Due times in nanoseconds since t = 0, ascending: `requests` of them, or all those before `duration_s`, or both; a
    law that ends by itself gives no more than it has.

    constant: k / rate. poisson, gamma: gaps of mean 1 / rate, the first one from t = 0. burst: all at 0. ramp, steps:
    Poisson arrivals of rate 1 at the times when so many requests are due in the mean (the inverse of the summed rate).
    The same seed gives the same times; a shorter schedule is the beginning of a longer one.
    """
    import numpy as np

    if requests is None and not arrival.stretches and (duration_s is None or arrival.kind == "burst"):
        raise ValueError("a schedule needs a number of requests, or a rate and a duration.")
    if arrival.kind == "burst":
        return np.zeros(requests or 0, np.int64)
    rng = np.random.default_rng((seed, 0xA771))
    # with a changing rate the clock counts requests due in the mean, and is turned into seconds at the end
    total = sum(each.requests for each in arrival.stretches)
    rate, end = (1.0, total) if arrival.stretches else (arrival.rate, duration_s)
    times: list[NDArray[np.float64]] = [np.empty(0)]
    count, last = 0, 0.0
    while (requests is None or count < requests) and (end is None or last < end):
        if arrival.kind == "constant":
            part = np.arange(count, count + 4096) / rate
        else:
            shape = arrival.cv**-2 if arrival.kind == "gamma" else 1.0
            part = last + np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), 4096))
        times.append(part)
        count += len(part)
        last = float(part[-1])
    seconds = np.concatenate(times)[:requests]
    if arrival.stretches:
        seconds = _when(arrival.stretches, seconds[seconds < total])
    if duration_s is not None:
        seconds = seconds[seconds < duration_s]
    return (seconds * 1e9).astype(np.int64)


def _when(stretches: tuple[Stretch, ...], due: NDArray[np.float64]) -> NDArray[np.float64]:
    """When so many requests are due in the mean, in seconds; shape (n,), as `due`, ascending."""
    import numpy as np

    before = np.cumsum([0.0, *(each.requests for each in stretches)])
    starts = np.cumsum([0.0, *(each.seconds for each in stretches)])
    seconds = np.empty(len(due))
    which = np.clip(np.searchsorted(before, due, side="right") - 1, 0, len(stretches) - 1)
    for index, stretch in enumerate(stretches):
        rest = due[which == index] - before[index]
        # first * t + slope * t^2 / 2 = rest, solved so that a slope of zero needs no case of its own
        slope = (stretch.last - stretch.first) / stretch.seconds
        root = np.sqrt(np.maximum(stretch.first**2 + 2 * slope * rest, 0.0))
        part = np.divide(2 * rest, stretch.first + root, out=np.zeros_like(rest), where=rest > 0)
        seconds[which == index] = starts[index] + np.minimum(part, stretch.seconds)
    return seconds


class Streams(msgspec.Struct, frozen=True):
    """A closed loop: how many requests are kept in flight, from `first` evenly to `last` within `seconds`."""

    first: int
    last: int
    seconds: float = 0.0

    def __str__(self) -> str:
        return str(self.last) if not self.seconds else f"{self.first}:{self.last}:{self.seconds:g}"

    @property
    def most(self) -> int:
        return max(self.first, self.last)

    def at(self, elapsed_s: float) -> int:
        """How many at that time. A stream begins, or ends, when the straight line passes its number."""
        if elapsed_s >= self.seconds:
            return self.last
        moved = (self.last - self.first) * max(0.0, elapsed_s) / self.seconds
        return self.first + (int(moved) if moved >= 0 else -int(-moved))

    def start_s(self, stream: int) -> float:
        """When stream `stream` (from 0) sends its first request."""
        if stream < self.first:
            return 0.0
        return self.seconds * (stream + 1 - self.first) / (self.last - self.first)

    def phases(self, what: str = "in flight") -> list[Phase]:
        """The parts in which a ramp is reported, and what comes after it. what: follows the numbers."""
        if not self.seconds:
            return []
        after = Phase(f"{self.last} {what}", self.seconds, None)
        return [*_ramp_phases(self.first, self.last, self.seconds, what), after]


def parse_streams(text: str | int) -> Streams:
    """A number, or 'FIRST:LAST:SECONDS'. Raises ValueError with one sentence."""
    match = re.fullmatch(rf"(\d{{1,9}})(?::(\d{{1,9}}):{_NUMBER})?", str(text))
    if match is None:
        raise ValueError(
            f"--concurrency '{escaped(str(text))}' is not understood; use a number, or FIRST:LAST:SECONDS for a ramp."
        )
    first, last, seconds = match.groups()
    if last is None:
        return Streams(int(first), int(first))
    streams = Streams(int(first), int(last), float(seconds))
    if min(streams.first, streams.last) < 1 or streams.seconds <= 0:
        raise ValueError(f"--concurrency '{text}' needs at least 1 request in flight and seconds above zero.")
    return streams if streams.first != streams.last else Streams(streams.last, streams.last)


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
def _drawn_ns(arrival: Arrival, requests: int | None, duration_s: float | None, seed: int) -> NDArray[np.int64]:
    due_ns = draw_arrivals(arrival, requests, duration_s, seed)
    due_ns.flags.writeable = False
    return due_ns


@functools.lru_cache(maxsize=1)
def _turns(sessions: Sessions, count: int, seed: int, lengths: tuple[Law, Law, Law | None]) -> Turns:
    input_tokens, output_tokens, first_tokens = lengths
    return sessions.drawn(count, seed, DrawnShapes(input_tokens, output_tokens, None, seed, first_tokens))


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """requests: how many at the most; duration_s: until when they are sent; None: no such limit. streams: a closed loop
    instead of `arrival`. trace: arrivals and lengths as somebody had them; in a closed loop its lengths alone.
    sessions: then `requests` is how many of them, and they are what arrives and what a closed loop keeps going; prompt
    lengths are what a turn adds; first_tokens: that of a session's first prompt, and a sub-agent's, where it is
    another law. thinking_tokens: of a reply, beside output_tokens of its answer. cancel_ratio: of the requests that
    the client gives up. adapters: that they ask for, of sessions each for one; priorities likewise. batch: texts of
    each request, whose lengths are those of one; None: one. images: beside each prompt. The same seed gives the same
    requests at the same times."""

    arrival: Arrival
    input_tokens: Law
    output_tokens: Law
    first_tokens: Law | None = None
    thinking_tokens: Law | None = None
    requests: int | None = None
    duration_s: float | None = None
    streams: Streams | None = None
    prefix: Prefix | None = None
    trace: TraceSource | None = None
    sessions: Sessions | None = None
    cancel_ratio: float = 0.0
    adapters: Adapters | None = None
    priorities: Priorities | None = None
    batch: Law | None = None
    images: Images | None = None
    seed: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether all prompts have one length and share nothing."""
        return self.input_tokens.kind == "fixed" and not (self.prefix or self.trace or self.sessions or self.batch)

    @property
    def shares(self) -> bool:
        """Whether prompts begin like earlier ones, as far as the load says so."""
        if self.trace is not None:
            return self.trace.read().block_tokens > 0
        return self.prefix is not None or self.sessions is not None

    @property
    def in_sessions(self) -> bool:
        """Whether its requests are turns that wait for each other."""
        return self.sessions is not None or (self.trace is not None and self.trace.read().turns is not None)

    @property
    def keeps_arriving(self) -> bool:
        """Whether single requests come at times of their own, so that a server may fall behind them."""
        burst = self.arrival.kind == "burst" and self.trace is None
        return not (burst or self.streams is not None or self.in_sessions)

    @property
    def when(self) -> str:
        """The arrivals in a word, as manifests and reports have it."""
        if self.streams is not None:
            return f"concurrency:{self.streams}"
        return str(self.arrival) if self.trace is None else f"trace:{self.trace.read().format}"

    def within(self, longest_tokens: int | None) -> Load:
        """A load with a trace loses the requests that are longer, and has its number of requests, or sessions.
        Raises WorkloadError."""
        assert self.trace is not None
        trace = msgspec.structs.replace(self.trace, longest_tokens=longest_tokens)
        read = trace.read()
        begun = len(read) if read.turns is None else len(read.turns.first) - 1
        return msgspec.structs.replace(self, trace=trace, requests=begun)

    def due_ns(self) -> NDArray[np.int64]:
        """When each request is due, or each session begins, ns since t = 0, ascending; empty for a closed loop, where
        replies decide."""
        import numpy as np

        if self.streams is not None:
            return np.empty(0, np.int64)
        if self.trace is not None:
            trace = self.trace.read()
            due_ns = trace.due_ns if trace.turns is None else trace.due_ns[trace.turns.first[:-1]]
            return due_ns if self.duration_s is None else due_ns[due_ns < self.duration_s * 1e9]
        return _drawn_ns(self.arrival, self.requests, self.duration_s, self.seed)

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

    def hands_over(self, warmup: int) -> bool:
        """Whether so many requests of a warm-up can leave the slots of a closed loop to measured ones without a drain:
        there is one for each slot, so that this takes no more of them, and the load is long beside its start."""
        if self.streams is None or self.streams.seconds or self.in_sessions:
            return False
        slots, planned = self.streams.last, self.planned
        return warmup >= slots and (planned is None or planned >= LEAST_A_SLOT * slots)

    def turns(self) -> Turns | None:
        """The turns of its sessions."""
        if self.trace is not None:
            return self.trace.read().turns
        lengths = (self.input_tokens, self.output_tokens, self.first_tokens)
        return None if self.sessions is None else _turns(self.sessions, self.requests or 0, self.seed, lengths)

    def cancels(self) -> Cancels | None:
        """Which requests the client gives up; None where it gives none up."""
        return Cancels(self.cancel_ratio, self.seed) if self.cancel_ratio else None

    def shapes(self) -> Shapes:
        """What each request asks for. Raises WorkloadError."""
        if self.trace is not None:
            return _trace_shapes(self.trace)
        drawn = DrawnShapes(
            self.input_tokens, self.output_tokens, self.prefix, self.seed, self.first_tokens, self.batch,
            self.thinking_tokens,
        )  # fmt: skip
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
        thinking = 0 if self.thinking_tokens is None else self._most("thinking", self.thinking_tokens)
        return self._most("input", self.input_tokens) + self._most("output", self.output_tokens) + thinking

    def longest_reply_tokens(self) -> int | None:
        """Of all its replies; None where nothing bounds them. Raises WorkloadError for a file that cannot be read."""
        if self.trace is not None:
            return int(self.trace.read().output_tokens.max(initial=0))
        answer = self._longest("output", self.output_tokens)
        thinking = 0 if self.thinking_tokens is None else self._longest("thinking", self.thinking_tokens)
        return None if answer is None or thinking is None else answer + thinking

    def _longest(self, name: Stream, law: Law) -> int | None:
        return law.least if law.kind == "fixed" else Lengths(law, self.seed, name).most(self._drawn)

    def shortest_prompt_tokens(self, warmup: int) -> int:
        """Of the prompts that are drawn, at the least; `warmup` requests take the lengths of the first. Raises
        WorkloadError."""
        law = self.first_tokens or self.input_tokens  # of which the first turn alone has a prefix
        if law.kind == "fixed":
            return law.least
        drawn = self._drawn
        name: Stream = "input" if self.first_tokens is None else "first"
        return Lengths(law, self.seed, name).least(None if drawn is None else max(drawn, warmup))

    @property
    def _drawn(self) -> int | None:
        """Requests whose lengths may be drawn, at the most; None where that hangs on the server."""
        return self.planned if self.streams is None or self.duration_s is None else self.requests

    def thinking(self) -> Lengths | None:
        """How long each reply may think, beside its answer; None where that is the server's matter."""
        return None if self.thinking_tokens is None else Lengths(self.thinking_tokens, self.seed, "thinking")

    def _most(self, name: Stream, law: Law) -> int:
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
            return self.streams.phases("sessions") if self.in_sessions else self.streams.phases()
        if self.trace is not None:
            return []
        return self.arrival.phases("sessions") if self.in_sessions else self.arrival.phases()
