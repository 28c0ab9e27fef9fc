"""The embedded server as SGLang: its bytes, beside what a real SGLang 0.5.11 sent on an H200."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backends.protocol import Delta, Kept
from backends.sglang import BACKEND
from servers.dialects.sglang import SGLang
from servers.serve.wire import DialectSettings
from tests.servers.reader import Answer, running

REAL = Path(__file__).parents[2] / "backends" / "real"


def ask(directory: Path, stream: bool = True, **body: Any) -> Answer:
    with running(directory, "sglang", ttft_ms=0, itl_ms=0, max_model_len=100) as server:
        return server.post("/generate", {"stream": stream, **body})


def generate(n_tokens: int) -> dict[str, Any]:
    return {"input_ids": [5, 9], "sampling_params": {"max_new_tokens": n_tokens}}


def test_every_event_repeats_all_that_came_before(tmp_path: Path) -> None:
    answer = ask(tmp_path, **generate(3))
    assert [event["text"] for event in answer.data] == [" the", " the of", " the of and"]
    assert [event["output_ids"] for event in answer.data] == [[1001], [1001, 1002], [1001, 1002, 1003]]
    metas = [event["meta_info"] for event in answer.data]
    assert [meta["completion_tokens"] for meta in metas] == [1, 2, 3]
    assert [meta["finish_reason"] for meta in metas] == [None, None, {"type": "length", "length": 3}]
    assert ["e2e_latency" in meta for meta in metas] == [False, False, True]
    assert answer.events[-1] == b"data: [DONE]\n\n"


def test_more_tokens_than_there_are_words(tmp_path: Path) -> None:
    last = ask(tmp_path, **generate(40)).data[-1]
    assert last["output_ids"] == [1000 + count % 16 for count in range(1, 41)]
    assert last["text"].split() == ask(tmp_path, False, **generate(40)).json["text"].split() and "naïve" in last["text"]


def test_keys_are_a_real_servers_in_its_order(tmp_path: Path) -> None:
    """A real reply has more of them at its end, and retractions, which are not known here."""
    real = json.loads((REAL / "sglang_whole.txt").read_text())
    ours = ask(tmp_path, False, **generate(2)).json
    assert list(ours) == list(real)
    keys = [key for key in real["meta_info"] if key != "total_retractions"]
    assert list(ours["meta_info"]) == keys[: keys.index("e2e_latency") + 1]


def test_the_backend_reads_what_was_said(tmp_path: Path) -> None:
    """Two that were written by different hands: the wire by what a real server sent, and the backend's decoder."""
    kept = Kept()
    assert BACKEND.keeper is not None
    decoder = BACKEND.keeper(True, kept)
    deltas = [*decoder.feed(ask(tmp_path, **generate(20)).body), *decoder.eof()]
    assert sum(delta.n_tokens for delta in deltas) == 20 and len(deltas) == 20
    assert kept.token_ids == [1000 + count % 16 for count in range(1, 21)] and "".join(kept.texts)[:8] == " the of "
    assert isinstance(deltas[-1], Delta) and deltas[-1].finish == "length" and deltas[-1].prompt_tokens == 2


