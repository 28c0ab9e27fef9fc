"""Replies in the own protocols of LightLLM and TGI, replies that break a protocol, and the list of all transcripts."""

from __future__ import annotations

from backends.protocol import Delta, ProtocolError, Truncated
from tests.backends.frames import DONE, LENGTH, TGI_END, T, Transcript, light, text, tgi, total
from tests.backends.transcripts_endpoints import POOLED, RESPONSES
from tests.backends.transcripts_openai import CHATS, COMPLETIONS
from tests.backends.transcripts_real import LLAMACPP, SGLANG, VLLM
from tests.backends.transcripts_written import OLLAMA, OPENAI_SERVERS

LIGHTLLM = [
    Transcript(
        "lightllm: plain stream, no space, no [DONE], escaped slashes",
        "lightllm",
        light(b'" What"', 1) + light(b'" \\/ "', 2) + light('"…日"'.encode(), 3) + light(b'"."', 4, LENGTH),
        (T, T, T, Delta(n_tokens=1, finish="length", prompt_tokens=3, output_tokens=4)),
    ),
    Transcript(
        "lightllm: tokens are counted by count_output_tokens",
        "lightllm",
        light(b'" a b"', 2) + light(b'""', 2) + light(b'" c"', 3) + light(b'"."', 6, b'"stop"'),
        (Delta(n_tokens=2), T, Delta(n_tokens=3, finish="stop", prompt_tokens=3, output_tokens=6)),
    ),
    Transcript(
        "lightllm 1.1: no input_usage, no count",
        "lightllm",
        b'data:{"token":{"id":1,"text":"a","logprob":-1.8,"special":false,"count_output_tokens":0,"prompt_tokens":3},'
        b'"generated_text":null,"finished":false,"finish_reason":null,"details":null}\n\n'
        b'data:{"token":{"id":1,"text":"b","logprob":-1.8,"special":false,"count_output_tokens":0,"prompt_tokens":3},'
        b'"generated_text":null,"finished":true,"finish_reason":"stop","details":null}\n\n',
        (T, Delta(n_tokens=1, finish="stop", prompt_tokens=3, output_tokens=2)),
    ),
    Transcript(
        "lightllm: given up with reason error",
        "lightllm",
        light(b'"a"', 1) + light(b'""', 1, b'"error"'),
        (
            T,
            Delta(
                finish="error",
                prompt_tokens=3,
                output_tokens=1,
                error="the server gave the reply up (finish_reason 'error')",
            ),
        ),
    ),
    Transcript(
        "lightllm: aborted, and cut off",
        "lightllm",
        light(b'"a"', 1, b'"abort"') + b"data:{",
        (
            Delta(
                n_tokens=1,
                finish="abort",
                prompt_tokens=3,
                output_tokens=1,
                error="the server gave the reply up (finish_reason 'abort')",
            ),
        ),
    ),
    Transcript(
        "lightllm: error within a stream",
        "lightllm",
        light(b'"a"', 1) + b'data: {"error":{"message":"bad prompt","type":"invalid_request_error"}}\n\n',
        (T, Delta(error="bad prompt")),
    ),
    Transcript("lightllm: ended between events", "lightllm", light(b'"a"', 1), (T,), Truncated, "before the server"),
    Transcript(
        "lightllm: the count goes back",
        "lightllm",
        light(b'"a"', 1) + light(b'"b"', 2) + light(b'"c"', 1),
        (T, T),
        ProtocolError,
        "went back from 2 to 1",
    ),
    Transcript(
        "lightllm: whole reply",
        "lightllm",
        b'{"generated_text":["a \\/ b"],"count_output_tokens":128,"finish_reason":"length","prompt_tokens":3,'
        b'"input_usage":{"input_text_tokens":3,"input_audio_tokens":0,"input_image_tokens":0}}',
        (Delta(n_tokens=128, finish="length", prompt_tokens=3, output_tokens=128),),
        stream=False,
    ),
    Transcript(
        "lightllm: whole reply given up",
        "lightllm",
        b'{"generated_text":[""],"count_output_tokens":1,"finish_reason":"abort","prompt_tokens":3}',
        (
            Delta(
                n_tokens=1,
                finish="abort",
                prompt_tokens=3,
                output_tokens=1,
                error="the server gave the reply up (finish_reason 'abort')",
            ),
        ),
        stream=False,
    ),
]

