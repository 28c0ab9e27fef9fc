"""One client process of a run: everything drawn first, then sent when due, then every reply awaited.

The order is fixed: connections and bodies, warm-up, clock, schedule, drain. The schedule is absolute: a late request
never delays the next, and lateness is measured (`send_lag`). The engine must never parse a reply or open a file between
a request and its stamps; finished exchanges are written in slices of a millisecond between reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import resource
import statistics
import sys
import time
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

import backends
from backends.protocol import Backend, HttpRequest, Kept, Prompt
from loadgen.client import retries
from loadgen.client.connection import FastTransport, Transport
from loadgen.client.exchange import Exchange, Names
from loadgen.client.turns import Waiting, next_prompt, why_over
from loadgen.clock import Alarm, now_ns
from loadgen.event_loop import StopSignals, every_second
from loadgen.load.lengths import residual
from loadgen.load.prompts import Workload
from loadgen.load.request_body import advised
from loadgen.load.turns import ActiveSessions, Base
from loadgen.plan import ClientJob, ClientPlan, Timeouts
from loadgen.rundir import WriteError
from loadgen.rundir.outcomes import AS_PLANNED
from loadgen.rundir.records import TICK_NS, ClientFacts, RecordsFile
from loadgen.target import TransportError

SLICE_NS = 1_000_000  # longest work between two looks at the sockets
STALL_NS, MOST_STALLS = 50_000_000, 1000  # a lag from which on it is kept when it was
FLUSH_S = 0.02  # how long a finished request may wait to be written
MANY_FINISHED = 4096  # waiting to be written: from here on memory matters more than punctuality
AHEAD, AHEAD_BYTES = 1024, 16 << 20  # requests prepared beyond those due at t = 0: whichever is reached first
RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024  # of getrusage
FAILED_WAIT_S = 0.05  # before a closed loop replaces a request that failed: a dead server is not to be hammered
SPARE_CONNECTIONS = 64  # opened ahead for arrivals at a rate
DRAIN_S = 5.0  # how long a stopped run waits for replies
WARM_LOOK_S = 0.002  # between two looks at whether a warm-up may hand its slots over
START_MARGIN_NS = 20_000_000  # from the moment that all clients are ready to t = 0


class WarmUp(msgspec.Struct, kw_only=True):
    """What became of one client process' warm-up. error: of the first request that failed."""

    sent: int
    failed: int
    error: str | None


def check_warm_up(clients: Sequence[WarmUp]) -> None:
    """Raises TransportError when there was a warm-up and nothing of it succeeded."""
    sent, failed = sum(each.sent for each in clients), sum(each.failed for each in clients)
    if sent and failed == sent:
        error = next(each.error for each in clients if each.error is not None)
        raise TransportError(
            f"the run did not begin, because every warm-up request failed ({failed}); the first: {error}"
        )


class LiveCounters(msgspec.Struct, kw_only=True):
    """Live counters of one process, of measured requests; `in_flight` has those of a warm-up that handed over, too.
    `ttft_ms`: a sample of the latest. Since the snapshot before: `cpu_ratio` of a core, and the largest
    `loop_lag_ms`."""

    planned: int | None
    done: int
    failed: int
    in_flight: int
    events: int
    events_in_flight: int = 0  # of `events`, those of requests that are not over
    elapsed_s: float
    ttft_ms: list[float]
    cpu_ratio: float = 0.0
    loop_lag_ms: float = 0.0


Progress = Callable[[list[LiveCounters]], None]
Warm = Callable[[], Awaitable[None]]  # what to do once clients and server are warm


class Send(Protocol):
    """Sends a plan's load and leaves its records, or their parts, in `directory`; as `run_here`."""

    def __call__(
        self,
        plan: ClientPlan,
        directory: Path,
        progress: Progress,
        warm: Warm | None = None,
        stop: StopSignals | None = None,
    ) -> Awaitable[None]: ...


