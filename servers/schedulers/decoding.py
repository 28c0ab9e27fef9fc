"""Requests that take one token in every step, counted together and not visited one by one.

Most of what a server does is such steps: what they need of a scheduler is how many requests there are, how many tokens
these see, and who needs a block or ends. All three are known before, so a step costs as much as changes in it.
"""

from __future__ import annotations

from typing import Protocol

from servers.schedulers import Sequence


class Held(Protocol):
    """Blocks of the pool that a request holds, by the blocks that its tokens would fill."""

    def __getitem__(self, token_blocks: int, /) -> int: ...


class Decoding:
    """In the order in which they came. `computed` and `sampled` of each are behind until it leaves; its `blocks` are
    not. context: the sum of what all have computed."""

    def __init__(self, held: Held, block_tokens: int) -> None:
        self.rows: list[Sequence] = []
        self.context = 0
        self._held = held
        self._block_tokens = block_tokens
        self._round = 0
        self._full: dict[int, list[Sequence]] = {}  # by round: whose blocks are full before it
        self._grown: list[tuple[Sequence, int]] = []  # whose blocks are more after the next step, and how many
        self._last: dict[int, list[Sequence]] = {}  # by round: who takes its last token in it

    def join(self, sequence: Sequence) -> None:
        """It has sampled a token, not its last, and computed all before that one."""
        sequence.joined = self._round
        self.rows.append(sequence)
        self.context += sequence.computed
        self._last.setdefault(self._round + sequence.output - sequence.sampled, []).append(sequence)
        room = -sequence.computed % self._block_tokens
        self._full.setdefault(self._round + room + 1, []).append(sequence)

    def missing(self) -> int:
        """Blocks that the next step takes."""
        coming, size, held = self._round + 1, self._block_tokens, self._held
        missing = 0
        self._grown = grown = []
        for sequence in self._full.get(coming, ()):
            if sequence.sampled < sequence.output:  # else it has left
                blocks = held[(sequence.computed + coming - sequence.joined + size - 1) // size]
                missing += blocks - sequence.blocks
                grown.append((sequence, blocks))
        return missing

    def advance(self) -> int:
        """One token for each; blocks that they take, those that `missing` has just counted."""
        self._round += 1
        self.context += len(self.rows)
        self._full.pop(self._round, None)
        if not self._grown:
            return 0
        taken = 0
        later = self._full.setdefault(self._round + self._block_tokens, [])
        for sequence, blocks in self._grown:
            taken += blocks - sequence.blocks
            sequence.blocks = blocks
            later.append(sequence)
        return taken

    def leave(self) -> None:
        """Those whose last token is on its way."""
        leaving = self._last.pop(self._round, None)
        if leaving is None:
            return
        for sequence in leaving:
            self._catch_up(sequence)
            self.context -= sequence.computed
        self.rows = [each for each in self.rows if each.sampled < each.output]

    def settle(self) -> None:
        """All leave, in the state that they now have."""
        for sequence in self.rows:
            self._catch_up(sequence)
        self.rows = []
        self.context = 0
        self._full.clear()
        self._last.clear()

    def _catch_up(self, sequence: Sequence) -> None:
        behind = self._round - sequence.joined
        sequence.computed += behind
        sequence.sampled += behind
