"""The wire of vLLM's pooling routes: `/v1/embeddings`, `/rerank` and `/score`. Each text, or pair of texts, is a
sequence of one token, and the reply, which is never streamed, has a vector or a score for each."""

from __future__ import annotations

import array
import base64
import time
from collections.abc import Callable
from typing import Any

import msgspec

from servers.serve import wire
from servers.serve.wire import Finish, Page, Wire

DIMENSIONS = 16  # of a vector, unless a request names another number

Prompt = str | list[wire.TokenId]
Answer = Callable[[int], dict[str, Any]]  # what is said of the text of this place


class EmbeddingBody(wire.RequestFields, kw_only=True):
    """The fields that matter here; others are accepted and ignored."""

    input: Prompt
    encoding_format: str | None = "float"
    dimensions: int | None = None

    def prompts(self) -> list[Prompt]:
        return [self.input]

    def answer(self, place: int) -> dict[str, Any]:
        count = self.dimensions or DIMENSIONS
        vector = array.array("f", [1 / (1 + place + each) for each in range(count)])
        packed = base64.b64encode(vector.tobytes()).decode() if self.encoding_format == "base64" else vector.tolist()
        return {"index": place, "object": "embedding", "embedding": packed}


class EmbeddingsBody(EmbeddingBody, kw_only=True):
    input: list[Prompt]  # type: ignore[assignment]

    def prompts(self) -> list[Prompt]:
        return self.input


class RerankBody(wire.RequestFields, kw_only=True):
    query: str
    documents: list[str]

    def prompts(self) -> list[Prompt]:
        return [f"{self.query} {document}" for document in self.documents]

    def answer(self, place: int) -> dict[str, Any]:
        return {"index": place, "document": {"text": self.documents[place]}, "relevance_score": 1 / (1 + place)}


class ScoreBody(wire.RequestFields, kw_only=True):
    text_1: str
    text_2: list[str]

    def prompts(self) -> list[Prompt]:
        return [f"{self.text_1} {text}" for text in self.text_2]

    def answer(self, place: int) -> dict[str, Any]:
        return {"index": place, "object": "score", "score": 1 / (1 + place)}


PooledBody = EmbeddingBody | RerankBody | ScoreBody
_decode_one = msgspec.json.Decoder(EmbeddingBody).decode
_decode_several = msgspec.json.Decoder(EmbeddingsBody).decode
decode_rerank = msgspec.json.Decoder(RerankBody).decode
decode_score = msgspec.json.Decoder(ScoreBody).decode


def decode_embeddings(raw: bytes) -> EmbeddingBody:
    try:
        return _decode_one(raw)
    except msgspec.ValidationError:
        return _decode_several(raw)


class PooledReply:
    """What the sequences of one request say together."""

    def __init__(self, body: PooledBody, model: str, request_id: str) -> None:
        self._body, self._model = body, model
        kind = "rerank" if isinstance(body, RerankBody) else "score" if isinstance(body, ScoreBody) else "embd"
        self._id = f"{kind}-{request_id}"
        self._created_s = int(time.time())
        self.wires: list[PooledWire] = []

    def page(self) -> Page:
        tokens = sum(each.prompt_tokens for each in self.wires)
        usage: dict[str, Any] = {"prompt_tokens": tokens, "total_tokens": tokens}
        answers = [self._body.answer(place) for place in range(len(self.wires))]
        body: dict[str, Any] = {"id": self._id, "model": self._model, "usage": usage}
        if isinstance(self._body, RerankBody):
            return wire.json_page(200, body | {"results": answers})
        usage |= {"completion_tokens": 0, "prompt_tokens_details": None}
        return wire.json_page(200, body | {"object": "list", "created": self._created_s, "data": answers})


class PooledWire(Wire):
    """One text of a request."""

    def __init__(self, reply: PooledReply, prompt_tokens: int) -> None:
        super().__init__(False, prompt_tokens, 1)
        self._reply = reply
        reply.wires.append(self)

    def token(self, count: int) -> bytes:
        return b""

    def event(self, count: int, n_tokens: int, finish: Finish | None) -> bytes:
        return b""

    def failure(self) -> bytes:
        return b""

    def whole(self, count: int, finish: Finish, seconds: float) -> Page:
        return self._reply.page()
