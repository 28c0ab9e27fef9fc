"""Questions to a server before the load: servers that do not say what they are, and those that refuse a field."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import backends
from backends.protocol import ServerInfo
from loadgen.config import Config, ConfigError
from loadgen.load.lengths import WorkloadError
from loadgen.plan import choose_model, plan_run, unkept, unlisted
from loadgen.probe import Identity, ServerError, first_request, identify
from loadgen.run import target_of
from loadgen.target import Target
from tests.loadgen.scripted import DONE, Script, Scripted, event, scripted, usage

Answer = tuple[int, Any]
Asked = Callable[[bytes, dict[str, Any]], Answer]  # the path, and the body of a POST
NONE: Answer = (404, {"detail": "Not Found"})
CHAT, OPENAI, VLLM = (backends.get(name) for name in ("openai-chat", "openai", "vllm"))


@contextlib.asynccontextmanager
async def answering(asked: Asked) -> AsyncIterator[Scripted]:
    """A server that answers each request by its path and its body."""

    def script(number: int) -> Script:
        line, _, body = world.requests[number]
        status, content = asked(line.split()[1], json.loads(body) if body else {})
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        yield b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n" % (status, len(data)) + data

    async with scripted(script) as world:
        yield world


def described(models: Answer, backend: backends.Backend = CHAT, *, named: bool = True, key: str | None = None) -> Any:
    async def story() -> Identity:
        async with answering(lambda path, body: models if path == b"/v1/models" else NONE) as world:
            return await asyncio.to_thread(identify, backend, Target(world.url, key), named=named)

    return asyncio.run(story())


LISTLESS: list[Answer] = [
    (404, {"detail": "Not Found"}),
    (405, {"detail": "Method Not Allowed"}),
    (501, b""),
    (302, b""),
    (204, b""),
    (200, [{"id": "m", "object": "model"}]),
    (200, {"object": "list", "data": None}),
    (200, {"object": "list", "data": []}),
    (200, {"data": [{"name": "m"}]}),
    (200, b"<html>"),
    (200, b""),
    (200, b"\xff"),
]


@pytest.mark.parametrize("models", LISTLESS)
@pytest.mark.parametrize("backend", [CHAT, VLLM], ids=lambda backend: backend.name)
def test_a_server_without_a_list_of_models_is_measured_as_the_options_say(
    models: Answer, backend: backends.Backend
) -> None:
    info, _, doubt = described(models, backend)
    assert info == ServerInfo() and "/v1/models" in doubt
    assert choose_model(Config(model="mine"), backend, info) == "mine"
    with pytest.raises(ServerError, match="--model"):
        described(models, backend, named=False)


@pytest.mark.parametrize(
    ("models", "backend", "match"),
    [
        ((401, b""), CHAT, "--api-key-env"),
        ((403, b""), CHAT, "--api-key-env"),
        ((500, b""), CHAT, "answers 500"),
        ((503, b""), CHAT, "does not look like an openai-chat server: GET .*/v1/models answers 503.* it is ready"),
        ((200, {"data": [{"id": "m", "owned_by": "sglang"}]}), VLLM, "use --backend sglang"),
    ],
)
def test_a_server_that_refuses_or_is_another_is_not(models: Answer, backend: backends.Backend, match: str) -> None:
    with pytest.raises(ServerError, match=match):
        described(models, backend)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(("name", "shown"), [("sglang", "an sglang"), ("tgi", "a tgi"), ("ollama", "an ollama")])
def test_a_server_that_says_what_it_is_is_told_in_one_sentence(name: str, shown: str, named: bool) -> None:
    models = (200, {"data": [{"id": "m", "owned_by": "vllm"}]})
    with pytest.raises(ServerError) as raised:
        described(models, backends.get(name), named=named)
    where, _, reason = str(raised.value).partition(f" does not look like {shown} server: ")
    title = {"sglang": "SGLang", "tgi": "TGI", "ollama": "Ollama"}[name]
    assert where.startswith("http://") and reason == f"this is a vLLM server, not {title}; use --backend vllm."


ROUTED = (200, {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "local"}]})  # by sglang-router
BEHIND = {"model_path": "m", "served_model_name": "m", "is_generation": True}
DEAD = {"error": {"message": "error sending request for url (http://10.0.0.7:1/get_model_info)"}}


@pytest.mark.parametrize("named", [True, False])
def test_a_router_that_lists_models_itself_is_asked_what_stands_behind_it(named: bool) -> None:
    sglang = backends.get("sglang")

    async def story(behind: Answer) -> Identity:
        answers = {b"/v1/models": ROUTED, b"/get_model_info": behind}
        async with answering(lambda path, body: answers.get(path, NONE)) as world:
            return await asyncio.to_thread(identify, sglang, Target(world.url), named=named)

    assert asyncio.run(story((200, BEHIND))) == (ServerInfo(model="m"), False, "")
    with pytest.raises(ServerError, match=r"answers 500 \(error sending .* of a router, see that its workers run\."):
        asyncio.run(story((500, DEAD)))


def test_a_key_for_replies_alone_may_not_list_models() -> None:
    assert "answers 403" in described((403, b""), key="k").doubt


def test_a_list_of_what_routers_write() -> None:
    entry = {"id": "m", "owned_by": None, "max_model_len": "8192", "created": "today", "pricing": {"prompt": "0"}}
    assert described((200, {"data": [entry]})) == (ServerInfo(model="m"), False, "")
    assert described((200, {"data": [entry | {"max_model_len": 9}]})).info == ServerInfo("m", 9)


def test_a_list_with_a_mark_or_a_name_twice() -> None:
    marked = b"\xef\xbb\xbf" + msgspec.json.encode({"data": [{"id": "m"}]})
    assert described((200, marked)) == (ServerInfo(model="m"), False, "")
    assert described((200, {"data": [{"id": "m"}, {"id": "m"}]})) == (ServerInfo(model="m"), False, "")


def test_a_pattern_is_no_name() -> None:
    info = described((200, {"data": [{"id": "openai/*", "owned_by": "openai"}]})).info
    with pytest.raises(ConfigError, match=r"only patterns \(openai/\*\); give --model"):
        choose_model(Config(), CHAT, info)
    assert choose_model(Config(model="openai/gpt"), CHAT, info) == "openai/gpt"
    assert not unlisted("openai/gpt", info) and "openai/*" in unlisted("azure/gpt", info)


def test_a_name_that_the_list_lacks_is_a_note_where_any_server_will_do() -> None:
    info = ServerInfo(models=tuple(f"model-{number}" for number in range(300)))
    assert choose_model(Config(model="alias"), OPENAI, info) == "alias"
    note = unlisted("model-2x", info)
    assert "'model-2x'" in note and "and 292 more" in note and "did you mean 'model-2" in note
    assert not unlisted("model-7", info) and not unlisted("any", ServerInfo())
    with pytest.raises(ConfigError, match="292 more"):
        choose_model(Config(model="alias"), VLLM, info)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"output_tokens": 1024}, ()),
        ({"output_tokens": 2048}, ()),
        ({"output_tokens": 1500}, ("one of 1500 has 2048 tokens", "within 4096", "ask for at most 1024, or for 2048")),
        ({"output_tokens": "uniform:10:1100", "requests": 100}, ("has 2048 tokens",)),
        ({"requests": 128}, ()),
        ({"requests": 1000}, ("1000 requests at once", "--max-concurrent-requests 1000", "at most 128")),
        ({"requests": 1000, "concurrency": 128}, ()),
    ],
)
def test_what_a_server_will_not_keep_is_said_before(options: dict[str, Any], words: tuple[str, ...]) -> None:
    config = Config(**({"backend": "tgi", "requests": 1} | options))
    info = ServerInfo("m", 4096, max_requests=128)
    notes = list(unkept(config.load, backends.get("tgi"), info))
    assert len(notes) == bool(words) and all(word in notes[0] for word in words)
    assert not list(unkept(config.load, VLLM, ServerInfo("m", 4096)))


def words_of(body: dict[str, Any]) -> int:
    return len(str(body.get("messages")).split())


def first(
    config: Config,
    refuse: Callable[[dict[str, Any]], str],
    doubt: str = "",
    count: Callable[[dict[str, Any]], int] = words_of,
) -> tuple[Any, list[Any], list[str]]:
    """What a first request makes of a plan, the bodies that the server saw, and the notes."""
    backend = backends.get(config.kind)

    def asked(path: bytes, body: dict[str, Any]) -> Answer:
        if message := refuse(body):
            return 400, {"error": {"message": message}}
        return 200, event(finish="length") + usage(count(body), 1) + DONE

    async def story() -> tuple[Any, list[Any], list[str]]:
        async with answering(asked) as world:
            target = msgspec.structs.replace(target_of(config), url=world.url)
            plan = plan_run(config, backend, target, ServerInfo("m"), "r")
            plan, notes = await first_request(plan, doubt)
            return plan, [json.loads(body) for _, _, body in world.requests], notes

    return asyncio.run(story())


def refuses_max_tokens(body: dict[str, Any]) -> str:
    return "Unsupported parameter: 'max_tokens' is not supported with this model." if "max_tokens" in body else ""


@pytest.mark.parametrize("tokens", [32, 500])
def test_a_server_that_counts_bytes_gets_prompts_of_exact_length(tokens: int) -> None:
    def count(text: str) -> int:
        return len(text.encode()) + 12

    config = Config(backend="openai-chat", url="http://h", requests=4, input_tokens=tokens)
    plan, bodies, notes = first(config, lambda body: "", count=lambda body: count(body["messages"][0]["content"]))
    workload = plan.prompts.build(CHAT, plan.job.load, 0)
    texts = [workload.prompt("measured", number).text for number in range(20)]
    assert {count(text) for text in texts} == {tokens} and len(set(texts)) == 20
    assert len(bodies) <= 4 and len(notes) == 1 and "it counts bytes" in notes[0]


def test_a_server_of_a_small_vocabulary_gets_prompts_of_about_that_length() -> None:
    """A token for three letters that are begun, and 30 of a template."""

    def count(text: str) -> int:
        return sum(-(-len(word) // 3) for word in text.split()) + 30

    config = Config(backend="openai-chat", url="http://h", requests=4, input_tokens=400)
    plan, _, notes = first(config, lambda body: "", count=lambda body: count(body["messages"][0]["content"]))
    workload = plan.prompts.build(CHAT, plan.job.load, 0)
    counts = [count(workload.prompt("measured", number).text) for number in range(100)]
    assert sum(counts) / len(counts) == pytest.approx(400, rel=0.05)
    assert "in the mean" in notes[0] and plan.prompts.tokens_per_word == pytest.approx(1.7, rel=0.2)


def test_a_server_whose_template_is_longer_than_the_prompt_is_still_refused() -> None:
    config = Config(backend="openai-chat", url="http://h", requests=4, input_tokens=16)
    with pytest.raises(WorkloadError, match="adds 200 tokens of its own"):
        first(config, lambda body: "", count=lambda body: len(body["messages"][0]["content"].split()) + 200)


@pytest.mark.parametrize("dataset", [False, True])
def test_a_server_that_wants_max_completion_tokens_gets_them(dataset: bool, tmp_path: Path) -> None:
    prompts = tmp_path / "d.jsonl"
    prompts.write_text('{"prompt": "a b c"}\n' * 20)
    options: dict[str, Any] = {"dataset": prompts} if dataset else {"input_tokens": 8}
    config = Config(backend="openai-chat", url="http://h", requests=4, **options)
    plan, bodies, notes = first(config, refuses_max_tokens)
    assert plan.job.body_edits.length_field == "max_completion_tokens" and len(notes) == 1
    assert "max_tokens" in bodies[0] and bodies[1]["max_completion_tokens"] == 1 and "max_tokens" not in bodies[1]
    assert all("max_tokens" not in body for body in bodies[1:])


def test_a_refusal_names_the_address_and_the_option() -> None:
    config = Config(backend="openai-chat", url="http://h", input_tokens=8, extra_body='{"top_k": 3}')
    with pytest.raises(ServerError, match=r"POST http://127.0.0.1:\d+/v1/chat/completions: .*--omit-field top_k"):
        first(config, lambda body: "top_k: Extra inputs are not permitted" if "top_k" in body else "")


def test_a_server_that_does_not_say_what_it_is_answers_a_first_request() -> None:
    config = Config(backend="vllm", url="http://h", model="m")
    assert first(config, lambda body: "")[1] == []
    with pytest.raises(ServerError, match="no such route"):
        first(config, lambda body: "no such route", doubt="it has no list")


def test_fields_are_left_out_and_added_in_every_request() -> None:
    config = Config(
        backend="openai-chat", url="http://h", input_tokens=8, omit_field=("seed",), extra_body='{"top_k": 3}'
    )
    _, bodies, _ = first(config, lambda body: "")
    assert bodies and all("seed" not in body and body["top_k"] == 3 for body in bodies)
