"""Replies in the OpenAI protocol, each named after the quirk that it shows."""

from __future__ import annotations

from backends.protocol import Delta, ProtocolError, Truncated
from tests.backends.frames import CHAT, DONE, LENGTH, VLLM, T, Transcript, chat, text, total, usage

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
