"""Replies that are no texts, embeddings and ranks as vLLM, llama.cpp, SGLang and TEI write them, and `/v1/responses` as
vLLM streams it."""

from __future__ import annotations

from backends.protocol import HELD_BACK, REASONING, Delta, ProtocolError, Truncated
from tests.backends.frames import T, Transcript

VECTORS = (
    b'{"id":"embd-9f","object":"list","created":1795000000,"model":"m","data":['
    b'{"index":0,"object":"embedding","embedding":%s},{"index":1,"object":"embedding","embedding":%s}],'
    b'"usage":{"prompt_tokens":14,"total_tokens":14,"completion_tokens":0,"prompt_tokens_details":null}}'
)
RANKS = (
    b'{"id":"rerank-9f","model":"m","usage":{"prompt_tokens":18,"total_tokens":18},"results":['
    b'{"index":1,"document":{"text":"b","multi_modal":null},"relevance_score":0.9},'
    b'{"index":0,"document":{"text":"a","multi_modal":null},"relevance_score":0.0}]}'
)


def pooled(name: str, backend: str, body: bytes, items: int, tokens: int | None) -> Transcript:
    delta = Delta(prompt_tokens=tokens, output_tokens=0, items=items)
    return Transcript(name, backend, body, (delta,), stream=False)


POOLED = [
    pooled("embeddings: in base64", "embeddings", VECTORS % (b'"AACAPw=="', b'"AAAAPw=="'), 2, 14),
    pooled("embeddings: as numbers", "embeddings", VECTORS % (b"[1.0,0.5]", b"[0.25,-1e-3]"), 2, 14),
    pooled("embeddings: a text twice", "embeddings", VECTORS.replace(b'x":1', b'x":0') % (b"[1]", b"[2]"), 1, 14),
    Transcript(
        "embeddings: without a vector", "embeddings", VECTORS % (b"[1.0]", b"[]"), (), ProtocolError, "neither vectors",
        stream=False,
    ),
    Transcript("embeddings: cut off", "embeddings", VECTORS[:90], (), Truncated, "cut off", stream=False),
    Transcript(
        "embeddings: a text's reply", "embeddings", b'{"choices":[{"text":"a"}]}', (), ProtocolError, "neither vectors",
        stream=False,
    ),
    Transcript(
        "embeddings: an error", "embeddings", b'{"error":{"message":"no such model","code":404}}',
        (Delta(error="no such model"),), stream=False,
    ),
    pooled("rerank: vLLM's", "rerank", RANKS, 2, 18),
    pooled(
        "rerank: llama.cpp's", "rerank",
        b'{"model":"m","object":"list","usage":{"prompt_tokens":18,"total_tokens":18},'
        b'"results":[{"index":0,"relevance_score":-7.1},{"index":1,"relevance_score":0.3}]}', 2, 18,
    ),
    pooled(
        "rerank: SGLang's", "rerank",
        b'[{"score":0.99,"document":"a","index":0,"meta_info":{"id":"x","prompt_tokens":9}},'
        b'{"score":0.0,"document":"b","index":1,"meta_info":{"id":"y","prompt_tokens":8}}]', 2, 17,
    ),
    pooled("rerank: Jina's", "rerank", b'{"usage":{"total_tokens":9},"results":[{"relevance_score":1}]}', 1, 9),
    pooled("rerank: TEI's", "tei-rerank", b'[{"index":1,"score":0.99},{"index":0,"score":0.01}]', 2, None),
    pooled(
        "score: vLLM's", "score",
        b'{"id":"score-9f","object":"list","created":1,"model":"m","data":[{"index":0,"object":"score","score":0.5},'
        b'{"index":1,"object":"score","score":1}],"usage":{"prompt_tokens":18,"total_tokens":18}}', 2, 18,
    ),
]  # fmt: skip


def event(kind: bytes, more: bytes = b"") -> bytes:
    return b"event: " + kind + b'\ndata: {"type":"' + kind + b'","sequence_number":0' + more + b"}\n\n"


def said(text: bytes, kind: bytes = b"output_text") -> bytes:
    return event(
        b"response." + kind + b".delta", b',"item_id":"msg_1","output_index":0,"content_index":0,"delta":' + text
    )


def last(status: bytes, tokens: int, more: bytes = b"") -> bytes:
    response = (
        b',"response":{"id":"resp_1","object":"response","status":"%s","error":null,"output":[{"type":"reasoning",'
        b'"content":[{"type":"reasoning_text","text":"hm"}]},{"type":"message","content":[{"type":"output_text","text":"ab"}]}],'
        b'"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":4},"output_tokens":%d,'
        b'"output_tokens_details":{"reasoning_tokens":1},"total_tokens":12}%s}' % (status, tokens, more)
    )
    return event(b"response.completed" if status == b"completed" else b"response.incomplete", response)


OPENING = event(b"response.created", b',"response":{"status":"in_progress","output":[],"usage":null}') + event(
    b"response.output_item.added", b',"output_index":0,"item":{"type":"message","content":[]}'
)


def ended(tokens: int, finish: str = "stop") -> Delta:
    return Delta(finish=finish, prompt_tokens=9, output_tokens=tokens, cached_tokens=4, reasoning_tokens=1)


RESPONSES = [
    Transcript(
        "responses: vLLM's", "openai-responses",
        OPENING + said(b'"hm"', b"reasoning_text") + said(b'"a"') + said(b'""') + said(b'"b"')
        + event(b"response.output_text.done", b',"text":"ab"') + last(b"completed", 4),
        (REASONING, T, HELD_BACK, T, ended(4)),
    ),
    Transcript(
        "responses: cut at its length, and [DONE]", "openai-responses",
        OPENING + said(b'"a"') + last(b"incomplete", 2) + b"data: [DONE]\n\n", (T, ended(2, "length")),
    ),
    Transcript(
        "responses: failed", "openai-responses",
        OPENING + event(b"response.failed", b',"response":{"status":"failed","error":{"message":"no memory"}}'),
        (Delta(error="no memory"),),
    ),
    Transcript(
        "responses: an error within", "openai-responses", said(b'"a"') + event(b"error", b',"message":"gone"'),
        (T, Delta(error="gone")),
    ),
    Transcript("responses: cut off", "openai-responses", OPENING + said(b'"a"'), (T,), Truncated, "before the server"),
    Transcript(
        "responses: a chat's chunk", "openai-responses", b'data: {"choices":[]}\n\n', (), ProtocolError, "no event of",
    ),
    Transcript(
        "responses: whole", "openai-responses",
        last(b"completed", 3).partition(b'"response":')[2].removesuffix(b"}\n\n"), (Delta(
            n_tokens=3, finish="stop", prompt_tokens=9, output_tokens=3, cached_tokens=4, reasoning_tokens=1,
        ),), stream=False,
    ),
]  # fmt: skip
