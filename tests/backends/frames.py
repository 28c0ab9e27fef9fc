"""Frames as vLLM 0.32, LightLLM 1.2 and TGI 3.3.7 send them, byte for byte, and what a transcript of them is."""

from __future__ import annotations

from dataclasses import dataclass

from backends.protocol import Delta, ProtocolError

T = Delta(n_tokens=1)
VLLM = b'{"id":"cmpl-8f","object":"text_completion","created":1795000000,"model":"m",'
CHAT = b'{"id":"chatcmpl-8f","object":"chat.completion.chunk","created":1795000000,"model":"m",'


@dataclass(frozen=True)
class Transcript:
    """`deltas`, then the end: None for a good one, else the exception and a part of its message."""

    name: str
    backend: str
    body: bytes
    deltas: tuple[Delta, ...]
    error: type[ProtocolError] | None = None
    says: str = ""
    stream: bool = True


def text(value: bytes, finish: bytes = b"null", more: bytes = b"") -> bytes:
    """A completion chunk of vLLM."""
    head = b"data: " + VLLM + b'"choices":[{"index":0,"text":' + value + b',"logprobs":null,"finish_reason":' + finish
    return head + b',"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]' + more + b"}\n\n"


def chat(delta: bytes, finish: bytes = b"null", more: bytes = b"") -> bytes:
    tail = b',"logprobs":null,"finish_reason":' + finish + b',"token_ids":null}]' + more + b"}\n\n"
    return b"data: " + CHAT + b'"choices":[{"index":0,"delta":' + delta + tail


def usage(prompt: int, completion: int, details: bytes = b"") -> bytes:
    counts = (prompt, prompt + completion, completion)
    return b'"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d' % counts + details + b"}"


def total(prompt: int, completion: int, details: bytes = b"", head: bytes = VLLM) -> bytes:
    """vLLM's usage chunk."""
    counts = usage(prompt, completion, details)
    return b"data: " + head + b'"choices":[],' + counts + b',"system_fingerprint":"vllm"}\n\n'


DONE = b"data: [DONE]\n\n"
LENGTH = b'"length"'


def light(value: bytes, count: int, finish: bytes = b"null") -> bytes:
    """An event of LightLLM: no space after the colon, ujson's escaped slash."""
    finished = b"false" if finish == b"null" else b"true"
    head = b'data:{"token":{"id":3555,"text":' + value + b',"logprob":-1.83,"special":false,"count_output_tokens":%d,'
    tail = b',"details":null,"input_usage":{"input_text_tokens":3,"input_audio_tokens":0,"input_image_tokens":0}}\n\n'
    middle = b'"prompt_tokens":3},"generated_text":null,"finished":' + finished + b',"finish_reason":' + finish
    return head % count + middle + tail


def tgi(index: int, value: bytes, end: bytes = b'"generated_text":null,"details":null') -> bytes:
    token = b'"token":{"id":29871,"text":' + value + b',"logprob":-0.6,"special":false},'
    return b'data: {"index":%d,' % index + token + end + b"}\n\n"


TGI_END = (
    b'"generated_text":"a\\n","details":{"finish_reason":"length","generated_tokens":2,"seed":null,"input_length":7}'
)
