"""What SGLang chooses by the size of a GPU: how much of prompts a step computes, and which CUDA graphs there are.

Source: server_args.py of 0.5.11; arg_groups/memory_hook.py and cuda_graph_hook.py of 0.5.23, which is called `newer`.
"""

from __future__ import annotations

from itertools import chain

_GIB = 1 << 30
# GPUs of less memory: tokens of prompts in a step; of the largest graph, on fewer than four GPUs and on more
_BY_MEMORY = (
    (20, 2048, 8, 8),
    (35, 2048, 24, 80),
    (60, 4096, 32, 160),
    (160, 8192, 256, 512),
)
_NEWER_BY_MEMORY = (
    (20, 2048, 8, 8),
    (35, 4096, 48, 160),
    (60, 4096, 32, 160),
    (160, 8192, 256, 512),
)


def _chosen(memory_bytes: int, newer: bool) -> tuple[int, int, int]:
    for gib, *chosen in _NEWER_BY_MEMORY if newer else _BY_MEMORY:
        if memory_bytes < gib * _GIB:
            return chosen[0], chosen[1], chosen[2]
    return 16384, 512, 512


def chunk_tokens(memory_bytes: int, newer: bool) -> int:
    return _chosen(memory_bytes, newer)[0]


def decode_graphs(memory_bytes: int, tp: int, max_running: int, newer: bool) -> tuple[int, ...]:
    """Rows of each, ascending."""
    _, few, many = _chosen(memory_bytes, newer)
    most = few if tp < 4 else many
    if newer:
        most = min(most, max_running)
        sizes = chain(range(1, 9), range(10, 33, 2), range(40, 65, 4), range(72, 257, 8), range(272, most + 1, 16))
    else:
        sizes = chain((1, 2, 4, 8, 12), range(16, 257, 8), range(272, 512, 16), range(512, most + 1, 32))
    return tuple(sorted({most, *(size for size in sizes if size <= most)}))


def prefill_graphs(chunk: int) -> tuple[int, ...]:
    """Tokens of each, ascending: of the parts between attention."""
    sizes = chain(
        range(4, 33, 4), range(48, 257, 16), range(288, 513, 32), range(576, 1025, 64), range(1280, 4097, 256),
        range(4608, chunk + 1, 512),
    )  # fmt: skip
    return tuple(size for size in sizes if size <= chunk)
