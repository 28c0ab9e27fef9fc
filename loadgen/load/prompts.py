"""Prompts of exact length that share no prefix, fixed by the seed and the request's number.

A prompt depends on nothing but (seed, phase, number), so any worker can draw any request and nothing has to be kept.
Servers that take token ids get ids; for the others text is built from words. One word is one token for most
vocabularies, but only the server's own count proves it: `fit_offset` takes what the server adds (a begin-of-sequence
token, a chat template), `fit_words` what a word counts where that is another number, and every reply's `prompt_tokens`
is checked afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from backends.exit_codes import lacking
from backends.foreign_files import read_named
from backends.protocol import Prompt
from loadgen.load.lengths import WorkloadError
from loadgen.load.load import Load
from loadgen.load.sessions import SessionShapes
from loadgen.load.shapes import Shape
from loadgen.load.turns import Turns

BLOCK_TOKENS = 1 << 17  # prompts are drawn some at a time: at most 256, fewer when they are long
FIRST_ID = 1000  # below lie special and byte tokens in the vocabularies of Llama, Mistral, Qwen and Gemma
UNKNOWN_VOCABULARY = 4000  # ids below this exist in nearly every model

# Frequent English words: each is one token, with the space before it, in byte-pair vocabularies trained on the web.
_WORDS_TEXT = """
the of and to in is was for that on with as it by at from his are this be an which or had not were have one
her their has but they also its all been would into two time more when other there only about out first can
new some could my no them what people over years such may these after work most between part made being long
where life through back much before good own way down should because each any those very world state just
must same under last well year might still even here both never small does too many little house found old
great place again right left thought side hand high next early country night school course home water white
number later always system family money city company days though against program social problem power second
form less public since order large important government set point however given group case during few line
end
"""
WORDS = _WORDS_TEXT.split()

ODD_RATIO, ODD_TOKENS = 0.05, 4  # of a prompt: counts that part by more are no matter of a token or two
FILLERS = (" a", " I", " 1", ".", ",", "!", "?", "\n", " .")  # one of them is one token more in any vocabulary


class Workload(Protocol):
    """The requests of a run: what each asks for, its prompt, and its id in the records. turns: of sessions, where both
    are what the turn adds to all that was said before."""

    @property
    def turns(self) -> Turns | None: ...

    def own(self, number: int) -> Shape: ...

    def prompt(self, phase: str, number: int) -> Prompt: ...

    def id(self, number: int) -> int: ...


class _Rows:
    """Rows of random integers in [low, high), one a request, drawn in blocks from (seed, phase, block)."""

    def __init__(self, seed: int, length: int, low: int, high: int) -> None:
        self._seed, self._length, self._low, self._high = seed, length, low, high
        self._block_rows = max(1, min(256, BLOCK_TOKENS // length))
        self._at: tuple[str, int] | None = None
        self._rows: NDArray[np.int64] = np.empty((0, length), np.int64)

    def row(self, phase: str, number: int) -> list[int]:
        block, within = divmod(number, self._block_rows)
        if self._at != (phase, block):
            rng = np.random.default_rng((self._seed, int(phase == "warmup"), block))
            self._rows = rng.integers(self._low, self._high, (self._block_rows, self._length))
            self._at = (phase, block)
        row: list[int] = self._rows[within].tolist()
        return row


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every bit of the result hangs on every bit given."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hashed(seed: int, segments: Sequence[tuple[int, int, int]], low: int, high: int) -> NDArray[np.int64]:
    """Integers in [low, high) for segments of (domain, key, tokens), one after the other. The k-th of a segment hangs
    on nothing but (seed, domain, key, k), so segments of the same key begin alike whatever their lengths."""
    lengths = np.array([tokens for _, _, tokens in segments], np.int64)
    names = np.array([(domain, key & (1 << 64) - 1) for domain, key, _ in segments], np.uint64).reshape(-1, 2)
    with np.errstate(over="ignore"):
        start = _mixed(np.array([seed & (1 << 64) - 1], np.uint64) + _GOLDEN)
        starts = _mixed(_mixed(names[:, 0] * _GOLDEN + start) ^ names[:, 1])
        place = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        drawn = _mixed(np.repeat(starts, lengths) + (place.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    integers: NDArray[np.int64] = (low + ((drawn >> np.uint64(32)) * np.uint64(high - low) >> np.uint64(32))).astype(
        np.int64
    )
    return integers


_SHARED, _OWN, _WARMUP = range(3)  # domains of keys


class _Content:
    """Integers in [low, high) for every token of every prompt."""

    def __init__(self, load: Load, low: int, high: int) -> None:
        shapes = load.shapes()
        self.own = shapes.own if isinstance(shapes, SessionShapes) else shapes.shape
        self.id = shapes.id
        self.turns = load.turns()
        self._seed, self._low, self._high = load.seed, low, high
        self._rows = _Rows(load.seed, load.input_tokens.least, low, high) if load.is_plain else None

    def row(self, phase: str, number: int) -> list[int]:
        """The tokens of one prompt. A prompt of the warm-up shares nothing with any other."""
        if self._rows is not None:
            return self._rows.row(phase, number)
        shape = self.own(number)
        if phase == "warmup":
            segments = [(_WARMUP, number, shape.prompt_tokens)]
        else:
            own = shape.prompt_tokens - sum(tokens for _, tokens in shape.segments)
            segments = [*((_SHARED, key, tokens) for key, tokens in shape.segments), (_OWN, number, own)]
        row: list[int] = hashed(self._seed, segments, self._low, self._high).tolist()
        return row


class TokenIds:
    """Uniformly random token ids in [FIRST_ID, vocab_size)."""

    def __init__(self, load: Load, vocab_size: int = UNKNOWN_VOCABULARY) -> None:
        self._content = _Content(load, FIRST_ID if vocab_size > 2 * FIRST_ID else 0, vocab_size)
        self.own, self.id, self.turns = self._content.own, self._content.id, self._content.turns

    def prompt(self, phase: str, number: int) -> Prompt:
        ids = self._content.row(phase, number)
        return Prompt(n_tokens=len(ids), token_ids=ids)


class RandomText:
    """Random words that make up a prompt's tokens together with the `offset` tokens that the server adds.

    All begin with the same word, because how many tokens a first word is may depend on what the server puts before it.
    count(text) is the given tokenizer's number of tokens without special ones; without one a word counts as
    `tokens_per_word` of them, in the mean where that is no whole number.
    """

    def __init__(self, load: Load, count: Callable[[str], int] | None = None) -> None:
        self._content = _Content(load, 0, len(WORDS))
        self._least_tokens = load.input_tokens.least
        self._count = count
        self._batched, self._images, self._seed = load.batch is not None, load.images, load.seed
        self.own, self.id, self.turns = self._content.own, self._content.id, self._content.turns
        self.offset = 0
        self.tokens_per_word = 1.0

    def prompt(self, phase: str, number: int) -> Prompt:
        row = self._content.row(phase, number)
        if self._batched:
            length = len(row) // self.own(number).items
            items = tuple(self._text(row[at : at + length]) for at in range(0, len(row), length))
            return Prompt(n_tokens=len(row), text=items[0], items=items)
        images = () if self._images is None else self._images.urls(self._seed, phase, number)
        return Prompt(n_tokens=len(row), text=self._text(row), images=images)

    def _text(self, row: list[int]) -> str:
        """Joins the words of these numbers."""
        words = [WORDS[0], *(WORDS[index] for index in row[1:])]
        tokens = len(row) - self.offset
        if self._count is None:
            tokens = max(1, round(tokens / self.tokens_per_word))
        return exact_text(words, tokens, self._count)

    def probe(self, words: int) -> str:
        """A text of so many words, that is no prompt of the run."""
        row = self._content.row("warmup", 0)
        return exact_text([WORDS[0], *(WORDS[index] for index in row[1:])], words, None)

    def takes(self, added_tokens: int) -> bool:
        """Whether the shortest prompt has room for so many tokens more that the server adds."""
        return self.offset + added_tokens < self._least_tokens

    def fit_offset(self, asked_tokens: int, server_tokens: int) -> None:
        """Takes the server's count of a prompt built with the present offset. Raises WorkloadError if none is left."""
        self.offset += server_tokens - asked_tokens
        if self.offset >= self._least_tokens:
            raise WorkloadError(
                f"the server adds {self.offset} tokens of its own to a prompt; --input-tokens must be above that."
            )

    def fit_words(self, long: tuple[str, int], short: tuple[str, int]) -> str:
        """Takes the server's counts of two texts, each with its count; what they tell, as a clause. Raises
        WorkloadError where they make no sense, or leave no room."""
        (text, tokens), (other, others) = long, short
        if tokens - others == count_bytes(text) - count_bytes(other):
            self.use_bytes()
            added, how = tokens - count_bytes(text), "it counts bytes"
        else:
            words = len(text.split())
            self.tokens_per_word = (tokens - others) / (words - len(other.split()))
            added = round(tokens - self.tokens_per_word * words)
            how = f"a word is {self.tokens_per_word:.2f} of its tokens in the mean, so lengths are right in the mean"
        if self.tokens_per_word <= 0:
            raise WorkloadError(
                f"the server counts {tokens} tokens in a prompt and {others} in a shorter one; name its --tokenizer."
            )
        self.offset = 0
        self.fit_offset(0, added)
        return how

    def use_bytes(self) -> None:
        """A byte counts as a token."""
        self.by_bytes, self._count = True, count_bytes

    by_bytes = False


