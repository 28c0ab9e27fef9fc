"""A run in virtual time with a prefix cache: what each request found, and what it saves."""

from __future__ import annotations

import pytest

from backends import catalog
from loadgen.load.load import Streams
from servers.simulator.build import SCHEDULERS, EmulationError, Setup, emulate
from servers.simulator.virtual import ArrivingRequest, simulate

MODEL = catalog.find("llama-2-7b")
CACHING = ["vllm@v1", "tgi@3", "lightllm@1.2", "sglang@0.5.11", "sglang@0.5.23"]


def setup(scheduler: str, prefix_caching: bool = True, **more: int) -> Setup:
    assert MODEL is not None
    return Setup(scheduler=scheduler, model=MODEL, gpu="h200", prefix_caching=prefix_caching, **more)


@pytest.mark.parametrize("scheduler", CACHING)
def test_what_is_found_is_told_and_saves_time(scheduler: str) -> None:
    shared = ((0, 2048),)
    load = [ArrivingRequest(10.0 * number, 2048 + 64, 16, shared) for number in range(3)]
    outcomes = simulate(emulate(setup(scheduler)), load)
    without = simulate(emulate(setup(scheduler, False)), load)
    assert [outcome.cached_tokens for outcome in outcomes] == [0, 2048, 2048]
    assert [outcome.cached_tokens for outcome in without] == [0, 0, 0]
    assert outcomes[0].times_s == without[0].times_s
    for cached, computed in zip(outcomes[1:], without[1:], strict=True):
        assert cached.times_s[0] - cached.sent_s < (computed.times_s[0] - computed.sent_s) / 2.5


@pytest.mark.parametrize("scheduler", CACHING)
def test_a_session_finds_what_was_said(scheduler: str) -> None:
    first = ArrivingRequest(0.0, 800, 100, ((1, 800), (2, 100)))
    second = ArrivingRequest(60.0, 950, 100, ((1, 800), (2, 100), (3, 50)))
    cached = [outcome.cached_tokens for outcome in simulate(emulate(setup(scheduler)), [first, second])]
    # vLLM: whole blocks of what is computed, 899 tokens; TGI: prompts alone; others compute the last token, too
    assert cached == [0, {"vllm@v1": 896, "tgi@3": 800, "sglang@0.5.23": 899}.get(scheduler, 900)]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_without_the_cache_what_is_shared_changes_nothing(scheduler: str) -> None:
    world = emulate(setup(scheduler, False))
    plain = simulate(world, [(0.1 * number, 300, 20) for number in range(50)], Streams(8, 8))
    sharing = simulate(
        world, [ArrivingRequest(0.1 * number, 300, 20, ((1, 300), (2, 20))) for number in range(50)], Streams(8, 8)
    )
    assert [outcome.times_s for outcome in plain] == [outcome.times_s for outcome in sharing]
    assert [outcome.cached_tokens for outcome in sharing] == [0] * 50


def test_the_facts_say_whether_there_was_a_cache() -> None:
    assert emulate(setup("vllm@v1")).facts.prefix_caching
    assert not emulate(setup("vllm@v1", False)).facts.prefix_caching


@pytest.mark.parametrize("scheduler", sorted(set(SCHEDULERS) - set(CACHING)))
def test_a_server_without_a_cache_cannot_have_it_on(scheduler: str) -> None:
    with pytest.raises(EmulationError, match=f"{scheduler} has no prefix cache; give --prefix-caching off, or"):
        emulate(setup(scheduler))


def test_segments_longer_than_prompt_and_reply_are_an_error() -> None:
    simulate(emulate(setup("vllm@v1")), [ArrivingRequest(0.0, 30, 5, ((1, 35),))])
    with pytest.raises(ValueError, match="5 tokens more than the prompt and the reply, which have 30 and 5"):
        simulate(emulate(setup("vllm@v1")), [ArrivingRequest(0.0, 30, 5, ((1, 40),))])
