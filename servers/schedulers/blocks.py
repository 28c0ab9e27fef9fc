"""vLLM's pool of blocks, where whole blocks can be found again by what they hold.

Free blocks wait in one queue: those that hold nothing known first, then the others, whose content can still be found,
by how long nobody has held them. A block that is handed out loses its content. Within a request that lets go, later
blocks go before earlier ones, so that the end of a prefix is lost before its beginning. Several blocks may hold the
same: the one that was there first is found.
"""

from __future__ import annotations

from collections import OrderedDict

from servers.schedulers import Sequence
from servers.schedulers.prefixes import Position, block_ends


class Block:
    """`content`: where its last token is; None: not whole or not known yet. `holders`: requests that hold it."""

    __slots__ = ("content", "holders")

    def __init__(self) -> None:
        self.content: Position | None = None
        self.holders = 1


class _Held:
    """What a request holds, and what its blocks will hold: the first `published` of them can be found."""

    __slots__ = ("blocks", "contents", "published")

    def __init__(self, contents: list[Position]) -> None:
        self.blocks: list[Block] = []
        self.contents = contents
        self.published = 0


class BlockCache:
    """`blank` blocks hold nothing known; `idle` ones are held by nobody, in the order in which they are handed out."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.blank = blocks
        self.idle: OrderedDict[Block, None] = OrderedDict()
        self._block_tokens = block_tokens
        self._known: dict[Position, dict[Block, None]] = {}
        self._held: dict[Sequence, _Held] = {}

    @property
    def findable(self) -> int:
        """Contents that can be found."""
        return len(self._known)

    def find(self, sequence: Sequence, most: int) -> list[Block]:
        """The blocks that hold the beginning of the request's tokens, at most so many. Nothing changes."""
        held = self._held.get(sequence)
        if held is None:
            held = self._held[sequence] = _Held(block_ends(sequence, self._block_tokens))
        found: list[Block] = []
        for content in held.contents[:most]:
            same = self._known.get(content)
            if same is None:
                break
            found.append(next(iter(same)))
        return found

    def hold(self, sequence: Sequence, found: list[Block]) -> None:
        """A request that holds nothing takes over what `find` found for it."""
        for block in found:
            if not block.holders:
                del self.idle[block]
            block.holders += 1
        held = self._held[sequence]
        held.blocks = found
        held.published = len(found)

    def take(self, sequence: Sequence, blocks: int) -> None:
        """Hands out so many free blocks, which there must be."""
        blank = min(blocks, self.blank)
        self.blank -= blank
        for _ in range(blocks - blank):
            block, _ = self.idle.popitem(last=False)
            assert block.content is not None
            same = self._known[block.content]
            del same[block]
            if not same:
                del self._known[block.content]
        self._held[sequence].blocks += [Block() for _ in range(blocks)]

    def publish(self, sequence: Sequence, tokens: int) -> None:
        """The request's blocks that are whole with its first `tokens` can be found from now on."""
        held = self._held[sequence]
        for number in range(held.published, tokens // self._block_tokens):
            block, content = held.blocks[number], held.contents[number]
            block.content = content
            self._known.setdefault(content, {})[block] = None
            held.published = number + 1

    def release(self, sequence: Sequence) -> int:
        """The request lets go of all its blocks; how many of them have come free."""
        held = self._held.get(sequence)
        if held is None:
            return 0
        freed = 0
        for block in reversed(held.blocks):
            block.holders -= 1
            if not block.holders:
                freed += 1
                if block.content is None:
                    self.blank += 1
                else:
                    self.idle[block] = None
        held.blocks = []
        held.published = 0
        return freed

    def forget(self, sequence: Sequence) -> None:
        """The request has ended and holds nothing; it will not come back."""
        self._held.pop(sequence, None)