TGI = [
    Transcript(
        "tgi: plain stream, no [DONE]",
        "tgi",
        tgi(1, b'" "') + b":\n\n" + tgi(2, b'"\\n"', TGI_END),
        (T, Delta(n_tokens=1, finish="length", prompt_tokens=7, output_tokens=2)),
    ),
    Transcript(
        "tgi 2.0: no space after the colon",
        "tgi",
        (tgi(1, '"日"'.encode()) + tgi(2, b'"\\n"', TGI_END)).replace(b"data: ", b"data:"),
        (T, Delta(n_tokens=1, finish="length", prompt_tokens=7, output_tokens=2)),
    ),
    Transcript(
        "tgi: a last event without details", "tgi", tgi(1, b'"a"') + tgi(2, b'"b"', b'"generated_text":""'), (T, T)
    ),
    Transcript(
        "tgi: overloaded, with status 200",
        "tgi",
        b'data: {"error":"Model is overloaded","error_type":"overloaded"}\n\n',
        (Delta(error="Model is overloaded"),),
    ),
    Transcript(
        "tgi: generation fails on the way",
        "tgi",
        tgi(1, b'"a"') + b'data: {"error":"Request failed during generation: oom","error_type":"generation"}\n\n',
        (T, Delta(error="Request failed during generation: oom")),
    ),
    Transcript("tgi: ended between events", "tgi", tgi(1, b'"a"'), (T,), Truncated, "before the server"),
    Transcript(
        "tgi: whole reply",
        "tgi",
        b'{"generated_text":"a b","details":{"finish_reason":"eos_token","generated_tokens":2,"seed":null,"prefill":[],'
        b'"tokens":[{"id":29871,"text":" ","logprob":-0.6,"special":false}]}}',
        (Delta(n_tokens=2, finish="eos_token", output_tokens=2),),
        stream=False,
    ),
    Transcript("tgi: whole reply without details", "tgi", b'{"generated_text":"a b"}', (T,), stream=False),
]

BROKEN = [
    Transcript(
        "html instead of events", "vllm", b"<html>\n<body>login</body>\n", (), ProtocolError, "not a stream of events"
    ),
    Transcript(
        "json instead of events", "openai", b'{"id":"x"}', (), ProtocolError, 'not a stream of events: \'{"id":"x"}\''
    ),
    Transcript("json cut off", "openai", b'{"error":{"message":"x', (), Truncated, "cut off"),
    Transcript(
        "an error of json instead of events", "openai", b'{\n  "error": {"message": "no\\nroom"}\n}\n',
        (Delta(error="no room"),),
    ),
    Transcript("an error of json", "lightllm", b'{"message":"no room"}', (Delta(error="no room"),)),
    Transcript("an error of json, whole", "tgi", b'{"detail":"no room"}', (Delta(error="no room"),), stream=False),
    Transcript("tgi: [DONE]", "tgi", DONE, (), ProtocolError, "not of this protocol: '[DONE]'"),
    Transcript("tgi: [DONE] without line ends", "tgi", b"data: [DONE]", (), ProtocolError, "'[DONE]'"),
    Transcript(
        "lightllm: [DONE] after the end", "lightllm", light(b'"a"', 1, LENGTH) + DONE,
        (Delta(n_tokens=1, finish="length", prompt_tokens=3, output_tokens=1),), ProtocolError, "after the end",
    ),
    Transcript("tokens after [DONE]", "vllm", text(b'"a"') + DONE + text(b'"b"'), (T,), ProtocolError, "after the end"),
    Transcript("[DONE] twice", "vllm", text(b'"a"') + DONE + DONE + b"data:\n\n" + DONE[:-2], (T,)),
    Transcript("no json", "vllm", text(b'"a"') + b"data: hello\n\n", (T,), ProtocolError, "'hello'"),
    Transcript("another type", "vllm", b'data: {"choices":7}\n\n', (), ProtocolError, "not of this protocol"),
    Transcript("a list", "tgi", b"data: [1]\n\n", (), ProtocolError, "not of this protocol"),
    Transcript("another protocol", "vllm", tgi(1, b'"a"'), (), ProtocolError, "neither choices nor usage"),
    Transcript("yet another protocol", "tgi", text(b'"a"'), (), ProtocolError, "neither a token nor an error"),
    Transcript("and another", "lightllm", text(b'"a"'), (), ProtocolError, "neither a token nor an error"),
    Transcript("bytes that are no text", "vllm", text(b'"\xff\xfe"'), (), ProtocolError, "not of this protocol"),
    Transcript(
        "an absurd count", "vllm", text(b'"a"', LENGTH) + total(3, -1), (Delta(n_tokens=1, finish="length"),),
        ProtocolError, "not of this protocol",
    ),
    Transcript("nested without end", "vllm", b"data: " + b"[" * 2000 + b"\n\n", (), ProtocolError, "[[["),
    Transcript(
        "what came before a breach counts, and nothing after it",
        "vllm",
        text(b'"a"') + b"hello\n" + text(b'"b"', LENGTH),
        (T,),
        ProtocolError,
        "'hello'",
    ),
]  # fmt: skip

TRANSCRIPTS = [
    *COMPLETIONS, *CHATS, *LIGHTLLM, *TGI, *LLAMACPP, *SGLANG, *VLLM, *OLLAMA, *OPENAI_SERVERS, *POOLED, *RESPONSES,
    *BROKEN,
]  # fmt: skip
