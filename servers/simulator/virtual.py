"""A run in virtual time: the same engine as behind the wire, as fast as it can be computed; and the manifest of a run
directory for what was computed and not sent."""

from __future__ import annotations

import contextlib
import gc
import heapq
import itertools
import math
import operator
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen import rundir
from loadgen.config import Config
from loadgen.load.choices import Cancels
from loadgen.load.load import Load, Streams
from loadgen.load.turns import ActiveSessions, Turns
from servers.schedulers import Rejected, Sequence
from servers.simulator.build import Emulated, EmulationError
from servers.simulator.engine import Engine, place_s

URL = "virtual time"  # in the place of an address
TOKENS_AT_ONCE = 1 << 18
_INDEX = operator.attrgetter("index")


class ArrivingRequest(NamedTuple):
    """A request that is sent at `at_s`; the others as of servers.schedulers.Sequence."""

    at_s: float
    prompt: int
    output: int
    segments: tuple[tuple[int, int], ...] = ()
    adapter: str = ""
    priority: int = 0


Sent = ArrivingRequest | tuple[float, int, int]


@dataclass(slots=True)
class Outcome:
    """One request. `index`: its number; of a warm-up below 0. `output`: what it asked for, `given`: what the server
    makes of that. `times_s`: when each of its tokens came; empty when the server refused it with `status`.
    `cached_tokens`: of its prompt, what the prefix cache had when it was first scheduled. `dropped`: why it was never
    sent; it then has no status, and `sent_s` is when that was clear. `abandoned`: its client gave it up, at its last
    token here."""

    index: int
    prompt: int
    output: int
    sent_s: float
    times_s: array[float] = field(default_factory=lambda: array("d"))
    status: int | None = 200
    cached_tokens: int = 0
    dropped: str | None = None
    given: int = 0
    abandoned: bool = False


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No search for objects that hold each other meanwhile: millions of them live, and none of these is garbage."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def simulate(
    emulated: Emulated,
    arrivals: Iterable[Sent],
    streams: Streams | None = None,
    until_s: float = math.inf,
    cancels: Cancels | None = None,
    warm_up: Several[Sent] = (),
) -> list[Outcome]:
    """Runs all of `arrivals`, or (seconds, prompt tokens, output tokens), in order of time. In a closed loop of
    `streams` their times do not matter: the next is sent when one has ended, or when a ramp begins a stream, and none
    from `until_s` on, so that there may be arrivals without end. cancels: which of them their clients give up, by their
    numbers. warm_up: of a closed loop, whose slots the others take over from 0 s on, once each has begun. A token has
    come when the server sent it; the way to the client is a part of the front end's latency. Raises EmulationError
    where the server keeps a request and never ends it."""
    outcomes: list[Outcome] = []
    # when each stream of a closed loop is free: an ascending list is a heap
    freed = [] if streams is None else [streams.start_s(stream) for stream in range(streams.most)]
    tokens = _Tokens(outcomes)

    def deliver(emits: list[Sequence], first_s: float, gap_s: float) -> None:
        tokens.of(emits, gap_s)(first_s)
        for place in engine.turning:
            sequence = emits[place]
            if sequence.done and sequence.index not in given_up:
                outcomes[sequence.index].cached_tokens = sequence.cached
                if streams is not None:
                    heapq.heappush(freed, place_s(first_s, gap_s, place))

    given_up: dict[int, int] = {}  # by the request's number, the token at which its client leaves
    engine: Engine | _Abandoned = emulated.engine(deliver, tokens.of)
    if cancels is not None:
        engine = _Abandoned(emulated, deliver, (cancels, len(warm_up)), freed, given_up)

    def send(at_s: float, arrival: Sent) -> None:
        sequence = Sequence(len(outcomes), *arrival[1:])
        outcome = Outcome(sequence.index - len(warm_up), sequence.prompt, sequence.output, at_s)
        outcomes.append(outcome)
        try:
            engine.submit(sequence, at_s)
            outcome.given = sequence.output
        except Rejected as refused:
            outcome.status = refused.status
            if streams is not None:
                heapq.heappush(freed, at_s)

    if streams is None:
        for arrival in arrivals:
            send(arrival[0], arrival)
    else:
        feed = _handed_over(engine, (warm_up, arrivals), outcomes, tokens, freed) if warm_up else arrivals
        for at_s, arrival in _until(_as_freed(engine, feed, streams, freed), until_s, len(warm_up)):
            send(at_s, arrival)
    engine.advance(math.inf)
    tokens.sort()
    _begin_after(outcomes, len(warm_up))
    _cut(outcomes, given_up)
    if any(map(_lacks, outcomes)):
        raise _stuck(outcomes)
    return outcomes