def count_bytes(text: str) -> int:
    return len(text.encode())


def exact_text(words: Sequence[str], n_tokens: int, count: Callable[[str], int] | None) -> str:
    """Words, repeated or cut, that count exactly `n_tokens`; the nearest shorter text where no filling is exact."""

    def cut(n_words: int) -> str:
        return " ".join((list(words) * (n_words // len(words) + 1))[:n_words])

    text = cut(n_tokens)
    if count is None or count(text) == n_tokens:
        return text
    least, most = 0, n_tokens  # a word is at least one token: find the most words that fit
    while least < most:
        middle = (least + most + 1) // 2
        if count(cut(middle)) <= n_tokens:
            least = middle
        else:
            most = middle - 1
    text = cut(least)
    missing = n_tokens - count(text)
    for filler in FILLERS:
        filled = text + filler * missing
        if count(filled) == n_tokens:
            return filled
    return text


def tokenizer_count(source: str) -> Callable[[str], int]:
    """Counts tokens, special ones apart, by a model directory, a tokenizer.json, or a cached Hugging Face id: nothing
    is downloaded. Raises WorkloadError."""
    if (why := lacking("tokenizers")) is not None:
        raise WorkloadError(f"--tokenizer cannot be used: {why}.")
    from tokenizers import Tokenizer

    path = Path(source)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        path = _cached_tokenizer(source)
    try:
        tokenizer = Tokenizer.from_buffer(read_named(path))
    except Exception as error:  # the library raises bare Exception
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise WorkloadError(f"cannot load a tokenizer from {path}: {why}.") from None
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _cached_tokenizer(source: str) -> Path:
    """The tokenizer.json of a Hugging Face id in the hub's cache. Raises WorkloadError."""
    from huggingface_hub import hf_hub_download  # tokenizers needs it

    try:
        return Path(hf_hub_download(source, "tokenizer.json", local_files_only=True))
    except (OSError, ValueError):  # not there; no such id can be
        raise WorkloadError(
            f"there is no tokenizer '{source}' on this machine; name a directory with a tokenizer.json, or "
            "`hf download` it first."
        ) from None
