"""The TGI wire, byte for byte, as its documentation shows it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servers.schedulers import Rejected
from servers.serve.timing import FixedTiming, TimedReply
from tests.backends.transcripts_real import Seen, tgi
from tests.servers.reader import Answer, Running, running, serving


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
    assert ask(tmp_path, "/generate", body).json == {"generated_text": " the of"}


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


@pytest.mark.parametrize("path", ["/", "/invocations"])
def test_root_goes_either_way_and_repeats_the_prompt(tmp_path: Path, path: str) -> None:
    parameters = {"max_new_tokens": 2}
    assert ask(tmp_path, path, {"inputs": "a", "parameters": parameters}).json == [{"generated_text": "a the of"}]
    stream = ask(tmp_path, path, {"inputs": "a", "parameters": parameters, "stream": True}).data
    assert [event["generated_text"] for event in stream] == [None, "a the of"]
    alone = ask(tmp_path, path, {"inputs": "a", "parameters": {**parameters, "return_full_text": False}})
    assert alone.json == [{"generated_text": " the of"}]


def test_a_seed_is_told_of_what_was_sampled_alone(tmp_path: Path) -> None:
    def seed(**more: Any) -> Any:
        parameters = {"max_new_tokens": 1, "details": True, **more}
        return ask(tmp_path, "/generate", {"inputs": "a", "parameters": parameters}).json["details"]["seed"]

    assert seed(seed=7) is None and seed(seed=7, do_sample=True) == 7
    assert isinstance(seed(temperature=0.5), int)


def test_a_body_over_two_million_bytes(tmp_path: Path) -> None:
    assert ask(tmp_path, "/generate", {"inputs": "w" * 2_000_000}).status == 413


class Full(FixedTiming):
    def submit(self, reply: TimedReply) -> None:
        raise Rejected(429, "Model is overloaded")


def test_an_overload_is_told_inside_a_stream(tmp_path: Path) -> None:
    with serving(tmp_path, Full(0, 0), "tgi") as server:
        whole = server.post("/generate", {"inputs": "a"})
        assert (whole.status, whole.json) == (429, {"error": "Model is overloaded", "error_type": "overloaded"})
        stream = server.post("/generate_stream", {"inputs": "a"})
        assert (stream.status, stream.data) == (200, [whole.json])
        chat = server.post("/v1/chat/completions", {"messages": [], "stream": True})
        error = {"error": {"message": "Model is overloaded", "http_status_code": 422}}
        assert (chat.status, chat.data) == (200, [error]) and chat.events[-1] == b"data: [DONE]\n\n"


def test_a_key_is_for_replies_and_tokens_alone(tmp_path: Path) -> None:
    with running(tmp_path, "tgi", api_key="k") as server:
        for path in ("/generate", "/", "/v1/completions", "/tokenize"):
            refused = server.post(path, {"inputs": "a"})
            assert (refused.status, refused.body) == (401, b"")
        for path in ("/info", "/health", "/metrics", "/v1/models", "/"):
            assert server.ask("GET", path).status == 200
        assert server.post("/tokenize", {"inputs": "a"}, Authorization="Bearer k").status == 200


# What has no model cannot lose it.
NOT_EMULATED = ("shard", "overloaded", "key asked for", "chat_tokenize")
REAL = [each for each in tgi() if not any(words in each.case for words in NOT_EMULATED)]


def shape(value: Any) -> Any:
    """The names of its fields, all the way down; of lists what the first item has."""
    if isinstance(value, dict):
        return {name: shape(part) for name, part in value.items()}
    if isinstance(value, list):
        return [shape(part) for part in value[:1]]
    return None


def shapes(body: bytes, stream: bool) -> Any:
    """Of a stream: of its first event and its last, and whether [DONE] ends it."""
    if not stream:
        return shape(json.loads(body)) if body[:1] in (b"{", b"[") else body.partition(b": ")[0]
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event]
    told = [event for event in events if event != b"[DONE]"]
    return shape(json.loads(told[0])), shape(json.loads(told[-1])), events[-1] == b"[DONE]"


def sent(seen: Seen) -> Any:
    """Its body; a long one as long as it was."""
    if isinstance(seen.body, str):
        return seen.body.encode()
    if not isinstance(seen.body, dict) or "long" not in seen.body:
        return seen.body
    words = "w" * 2_100_000 if "2 MB" in seen.case else "word " * 3002
    if "chat" in seen.path:
        return {"messages": [{"role": "user", "content": words}], "max_tokens": 2, "stream": True}
    return {"inputs": words, "parameters": {"max_new_tokens": 4}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("tgi"), "tgi", ttft_ms=0, itl_ms=0, max_model_len=2048) as server:
        yield server


@pytest.mark.parametrize("seen", REAL, ids=lambda seen: seen.case)
def test_status_fields_and_headers_are_those_of_a_real_server(seen: Seen, served: Running) -> None:
    content_type = "text/plain" if seen.case == "content type missing" else "application/json"
    answer = served.ask(seen.method, seen.path, sent(seen), Content_Type=content_type)
    assert answer.status == seen.status
    assert ("event-stream" in answer.headers.get("content-type", "")) == seen.stream
    found = shapes(answer.body, seen.stream)
    if seen.path == "/v1/models":
        del found["system_fingerprint"]  # the emulator's own mark
    assert found == shapes(seen.reply, seen.stream)
    error = seen.stream and b'"error"' in seen.reply
    own = {name for name in seen.headers if name.startswith("x-") or name == "cache-control"}
    assert error or own <= set(answer.headers)


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


def test_prompts_in_a_list_are_choices_of_one_reply(tmp_path: Path) -> None:
    body = {"prompt": ["a", "b c"], "max_tokens": 2}
    whole = ask(tmp_path, "/v1/completions", body).json
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == [(0, " the of"), (1, " the of")]
    assert whole["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    stream = ask(tmp_path, "/v1/completions", body | {"stream": True})
    assert sorted(event["choices"][0]["index"] for event in stream.data) == [0, 0, 1, 1]
    assert stream.events.count(b"data: [DONE]\n\n") == 1
    for prompts, message in ([], "cannot be empty"), (["a"] * 5, "maximum allowed batch size of 4"):
        refused = ask(tmp_path, "/v1/completions", {"prompt": prompts})
        assert refused.status == 422 and message in refused.json["error"]


@pytest.mark.parametrize("stream", [True, False])
def test_openai_replies_say_that_they_are_emulated_where_real_ones_name_their_image(
    tmp_path: Path, stream: bool
) -> None:
    asked = {"stream": stream, "max_tokens": 3}
    with running(tmp_path, "tgi", ttft_ms=0, itl_ms=0) as server:
        label = server.ask("GET", "/info").json["docker_label"]
        replies = (
            server.post("/v1/completions", {"prompt": "a", **asked}),
            server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], **asked}),
        )
    for reply in replies:
        said = reply.data[:-1] if stream else [reply.json]
        assert label == "llm-dissect-emulated" and {each["system_fingerprint"] for each in said} == {f"3.3.7-{label}"}
