"""Conversations of files: known answers for both formats, lengths by each way that gives them, mistakes by number."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import backends
from backends.protocol import Prompt, Sampling, ServerInfo
from loadgen.config import Config, ConfigError
from loadgen.load import conversations
from loadgen.load.conversations import Conversations, PlayedConversations
from loadgen.load.dataset_files import holds_conversations
from loadgen.load.lengths import THINK_TIME, WorkloadError, parse
from loadgen.load.sessions import Sessions
from loadgen.load.turns import TurnDelay
from loadgen.plan import ClientPlan, plan_run, planned_load, read_dataset
from loadgen.target import Target
from tests.packers import PACKERS

SHARE_GPT: list[dict[str, Any]] = [
    {
        "id": "a",
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "one two three"},
            {"from": "gpt", "value": "never sent, this"},
            {"from": "human", "value": "four five"},
            {"from": "chatgpt", "value": "nor this"},
        ],
    },
    {
        "id": "b",
        "conversations": [
            {"from": "gpt", "value": "Hello, I begin."},
            {"from": "human", "value": "six"},
            {"from": "human", "value": "seven"},
        ],
    },
    {"id": "c", "conversations": [{"from": "gpt", "value": "alone"}]},
    {"id": "d", "conversations": []},
    {"id": "e", "conversations": [{"from": "human", "value": "last"}, {"from": "gpt", "value": "ok"}], "model": "x"},
]
OPEN_AI: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "one two"}, {"type": "text", "text": "three"}]},
            {"role": "assistant", "content": None, "refusal": "no"},
            {"role": "user", "content": "four"},
            {"role": "system", "content": "Be long."},
            {"role": "user", "content": "five"},
        ],
        "output_tokens": [7, 9],
    },
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
    {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "tool_call_id": "1"}]},
    {"messages": [{"role": "user", "content": "last"}], "output_tokens": 4, "temperature": 0.5},
]


def as_list(path: Path, rows: list[Any]) -> Path:
    path.write_text(json.dumps(rows, indent=1))
    return path


def as_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    return path


WAYS = pytest.mark.parametrize("write", [as_list, as_lines])
Write = Callable[[Path, list[Any]], Path]


def played(held: Conversations) -> PlayedConversations:
    sessions = Sessions(turns=None, think_time=parse(1, THINK_TIME), counts=held.counts)
    return held.played(sessions.drawn(held.sessions, seed=0))


def prompts(workload: PlayedConversations) -> list[Prompt]:
    return [workload.prompt("measured", number) for number in range(workload.turns.total)]


@WAYS
def test_share_gpt(tmp_path: Path, write: Write) -> None:
    held = Conversations(write(tmp_path / "f", SHARE_GPT), 5, warmup=1)
    assert (held.sessions, held.counts, len(held)) == (2, (2, 1), 3)
    assert str(held.left_out) == (
        "2 conversations without a user's message, what the assistant said first in 1 conversation"
    )
    workload = played(held)
    assert [prompt.text for prompt in prompts(workload)] == ["Be brief.\none two three", "four five", "six\nseven"]
    assert [prompt.messages for prompt in prompts(workload)] == [
        (("system", "Be brief."), ("user", "one two three")), (), (),
    ]  # fmt: skip
    assert [workload.shape(number)[:2] for number in range(3)] == [(0, 5)] * 3
    assert workload.prompt("warmup", 0).text == "last"
    assert held.longest_tokens() is None


@WAYS
def test_open_ai(tmp_path: Path, write: Write) -> None:
    held = Conversations(write(tmp_path / "f", OPEN_AI), 5, warmup=0)
    assert held.counts == (2, 1)
    assert str(held.left_out) == (
        "1 conversation with images, 1 conversation with tools, parts that are no text, or roles other than user, "
        "assistant, system"
    )
    workload = played(held)
    assert [prompt.text for prompt in prompts(workload)] == [
        "Be brief.\none two\nthree", "Be long.\nfour\nfive", "last",
    ]  # fmt: skip
    assert prompts(workload)[1].messages == (("system", "Be long."), ("user", "four\nfive"))
    assert [workload.shape(number).output_tokens for number in range(3)] == [7, 9, 4]


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> str:
    """A tokenizer that takes a word for a token."""
    monkeypatch.setattr(conversations, "tokenizer_count", lambda source: lambda text: len(text.split()))
    conversations.read_file.cache_clear()
    return "words"


def test_a_tokenizer_counts_prompts_and_replies(tmp_path: Path, words: str) -> None:
    """Of each turn all that was said before, when every reply is as long as the one in the file."""
    held = Conversations(as_list(tmp_path / "f", SHARE_GPT), 5, warmup=1, tokenizer=words)
    workload = played(held)
    shapes = [workload.shape(number) for number in range(3)]
    assert [shape[:2] for shape in shapes] == [(5, 3), (5 + 3 + 2, 2), (2, 5)]
    assert [shape.shared_tokens for shape in shapes] == [0, 8, 0]
    assert held.longest_tokens() == 5 + 3 + 2 + 2
    assert [prompt.n_tokens for prompt in prompts(workload)] == [0, 0, 0]  # what a server adds is its own


def test_what_the_file_says_of_its_replies_comes_first(tmp_path: Path, words: str) -> None:
    rows = [SHARE_GPT[0] | {"output_tokens": 11}, SHARE_GPT[0]]
    workload = played(Conversations(as_list(tmp_path / "f", rows), 5, warmup=0, tokenizer=words))
    assert [workload.shape(number).output_tokens for number in range(4)] == [11, 11, 3, 2]


def test_an_empty_message_says_nothing_and_an_empty_reply_ends_a_turn(tmp_path: Path, words: str) -> None:
    said = [
        ("human", " \n"),
        ("gpt", "one two"),
        ("human", "a"),
        ("gpt", ""),
        ("human", "b"),
        ("gpt", "c"),
        ("gpt", " d"),
    ]
    rows = [{"conversations": [{"from": who, "value": text} for who, text in said]}]
    held = Conversations(as_list(tmp_path / "f", rows), 5, warmup=0, tokenizer=words)
    workload = played(held)
    assert [prompt.text for prompt in prompts(workload)] == ["a", "b"] and held.left_out.beginnings == 1
    assert [workload.shape(number).output_tokens for number in range(2)] == [5, 2]


def test_conversations_come_again_where_that_is_asked_for(tmp_path: Path) -> None:
    path = as_lines(tmp_path / "f", SHARE_GPT)
    with pytest.raises(WorkloadError, match="holds 2 conversations for 3 --sessions, beside those of the warm-up"):
        Conversations(path, 5, warmup=1, sessions=3)
    with pytest.raises(WorkloadError, match="holds 3 conversations and --warmup 3 takes as many; add conversations"):
        Conversations(path, 5, warmup=3)
    held = Conversations(path, 5, warmup=9, sessions=5, repeat=True)
    assert (held.sessions, held.counts, len(held)) == (5, (2, 1, 1), 4)
    workload = played(held)
    texts = [prompt.text for prompt in prompts(workload)]
    assert texts == [*(once := ["Be brief.\none two three", "four five", "six\nseven", "last"]), *once[:3]]
    assert [workload.prompt("warmup", number).text for number in range(4)] == ["last", once[2], once[0], "last"]
    assert [workload.shape(number).output_tokens for number in range(9)] == [5] * 9  # also of a long warm-up


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (None, "is none: Expected object, got null"),
        ({}, r"has neither conversations \(ShareGPT\) nor messages"),
        ({"prompt": "a"}, "has neither"),
        ({"conversations": None, "messages": None}, "has neither"),
        ({"conversations": "a"}, "is none: conversations: expected array"),
        ({"conversations": [None]}, r"is none: conversations\[0\]: expected object"),
        ({"conversations": [{"value": "a"}]}, "does not say who speaks in message 1: it has neither from nor role"),
        ({"conversations": [{"from": 7, "value": "a"}]}, r"is none: conversations\[0\].from: expected str"),
        ({"conversations": [{"from": "human", "value": 7}]}, r"is none: conversations\[0\].value: expected str"),
        ({"messages": [{"role": "user", "content": [None]}]}, r"is none: messages\[0\].content\[0\]: expected object"),
        ({"messages": [{"role": "user", "content": "a"}], "output_tokens": [1, 2]}, "has 2 output_tokens for 1 turn;"),
        *(
            (
                {"messages": [{"role": "user", "content": "a"}], "output_tokens": n},
                r"is none: output_tokens(\[0\])?: [^\n`]*$",
            )
            for n in (0, -1, 2.5, True, "7", 1 << 31, 10**30, [0], [[1]])
        ),
    ],
)
@WAYS
def test_a_mistake_has_its_number(tmp_path: Path, write: Write, row: Any, message: str) -> None:
    path = write(tmp_path / "f", [OPEN_AI[0], row])
    where = "conversation 2 of" if write is as_list else "the conversation in line 3 of"
    with pytest.raises(WorkloadError, match=rf"^{where} {path} {message}") as raised:
        Conversations(path, 5, 0)
    assert "\n" not in str(raised.value) and str(raised.value).endswith(".")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[", "is no list of conversations: "),
        (b"[" * 100_000, "is no list of conversations: "),
        (b'[{"messages": []}] x', "is no list of conversations: "),
        (b"[]", "holds no conversations; name"),
        (b'{"messages": ' + b"[" * 100_000, "is none: "),
        (b'{"messages": [{"role": "user", "content": ""}]}', "holds no conversations that can be sent; left out are 1"),
    ],
)
def test_files_that_are_damaged(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "f"
    path.write_bytes(data)
    assert holds_conversations(path)
    with pytest.raises(WorkloadError, match=message):
        Conversations(path, 5, 0)


GOOD = '{"messages": [{"role": "user", "content": "fine"}]}'


@pytest.mark.parametrize("strange", [b"\xff", b"\\ud83d", b"\xed\xa0\x80", b"\x07", b"\t"])
@pytest.mark.parametrize("as_a_list", [False, True])
def test_one_bad_character_costs_one_conversation(tmp_path: Path, strange: bytes, as_a_list: bool) -> None:
    rows = [GOOD.encode(), GOOD.encode().replace(b"fine", b"\xc3\xa9 " + strange), GOOD.encode()]
    path = tmp_path / "f"
    path.write_bytes(b"[" + b",".join(rows) + b"]" if as_a_list else b"\n".join(rows))
    assert holds_conversations(path)
    held = Conversations(path, 5, 0)
    if len(strange) == 1 and strange < b" ":  # what it means is plain
        assert [prompt.text for prompt in prompts(played(held))] == ["fine", f"é {strange.decode()}", "fine"]
        return
    where = "conversation 2" if as_a_list else "line 2"
    assert str(held.left_out) == f"1 conversation with a character that is no text (the first is {where})"
    assert [prompt.text for prompt in prompts(played(held))] == ["fine", "fine"]


def test_images_beside_the_messages_are_counted(tmp_path: Path) -> None:
    """As LLaVA's files have them: the text says but <image>."""
    image = {"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\\nWhat is it?"}]}
    held = Conversations(
        as_list(tmp_path / "f", [*SHARE_GPT, image, image | {"image": None, "images": ["a", "b"]}]), 5, 1
    )
    assert "2 conversations with images" in str(held.left_out)


