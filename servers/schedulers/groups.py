"""One pool of blocks for layers that keep every token and layers that keep a window, as vLLM's hybrid KV cache manager
divides it.

Layers that keep alike are put into groups of one size, padded where they do not fill it; a block is 16 tokens of the
layers of one group. A request holds blocks in every group, and gives back those that its window has left behind. What
vLLM prints as the cache's size counts requests of the full length, whose windowed groups hold their window and what may
be under way in prefills.

Source: vllm/v1/core/kv_cache_utils.py (_get_kv_cache_groups_uniform_page_size, get_kv_cache_capacity) and
v1/kv_cache_interface.py of 0.32; tests/vllm/test_kv_capacity.py lays this beside them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from backends.decoder import Window

BLOCK_TOKENS = 16
UNEVEN = 1.5  # by how many times more layers of one kind have groups as small as the other's


@dataclass(frozen=True)
class LayerGroups:
    """`layers` in each group; `windows`: what each group keeps. max_model_len: the full length. in_flight_tokens: that
    steps under way may be computing together. state_blocks: what each request holds beside, whatever its length."""

    layers: int
    windows: tuple[Window | None, ...]
    max_model_len: int
    in_flight_tokens: int
    state_blocks: int = 0

    @classmethod
    def of(cls, kept: Iterable[tuple[int, Window | None]], max_model_len: int, in_flight_tokens: int) -> LayerGroups:
        """`kept`: layers, and what each of them keeps."""
        counts: dict[Window | None, int] = {}
        for count, window in kept:
            counts[window] = counts.get(window, 0) + count
        size, most = min(counts.values()), max(counts.values())
        if most < UNEVEN * size:
            size = most
        windows = [window for window, count in counts.items() for _ in range(-(-count // size))]
        return cls(size, tuple(windows), max_model_len, in_flight_tokens)

    @property
    def uneven(self) -> bool:
        """Whether a request holds other than a block for each block of its tokens."""
        return self.state_blocks > 0 or any(window is not None for window in self.windows)

    def blocks_needed(self, tokens: int) -> int:
        """Blocks that must be free for a request of so many tokens to be let in."""
        return sum(self._most(window, tokens) for window in self.windows) + self.state_blocks

    def held(self, token_blocks: int) -> int:
        """Blocks that a request holds whose tokens fill so many blocks of one group."""
        blocks = self.state_blocks
        for window in self.windows:
            # a window begins anywhere in a block; a chunk at its beginning
            most = token_blocks if window is None else -(-window.tokens // BLOCK_TOKENS) + (not window.chunked)
            blocks += min(token_blocks, most)
        return blocks

    def tokens(self, blocks: float) -> int:
        """What vLLM prints as the size of a cache of so many blocks."""
        return int(blocks / self.blocks_needed(self.max_model_len) * self.max_model_len)

    def blocks(self, tokens: int) -> int:
        """Blocks of a cache of that size."""
        return round(tokens / self.max_model_len * self.blocks_needed(self.max_model_len))

    def _most(self, window: Window | None, tokens: int) -> int:
        length = min(tokens, self.max_model_len)
        if window is None:
            return -(-length // BLOCK_TOKENS)
        if window.chunked:
            return min(-(-length // BLOCK_TOKENS), -(-(window.tokens + self.in_flight_tokens) // BLOCK_TOKENS))
        most = -(-min(window.tokens - 1 + self.in_flight_tokens, self.max_model_len) // BLOCK_TOKENS) + 1
        # as one block more is asked for a window, so it is for a request of the full length
        return most if tokens >= self.max_model_len else min(-(-length // BLOCK_TOKENS), most)