class Client:
    """Sends one job's requests over one transport and writes their records."""

    def __init__(
        self,
        job: ClientJob,
        backend: Backend,
        workload: Workload,
        transport: Transport,
        due_ns: NDArray[np.int64],
    ) -> None:
        """`due_ns` (n,): the whole run's schedule, of requests or of sessions, ns since t = 0; empty for a closed
        loop."""
        self.job = job
        self.backend = backend
        self.workload = workload
        self.transport = transport
        self.due_ns = array("q", due_ns[job.shard :: job.shards].tobytes())  # a list takes five times the memory
        self.closed_loop = job.load.streams is not None
        self._turns = workload.turns
        self._begun_at_most: int | None = len(self.due_ns)  # requests, or sessions
        if self.closed_loop:
            limit = job.load.requests
            self._begun_at_most = (
                None if limit is None else sum(1 for _ in itertools.takewhile(lambda n: n < limit, job.numbers()))
            )
        self.planned = self._begun_at_most
        if self._turns is not None:
            self.planned = sum(map(self._turns.count, itertools.islice(job.numbers(), self._begun_at_most)))
        self.in_flight: set[Exchange] = set()
        self.done = self.failed = self.events = 0
        self.stopping = False
        self._prepared: deque[tuple[Exchange, bytes | HttpRequest]] = deque()
        self._finished: deque[Exchange] = deque()
        self._recent_ttft_ms: deque[float] = deque(maxlen=256)
        self._idle = asyncio.Event()
        self._next = 0
        self._began = False  # the load
        self._streams = 0  # of a closed loop: how many have begun
        self._going = None if self._turns is None else ActiveSessions(self._turns)
        self._said: dict[
            int, Exchange
        ] = {}  # by a turn that is not sent yet, the one whose conversation it goes on with
        self._thinking = 0  # turns that wait for nothing but their time
        self._waiting: Waiting | None = None
        self._t0_ns = 0
        self.records_file: RecordsFile | None = None
        self._write_error: WriteError | None = None
        self._health = Health()
        self._names = Names(job.model)
        self._cancels, self._budget = job.load.cancels(), job.load.thinking()
        adapters = job.load.adapters
        self._adapters = None if adapters is None else adapters.drawn(job.load.seed)
        priorities = job.load.priorities
        self._priorities = None if priorities is None else priorities.drawn(job.load.seed)

    async def prepare(self) -> WarmUp:
        """Draws what is due first, warms the server up, and opens connections. Raises TransportError."""
        await self.transport.open(1)  # before any work, since nobody may be there
        gc.disable()  # until the run ends: neither what is prepared nor the load makes cycles
        at_zero = self.job.streams or sum(due == 0 for due in self.due_ns)
        if self._begun_at_most is not None:
            at_zero = min(at_zero, self._begun_at_most)
        self._source = self._requests()
        self._warmed: list[Exchange] = []
        bytes_ahead = made = 0
        while made < at_zero or (made < at_zero + AHEAD and bytes_ahead < AHEAD_BYTES):
            size = self._prepare_one()
            if not size:
                break
            bytes_ahead += size if made >= at_zero else 0
            made += 1
        if self.job.hands_over:
            await self.transport.open(at_zero)
            warm_up = await self._warm_up()
        else:
            warm_up = await self._warm_up()
            # Last, because servers close connections that stay idle.
            await self.transport.open(max(at_zero, min(len(self.due_ns), SPARE_CONNECTIONS)))
        gc.freeze()  # nothing of it is looked at again
        return warm_up

    async def _warm_up(self) -> WarmUp:
        self._t0_ns = now_ns()
        numbers = itertools.takewhile(lambda n: n < self.job.warmup, self.job.numbers())
        if self.job.hands_over:
            await self._fill_slots(list(numbers))
        else:
            for number in numbers:
                self._send_warm_up(number)
            await self._drained(lambda: True)
        self._warmed = list(self._finished)
        self._finished.clear()
        failed = [each for each in self._warmed if each.outcome != "ok"]
        error = None
        if failed:
            like = self.job.request(self.backend, self.workload.prompt("warmup", 0), self.job.sampling)
            error = f"{failed[0].outcome}, {advised(failed[0].error or '', like.body)}"
        return WarmUp(sent=len(self._warmed) + len(self.in_flight), failed=len(failed), error=error)

    async def _fill_slots(self, numbers: list[int]) -> None:
        """Fills the slots of a closed loop as they are in its steady state, for measured requests to take over one by
        one. Ends with all of the warm-up sent, the first slot free, and the wave of first prompts over."""
        slots, limits = self.job.streams, self.job.timeouts
        wave = range(self.job.load.streams.last if self.job.load.streams is not None else 0)
        left = residual([self.workload.own(number).output_tokens for number in wave])
        to_send = deque(numbers)
        while True:
            while to_send and len(self.in_flight) < slots:
                number = to_send.popleft()
                self._send_warm_up(number, left[number] if number in wave else None)
            begun = not self.job.sampling.stream or all(each.times for each in self.in_flight)
            if not to_send and begun and len(self.in_flight) < slots:
                return
            self._give_up_overdue(limits)
            await asyncio.sleep(WARM_LOOK_S)

    def _send_warm_up(self, number: int, output_tokens: int | None = None) -> None:
        exchange, prepared = self._make("warmup", number, output_tokens=output_tokens)
        exchange.scheduled_ns = now_ns()
        self.in_flight.add(exchange)
        self.transport.send(exchange, prepared)

    def _first(self, number: int) -> int:
        """The first request of what is begun `number`-th: a request, or a session."""
        return number if self._turns is None else self._turns.begin(number)

    def _make(self, phase: str, number: int, output_tokens: int | None = None) -> tuple[Exchange, bytes | HttpRequest]:
        """A request, ready to be sent; of a session's later turn once what it goes on with was said. output_tokens: to
        ask for, in place of its own."""
        prompt, shape = self.workload.prompt(phase, number), self.workload.own(number)
        shared_tokens = shape.shared_tokens if phase == "measured" else 0
        turns = self._turns if phase == "measured" else None
        if turns is not None and (base := turns.base(number)) is not None:
            prompt, shared_tokens = _going_on(self._said.pop(number), base, prompt)
        asked = shape.output_tokens if output_tokens is None else output_tokens
        if self.backend.pooled:
            asked = 0
        sampling = msgspec.structs.replace(self.job.sampling, max_tokens=asked)
        if self._budget is not None:
            sampling = msgspec.structs.replace(sampling, thinking_tokens=min(asked, self._budget.at(number)))
        adapter, priority = "", None
        if phase == "measured":
            adapter = "" if self._adapters is None else self._adapters.at(self._chooser(number))
            priority = None if self._priorities is None else self._priorities.at(self._chooser(number))
        request = self.job.request(self.backend, prompt, sampling, adapter, priority)
        id = self.workload.id(number) if phase == "measured" else number
        kept = None
        if turns is None or self.backend.keeper is None or not turns.repeated_by(number):
            decoder = self.backend.decoder(sampling.stream)
        else:
            kept = Kept()
            decoder = self.backend.keeper(sampling.stream, kept)
        exchange = Exchange(id, phase, -1, prompt.n_tokens, asked, decoder, self._on_done)
        exchange.names, exchange.adapter, exchange.priority = self._names, adapter, priority
        exchange.shared_tokens = shared_tokens
        if self.backend.pooled:
            exchange.asked_items = shape.items
        cancels = self._cancels if phase == "measured" else None
        if cancels is not None and (given_up_at := cancels.token(number, asked)) is not None:
            exchange.abandon_after(given_up_at)
        if turns is not None:
            exchange.session, turn = turns.place(number)
            exchange.turn, exchange.after = turn + 1, turns.after(number)
        if kept is not None:
            exchange.prompt, exchange.kept = prompt, kept
        request_id = f"{self.job.run_id}-{'w' if phase == 'warmup' else ''}{id}"
        if (header := self.job.session_header) is not None:  # a request of its own is a conversation of one turn
            session = request_id if exchange.turn < 1 else f"{self.job.run_id}-s{exchange.session}"
            request = msgspec.structs.replace(request, headers=(*request.headers, (header, session)))
        prepared = self.transport.prepare(request, request_id)
        if self.job.retries:
            exchange.on_done = functools.partial(self._again_or_done, prepared)
        return exchange, prepared

    def _chooser(self, number: int) -> int:
        """By which it is drawn what a request, or all of its session, asks for."""
        return number if self._turns is None else self._turns.place(number)[0]

    def _requests(self) -> Iterator[tuple[Exchange, bytes | HttpRequest]]:
        for number in itertools.islice(self.job.numbers(), self._begun_at_most):
            yield self._make("measured", self._first(number))

    def _prepare_one(self) -> int:
        """Bytes of one more request that is ready to be sent; 0 when there are no more."""
        item = next(self._source, None)
        if item is None:
            return 0
        self._prepared.append(item)
        prepared = item[1]
        return len(prepared if isinstance(prepared, bytes) else prepared.body)

    async def run(self, t0_ns: int, path: Path) -> ClientFacts:
        """Sends the schedule from monotonic `t0_ns` on, waits for the replies, and completes the records at `path`.
        Raises WriteError."""
        loop = asyncio.get_running_loop()
        self._t0_ns = t0_ns
        with _written():
            self.records_file = RecordsFile(path, self.job.run_id, self.job.version, t0_ns, model=self.job.model)
            for exchange in self._warmed:
                self.records_file.write(exchange.record(t0_ns, self.job.sampling.stream))
        alarm = Alarm(loop, self._open_loop if not self.closed_loop else self._closed_loop)
        self._alarm = alarm
        self._waiting = Waiting(loop, self._send_turn)
        self._health.start(loop)
        self._flusher = loop.call_later(FLUSH_S, self._flush)
        try:
            alarm.set(t0_ns + (0 if self.closed_loop or not self.due_ns else self.due_ns[0]))
            await self._drained(self._all_sent)
        finally:
            gc.enable()
            gc.unfreeze()
            alarm.close()
            self._waiting.close()
            self._flusher.cancel()
            facts = self._health.stop(self, "interrupted" if self.stopping else "complete", t0_ns)
        self.check_file()
        if self._write_error is not None:
            self.records_file.abandon()
            raise self._write_error
        with _written():
            while self._finished:
                self._write_one()
            self.records_file.close(facts)
        return facts

    # Sending.

    def _open_loop(self) -> None:
        """Sends all that is due, yielding to the sockets every millisecond."""
        slice_end = now_ns() + SLICE_NS
        due, last = self.due_ns, len(self.due_ns)
        while self._next < last and not self.stopping:
            scheduled = self._t0_ns + due[self._next]
            now = now_ns()
            if scheduled > now:
                self._alarm.set(scheduled)
                return
            if now > slice_end:
                asyncio.get_running_loop().call_soon(self._open_loop)
                return
            self._send_next(scheduled)

    def _closed_loop(self) -> None:
        """Begins the streams of the loop, those of a ramp one after the other; from then on every reply sends the next
        request."""
        slice_end = now_ns() + SLICE_NS
        if not self._began:
            self._began, self._streams = True, len(self.in_flight)  # those that the warm-up hands over
        while self._streams < self.job.streams and self._may_send():
            scheduled = self._t0_ns + self.job.stream_start_ns(self._streams)
            now = now_ns()
            if scheduled > now:
                self._alarm.set(scheduled)
                return
            if now > slice_end:
                asyncio.get_running_loop().call_soon(self._closed_loop)
                return
            self._streams += 1
            self._send_next(scheduled)

    def _replace(self, due: int) -> None:
        going = len(self.in_flight) if self._going is None else len(self._going)
        if going < self.job.streams_at(due - self._t0_ns) and self._may_send():
            self._send_next(due)

    def _may_send(self) -> bool:
        if self.stopping or (self._begun_at_most is not None and self._next >= self._begun_at_most):
            return False
        duration_s = self.job.load.duration_s
        return duration_s is None or now_ns() - self._t0_ns < duration_s * 1e9

    def _send_next(self, scheduled: int) -> None:
        if not self._prepared:
            self._prepare_one()
        exchange, prepared = self._prepared.popleft()
        exchange.scheduled_ns = scheduled
        self._next += 1
        if self._going is not None:
            self._going.begin(exchange.session)
        self.in_flight.add(exchange)
        self.transport.send(exchange, prepared)
        self._prepare_one()

    # Sessions.

    def _goes_on(self, exchange: Exchange) -> bool:
        """Whether the session of a turn that has ended goes on. Turns that cannot be sent any more have failed."""
        turns, going = self._turns, self._going
        if turns is None or going is None:
            return False
        duration_s = self.job.load.duration_s
        if self.stopping or (duration_s is not None and now_ns() - self._t0_ns >= duration_s * 1e9):
            return False
        number = turns.begin(exchange.session) + exchange.turn - 1
        if exchange.outcome == "dropped":  # by a turn that has failed, with which it is over
            return exchange.session in going
        repeated = turns.repeated_by(number)
        if (reason := why_over(exchange, bool(repeated))) is None:
            self._said.update(dict.fromkeys(repeated, exchange))
            for later, due_ns in going.ended(number, exchange.scheduled_ns, exchange.done_ns):
                self._thinking += 1
                asyncio.get_running_loop().call_soon(self._prepare_turn, later, int(due_ns))  # not within a read
            return exchange.session in going
        for later in going.failed(number):
            self._said.pop(later, None)
            dropped = Exchange(
                self.workload.id(later), "measured", exchange.done_ns, 0, self.workload.own(later).output_tokens,
                exchange.decoder, self._on_done,
            )  # fmt: skip
            dropped.session, dropped.turn = exchange.session, exchange.turn + later - number
            dropped.after = turns.after(later)
            dropped.fail("dropped", reason, now_ns())
        return exchange.session in going

    def _prepare_turn(self, number: int, due_ns: int) -> None:
        assert self._waiting is not None
        exchange, prepared = self._make("measured", number)
        exchange.scheduled_ns = due_ns
        self._waiting.add(exchange, prepared)

    def _send_turn(self, exchange: Exchange, prepared: bytes | HttpRequest) -> None:
        self._thinking -= 1
        if not self.stopping:
            self.in_flight.add(exchange)
            self.transport.send(exchange, prepared)

    # Replies.

    def _on_done(self, exchange: Exchange) -> None:
        self.in_flight.discard(exchange)
        if not self.in_flight:
            self._idle.set()
        self._finished.append(exchange)
        if exchange.phase == "measured":
            self.done += 1
            self.events += len(exchange.times)
            if exchange.outcome not in AS_PLANNED:
                self.failed += 1
            elif exchange.times:
                self._recent_ttft_ms.append((exchange.times[0] - exchange.sent_ns) / 1e6)
            if self._goes_on(exchange):
                return
        if self._began and self._may_send():
            loop = asyncio.get_running_loop()
            if exchange.outcome in AS_PLANNED:  # due now, but sent from the loop: what fails at once must not recurse
                loop.call_soon(self._replace, now_ns())
            else:
                loop.call_later(FAILED_WAIT_S, lambda: self._replace(now_ns()))

    def _again_or_done(self, prepared: bytes | HttpRequest, exchange: Exchange) -> None:
        """Asks a server again that had no room, when it says or, where it does not, ever later."""
        wait_s = retries.wait_s(exchange, self.job.retries)
        if wait_s is None or self.stopping:
            self._on_done(exchange)
            return
        exchange.again()
        asyncio.get_running_loop().call_later(wait_s, self._send_again, exchange, prepared)

    def _send_again(self, exchange: Exchange, prepared: bytes | HttpRequest) -> None:
        if not exchange.finished:
            self.transport.send(exchange, prepared)

    def _all_sent(self) -> bool:
        if self.stopping:
            return True
        if self._thinking:
            return False
        return not self._may_send() if self.closed_loop else self._next >= len(self.due_ns)

    async def _drained(self, all_sent: Callable[[], bool]) -> None:
        """Returns when every request is sent and answered; gives up on those beyond their timeouts."""
        limits = self.job.timeouts
        period_s = min(1.0, limits.first_byte_s / 4, limits.idle_s / 4, limits.total_s / 4)
        while self.in_flight or not all_sent():
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), period_s)
            self._give_up_overdue(limits)

    def _give_up_overdue(self, limits: Timeouts) -> None:
        now = now_ns()
        overdue = [(exchange, limits.exceeded(exchange, now)) for exchange in self.in_flight]
        for exchange, reason in overdue:
            if reason is not None:
                self._give_up(exchange, "timeout", reason)

    def _give_up(self, exchange: Exchange, outcome: str, reason: str) -> None:
        abort = exchange.abort
        exchange.fail(outcome, reason, now_ns())
        if abort is not None:
            abort()

    def stop(self, drain_s: float) -> None:
        """Sends nothing more; what is in flight after `drain_s` seconds is cancelled."""
        if self.stopping:
            drain_s = 0.0
        self.stopping = True
        asyncio.get_running_loop().call_later(drain_s, self._cancel_rest)

    def _cancel_rest(self) -> None:
        for exchange in list(self.in_flight):
            outcome = "cancelled" if exchange.sent_ns >= 0 or exchange.refusals_ns else "dropped"
            self._give_up(exchange, outcome, "the run was stopped")
        self._idle.set()

    # Records.

    def _write_one(self) -> None:
        assert self.records_file is not None
        self.records_file.write(self._finished.popleft().record(self._t0_ns, self.job.sampling.stream))

    def _flush(self) -> None:
        """Writes finished requests a little at a time: replies end together, just when the last events arrive."""
        loop = asyncio.get_running_loop()
        slice_end = now_ns() + SLICE_NS // 2
        try:
            with _written():
                while self._finished and now_ns() < slice_end:
                    self._write_one()
        except WriteError as error:
            self._keep_no_more(error)
            return
        behind = len(self._finished) > MANY_FINISHED or not self.in_flight
        self._flusher = loop.call_later(0.001 if behind else FLUSH_S / 4 if self._finished else FLUSH_S, self._flush)

    def check_file(self) -> None:
        """Stops the load where somebody has removed the records."""
        if self.records_file is not None and self._write_error is None and self.records_file.is_removed():
            self._keep_no_more(WriteError("it was removed"))

    def _keep_no_more(self, error: WriteError) -> None:
        """Nothing more can be kept, so nothing more is sent."""
        self._write_error = error
        self.stop(0.0)

    def snapshot(self) -> LiveCounters:
        in_flight_events = sum(len(each.times) for each in self.in_flight if each.phase == "measured")
        cpu_ratio, loop_lag_ms = self._health.since_last_look()
        return LiveCounters(
            planned=self.planned,
            done=self.done,
            failed=self.failed,
            in_flight=len(self.in_flight),
            events=self.events + in_flight_events,
            events_in_flight=in_flight_events,
            elapsed_s=max(0.0, (now_ns() - self._t0_ns) / 1e9),
            ttft_ms=list(self._recent_ttft_ms),
            cpu_ratio=cpu_ratio,
            loop_lag_ms=loop_lag_ms,
        )


