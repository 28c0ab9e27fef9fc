"""Sessions in virtual time: when turns are sent, what they find in the prefix cache, and that the embedded server's
dialects find the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.config import Config
from loadgen.load.load import Load, parse_streams
from loadgen.load.sessions import SessionShapes
from loadgen.load.shapes import Shapes
from loadgen.load.turns import Turns
from servers.app import DIALECTS
from servers.predict import command as predict
from servers.schedulers import Sequence
from servers.schedulers.prefixes import chains
from servers.serve.modelled_timing import SimulatedTiming
from servers.serve.wire import DialectSettings, word
from servers.simulator.build import SCHEDULERS, Emulated, EmulationError, emulate
from servers.simulator.options import Hardware
from servers.simulator.virtual import ArrivingRequest, Outcome, simulate, simulate_sessions

CACHING = ["vllm@v1", "tgi@3", "lightllm@1.2", "sglang@0.5.11", "sglang@0.5.23"]


def emulated(scheduler: str, **options: Any) -> Emulated:
    hardware = Hardware(gpu="h200", scheduler=scheduler, **{"prefix_caching": "on", **options})
    return emulate(hardware.setup(scheduler.partition("@")[0], "7b", 4096))


def drawn(**options: Any) -> tuple[Load, Shapes, list[ArrivingRequest], Turns]:
    load, shapes = predict.drawn(Config(gpu="h200", **options))
    turns, sent = load.turns(), predict.requests(load, shapes)
    assert turns is not None and isinstance(sent, list)
    return load, shapes, sent, turns


def play(scheduler: str, **options: Any) -> tuple[list[Outcome], Turns]:
    load, _, sent, turns = drawn(**options)
    return simulate_sessions(emulated(scheduler), sent, turns, load.streams), turns


def by_session(outcomes: list[Outcome], turns: Turns) -> Iterator[list[Outcome]]:
    assert [each.index for each in outcomes] == list(range(len(outcomes)))
    for begin, end in pairwise(turns.first.tolist()):
        if end <= len(outcomes):
            yield outcomes[begin:end]


@pytest.mark.parametrize("scheduler", CACHING)
def test_of_one_session_alone_the_times_add_up_and_hits_are_block_arithmetic(scheduler: str) -> None:
    outcomes, turns = play(
        scheduler, sessions=1, turns=6, think_time="uniform:0.1:3", input_tokens="uniform:20:200",
        output_tokens="uniform:2:60",
    )  # fmt: skip
    assert outcomes[0].sent_s == 0 and outcomes[0].cached_tokens == 0
    for before, turn in pairwise(outcomes):
        assert turn.sent_s == before.times_s[-1] + turns.think_ns(turn.index) / 1e9
        assert len(turn.times_s) == turn.output and turn.times_s[0] > turn.sent_s
        said = before.prompt + before.output
        # vLLM: whole blocks of what is computed, which the reply's last token is not; TGI keeps prompts alone
        known = {"vllm@v1": (said - 1) // 16 * 16, "tgi@3": before.prompt, "sglang@0.5.23": said - 1}.get(
            scheduler, said
        )
        assert turn.cached_tokens == known
        assert turn.prompt > said


@pytest.mark.parametrize(("every", "waits"), [(0.001, True), (30, False)])
def test_users_who_come_back_at_their_own_pace_wait_for_their_replies_alone(every: float, waits: bool) -> None:
    outcomes, _ = play("vllm@v1", sessions=2, turns=4, think_time=f"every:{every}", input_tokens=40, output_tokens=30)
    pairs = [pair for pair in pairwise(outcomes) if pair[1].index % 4]
    assert len(pairs) == 6
    for before, turn in pairs:
        assert turn.sent_s == (before.times_s[-1] if waits else before.sent_s + every)


def test_a_turn_asks_for_all_that_was_said() -> None:
    load, shapes, sent, turns = drawn(
        sessions=40, turns="uniform:1:5", prefix="3:50", input_tokens="uniform:60:90", output_tokens="uniform:1:30"
    )
    assert isinstance(shapes, SessionShapes) and len(sent) == turns.total == load.planned
    for number, arrival in enumerate(sent):
        turn = turns.place(number)[1]
        own = sum(shapes.own(each).prompt_tokens for each in range(number - turn, number + 1))
        replies = sum(sent[each].output for each in range(number - turn, number))
        assert arrival.prompt == own + replies
        assert sum(tokens for _, tokens in arrival.segments) == arrival.prompt + arrival.output
        if turn:
            assert shapes.shape(number).shared_tokens == sent[number - 1].prompt + sent[number - 1].output
            pairs = zip(*(chains(Sequence(0, *each[1:])) for each in (sent[number - 1], arrival)), strict=False)
            assert all(before == after for before, after in pairs)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@settings(max_examples=15, deadline=None)
@given(
    sessions=st.integers(1, 12),
    think=st.sampled_from(["0", "0.02", "uniform:0:0.5"]),
    concurrency=st.sampled_from([None, "1", "3", "1:4:1", "4:1:1"]),
    arrival=st.sampled_from(["burst", "poisson:5"]),
    seed=st.integers(0, 1000),
)
def test_turns_never_overlap(
    scheduler: str, sessions: int, think: str, concurrency: str | None, arrival: str, seed: int
) -> None:
    load, _, sent, turns = drawn(
        sessions=sessions, turns="uniform:1:4", think_time=think, concurrency=concurrency, seed=seed,
        arrival=arrival if concurrency is None else None, input_tokens="uniform:4:60", output_tokens="uniform:1:20",
    )  # fmt: skip
    world = emulated(scheduler, prefix_caching="on" if scheduler in CACHING else "off")
    outcomes = simulate_sessions(world, sent, turns, load.streams)
    spans = []
    for session in by_session(outcomes, turns):
        for before, turn in pairwise(session):
            assert turn.sent_s == before.times_s[-1] + turns.think_ns(turn.index) / 1e9
        assert [len(each.times_s) for each in session] == [each.output for each in session]
        spans.append((session[0].sent_s, session[-1].times_s[-1]))
    assert len(spans) == sessions
    if load.streams is None:
        assert [begin for begin, _ in spans] == pytest.approx((load.due_ns() / 1e9).tolist())
        return
    ends = {end for _, end in spans} | {load.streams.start_s(stream) for stream in range(load.streams.most)}
    for begin, _ in spans:
        assert begin in ends  # as soon as one has ended
        at_once = sum(start <= begin < end for start, end in spans)
        assert at_once <= load.streams.at(begin)


@pytest.mark.parametrize("streams", [None, "3"])
@pytest.mark.parametrize("scheduler", CACHING)
def test_sessions_of_one_turn_are_requests(scheduler: str, streams: str | None) -> None:
    load, _, sent, turns = drawn(
        sessions=50, turns=1, arrival="poisson:10" if streams is None else None, concurrency=streams,
        input_tokens="uniform:10:500", output_tokens="uniform:1:40",
    )  # fmt: skip
    world = emulated(scheduler)
    assert simulate_sessions(world, sent, turns, load.streams) == simulate(world, sent, load.streams)


@pytest.mark.parametrize("streams", [None, "2"])
def test_a_refused_turn_ends_its_session(streams: str | None) -> None:
    """A cache of 1000 tokens cannot hold the third turn."""
    load, shapes, sent, turns = drawn(
        sessions=4, turns=5, think_time=0.1, concurrency=streams, input_tokens=300, output_tokens=80
    )
    outcomes = simulate_sessions(emulated("vllm@v1", kv_tokens=1024), sent, turns, load.streams)
    for session in by_session(outcomes, turns):
        assert [each.status for each in session] == [200, 200, 400, None, None]
        assert session[3].dropped == session[4].dropped == "turn 3 of its session failed (http_error)"
        assert session[2].sent_s == session[3].sent_s == session[1].times_s[-1] + 0.1
    if streams is not None:
        begins = sorted(session[0].sent_s for session in by_session(outcomes, turns))
        ends = sorted(session[2].sent_s for session in by_session(outcomes, turns))
        assert begins == [0, 0, *ends[:2]]
    records = list(predict.record_table(outcomes, shapes, turns).written())
    assert [(each.session, each.turn) for each in records[:6]] == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 1)]
    assert [each.outcome for each in records[:5]] == ["ok", "ok", "http_error", "dropped", "dropped"]
    assert (records[3].sent_ns, records[3].status, records[3].asked_prompt_tokens) == (None, None, 0)


def test_a_server_that_never_ends_a_turn() -> None:
    world = emulated(
        "lightllm@1.2", prefix_caching="off", scheduler_arg=("batch_max_tokens=64", "chunked_prefill_size=100")
    )
    for streams in (None, "2"):
        load, _, sent, turns = drawn(sessions=3, turns=4, concurrency=streams, input_tokens=60, output_tokens=3)
        with pytest.raises(EmulationError, match=r"never ends \d of the requests"):
            simulate_sessions(world, sent, turns, load.streams)


def test_a_closed_loop_sends_until_its_time_is_over() -> None:
    config = Config(gpu="h200", concurrency=3, duration=2.5, input_tokens=200, output_tokens="uniform:5:30")
    load, shapes = predict.drawn(config)
    assert load.planned is None
    outcomes = predict.play(emulated("vllm@v1"), load, predict.requests(load, shapes))
    sent = [each.sent_s for each in outcomes]
    ends = sorted(each.times_s[-1] for each in outcomes)
    assert max(sent) < 2.5 <= ends[-3] and len(outcomes) > 20
    assert sorted(sent)[3:] == [end for end in ends if end < 2.5]
    few = Config(gpu="h200", concurrency=3, duration=2.5, requests=10, input_tokens=200)
    load, shapes = predict.drawn(few)
    assert len(predict.play(emulated("vllm@v1"), load, predict.requests(load, shapes))) == 10
    whole = simulate(emulated("vllm@v1"), [(0.0, 200, 20)] * 30, parse_streams("3"))
    some = simulate(emulated("vllm@v1"), [(0.0, 200, 20)] * 30, parse_streams("3"), 0.5)
    began = [each for each in whole if each.sent_s < 0.5]
    until = [(each.sent_s, [at_s for at_s in each.times_s if at_s < 0.5]) for each in began]
    assert until == [(each.sent_s, [at_s for at_s in each.times_s if at_s < 0.5]) for each in some]
    assert 3 < len(some) < 30


# the dialects beside virtual time


class Reply:
    def __init__(self, index: int, received_ns: int, body: bytes, dialect: str, path: str) -> None:
        generations = DIALECTS[dialect](DialectSettings("m", 4096, prefix_caching=True)).generations  # type: ignore[index]
        (wire,) = generations[path](body, "id")
        self.index, self.received_ns = index, received_ns
        self.n_prompt_tokens, self.n_tokens = wire.prompt_tokens, wire.output_tokens
        self.segments, self.adapter, self.priority = wire.segments(self.n_tokens), wire.adapter, wire.priority
        self.cached_tokens = 0

    def found(self, cached_tokens: int) -> None:
        self.cached_tokens = cached_tokens

    def emit(self) -> None:
        raise AssertionError("nobody emits here")


def said_ids(history: list[tuple[str, int, int]]) -> list[int]:
    """Of (who, key, tokens): the user's made up, the server's as its tokens are."""
    ids = []
    for who, key, tokens in history:
        count = range(1, tokens + 1)
        ids += [10_000 * (key + 1) + k for k in count] if who == "user" else [1000 + k % 16 for k in count]
    return ids


def said_texts(history: list[tuple[str, int, int]]) -> list[str]:
    return [
        " ".join(f"w{key}x{k}" for k in range(tokens))
        if who == "user"
        else "".join(word(k) for k in range(1, tokens + 1))
        for who, key, tokens in history
    ]


def completion(history: list[tuple[str, int, int]], output: int) -> dict[str, Any]:
    return {"prompt": said_ids(history), "max_tokens": output}


def chat(history: list[tuple[str, int, int]], output: int) -> dict[str, Any]:
    messages = [{"role": who, "content": text} for (who, _, _), text in zip(history, said_texts(history), strict=True)]
    return {"messages": messages, "max_tokens": output}


def generate(history: list[tuple[str, int, int]], output: int) -> dict[str, Any]:
    return {"inputs": said_ids(history), "parameters": {"max_new_tokens": output}}


def generate_of_text(history: list[tuple[str, int, int]], output: int) -> dict[str, Any]:
    return {"inputs": "\n".join(said_texts(history)), "parameters": {"max_new_tokens": output}}


@pytest.mark.parametrize(
    ("scheduler", "path", "body", "added"),
    [
        ("vllm@v1", "/v1/completions", completion, 0),
        ("vllm@v1", "/v1/chat/completions", chat, 5),
        ("lightllm@1.2", "/generate_stream", generate, 0),
        ("tgi@3", "/generate_stream", generate_of_text, 1),
    ],
)
def test_a_dialect_finds_what_virtual_time_finds(
    scheduler: str, path: str, body: Callable[[list[tuple[str, int, int]], int], dict[str, Any]], added: int
) -> None:
    """`added`: tokens that the server puts before each prompt; all have them, the first of all excepted in the hits."""
    dialect = scheduler.partition("@")[0]
    _, shapes, sent, turns = drawn(
        backend=dialect, sessions=6, turns="uniform:1:5", think_time="uniform:0.5:1", arrival="constant:2",
        input_tokens="uniform:20:120", output_tokens="uniform:2:50",
    )  # fmt: skip
    assert isinstance(shapes, SessionShapes)
    alike = (-1, added)  # what the server puts in front
    sent = [
        each._replace(prompt=each.prompt + added, segments=(alike, *each.segments) if added else each.segments)
        for each in sent
    ]
    world = emulated(scheduler)
    outcomes = simulate_sessions(world, sent, turns)
    timing = SimulatedTiming(world)
    replies = []
    for outcome in sorted(outcomes, key=lambda each: each.sent_s):
        session = turns.place(outcome.index)[0]
        history: list[tuple[str, int, int]] = []
        for number in range(turns.begin(session), outcome.index + 1):
            history += [("user", number, shapes.own(number).prompt_tokens), ("assistant", number, sent[number].output)]
        at_ns = 1000 + int(outcome.sent_s * 1e9)
        while (due := timing.next_due_ns()) is not None and due < at_ns:
            timing.pop(due)
        encoded = json.dumps(body(history[:-1], outcome.output)).encode()
        reply = Reply(outcome.index, at_ns, encoded, dialect, path)
        assert (reply.n_prompt_tokens, reply.n_tokens) == (outcome.prompt, outcome.output)
        timing.submit(reply)
        replies.append((reply, outcome))
    while (due := timing.next_due_ns()) is not None:
        timing.pop(due)
    assert [reply.cached_tokens for reply, _ in replies] == [outcome.cached_tokens for _, outcome in replies]
    assert np.sum([outcome.cached_tokens for outcome in outcomes]) > 1000
