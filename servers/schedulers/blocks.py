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


class Block:
    """`content`: where its last token is. `holders`: requests that hold it."""

    __slots__ = ("content", "holders")

    def __init__(self, content: Position) -> None:
        self.content = content
        self.holders = 1


_OWN = Block((0, 0))  # stands for one that is only counted, and which nobody holds
_OWN.holders = 0


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
        self._known: dict[Position, dict[Block, None]] = {}
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
            same = self._known.get(content)
            if same is None:
                return found
            found.append(next(iter(same)))
        return found + [_OWN] * held.idle

    def hold(self, sequence: Sequence, found: list[Block]) -> None:
        """A request that holds nothing takes over what `find` found for it."""
        held = self._held[sequence]
        held.published = len(found)
        held.blocks = found[: len(held.contents)]
        for block in held.blocks:
            if not block.holders:
                del self.idle[block]
            block.holders += 1
        if held.idle:
            del self.idle[held]
            held.idle = 0

    def take(self, blocks: int) -> None:
        """Hands out so many free blocks, which there must be."""
        left = blocks - self.blank if blocks > self.blank else 0
        self.blank -= blocks - left
        idle, known = self.idle, self._known
        while left:
            block = next(iter(idle))
            if isinstance(block, _Held):
                lost = left if left < block.idle else block.idle
                block.idle -= lost
                self._own_known -= lost
                left -= lost
                if not block.idle:
                    del idle[block]
                continue
            del idle[block]
            left -= 1
            same = known[block.content]
            if len(same) == 1:
                del known[block.content]
            else:
                del same[block]

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
        for content in held.contents[published:whole]:
            block = Block(content)
            held.blocks.append(block)
            same = self._known.get(content)
            if same is None:
                self._known[content] = {block: None}
            else:
                same[block] = None
        if whole > shared:
            self._own_known += whole - shared

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
            block.holders -= 1
            if not block.holders:
                freed += 1
                self.idle[block] = None
        held.blocks = []
        held.published = 0
        return freed

    def forget(self, sequence: Sequence) -> None:
        """The request has ended and holds nothing; it will not come back."""
        self._held.pop(sequence, None)