def _going_on(earlier: Exchange, base: Base, new: Prompt) -> tuple[Prompt, int]:
    """The prompt of a turn that goes on with an earlier one, and how many of its first tokens the server has seen."""
    prompt, kept = earlier.prompt, earlier.kept if base.reply else None
    assert prompt is not None
    if prompt.token_ids is not None:
        return next_prompt(prompt, kept, new), len(prompt.token_ids) + (0 if kept is None else len(kept.token_ids))
    thought = earlier.reasoning_tokens or len(earlier.reasoning)  # is not said again
    seen = (earlier.prompt_tokens or 0) + (0 if kept is None else max(0, (earlier.output_tokens or 0) - thought))
    return next_prompt(prompt, kept, new), seen


@contextlib.contextmanager
def _written() -> Iterator[None]:
    """What is written within the block is on disk afterwards. Raises WriteError."""
    try:
        yield
    except OSError as error:
        raise WriteError(error.strerror or str(error)) from None


def build_client(plan: ClientPlan) -> Client:
    """The client of the plan's share of the load, with everything drawn that is drawn at once."""
    backend = backends.get(plan.backend)
    job = plan.job
    workload = plan.prompts.build(backend, job.load, job.warmup)
    return Client(job, backend, workload, build_transport(plan, backend), job.load.due_ns())


