"""When each token is due on modelled hardware: the engine of a virtual run, driven by the wall clock.

It stands where `timing.FixedTiming` stands, behind the same four calls. `speed` is how many modelled seconds pass in a
real one.
"""

from __future__ import annotations

import heapq
import math

from servers.schedulers import Scheduler, Sequence
from servers.serve.timing import INDEX, INDEX_BITS, TimedReply
from servers.simulator.build import Emulated

# A wake-up of this process and of the client for each of many tokens, some 20 us apart, costs more than the tokens
# themselves: where many are under way they go out in groups, none later by more than this.
GRAIN_NS = 500_000
CROWDED = 64


class SimulatedTiming:
    """Times given and taken are monotonic nanoseconds; modelled seconds begin at the first request."""

    fixed = None

    def __init__(self, emulated: Emulated, speed: float = 1.0) -> None:
        self.facts = emulated.facts
        self._engine = emulated.engine(self._deliver)
        self._ns_per_s = 1e9 / speed
        self._start_ns: int | None = None
        self._now_s = 0.0
        self.popped_due_ns = 0  # when the token that `pop` gave last was due
        self._replies: dict[int, tuple[TimedReply, Sequence]] = {}  # by the reply's number
        self._out: list[int] = []  # a heap of due times in ns above the reply's number, as in FixedTiming

    @property
    def scheduler(self) -> Scheduler:
        return self._engine.scheduler

    def submit(self, reply: TimedReply) -> None:
        """Raises Rejected."""
        if self._start_ns is None:
            self._start_ns = reply.received_ns
        sequence = Sequence(
            reply.index, reply.n_prompt_tokens, reply.n_tokens, reply.segments, reply.adapter, reply.priority
        )
        self._now_s = max(self._now_s, self._modelled_s(reply.received_ns))
        self._engine.submit(sequence, self._now_s)
        self._replies[reply.index] = reply, sequence

    def cancel(self, reply: TimedReply) -> None:
        """Nothing more of `reply` will be due, and the scheduler forgets it."""
        known = self._replies.pop(reply.index, None)
        if known is not None and not known[1].done:
            self._engine.cancel(known[1])

    def next_due_ns(self) -> int | None:
        """When a token is due or a step ends."""
        next_s = self._engine.next_s()
        grain_ns = GRAIN_NS if len(self._out) > CROWDED else 0
        due = [(self._out[0] >> INDEX_BITS) + grain_ns] if self._out else []
        return min(due if next_s == math.inf else [*due, self._real_ns(next_s)], default=None)

    def pop(self, now_ns: int) -> TimedReply | None:
        """The reply whose next token is due longest at `now_ns`, or None: nothing is due yet. Never early."""
        if self._start_ns is None:
            return None
        until = now_ns << INDEX_BITS | INDEX
        while True:
            while self._out and self._out[0] <= until:
                key = heapq.heappop(self._out)
                known = self._replies.get(key & INDEX)
                if known is not None:
                    self.popped_due_ns = key >> INDEX_BITS
                    return known[0]
            next_s = self._engine.next_s()
            if next_s == math.inf or self._real_ns(next_s) > now_ns:
                return None
            self._now_s = max(self._now_s, next_s)
            self._engine.advance(next_s)

    def _deliver(self, emits: list[Sequence], at_s: float, gap_s: float) -> None:
        at_ns = self._real_ns(at_s)
        gap_ns = gap_s * self._ns_per_s
        for k, sequence in enumerate(emits):
            if sequence.emitted == 1 and sequence.cached and sequence.index in self._replies:
                self._replies[sequence.index][0].found(sequence.cached)
            heapq.heappush(self._out, (at_ns + int(k * gap_ns)) << INDEX_BITS | sequence.index)

    def _modelled_s(self, at_ns: int) -> float:
        assert self._start_ns is not None
        return (at_ns - self._start_ns) / self._ns_per_s

    def _real_ns(self, at_s: float) -> int:
        assert self._start_ns is not None
        return self._start_ns + int(at_s * self._ns_per_s)
