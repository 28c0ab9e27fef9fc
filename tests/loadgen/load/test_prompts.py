"""Prompts: exact length, no shared prefix, fixed by the seed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from loadgen.load.lengths import WorkloadError
from loadgen.load.prompts import (
    FIRST_ID,
    WORDS,
    RandomText,
    TokenIds,
    exact_text,
    tokenizer_count,
)
from tests.loadgen.load.loads import plain


@given(st.integers(0, 9), st.integers(1, 700), st.integers(2, 50_000), st.sampled_from(["warmup", "measured"]))
@settings(deadline=None, max_examples=40)
def test_token_ids_have_their_length_and_range(seed: int, length: int, vocab: int, phase: str) -> None:
    ids = TokenIds(plain(seed, length), vocab).prompt(phase, 300).token_ids
    assert ids is not None and len(ids) == length
    assert max(ids) < vocab
    assert min(ids) >= (FIRST_ID if vocab > 2 * FIRST_ID else 0)


def test_no_two_prompts_share_a_block() -> None:
    """Prefix caches work in blocks of 16 tokens or more: no first block may appear twice, warm-up included."""
    source = TokenIds(plain(0, 32))
    firsts = {tuple((source.prompt(p, n).token_ids or ())[:16]) for p in ("warmup", "measured") for n in range(2000)}
    assert len(firsts) == 4000


def test_prompts_depend_on_seed_and_number_only() -> None:
    source = TokenIds(plain(5, 8))
    forward = [source.prompt("measured", n).token_ids for n in range(600)]
    backward = [TokenIds(plain(5, 8)).prompt("measured", n).token_ids for n in reversed(range(600))]
    assert forward == backward[::-1]
    assert forward[0] != TokenIds(plain(6, 8)).prompt("measured", 0).token_ids


def test_text_counts_words_without_a_tokenizer() -> None:
    text = RandomText(plain(1, 512)).prompt("measured", 3)
    assert len((text.text or "").split()) == 512


@pytest.mark.parametrize("added", [0, 1, 7])
def test_text_makes_room_for_what_the_server_adds(added: int) -> None:
    source = RandomText(plain(1, 100))
    for _ in range(2):
        source.fit_offset(100, len((source.prompt("warmup", 0).text or "").split()) + added)
    assert len((source.prompt("measured", 0).text or "").split()) + added == 100


def test_server_that_adds_more_than_the_prompt() -> None:
    with pytest.raises(WorkloadError, match="--input-tokens"):
        RandomText(plain(1, 5)).fit_offset(5, 50)


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE so small that most words are several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@given(st.integers(20, 600), st.integers(0, 500))
@settings(deadline=None, max_examples=30)
def test_text_is_exact_by_the_given_tokenizer(tokenizer_dir: Path, length: int, number: int) -> None:
    count = tokenizer_count(str(tokenizer_dir))
    text = RandomText(plain(2, length), count).prompt("measured", number).text
    assert text is not None
    assert count(text) == length


def test_exact_text_gives_the_nearest_when_words_cannot() -> None:
    assert exact_text(["ab"], 3, lambda text: 2 * len(text.split())) == "ab"


def test_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(WorkloadError, match="cannot load a tokenizer"):
        tokenizer_count(str(tmp_path))
    os.truncate(tmp_path / "tokenizer.json", 1 << 40)
    with pytest.raises(WorkloadError, match=r"cannot load a tokenizer .* it is larger than 64 MiB"):
        tokenizer_count(str(tmp_path))