def build_transport(plan: ClientPlan, backend: Backend) -> Transport:
    """The transport that the plan names, without a connection yet."""
    arguments: Any = (plan.target, backend.error_message, plan.job.timeouts)
    if plan.transport == "aiohttp":
        from loadgen.client.transport_aiohttp import AiohttpTransport

        return AiohttpTransport(*arguments, fresh=plan.fresh)
    return FastTransport(
        *arguments, fresh=plan.fresh, kernel_timestamps=plan.kernel_timestamps, quick_acks=plan.quick_acks
    )


async def run_here(
    plan: ClientPlan, directory: Path, progress: Progress, warm: Warm | None = None, stop: StopSignals | None = None
) -> None:
    """Sends the plan's load from this process and leaves `requests.jsonl` in `directory`. warm: awaited between warm-up
    and t = 0. stop: from then on its signals are the client's, which drains; before, they are the caller's. Raises
    TransportError, and WriteError."""
    client = build_client(plan)
    loop = asyncio.get_running_loop()
    try:
        if warm is not None and plan.job.hands_over:
            await warm()  # the first time takes long, and slots must not wait for it
        check_warm_up([await client.prepare()])
        if warm is not None:
            await warm()
        if stop is not None:
            stop.on_signal(lambda: client.stop(DRAIN_S), hurry=lambda: client.stop(0.0))

        def beat() -> None:
            client.check_file()
            progress([client.snapshot()])

        ticker = loop.create_task(every_second(beat))
        try:
            await client.run(now_ns() + START_MARGIN_NS, directory / "requests.jsonl")
        finally:
            ticker.cancel()
            progress([client.snapshot()])
    finally:
        await client.transport.close()


