"""What a client does beside reading: it gives up at a drawn token, and asks again where a server had no room."""

from __future__ import annotations

import email.utils
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from loadgen.client import retries
from loadgen.client.exchange import Exchange
from loadgen.load.choices import Cancels
from loadgen.rundir.records import RequestTable
from tests.loadgen.client.test_engine import outcomes, ran
from tests.loadgen.scripted import STREAM_HEAD, Script, chunk, event, tokens

OUTPUT, REQUESTS, SEED = 12, 40, 1


def drawn() -> dict[int, int]:
    """By the request's number, the token at which it is given up."""
    cancels = Cancels(0.4, SEED)
    return {n: token for n in range(REQUESTS) if (token := cancels.token(n, OUTPUT)) is not None}


def slowly(_: int) -> Script:
    """A token a write, each in a read of its own."""
    head, *rest = tokens(OUTPUT)
    return [head, *(step for each in rest for step in (each, 0.002))]


@pytest.mark.parametrize("transport", ["fast", "aiohttp"])
@pytest.mark.parametrize("load", [{"arrival": "constant:400"}, {"concurrency": 3}])
def test_a_reply_is_given_up_at_just_the_drawn_token(transport: str, load: dict[str, object], tmp_path: Path) -> None:
    options = {"requests": REQUESTS, "output_tokens": OUTPUT, "cancel": 0.4, "seed": SEED}
    _, table, _ = ran(slowly, tmp_path, transport=transport, **options, **load)
    expected = drawn()
    assert outcomes(table) == Counter(ok=REQUESTS - len(expected), abandoned=len(expected)) and len(expected) > 8
    gone = table.select(table.abandoned)
    assert dict(zip(gone.id.tolist(), gone.events.tolist(), strict=True)) == expected
    assert not gone.errors and (gone.done_ns == gone.last_token_ns).all()
    assert (gone.output_tokens == -1).all()  # no usage came: nothing is guessed


def test_of_a_read_that_brings_more_the_tokens_after_the_drawn_one_are_not_taken(tmp_path: Path) -> None:
    def at_once(_: int) -> Script:
        return [b"".join(tokens(OUTPUT))]

    _, table, _ = ran(
        at_once, tmp_path, requests=REQUESTS, output_tokens=OUTPUT, cancel=0.4, seed=SEED, arrival="constant:400"
    )
    gone = table.select(table.abandoned)
    assert dict(zip(gone.id.tolist(), gone.events.tolist(), strict=True)) == drawn()


def test_a_server_whose_connection_is_given_up_sees_it_end_and_no_reply_meets_the_next_request(tmp_path: Path) -> None:
    def endless(number: int) -> Script:
        return [STREAM_HEAD, *(step for _ in range(400) for step in (chunk(event(f" {number}")), 0.002))]

    world, table, _ = ran(endless, tmp_path, requests=6, output_tokens=OUTPUT, cancel=0.999, seed=SEED, concurrency=1)
    assert outcomes(table) == Counter(abandoned=6)
    assert world.connections >= len(world.requests) == 6  # none is used again


# Retries.


def refusal(status: int, header: str = "") -> bytes:
    field = f"Retry-After: {header}\r\n" if header else ""
    return f"HTTP/1.1 {status} No\r\n{field}Content-Length: 2\r\n\r\n{{}}".encode()


def waited_s(table: RequestTable) -> list[float]:
    (resent,) = table.resent_ns.values()
    return (np.diff([int(table.sent_ns[0]), *resent]) / 1e9).tolist()


@pytest.mark.parametrize("transport", ["fast", "aiohttp"])
def test_a_refused_request_is_sent_again_when_the_server_says(transport: str, tmp_path: Path) -> None:
    def script(number: int) -> Script:
        return [refusal(429, "0"), refusal(503, "1"), b"".join(tokens(3))][number : number + 1]

    world, table, _ = ran(script, tmp_path, transport=transport, requests=1, retries=2)
    assert outcomes(table) == Counter(ok=1) and len(world.requests) == 3
    assert len({body for _, _, body in world.requests}) == 1  # the same each time
    first, second = waited_s(table)
    assert 0 <= first < 0.9 and second > 0.99  # a loop counts in milliseconds
    assert table.sent_ns[0] < table.resent_ns[0][-1] < table.first_token_ns[0]  # its ttft holds what it waited


def test_when_the_retries_are_used_up_the_last_refusal_is_the_outcome(tmp_path: Path) -> None:
    world, table, _ = ran(lambda _: [refusal(429, "0")], tmp_path, requests=1, retries=3)
    assert outcomes(table) == Counter(http_error=1) and len(world.requests) == 4
    assert len(table.resent_ns[0]) == 3 and table.status[0] == 429


@pytest.mark.parametrize("status", [400, 404, 500])
def test_other_errors_are_not_sent_again(status: int, tmp_path: Path) -> None:
    world, table, _ = ran(lambda _: [refusal(status, "0")], tmp_path, requests=1, retries=3)
    assert outcomes(table) == Counter(http_error=1) and len(world.requests) == 1 and not table.resent_ns


def test_without_retries_a_refusal_is_final(tmp_path: Path) -> None:
    world, table, _ = ran(lambda _: [refusal(429, "0")], tmp_path, requests=1)
    assert outcomes(table) == Counter(http_error=1) and len(world.requests) == 1


def test_a_closed_loop_keeps_its_slot_for_what_it_sends_again(tmp_path: Path) -> None:
    def script(number: int) -> Script:
        return [refusal(429, "0")] if number % 2 == 0 else [b"".join(tokens(3))]

    world, table, _ = ran(script, tmp_path, requests=10, concurrency=1, retries=1)
    assert outcomes(table) == Counter(ok=10) and len(world.requests) == 20 and len(table.resent_ns) == 10
    assert (table.sent_ns[1:] >= table.done_ns[:-1]).all()


def refused(retry_after: str, before: int = 0) -> Exchange:
    class Decoder:
        plain, feed = None, None

    exchange = Exchange(0, "measured", 0, 1, 1, Decoder(), lambda _: None)  # type: ignore[arg-type]
    exchange.outcome, exchange.status, exchange.retry_after = "http_error", 429, retry_after
    exchange.refusals_ns = [1] * before
    return exchange


@pytest.mark.parametrize(
    ("said", "before", "seconds"),
    [
        ("7", 0, 7.0), ("0", 4, 0.0), ("60", 0, 60.0),
        ("61", 0, 0.5), ("", 0, 0.5), ("", 1, 1.0), ("", 3, 4.0), ("", 9, 8.0), ("soon", 2, 2.0), ("-1", 0, 0.5),
        ("9" * 40, 0, 0.5),
    ],
)  # fmt: skip
def test_how_long_it_waits(said: str, before: int, seconds: float) -> None:
    assert retries.wait_s(refused(said, before), 10) == seconds


def test_a_date_is_a_time_to_come_again() -> None:
    at_s = time.time() + 30
    wait_s = retries.wait_s(refused(email.utils.formatdate(at_s, usegmt=True)), 1)
    assert wait_s is not None and 20 < wait_s <= 30
