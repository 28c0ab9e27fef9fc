"""The radix trees in which LightLLM and TGI keep the keys and values of prompts: what begins alike is kept once.

A node holds a stretch of tokens and its parent what comes before them. Requests hold the node where their cached part
ends, and with it all nodes above. Only leaves that nobody holds are given up, those first that have not been looked at
for longest. Sizes are in tokens; `unit` tokens are kept or given up together.
"""

from __future__ import annotations

import heapq

from servers.schedulers import Sequence
from servers.schedulers.prefixes import Position, chains

Stretch = tuple[tuple[int, int, int], ...]  # (chain, from, to): offsets in the pieces of servers.schedulers.prefixes


def stretch(sequence: Sequence) -> Stretch:
    """The request's prompt and reply."""
    return tuple((chain, 0, tokens) for chain, tokens in chains(sequence))


def length(tokens: Stretch) -> int:
    return sum(end - begin for _, begin, end in tokens)


def cut(tokens: Stretch, at: int) -> tuple[Stretch, Stretch]:
    """The first `at` tokens and the rest."""
    for number, (chain, begin, end) in enumerate(tokens):
        if at < end - begin:
            head = ((chain, begin, begin + at),) if at else ()
            return tokens[:number] + head, ((chain, begin + at, end), *tokens[number + 1 :])
        at -= end - begin
    return tokens, ()


def shared(one: Stretch, other: Stretch) -> int:
    """How many tokens both begin with, if they begin at the same depth."""
    tokens = 0
    for (chain, begin, end), (other_chain, other_begin, other_end) in zip(one, other, strict=False):
        if (chain, begin) != (other_chain, other_begin):
            break
        tokens += min(end, other_end) - begin
        if end != other_end:
            break
    return tokens


class RadixNode:
    """`holders`: requests that hold it or a node below it. `looked_at`: by a count of look-ups."""

    __slots__ = ("children", "holders", "looked_at", "number", "parent", "tokens")

    def __init__(self, tokens: Stretch, parent: RadixNode | None, looked_at: int, number: int) -> None:
        self.tokens = tokens
        self.parent = parent
        self.children: dict[Position, RadixNode] = {}
        self.holders = 0
        self.looked_at = looked_at
        self.number = number  # of two leaves looked at last at the same time, the lower goes first