@pytest.mark.parametrize("packed", PACKERS.values())
def test_packed_files(tmp_path: Path, packed: Callable[[bytes], bytes]) -> None:
    for write in (as_list, as_lines):
        path = write(tmp_path / "f", OPEN_AI)
        path.write_bytes(packed(b"\xef\xbb\xbf" + path.read_bytes()))
        assert holds_conversations(path) and Conversations(path, 5, 0).counts == (2, 1)


def test_a_file_is_told_by_how_it_begins(tmp_path: Path) -> None:
    def holds(data: bytes) -> bool:
        (tmp_path / "f").write_bytes(data)
        return holds_conversations(tmp_path / "f")

    assert holds(b"[]") and holds(b"\xef\xbb\xbf \n [{") and holds(b'\n\n{"id": 1, "messages": []}\n')
    assert holds(b'\xef\xbb\xbf{"conversations": 7}')
    for prompt in ('"a", "b"', '{"prompt": "a"}', '{"text": "a"}', '{"prompt": "' + "long " * 300_000 + '"}'):
        assert not holds(f"[{prompt}]".encode())
    assert holds(b'[{"id": 7, "conversations": [{"from": "human", "value": "' + b"long " * 300_000 + b'"}]}]')
    assert not holds(b"") and not holds(b"\n \n") and not holds(b'{"prompt": "a", "messages": []}')
    assert not holds(b"# messages") and not holds(b'{"prompt": "messages"}') and not holds(b'"messages" x'[:-3])
    assert not holds_conversations(tmp_path) and not holds_conversations(tmp_path / "none")
    assert not holds_conversations(Path("a\0b")) and not holds_conversations(Path("x" * 999))
    os.mkfifo(tmp_path / "pipe")
    assert not holds_conversations(tmp_path / "pipe")  # nor is it waited for


