"""vLLM's pool of blocks, where whole blocks can be found again by what they hold.

Free blocks wait in one queue: those that hold nothing known first, then the others, whose content can still be found,
by how long nobody has held them. A block that is handed out loses its content. Within a request that lets go, later
blocks go before earlier ones, so that the end of a prefix is lost before its beginning. Several blocks may hold the
same: the one that was there first is found.

Blocks that nobody can find yet, and those that end in what a request shares with nobody, are only counted. Nobody but
the request itself finds the latter, when it comes back after it was preempted; and then all that are left of them,
since whatever is before them is lost later.
"""

from __future__ import annotations

from collections import OrderedDict

from servers.schedulers import Sequence
from servers.schedulers.prefixes import Position, block_ends

Block = tuple[int, ...]  # its content, which is where its last token is; and a number where others had the same before
_OWN: Block = ()  # stands for one that is only counted, and which nobody holds


class _Held:
    """What a request holds that can be found: the first `published` of its blocks, of which the first `blocks` have the
    beginning of `contents`. idle: own ones that it has let go of and that can still be found."""

    __slots__ = ("blocks", "contents", "idle", "published")

    def __init__(self, contents: list[Position]) -> None:
        self.blocks: list[Block] = []
        self.contents = contents
        self.idle = 0
        self.published = 0


class BlockCache:
    """`blank` blocks hold nothing known; `idle` ones are held by nobody, in the order in which they are handed out: by
    themselves, or a request's own ones together, the last of them first."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.blank = blocks
        self.idle: OrderedDict[Block | _Held, None] = OrderedDict()
        self._block_tokens = block_tokens
        self._known: dict[Block, Block] = {}  # by content: the one that is found
        self._copies: dict[Block, dict[Block, None]] = {}  # by content: the others, in order
        self._copied = 0
        self._more: dict[Block, int] = {}  # of those that several requests hold: how many do, but for one
        self._own_known = 0
        self._held: dict[Sequence, _Held] = {}

    @property
    def findable(self) -> int:
        """Contents that can be found."""
        return len(self._known) + self._own_known

    def find(self, sequence: Sequence, most: int) -> list[Block]:
        """The blocks that hold the beginning of the request's tokens, at most so many. Nothing changes."""
        held = self._held.get(sequence)
        if held is None:
            held = self._held[sequence] = _Held(block_ends(sequence, self._block_tokens, own=False))
        found: list[Block] = []
        for content in held.contents[:most]:
            block = self._known.get(content)
            if block is None:
                return found
            found.append(block)
        return found + [_OWN] * held.idle

    def unheld(self, found: list[Block]) -> int:
        """How many of them nobody holds."""
        return found.count(_OWN) + sum(map(self.idle.__contains__, found))

    def hold(self, sequence: Sequence, found: list[Block]) -> None:
        """A request that holds nothing takes over what `find` found for it."""
        held = self._held[sequence]
        held.published = len(found)
        held.blocks = found[: len(held.contents)]
        for block in held.blocks:
            if block in self.idle:
                del self.idle[block]
            else:
                self._more[block] = self._more.get(block, 0) + 1
        if held.idle:
            del self.idle[held]
            held.idle = 0

    def take(self, blocks: int) -> None:
        """Hands out so many free blocks, which there must be."""
        left = blocks - self.blank if blocks > self.blank else 0
        self.blank -= blocks - left
        idle, known, copies = self.idle, self._known, self._copies
        while left:
            block, _ = idle.popitem(last=False)
            if isinstance(block, _Held):
                lost = left if left < block.idle else block.idle
                block.idle -= lost
                self._own_known -= lost
                left -= lost
                if block.idle:
                    idle[block] = None
                    idle.move_to_end(block, last=False)
                continue
            left -= 1
            content = block[:2]
            others = copies.get(content)
            if others is None:
                del known[content]
                continue
            if known[content] == block:
                block = known[content] = next(iter(others))
            del others[block]
            if not others:
                del copies[content]

    def shares(self, sequence: Sequence) -> bool:
        """Whether others will find a block of the request that cannot be found yet."""
        held = self._held[sequence]
        return held.published < len(held.contents)

    def publish(self, sequence: Sequence, tokens: int) -> None:
        """The request's blocks that are whole with its first `tokens` can be found from now on."""
        held = self._held[sequence]
        whole, shared, published = tokens // self._block_tokens, len(held.contents), held.published
        if whole <= published:
            return
        held.published = whole
        if published >= shared:
            self._own_known += whole - published
            return
        new, known = held.contents[published:whole], self._known
        if known.keys().isdisjoint(new):
            known.update(zip(new, new, strict=True))
            held.blocks += new
        else:
            held.blocks += map(self._put, new)
        if whole > shared:
            self._own_known += whole - shared

    def _put(self, content: Block) -> Block:
        """A block that holds it from now on."""
        if content not in self._known:
            self._known[content] = content
            return content
        self._copied += 1
        block = (*content, self._copied)
        self._copies.setdefault(content, {})[block] = None
        return block

    def release(self, sequence: Sequence) -> int:
        """The request lets go of all its blocks; how many of them have come free."""
        held = self._held.get(sequence)
        if held is None:
            return 0
        freed = sequence.blocks - len(held.blocks)
        if freed:
            held.idle = max(0, held.published - len(held.contents))
            self.blank += freed - held.idle
            if held.idle:
                self.idle[held] = None
        for block in reversed(held.blocks):
            if block not in self._more:
                freed += 1
                self.idle[block] = None
            elif self._more[block] > 1:
                self._more[block] -= 1
            else:
                del self._more[block]
        held.blocks = []
        held.published = 0
        return freed

    def forget(self, sequence: Sequence) -> None:
        """The request has ended and holds nothing; it will not come back."""
        self._held.pop(sequence, None)
