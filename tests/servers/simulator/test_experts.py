"""Which experts a step reaches, beside drawn choices; and what uneven routing makes of a mixture's step."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import msgspec
import pytest

from servers.schedulers import Step
from servers.simulator import experts, hardware
from servers.simulator.build import EmulationError, emulate
from servers.simulator.options import Hardware
from tests.servers.simulator.test_cost import decode, model, served

ZIPF = [1 / (rank + 1) for rank in range(64)]


def drawn(popularity: list[float], active: int, rng: random.Random) -> set[int]:
    """`active` different experts, one after the other by their popularity."""
    chosen: set[int] = set()
    while len(chosen) < active:
        chosen.add(rng.choices(range(len(popularity)), popularity)[0])
    return chosen


@pytest.mark.parametrize(("popularity", "active"), [([1.0] * 64, 4), (ZIPF, 4), (ZIPF, 1), ([1.0] * 8, 2)])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_as_many_experts_as_are_drawn(popularity: list[float], active: int, tokens: int) -> None:
    rng = random.Random(7)
    tries = 400
    mean = sum(
        len(set(itertools.chain(*(drawn(popularity, active, rng) for _ in range(tokens))))) for _ in range(tries)
    )
    assert experts.reached(experts.chances(popularity, active), tokens) == pytest.approx(mean / tries, rel=0.05)


@pytest.mark.parametrize(("count", "active", "imbalance"), [(8, 2, 1.0), (8, 2, 3.5), (128, 8, 1.3), (128, 4, 12.0)])
def test_the_busiest_expert_has_so_many_times_the_mean_load(count: int, active: int, imbalance: float) -> None:
    chances = experts.uneven(count, active, imbalance)
    assert sum(chances) == pytest.approx(active) and len(chances) == count
    assert max(chances) / (active / count) == pytest.approx(imbalance)
    assert list(chances) == sorted(chances, reverse=True)


def test_one_token_reaches_the_experts_that_it_chooses_and_very_many_reach_all() -> None:
    for chances in (experts.uneven(64, 6, 1.0), experts.uneven(64, 6, 2.5)):
        assert experts.reached(chances, 1) == pytest.approx(6)
        assert experts.reached(chances, 1e9) == pytest.approx(64)


def test_a_step_reads_fewer_experts_where_routing_is_uneven() -> None:
    """Of 16 tokens; of one token and of very many the step takes the same."""
    setup = Hardware(gpu="h200").setup("vllm", "qwen3-30b-a3b", 4096)

    def step_s(imbalance: float, step: Step) -> float:
        return emulate(msgspec.structs.replace(setup, expert_imbalance=imbalance)).cost(step)

    for step, least, most in ((decode(1, 500), 0.999, 1.001), (decode(16, 500), 0.8, 0.95), (decode(4000, 1), 0.99, 1)):
        assert least <= step_s(6.0, step) / step_s(1.0, step) <= most


def test_group_products_take_what_was_measured() -> None:
    """Of vLLM's Triton kernels on an H200: Mixtral's at TP 2 with 64 tokens took 352 us, of which the gate is a term of
    its own."""
    each = served("mixtral-8x7b")
    mlp = dataclasses.replace(model("mixtral-8x7b").kinds[0].mlp, width=7168)
    assert each.experts_s(mlp, 64, 2) * 1e6 == pytest.approx(352, rel=0.1)


@pytest.mark.parametrize(
    ("name", "imbalance", "said"),
    [
        ("7b", 1.5, "llama-2-7b has no experts; leave --expert-imbalance out"),
        ("mixtral-8x7b", 4.0, "for mixtral-8x7b it must be at least 1 and below 4"),
        ("mixtral-8x7b", 0.5, "--expert-imbalance is 0.5"),
        ("mixtral-8x7b", math.nan, "--expert-imbalance is nan"),
    ],
)
def test_imbalance_that_cannot_be(name: str, imbalance: float, said: str) -> None:
    with pytest.raises(EmulationError, match=said):
        emulate(Hardware(gpu="h200", gpus=2, expert_imbalance=imbalance).setup("vllm", name, 4096))


def test_a_note_says_what_routing_is_assumed_and_what_was_not_measured() -> None:
    def notes(gpu: str, imbalance: float = 1.0) -> str:
        setup = Hardware(gpu=gpu, gpus=2, tp=2, expert_imbalance=imbalance).setup("vllm", "mixtral-8x7b", 4096)
        return " ".join(emulate(setup).facts.notes)

    assert "choose experts evenly and at random." in notes("h200")
    assert "the busiest expert is taken to have 1.5 times the mean load." in notes("h200", 1.5)
    assert "group products were not measured here" in notes("b200") and hardware.find("h200").experts


def test_tiles_are_filled_by_each_experts_own_tokens() -> None:
    assert experts.tiles((1.0, 1.0, 0.0), 48, 32) == 4
    even = experts.uneven(128, 8, 1)
    assert experts.tiles(even, 48, 32) == pytest.approx(experts.reached(even, 48))
    assert experts.tiles((1.0, 0.5), 40, 16) == pytest.approx(3 + 2)
