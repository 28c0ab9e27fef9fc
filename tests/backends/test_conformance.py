"""What every installed backend owes, built in or plugged in."""

from __future__ import annotations

import re

import msgspec
import pytest

import backends
from backends.protocol import Backend, Prompt, ProtocolError, Sampling

PROMPT = Prompt(n_tokens=3, token_ids=[101, 15043, 3186], text='Say "hé"\n')
METRICS = {
    "ttft_seconds", "itl_seconds", "queue_seconds", "validation_seconds", "prefill_seconds", "inference_seconds",
    "tpot_seconds", "time_per_token_seconds", "e2el_seconds", "running", "waiting", "paused", "kv_cache_usage_ratio",
    "kv_reserved_tokens", "prompt_tokens", "generation_tokens", "prefix_cache_hits", "prefix_cache_queries",
    "preemptions", "adapters_running", "adapters_waiting", "adapters_loaded",
}  # fmt: skip


@pytest.fixture(params=backends.available())
def backend(request: pytest.FixtureRequest) -> Backend:
    return backends.get(request.param)


def values(tree: object) -> list[object]:
    """All values within a JSON document, the containers too."""
    inner: list[object] = []
    if isinstance(tree, dict):
        inner = list(tree.values())
    elif isinstance(tree, list):
        inner = list(tree)
    return [tree, *(value for item in inner for value in values(item))]


def test_the_built_in_ones_are_there() -> None:
    built_in = {"lightllm", "llamacpp", "openai", "openai-chat", "sglang", "tgi", "vllm"}
    assert built_in | {
        "dynamo",
        "lmdeploy",
        "ollama",
        "trtllm",
        "openai-responses",
        "embeddings",
        "rerank",
        "score",
    } <= set(backends.available())


def test_unknown_name() -> None:
    with pytest.raises(backends.UnknownBackend, match="unknown backend 'vlm'; did you mean 'vllm'"):
        backends.get("vlm")


def test_name_is_the_entry_point(backend: Backend) -> None:
    assert backends.get(backend.name) is backend


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_encode(backend: Backend, stream: bool, ignore_eos: bool) -> None:
    request = backend.encode("the-model", PROMPT, Sampling(max_tokens=4321, ignore_eos=ignore_eos, stream=stream))
    assert request.method == "POST"
    assert re.fullmatch(r"(/[A-Za-z0-9_]+)+", request.path)
    assert ("Content-Type", "application/json") in request.headers
    found = values(msgspec.json.decode(request.body))
    if backend.pooled:  # there are no tokens to ask for, and a query may be apart from its document
        assert PROMPT.text is not None
        assert set(PROMPT.text.split()) <= {word for each in found if isinstance(each, str) for word in each.split()}
        return
    assert 4321 in found
    assert (PROMPT.token_ids if backend.prompt_kind == "token_ids" else PROMPT.text) in found


def test_encode_text_where_there_are_no_ids(backend: Backend) -> None:
    request = backend.encode("the-model", Prompt(n_tokens=3, text="Hello"), Sampling(max_tokens=5))
    assert "Hello" in values(msgspec.json.decode(request.body))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("body", [b"", b"\x00\xff", b"<html></html>", b"{}", b"[]", b"null", b"data: {}\n\n", b"7"])
def test_garbage_is_never_a_reply(backend: Backend, stream: bool, body: bytes) -> None:
    decoder = backend.decoder(stream)
    with pytest.raises(ProtocolError) as raised:
        assert not decoder.feed(body)
        decoder.eof()
    assert str(raised.value).isprintable() and len(str(raised.value)) < 400


def test_decoders_share_nothing(backend: Backend) -> None:
    one, other = backend.decoder(True), backend.decoder(True)
    one.feed(b"data: {")
    with pytest.raises(ProtocolError, match=r"before the server had said|has no body"):
        other.eof()


def test_error_message(backend: Backend) -> None:
    assert "why not" in backend.error_message(503, b'{"error": "why not"}')
    assert "503" in backend.error_message(503, b"")


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b"<html>", b'{"data":[]}', b'{"status":"ok"}', b"[" * 9999, b"\xff"]
)
def test_foreign_answers_are_refused(backend: Backend, body: bytes) -> None:
    assert backend.info_paths
    for path in backend.info_paths:
        with pytest.raises(ProtocolError) as raised:
            backend.read_info(path, body)
        assert str(raised.value).isprintable()


def test_server_metrics_are_series_names(backend: Backend) -> None:
    assert set(backend.server_metrics) <= METRICS
    for series in backend.server_metrics.values():
        assert series.split(" ") and all(
            re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*(\{\w+\})?", name) for name in series.split(" ")
        )
