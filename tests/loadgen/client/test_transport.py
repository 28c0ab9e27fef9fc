"""Both transports against a scripted server: they must tell the same story, whatever the server does."""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
import time
from collections.abc import Callable, Iterator

import pytest
import trustme

import backends
from backends.protocol import Prompt, Sampling
from loadgen.client.connection import FastTransport, Transport, wall_minus_monotonic_ns
from loadgen.client.exchange import Exchange
from loadgen.client.limits import raise_fd_limit
from loadgen.client.transport_aiohttp import AiohttpTransport
from loadgen.plan import Timeouts
from loadgen.target import Target, TransportError, get
from tests.loadgen.scripted import CLOSE, DONE, END, RESET, STREAM_HEAD, Script, chunk, event, scripted, tokens

VLLM = backends.get("vllm")
KINDS = ("fast", "stamped", "aiohttp")
PATIENT = Timeouts(10.0, 600.0, 120.0, 3600.0)


def make(kind: str, target: Target, timeouts: Timeouts = PATIENT, fresh: bool = False) -> Transport:
    if kind == "aiohttp":
        return AiohttpTransport(target, VLLM.error_message, timeouts, fresh=fresh)
    return FastTransport(target, VLLM.error_message, timeouts, fresh=fresh, kernel_timestamps=kind == "stamped")


async def ask(transport: Transport, number: int = 0, input_tokens: int = 4) -> Exchange:
    done: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()
    exchange = Exchange(number, "measured", 0, input_tokens, 3, VLLM.decoder(True), done.set_result)
    request = VLLM.encode("m", Prompt(input_tokens, token_ids=[7] * input_tokens), Sampling(3))
    transport.send(exchange, transport.prepare(request, f"run-{number}"))
    async with asyncio.timeout(10):
        return await done


def tell(kind: str, script: Callable[[int], Script], times: int = 1, **options: bool) -> list[Exchange]:
    """What a transport makes of the server's script, one request after the other."""

    async def story() -> list[Exchange]:
        async with scripted(script) as world:
            transport = make(kind, Target(world.url), **options)
            await transport.open(1)
            try:
                return [await ask(transport, number) for number in range(times)]
            finally:
                await transport.close()

    return asyncio.run(story())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("script", "outcome", "events"),
    [
        (tokens(3), "ok", 3),
        ([b"".join(tokens(3))], "ok", 3),
        ([bytes([byte]) for byte in b"".join(tokens(3))], "ok", 3),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", *tokens(3)], "ok", 3),
        ([STREAM_HEAD, chunk(event()), chunk(event(finish="length")), END], "ok", 2),  # no usage, no [DONE]
        (
            [b"HTTP/1.1 200 OK\r\n\r\n", event(), event(finish="length"), DONE, CLOSE],
            "ok",
            2,
        ),  # ends with the connection
        ([STREAM_HEAD, chunk(DONE), END], "truncated", 0),
        ([STREAM_HEAD, *map(chunk, [event(), DONE, event()]), END], "protocol_error", 1),
        ([STREAM_HEAD, chunk(event()), END], "truncated", 1),
        ([b'HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\n{"error":{"message":"no room"}}'[:-1]], "truncated", 0),
        ([b'HTTP/1.1 200 OK\r\nContent-Length: 31\r\n\r\n{"error":{"message":"no room"}}'], "stream_error", 0),
        ([STREAM_HEAD, chunk(event()), chunk(b'data: {"error":"died"}\n\n'), 0.05, RESET], "stream_error", 1),
        ([STREAM_HEAD, chunk(event()), CLOSE], "truncated", 1),
        ([STREAM_HEAD, chunk(event()), RESET], "reset", 1),
        ([CLOSE], "reset", 0),
        ([STREAM_HEAD, chunk(b"data: {]\n\n"), END], "protocol_error", 0),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], "protocol_error", 0),
        ([STREAM_HEAD, chunk(b'data: {"error":{"message":"engine died"}}\n\n'), chunk(DONE), END], "stream_error", 0),
        ([b'HTTP/1.1 503 No\r\nContent-Length: 32\r\n\r\n{"error":{"message":"too busy"}}'], "http_error", 0),
        ([b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n"], "http_error", 0),
    ],
)
def test_outcomes(kind: str, script: Script, outcome: str, events: int) -> None:
    (exchange,) = tell(kind, lambda n: script)
    assert (exchange.outcome, len(exchange.times)) == (outcome, events), exchange.error
    assert exchange.done_ns >= exchange.sent_ns > 0
    if outcome != "ok":
        assert exchange.error
    if events:
        assert exchange.sent_ns < exchange.headers_ns <= exchange.times[0] <= exchange.times[-1] <= exchange.done_ns