def test_a_mark_of_byte_order_is_no_mistake(tmp_path: Path) -> None:
    for write in (as_list, as_lines):
        path = write(tmp_path / "f", OPEN_AI)
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert Conversations(path, 5, 0).counts == (2, 1)


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
message = st.tuples(st.sampled_from(["system", "user", "assistant"]), text)


@given(st.lists(st.lists(message, max_size=9), min_size=1, max_size=6))
@settings(deadline=None, max_examples=150)
def test_all_that_users_say_is_sent_in_its_order(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[tuple[str, str]]]
) -> None:
    """And as many turns as there are runs of users' messages between those of assistants."""
    path = tmp_path_factory.mktemp("drawn") / "f"
    as_lines(path, [{"messages": [{"role": role, "content": said} for role, said in row]} for row in rows])
    expected = []
    for row in rows:
        parts: list[list[str]] = [[]]
        for role, said in row:
            if role == "assistant":
                parts.append([])
            elif role == "user" and said.strip():
                parts[-1].append(said)
        if turns := ["\n".join(part) for part in parts if part]:
            expected.append(turns)
    if not expected:
        with pytest.raises(WorkloadError, match="holds no conversations that can be sent"):
            Conversations(path, 5, 0)
        return
    workload = played(Conversations(path, 5, 0))
    assert workload.turns.total == sum(map(len, expected))
    sent = iter(prompts(workload))
    for session, turns in enumerate(expected):
        assert workload.turns.count(session) == len(turns)
        for turn in turns:
            prompt = next(sent)
            assert turn == (dict(prompt.messages)["user"] if prompt.messages else prompt.text)


