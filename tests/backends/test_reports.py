"""What public reports of other tools describe, as our codecs read it. The situations are the reports', the bytes ours.
`docs/reliability.md` lists them."""

from __future__ import annotations

import json
from typing import Any

import pytest

import backends
from backends.protocol import Delta, ProtocolError

CHAT = backends.get("openai-chat")


def event(value: Any, prefix: bytes = b"data: ") -> bytes:
    return prefix + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def says(text: str | None = "a", finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text} | delta, "finish_reason": finish}]}


def used(output: int, choices: list[Any] | None) -> dict[str, Any]:
    return {"choices": choices, "usage": {"prompt_tokens": 3, "completion_tokens": output}}


TOKEN, LAST, END, DONE = event(says()), event(says("", "stop")), event(used(2, [])), b"data: [DONE]\n\n"
RIGHT = [
    ("triton-inference-server/triton_distributed#264", [TOKEN, b":\n\n", TOKEN, LAST, END, DONE]),
    ("sgl-project/genai-bench#159", [event(says(), b"data:"), event(says(), b"data:"), LAST, END, DONE]),
    ("huggingface/huggingface_hub#4536", [TOKEN, TOKEN, LAST, END, b"data:[DONE]\n\n"]),
    ("triton-inference-server/server#8082", [TOKEN, TOKEN, LAST, event(used(2, None)), DONE]),
    ("ray-project/llmperf#46", [TOKEN, TOKEN, LAST, event({"choices": []}), END, DONE]),
    ("ai-dynamo/aiperf#368", [TOKEN + TOKEN + LAST + END + DONE]),
    ("vllm-project/vllm#38717", [TOKEN, event(says("中国")), LAST, END, DONE]),
    ("vllm-project/vllm#3759", [event(says(None, role="assistant")), TOKEN, TOKEN, LAST, END, DONE]),
    ("gpustack/gpustack#6205", [*[event({"choices": [{"delta": {"reasoning": "a"}}]})] * 2, LAST, END, DONE]),
]


@pytest.mark.parametrize(("report", "reply"), RIGHT, ids=[report for report, _ in RIGHT])
def test_replies_that_are_right(report: str, reply: list[bytes]) -> None:
    """Two tokens and the server's counts, however the reply is cut."""
    body = b"".join(reply)
    for size in (1, 7, len(body)):
        decoder = CHAT.decoder(True)
        deltas = [delta for at in range(0, len(body), size) for delta in decoder.feed(body[at : at + size])]
        deltas += decoder.eof()
        assert sum(delta.n_tokens for delta in deltas) == 2
        assert [d.output_tokens for d in deltas if d.output_tokens is not None] == [2]
        assert [d.prompt_tokens for d in deltas if d.prompt_tokens is not None] == [3]
        assert not any(delta.error for delta in deltas)


WRONG = [
    ("vllm-project/aibrix#1674", [TOKEN, b"data: {}\n\n"], "neither choices nor usage"),
    (
        "openai/openai-python#663",
        [TOKEN, b"data: " + json.dumps(says()).encode() * 2 + b"\n\n"],
        "not of this protocol",
    ),
    ("kubernetes-sigs/inference-perf#530", [TOKEN, b"<html>502 Bad Gateway</html>"], "502 Bad Gateway"),
    ("vllm-project/vllm#6064", [DONE], ""),
]


@pytest.mark.parametrize(("report", "reply", "error"), WRONG, ids=[report for report, *_ in WRONG])
def test_replies_that_are_broken(report: str, reply: list[bytes], error: str) -> None:
    """They are told, with what came, or have no token, which no reply may be without."""
    decoder = CHAT.decoder(True)
    deltas: list[Delta] = []
    if not error:
        deltas += [*decoder.feed(b"".join(reply)), *decoder.eof()]
        assert not deltas
        return
    with pytest.raises(ProtocolError, match=error):
        for each in reply:
            deltas += decoder.feed(each)
        deltas += decoder.eof()
    assert sum(delta.n_tokens for delta in deltas) == 1


FAILED = [
    ("ai-dynamo/aiperf#1076", b"event: error\n" + event({"message": "upstream overloaded", "code": 503})),
    ("teilomillet/gollm#33", event({"error": {"message": "upstream overloaded"}})),
]


@pytest.mark.parametrize(("report", "failure"), FAILED, ids=[report for report, _ in FAILED])
def test_errors_after_status_200(report: str, failure: bytes) -> None:
    decoder = CHAT.decoder(True)
    deltas = [*decoder.feed(TOKEN + failure + DONE), *decoder.eof()]
    assert [delta.error for delta in deltas if delta.error] == ["upstream overloaded"]
