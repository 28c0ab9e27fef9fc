"""The TGI wire, byte for byte, as its documentation shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.servers.reader import Answer, running


def ask(directory: Path, path: str, body: Any, **headers: str) -> Answer:
    with running(directory, "tgi", ttft_ms=0, itl_ms=0, max_model_len=100) as server:
        return server.post(path, body, **headers)


def test_stream_byte_for_byte(tmp_path: Path) -> None:
    answer = ask(tmp_path, "/generate_stream", {"inputs": "a b", "parameters": {"max_new_tokens": 3, "details": True}})
    frame = b'data: {"index":%d,"token":{"id":%d,"text":"%b","logprob":-0.6,"special":false},"generated_text":%b,'
    assert answer.body == b"".join(
        [
            frame % (1, 1001, b" the", b"null") + b'"details":null}\n\n',
            frame % (2, 1002, b" of", b"null") + b'"details":null}\n\n',
            frame % (3, 1003, b" and", b'" the of and"')
            + b'"details":{"finish_reason":"length","generated_tokens":3,"seed":null,"input_length":3}}\n\n',
        ]
    )
    assert answer.headers["content-type"] == "text/event-stream"


def test_details_only_when_asked_for(tmp_path: Path) -> None:
    body = {"inputs": "a", "parameters": {"max_new_tokens": 2}}
    assert [event["details"] for event in ask(tmp_path, "/generate_stream", body).data] == [None, None]
    assert ask(tmp_path, "/generate", body).json == {"generated_text": " the of", "details": None}


def test_plain_frames_and_general_ones_agree(tmp_path: Path) -> None:
    """The last event is made another way than those in the middle: both count, name and spell alike."""
    body = {"inputs": "a", "parameters": {"max_new_tokens": 50}}
    events = ask(tmp_path, "/generate_stream", body).data
    assert [event["index"] for event in events] == list(range(1, 51))
    assert "".join(event["token"]["text"] for event in events) == events[-1]["generated_text"]
    whole = ask(tmp_path, "/generate", {"inputs": "a", "parameters": {"max_new_tokens": 50, "details": True}}).json
    assert whole["details"]["tokens"] == [event["token"] for event in events]


def test_whole_reply_and_its_headers(tmp_path: Path) -> None:
    answer = ask(tmp_path, "/generate", {"inputs": "a b c", "parameters": {"max_new_tokens": 2, "details": True}})
    details = answer.json["details"]
    assert (details["finish_reason"], details["generated_tokens"]) == ("length", 2)
    assert answer.headers["x-prompt-tokens"] == "4"  # BOS counted
    assert answer.headers["x-generated-tokens"] == "2"


def test_root_goes_either_way(tmp_path: Path) -> None:
    parameters = {"max_new_tokens": 2}
    assert ask(tmp_path, "/", {"inputs": "a", "parameters": parameters}).json["generated_text"] == " the of"
    assert len(ask(tmp_path, "/", {"inputs": "a", "parameters": parameters, "stream": True}).events) == 2


@pytest.mark.parametrize(
    ("limit", "asked", "got"),
    [(4096, 1024, 1024), (4096, 1025, 2048), (4096, 1500, 2048), (4096, 2048, 2048), (4096, 2100, 3072),
     (2048, 1500, 1024), (2048, 4000, 1024)],
)  # fmt: skip
def test_long_replies_come_in_whole_pieces_as_a_real_router_sent_them(
    tmp_path: Path, limit: int, asked: int, got: int
) -> None:
    with running(tmp_path, "tgi", ttft_ms=0, itl_ms=0, max_model_len=limit) as server:
        body = {"inputs": "a", "parameters": {"max_new_tokens": asked, "details": True}}
        details = server.post("/generate", body).json["details"]
    assert (details["generated_tokens"], details["finish_reason"]) == (got, "length")


def test_output_fills_the_context_when_not_told(tmp_path: Path) -> None:
    assert len(ask(tmp_path, "/generate_stream", {"inputs": "a"}).events) == 98


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"inputs": "", "parameters": {"max_new_tokens": 3}}, "`inputs` cannot be empty"),
        ({"inputs": "a", "parameters": {"max_new_tokens": 0}}, "`max_new_tokens` must be strictly positive"),
        ({"inputs": "a b", "parameters": {"max_new_tokens": 98}},
         "`inputs` tokens + `max_new_tokens` must be <= 100. Given: 3 `inputs` tokens and 98 `max_new_tokens`"),
        ({"inputs": "a " * 99}, "`inputs` must have less than 99 tokens. Given: 100"),
    ],
)  # fmt: skip
def test_invalid_requests_have_a_status_or_are_told_inside_the_stream(tmp_path: Path, body: Any, message: str) -> None:
    expected = {"error": f"Input validation error: {message}", "error_type": "validation"}
    whole = ask(tmp_path, "/generate", body)
    assert (whole.status, whole.json) == (422, expected)
    stream = ask(tmp_path, "/generate_stream", body)
    assert (stream.status, stream.data) == (200, [expected])
    assert stream.headers["content-type"] == "text/event-stream"


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_unreadable_bodies(tmp_path: Path, path: str) -> None:
    assert ask(tmp_path, path, b"{").status == 400
    assert ask(tmp_path, path, {"parameters": {}}).status == 422
    assert ask(tmp_path, path, {"inputs": [1, 2]}).status == 422
    wrong_type = ask(tmp_path, path, {"inputs": "a"}, Content_Type="text/plain")
    assert (wrong_type.status, wrong_type.body) == (415, b"Expected request with `Content-Type: application/json`")


def test_what_the_server_says_of_itself(tmp_path: Path) -> None:
    with running(tmp_path, "tgi", max_model_len=123) as server:
        assert server.ask("GET", "/health").status == 200
        info = server.ask("GET", "/info").json
        assert (info["model_id"], info["max_total_tokens"], info["max_input_tokens"]) == ("m", 123, 122)
