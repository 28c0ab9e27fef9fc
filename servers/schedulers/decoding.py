"""Requests that take one token in every step, counted together and not visited one by one.

Most of what a server does is such steps: what they need of a scheduler is how many requests there are, how many tokens
these see, and who needs a block or ends. All three are known before, so a step costs as much as changes in it.

Steps that are scheduled are numbered from 1. After `scheduled` of them, of which `finished` are over, a request that
joined with step j has sampled `offset + scheduled` tokens, `offset` being what it had sampled then less j, and has
given out `offset + finished`; where no step that it was in is over yet, as many as when it joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from servers.schedulers import Sequence


class Held(Protocol):
    """Blocks of the pool that a request holds, by the blocks that its tokens would fill."""

    def __getitem__(self, token_blocks: int, /) -> int: ...


EVERY = range(1 << 40)  # of a request that holds all that its tokens fill


class Decoding:
    """`rows`: in the order in which they came; the list is never changed, since steps hold it. context: the sum of what
    all have computed. `whole`: by steps that are over, of whom all tokens of a block are known then; `asked`: how many
    steps were over when that was last asked for. At most two are under way at once."""

    def __init__(self, held: Held, block_tokens: int, shares: Callable[[Sequence], bool] = lambda _: False) -> None:
        """shares: whether others may find a block that a request has not filled yet, so that `known` tells of it."""
        self.rows: list[Sequence] = []
        self.context = 0
        self.scheduled = self.finished = self.asked = 0
        self._held = held
        self._block_tokens = block_tokens
        self._shares = shares
        # by step, modulo the tokens of a block: whose blocks are full before it
        self._full: list[list[Sequence]] = [[] for _ in range(block_tokens)]
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
            self._full[(number - computed + 1) % size].append(sequence)
            if self._shares(sequence):
                begin = sequence.prompt + offset
                known = begin + max(self.finished, sequence.joined)
                self.whole.setdefault((known // size + 1) * size - begin, []).append(sequence)
            sequence.counted = self
            del sequence.computed, sequence.sampled, sequence.emitted, sequence.blocks
        self.rows = self.rows + joining

    def missing(self) -> int:
        """Blocks that the next step takes."""
        before, size, held = self.scheduled, self._block_tokens, self._held
        full = self._full[(before + 1) % size]
        if held is EVERY:
            return len(full)
        missing = 0
        for sequence in full:
            filled = (sequence.prompt + sequence.offset + before - 1) // size
            missing += held[filled + 1] - held[filled]
        return missing

    def unchanged(self) -> int:
        """For how many steps from now on nobody leaves, and nothing becomes known that others find."""
        steps = min(self._last) - self.scheduled - 1
        return min(steps, min(self.whole) - self.finished) if self.whole else steps

    def repeat(self, steps: int, over: int) -> int:
        """So many steps have begun in which nobody leaves, the last of them when so many more were over; the blocks
        that they take, where each request holds all that its tokens fill."""
        size, number, rows = self._block_tokens, self.scheduled, len(self.rows)
        rounds, rest = divmod(steps, size)
        blocks = rounds * rows
        for step in range(number + 1, number + rest + 1):
            blocks += len(self._full[step % size])
        self.context += steps * rows
        self.scheduled = number + steps
        self.finished += over
        self.asked = self.finished
        return blocks

    def advance(self) -> list[Sequence]:
        """One token for each of `rows` in a step that begins; those whose last it is, which leave."""
        self.scheduled = number = self.scheduled + 1
        rows = self.rows
        self.context += len(rows)
        leaving = self._last.pop(number, None)
        if leaving is None:
            return []
        staying = rows.copy()
        size = self._block_tokens
        for sequence in leaving:
            staying.remove(sequence)
            sequence.sampled = sequence.output
            sequence.computed = computed = sequence.prompt + sequence.output - 1
            sequence.blocks = self.blocks(computed)
            self._full[(number - computed + 1) % size].remove(sequence)
            self.context -= computed
        self.rows = staying
        return leaving

    def known(self, finished: int, step: int) -> Iterator[tuple[Sequence, int]]:
        """After so many steps: of whom a block more is known that others find, and how many tokens of each. Of those
        that are in the step with this number; each request once."""
        for sequence in self.whole.pop(finished, ()):
            last = sequence.output - sequence.offset
            if step <= last:
                yield sequence, sequence.prompt + sequence.offset + finished
                if self._shares(sequence):
                    self.whole.setdefault(finished + self._block_tokens, []).append(sequence)
            elif finished < last:  # it has left, and its last step is under way
                self.whole.setdefault(finished, []).append(sequence)

    def blocks(self, computed: int) -> int:
        """That a request holds."""
        return self._held[-(-computed // self._block_tokens)]

    def settle(self, others: Iterable[Sequence]) -> None:
        """All leave, in the state that they now have, and so do those of `others` that have left before their last
        token was given out."""
        for sequence in (*self.rows, *others):
            if sequence.counted is not None:
                state = sequence.computed, sequence.sampled, sequence.emitted, sequence.blocks
                sequence.counted = None
                sequence.computed, sequence.sampled, sequence.emitted, sequence.blocks = state
        self.rows = []
        self.context = 0
        for full in self._full:
            full.clear()
        self._last.clear()
        self.whole.clear()
