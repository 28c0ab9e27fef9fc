"""Sequences of different lengths: what is drawn, how it is padded and packed, and what follows for tokens, FLOPs and
memory."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.load.lengths import WorkloadError
from training_probe import llama_shape
from training_probe.flops import flops_per_token
from training_probe.grid import Cell, cell, settled
from training_probe.memory import predict
from training_probe.packing import draw, packed
from training_probe.refusals import impossible

SPEC = llama_shape.known("7b")
assert SPEC is not None
MODEL = SPEC.decoder
LAW = "lognormal:300:0.8"


def asked(method: str = "F", **more: Any) -> Cell:
    given = {"model": "7b", "engine": "ddp", "seq_len": 2048, "micro_batch": 4, "lengths": LAW, **more}
    return cell(method, **given)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(50, 200))
def test_packing_keeps_every_sequence_whole_in_rows_that_have_room(lengths: list[int], size: int) -> None:
    rows = packed(lengths, size)
    assert sorted(length for row in rows for length in row) == sorted(lengths)
    assert all(sum(row) <= size for row in rows)
    for first, second in pairwise(rows):  # two half-full rows would have been one
        assert sum(first) + sum(second) > size or sum(first) + min(second) > size


def test_best_fit_decreasing_by_hand() -> None:
    """7 and 5 begin rows; 3 fits behind 7 exactly, 4 behind 5; 2 has no room left but in a row of its own."""
    assert packed([2, 5, 3, 7, 4], 10) == [(7, 3), (5, 4), (2,)]


@pytest.mark.parametrize("packing", [False, True])
def test_a_draw_is_the_same_everywhere_and_a_part_of_it_for_each_replica(packing: bool) -> None:
    drawn = draw(LAW, 2048, packing, 4, 3, 2)
    draw.cache_clear()
    assert drawn == draw(LAW, 2048, packing, 4, 3, 2)
    assert [len(replica) for replica in drawn.replicas] == [3] * 4
    assert {len(batch) for replica in drawn.replicas for batch in replica} == {2}
    assert len(set(drawn.replicas)) == 4
    lengths = [length for replica in drawn.replicas for batch in replica for row in batch for length in row]
    assert min(lengths) >= 2 and max(lengths) <= 2048
    assert drawn.tokens == sum(lengths)


def test_packing_leaves_little_padding_and_padding_much() -> None:
    loose, tight = (asked(packing=packing, micro_batch=8, grad_accum=8) for packing in (False, True))
    assert loose.padding_ratio is not None and tight.padding_ratio is not None
    assert loose.padding_ratio > 0.4 and tight.padding_ratio < 0.05
    assert tight.drawn is not None and tight.drawn.positions == 64 * 2048
    assert tight.tokens_per_step == tight.drawn.tokens > 0.95 * 64 * 2048


def test_a_length_beyond_the_row_is_cut() -> None:
    assert asked(lengths="5000", packing=True).tokens_per_step == 4 * 2048
    assert asked(lengths="5000").padding_ratio == 0


def test_a_file_has_a_length_or_a_pair_a_line(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("100\n60 40\n")
    named = asked(lengths=f"file:{path}")
    assert named.tokens_per_step == 400 and named.padding_ratio == 0
    assert named.name.endswith("_lengths.txt")
    path = tmp_path / "others.txt"
    path.write_text("100\n1 2 3\n")
    with pytest.raises(WorkloadError, match="line 2 is not a length or a pair of lengths"):
        impossible(asked(lengths=f"file:{path}"), MODEL)


def test_tokens_and_flops_by_hand() -> None:
    """Two sequences of 100 tokens: padded to themselves, or packed into a row of 250 with 50 tokens of padding."""
    one = flops_per_token(asked(lengths="", seq_len=100), MODEL)
    padded = asked(lengths="100", seq_len=250, micro_batch=2)
    assert padded.tokens_per_step == 200 and flops_per_token(padded, MODEL) == one
    by_sequence = flops_per_token(asked(lengths="100", seq_len=250, micro_batch=1, packing=True), MODEL)
    assert by_sequence.model == one.model
    kind = MODEL.kinds[0]
    pairs = kind.count * kind.attention.pair_flops  # of one attended position, forward
    linear = (one.model - 3 * 100 * pairs) / 100 * 50 * 100 / 200
    assert by_sequence.padding == pytest.approx(linear + 3 * pairs * 50**2 / 200)
    whole = flops_per_token(asked("Naive", lengths="100", seq_len=250, micro_batch=1, packing=True), MODEL)
    assert whole.model == one.model
    assert whole.padding == pytest.approx(linear + 3 * pairs * (250**2 - 2 * 100**2) / 200)


def test_memory_is_of_the_longest_micro_batch() -> None:
    drawn = asked(micro_batch=2).drawn
    assert drawn is not None and drawn.longest < 2048
    same = predict(asked(lengths="", seq_len=drawn.longest, micro_batch=2), MODEL)
    assert predict(asked(micro_batch=2), MODEL).peak_bytes == same.peak_bytes
    full = predict(asked(lengths="", micro_batch=2), MODEL)
    assert predict(asked(micro_batch=2, packing=True), MODEL).peak_bytes == full.peak_bytes > same.peak_bytes


@pytest.mark.parametrize(
    ("method", "more", "said"),
    [
        ("Naive", {"engine": "megatron"}, "built for deepspeed, fsdp2 and ddp"),
        ("Z3", {"engine": "fsdp2", "tp": 2, "gpus": 2}, "without TP and CP"),
        ("F", {"compile": True}, "sequences of one length; leave --lengths out"),
        ("F", {"fp8": True}, "sequences of one length"),
        ("PT", {"task": "finetune", "packing": True}, "leave --packing out"),
        ("F", {"packing": True, "checkpoint": "op"}, "use R, or leave --packing out"),
        ("F", {"micro_batch": 999_999, "grad_accum": 2}, "has 1999998 rows"),
    ],
)
def test_what_does_not_go_together(method: str, more: dict[str, Any], said: str) -> None:
    assert said in str(impossible(asked(method, **more), MODEL))


def test_a_law_that_is_none_is_refused() -> None:
    with pytest.raises(WorkloadError, match="'zipf:1:2' is not understood"):
        asked(lengths="zipf:1:2")


def test_packing_without_lengths_changes_nothing() -> None:
    plain, clauses = settled(asked(lengths="", packing=True))
    assert plain == asked(lengths="")
    why = "all of its sequences fill a row (--lengths names others)"
    assert clauses == [f"--packing changes nothing for {plain.name}: {why}"]


def test_names_have_the_law() -> None:
    assert asked(packing=True).name == "7b_pretrain_ddp_F_1x_s2048_b4_lognormal-300-0.8_packed"
