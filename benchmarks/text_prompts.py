"""What a server takes to cut the text of a prompt into tokens: of random tokens in a row, as InferenceMAX's client and
`vllm bench serve` send them, and of English words.

    pip install mistral-common==1.13.1 tokenizers==0.23.3 && python benchmarks/text_prompts.py  # seconds

The vocabulary is Tekken's, 130,072 tokens of byte-pair encoding as Llama 3 has it, which that package brings along.
Hugging Face's `tokenizers` takes one prompt after the other on one thread, as vLLM takes requests that come alone.
"""

from __future__ import annotations

import base64
import importlib.resources
import json
import random
import statistics
import time
from collections.abc import Callable

import tokenizers
from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

LENGTHS, PROMPTS = (512, 1024, 8192), 25
WORDS = ("the", "of", "a", "request", "prompt", "token", "large", "language", "model", "server", "measures", "latency")


def main() -> None:
    tekken = json.loads(importlib.resources.files("mistral_common.data").joinpath("tekken_240911.json").read_text())
    config = tekken["config"]
    known = [base64.b64decode(each["token_bytes"]) for each in tekken["vocab"]]
    known = known[: config["default_vocab_size"] - config["default_num_special_tokens"]]
    tokenizer = byte_pairs(known, config["pattern"])
    print(f"tokenizers {tokenizers.__version__}, a vocabulary of {len(known)} tokens, {PROMPTS} prompts of each kind")
    draw = random.Random(0)

    def in_a_row(length: int) -> str:
        first = draw.randrange(len(known))
        return b"".join(known[(first + place) % len(known)] for place in range(length)).decode("utf-8", "replace")

    def words(length: int) -> str:
        return " ".join(draw.choices(WORDS, k=length))

    for kind, made in (("random tokens in a row", in_a_row), ("English words", words)):
        for length in LENGTHS:
            measure(tokenizer, kind, length, made)


def byte_pairs(known: list[bytes], pattern: str) -> Tokenizer:
    """The tokenizer of a vocabulary in the order of its ranks, which says which two tokens are merged into each."""
    letters = dict(zip(range(256), byte_letters(), strict=True))
    text = {token: "".join(letters[byte] for byte in token) for token in known}
    ranks = {token: rank for rank, token in enumerate(known)}
    merges = []
    for token in known:
        parts = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [pair for pair in parts if pair[0] in ranks and pair[1] in ranks]
        merges += [(text[a], text[b]) for a, b in sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))]
    tokenizer = Tokenizer(BPE({text[token]: rank for token, rank in ranks.items()}, merges))
    split = Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    return tokenizer


def byte_letters() -> list[str]:
    """The letter that stands for each byte: its own where that can be printed."""
    spare = iter(range(256, 512))
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return [chr(byte if byte in printed else next(spare)) for byte in range(256)]


def measure(tokenizer: Tokenizer, kind: str, length: int, made: Callable[[int], str]) -> None:
    us, tokens = [], []
    for prompt in [made(length) for _ in range(PROMPTS)]:
        begun_s = time.perf_counter()
        ids = tokenizer.encode(prompt).ids
        us.append((time.perf_counter() - begun_s) * 1e6)
        tokens.append(len(ids))
    per_token = sorted(taken / count for taken, count in zip(us, tokens, strict=True))
    print(
        f"{kind:<23} {length:5}: {statistics.mean(tokens):7.0f} tokens, {statistics.mean(us) / 1000:6.2f} ms; a token "
        f"{statistics.median(per_token):.2f} us, {per_token[0]:.2f} to {per_token[-1]:.2f}"
    )


if __name__ == "__main__":
    main()
