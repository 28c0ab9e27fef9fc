"""vLLM's pool of blocks, where whole blocks can be found again by what they hold.

Free blocks wait in one queue: those that hold nothing known first, then the others, whose content can still be found,
by how long nobody has held them. A block that is handed out loses its content. Within a request that lets go, later
blocks go before earlier ones, so that the end of a prefix is lost before its beginning. Several blocks may hold the
same: the one that was there first is found.

Blocks are kept as runs: of a piece that requests share, those that follow each other and that the same requests hold.
A run is divided where somebody holds a part of it alone. Blocks that nobody can find yet are only counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from servers.schedulers import Sequence
from servers.schedulers.prefixes import chains


class _Run:
    """The blocks that end in the piece `chain` (servers.schedulers.prefixes), from the low-th block of a request up to
    the high-th. freed: when the last of its `holders` let go, by a count. after: what was divided from its end."""

    __slots__ = ("after", "chain", "freed", "high", "holders", "low")

    def __init__(self, chain: int, low: int, high: int) -> None:
        self.chain = chain
        self.low = low
        self.high = high
        self.holders = 1
        self.freed = 0
        self.after: _Run | None = None

    def up_to(self, high: int) -> list[_Run]:
        """The run itself and those after it, up to that block."""
        runs = [run := self]
        while run.high < high:
            assert run.after is not None
            runs.append(run := run.after)
        return runs


class _Held:
    """What a request holds that can be found: the first `published` of its blocks, as `runs` with the block at which
    each ends now. pieces: (chain, blocks before its end) of all its tokens; others may have the first `shared` blocks
    too."""

    __slots__ = ("pieces", "published", "runs", "shared")

    def __init__(self, sequence: Sequence, block_tokens: int) -> None:
        self.pieces: list[tuple[int, int]] = []
        tokens = 0
        for chain, length in chains(sequence):
            tokens += length
            self.pieces.append((chain, tokens // block_tokens))
        self.shared = sum([tokens for _, tokens in sequence.segments if tokens > 0]) // block_tokens
        self.published = 0
        self.runs: list[tuple[_Run, int]] = []


class BlockCache:
    """`blank` blocks hold nothing known."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.blank = blocks
        self._block_tokens = block_tokens
        self._runs: dict[int, list[_Run]] = {}  # by chain; of two with a block of one content, the first had it first
        # those that nobody holds, by `freed`, the longest free first; with one number the parts of what was one run, in
        # the order of their blocks
        self._idle: OrderedDict[int, list[_Run]] = OrderedDict()
        self._oldest: list[_Run] = []  # the first of them; empty when it is not there any more
        self._freed = 0
        self._held: dict[Sequence, _Held] = {}

    @property
    def findable(self) -> int:
        """Contents that can be found."""
        return sum(len({block for run in runs for block in range(run.low, run.high)}) for runs in self._runs.values())

    def find(self, sequence: Sequence, most: int) -> tuple[int, int]:
        """How many blocks hold the beginning of the request's tokens, at most so many; and how many of them nobody
        holds. Nothing changes."""
        found = idle = 0
        for run, begin, found in self._found(sequence, most):
            if not run.holders:
                idle += found - begin
        return found, idle

    def _found(self, sequence: Sequence, most: int) -> Iterator[tuple[_Run, int, int]]:
        """The runs of these blocks, and from which block to which."""
        held = self._held.get(sequence)
        if held is None:
            held = self._held[sequence] = _Held(sequence, self._block_tokens)
        at = 0
        for chain, end in held.pieces:
            last = end if end < most else most
            while at < last:
                begin, end = at, last
                for run in self._runs.get(chain, ()):
                    if run.low <= begin < run.high:
                        at = end if end < run.high else run.high
                        yield run, begin, at
                        break
                    if begin < run.low < end:
                        end = run.low  # from there on this run was there first
                else:
                    return

    def hold(self, sequence: Sequence, blocks: int) -> None:
        """A request that holds nothing takes over the blocks that `find` found for it."""
        held = self._held[sequence]
        held.published = blocks
        for run, begin, end in self._found(sequence, blocks):
            if run.low < begin:
                run = self._divide(run, begin)
            if end < run.high:
                self._divide(run, end)
            if not run.holders:
                parts = self._idle[run.freed]
                parts.remove(run)
                if not parts:
                    del self._idle[run.freed]
            run.holders += 1
            held.runs.append((run, end))

    def _divide(self, run: _Run, at: int) -> _Run:
        """The blocks from `at` on become a run of their own."""
        upper = _Run(run.chain, at, run.high)
        upper.holders, upper.freed = run.holders, run.freed
        if run.after is not None and run.after.low < run.after.high:  # it has not been lost
            upper.after = run.after
        run.high, run.after = at, upper
        runs = self._runs[run.chain]
        runs.insert(runs.index(run) + 1, upper)
        if not upper.holders:
            parts = self._idle[upper.freed]
            parts.insert(parts.index(run) + 1, upper)
        return upper

    def take(self, blocks: int) -> None:
        """Hands out so many free blocks, which there must be."""
        if blocks <= self.blank:
            self.blank -= blocks
            return
        left = blocks - self.blank
        self.blank = 0
        while left:
            parts = self._oldest
            if not parts:
                parts = self._oldest = next(iter(self._idle.values()))
            run = parts[-1]
            lost = run.high - run.low
            if lost > left:
                lost = left
            run.high -= lost
            left -= lost
            if run.high == run.low:
                parts.pop()
                if not parts:
                    self._idle.popitem(last=False)
                runs = self._runs[run.chain]
                runs.remove(run)
                if not runs:
                    del self._runs[run.chain]

    def shares(self, sequence: Sequence) -> bool:
        """Whether others will find a block of the request that cannot be found yet."""
        held = self._held[sequence]
        return held.published < held.shared

    def publish(self, sequence: Sequence, tokens: int) -> None:
        """The request's blocks that are whole with its first `tokens` can be found from now on."""
        held = self._held[sequence]
        whole, begin = tokens // self._block_tokens, held.published
        if whole <= begin:
            return
        held.published = whole
        for chain, end in held.pieces:
            if begin < end:
                high = end if end < whole else whole
                self._publish(held, chain, begin, high)
                begin = high
                if high == whole:
                    return

    def _publish(self, held: _Held, chain: int, low: int, high: int) -> None:
        runs = self._runs.get(chain)
        if runs is None:
            runs = self._runs[chain] = []
        elif held.runs and (last := held.runs[-1][0]) is runs[-1] and last.holders == 1 and last.high == low:
            last.high = high
            held.runs[-1] = last, high
            return
        run = _Run(chain, low, high)
        runs.append(run)
        held.runs.append((run, high))

    def release(self, sequence: Sequence) -> int:
        """The request lets go of all its blocks; how many of them have come free."""
        held = self._held.get(sequence)
        if held is None:
            return 0
        freed = sequence.blocks - held.published
        self.blank += freed
        for first, end in reversed(held.runs):
            for run in reversed(first.up_to(end)):
                run.holders -= 1
                if not run.holders:
                    self._freed += 1
                    run.freed = self._freed
                    freed += run.high - run.low
                    self._idle[run.freed] = [run]
        held.runs = []
        held.published = 0
        return freed

    def forget(self, sequence: Sequence) -> None:
        """The request has ended and holds nothing; it will not come back."""
        self._held.pop(sequence, None)
