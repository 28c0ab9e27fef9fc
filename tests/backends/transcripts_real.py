"""Replies as real servers sent them, from real/: llama.cpp b11549 (xllamacpp 2026.10.11549) on a CPU, and SGLang 0.5.11
on an H200, whose radix cache, stream interval, incremental output, tokenizer and queue were set for them, and vLLM
0.32.0 on a CPU, with --enable-scale-out and --enable-per-request-metrics."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any, NamedTuple

from backends.protocol import Delta, ProtocolError, ServerRecord, Truncated
from tests.backends.frames import T, Transcript

REAL = Path(__file__).parent / "real"


def body(name: str) -> bytes:
    return (REAL / f"{name}.txt").read_bytes()


_STREAM = body("llamacpp_stream")
_TIMED = ServerRecord(prefill_us=1615, decode_us=1285)

LLAMACPP = [
    Transcript(
        "llama.cpp: its own stream, no [DONE]",
        "llamacpp",
        _STREAM,
        (T, T, T, T, Delta(finish="length", prompt_tokens=3, output_tokens=4, cached_tokens=0, server=_TIMED)),
    ),
    Transcript(
        "llama.cpp: pings while a request waits",
        "llamacpp",
        b":\n\n" + _STREAM.replace(b"\n\n", b"\n\n: ping\n\n"),
        (T, T, T, T, Delta(finish="length", prompt_tokens=3, output_tokens=4, cached_tokens=0, server=_TIMED)),
    ),
    Transcript(
        "llama.cpp: tokens of an unfinished character come with the next",
        "llamacpp",
        b"\n\n".join(event for number, event in enumerate(_STREAM.split(b"\n\n")) if number not in (1, 3)),
        (T, Delta(n_tokens=2),
         Delta(n_tokens=1, finish="length", prompt_tokens=3, output_tokens=4, cached_tokens=0, server=_TIMED)),
    ),
    Transcript(
        "llama.cpp: the connection ends between events", "llamacpp", b"\n\n".join(_STREAM.split(b"\n\n")[:2]) + b"\n\n",
        (T, T), Truncated, "before the server",
    ),
    Transcript(
        "llama.cpp: the count goes back", "llamacpp", b"\n\n".join(reversed(_STREAM.split(b"\n\n")[:2])) + b"\n\n",
        (Delta(n_tokens=2),), ProtocolError, "went back from 2 to 1",
    ),
    Transcript(
        "llama.cpp: an error within a stream", "llamacpp", _STREAM.partition(b"\n\n")[0] + b"\n\ndata: "
        b'{"error":{"code":500,"message":"Context size has been exceeded.","type":"server_error"}}\n\n',
        (T, Delta(error="Context size has been exceeded.")),
    ),
    Transcript(
        "llama.cpp: whole, with a prompt from its cache",
        "llamacpp",
        body("llamacpp_whole_cached"),
        (Delta(n_tokens=4, finish="length", prompt_tokens=3, output_tokens=4, cached_tokens=2,
               server=ServerRecord(prefill_us=674, decode_us=1018)),),
        stream=False,
    ),
    Transcript(
        "llama.cpp: whole, an error", "llamacpp", body("llamacpp_error_token"),
        (Delta(error="Prompt contains invalid tokens"),), stream=False,
    ),
    Transcript(
        "llama.cpp: completions, usage beside the finish",
        "openai",
        body("llamacpp_openai_stream"),
        (T, T, T, Delta(finish="length", prompt_tokens=3, output_tokens=3, cached_tokens=2)),
    ),
    Transcript(
        "llama.cpp: chat, a role without a text first",
        "openai-chat",
        body("llamacpp_chat_stream"),
        (T, T, T, Delta(finish="length"), Delta(prompt_tokens=5, output_tokens=3, cached_tokens=0)),
    ),
]  # fmt: skip

_ENDED = {"prompt_tokens": 8, "cached_tokens": 0, "finish": "length"}


def _events(name: str, *numbers: int) -> bytes:
    events = body(name).split(b"\n\n")
    return b"".join(events[number] + b"\n\n" for number in numbers)


SGLANG = [
    Transcript(
        "sglang: every event repeats all of the output; five tokens an event",
        "sglang",
        body("sglang_stream_interval"),
        (T, *[Delta(n_tokens=5)] * 3,
         Delta(n_tokens=5, output_tokens=21, **_ENDED, server=ServerRecord(e2el_us=108398, retractions=0))),
    ),
    Transcript(
        "sglang: incremental output",
        "sglang",
        body("sglang_stream_incremental"),
        (*[T] * 15, Delta(n_tokens=1, output_tokens=16, **_ENDED, server=ServerRecord(e2el_us=25545, retractions=0))),
    ),
    Transcript(
        "sglang: without a tokenizer, with times of its scheduler",
        "sglang",
        body("sglang_stream_without_tokenizer"),
        (*[T] * 15, Delta(n_tokens=1, output_tokens=16, **_ENDED,
                          server=ServerRecord(queue_us=214, prefill_us=6425, e2el_us=25125, retractions=0))),
    ),
    Transcript(
        "sglang: too long, an error with status 200 and then [DONE]",
        "sglang",
        body("sglang_stream_too_long"),
        (Delta(error="Requested token count exceeds the model's maximum context length of 8192 tokens. You requested a "
               "total of 8400 tokens: 8000 tokens from the input messages and 400 tokens for the completion. Please "
               "reduce the number of tokens in the input messages or the completion to fit within the limit."),),
    ),
    Transcript(
        "sglang: its queue is full, a finish reason of a 200",
        "sglang",
        body("sglang_queue_full"),
        (Delta(finish="abort", output_tokens=0, error="The request queue is full.",
               server=ServerRecord(e2el_us=17137)),),
    ),
    Transcript(
        "sglang: cut between events", "sglang", _events("sglang_stream_interval", 0, 1), (T, Delta(n_tokens=5)),
        Truncated, "before the server",
    ),
    Transcript(
        "sglang: the count goes back", "sglang", _events("sglang_stream_interval", 1, 0), (Delta(n_tokens=6),),
        ProtocolError, "went back from 6 to 1",
    ),
    Transcript(
        "sglang: an event more than tokens, as after a retraction", "sglang",
        _events("sglang_stream_interval", 0, 1, 1, 2, 3, 4, 5),
        (T, *[Delta(n_tokens=5)] * 3,
         Delta(n_tokens=5, output_tokens=21, **_ENDED, server=ServerRecord(e2el_us=108398, retractions=0))),
    ),
    Transcript(
        "sglang: whole",
        "sglang",
        body("sglang_whole"),
        (Delta(n_tokens=16, output_tokens=16, **_ENDED, server=ServerRecord(e2el_us=87324, retractions=0)),),
        stream=False,
    ),
    Transcript(
        "sglang: completions",
        "openai",
        body("sglang_openai_stream"),
        (*[T] * 15, Delta(n_tokens=1, finish="length"), Delta(prompt_tokens=8, output_tokens=16)),
    ),
    Transcript(
        "sglang: completions, a prompt from its cache",
        "openai",
        body("sglang_cached"),
        (T, Delta(n_tokens=1, finish="length"), Delta(prompt_tokens=1200, output_tokens=2, cached_tokens=1199)),
    ),
    Transcript(
        "sglang: completions, its queue is full: an error, and a count of nothing behind it",
        "openai",
        body("sglang_queue_full_openai"),
        (Delta(error="The request queue is full."), Delta(prompt_tokens=0, output_tokens=0)),
    ),
    Transcript(
        "sglang: chat, the role with an empty text, the end without",
        "openai-chat",
        body("sglang_chat_stream"),
        (*[T] * 8, Delta(finish="length"), Delta(prompt_tokens=7, output_tokens=8)),
    ),
]  # fmt: skip


_COUNTED: dict[str, Any] = {"prompt_tokens": 3, "output_tokens": 4, "cached_tokens": 0}
VLLM = [
    Transcript(
        "vllm: token ids in and out",
        "vllm-generate",
        body("vllm_tokens_stream"),
        (*[T] * 3, Delta(n_tokens=1, finish="length"), Delta(**_COUNTED)),
    ),
    Transcript(
        "vllm: token ids in and out, whole",
        "vllm-generate",
        body("vllm_tokens_whole"),
        (Delta(n_tokens=4, finish="length", **_COUNTED),),
        stream=False,
    ),
    Transcript(
        "vllm: its times of the request, beside the usage",
        "vllm",
        body("vllm_timed_stream"),
        (*[T] * 3, Delta(n_tokens=1, finish="length"),
         Delta(**_COUNTED, server=ServerRecord(queue_us=31, prefill_us=162545, ttft_us=162576, decode_us=744126,
                                               e2el_us=906702))),
    ),
    Transcript(
        "vllm: its times of the request, whole",
        "vllm",
        body("vllm_timed_whole"),
        (Delta(n_tokens=4, finish="length", **_COUNTED,
               server=ServerRecord(queue_us=14, prefill_us=316137, ttft_us=316151, decode_us=924576,
                                   e2el_us=1240727)),),
        stream=False,
    ),
    Transcript(
        "vllm: other things under that name",
        "vllm",
        body("vllm_timed_whole").partition(b'"metrics":')[0] + b'"metrics":["a"]}',
        (Delta(n_tokens=4, finish="length", **_COUNTED),),
        stream=False,
    ),
]  # fmt: skip


class Seen(NamedTuple):
    """A request to a real TGI, and its reply. Headers: those that are its own."""

    case: str
    method: str
    path: str
    body: Any
    status: int
    headers: dict[str, str]
    reply: bytes

    @property
    def stream(self) -> bool:
        return "event-stream" in self.headers.get("content-type", "")


def tgi() -> list[Seen]:
    """Text Generation Inference 3.3.6-dev0 (db931fcf) on a CPU, a random OPT of two layers, 2026-11-29. Of a request of
    many bytes `body` has how many, and the first."""
    with lzma.open(REAL / "tgi.jsonl.xz", "rt") as lines:
        read = [json.loads(line) for line in lines]
    return [Seen(*{**each, "reply": each["reply"].encode()}.values()) for each in read]
