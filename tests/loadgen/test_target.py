"""Single requests beside the load: a port that speaks the other protocol, certificates, headers and secrets."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
import trustme

from loadgen.config import Config, ConfigError
from loadgen.run import target_of
from loadgen.target import Target, TransportError, get
from tests.loadgen.scripted import scripted

REPLY = [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"]


@pytest.mark.parametrize(
    ("tls", "scheme", "advice"),
    [(False, "https", "speaks plain HTTP"), (True, "http", "speaks TLS"), (True, "https", "--ca or in SSL_CERT_FILE")],
)
def test_the_wrong_protocol_and_an_unknown_authority_are_named(tls: bool, scheme: str, advice: str) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)

    async def story() -> None:
        async with scripted(lambda n: REPLY, tls=context if tls else None) as world:
            target = Target(f"{scheme}:{world.url.partition(':')[2]}")
            with pytest.raises(TransportError, match=advice):
                await asyncio.to_thread(get, target, "/health")

    asyncio.run(story())


def test_headers_and_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "s3cret")
    config = Config(url="https://h", header=("X-Team=a=b", "X-Api-Key=env:KEY"))
    target = target_of(config)
    assert target.extra_headers == (("X-Team", "a=b"), ("X-Api-Key", "s3cret"))
    assert config.secret_variables == ["KEY"]
    assert "s3cret" not in str(config.as_dict())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"header": ("Authorization=Bearer x",)}, "looks like a secret"),
        ({"header": ("X-Mine=sk-123",)}, "looks like a secret"),
        ({"header": ("Cookie=a",)}, "looks like a secret"),
        ({"header": ("novalue",)}, "must be NAME=VALUE"),
        ({"header": ("Host=x",)}, "loadgen itself"),
        ({"header": ("X-A=1", "x-a=2")}, "given twice"),
        ({"header": ("Authorization=env:K",), "api_key_env": "K"}, "given twice"),
        ({"header": ("X-A=é",)}, "no header can carry"),
        ({"header": ("X-Key=env:NOSUCH_VARIABLE",)}, "NOSUCH_VARIABLE named by --header is not set"),
        ({"ca": Path("/nowhere.pem")}, "No such file"),
        ({"ca": Path(__file__)}, "no certificates"),
        ({"ca": Path("a.pem"), "insecure": True}, "give one of them"),
        ({"insecure": True, "url": "http://h"}, "for a server with TLS"),
    ],
)
def test_options_that_make_no_request(options: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as raised:
        target_of(Config(**({"url": "https://h"} | options)))  # type: ignore[arg-type]
    assert "sk-123" not in str(raised.value) and "Bearer" not in str(raised.value)
