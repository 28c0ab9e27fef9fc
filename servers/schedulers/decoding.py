"""Requests that take one token in every step, counted together and not visited one by one.

Most of what a server does is such steps: what they need of a scheduler is how many requests there are, how many tokens
these see, and who needs a block or ends. All three are known before, so a step costs as much as changes in it.

Steps that are scheduled are numbered from 1. After `scheduled` of them, of which `finished` are over, a request that
joined with step j has sampled `offset + scheduled` tokens, `offset` being what it had sampled then less j, and has
given out `offset + finished`; where no step that it was in is over yet, as many as when it joined.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from servers.schedulers import Sequence


class Held(Protocol):
    """Blocks of the pool that a request holds, by the blocks that its tokens would fill."""

    def __getitem__(self, token_blocks: int, /) -> int: ...


class Decoding:
    """`rows`: in the order in which they came; the list is never changed, since steps hold it. context: the sum of what
    all have computed. `taking`: who takes blocks in the next step, and how many it has then, once `missing` was asked.
    `whole`: by steps that are over, of whom all tokens of a block are known then. At most two are under way at once."""

    def __init__(self, held: Held, block_tokens: int, publishes: bool = False) -> None:
        """publishes: whether `known` will be asked."""
        self.rows: list[Sequence] = []
        self.context = 0
        self.scheduled = self.finished = 0
        self.taking: list[tuple[Sequence, int]] = []
        self._held = held
        self._block_tokens = block_tokens
        self._publishes = publishes
        self._full: dict[int, list[Sequence]] = {}  # by step: whose blocks are full before it
        self._last: dict[int, list[Sequence]] = {}  # by step: who takes its last token in it
        self.whole: dict[int, list[Sequence]] = {}

    def join(self, joining: list[Sequence]) -> None:
        """All of them have sampled a token, not their last, in the step that was scheduled last; what is under way of
        them is of this step, or of both that are under way."""
        size, number = self._block_tokens, self.scheduled
        for sequence in joining:
            computed, sampled = sequence.computed, sequence.sampled
            sequence.offset = offset = sampled - number
            sequence.joined = number - (sampled - sequence.emitted)
            self.context += computed
            self._last.setdefault(sequence.output - offset, []).append(sequence)
            self._full.setdefault(number + -computed % size + 1, []).append(sequence)
            if self._publishes:
                begin = sequence.prompt + offset
                known = begin + max(self.finished, sequence.joined)
                self.whole.setdefault((known // size + 1) * size - begin, []).append(sequence)
            sequence.counted = self
            del sequence.computed, sequence.sampled, sequence.emitted
        self.rows = self.rows + joining

    def missing(self) -> int:
        """Blocks that the next step takes."""
        number, size, held = self.scheduled + 1, self._block_tokens, self._held
        full = self._full.get(number)
        self.taking = taking = []
        missing = 0
        for sequence in full or ():
            if sequence.offset + number <= sequence.output:  # else it has left
                blocks = held[(sequence.prompt + sequence.offset + number + size - 2) // size]
                missing += blocks - sequence.blocks
                taking.append((sequence, blocks))
        return missing

    def advance(self) -> list[Sequence]:
        """One token for each of `rows` in a step that begins; those whose last it is, which leave. Who takes blocks is
        as `missing` has just found."""
        self.scheduled = number = self.scheduled + 1
        rows = self.rows
        self.context += len(rows)
        if self._full.pop(number, None) is not None and self.taking:
            self._full.setdefault(number + self._block_tokens, []).extend([sequence for sequence, _ in self.taking])
        leaving = self._last.pop(number, None)
        if leaving is None:
            return []
        staying = rows.copy()
        for sequence in leaving:
            staying.remove(sequence)
            sequence.sampled = sequence.output
            sequence.computed = sequence.prompt + sequence.output - 1
            self.context -= sequence.computed
        self.rows = staying
        return leaving

    def known(self, finished: int, step: int) -> Iterator[tuple[Sequence, int]]:
        """After so many steps: of whom a block more is known, and how many tokens of each. Of those that are in the
        step with this number; each request once."""
        whole = self.whole.pop(finished, None)
        if whole is None:
            return
        for sequence in whole:
            last = sequence.output - sequence.offset
            if step <= last:
                self.whole.setdefault(finished + self._block_tokens, []).append(sequence)
                yield sequence, sequence.prompt + sequence.offset + finished
            elif finished < last:  # it has left, and its last step is under way
                self.whole.setdefault(finished, []).append(sequence)

    def settle(self, others: list[Sequence]) -> None:
        """All leave, in the state that they now have, and so do those of `others` that have left before their last
        token was given out."""
        for sequence in (*self.rows, *others):
            if sequence.counted is not None:
                state = sequence.computed, sequence.sampled, sequence.emitted
                sequence.counted = None
                sequence.computed, sequence.sampled, sequence.emitted = state
        self.rows = []
        self.context = 0
        self._full.clear()
        self._last.clear()
        self.whole.clear()