@pytest.mark.parametrize("kind", KINDS)
def test_a_redirect_says_where_to(kind: str) -> None:
    reply = [b"HTTP/1.1 302 Found\r\nLOCATION: http://elsewhere/\r\nContent-Length: 13\r\n\r\nlocation: x\r\n"]
    (exchange,) = tell(kind, lambda n: reply)
    assert exchange.error and exchange.error.endswith("; it redirects to http://elsewhere/")


UNASKED = b"".join(tokens(5))
IDLE_S = 0.05


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "more",
    [
        [0.01, UNASKED],
        [0.01, STREAM_HEAD],
        [0.01, b"\n"],
        [END + b"junk"],
        [END + UNASKED],
        [0.01, CLOSE],
        [0.01, RESET],
    ],
)
def test_a_connection_that_speaks_while_idle_is_not_used_again(kind: str, more: list[bytes | float | str]) -> None:
    if kind == "aiohttp" and more == [END + b"junk"]:
        pytest.skip("aiohttp refuses a whole read that ends in junk")
    first = [*tokens(2)[:-1], *more] if isinstance(more[0], bytes) else [*tokens(2), *more]

    async def story() -> tuple[list[Exchange], int]:
        async with scripted(lambda n: first if n == 0 else tokens(3)) as world:
            transport = make(kind, Target(world.url))
            await transport.open(1)
            exchanges = [await ask(transport)]
            await asyncio.sleep(IDLE_S)
            exchanges.append(await ask(transport, 1))
            await transport.close()
            return exchanges, len(world.requests)

    exchanges, requests = asyncio.run(story())
    seen = [(exchange.outcome, len(exchange.times), exchange.retried) for exchange in exchanges]
    assert (seen, requests) == ([("ok", 2, False), ("ok", 3, False)], 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", [CLOSE, RESET])
def test_a_request_whose_reused_connection_dies_is_sent_again_once(kind: str, end: str) -> None:
    async def story() -> tuple[list[Exchange], list[str]]:
        async with scripted(lambda n: [0.02, end] if n == 1 else tokens(2)) as world:
            transport = make(kind, Target(world.url))
            await transport.open(1)
            exchanges = [await ask(transport), await ask(transport, 1)]
            await transport.close()
            return exchanges, [headers["x-request-id"] for _, headers, _ in world.requests]

    (first, second), ids = asyncio.run(story())
    assert [(x.outcome, x.retried) for x in (first, second)] == [("ok", False), ("ok", True)]
    assert second.sent_ns > first.done_ns + 20_000_000
    assert second.record(0, True).retried is True
    assert ids == ["run-0", "run-1", "run-1"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("begin", [b"HTTP/1.", STREAM_HEAD[:30], b"HTTP/1.1 100 Continue\r\n\r\n", STREAM_HEAD])
def test_a_reply_that_began_is_never_asked_for_again(kind: str, begin: bytes) -> None:
    async def story() -> tuple[str, int]:
        async with scripted(lambda n: [begin, 0.02, RESET] if n else tokens(2)) as world:
            transport = make(kind, Target(world.url))
            await transport.open(1)
            await ask(transport)
            exchange = await ask(transport, 1)
            await transport.close()
            return exchange.outcome, len(world.requests)

    assert asyncio.run(story()) == ("reset", 2)


@pytest.mark.parametrize("kind", KINDS)
def test_server_counts_are_kept(kind: str) -> None:
    (exchange,) = tell(kind, lambda n: tokens(3, prompt=11))
    assert (exchange.prompt_tokens, exchange.output_tokens, exchange.status) == (11, 3, 200)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fresh", [False, True])
def test_connections_are_kept_or_fresh(kind: str, fresh: bool) -> None:
    async def story() -> int:
        async with scripted(lambda n: tokens(2)) as world:
            transport = make(kind, Target(world.url), fresh=fresh)
            await transport.open(1)
            for number in range(4):
                assert (await ask(transport, number)).outcome == "ok"
            await transport.close()
            assert [head["x-request-id"] for _, head, _ in world.requests] == [f"run-{n}" for n in range(4)]
            return world.connections

    connections = asyncio.run(story())
    probe = kind != "aiohttp"  # the first connection finds out which address answers
    assert connections == (4 if fresh else 1) + probe


@pytest.mark.parametrize("kind", KINDS)
def test_server_that_asks_to_close_gets_a_new_connection(kind: str) -> None:
    closing = [STREAM_HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), *tokens(2)[1:], CLOSE]
    assert [x.outcome for x in tell(kind, lambda n: closing, times=3)] == ["ok"] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_large_body_is_sent_whole(kind: str) -> None:
    async def story() -> None:
        async with scripted(lambda n: tokens(2)) as world:
            transport = make(kind, Target(world.url))
            await transport.open(1)
            exchange = await ask(transport, input_tokens=2_000_000)
            await transport.close()
            assert exchange.outcome == "ok"
            assert world.requests[0][2].count(b"7,") == 1_999_999

    asyncio.run(story())


@pytest.mark.parametrize("kind", KINDS)
def test_reads_that_come_apart_have_apart_stamps(kind: str) -> None:
    """Two events 50 ms apart: never nearer. In one write: one stamp."""
    apart = [STREAM_HEAD, chunk(event()), 0.05, chunk(event()) + chunk(event(finish="length")), END]
    (exchange,) = tell(kind, lambda n: apart)
    first, second, third = exchange.times
    assert second - first > 40_000_000
    assert second == third


@pytest.mark.parametrize("kind", ["fast", "stamped"])
def test_broken_chunk(kind: str) -> None:
    """aiohttp says nothing in this case and waits for ever: there the idle timeout ends the request."""
    (exchange,) = tell(kind, lambda n: [STREAM_HEAD, chunk(event()), 0.05, b"zz\r\n"])
    assert (exchange.outcome, len(exchange.times)) == ("protocol_error", 1)


def test_header_limit() -> None:
    endless = [b"HTTP/1.1 200 OK\r\n", *[b"X-Pad: " + b"x" * 1000 + b"\r\n"] * 80]
    (exchange,) = tell("fast", lambda n: endless)
    assert (exchange.outcome, "headers" in (exchange.error or "")) == ("protocol_error", True)


@pytest.mark.parametrize("kind", KINDS)
def test_refused(kind: str) -> None:
    with socket.socket() as taken:  # bound but not listening: nobody else can take the port
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"

        async def story() -> Exchange:
            transport = make(kind, Target(url))
            try:
                return await ask(transport) if kind != "aiohttp" else await _open_and_ask(transport)
            finally:
                await transport.close()

        assert asyncio.run(story()).outcome == "refused"
        if kind != "aiohttp":
            with pytest.raises(TransportError, match="cannot reach"):
                asyncio.run(make(kind, Target(url)).open(3))
        with pytest.raises(TransportError, match="cannot reach"):
            get(Target(url), "/health")


async def _open_and_ask(transport: Transport) -> Exchange:
    await transport.open(0)
    return await ask(transport)


@pytest.mark.parametrize("kind", ["fast", "aiohttp"])
def test_tls_and_bearer_token(kind: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(server_side)
    with authority.cert_pem.tempfile() as pem:
        monkeypatch.setenv("SSL_CERT_FILE", pem)

        async def story() -> None:
            async with scripted(lambda n: tokens(3), tls=server_side) as world:
                transport = make(kind, Target(world.url + "/base/v1/", "s3cret"))
                await transport.open(1)
                exchange = await ask(transport)
                await transport.close()
                assert exchange.outcome == "ok", exchange.error
                line, headers, _ = world.requests[0]
                assert line == b"POST /base/v1/completions HTTP/1.1"
                assert headers["authorization"] == "Bearer s3cret"

        asyncio.run(story())


def test_secrets_are_not_shown() -> None:
    assert "s3cret" not in repr(Target("http://h", "s3cret", (("X-Key", "s3cret"),)))


@pytest.mark.parametrize("kind", ["fast", "aiohttp"])
@pytest.mark.parametrize("trust", ["ca", "insecure"])
def test_whom_tls_trusts_and_more_headers(kind: str, trust: str) -> None:
    authority = trustme.CA()
    server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1" if trust == "ca" else "elsewhere.invalid").configure_cert(server_side)
    with authority.cert_pem.tempfile() as pem:

        async def story() -> None:
            async with scripted(lambda n: tokens(3), tls=server_side) as world:
                trusting = {"ca": pem} if trust == "ca" else {"insecure": True}
                transport = make(kind, Target(world.url, extra_headers=(("X-Team", "a b"),), **trusting))  # type: ignore[arg-type]
                await transport.open(1)
                exchange = await ask(transport)
                await transport.close()
                assert exchange.outcome == "ok", exchange.error
                assert world.requests[0][1]["x-team"] == "a b"

        asyncio.run(story())


@pytest.mark.parametrize("kind", ["fast", "aiohttp"])
def test_untrusted_certificate_is_refused(kind: str) -> None:
    server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(server_side)

    async def story() -> None:
        async with scripted(lambda n: tokens(3), tls=server_side) as world:
            transport = make(kind, Target(world.url))
            if kind == "fast":
                with pytest.raises(TransportError, match=r"self-signed|issuer"):
                    await transport.open(1)
            else:
                exchange = await _open_and_ask(transport)
                assert exchange.outcome == "refused"
            await transport.close()

    asyncio.run(story())


@pytest.mark.parametrize("kind", KINDS)
def test_ipv6(kind: str) -> None:
    async def story() -> Exchange:
        async with scripted(lambda n: tokens(3), host="::1") as world:
            transport = make(kind, Target(world.url))
            await transport.open(1)
            exchange = await ask(transport)
            await transport.close()
            return exchange

    assert asyncio.run(story()).outcome == "ok"


def test_kernel_stamps_are_before_reads() -> None:
    """Each reply lies in the socket for a while before the event loop, which the server holds, can read it."""
    held_ns, clocks_ns = 20_000_000, 1_000_000  # the two clocks' offset is known to microseconds

    def held(number: int) -> Iterator[bytes]:
        yield b"".join(tokens(3))
        time.sleep(held_ns / 1e9)

    async def story() -> list[int]:
        async with scripted(held) as world, asyncio.timeout(10):
            transport = make("stamped", Target(world.url))
            await transport.open(1)
            for number in itertools.count():
                await ask(transport, number)
                if len(transport.receive_lag_ns) >= 5:  # the first reads may come before the kernel stamps
                    break
            await transport.close()
            return list(transport.receive_lag_ns)

    began_ns, offset_ns = time.monotonic_ns(), wall_minus_monotonic_ns()
    lags = asyncio.run(story())
    took_ns = time.monotonic_ns() - began_ns
    if abs(wall_minus_monotonic_ns() - offset_ns) > clocks_ns:
        pytest.skip("the wall clock, which the kernel stamps with, was set meanwhile")
    assert held_ns - clocks_ns < min(lags) <= max(lags) < took_ns + clocks_ns


def test_a_killed_idle_connection_is_not_used() -> None:
    def script(number: int) -> Script:
        return [*tokens(2), CLOSE] if number == 0 else tokens(2)

    async def story() -> list[str]:
        async with scripted(script) as world:
            transport = make("fast", Target(world.url))
            await transport.open(1)
            first = await ask(transport)
            await asyncio.sleep(0.05)
            second = await ask(transport, 1)
            await transport.close()
            return [first.outcome, second.outcome]

    assert asyncio.run(story()) == ["ok", "ok"]


def test_fd_limit_is_raised_or_said() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        raise_fd_limit(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 300
        with pytest.raises(TransportError, match="open files"):
            raise_fd_limit(hard + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("kind", ["fast", "stamped"])
def test_a_status_that_is_none(kind: str) -> None:
    (exchange,) = tell(kind, lambda _: [b"HTTP/1.0 013 OK\r\n\r\n", event(), event(finish="length"), DONE, CLOSE])
    assert (exchange.outcome, exchange.error, len(exchange.times)) == ("protocol_error", "not HTTP: status 13", 0)


@pytest.mark.parametrize("field", [b"Transfer-Encoding: chunked", b"Content-Length: 4"])
@pytest.mark.parametrize("kind", ["fast", "stamped"])
def test_a_body_of_what_is_no_reply_yet(kind: str, field: bytes) -> None:
    (exchange,) = tell(kind, lambda _: [b"HTTP/1.1 199 OK\r\n" + field + b"\r\n\r\nac\r\n", CLOSE])
    assert (exchange.outcome, exchange.error) == ("protocol_error", "not HTTP: status 199 with a body")


@pytest.mark.parametrize("kind", ["fast", "stamped"])
def test_headers_behind_those_of_an_early_hint(kind: str) -> None:
    hint = b"HTTP/1.1 103 Early Hints\r\nRetry-After: 1\r\n\r\n"
    busy = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n"
    for reads in ([hint + busy], [hint, busy], [hint[:30], hint[30:] + busy[:9], busy[9:]]):
        (exchange,) = tell(kind, lambda _, reads=reads: reads)
        assert (exchange.status, exchange.retry_after) == (429, "7")


@pytest.mark.parametrize("kind", ["fast", "stamped"])
@pytest.mark.parametrize("more", [b"", b"\x81\x05hello"])
def test_another_protocol_than_was_asked_for(kind: str, more: bytes) -> None:
    """101 is the end of HTTP on its connection; the next request goes over another."""
    switch = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
    first, second = tell(kind, lambda n: tokens(3) if n else [switch + more], 2)
    assert (first.outcome, second.outcome) == ("protocol_error", "ok")
    assert first.error and first.error.startswith("not HTTP")
