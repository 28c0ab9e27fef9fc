"""Replies as servers send them, byte for byte, and what each of them says.

The frames are those of vLLM 0.32, LightLLM 1.2 and TGI 3.3.7; a transcript is named after the quirk that it shows.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.protocol import Delta, ProtocolError, Truncated

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

COMPLETIONS = [
    Transcript(
        "vllm: plain stream",
        "vllm",
        text(b'" foo"') + text(b'" bar"') + text(b'" baz"', LENGTH) + total(3, 3) + DONE,
        (T, T, Delta(n_tokens=1, finish="length"), Delta(prompt_tokens=3, output_tokens=3)),
    ),
    Transcript(
        "vllm: characters of several bytes, escapes, braces and line ends within the text",
        "vllm",
        text('" 日本語🙂"'.encode())
        + text(b'"\\ud83d\\ude42 \\/ \\"}]}\\n\\n"')
        + text('"data: [DONE]\u2028"'.encode())
        + text(b'"\\u0000"', LENGTH)
        + DONE,
        (T, T, T, Delta(n_tokens=1, finish="length")),
    ),
    Transcript(
        "vllm: merged tokens, counted by the usage alone",
        "vllm",
        text(b'" two tokens"') + text(b'" three more"', LENGTH) + total(3, 5) + DONE,
        (T, Delta(n_tokens=1, finish="length"), Delta(prompt_tokens=3, output_tokens=5)),
    ),
    Transcript(
        "vllm: merged tokens under continuous_usage_stats",
        "vllm",
        text(b'" a"', more=b"," + usage(3, 1))
        + text(b'" b c"', more=b"," + usage(3, 3))
        + text(b'" d"', LENGTH, b"," + usage(3, 4))
        + total(3, 4)
        + DONE,
        (
            T,
            Delta(n_tokens=2),
            Delta(n_tokens=1, finish="length", prompt_tokens=3, output_tokens=4),
            Delta(prompt_tokens=3, output_tokens=4),
        ),
    ),
    Transcript(
        "vllm: merged tokens under return_token_ids",
        "vllm",
        text(b'" b c"').replace(b'"token_ids":null}]', b'"token_ids":[5,6]}]')
        + text(b'""').replace(b'"token_ids":null}]', b'"token_ids":[7]}]')
        + text(b'""', LENGTH).replace(b'"token_ids":null}]', b'"token_ids":[8]}]')
        + total(3, 4),
        (
            Delta(n_tokens=2),
            T,
            Delta(n_tokens=1, finish="length"),
            Delta(prompt_tokens=3, output_tokens=4),
        ),
    ),
    Transcript(
        "vllm: bytes held back are a token without text",
        "vllm",
        text(b'""') + text('"é"'.encode()) + text(b'""', b'"stop"') + total(3, 2) + DONE,
        (T, T, Delta(finish="stop"), Delta(prompt_tokens=3, output_tokens=2)),
    ),
    Transcript(
        "vllm: bytes held back at the end are a token too, as the usage tells",
        "vllm",
        text(b'"a"') + text(b'""', LENGTH) + total(3, 2) + DONE,
        (T, Delta(finish="length"), Delta(n_tokens=1, prompt_tokens=3, output_tokens=2)),
    ),
    Transcript(
        "vllm: an end without text and merged tokens, so that the usage tells nothing of the end",
        "vllm",
        text(b'"a b"') + text(b'""', LENGTH) + total(3, 3) + DONE,
        (T, Delta(finish="length"), Delta(prompt_tokens=3, output_tokens=3)),
    ),
    Transcript(
        "vllm: cached prompt tokens",
        "vllm",
        text(b'"a"', LENGTH) + total(512, 1, b',"prompt_tokens_details":{"cached_tokens":496}') + DONE,
        (Delta(n_tokens=1, finish="length"), Delta(prompt_tokens=512, output_tokens=1, cached_tokens=496)),
    ),
    Transcript(
        "vllm: keep-alive comments, also without an empty line after them",
        "vllm",
        b": keep-alive\n\n" + text(b'"a"') + b":\n" + text(b'"b"', LENGTH) + b":\n\n" + DONE + b": bye",
        (T, Delta(n_tokens=1, finish="length")),
    ),
    Transcript(
        "vllm: error within a stream",
        "vllm",
        text(b'"a"')
        + b'data: {"error":{"message":"EngineCore encountered an issue.","type":"InternalServerError","param":null,'
        + b'"code":500}}\n\n'
        + DONE,
        (T, Delta(error="EngineCore encountered an issue.")),
    ),
    Transcript(
        "vllm: error, and nothing after it",
        "vllm",
        b'data: {"error":{"message":"gone","type":"InternalServerError","param":null,"code":500}}\n\n',
        (Delta(error="gone"),),
    ),
    Transcript(
        "vllm: given up",
        "vllm",
        text(b'"a"') + text(b'""', b'"abort"') + DONE,
        (T, Delta(finish="abort", error="the server gave the reply up (finish_reason 'abort')")),
    ),
    Transcript(
        "vllm: given up, and cut off",
        "vllm",
        text(b'""', b'"error"') + b"data: {",
        (Delta(finish="error", error="the server gave the reply up (finish_reason 'error')"),),
    ),
    Transcript(
        "openai: an empty finish reason is none",
        "openai",
        text(b'"a"', b'""') + text(b'""', b'""') + text(b'""', LENGTH) + DONE,
        (T, T, Delta(finish="length")),
    ),
    Transcript(
        "openrouter: an error beside the choices",
        "openai-chat",
        chat(b'{"content":"a"}') + chat(b'{"content":"b"}', more=b',"error":{"code":502,"message":"no provider"}'),
        (T, Delta(error="no provider")),
    ),
    Transcript(
        "vllm: no [DONE] after a finish reason", "vllm", text(b'"a"', LENGTH), (Delta(n_tokens=1, finish="length"),)
    ),
    Transcript("vllm: [DONE] without a finish reason", "vllm", text(b'"a"') + DONE, (T,)),
    Transcript("vllm: [DONE] without its line ends", "vllm", text(b'"a"') + b"data: [DONE]", (T,)),
    Transcript("vllm: [DONE] with one line end", "vllm", text(b'"a"') + b"data: [DONE]\r\n", (T,)),
    Transcript("vllm: ended between events", "vllm", text(b'"a"'), (T,), Truncated, "before the server had said"),
    Transcript(
        "vllm: ended within an event", "vllm", text(b'"a"') + text(b'"b"')[:-9], (T,), Truncated, "inside an event"
    ),
    Transcript(
        "vllm: ended within the empty line", "vllm", text(b'"a"', LENGTH)[:-1], (), Truncated, "inside an event"
    ),
    Transcript("vllm: nothing at all", "vllm", b"", (), Truncated, "before the server had said"),
    Transcript(
        "tgi's OpenAI route: usage on the last choice",
        "openai",
        b'data: {"object":"text_completion","id":"","created":1,"model":"m","system_fingerprint":"3.3.7-native",'
        b'"choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null}],"usage":null}\n\n'
        b'data: {"object":"text_completion","id":"","created":1,"model":"m","system_fingerprint":"3.3.7-native",'
        b'"choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"length"}],'
        b'"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}}\n\n' + DONE,
        (T, Delta(n_tokens=1, finish="length", prompt_tokens=7, output_tokens=2)),
    ),
    Transcript(
        "tgi's OpenAI route: overloaded, with status 200",
        "openai",
        b'data: {"error":{"message":"Model is overloaded","http_status_code":422}}\n\n' + DONE,
        (Delta(error="Model is overloaded"),),
    ),
    Transcript(
        "lightllm's OpenAI route: error with status 200",
        "openai",
        b'data: {"error":{"message":"the input prompt token len 9000 is too long","type":"invalid_request_error"}}\n\n',
        (Delta(error="the input prompt token len 9000 is too long"),),
    ),
    Transcript(
        "sglang: error without a wrapper",
        "openai",
        b'data: {"object":"error","message":"The request queue is full.","type":"ServiceUnavailable","code":503}\n\n'
        + DONE,
        (Delta(error="The request queue is full."),),
    ),
    Transcript(
        "azure: a first chunk without choices",
        "openai",
        b'data: {"choices":[],"prompt_filter_results":[]}\n\n' + text(b'"a"', LENGTH) + DONE,
        (Delta(n_tokens=1, finish="length"),),
    ),
    Transcript(
        "vllm: whole reply",
        "vllm",
        VLLM + b'"choices":[{"index":0,"text":" foo bar","logprobs":null,"finish_reason":"length","stop_reason":null}],'
        b'"usage":{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2,"prompt_tokens_details":null}}',
        (Delta(n_tokens=2, finish="length", prompt_tokens=3, output_tokens=2),),
        stream=False,
    ),
    Transcript(
        "openai: whole reply without usage",
        "openai",
        VLLM + b'"choices":[{"index":0,"text":" foo bar","finish_reason":"stop"}]}\n',
        (Delta(n_tokens=1, finish="stop"),),
        stream=False,
    ),
    Transcript(
        "openai: whole reply that is an error",
        "openai",
        b'{"error":{"message":"no","type":"x"}}',
        (Delta(error="no"),),
        stream=False,
    ),
    Transcript(
        "openai: whole reply cut off", "openai", VLLM + b'"choices":[{"ind', (), Truncated, "cut off", stream=False
    ),
    Transcript("openai: whole reply empty", "openai", b"\n", (), Truncated, "no body", stream=False),
    Transcript(
        "openai: whole reply of another protocol",
        "openai",
        b'{"generated_text":"a"}',
        (),
        ProtocolError,
        "neither choices nor usage",
        stream=False,
    ),
]

CHATS = [
    Transcript(
        "chat: the role is no token",
        "openai-chat",
        chat(b'{"role":"assistant","content":""}')
        + chat(b'{"content":" foo"}')
        + chat(b'{"content":""}')
        + chat(b'{"content":" bar"}')
        + chat(b'{"content":""}', LENGTH)
        + total(20, 3, head=CHAT)
        + DONE,
        (T, T, T, Delta(finish="length"), Delta(prompt_tokens=20, output_tokens=3)),
    ),
    Transcript(
        "chat: the role under continuous_usage_stats",
        "openai-chat",
        chat(b'{"role":"assistant","content":""}', more=b"," + usage(20, 0))
        + chat(b'{"content":" foo bar"}', more=b"," + usage(20, 2))
        + chat(b"{}", LENGTH, b"," + usage(20, 3))
        + DONE,
        (Delta(n_tokens=2), Delta(n_tokens=1, finish="length", prompt_tokens=20, output_tokens=3)),
    ),
    Transcript(
        "chat: reasoning under both its names, refusal and tool calls are output",
        "openai-chat",
        chat(b'{"role":"assistant","content":null,"reasoning_content":""}')
        + chat(b'{"reasoning_content":"Hm"}')
        + chat(b'{"reasoning":"So"}')
        + chat(b'{"refusal":"No"}')
        + chat(b'{"tool_calls":[{"index":0,"id":"c1","type":"function","function":{"name":"f","arguments":""}}]}')
        + chat(b'{"tool_calls":[]}', b'"tool_calls"')
        + DONE,
        (T, T, T, T, Delta(finish="tool_calls")),
    ),
    Transcript(
        "lightllm's chat route: the role comes with every chunk",
        "openai-chat",
        chat(b'{"role":"assistant","content":"a","tool_calls":null,"reasoning_content":null}')
        + chat(b'{"role":"assistant","content":""}')
        + chat(b'{"role":"assistant","content":"b"}', LENGTH),
        (T, T, Delta(n_tokens=1, finish="length")),
    ),
    Transcript(
        "chat: content in parts",
        "openai-chat",
        chat(b'{"content":[{"type":"text","text":"a"}]}') + chat(b'{"content":[]}') + chat(b"{}", b'"stop"') + DONE,
        (T, Delta(finish="stop")),
    ),
    Transcript(
        "chat: an empty finish reason is none",
        "openai-chat",
        chat(b'{"content":"a"}', b'""') + chat(b'{"content":"b"}', LENGTH),
        (T, Delta(n_tokens=1, finish="length")),
    ),
    Transcript(
        "chat: whole reply",
        "openai-chat",
        b'{"id":"chatcmpl-8f","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":'
        b'{"role":"assistant","content":"a b","reasoning_content":null},"finish_reason":"stop"}],'
        b'"usage":{"prompt_tokens":9,"total_tokens":11,"completion_tokens":2,'
        b'"prompt_tokens_details":{"cached_tokens":8}}}',
        (Delta(n_tokens=2, finish="stop", prompt_tokens=9, output_tokens=2, cached_tokens=8),),
        stream=False,
    ),
]

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
        "json instead of events", "openai", b'{"id":"x"}', (), Truncated, 'inside an event: \'{"id":"x"}\''
    ),
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

TRANSCRIPTS = [*COMPLETIONS, *CHATS, *LIGHTLLM, *TGI, *BROKEN]
