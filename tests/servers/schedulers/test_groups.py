"""One pool of blocks for layers with and without windows: known layouts, bounds, and that no block is lost."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import catalog
from backends.decoder import Window
from servers.schedulers import Rejected, Sequence
from servers.schedulers.groups import BLOCK_TOKENS, LayerGroups
from servers.schedulers.vllm import VllmV1, WindowedVllmV1

FULL_LENGTH, IN_FLIGHT = 131_072, 16_384


def groups_of(name: str) -> LayerGroups:
    model = catalog.find(name)
    assert model is not None
    return LayerGroups.of(((kind.count, kind.attention.window) for kind in model.kinds), FULL_LENGTH, IN_FLIGHT)


@pytest.mark.parametrize(
    ("name", "layers", "full", "windowed"),
    [
        ("llama-3.1-8b", 32, 1, 0),
        ("gemma-3-27b", 10, 1, 6),  # 10 and 52 layers, 8 of padding
        ("gemma-3-12b", 8, 1, 5),
        ("gemma-2-27b", 23, 1, 1),
        ("gpt-oss-120b", 18, 1, 1),
        ("llama-4-maverick", 12, 1, 3),
        ("mistral-7b-v0.1", 32, 0, 1),
    ],
)
def test_layers_are_grouped_as_vllm_groups_them(name: str, layers: int, full: int, windowed: int) -> None:
    groups = groups_of(name)
    assert groups.layers == layers
    assert [window is None for window in groups.windows].count(True) == full
    assert len(groups.windows) == full + windowed


def test_a_cache_without_windows_holds_its_blocks() -> None:
    assert groups_of("llama-3.1-8b").tokens(1000) == 1000 * BLOCK_TOKENS


def test_windows_leave_room_for_more_requests() -> None:
    """gpt-oss: 18 layers keep 128 tokens. Of a request of the full length every second block is saved but for what
    steps may have under way."""
    groups = groups_of("gpt-oss-120b")
    assert groups.blocks_needed(FULL_LENGTH) == 8192 + -(-(127 + IN_FLIGHT) // BLOCK_TOKENS) + 1
    assert groups.held(FULL_LENGTH // BLOCK_TOKENS) == 8192 + 8 + 1


@given(
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from([None, 16, 100, 4096])), min_size=1, max_size=3),
    st.integers(1, 9000),
)
def test_what_is_held_grows_and_stays_within_all_tokens(kept: list[tuple[int, int | None]], tokens: int) -> None:
    layers = [(count, None if size is None else Window(tokens=size)) for count, size in kept]
    groups = LayerGroups.of(layers, FULL_LENGTH, IN_FLIGHT)
    blocks = -(-tokens // BLOCK_TOKENS)
    assert 0 < groups.held(blocks) <= groups.held(blocks + 1)
    assert groups.held(blocks) <= groups.blocks_needed(tokens) <= len(groups.windows) * blocks
    assert groups.layers * len(groups.windows) >= sum(count for count, _ in kept)


def run(scheduler: VllmV1, requests: list[tuple[int, int]]) -> int:
    """Steps until all of them have ended; the most that ran at once stands in `scheduler.running` meanwhile."""
    for index, (prompt, output) in enumerate(requests):
        sequence = Sequence(index, prompt, output)
        scheduler.admit(sequence)
        scheduler.add(sequence)
    steps = 0
    while (step := scheduler.schedule()) is not None:
        assert 0 <= scheduler.used_tokens <= scheduler.kv_tokens
        scheduler.finish(step)
        steps += 1
    return steps


def test_more_requests_run_at_once_and_every_block_comes_back() -> None:
    settings = VllmV1.Settings(max_running=1000, budget_tokens=8192, async_scheduling=False)
    requests = [(2000, 3000)] * 24
    windowed = LayerGroups.of([(12, None), (12, Window(tokens=128))], 8192, IN_FLIGHT)
    every = LayerGroups.of([(24, None)], 8192, IN_FLIGHT)
    blocks = 4000  # of 12 layers
    saving = WindowedVllmV1(windowed.tokens(blocks), settings, windowed)
    plain = VllmV1(every.tokens(blocks / 2), settings)
    took = run(saving, requests)
    assert took < 0.75 * run(plain, requests)
    assert saving.used_tokens == plain.used_tokens == 0 and saving.running == saving.waiting == 0
    assert saving.preemptions < plain.preemptions


def test_a_state_is_held_by_each_request_whatever_its_length() -> None:
    """As of Qwen3-Next's: 12 layers keep tokens, and a request a state as large as many of their blocks."""
    groups = dataclasses.replace(LayerGroups.of([(12, None)], 8192, IN_FLIGHT), state_blocks=100)
    assert groups.uneven and not LayerGroups.of([(12, None)], 8192, IN_FLIGHT).uneven
    assert (groups.held(1), groups.held(10)) == (101, 110)
    assert groups.blocks_needed(160) == 110 and groups.blocks(groups.tokens(6120)) == 6120
    settings = VllmV1.Settings(max_running=1000, budget_tokens=8192, async_scheduling=False)
    scheduler = WindowedVllmV1(groups.tokens(1101), settings, groups)
    for number in range(20):
        scheduler.admit(sequence := Sequence(number, 100, 10))
        scheduler.add(sequence)
    step = scheduler.schedule()
    assert step is not None and scheduler.running == 1100 // 107  # 7 blocks for 100 tokens
    assert run(WindowedVllmV1(groups.tokens(1101), settings, groups), [(100, 10)] * 20) > 0


def test_what_can_never_fit_is_refused() -> None:
    groups = LayerGroups.of([(6, None), (6, Window(tokens=64))], 4096, 2048)
    scheduler = WindowedVllmV1(groups.tokens(300), VllmV1.Settings(), groups)
    with pytest.raises(Rejected):
        scheduler.admit(Sequence(0, 4000, 96))
    scheduler.admit(Sequence(0, 1000, 96))
