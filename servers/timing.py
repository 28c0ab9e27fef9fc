"""When each token is due: fixed times, so that the truth about every latency is known in advance.

The first token is due `ttft` after the request was received and each further one `itl` after the one before was due,
not after it was sent: what goes out late does not push the rest back. With jitter every interval, the first included,
is multiplied by a factor uniform in 1 +- jitter, drawn from the seed and the request's number alone.

No clock is read here and nothing is sent: the caller says what time it is and emits what is due. A model of a scheduler
can take this place behind the same four calls.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any, Protocol


class Reply(Protocol):
    """What is scheduled. `ticket` belongs to the timing: it finds the reply again when it is cancelled."""

    index: int
    received_ns: int
    n_tokens: int
    ticket: Any

    def emit(self) -> None:
        """Sends the next token."""


# A heap entry: [due_ns, the request's number, reply or None once cancelled, tokens left, next interval or None]
Ticket = list[Any]


class FixedTiming:
    """Times are monotonic nanoseconds. Replies due at the same time come in the order of their numbers."""

    def __init__(self, ttft_ns: int, itl_ns: int, jitter_ratio: float = 0.0, seed: int = 0) -> None:
        self._ttft_ns = ttft_ns
        self._itl_ns = itl_ns
        self._jitter_ratio = jitter_ratio
        self._seed = seed
        self._heap: list[Ticket] = []

    def submit(self, reply: Reply) -> None:
        """Schedules all tokens of `reply`. Submitted late, they are due at once, in order."""
        draw = self._draw(reply.index)
        first_ns = self._ttft_ns if draw is None else draw(self._ttft_ns)
        reply.ticket = [reply.received_ns + first_ns, reply.index, reply, reply.n_tokens, draw]
        heapq.heappush(self._heap, reply.ticket)

    def cancel(self, reply: Reply) -> None:
        """Nothing more of `reply` will be due. Its place in the queue goes when its time comes."""
        if reply.ticket is not None:
            reply.ticket[2] = None
            reply.ticket = None

    def next_due_ns(self) -> int | None:
        """When something is due next."""
        return self._heap[0][0] if self._heap else None

    def pop(self, now_ns: int) -> Reply | None:
        """The reply whose next token is due longest at `now_ns`, or None: nothing is due yet. Never early."""
        heap = self._heap
        while heap:
            ticket = heap[0]
            if ticket[0] > now_ns:
                return None
            reply: Reply | None = ticket[2]
            if reply is None:
                heapq.heappop(heap)
                continue
            ticket[3] -= 1
            if ticket[3]:
                draw = ticket[4]
                ticket[0] += self._itl_ns if draw is None else draw(self._itl_ns)
                heapq.heapreplace(heap, ticket)
            else:
                heapq.heappop(heap)
                reply.ticket = None
            return reply
        return None

    def _draw(self, index: int) -> Callable[[int], int] | None:
        """The jittered intervals of request `index`, in nanoseconds; None where all are exact."""
        if not self._jitter_ratio:
            return None
        uniform = random.Random(f"{self._seed}:{index}").random
        low, width = 1 - self._jitter_ratio, 2 * self._jitter_ratio
        return lambda interval_ns: int(interval_ns * (low + width * uniform()))
