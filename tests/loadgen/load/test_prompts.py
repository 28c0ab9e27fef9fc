"""Prompts: exact length, no shared prefix, fixed by the seed; datasets with numbered mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from loadgen.load.datasets import Dataset
from loadgen.load.lengths import WorkloadError
from loadgen.load.prompts import (
    FIRST_ID,
    WORDS,
    Text,
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
    text = Text(plain(1, 512)).prompt("measured", 3)
    assert len((text.text or "").split()) == 512


@pytest.mark.parametrize("added", [0, 1, 7])
def test_text_makes_room_for_what_the_server_adds(added: int) -> None:
    source = Text(plain(1, 100))
    for _ in range(2):
        source.fit_offset(100, len((source.prompt("warmup", 0).text or "").split()) + added)
    assert len((source.prompt("measured", 0).text or "").split()) + added == 100


def test_server_that_adds_more_than_the_prompt() -> None:
    with pytest.raises(WorkloadError, match="--input-tokens"):
        Text(plain(1, 5)).fit_offset(5, 50)


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
    text = Text(plain(2, length), count).prompt("measured", number).text
    assert text is not None
    assert count(text) == length


def test_exact_text_gives_the_nearest_when_words_cannot() -> None:
    assert exact_text(["ab"], 3, lambda text: 2 * len(text.split())) == "ab"


def test_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(WorkloadError, match="cannot load a tokenizer"):
        tokenizer_count(str(tmp_path))


def lines(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_dataset(tmp_path: Path) -> None:
    path = lines(tmp_path, {"prompt": "a b"}, {"prompt": [1, 2, 3], "output_tokens": 9}, "", {"prompt": "last"})
    data = Dataset(path, 5, "token_ids", warmup=1)
    assert len(data) == 2
    assert data.prompt("measured", 0).text == "a b"
    assert data.prompt("measured", 1).token_ids == [1, 2, 3]
    assert (data.shape(0).output_tokens, data.shape(1).output_tokens) == (5, 9)
    assert data.prompt("warmup", 0).text == "last"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2 is not a prompt"), ({"promt": "a"}, "line 2 is not a prompt"),
        ({"prompt": ""}, "line 2 has an empty"),
        ({"prompt": []}, "line 2 has an empty"),
        *(
            ({"prompt": "a", name: value}, rf"prompts\.jsonl line 2 is not a prompt: {name}: [^\n`]*\.$")
            for name in ("prompt_tokens", "output_tokens")
            for value in (0, -5, 2.5, "7", True, 1 << 31, 10**30)
        ),
        ({"prompt": [1]}, "line 2 has token ids"),
        ('{"prompt": "\xff"}'.encode("latin-1"), "line 2 is not a prompt"),
    ],
)  # fmt: skip
def test_bad_dataset_line_is_named(tmp_path: Path, row: object, message: str) -> None:
    path = lines(tmp_path, {"prompt": "fine"})
    text = row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode()
    path.write_bytes(path.read_bytes() + b"\n" + text)
    with pytest.raises(WorkloadError, match=message):
        Dataset(path, 1, "text", 0)


@pytest.mark.parametrize("length", [1, (1 << 31) - 1, None])
def test_dataset_lengths_that_can_be_are_taken(tmp_path: Path, length: int | None) -> None:
    data = Dataset(lines(tmp_path, {"prompt": "a", "prompt_tokens": length, "output_tokens": length}), 5, "text", 0)
    assert (data.prompt("measured", 0).n_tokens, data.shape(0).output_tokens) == (length or 0, length or 5)


def test_dataset_too_short_or_missing(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="holds 1 prompt and --warmup 1 takes as many; add prompts, or send"):
        Dataset(lines(tmp_path, {"prompt": "a"}), 1, "text", 1)
    with pytest.raises(WorkloadError, match="cannot read"):
        Dataset(tmp_path / "none.jsonl", 1, "text", 0)


def test_a_dataset_is_repeated_when_asked(tmp_path: Path) -> None:
    path = lines(tmp_path, {"prompt": "a"}, {"prompt": "b", "output_tokens": 9})
    data = Dataset(path, 5, "text", 8, repeat=True)
    assert len(data) == 2
    assert [data.prompt("measured", number).text for number in range(5)] == ["a", "b", "a", "b", "a"]
    assert [data.shape(number).output_tokens for number in range(4)] == [5, 9, 5, 9]
    assert [data.prompt("warmup", number).text for number in range(3)] == ["b", "a", "b"]
    path.write_text("\n")
    with pytest.raises(WorkloadError, match="holds no prompts"):
        Dataset(path, 5, "text", 0, repeat=True)
