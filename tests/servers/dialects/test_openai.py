"""The vLLM and OpenAI wire, byte for byte, as their documentation and a running vLLM show it."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.servers.reader import Answer, http_request, running
from tests.support.waiting import until

STREAM = {"stream": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def ask(directory: Path, path: str, body: Any, dialect: str = "vllm", **headers: str) -> Answer:
    with running(directory, dialect, ttft_ms=0, itl_ms=0, max_model_len=100) as server:
        return server.post(path, body, **headers)


def test_completion_stream_byte_for_byte(tmp_path: Path) -> None:
    body = {"model": "m", "prompt": [1, 15043, 3186], "max_tokens": 3} | USAGE
    answer = ask(tmp_path, COMPLETIONS, body, X_Request_Id="r-1")
    created = re.search(rb'"created":(\d+)', answer.body)
    assert created is not None
    head = b'data: {"id":"cmpl-r-1","object":"text_completion","created":' + created[1] + b',"model":"m","choices":['
    choice = b'{"index":0,"text":"%b","logprobs":null,"finish_reason":%b,"stop_reason":null,"prompt_token_ids":null,'
    choice += b'"token_ids":null}]}\n\n'
    assert answer.body == b"".join(
        [
            head + choice % (b" the", b"null"),
            head + choice % (b" of", b"null"),
            head + choice % (b" and", b'"length"'),
            head + b'],"usage":{"prompt_tokens":3,"total_tokens":6,"completion_tokens":3},'
            b'"system_fingerprint":"vllm-0.32.0-emulated"}\n\n',
            b"data: [DONE]\n\n",
        ]
    )
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["server"] == "llm-dissect (emulated)"


def test_chat_stream_byte_for_byte(tmp_path: Path) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a b"}], "max_completion_tokens": 2} | USAGE
    answer = ask(tmp_path, CHAT, body, X_Request_Id="r-1")
    created = re.search(rb'"created":(\d+)', answer.body)
    assert created is not None
    head = b'data: {"id":"chatcmpl-r-1","object":"chat.completion.chunk","created":' + created[1]
    head += b',"model":"m","choices":['
    assert answer.events == [
        head + b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
        b'"prompt_token_ids":null,"prompt_text":null}\n\n',
        head + b'{"index":0,"delta":{"content":" the"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n',
        head + b'{"index":0,"delta":{"content":" of"},"logprobs":null,"finish_reason":"length","stop_reason":null,'
        b'"token_ids":null}]}\n\n',
        head + b'],"usage":{"prompt_tokens":7,"total_tokens":9,"completion_tokens":2},'
        b'"system_fingerprint":"vllm-0.32.0-emulated"}\n\n',
        b"data: [DONE]\n\n",
    ]


def test_no_usage_unless_asked_for(tmp_path: Path) -> None:
    answer = ask(tmp_path, COMPLETIONS, {"prompt": "a", "max_tokens": 2} | STREAM)
    assert len(answer.events) == 3
    assert b"usage" not in answer.body


def test_continuous_usage_counts_up(tmp_path: Path) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = ask(tmp_path, COMPLETIONS, {"prompt": "a b", "max_tokens": 4, "stream": True, "stream_options": options})
    assert [event["usage"]["completion_tokens"] for event in answer.data] == [1, 2, 3, 4, 4]
    assert [event["usage"]["total_tokens"] for event in answer.data] == [3, 4, 5, 6, 6]
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "stream": True, "stream_options": options}
    assert [event["usage"]["completion_tokens"] for event in ask(tmp_path, CHAT, body).data] == [0, 1, 2, 3, 3]


IDS = {"return_token_ids": True, "max_tokens": 5}


def test_token_ids_where_they_are_asked_for(tmp_path: Path) -> None:
    """As vLLM 0.32 has them: the prompt's in the first event (in a chat beside the choices), an event's tokens' in
    each."""
    body = {"prompt": [7, 8, 9]} | IDS
    stream = ask(tmp_path, COMPLETIONS, body | USAGE)
    choices = [event["choices"][0] for event in stream.data[:-1]]
    assert [choice["token_ids"] for choice in choices] == [[1001], [1002], [1003], [1004], [1005]]
    assert [choice["prompt_token_ids"] for choice in choices] == [[7, 8, 9]] + [None] * 4
    assert "".join(choice["text"] for choice in choices) == " the of and to in"
    whole = ask(tmp_path, COMPLETIONS, body).json["choices"][0]
    assert (whole["prompt_token_ids"], whole["token_ids"]) == ([7, 8, 9], [1001, 1002, 1003, 1004, 1005])

    body = {"messages": [{"role": "user", "content": "of all the"}]} | IDS
    opening, *rest = ask(tmp_path, CHAT, body | STREAM).data
    ids = opening["prompt_token_ids"]
    assert len(ids) == 5 + 3 and (ids[5], ids[7]) == (1002, 1001)  # words that are output tokens have their ids
    assert "token_ids" not in opening["choices"][0]
    assert [event["choices"][0]["token_ids"] for event in rest] == [[1001], [1002], [1003], [1004], [1005]]
    assert not any("prompt_token_ids" in event for event in rest)
    whole = ask(tmp_path, CHAT, body).json
    assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == (ids, [1001, 1002, 1003, 1004, 1005])


def test_merged_events_have_the_ids_of_all_their_tokens(tmp_path: Path) -> None:
    with running(tmp_path, "vllm", "merge:1", max_model_len=100) as server:
        stream = server.post(COMPLETIONS, {"prompt": "a"} | IDS | STREAM)
    assert [event["choices"][0]["token_ids"] for event in stream.data] == [[1001, 1002], [1003, 1004], [1005]]


@pytest.mark.parametrize("dialect", ["vllm", "openai"])
def test_whole_replies(tmp_path: Path, dialect: str) -> None:
    completion = ask(tmp_path, COMPLETIONS, {"prompt": [5, 6], "max_tokens": 3}, dialect).json
    assert completion["object"] == "text_completion"
    assert completion["choices"][0]["text"] == " the of and"
    assert completion["choices"][0]["finish_reason"] == "length"
    assert completion["usage"] == {
        "prompt_tokens": 2, "total_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": None,
    }  # fmt: skip
    chat = ask(tmp_path, CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}, dialect).json
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["message"]["content"] == " the of"
    assert chat["usage"]["prompt_tokens"] == 6


def test_stream_and_whole_say_the_same_text(tmp_path: Path) -> None:
    body = {"prompt": "a", "max_tokens": 40}
    whole = ask(tmp_path, COMPLETIONS, body).json["choices"][0]["text"]
    stream = ask(tmp_path, COMPLETIONS, body | STREAM)
    assert "".join(event["choices"][0]["text"] for event in stream.data) == whole
    assert "naïve" in whole and "input/output" in whole


@pytest.mark.parametrize(
    ("prompt", "n_tokens"),
    [("one two  three\nfour", 4), ([9, 8, 7], 3), (["two words"], 2), ([[1, 2, 3, 4]], 4)],
)
def test_how_prompts_are_counted(tmp_path: Path, prompt: Any, n_tokens: int) -> None:
    reply = ask(tmp_path, COMPLETIONS, {"prompt": prompt, "max_tokens": 1}).json
    assert reply["usage"]["prompt_tokens"] == n_tokens


def test_chat_counts_every_message_and_part(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a b"}, {"type": "text", "text": "c"}]
    messages = [{"role": "system", "content": "d e"}, {"role": "user", "content": parts}]
    assert ask(tmp_path, CHAT, {"messages": messages, "max_tokens": 1}).json["usage"]["prompt_tokens"] == 5 + 5


@pytest.mark.parametrize(("asked", "made"), [(90, 90), (91, 90), (100, 90)])
def test_max_tokens_is_cut_to_the_context_in_silence(tmp_path: Path, asked: int, made: int) -> None:
    reply = ask(tmp_path, COMPLETIONS, {"prompt": [0] * 10, "max_tokens": asked}).json
    assert reply["usage"]["completion_tokens"] == made


def test_default_lengths(tmp_path: Path) -> None:
    assert ask(tmp_path, COMPLETIONS, {"prompt": "a"}).json["usage"]["completion_tokens"] == 16
    chat = ask(tmp_path, CHAT, {"messages": [{"role": "user", "content": "a"}]}).json
    assert chat["usage"]["total_tokens"] == 100


@pytest.mark.parametrize(
    ("body", "status", "kind", "param", "message"),
    [
        (b"{", 400, "BadRequestError", None, "JSON decode error"),
        ({"max_tokens": 3}, 400, "BadRequestError", None, "required field `prompt`"),
        ({"prompt": 7}, 400, "BadRequestError", None, "$.prompt"),
        ({"prompt": []}, 400, "BadRequestError", "prompt", "cannot be empty"),
        ({"prompt": ["a", ""]}, 400, "BadRequestError", "prompt", "cannot be empty"),
        ({"prompt": "a", "n": 0}, 400, "BadRequestError", "n", "n must be at least 1, got 0."),
        ({"prompt": "a", "n": 2, "temperature": 0}, 400, "BadRequestError", "n", "greedy"),
        ({"prompt": ["a"] * 600, "n": 2}, 400, "BadRequestError", "n", "1024 sequences"),
        ({"prompt": "a", "logprobs": 21}, 400, "BadRequestError", "logprobs", "from 0 to 20"),
        ({"prompt": "a", "echo": True}, 400, "BadRequestError", "echo", "does not echo"),
        ({"prompt": ""}, 400, "BadRequestError", "prompt", "cannot be empty"),
        ({"prompt": "a", "max_tokens": 0}, 400, "BadRequestError", "max_tokens", "must be at least 1, got 0"),
        ({"prompt": "a", "max_tokens": 101}, 400, "BadRequestError", "max_tokens", "max_model_len=100"),
        ({"prompt": [0] * 101, "max_tokens": 5}, 400, "BadRequestError", "input_tokens",
         "This model's maximum context length is 100 tokens. However, you requested 5 output tokens and your prompt "
         "contains 101 input tokens"),
        ({"prompt": "a", "model": "other"}, 404, "NotFoundError", "model", "The model `other` does not exist."),
    ],
)  # fmt: skip
def test_refusals(tmp_path: Path, body: Any, status: int, kind: str, param: str | None, message: str) -> None:
    for streaming in (False, True):
        asked = body if isinstance(body, bytes) else body | {"stream": streaming}
        answer = ask(tmp_path, COMPLETIONS, asked)
        assert answer.status == status
        error = answer.json["error"]
        assert (error["type"], error["param"], error["code"]) == (kind, param, status)
        assert message in error["message"]


def test_body_must_be_declared_as_json(tmp_path: Path) -> None:
    answer = ask(tmp_path, COMPLETIONS, {"prompt": "a"}, Content_Type="text/plain")
    assert answer.status == 400
    assert "Unsupported Media Type" in answer.json["error"]["message"]
    assert ask(tmp_path, COMPLETIONS, {"prompt": "a"}, Content_Type="application/json; charset=utf-8").status == 200


def test_what_the_server_says_of_itself(tmp_path: Path) -> None:
    with running(tmp_path, "vllm", max_model_len=123) as server:
        assert server.ask("GET", "/health").body == b""
        assert server.ask("GET", "/version").json == {"version": "0.32.0"}
        model = server.ask("GET", "/v1/models").json["data"][0]
        assert (model["id"], model["owned_by"], model["max_model_len"]) == ("m", "vllm", 123)
    with running(tmp_path, "openai") as server:
        model = server.ask("GET", "/v1/models").json["data"][0]
        assert model["owned_by"] != "vllm"
        assert "max_model_len" not in model


def test_request_id_and_model_need_no_care(tmp_path: Path) -> None:
    """A quote in the id is escaped, and the text of the plain frames is still found."""
    answer = ask(tmp_path, COMPLETIONS, {"prompt": "a", "max_tokens": 4} | STREAM, X_Request_Id='"@"\\x')
    assert {event["id"] for event in answer.data} == {'cmpl-"@"\\x'}
    assert [event["choices"][0]["text"] for event in answer.data] == [" the", " of", " and", " to"]
    assert json.loads(answer.events[1][6:])["object"] == "text_completion"


def test_prompts_in_a_list_and_n_are_choices_of_one_reply(tmp_path: Path) -> None:
    """Prompt by prompt, as OpenAI numbers them; the choices of one prompt count it once."""
    body = {"prompt": ["a b", [7, 8, 9]], "max_tokens": 3, "n": 2}
    whole = ask(tmp_path, COMPLETIONS, body).json
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == [
        (index, " the of and") for index in range(4)
    ]
    usage = {"prompt_tokens": 2 + 3, "completion_tokens": 4 * 3, "total_tokens": 17}
    assert usage.items() <= whole["usage"].items()
    stream = ask(tmp_path, COMPLETIONS, body | USAGE)
    texts, ends = ["", "", "", ""], []
    for event in stream.data[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        ends += [choice["index"]] if choice["finish_reason"] == "length" else []
    assert (texts, sorted(ends)) == ([" the of and"] * 4, [0, 1, 2, 3])
    assert usage.items() <= stream.data[-1]["usage"].items()
    assert stream.events.count(b"data: [DONE]\n\n") == 1


def test_choices_of_a_chat_each_open_with_the_role(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "n": 3}
    stream = ask(tmp_path, CHAT, body | STREAM).data
    opened = [event["choices"][0]["index"] for event in stream if "role" in event["choices"][0]["delta"]]
    assert opened == [0, 1, 2]
    whole = ask(tmp_path, CHAT, body).json
    assert [choice["message"]["content"] for choice in whole["choices"]] == [" the of"] * 3
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (6, 6)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_reply_of_several_sequences_breaks_as_one(tmp_path: Path, streaming: bool) -> None:
    with running(tmp_path, "vllm", "stream_error:1") as server:
        answer = server.post(COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 4, "stream": streaming})
        assert b"EngineCore encountered an issue" in answer.body
        metrics = server.metrics()
    assert sum(value for name, value in metrics.items() if 'finished_reason="abort"' in name) == 2
    assert metrics['vllm:num_requests_running{model_name="m",engine="0"}'] == 0


def test_a_client_of_several_sequences_that_leaves_ends_them_all(tmp_path: Path) -> None:
    with running(tmp_path, "vllm", itl_ms=50) as server:
        request = http_request(COMPLETIONS, {"prompt": ["a", "b", "c"], "max_tokens": 1000} | STREAM)
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
            sock.sendall(request)
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")
            running_now = 'vllm:num_requests_running{model_name="m",engine="0"}'
            assert server.metrics()[running_now] == 3
        until(lambda: server.metrics()[running_now] == 0)


def test_log_probabilities_of_completions(tmp_path: Path) -> None:
    body = {"prompt": "a", "max_tokens": 3, "logprobs": 2}
    whole = ask(tmp_path, COMPLETIONS, body).json["choices"][0]["logprobs"]
    assert whole["tokens"] == [" the", " of", " and"] and whole["text_offset"] == [0, 4, 7]
    assert whole["token_logprobs"] == [-0.6] * 3 and whole["top_logprobs"][0] == {" the": -0.6, " of": -1.6}
    events = [event["choices"][0]["logprobs"] for event in ask(tmp_path, COMPLETIONS, body | STREAM).data]
    assert {name: [one for event in events for one in event[name]] for name in whole} == whole


def test_log_probabilities_of_a_chat(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
    whole = ask(tmp_path, CHAT, body).json["choices"][0]["logprobs"]["content"]
    the = {"token": " the", "logprob": -0.6, "bytes": [32, 116, 104, 101]}
    assert whole[0] == the | {"top_logprobs": [the]} and len(whole) == 2
    _, *events = ask(tmp_path, CHAT, body | STREAM).data
    assert [event["choices"][0]["logprobs"]["content"][0] for event in events] == whole


def test_tokens_of_a_text_and_of_a_chat(tmp_path: Path) -> None:
    said = ask(tmp_path, "/tokenize", {"prompt": "of all the", "return_token_strs": True}).json
    assert (said["count"], said["max_model_len"], said["token_strs"]) == (3, 100, ["of", " all", " the"])
    assert (said["tokens"][0], said["tokens"][2]) == (1002, 1001)
    chat = ask(tmp_path, "/tokenize", {"messages": [{"role": "user", "content": "of all the"}]}).json
    assert (chat["count"], chat["tokens"][5:], chat["token_strs"]) == (8, said["tokens"], None)
    assert ask(tmp_path, "/tokenize", {}).status == 400
    assert ask(tmp_path, "/tokenize", {"prompt": "a"}, "openai").status == 404


RESPONSES = "/v1/responses"


@pytest.mark.parametrize("dialect", ["vllm", "openai"])
def test_a_response_whole_and_streamed(tmp_path: Path, dialect: str) -> None:
    said = [{"role": "user", "content": [{"type": "input_text", "text": "a b"}]}]
    body = {"input": said, "instructions": "c", "max_output_tokens": 3, "model": "m"}
    whole = ask(tmp_path, RESPONSES, body, dialect).json
    assert (whole["object"], whole["status"]) == ("response", "incomplete")
    assert whole["output"][0]["content"][0]["text"] == " the of and"
    assert (whole["usage"]["input_tokens"], whole["usage"]["output_tokens"]) == (5 + 3, 3)
    stream = ask(tmp_path, RESPONSES, body | STREAM, dialect)
    frames = [frame.decode().partition("\ndata: ") for frame in stream.events]
    events = [json.loads(data) for _, _, data in frames]
    assert [name for name, _, _ in frames] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * 3,
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert "".join(event["delta"] for event in events if "delta" in event) == " the of and"
    last, differing = events[-1]["response"], {"id", "created_at", "output"}
    assert {name: last[name] for name in last.keys() - differing} == {
        name: whole[name] for name in whole.keys() - differing
    }


def test_a_response_is_refused_as_a_chat_is(tmp_path: Path) -> None:
    assert ask(tmp_path, RESPONSES, {"model": "m"}).status == 400
    assert ask(tmp_path, RESPONSES, {"input": "a", "model": "other"}).status == 404
    assert ask(tmp_path, RESPONSES, {"input": "a " * 100}).json["error"]["param"] == "input_tokens"


def test_token_ids_in_and_out_as_a_real_server_sends_them(tmp_path: Path) -> None:
    """All but ids, numbers and the version of the weights is the same, key by key."""
    body = {"model": "m", "token_ids": [5, 9, 11], "sampling_params": {"max_tokens": 4}} | USAGE
    ours = ask(tmp_path, "/inference/v1/generate", body, X_Request_Id="r-1")
    real = (Path(__file__).parents[2] / "backends" / "real" / "vllm_tokens_stream.txt").read_text().split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in real if line.startswith("data: {")]
    assert len(ours.data) == len(events) == 5 and ours.events[-1] == b"data: [DONE]\n\n"
    for mine, theirs in zip(ours.data[:4], events[:4], strict=True):
        assert list(mine) == list(theirs) and list(mine["choices"][0]) == list(theirs["choices"][0])
        same = {key: value for key, value in theirs["choices"][0].items() if key != "token_ids"}
        assert mine["choices"][0] | same == mine["choices"][0]
    assert [event["choices"][0]["token_ids"] for event in ours.data[:4]] == [[1001], [1002], [1003], [1004]]
    assert ours.data[0]["request_id"] == "generate-tokens-r-1"
    assert ours.data[4]["usage"] == {"prompt_tokens": 3, "total_tokens": 7, "completion_tokens": 4}


def test_times_of_a_request_are_told_where_the_server_is_to_tell_them(tmp_path: Path) -> None:
    body = {"model": "m", "prompt": [1], "max_tokens": 3} | USAGE
    with running(tmp_path, ttft_ms=20, itl_ms=10, per_request_metrics=True) as server:
        told = server.post(COMPLETIONS, body).data[-1]["metrics"]
        several = server.post(COMPLETIONS, body | {"n": 2}).data[-1]
    assert list(told) == ["time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms",
                          "tokens_per_second"]  # fmt: skip
    assert told["time_to_first_token_ms"] >= 20 and told["generation_time_ms"] >= 10 and told["queue_time_ms"] == 0
    assert told["mean_itl_ms"] == pytest.approx(told["generation_time_ms"] / 2)
    assert "metrics" not in several  # of one sequence alone