# Of a real one, but for its limit of 8192 tokens.
REFUSED = [
    ({"input_ids": list(range(100)), "sampling_params": {"max_new_tokens": 4}},
     "The input (100 tokens) is longer than the model's context length (100 tokens)."),
    ({"sampling_params": {"max_new_tokens": 2}}, "Either text, input_ids or input_embeds should be provided."),
    ({"input_ids": [1], "sampling_params": {"temperature": -3}}, "temperature must be non-negative, got -3."),
    ({"input_ids": [1] * 80, "sampling_params": {"max_new_tokens": 40}},
     "Requested token count exceeds the model's maximum context length of 100 tokens. You requested a total of 120 "
     "tokens: 80 tokens from the input messages and 40 tokens for the completion. Please reduce the number of tokens "
     "in the input messages or the completion to fit within the limit."),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_a_stream_tells_of_errors_in_an_event(body: dict[str, Any], message: str, tmp_path: Path) -> None:
    answer, whole = ask(tmp_path, **body), ask(tmp_path, False, **body)
    assert answer.status == 200 and answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.body == b'data: {"error":{"message":"%b"}}\n\ndata: [DONE]\n\n' % message.encode()
    assert (whole.status, whole.json) == (400, {"error": {"message": message}})


@pytest.mark.parametrize(
    "body", [{"input_ids": []}, {"text": ""}, {"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}]
)
def test_what_no_scheduler_can_do(body: dict[str, Any], tmp_path: Path) -> None:
    assert ask(tmp_path, False, **body).status == 400


@pytest.mark.parametrize(
    "body", [{"input_ids": "abc"}, {"input_ids": [-1]}, {"text": 3}, {"sampling_params": [], "text": "a"}]
)
def test_bodies_of_another_shape(body: dict[str, Any], tmp_path: Path) -> None:
    answer = ask(tmp_path, **body)
    assert answer.status == 400 and answer.json["message"].startswith("1 validation error:")
    assert (answer.json["type"], answer.json["code"]) == ("Bad Request", 400)


def test_a_full_queue_is_a_reply_that_aborts() -> None:
    """The real one's, but for its id and times."""
    dialect = SGLang(DialectSettings("m", 100))
    (streamed,), (whole,) = (
        dialect.generations["/generate"](json.dumps({**generate(3), "stream": stream}).encode(), "r")
        for stream in (True, False)
    )
    page = streamed.refused(dialect.error(429))
    real = json.loads((REAL / "sglang_queue_full.txt").read_bytes().split(b"\n")[0].removeprefix(b"data: "))
    event = json.loads(page.body.split(b"\n")[0].removeprefix(b"data: "))
    assert (page.status, event["output_ids"]) == (200, real["output_ids"]) and page.body.endswith(b"data: [DONE]\n\n")
    assert event["meta_info"]["finish_reason"] == real["meta_info"]["finish_reason"]
    assert set(event["meta_info"]) == set(real["meta_info"]) - {"e2e_latency", "response_sent_to_client_ts"}
    refused = whole.refused(dialect.error(429))
    assert json.loads(refused.body)["message"] == "The request queue is full."
    decoder = BACKEND.decoder(True)
    assert [delta.error for delta in (*decoder.feed(page.body), *decoder.eof())] == ["The request queue is full."]


def test_it_says_everywhere_that_it_is_emulated(tmp_path: Path) -> None:
    with running(tmp_path, "sglang") as server:
        said = [server.ask("GET", path) for path in ("/v1/models", "/server_info", "/model_info")]
        said += [server.post("/generate", {**generate(2), "stream": stream}) for stream in (True, False)]
        assert server.ask("GET", "/ready").status == 404  # as in 0.5.11
    assert all(b"llm-dissect-emulated" in answer.body for answer in said)
    assert BACKEND.read_account("/server_info", said[1].body).version == "0.5.11"
    assert BACKEND.read_info("/v1/models", said[0].body).max_total_tokens == 4096


def openai(directory: Path, path: str, **body: Any) -> Answer:
    with running(directory, "sglang", ttft_ms=0, itl_ms=0, max_model_len=100) as server:
        return server.post(path, body)


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
SAID = [{"role": "user", "content": "a b"}]


def shape(tree: Any) -> Any:
    """The keys in their order, and of what kind the values are, null for null."""
    if isinstance(tree, dict):
        return {key: shape(value) for key, value in tree.items()}
    return [shape(each) for each in tree[:1]] if isinstance(tree, list) else None if tree is None else type(tree)


@pytest.mark.parametrize(
    ("path", "asked", "name"),
    [(COMPLETIONS, {"prompt": [5, 9]}, "sglang_openai_stream"), (CHAT, {"messages": SAID}, "sglang_chat_stream")],
)
def test_openai_streams_have_a_real_servers_shapes(path: str, asked: dict[str, Any], name: str, tmp_path: Path) -> None:
    """Each kind of event: the first, one in the middle, that of the finish reason, the usage."""
    ours = openai(tmp_path, path, model="any", max_tokens=4, **asked, **USAGE)
    lines = (REAL / f"{name}.txt").read_text().split("\n\n")
    real = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert ours.events[-1] == b"data: [DONE]\n\n" and ours.data[0]["model"] == "any"
    for place in (0, 2, -2, -1):
        assert json.dumps(shape(ours.data[place]), default=repr) == json.dumps(shape(real[place]), default=repr), place
    assert ours.data[-1]["usage"]["completion_tokens"] == 4
    text = [choice.get("text") or choice.get("delta", {}).get("content", "")
            for event in ours.data for choice in event["choices"]]  # fmt: skip
    assert "".join(filter(None, text)) == " the of and to"


@pytest.mark.parametrize(
    ("path", "asked", "status", "kind", "message"),
    [
        (COMPLETIONS, {"prompt": []}, 400, "BadRequestError", "Prompt cannot be empty"),
        (COMPLETIONS, {"prompt": [1] * 100}, 400, "BadRequestError",
         "The input (100 tokens) is longer than the model's context length (100 tokens)."),
        (COMPLETIONS, {"prompt": [1], "max_tokens": 0}, 400, "Bad Request", "max_tokens must be positive"),
        (COMPLETIONS, {"prompt": [1], "temperature": -3}, 400, "BadRequestError", "got -3."),
        (CHAT, {"messages": SAID, "max_tokens": 120}, 400, "BadRequestError", "a total of 127 tokens: 7 tokens"),
    ],
)  # fmt: skip
def test_what_openai_routes_refuse_is_no_stream(
    path: str, asked: dict[str, Any], status: int, kind: str, message: str, tmp_path: Path
) -> None:
    answer = openai(tmp_path, path, model="m", **asked, **USAGE)
    assert answer.status == status and message in answer.json["message"]
    assert list(answer.json) == ["object", "message", "type", "param", "code"] and answer.json["type"] == kind
