"""When each token is due: fixed times, so that the truth about every latency is known in advance.

The first token is due `ttft` after the request was received and each further one `itl` after the one before was due,
not after it was sent: what goes out late does not push the rest back. With jitter every interval, the first included,
is multiplied by a factor uniform in 1 +- jitter, drawn from the seed and the request's number alone.

No clock is read here and nothing is sent: the caller passes the time and emits what is due. A model of a scheduler can
take this place behind the same four calls (modelled_timing.py).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from loadgen.rundir.emulation import Emulation
from servers.schedulers import Scheduler


class TimedReply(Protocol):
    """What is scheduled; `index` numbers the requests and is below 2**32. Fixed times ignore the prompt's length.
    segments: what prompt and reply are made of, for a prefix cache. adapter: of the model, that it is for.
    priority: the lower, the earlier, where a modelled scheduler looks at it."""

    index: int
    received_ns: int
    n_prompt_tokens: int
    n_tokens: int
    segments: tuple[tuple[int, int], ...]
    adapter: str
    priority: int

    def found(self, cached_tokens: int) -> None:
        """So many tokens of the prompt were in the prefix cache; called before the first token."""

    def emit(self) -> None:
        """Sends the next token."""


INDEX_BITS = 32
INDEX = (1 << INDEX_BITS) - 1


class Timing(Protocol):
    """When the tokens of the server's replies are due. Times are monotonic nanoseconds. `facts` and `scheduler`: of
    modelled hardware; None where times are fixed. `fixed`: ms of the first token and of each further one, and the
    jitter of both as a ratio; None where times are modelled. `popped_due_ns`: when the token that `pop` gave last was
    due."""

    popped_due_ns: int

    @property
    def fixed(self) -> tuple[float, float, float] | None: ...
    @property
    def facts(self) -> Emulation | None: ...
    @property
    def scheduler(self) -> Scheduler | None: ...

    def submit(self, reply: TimedReply) -> None:
        """Takes a reply on. May raise Rejected."""

    def cancel(self, reply: TimedReply) -> None:
        """Nothing more of it will be due."""

    def next_due_ns(self) -> int | None:
        """When to call `pop` again."""

    def pop(self, now_ns: int) -> TimedReply | None:
        """The reply whose next token is due; None: none is yet."""


class FixedTiming:
    """Times are monotonic nanoseconds. Replies due at the same time come in the order of their numbers.

    The queue is a heap of plain integers, the due time above the reply's number: at 100,000 tokens a second the
    comparison of anything richer would be a tenth of all work.
    """

    facts = None
    scheduler = None

    def __init__(self, ttft_ns: int, itl_ns: int, jitter_ratio: float = 0.0, seed: int = 0) -> None:
        self._ttft_ns = ttft_ns
        self._itl_ns = itl_ns
        self._jitter_ratio = jitter_ratio
        self._seed = seed
        self.popped_due_ns = 0
        self._heap: list[int] = []
        self._pending: dict[int, _Pending] = {}

    @property
    def fixed(self) -> tuple[float, float, float]:
        """What every latency would be without delays."""
        return self._ttft_ns / 1e6, self._itl_ns / 1e6, self._jitter_ratio

    def submit(self, reply: TimedReply) -> None:
        """Schedules all tokens of `reply`. Submitted late, they are due at once, in order."""
        pending = _Pending(reply, reply.n_tokens, self._draw(reply.index))
        first_ns = self._ttft_ns if pending.draw is None else pending.draw(self._ttft_ns)
        self._pending[reply.index] = pending
        heapq.heappush(self._heap, (reply.received_ns + first_ns) << INDEX_BITS | reply.index)

    def cancel(self, reply: TimedReply) -> None:
        """Nothing more of `reply` will be due. Its place in the queue goes when its time comes."""
        self._pending.pop(reply.index, None)

    def next_due_ns(self) -> int | None:
        """When something is due next."""
        return self._heap[0] >> INDEX_BITS if self._heap else None

    def pop(self, now_ns: int) -> TimedReply | None:
        """The reply whose next token is due longest at `now_ns`, or None: nothing is due yet. Never early."""
        heap = self._heap
        until = now_ns << INDEX_BITS | INDEX
        while heap:
            key = heap[0]
            if key > until:
                return None
            pending = self._pending.get(key & INDEX)
            if pending is None:
                heapq.heappop(heap)
                continue
            pending.n_left -= 1
            if pending.n_left:
                gap_ns = self._itl_ns if pending.draw is None else pending.draw(self._itl_ns)
                heapq.heapreplace(heap, key + (gap_ns << INDEX_BITS))
            else:
                heapq.heappop(heap)
                del self._pending[key & INDEX]
            self.popped_due_ns = key >> INDEX_BITS
            return pending.reply
        return None

    def _draw(self, index: int) -> Callable[[int], int] | None:
        """Jitters the intervals of request `index`, given and returned in nanoseconds; None where all are exact."""
        if not self._jitter_ratio:
            return None
        uniform = random.Random(f"{self._seed}:{index}").random
        low, width = 1 - self._jitter_ratio, 2 * self._jitter_ratio
        return lambda interval_ns: int(interval_ns * (low + width * uniform()))


@dataclass(slots=True)
class _Pending:
    """A reply in the queue: how many tokens are left, and its jitter."""

    reply: TimedReply
    n_left: int
    draw: Callable[[int], int] | None
