"""The micro batches of a step: what a model is called with, the same in every step, other on every replica.

Sequences of different lengths are padded behind their last token, or packed. Padding needs no mask: it stands behind
all tokens, and causal attention looks back alone. Packed sequences begin at position 0 each, from which transformers
makes block-diagonal masks; FlashAttention takes none, and gets where each begins instead (`packed_flash`). No token is
predicted from another sequence, and padding is never predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from training_probe.packing import MicroBatch
from training_probe.protocol import Trial
from training_probe.worker.loss import IGNORED

Inputs = Mapping[str, Any]  # by the names that transformers' models take


def batch(trial: Trial, replica: int, device: torch.device, vocab_size: int) -> list[Inputs]:
    """The micro batches of a replica."""
    cell = trial.cell
    generator = torch.Generator().manual_seed(trial.seed * 65_537 + replica)
    shape = (cell.grad_accum, cell.sequences, cell.seq_len)
    drawn = torch.randint(vocab_size, shape, generator=generator)
    if not trial.rows:
        return [{"input_ids": ids, "labels": ids} for ids in drawn.to(device)]
    inputs: list[Inputs] = []
    for ids, rows in zip(drawn, trial.rows[replica], strict=True):
        made = _packed(ids, rows, cell.attention == "flash") if cell.packing else _padded(ids, rows)
        inputs.append({name: each.to(device) if isinstance(each, Tensor) else each for name, each in made.items()})
    return inputs


def _padded(ids: Tensor, rows: MicroBatch) -> Inputs:
    """The sequences, each behind nothing but its own tokens."""
    ids = ids[:, : max(length for (length,) in rows)]
    labels = ids.clone()
    for label, (length,) in zip(labels, rows, strict=True):
        label[length:] = IGNORED
    return {"input_ids": ids, "labels": labels}


def _packed(ids: Tensor, rows: MicroBatch, flash: bool) -> Inputs:
    """Rows of sequences; what is left of a row is one more, which is not learned."""
    labels, positions, parts = ids.clone(), torch.empty_like(ids), []
    for row, label, position in zip(rows, labels, positions, strict=True):
        whole = [*row, left] if (left := len(label) - sum(row)) else [*row]
        for start, length in zip(accumulate(whole, initial=0), whole, strict=False):
            label[start] = IGNORED
            position[start : start + length] = torch.arange(length)
        label[sum(row) :] = IGNORED
        parts += whole
    inputs = {"input_ids": ids, "labels": labels, "position_ids": positions}
    if not flash:
        return inputs
    starts = torch.tensor([0, *accumulate(parts)], dtype=torch.int32)
    both = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    return {**inputs, **both, "max_length_q": max(parts), "max_length_k": max(parts)}


def packed_flash(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **settings: Any
) -> tuple[Tensor, None]:
    """torch's own FlashAttention over packed rows, as an attention of transformers: (row, heads, position, size) each
    -> (row, position, heads, size). On the CPU, whose kernel takes no starts, sequence by sequence."""
    rows, _, length, _ = query.shape
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    starts, scale = settings["cu_seq_lens_q"], settings["scaling"]
    if query.is_cuda:
        longest = settings["max_length_q"]
        out = torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, longest, longest, 0.0, True, False, scale=scale
        )[0]
    else:
        lengths = starts.diff().tolist()
        sequences = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        out = torch.cat([_sequence(*each, scale) for each in sequences])
    return out.unflatten(0, (rows, length)), None


def _sequence(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """(position, heads, size) each."""
    q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
    grouped = q.shape[1] != k.shape[1]
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return out[0].transpose(0, 1)