def planned(config: Config) -> ClientPlan:
    info = ServerInfo("m", max_total_tokens=4096)
    return plan_run(config, backends.get(config.kind), Target("http://h"), info, "r")


def mlperf(**fields: Any) -> dict[str, Any]:
    return {"conversation_id": "c1"} | fields


AGENTIC = [
    mlperf(turn=1, role="user", system="Be brief.", content="one two", tools=[{"name": "ls"}], delay_seconds=0.5),
    mlperf(turn=2, role="assistant", tool_calls=[{"function": {"name": "ls", "arguments": "{}"}}]),
    mlperf(
        turn=3,
        role="tool",
        tool_results=[{"tool_call_id": "t1", "content": "a b"}, {"content": "c"}],
        delay_seconds=1.4,
    ),
    mlperf(turn=4, role="assistant", content="done", reasoning_content="hm"),
    mlperf(turn=5, role="user", content="thanks"),
    {"conversation_id": "c2", "turn": 1, "role": "user", "content": "last"},
]


def test_a_message_a_line_as_mlperf_has_its_agents(tmp_path: Path) -> None:
    """What tools gave is said when they had run; what the assistant said in the file is never sent."""
    path = as_lines(tmp_path / "f", AGENTIC)
    config = Config(url="http://h", backend="openai-chat", dataset=path, warmup=1, think_time=2, output_tokens=6)
    plan = planned(config)
    turns = plan.job.load.turns()
    assert turns is not None and turns.first.tolist() == [0, 3]
    waits = [turns.waits(number) for number in range(3)]
    assert waits == [(), (TurnDelay(0, 1_400_000_000),), (TurnDelay(1, 2_000_000_000),)]
    said = plan.prompts.build(backends.get("openai-chat"), plan.job.load, 1)
    assert [said.prompt("measured", number).text for number in (1, 2)] == ["a b\nc", "thanks"]
    assert said.prompt("measured", 0).messages == (("system", 'Be brief.\n[{"name":"ls"}]'), ("user", "one two"))
    assert said.prompt("warmup", 0).text == "last"