def _handed_over(
    engine: Engine | _Abandoned, sent: tuple[Several[Sent], Iterable[Sent]], outcomes: list[Outcome], tokens: _Tokens,
    freed: list[float],
) -> Iterator[Sent]:  # fmt: skip
    """First a warm-up, then, once each of its requests has its first token, the others. freed: as of `_as_freed`."""
    yield from sent[0]
    while engine.next_s() < math.inf:
        tokens.sort()
        if all(each.times_s or each.status != 200 for each in outcomes):
            break
        engine.advance(engine.next_s())
    ready_s = max((each.times_s[0] for each in outcomes if each.times_s), default=0.0)
    engine.advance(ready_s)
    freed[:] = [max(at_s, ready_s) for at_s in sorted(freed)]
    yield from sent[1]


def _until(feed: Iterable[tuple[float, Sent]], until_s: float, warm_up: int) -> Iterator[tuple[float, Sent]]:
    """Those that are sent before then, from the first on that comes after so many."""
    begin_s = 0.0
    for number, (at_s, arrival) in enumerate(feed):
        if number and number == warm_up:
            begin_s = at_s
        if at_s - begin_s >= until_s:
            return
        yield at_s, arrival


def _begin_after(outcomes: list[Outcome], warm_up: int) -> None:
    """Counts all times from when the first was sent that comes after so many."""
    begin_s = outcomes[warm_up].sent_s if 0 < warm_up < len(outcomes) else 0.0
    for outcome in outcomes if begin_s else ():
        outcome.sent_s -= begin_s
        if outcome.times_s:
            np.frombuffer(outcome.times_s)[:] -= begin_s


def _cut(outcomes: list[Outcome], given_up: dict[int, int]) -> None:
    """Takes away what the server made before it knew that clients had left."""
    for number, token in given_up.items():
        del outcomes[number].times_s[token:]
        outcomes[number].given, outcomes[number].abandoned = token, True


class _Abandoned:
    """An engine some of whose clients leave: when one has read the token at which it gives its reply up, the server is
    to forget the request."""

    def __init__(
        self,
        emulated: Emulated,
        deliver: Callable[[list[Sequence], float, float], None],
        cancels: tuple[Cancels, int],
        freed: list[float],
        given_up: dict[int, int],
    ) -> None:
        """cancels: of requests after so many, which are a warm-up's. freed: a heap of when clients leave, which free a
        stream of a closed loop. given_up: filled as requests are sent, by their places, with the token at which
        each is left."""
        self._engine = emulated.engine(self._delivered)  # step by step: each token is looked at
        self._cancels, self._warm_up = cancels
        self._deliver, self._freed, self._given_up = deliver, freed, given_up
        self._leaving: list[tuple[float, int, Sequence]] = []  # a heap

    @property
    def now_s(self) -> float:
        return self._engine.now_s

    @property
    def turning(self) -> list[int]:
        return self._engine.turning

    def next_s(self) -> float:
        return min(self._engine.next_s(), self._leaving[0][0] if self._leaving else math.inf)

    def advance(self, until_s: float) -> None:
        while (next_s := self.next_s()) <= until_s and next_s < math.inf:
            self._engine.advance(next_s)
            while self._leaving and self._leaving[0][0] <= next_s:
                at_s, _, sequence = heapq.heappop(self._leaving)
                self._engine.cancel(sequence)
                heapq.heappush(self._freed, at_s)

    def submit(self, sequence: Sequence, at_s: float) -> None:
        """Raises Rejected."""
        self.advance(at_s)
        self._engine.submit(sequence, at_s)
        number = sequence.index - self._warm_up
        if number >= 0 and (token := self._cancels.token(number, sequence.output)) is not None:
            self._given_up[sequence.index] = token

    def _delivered(self, emits: list[Sequence], first_s: float, gap_s: float) -> None:
        for place, sequence in enumerate(emits):
            if sequence.emitted == self._given_up.get(sequence.index) and not sequence.done:
                heapq.heappush(self._leaving, (place_s(first_s, gap_s, place), sequence.index, sequence))
        self._deliver(emits, first_s, gap_s)