class RadixTree:
    """LightLLM's. `total_tokens` are kept, `held_tokens` of them for requests that hold them.

    A match that ends within a node splits it. What is given up is a whole node.
    """

    def __init__(self, unit: int = 1) -> None:
        self.total_tokens = self.held_tokens = 0
        self._unit = unit
        self._looks = 0
        self._numbers = 0
        self._free_numbers: list[int] = []
        self._leaves: list[
            tuple[int, int, int, RadixNode]
        ] = []  # a heap; entries that are no longer true are passed over
        self._entries = 0
        self._root = RadixNode((), None, 0, 0)
        self._root.holders = 1

    @property
    def idle_tokens(self) -> int:
        """What can be given up."""
        return self.total_tokens - self.held_tokens

    def match(self, tokens: Stretch) -> tuple[RadixNode, int]:
        """A node that holds the end of what is kept of `tokens`, and how many tokens that is."""
        node, rest, partly, common = self._walk(tokens)
        if partly is not None:
            node = self._meet(partly, common, ends=True)
        return node, length(tokens) - length(rest) + common

    def insert(self, tokens: Stretch) -> int:
        """Keeps `tokens`, whole units; how many of them were kept before."""
        node, rest, partly, common = self._walk(tokens)
        before = length(tokens) - length(rest) + common
        rest = cut(rest, common)[1]
        if partly is not None:
            node = self._meet(partly, common, ends=not rest)
        if rest:
            self.total_tokens += length(rest)
            self._offer(self._add(node, rest))
        return before

    def hold(self, node: RadixNode) -> None:
        while node.parent is not None:
            if not node.holders:
                self.held_tokens += length(node.tokens)
            node.holders += 1
            node = node.parent

    def release(self, node: RadixNode) -> None:
        last = node
        while node.parent is not None:
            node.holders -= 1
            if not node.holders:
                self.held_tokens -= length(node.tokens)
            node = node.parent
        self._offer(last)

    def evict(self, tokens: int) -> int:
        """Gives up at least so many if there are; how many it was."""
        total = self.total_tokens
        while total - self.total_tokens < tokens and (leaf := self._oldest()) is not None:
            self._give_up(leaf, tokens - (total - self.total_tokens))
        return total - self.total_tokens

    def _meet(self, node: RadixNode, common: int, ends: bool) -> RadixNode:
        """What goes on from, or `ends`, after the first `common` tokens of the node: the node that ends there."""
        return self._split(node, common)

    def _give_up(self, leaf: RadixNode, tokens: int) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[self._first(leaf.tokens)]
        leaf.parent = None
        self.total_tokens -= length(leaf.tokens)
        self._free_numbers.append(leaf.number)
        self._offer(parent)

    def _walk(self, tokens: Stretch) -> tuple[RadixNode, Stretch, RadixNode | None, int]:
        """The last node of which all is a part of `tokens`, what follows it, the child of which a part is, how much."""
        self._looks += 1
        node = self._root
        while length(tokens) >= self._unit and (child := node.children.get(self._first(tokens))) is not None:
            common = shared(child.tokens, tokens) // self._unit * self._unit
            if common < length(child.tokens):
                return node, tokens, child, common
            node, tokens = child, cut(tokens, common)[1]
            self._look_at(node)
        return node, tokens, None, 0

    def _first(self, tokens: Stretch) -> Position:
        """By which a child is found: where its first unit ends."""
        at = self._unit - 1
        for chain, begin, end in tokens:
            if at < end - begin:
                return chain, begin + at
            at -= end - begin
        raise IndexError(tokens)

    def _split(self, node: RadixNode, at: int) -> RadixNode:
        """A new node takes the first tokens of this one, which becomes its child."""
        parent = node.parent
        assert parent is not None
        head, node.tokens = cut(node.tokens, at)
        upper = self._add(parent, head)
        upper.holders = node.holders
        upper.children[self._first(node.tokens)] = node
        node.parent = upper
        return upper

    def _add(self, parent: RadixNode, tokens: Stretch) -> RadixNode:
        if self._free_numbers:
            number = self._free_numbers.pop()
        else:
            self._numbers += 1
            number = self._numbers
        node = RadixNode(tokens, parent, self._looks, number)
        parent.children[self._first(tokens)] = node
        return node

    def _look_at(self, node: RadixNode) -> None:
        node.looked_at = self._looks
        self._offer(node)

    def _offer(self, node: RadixNode) -> None:
        """It may be given up, if it is a leaf that nobody holds."""
        if not node.children and not node.holders:
            self._entries += 1
            heapq.heappush(self._leaves, (node.looked_at, node.number, self._entries, node))

    def _oldest(self) -> RadixNode | None:
        while self._leaves:
            looked_at, _, _, node = heapq.heappop(self._leaves)
            true = node.parent is not None and not node.children and not node.holders
            if true and node.looked_at == looked_at:
                return node
        return None


class BlockTree(RadixTree):
    """TGI's. A match does not split: who holds a part holds the node. The last node given up is so in part."""

    def _meet(self, node: RadixNode, common: int, ends: bool) -> RadixNode:
        self._look_at(node)
        return node if ends else self._split(node, common)

    def _give_up(self, leaf: RadixNode, tokens: int) -> None:
        kept = length(leaf.tokens) - tokens
        if kept <= 0:
            super()._give_up(leaf, tokens)
            return
        leaf.tokens = cut(leaf.tokens, kept)[0]
        self.total_tokens -= tokens
        self._offer(leaf)
