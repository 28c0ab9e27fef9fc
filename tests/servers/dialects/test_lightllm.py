"""The LightLLM wire, byte for byte, as its documentation shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.servers.reader import Answer, running


def ask(directory: Path, path: str, body: Any) -> Answer:
    with running(directory, "lightllm", ttft_ms=0, itl_ms=0, max_model_len=100) as server:
        return server.post(path, body)


def test_stream_byte_for_byte(tmp_path: Path) -> None:
    answer = ask(tmp_path, "/generate_stream", {"inputs": [1, 2, 3], "parameters": {"max_new_tokens": 3}})
    frame = b'data:{"token":{"id":%d,"text":"%b","logprob":-0.6,"special":false,"count_output_tokens":%d,'
    frame += b'"prompt_tokens":3},"generated_text":null,"finished":%b,"finish_reason":%b,"details":null}\n\n'
    assert answer.body == b"".join(
        [
            frame % (1001, b" the", 1, b"false", b"null"),
            frame % (1002, b" of", 2, b"false", b"null"),
            frame % (1003, b" and", 3, b"true", b'"length"'),
        ]
    )


def test_slashes_are_escaped_wherever_they_occur(tmp_path: Path) -> None:
    for asked in (13, 14):  # as the last event and as one in the middle
        stream = ask(tmp_path, "/generate_stream", {"inputs": [1], "parameters": {"max_new_tokens": asked}})
        assert rb" input\/output" in stream.events[12]
        assert stream.data[12]["token"]["text"] == " input/output"


def test_whole_reply(tmp_path: Path) -> None:
    answer = ask(tmp_path, "/generate", {"inputs": "a b c d", "parameters": {"max_new_tokens": 2}})
    assert answer.json == {
        "generated_text": [" the of"], "count_output_tokens": 2, "finish_reason": "length", "prompt_tokens": 4,
    }  # fmt: skip
    assert "content-type" not in answer.headers


def test_root_goes_either_way(tmp_path: Path) -> None:
    body = {"inputs": [1], "parameters": {"max_new_tokens": 2}}
    assert ask(tmp_path, "/", body).json["count_output_tokens"] == 2
    assert len(ask(tmp_path, "/", body | {"stream": True}).events) == 2


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "truncated"),
        ({"parameters": {}}, 417, "'inputs'"),
        ({"inputs": "a"}, 417, "'parameters'"),
        ({"inputs": 3, "parameters": {}}, 417, "$.inputs"),
        ([], 417, "object"),
        (b'{"inputs": 3, "parameters', 417, "$.inputs"),
        pytest.param(b'{"inputs": 3, "parameters": ' + b"[" * 100_000, 417, "$.inputs", id="nested without end"),
        ({"inputs": [], "parameters": {"max_new_tokens": 1}}, 400, "prompt_ids is empty"),
        ({"inputs": [1], "parameters": {"max_new_tokens": 0}}, 400, "max_new_tokens must be at least 1"),
        ({"inputs": [1] * 10, "parameters": {"max_new_tokens": 91}}, 400,
         "the input prompt token len 10 + max_new_tokens 91 > 100"),
        ({"inputs": [1], "parameters": {}}, 400, "max_new_tokens 65535"),
    ],
)  # fmt: skip
def test_refusals(tmp_path: Path, path: str, body: Any, status: int, message: str) -> None:
    answer = ask(tmp_path, path, body)
    assert answer.status == status
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert message in error["message"]


def test_what_the_server_says_of_itself(tmp_path: Path) -> None:
    with running(tmp_path, "lightllm", max_model_len=123) as server:
        assert server.ask("GET", "/health").json == {"message": "Ok"}
        assert server.ask("GET", "/get_model_name").json == {"model_name": "m"}
        model = server.ask("GET", "/v1/models").json["data"][0]
        assert (model["id"], model["owned_by"], model["max_model_len"]) == ("m", "lightllm", 123)
        assert server.ask("GET", "/nowhere").json == {"detail": "Not Found"}
