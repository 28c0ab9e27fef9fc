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


MODELS, CHAT, METRICS = "/v1/models", "/v1/chat/completions", "/metrics"


@pytest.mark.parametrize(
    ("url", "models", "chat", "metrics"),
    [
        ("http://h", "/v1/models", "/v1/chat/completions", "/metrics"),
        ("http://h/v1/", "/v1/models", "/v1/chat/completions", "/metrics"),
        ("http://h/team/v1", "/team/v1/models", "/team/v1/chat/completions", "/team/metrics"),
        ("http://h/team", "/team/v1/models", "/team/v1/chat/completions", "/team/metrics"),
        ("http://h/v1/chat/completions", "/v1/models", "/v1/chat/completions", "/metrics"),
        ("http://h/v1/completions/", "/v1/models", "/v1/chat/completions", "/metrics"),
        ("http://h/v1/models", "/v1/models", "/v1/chat/completions", "/metrics"),
        ("http://h/generate_stream", "/v1/models", "/v1/chat/completions", "/metrics"),
        ("http://h/api/v3", "/api/v3/models", "/api/v3/chat/completions", "/api/metrics"),  # Volcano Engine
        ("http://h/v1beta/openai", "/v1beta/openai/models", "/v1beta/openai/chat/completions", "/metrics"),  # Gemini
        ("http://h/api/paas/v4", "/api/paas/v4/models", "/api/paas/v4/chat/completions", "/api/paas/metrics"),  # Zhipu
        ("http://h/openai/v1", "/openai/v1/models", "/openai/v1/chat/completions", "/openai/metrics"),  # Groq
        ("http://h/v1/acc/gw/openai", "/v1/acc/gw/openai/models", "/v1/acc/gw/openai/chat/completions", "/metrics"),
        ("http://h/chat/completions", "/models", "/chat/completions", "/metrics"),  # Perplexity
        (  # Azure
            "http://h/openai/deployments/d/chat/completions?api-version=2024-10-21",
            "/openai/deployments/d/models?api-version=2024-10-21",
            "/openai/deployments/d/chat/completions?api-version=2024-10-21",
            "/openai/deployments/d/metrics?api-version=2024-10-21",
        ),
        ("http://h/v1?a=1&b=2", "/v1/models?a=1&b=2", "/v1/chat/completions?a=1&b=2", "/metrics?a=1&b=2"),
    ],
)
def test_where_the_routes_lie(url: str, models: str, chat: str, metrics: str) -> None:
    target = Target(url)
    assert [target.path(path) for path in (MODELS, CHAT, METRICS)] == [models, chat, metrics]
    assert target.url_of(CHAT) == f"http://h{chat}"


@pytest.mark.parametrize(
    ("location", "followed"),
    [
        ("/metrics/", "http://h:1/metrics/"),
        ("http://h:1/m?a=1", "http://h:1/m?a=1"),
        ("https://h:1/metrics", None),
        ("http://h:2/metrics", None),
        ("//evil/metrics", None),
        ("http://[", None),
        ("/a b\r\nX: y", None),
    ],
)
def test_redirects_stay_on_the_host(location: str, followed: str | None) -> None:
    assert Target("http://h:1", "s3cret").followed("http://h:1/metrics", location) == followed


def test_a_get_follows_one_redirect() -> None:
    async def story() -> None:
        moved = [b"HTTP/1.1 307 x\r\nLocation: /models/\r\nContent-Length: 0\r\n\r\n"]
        async with scripted(lambda n: moved if n % 2 == 0 else REPLY) as world:
            status, _, body = await asyncio.to_thread(get, Target(world.url + "?v=1"), "/v1/models")
            assert (status, body) == (200, b"hi")
            asked = [line.split()[1] for line, _, _ in world.requests]
            assert asked == [b"/v1/models?v=1", b"/models/"]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("variable", "url", "said"),
    [
        ("HTTP_PROXY", "http://llm.invalid:8000", True),
        ("https_proxy", "https://llm.invalid", True),
        ("ALL_PROXY", "https://llm.invalid", True),
        ("HTTPS_PROXY", "http://llm.invalid", False),
        ("HTTP_PROXY", "http://in.llm.invalid:8000", False),  # of NO_PROXY
        ("HTTP_PROXY", "http://127.0.0.1:1", False),
    ],
)
def test_a_proxy_that_is_not_used_is_named(
    variable: str, url: str, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("http", "https", "all", "no"):
        for name in (f"{kind}_proxy", f"{kind}_proxy".upper()):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "http://user:s3cret@proxy:3128")
    monkeypatch.setenv("NO_PROXY", "in.llm.invalid")
    with pytest.raises(TransportError) as raised:
        get(Target(url), "/v1/models")
    assert (f"{variable} is set" in str(raised.value)) == said
    assert "s3cret" not in str(raised.value)


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
        ({"header": ("X-Key=env:sk-123",)}, "is not set|is no name of one"),
        ({"api_key_env": "sk-123"}, "is not set|is no name of one"),
        ({"api_key_env": "hf_sk-123"}, "is not set|is no name of one"),
        ({"url": "https://h?key=sk-123"}, "looks like it holds a secret"),
        ({"url": "https://h/v1?v=sk-123"}, "looks like it holds a secret"),
        ({"url": "https://h/v1#part"}, "a host, a port, a path and a query"),
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