def _as_freed(
    engine: Engine | _Abandoned, feed: Iterable[Sent], streams: Streams, freed: list[float]
) -> Iterator[tuple[float, Sent]]:
    """When each is sent in a closed loop. freed: a heap of when streams are free, which fills as replies end. Ends
    early where the server keeps all that it has."""
    going = len(freed)
    for arrival in feed:
        while True:
            while not freed or engine.next_s() < freed[0]:
                if engine.next_s() == math.inf:
                    return
                engine.advance(engine.next_s())
            at_s = max(heapq.heappop(freed), engine.now_s)
            if streams.last >= streams.first or going <= streams.at(at_s):
                break
            going -= 1  # the ramp goes down, and this stream ends
        yield at_s, arrival


class _Tokens:
    """When each token came: put down by steps with the same requests, and given to their outcomes when there are
    many."""

    def __init__(self, outcomes: list[Outcome] | dict[int, Outcome]) -> None:
        """outcomes: by the requests' numbers."""
        self._outcomes = outcomes
        # of each group of steps, which are those with one list of requests: these, its first step, seconds between
        # tokens
        self._groups: list[tuple[list[Sequence], int, float]] = []
        self._emits: list[Sequence] = []  # of the last group
        self._begun = 0  # its first step
        self._firsts_s: list[float] = []  # of each step
        self._count = 0  # of the tokens of all groups but the last

    def of(self, emits: list[Sequence], gap_s: float) -> Callable[[float], None]:
        """Puts down a step of these requests, given when its first token came; until something else is put down."""
        if emits is not self._emits:
            begun = len(self._firsts_s)
            self._count += len(self._emits) * (begun - self._begun)
            if self._count > TOKENS_AT_ONCE:
                self.sort()
                begun = 0
            self._emits, self._begun = emits, begun
            self._groups.append((emits, begun, gap_s))
        return self._firsts_s.append

    def sort(self) -> None:
        """Gives out what was put down."""
        if not self._groups:
            return
        requests, firsts, gaps = zip(*self._groups, strict=True)
        rows, begun, gaps_s = np.array(list(map(len, requests))), np.array(firsts), np.array(gaps)
        steps = np.diff(begun, append=len(self._firsts_s))
        whose = np.fromiter(map(_INDEX, itertools.chain.from_iterable(requests)), np.int64, int(rows.sum()))
        counts = np.repeat(steps, rows)  # of each request in each group: its tokens
        whose -= (least := int(whose.min()))
        # by the radix where numbers are short
        order = np.argsort(whose.astype(np.uint16) if int(whose.max()) < 1 << 16 else whose, kind="stable")
        whose, ends = whose[order], np.cumsum(counts[order])
        places = np.empty_like(ends)
        places[order] = ends - counts[order]
        times_s = self._placed(places, rows, steps, gaps_s)
        self._groups, self._emits, self._begun, self._firsts_s, self._count = [], [], 0, [], 0
        lasts = np.append(np.flatnonzero(np.diff(whose)), len(whose) - 1)
        raw, size, begin = times_s.data.cast("B"), times_s.itemsize, 0
        for number, end in zip((whose[lasts] + least).tolist(), ends[lasts].tolist(), strict=True):
            self._outcomes[number].times_s.frombytes(raw[begin * size : end * size])
            begin = end

    def _placed(
        self, places: NDArray[np.int64], rows: NDArray[np.int64], steps: NDArray[np.int64], gaps_s: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """When each token came, added up one by one within a step. places: of the first token of each request in each
        group; rows, steps, gaps_s: of each group."""
        counts = np.repeat(rows, steps)
        order = np.argsort(-counts, kind="stable")  # steps with many tokens first
        firsts = np.repeat(np.cumsum(rows) - rows, steps)[order]  # in `places`
        before = np.repeat(np.cumsum(steps) - steps, steps)  # steps of the groups before
        later = (np.arange(len(counts)) - before)[order]  # steps of its own group before each
        gap_s, at_s = np.repeat(gaps_s, steps)[order], np.array(self._firsts_s)[order]
        times_s = np.empty(int(rows @ steps))
        there = np.searchsorted(-counts[order], -np.arange(int(counts.max())))  # steps that have a token at each place
        for place, most in enumerate(there.tolist()):
            firsts, later, at_s, gap_s = firsts[:most], later[:most], at_s[:most], gap_s[:most]
            if place:
                at_s += gap_s
            times_s[places[firsts + place] + later] = at_s
        return times_s


def simulate_sessions(
    emulated: Emulated, arrivals: Several[ArrivingRequest], turns: Turns, streams: Streams | None = None
) -> list[Outcome]:
    """Runs sessions, whose turns follow each other in `arrivals` as in `turns`, and gives the outcomes in that order. A
    session's first turn is sent when it arrives, or in a closed loop of `streams` when a session before it has ended;
    each other turn when what it waits for is over, of replies their last token. A turn that the server refuses has
    those that wait for it dropped. Raises EmulationError as `simulate` does."""
    return _Sessions(emulated, arrivals, turns, streams).run()


class _Sessions:
    """One run of sessions. What is due next hangs on replies, so requests are not sent in order of their numbers."""

    _ANY = -1  # in place of a turn: whatever session a closed loop begins next

    def __init__(
        self, emulated: Emulated, arrivals: Several[ArrivingRequest], turns: Turns, streams: Streams | None
    ) -> None:
        self._arrivals, self._turns, self._streams = arrivals, turns, streams
        self._outcomes: dict[int, Outcome] = {}
        self._tokens = _Tokens(self._outcomes)
        self._engine = emulated.engine(self._deliver, self._tokens.of)
        begins = [number for number in turns.first.tolist() if number < len(arrivals)]
        self._begins = iter(begins)
        self._due: list[tuple[float, int]]  # a heap of (seconds, turn)
        self._sessions = ActiveSessions(turns, in_seconds=True)
        if streams is None:
            self._due = [(arrivals[number].at_s, number) for number in begins]
        else:
            self._due = [(streams.start_s(stream), self._ANY) for stream in range(streams.most)]
        heapq.heapify(self._due)
        self._going = len(self._due)  # streams of a closed loop

    def run(self) -> list[Outcome]:
        engine, due = self._engine, self._due
        while due or engine.next_s() < math.inf:
            if not due or engine.next_s() < due[0][0]:
                engine.advance(engine.next_s())
                continue
            at_s, number = heapq.heappop(due)
            turn = self._begin(at_s) if number == self._ANY else number
            if turn is not None:
                self._send(at_s, turn)
        self._tokens.sort()
        outcomes = [self._outcomes[number] for number in sorted(self._outcomes)]
        if any(map(_lacks, outcomes)):
            raise _stuck(outcomes)
        return outcomes

    def _begin(self, at_s: float) -> int | None:
        """The first turn of the session that a free stream begins; None where the stream ends."""
        assert self._streams is not None
        if self._streams.last < self._streams.first and self._going > self._streams.at(at_s):
            self._going -= 1  # the ramp goes down
            return None
        return next(self._begins, None)

    def _send(self, at_s: float, number: int) -> None:
        _, prompt, output, segments, adapter, priority = self._arrivals[number]
        session, turn = self._turns.place(number)
        if not turn:
            self._sessions.begin(session)
        outcome = self._outcomes[number] = Outcome(number, prompt, output, at_s)
        sequence = Sequence(number, prompt, output, segments, adapter, priority)
        try:
            self._engine.submit(sequence, at_s)
            outcome.given = sequence.output
        except Rejected as refused:
            outcome.status = refused.status
            self._give_up(number, at_s)

    def _deliver(self, emits: list[Sequence], first_s: float, gap_s: float) -> None:
        self._tokens.of(emits, gap_s)(first_s)
        for place in self._engine.turning:
            sequence = emits[place]
            if sequence.done:
                self._outcomes[sequence.index].cached_tokens = sequence.cached
                self._ended(sequence.index, place_s(first_s, gap_s, place))

    def _ended(self, number: int, at_s: float) -> None:
        for later, due_s in self._sessions.ended(number, self._outcomes[number].sent_s, at_s):
            heapq.heappush(self._due, (due_s, later))
        self._free(number, at_s)

    def _give_up(self, refused: int, at_s: float) -> None:
        why = f"turn {self._turns.place(refused)[1] + 1} of its session failed (http_error)"
        for later in self._sessions.failed(refused):
            self._outcomes[later] = Outcome(later, 0, self._arrivals[later].output, at_s, status=None, dropped=why)
        self._free(refused, at_s)

    def _free(self, number: int, at_s: float) -> None:
        if self._streams is not None and self._turns.place(number)[0] not in self._sessions:
            heapq.heappush(self._due, (at_s, self._ANY))


def _lacks(outcome: Outcome) -> bool:
    return len(outcome.times_s) < outcome.given and outcome.status == 200


def _stuck(outcomes: Iterable[Outcome]) -> EmulationError:
    never = list(filter(_lacks, outcomes))
    longest = max(never, key=lambda each: each.prompt + each.output)
    return EmulationError(
        f"this server never ends {len(never)} of the requests, such as {longest.prompt} tokens in and {longest.output} "
        "out; change its --scheduler-arg settings or --max-running."
    )


def bounds(outcomes: Iterable[Outcome]) -> Iterator[tuple[float, float, float]]:
    """(sent, first token, last token) of those that were served, in seconds."""
    for outcome in outcomes:
        if outcome.times_s:
            yield outcome.sent_s, outcome.times_s[0], outcome.times_s[-1]


def manifest(
    config: Config, load: Load, emulated: Emulated, run_id: str, requests: int, dataset_prompts: int | None = None
) -> rundir.Manifest:
    """A manifest of the running command, for what `emulated` would do with so many requests of `load`."""
    return rundir.Manifest(
        run_id=run_id,
        version=rundir.package_version(),
        started_unix_s=time.time(),
        argv=["loadgen", *sys.argv[1:]],
        config=config.as_dict(),
        backend=config.kind,
        model=emulated.setup.model.name,
        url=URL,
        emulated=True,
        server_version=emulated.setup.scheduler,
        requests_planned=requests,
        arrival=load.when,
        left_out=load.left_out,
        phases=tuple(load.phases()),
        hands_over=not config.drains_warmup and load.hands_over(config.warmup),
        machine=rundir.this_machine(),
        dataset_prompts=dataset_prompts,
        emulation=emulated.facts,
    )
