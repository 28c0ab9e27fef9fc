"""Replies of servers that never ran here, as their sources write them: Ollama's lines; OpenAI's chunks as TensorRT-LLM
(a blank before the end of a line, several tokens in a chunk) and Dynamo (tokens without a text) send them."""

from __future__ import annotations

from backends.protocol import REASONING, Delta, ProtocolError, ServerRecord, Truncated
from tests.backends.frames import DONE, LENGTH, T, Transcript, text, total


def line(response: bytes, more: bytes = b"", done: bytes = b"false") -> bytes:
    head = b'{"model":"m","created_at":"2026-11-30T03:00:00.123456789Z","response":' + response
    return head + b',"done":' + done + more + b"}\n"


COUNTS = (
    b',"done_reason":"length","context":[1,2],"total_duration":5000000000,"load_duration":1500000000,'
    b'"prompt_eval_count":26,"prompt_eval_duration":130000000,"eval_count":%d,"eval_duration":3300000000'
)
SERVER = ServerRecord(prefill_us=130_000, decode_us=3_300_000, e2el_us=5_000_000, load_us=1_500_000)


def end(tokens: int) -> Delta:
    return Delta(finish="length", prompt_tokens=26, output_tokens=tokens, server=SERVER)


OLLAMA = [
    Transcript(
        "ollama: a line a token, and the counts",
        "ollama",
        line(b'" What"') + line('"日"'.encode()) + line(b'"\\n"') + line(b'""', COUNTS % 3, b"true"),
        (T, T, T, end(3)),
    ),
    Transcript(
        "ollama: more tokens than lines",
        "ollama",
        line(b'"a b"') + line(b'"c"') + line(b'""', COUNTS % 5, b"true"),
        (T, T, end(5)),
    ),
    Transcript(
        "ollama: thoughts, and a cached prompt that has no count",
        "ollama",
        line(b'""', b',"thinking":"hm"') + line(b'"a"') + line(b'""', b',"done_reason":"stop","eval_count":2', b"true"),
        (REASONING, T, Delta(finish="stop", output_tokens=2, server=ServerRecord())),
    ),
    Transcript(
        "ollama: loaded, nothing written",
        "ollama",
        line(b'""', b',"done_reason":"load"', b"true"),
        (Delta(finish="load", server=ServerRecord()),),
    ),
    Transcript(
        "ollama: an error within a stream",
        "ollama",
        line(b'"a"') + b'{"error":"an error was encountered while running the model"}\n',
        (T, Delta(error="an error was encountered while running the model")),
    ),
    Transcript("ollama: ended between lines", "ollama", line(b'"a"'), (T,), Truncated, "before the server had said"),
    Transcript(
        "ollama: ended inside a line", "ollama", line(b'"a"') + line(b'"b"')[:40], (T,), Truncated, "inside a line"
    ),
    Transcript(
        "ollama: a line after the end",
        "ollama",
        line(b'""', COUNTS % 3, b"true") + line(b'"a"'),
        (end(3),),
        ProtocolError,
        "after the end of the reply",
    ),
    Transcript(
        "ollama: another protocol", "ollama", text(b'"a"') + DONE, (), ProtocolError, "a line is not of this protocol"
    ),
    Transcript(
        "ollama: whole reply",
        "ollama",
        line(b'"a b"', COUNTS % 2, b"true").rstrip(),
        (Delta(n_tokens=1, finish="length", prompt_tokens=26, output_tokens=2, server=SERVER),),
        stream=False,
    ),
]

OPENAI_SERVERS = [
    Transcript(
        "trtllm: a blank before the end of a line",
        "trtllm",
        (text(b'"a"') + text(b'"b c"', LENGTH) + total(3, 3)).replace(b"}\n\n", b"} \n\n") + DONE,
        (T, Delta(n_tokens=1, finish="length"), Delta(prompt_tokens=3, output_tokens=3)),
    ),
    Transcript(
        "dynamo: tokens without a text, and an annotation",
        "dynamo",
        b'event: request_id\ndata: {"choices":[]}\n\n'
        + text(b'"a"') + text(b'""') + text(b'"c"', LENGTH)
        + total(3, 3, b',"prompt_tokens_details":{"cached_tokens":2}') + DONE,
        (T, T, Delta(n_tokens=1, finish="length"), Delta(prompt_tokens=3, output_tokens=3, cached_tokens=2)),
    ),
    Transcript(
        "lmdeploy: as OpenAI",
        "lmdeploy",
        text(b'"a"') + text(b'""', LENGTH) + total(3, 2) + DONE,
        (T, Delta(finish="length"), Delta(n_tokens=1, prompt_tokens=3, output_tokens=2)),
    ),
]  # fmt: skip