@pytest.mark.parametrize(
    ("fields", "why"),
    [({"delay_seconds": -1}, "delay_seconds"), ({"role": 5}, "role"), ({"tool_results": 5}, "tool_results")],
)
def test_a_message_a_line_that_is_none_is_told(fields: dict[str, Any], why: str, tmp_path: Path) -> None:
    path = as_lines(tmp_path / "f", [mlperf(role="user", content="a"), mlperf(role="tool") | fields])
    with pytest.raises(WorkloadError, match=f"the conversation in line 3 of .*f is none: .*{why}"):
        planned(Config(url="http://h", backend="openai-chat", dataset=path, warmup=0))


def test_a_plan_has_a_session_for_each_conversation(tmp_path: Path) -> None:
    path = as_list(tmp_path / "f", SHARE_GPT)
    config = Config(url="http://h", backend="openai", dataset=path, warmup=1, think_time=0.5, output_tokens=6)
    plan = planned(config)
    load = plan.job.load
    assert (load.requests, load.planned, load.at_once) == (2, 3, 2)
    assert load.left_out.startswith("2 conversations without a user's message")
    turns = load.turns()
    assert turns is not None and turns.think_ns(1) == 500_000_000
    assert plan.job.sampling.prefix_caching  # what was said is said again
    workload = plan.prompts.build(backends.get("openai"), load, 1)
    assert workload.turns is not None and workload.turns.total == 3 and workload.shape(0).output_tokens == 6
    few = planned(Config(url="http://h", backend="openai", dataset=path, warmup=1, sessions=1)).job.load
    assert (few.requests, few.planned) == (1, 2)
    again = Config(url="http://h", backend="openai", dataset=path, warmup=1, sessions=7, repeat_dataset=True)
    assert (
        planned(again).job.load.planned == 2 * (2 + 1 + 1) + 2 and len(read_dataset(again, backends.get("vllm"))) == 4
    )


@pytest.mark.parametrize("backend", ["vllm", "lightllm", "tgi", "openai", "openai-chat"])
def test_every_backend_is_sent_the_text(tmp_path: Path, backend: str) -> None:
    path = as_list(tmp_path / "f", SHARE_GPT)
    plan = planned(Config(url="http://h", backend=backend, dataset=path, warmup=0))
    codec = backends.get(backend)
    prompt = plan.prompts.build(codec, plan.job.load, 0).prompt("measured", 0)
    body = json.loads(codec.encode("m", prompt, Sampling(5)).body)
    if backend == "openai-chat":
        roles = [(each["role"], each["content"]) for each in body["messages"]]
        assert roles == [("system", "Be brief."), ("user", "one two three")]
    else:
        field = "prompt" if backend in ("vllm", "openai") else "inputs"
        assert body[field] == "Be brief.\none two three"


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = as_list(tmp_path / "f", SHARE_GPT)
    reads: list[Path] = []
    items = conversations.items
    monkeypatch.setattr(conversations, "items", lambda path, what: (reads.append(path), items(path, what))[1])
    config = Config(url="http://h", backend="openai", dataset=path, warmup=1)
    plan = planned(config)
    plan.prompts.build(backends.get("openai"), plan.job.load, 1)
    plan.prompts.build(backends.get("openai"), plan.job.load, 0)
    assert len(reads) == 1
    as_list(path, SHARE_GPT[:2])
    os.utime(path, ns=(1, 1))
    assert planned_load(config, backends.get("openai")).requests == 1 and len(reads) == 2


def test_a_backend_that_keeps_no_reply_is_sent_no_conversation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    config = Config(url="http://h", backend="openai", dataset=as_list(tmp_path / "f", SHARE_GPT), warmup=0)
    without = dataclasses.replace(backends.get("openai"), keeper=None)
    with pytest.raises(ConfigError, match="openai does not keep what a reply says"):
        plan_run(config, without, Target("http://h"), ServerInfo("m"), "r")
