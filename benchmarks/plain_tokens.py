"""What recognising plain tokens saves the client: CPU of one event, from the bytes of its read to its stamp.

    python benchmarks/plain_tokens.py [--rounds 15] >benchmarks/plain_tokens.json

Replies as vLLM streams them, one token a read, go through the client's own connection, exchange and decoder, in memory:
the kernel and the event loop cost the same either way and are left out. The two take turns, since the speed of a shared
machine drifts. Prints JSON: us of CPU an event with the recogniser and without, medians over the rounds, and quartiles.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from array import array
from types import SimpleNamespace
from typing import Any

import backends
from loadgen.client.connection import Connection
from loadgen.client.exchange import Exchange

TOKENS = 2000
REPLIES = 5  # a round; the first tokens of each are parsed by both
WORDS = (
    "the",
    " a",
    " model",
    "ing",
    ",",
    " of",
    " serve",
    "\\n",
    " hard",
    "ware",
    " and",
    " so",
    " it",
    " goes",
    " on",
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Parsing(Connection):
    """A connection that parses every read."""

    def read(self, data: bytes, now: int) -> None:
        self.now = now
        self.parse(data)


def chunk(body: str) -> bytes:
    data = body.encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def reads(number: int) -> list[bytes]:
    """A reply of vLLM; one word in 15 is an escape, which is parsed either way."""
    event = (
        f'data: {{"id":"cmpl-{number:032x}","object":"text_completion","created":1700000000,"model":"llama-2-7b",'
        '"choices":[{"index":0,"text":"%s","logprobs":null,"finish_reason":null,"stop_reason":null}],"usage":null}\n\n'
    )
    return [chunk(event % WORDS[index % len(WORDS)]) for index in range(TOKENS)]


def cpu_us_per_event(kind: type[Connection]) -> float:
    backend = backends.get("vllm")
    owner: Any = SimpleNamespace(
        plain=True,
        reuse=True,
        idle={},
        receive_lag_ns=array("q"),
        error_message=backend.error_message,
        forget=lambda _: None,
    )
    spent_ns = 0
    for number in range(REPLIES):
        connection = kind(owner, None)  # type: ignore[arg-type]
        connection.exchange = exchange = Exchange(0, "measured", 0, 4, TOKENS, backend.decoder(True), lambda _: None)
        connection.in_headers = True
        connection.data_received(HEAD)
        pieces = reads(number)
        began_ns = time.process_time_ns()
        for data in pieces:
            connection.data_received(data)
        spent_ns += time.process_time_ns() - began_ns
        assert len(exchange.times) == TOKENS
    return spent_ns / (REPLIES * TOKENS) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    samples: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(rounds):
        samples["with"].append(cpu_us_per_event(Connection))
        samples["without"].append(cpu_us_per_event(Parsing))
    report: dict[str, Any] = {"python": platform.python_version(), "rounds": rounds, "events": REPLIES * TOKENS}
    for name, values in samples.items():
        first, median, third = (round(value, 3) for value in statistics.quantiles(values, n=4, method="inclusive"))
        report[f"{name}_us_per_event"] = {"median": median, "first_quartile": first, "third_quartile": third}
    ratios = [whole / short for short, whole in zip(samples["with"], samples["without"], strict=True)]
    report["without_over_with"] = round(statistics.median(ratios), 2)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
