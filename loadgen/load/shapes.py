"""What each request of a load asks for, without its tokens: lengths, and what it shares with requests before it. Pure.

A shape depends on nothing but the load and the request's number; clients, predictions and reports take the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from backends.untrusted import escaped
from loadgen.load.lengths import Law, Lengths, WorkloadError

if TYPE_CHECKING:  # numpy is loaded to draw: options are read without it
    import numpy as np
    from numpy.typing import NDArray

    from loadgen.load.traces import Trace

MOST_GROUPS = 1_000_000
DRAWN_TOGETHER = 4096  # requests of a trace: as Python's numbers all of them would be many times the trace


class Shape(NamedTuple):
    """One request. segments: what its prompt begins with and others may share, as (key, tokens): equal keys mean equal
    tokens from the segment's beginning. Where others repeat the reply they go on into it. What they leave is the
    request's own. shared_tokens: how much of the prompt's beginning an earlier request of the load has sent already, in
    the order of their numbers. items: texts that it has, of `prompt_tokens` together, for a reply that answers each."""

    prompt_tokens: int
    output_tokens: int
    segments: tuple[tuple[int, int], ...] = ()
    shared_tokens: int = 0
    items: int = 1


class Shapes(Protocol):
    """`shape(number)` of a request, and its `id` in the records."""

    def shape(self, number: int) -> Shape: ...

    def id(self, number: int) -> int: ...


class Prefix(msgspec.Struct, frozen=True):
    """Prompts that begin with the same `tokens` tokens as all others of their group. Groups are drawn by the request:
    evenly, or the k-th of them in proportion to k^-zipf."""

    groups: int
    tokens: int
    zipf: float = 0.0

    def __str__(self) -> str:
        return f"{self.groups}:{self.tokens}" + (f":zipf={self.zipf:g}" if self.zipf else "")


def parse_prefix(text: str) -> Prefix:
    """'GROUPS:TOKENS[:zipf=A]'. Raises ValueError with one sentence."""
    match = re.fullmatch(r"(\d{1,7}):(\d{1,10})(?::zipf=(\d+(?:\.\d*)?|\.\d+))?", text)
    if match is None:
        raise ValueError(f"--prefix '{escaped(text)}' is not understood; use GROUPS:TOKENS or GROUPS:TOKENS:zipf=A.")
    groups, tokens, zipf = match.groups()
    prefix = Prefix(int(groups), int(tokens), float(zipf or 0))
    if not 1 <= prefix.groups <= MOST_GROUPS or prefix.tokens < 1 or prefix.zipf > 100:
        raise ValueError(
            f"--prefix '{text}' needs 1 to {MOST_GROUPS} groups, at least one token, and A of at most 100."
        )
    return prefix


class DrawnShapes:
    """Lengths by their laws, and groups of prompts that begin alike."""

    def __init__(
        self, input_tokens: Law, output_tokens: Law, prefix: Prefix | None, seed: int, first_tokens: Law | None = None,
        batch: Law | None = None, thinking_tokens: Law | None = None,
    ) -> None:  # fmt: skip
        """first_tokens: of prompts before which nothing was said, in sessions. batch: how many texts a request has, of
        which input_tokens is the length of each. thinking_tokens: of a reply, before those of its answer."""
        self.first_tokens = first_tokens
        self._first = None if first_tokens is None else Lengths(first_tokens, seed, "first")
        self._input = Lengths(input_tokens, seed, "input")
        self._output = Lengths(output_tokens, seed, "output")
        self._thinking = None if thinking_tokens is None else Lengths(thinking_tokens, seed, "thinking")
        self._batch = None if batch is None else Lengths(batch, seed, "batch")
        self._groups = None if prefix is None else _Groups(prefix, seed)

    def lengths(self, number: int) -> Shape:
        """The lengths of a request that shares nothing."""
        items = 1 if self._batch is None else self._batch.at(number)
        thinking = 0 if self._thinking is None else self._thinking.at(number)
        return Shape(self._input.at(number) * items, thinking + self._output.at(number), items=items)

    def total_tokens(self, requests: int) -> NDArray[np.int64]:
        """Prompt and reply of the first ones together; shape (requests,)."""
        return self._input.first(requests) + self._output.first(requests)

    def shape(self, number: int, member: int | None = None) -> Shape:
        """member: of a session, whose prompts begin as one of them."""
        lengths = self.lengths(number)
        if self._first is not None and member is not None:
            lengths = Shape(self._first.at(number), lengths.output_tokens)
        prompt_tokens, output_tokens = lengths[:2]
        if self._groups is None:
            return lengths
        group, seen = self._groups.at(number if member is None else member)
        tokens = self._groups.prefix.tokens
        if tokens >= prompt_tokens:
            raise WorkloadError(
                f"--prefix {self._groups.prefix} is no shorter than the {prompt_tokens} tokens of request {number}; "
                "lengthen --input-tokens (a law may have a minimum), or shorten the prefix."
            )
        return Shape(prompt_tokens, output_tokens, ((group, tokens),), tokens if seen else 0)

    def id(self, number: int) -> int:
        return number


class _Groups:
    """The group of each request, drawn a block at a time, and which request is the first of its group."""

    BLOCK = 4096

    def __init__(self, prefix: Prefix, seed: int) -> None:
        import numpy as np

        self.prefix = prefix
        self._seed = seed
        weights = np.arange(1, prefix.groups + 1, dtype=np.float64) ** -prefix.zipf
        self._below = np.cumsum(weights / weights.sum())
        self._first: dict[int, int] = {}
        self._blocks = 0  # whose first requests are known
        self._block = -1
        self._drawn: list[int] = []

    def at(self, number: int) -> tuple[int, bool]:
        """The group, and whether an earlier request has it."""
        block, within = divmod(number, self.BLOCK)
        while self._blocks <= block:
            for offset, group in enumerate(self._draw(self._blocks)):
                self._first.setdefault(group, self._blocks * self.BLOCK + offset)
            self._blocks += 1
        if block != self._block:
            self._drawn, self._block = self._draw(block), block
        group = self._drawn[within]
        return group, self._first[group] < number

    def _draw(self, block: int) -> list[int]:
        import numpy as np

        uniform = np.random.default_rng((self._seed, 0x9E0F, block)).random(self.BLOCK)
        groups = np.searchsorted(self._below, uniform, side="right")
        drawn: list[int] = np.minimum(groups, self.prefix.groups - 1).tolist()
        return drawn


class TraceShapes:
    """The requests of a trace. Where it has hash ids, equal ids are equal tokens."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._shared = trace.shared_tokens().tolist()

    def __len__(self) -> int:
        return len(self._trace)

    def shared_tokens(self, number: int) -> int:
        """How many tokens of `shape` are shared."""
        shared: int = self._shared[number % len(self._trace)]
        return shared

    def in_common(self) -> Iterator[Shape]:
        """Each request of the trace once, with those segments only that another has too: the others are as its own."""
        trace = self._trace
        block = trace.block_tokens
        columns = (trace.input_tokens, trace.output_tokens, trace.hash_offsets[:-1], trace.common_blocks())
        for first in range(0, len(trace), DRAWN_TOGETHER):
            part = slice(first, first + DRAWN_TOGETHER)
            rows = zip(*(column[part].tolist() for column in columns), self._shared[part], strict=True)
            for prompt_tokens, output_tokens, begin, common, shared in rows:
                keys = trace.hash_ids[begin : begin + common].tolist() if common else ()
                segments = tuple([(key, min(block, prompt_tokens - place * block)) for place, key in enumerate(keys)])
                yield Shape(prompt_tokens, output_tokens, segments, shared)

    def shape(self, number: int) -> Shape:
        """Beyond its end, for a warm-up that has more requests, the trace begins again."""
        trace = self._trace
        number %= len(trace)
        prompt_tokens = int(trace.input_tokens[number])
        block = trace.block_tokens
        segments = tuple(
            (key, min(block, prompt_tokens - place * block)) for place, key in enumerate(trace.blocks(number).tolist())
        )
        return Shape(prompt_tokens, int(trace.output_tokens[number]), segments, self._shared[number])

    def id(self, number: int) -> int:
        return int(self._trace.line[number])