class Health:
    """What the client knows of its own fitness: the loop's lag every 10 ms, CPU every second, memory at the end."""

    def __init__(self) -> None:
        self.lag_ns = array("q")
        self.stalls: list[tuple[int, int]] = []
        self._looked = (now_ns(), time.process_time_ns(), 0)  # the last: of the lags, how many had been seen

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._busiest_ratio = 0.0
        self._began = self._second = (now_ns(), time.process_time_ns())
        self._ticks = _CpuTicks.now()
        self._looked = (*self._began, 0)
        self._due_ns = now_ns() + TICK_NS
        self.alarm = Alarm(loop, self.tick)
        self.alarm.set(self._due_ns)

    def tick(self) -> None:
        now = now_ns()
        if now - self._due_ns >= STALL_NS and len(self.stalls) < MOST_STALLS:
            self.stalls.append((self._due_ns, now))
        while self._due_ns <= now:  # also those that a stall swallowed: what came in during them was as late
            self.lag_ns.append(now - self._due_ns)
            self._due_ns += TICK_NS
        if now - self._second[0] >= 1_000_000_000:
            self._take_second(now)
        self.alarm.set(self._due_ns)

    def _take_second(self, now: int) -> None:
        cpu = time.process_time_ns()
        self._busiest_ratio = max(self._busiest_ratio, (cpu - self._second[1]) / max(1, now - self._second[0]))
        self._second = (now, cpu)

    def since_last_look(self) -> tuple[float, float]:
        """CPU as a part of a core and the largest lag in ms, since this was asked before."""
        then_ns, then_cpu_ns, seen = self._looked
        self._looked = now, cpu, _ = (now_ns(), time.process_time_ns(), len(self.lag_ns))
        return (cpu - then_cpu_ns) / max(1, now - then_ns), max(self.lag_ns[seen:], default=0) / 1e6

    def stop(self, client: Client, state: str, t0_ns: int) -> ClientFacts:
        self.alarm.close()
        now, cpu = now_ns(), time.process_time_ns()
        if now - self._second[0] > 100_000_000 or self._second is self._began:
            self._take_second(now)
        lag = np.asarray(self.lag_ns if self.lag_ns else [0]) / 1e6
        connects = [ns / 1e6 for ns in client.transport.connect_ns]
        receive = np.asarray(client.transport.receive_lag_ns) / 1e6
        has_receive = len(receive) > 0
        return ClientFacts(
            state=state,
            wall_s=(now - self._began[0]) / 1e9,
            cpu_s=(cpu - self._began[1]) / 1e9,
            cpu_peak_ratio=self._busiest_ratio,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT_BYTES,
            events=client.events,
            loop_lag_p50_ms=float(np.percentile(lag, 50)),
            loop_lag_p99_ms=float(np.percentile(lag, 99)),
            loop_lag_max_ms=float(lag.max()),
            connections=len(connects),
            connect_p50_ms=statistics.median(connects) if connects else None,
            connect_max_ms=max(connects) if connects else None,
            receive_lag_p50_ms=float(np.percentile(receive, 50)) if has_receive else None,
            receive_lag_p99_ms=float(np.percentile(receive, 99)) if has_receive else None,
            receive_lag_max_ms=float(receive.max()) if has_receive else None,
            stalls=tuple(((begin - t0_ns) / 1e9, (end - t0_ns) / 1e9) for begin, end in self.stalls),
            **_machine(self._ticks, _CpuTicks.now()),
        )


class _CpuTicks(NamedTuple):
    """CPU time of this machine since it began: what anybody used, what a hypervisor gave to others, and all of it."""

    busy: int
    stolen: int
    all: int
    cores: int

    @classmethod
    def now(cls) -> _CpuTicks | None:
        """None where nobody tells."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
            user, nice, system, idle, iowait, irq, softirq, stolen = map(int, lines[0].split()[1:9])
            busy = user + nice + system + irq + softirq
            cores = sum(line.startswith("cpu") for line in lines) - 1
            return cls(busy, stolen, busy + idle + iowait + stolen, cores)
        return None


def _machine(before: _CpuTicks | None, after: _CpuTicks | None) -> Mapping[str, Any]:
    """What a client's facts say of the machine between the two."""
    if before is None or after is None or after.all <= before.all:
        return {}
    ticks = after.all - before.all
    return {
        "steal_ratio": (after.stolen - before.stolen) / ticks,
        "busy_cores": (after.busy - before.busy) / ticks * after.cores,
        "cores": after.cores,
    }
