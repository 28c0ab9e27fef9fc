"""What is answered for each of several texts and not with a text: embeddings, ranks and scores, of whatever server.

`/v1/embeddings` is OpenAI's; `/v1/rerank` is as Jina and Cohere have it, with vLLM, SGLang and llama.cpp; `/score` is
vLLM's; Text Embeddings Inference (TEI) has texts where the others have documents. A reply is one JSON document, whose
answers are counted and whose vectors are not looked at. TEI tells tokens and times in headers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from backends.identity import PATHS, read_any
from backends.protocol import Backend, Decoder, Delta, HttpRequest, Prompt, ProtocolError, Sampling
from backends.replies import Count, HeadedReply, error_message, error_text

QUERY_WORDS = 8  # of a pair of query and document
_NOTHING = (b"", b"null", b"[]", b'""')  # as a vector
_encode = msgspec.json.Encoder().encode


class _Meta(msgspec.Struct, gc=False):
    prompt_tokens: Count | None = None


class _Answer(msgspec.Struct, gc=False):
    """What a server gives for one text: a vector, or a score by one of two names. meta_info: SGLang's."""

    index: Count | None = None
    embedding: msgspec.Raw = msgspec.Raw(b"")
    score: float | None = None
    relevance_score: float | None = None
    meta_info: _Meta | None = None

    @property
    def answers(self) -> bool:
        return bytes(self.embedding) not in _NOTHING or (self.score, self.relevance_score) != (None, None)


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: Count | None = None
    total_tokens: Count | None = None


class _Reply(msgspec.Struct, gc=False):
    data: list[_Answer] | None = None
    results: list[_Answer] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Reply | list[_Answer]).decode


def _read(body: bytes) -> Delta:
    """What a reply answers. Raises ProtocolError or one of UNDECODABLE."""
    reply = _decode(body)
    if isinstance(reply, list):
        reply = _Reply(results=reply)
    if reply.error:
        return Delta(error=error_text(body))
    answers = reply.data or reply.results
    if not answers or not all(each.answers for each in answers):
        raise ProtocolError(f"neither vectors nor scores: {error_text(body)}")
    places = {at if each.index is None else each.index for at, each in enumerate(answers)}
    usage = reply.usage or _Usage()
    tokens = usage.total_tokens if usage.prompt_tokens is None else usage.prompt_tokens
    counts = [each.meta_info.prompt_tokens for each in answers if each.meta_info is not None]
    if tokens is None and len(counts) == len(answers) and None not in counts:
        tokens = sum(each or 0 for each in counts)
    return Delta(prompt_tokens=tokens, output_tokens=0, items=len(places))


class _Reader(HeadedReply):
    most_bytes = 1 << 27  # vectors as decimal numbers are long


def decoder(stream: bool) -> Decoder:
    """There is no stream of these."""
    return _Reader(_read)


def _texts(prompt: Prompt) -> Sequence[str]:
    return prompt.items or (prompt.text or "",)


def _pairs(prompt: Prompt) -> tuple[str, list[str]]:
    """A query, and a document for each text: what the model reads for each is as long as the text."""
    rows = [text.split(" ") for text in _texts(prompt)]
    words = min(QUERY_WORDS, min(map(len, rows)) // 2)
    return " ".join(rows[0][:words] or rows[0]), [" ".join(row[words:]) for row in rows]


def encode_embeddings(model: str, prompt: Prompt, sampling: Sampling) -> HttpRequest:
    """Vectors in base64, as OpenAI's own client asks for them: as decimal numbers they are four times as long."""
    fields = {"model": model, "input": _texts(prompt), "encoding_format": "base64"}
    return HttpRequest("POST", "/v1/embeddings", _encode(fields))


def encode_rerank(model: str, prompt: Prompt, sampling: Sampling) -> HttpRequest:
    query, documents = _pairs(prompt)
    return HttpRequest("POST", "/v1/rerank", _encode({"model": model, "query": query, "documents": documents}))


def encode_tei_rerank(model: str, prompt: Prompt, sampling: Sampling) -> HttpRequest:
    """Its server has one model and takes no name."""
    query, texts = _pairs(prompt)
    return HttpRequest("POST", "/rerank", _encode({"query": query, "texts": texts}))


def encode_score(model: str, prompt: Prompt, sampling: Sampling) -> HttpRequest:
    query, documents = _pairs(prompt)
    return HttpRequest("POST", "/score", _encode({"model": model, "text_1": query, "text_2": documents}))


_pooled = partial(
    Backend,
    prompt_kind="text",
    any_server=True,
    decoder=decoder,
    error_message=error_message,
    info_paths=PATHS,
    read_info=read_any,
    server_metrics={
        "running": "vllm:num_requests_running sglang:num_running_reqs llamacpp:requests_processing",
        "waiting": "vllm:num_requests_waiting sglang:num_queue_reqs llamacpp:requests_deferred te_queue_size",
        "prompt_tokens": "vllm:prompt_tokens_total sglang:prompt_tokens_total llamacpp:prompt_tokens_total",
        "e2el_seconds": "vllm:e2e_request_latency_seconds sglang:e2e_request_latency_seconds te_request_duration",
        "queue_seconds": "vllm:request_queue_time_seconds sglang:queue_time_seconds te_request_queue_duration",
    },
    native=False,
    pooled=True,
)

SEEN = "llama.cpp b11549 on CPUs, in CI"

EMBEDDINGS = _pooled(name="embeddings", encode=encode_embeddings, seen=SEEN)
RERANK = _pooled(name="rerank", encode=encode_rerank, seen=SEEN)
SCORE = _pooled(name="score", encode=encode_score)
TEI_RERANK = _pooled(name="tei-rerank", encode=encode_tei_rerank, adapter_field="", priority_field="", seen=SEEN)
