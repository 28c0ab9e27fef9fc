"""How servers put requests into steps: pure state machines, one for each scheduler that a server has had.

A scheduler knows no clock and no cost. The engine calls `schedule` for the next step, lets it take as long as it takes,
and then calls `finish`; `depth` is how many steps may be under way at once (2: the next step is put together while one
runs, and so it does not know yet what that one will free).
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol


class Rejected(Exception):
    """The server will not take the request. `status` is what it answers with; the message is one sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Rounds(Protocol):
    """Steps that were scheduled, and how many of them are over."""

    scheduled: int
    finished: int

    def blocks(self, computed: int) -> int:
        """That a request with so many tokens in the cache holds."""


class Sequence:
    """One request as a scheduler sees it. Lengths in tokens; `output` is what it will have generated in the end.

    `segments`: (key, tokens) pieces of the prompt, going on into the reply. Equal keys mean equal tokens from the
    piece's beginning on, however long the piece is in each request. What they leave of prompt and reply nobody shares.
    Keys are whole numbers of 64 bits. `adapter`: of the model, that it is for; empty: of none. `priority`: the lower,
    the earlier, where a scheduler looks at it.

    While it is `counted` with others, `computed`, `sampled`, `emitted` and `blocks` are not kept here but worked out
    for whoever asks; `offset` and `joined` are then those of `decoding.Decoding`.
    """

    __slots__ = (
        "adapter", "blocks", "cached", "computed", "counted", "done", "emitted", "index", "joined", "offset", "output",
        "preemptions", "priority", "prompt", "sampled", "segments",
    )  # fmt: skip

    def __init__(
        self, index: int, prompt: int, output: int, segments: tuple[tuple[int, int], ...] = (), adapter: str = "",
        priority: int = 0,
    ) -> None:  # fmt: skip
        self.index = index
        self.prompt = prompt
        self.output = output
        # another adapter makes other keys and values of the same tokens
        mixed = zlib.crc32(adapter.encode()) << 20 if adapter else 0
        self.segments = tuple((key ^ mixed, tokens) for key, tokens in segments) if mixed else segments
        self.adapter, self.priority = adapter, priority
        self.cached = 0  # tokens that the prefix cache had when it was first scheduled
        self.computed = 0  # tokens whose keys and values are, or are about to be, in the cache
        self.sampled = 0  # output tokens that scheduled steps will have given
        self.emitted = 0  # output tokens that finished steps have given
        self.blocks = 0
        self.preemptions = 0
        self.done = False
        self.counted: Rounds | None = None
        self.offset = self.joined = 0

    if not TYPE_CHECKING:  # else every name would be known

        def __getattr__(self, name: str) -> int:
            """What an empty slot says."""
            counted = self.counted
            if name == "emitted":
                return self.offset + max(counted.finished, self.joined)
            if name == "sampled":
                return self.offset + counted.scheduled
            if name == "computed":
                return self.prompt + self.offset + counted.scheduled - 1
            if name == "blocks":
                return counted.blocks(self.computed)
            raise AttributeError(f"a Sequence has no {name}")


@dataclass(slots=True)
class Step:
    """The work of one step, as its cost needs it. `emits` get one token each when it ends, in this order.

    prefill_work counts pairs of query and key: the sum of q * (c + q / 2) over chunks of q tokens that follow c cached.
    chunks: (c, q) of each.

    `turning`: places in `emits` of those whose first or last token it is; None: not known before the step ends.
    `begun`: prompt tokens of those whose first it is, where `turning` is known.
    `ends`: those that were counted up to their last token, which this step gives; `singles`: those of `emits` that are
    counted one by one. `steady`: it has none of both, and is nobody's first token either. `lengths`: tokens of each of
    `emits`, prompt and reply, where its cost needs them. `loads`: adapters that are loaded
    for it first.
    """

    emits: list[Sequence] = field(default_factory=list)
    decode_rows: int = 0
    decode_context: int = 0
    prefill_rows: int = 0
    prefill_tokens: int = 0
    prefill_work: float = 0.0
    chunks: list[tuple[int, int]] = field(default_factory=list)
    turning: list[int] | None = None
    begun: int = 0
    ends: Several[Sequence] = ()
    singles: Several[Sequence] = ()
    lengths: list[int] | None = None
    loads: int = 0
    steady: bool = False

    def prefill(self, tokens: int, cached: int) -> None:
        self.prefill_rows += 1
        self.prefill_tokens += tokens
        self.prefill_work += tokens * (cached + tokens / 2)
        self.chunks.append((cached, tokens))


class Queues:
    """The waiting, and the running or let in, of a scheduler that takes them in the order in which they came."""

    def __init__(self, kv_tokens: int) -> None:
        self.kv_tokens = kv_tokens
        self.preemptions = 0
        self.queried_tokens = self.cached_tokens = 0
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        if not sequence.done:
            self._waiting.append(sequence)

    def repeats(self) -> tuple[Step, int] | None:
        return None

    def repeat(self, steps: int, over: int) -> None:
        pass


class Paged(Queues):
    """With a KV cache of `blocks` blocks, of so many tokens each, that requests hold whole."""

    def __init__(self, kv_tokens: int, blocks: int, block_tokens: int) -> None:
        super().__init__(kv_tokens)
        self._block_tokens = block_tokens
        self._total = self._free = blocks

    @property
    def used_tokens(self) -> int:
        return (self._total - self._free) * self._block_tokens

    def _release(self, sequence: Sequence) -> None:
        self._free += sequence.blocks
        sequence.blocks = 0


class Scheduler(Protocol):
    """`waiting` and `running` are counts, `used_tokens` what the KV cache holds for requests that have not ended, of
    `kv_tokens`. `queried_tokens` were looked up in the prefix cache and `cached_tokens` found, as the server counts."""

    depth: int
    kv_tokens: int
    preemptions: int
    queried_tokens: int
    cached_tokens: int

    @property
    def waiting(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def used_tokens(self) -> int: ...

    def admit(self, sequence: Sequence) -> None:
        """Takes it in at the door, before the front end has worked on it. Raises Rejected."""

    def add(self, sequence: Sequence) -> None:
        """Queues it; the next `schedule` sees it."""

    def cancel(self, sequence: Sequence) -> None:
        """Its client has gone, wherever it stands since `admit`."""

    def schedule(self) -> Step | None:
        """The next step; None when there is nothing that could be done now."""

    def finish(self, step: Step) -> None:
        """The step is over: its tokens are out, and what has ended frees its memory."""

    def repeats(self) -> tuple[Step, int] | None:
        """A step, and how many times it is sure to be the next unless a request comes or leaves, where each is
        scheduled when one of `depth` is over, with a token more of context for each of its requests, of whom none
        ends. None where it is not sure of any."""

    def repeat(self, steps: int, over: int) -> None:
        """This step was scheduled so many times, in turns with so many steps that were over, all of them `steady`."""
