"""Replies as real servers sent them, from real/: llama.cpp b11549 (xllamacpp 2026.10.11549) on a CPU."""

from __future__ import annotations

from pathlib import Path

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
