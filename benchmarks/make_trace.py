"""Writes a synthetic trace in Mooncake's format: no request of it was ever sent by anybody.

python benchmarks/make_trace.py --requests 1000 --seed 0 --rate 3 --out trace.jsonl

It has what a trace of chats has, so that a run or a prediction can be tried on it before a real trace is at hand:

- arrivals are a Poisson process of `--rate` requests a second, their times in whole milliseconds;
- lengths are lognormal. The defaults are near those of the conversation trace that Mooncake published, whose prompts
  have 6909 tokens at the median and 27,367 at the 90th percentile, and its replies 350 and 597. 12,000 requests at
  seed 0 have 7070 and 23,189, 349 and 598; 42 % of their blocks came before, and 37 % of Mooncake's;
- each conversation begins with one of 8 system prompts, the popular ones far more often (Zipf's law). A prompt that
  goes on has all that was said before it, the reply too. The next turn is due at the first arrival after the reply was
  written and read; an arrival that no conversation waits for begins a new one;
- hash_ids name the blocks of 512 tokens in order: equal ids up to where two prompts part, and a block that was filled
  in part has another id once it is filled. A block that no other prompt has is new, as random text is.

The same seed gives the same bytes. `--most-tokens` holds a prompt with its reply below a model's context.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BLOCK_TOKENS = 512
SYSTEM_PROMPTS, ZIPF_EXPONENT = 8, 1.2
SYSTEM_RATIO, TURN_RATIO = 0.2, 0.1  # medians of a system prompt and of a later turn's text, by that of a first text
INPUT_SIGMA, OUTPUT_SIGMA = 1.08, 0.42  # ln(27367 / 6909) / 1.28 and ln(597 / 350) / 1.28
GOES_ON_RATIO = 0.4  # of the requests: a conversation has 1.7 turns on average
READING_S, TOKEN_S = 20.0, 0.03  # mean time between a reply's end and the next turn; what a token of a reply takes


@dataclass
class Conversation:
    """What was sent last: its prompt's tokens and block ids, and the tokens of the reply."""

    input_tokens: int
    output_tokens: int
    hash_ids: list[int]


class Conversations:
    """The texts of all conversations, as numbers of tokens and ids of blocks."""

    def __init__(self, rng: np.random.Generator, options: argparse.Namespace) -> None:
        self._rng, self._options = rng, options
        self._ids = itertools.count()
        weights = np.arange(1, SYSTEM_PROMPTS + 1) ** -ZIPF_EXPONENT
        self._popularity = weights / weights.sum()
        lengths = [self._length(SYSTEM_RATIO * options.input_tokens, INPUT_SIGMA / 2) for _ in range(SYSTEM_PROMPTS)]
        self._systems = [self._grown([], 0, min(length, options.most_tokens // 2)) for length in lengths]
        self._system_tokens = [min(length, options.most_tokens // 2) for length in lengths]

    def _length(self, median: float, sigma: float) -> int:
        return max(1, round(median * self._rng.lognormal(0, sigma)))

    def _grown(self, ids: list[int], tokens: int, to_tokens: int) -> list[int]:
        """The blocks of a text that had these ids and so many tokens and has more now: what was a whole block stays."""
        whole = ids[: tokens // BLOCK_TOKENS]
        return whole + list(itertools.islice(self._ids, -(-to_tokens // BLOCK_TOKENS) - len(whole)))

    def begun(self) -> Conversation:
        most = self._options.most_tokens
        number = int(self._rng.choice(SYSTEM_PROMPTS, p=self._popularity))
        shared = self._system_tokens[number]
        output = min(self._length(self._options.output_tokens, OUTPUT_SIGMA), most // 4)
        tokens = min(shared + self._length(self._options.input_tokens, INPUT_SIGMA), most - output)
        return Conversation(tokens, output, self._grown(self._systems[number], shared, tokens))

    def gone_on(self, last: Conversation) -> Conversation | None:
        """The next turn; None where it would be too long."""
        history_tokens = last.input_tokens + last.output_tokens
        tokens = history_tokens + self._length(TURN_RATIO * self._options.input_tokens, INPUT_SIGMA)
        output = self._length(self._options.output_tokens, OUTPUT_SIGMA)
        if tokens + output > self._options.most_tokens:
            return None
        return Conversation(tokens, output, self._grown(last.hash_ids, last.input_tokens, tokens))


def requests(options: argparse.Namespace) -> Iterator[tuple[float, Conversation]]:
    """When each comes, in seconds from the first one, and what it is."""
    rng = np.random.default_rng(options.seed)
    conversations, at_s = Conversations(rng, options), 0.0
    waiting: list[tuple[float, int, Conversation]] = []  # by when the next turn is ready
    for number in range(options.requests):
        ready = heapq.heappop(waiting)[2] if waiting and waiting[0][0] <= at_s else None
        request = (conversations.gone_on(ready) if ready else None) or conversations.begun()
        yield at_s, request
        if rng.random() < GOES_ON_RATIO:
            ready_s = at_s + TOKEN_S * request.output_tokens + rng.exponential(READING_S)
            heapq.heappush(waiting, (ready_s, number, request))
        at_s += rng.exponential(1 / options.rate)


def positive(kind: type) -> object:
    def parse(text: str) -> float:
        if not 0 < kind(text) < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} must be above 0")
        return kind(text)

    return parse


def parsed() -> argparse.Namespace:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=positive(int), default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=positive(float), default=3.0, help="requests per second")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--input-tokens", type=positive(int), default=5000, help="median of a first turn's own text")
    parser.add_argument("--output-tokens", type=positive(int), default=350, help="median of a reply")
    parser.add_argument("--most-tokens", type=positive(int), default=131_072, help="of a prompt and its reply")
    options = parser.parse_args()
    if options.seed < 0 or options.most_tokens < 8:
        parser.error("--seed must be 0 or more, and --most-tokens 8 or more.")
    return options


def main() -> None:
    options = parsed()
    seen: set[int] = set()
    blocks = shared = 0
    at_s = 0.0
    with options.out.open("w", encoding="utf-8") as file:
        for at_s, request in requests(options):
            line = {
                "timestamp": int(at_s * 1e3), "input_length": request.input_tokens,
                "output_length": request.output_tokens, "hash_ids": request.hash_ids,
            }  # fmt: skip
            file.write(json.dumps(line) + "\n")
            blocks += len(request.hash_ids)
            shared += sum(block in seen for block in request.hash_ids)
            seen.update(request.hash_ids)
    print(
        f"{options.out}: a synthetic trace of {options.requests} requests over {at_s:.1f} s; {shared / blocks:.1%} of "
        f"its blocks of {BLOCK_TOKENS} tokens came before."
    )


if __name__ == "__main__":
    main()
