"""The engine with steps of known times: launches beside the GPU's work, and the front end's way in and out."""

from __future__ import annotations

import statistics

import pytest

from loadgen.load.load import parse_streams
from servers.schedulers import Sequence, Step
from servers.schedulers.vllm import VllmV1
from servers.simulator import virtual
from servers.simulator.build import ServerProfile, emulate
from servers.simulator.cost import Overheads
from servers.simulator.engine import Engine, FrontEnd
from servers.simulator.options import Hardware


def played(
    gpu_ms: tuple[float, float],
    launch_ms: tuple[float, float],
    requests: list[tuple[float, int, int]],
    front: FrontEnd | None = None,
    prepare_ms: float = 0.0,
) -> list[list[float]]:
    """When each request's tokens come, in ms. The pairs are of steps with prefills and of others; requests are (ms,
    prompt, output)."""
    times: list[list[float]] = [[] for _ in requests]

    def deliver(emits: list[Sequence], first_s: float, gap_s: float) -> None:
        for place, sequence in enumerate(emits):
            times[sequence.index].append(1e3 * (first_s + place * gap_s))

    def takes(ms: tuple[float, float], step: Step) -> float:
        return ms[0 if step.prefill_rows else 1] / 1e3

    scheduler = VllmV1(100_000, VllmV1.Settings(max_running=64, budget_tokens=8192))
    engine = Engine(
        scheduler,
        (lambda step, _: takes(gpu_ms, step), lambda step: (takes(launch_ms, step), prepare_ms / 1e3)),
        deliver,
        front or FrontEnd(),
    )
    for index, (at_ms, prompt, output) in enumerate(requests):
        engine.submit(Sequence(index, prompt, output), at_ms / 1e3)
    while engine.next_s() < float("inf"):
        engine.advance(engine.next_s())
    return times


def test_launches_hide_behind_longer_steps() -> None:
    """Three tokens, 10 ms apart, where two launches take no longer than the first step."""
    for launch in (0.0, 2.0, 5.0):
        assert played((10, 10), (launch, launch), [(0, 100, 3)])[0] == pytest.approx([10, 20, 30])


def test_launches_bound_shorter_steps() -> None:
    """GPU 1 ms, launch 4 ms. A step's token waits until the next step is launched; after the last there is none."""
    assert played((1, 1), (4, 4), [(0, 100, 5)])[0] == pytest.approx([8, 12, 16, 20, 20])


def test_a_prefill_lasts_as_long_as_its_launch() -> None:
    """Launched until 25 ms; then the second step, until 27, when the first token goes out. The GPU has done the second
    at 30, and is then bound by itself."""
    assert played((12, 5), (25, 2), [(0, 2000, 4)])[0] == pytest.approx([27, 30, 35, 40])
    assert played((40, 5), (25, 2), [(0, 2000, 4)])[0] == pytest.approx([40, 45, 50, 55])


def test_a_step_begins_when_it_is_put_together() -> None:
    """Launched until 25 ms, when the GPU has long done the prefill: the second step begins at 27, and from then on
    steps are put together while the GPU works. A prefill that the GPU is behind with begins at 2, and delays no
    other."""
    assert played((12, 5), (25, 2), [(0, 2000, 4)], prepare_ms=2)[0] == pytest.approx([27, 32, 37, 42])
    assert played((40, 5), (25, 2), [(0, 2000, 4)], prepare_ms=2)[0] == pytest.approx([42, 47, 52, 57])


def test_what_comes_during_a_launch_is_in_the_next_step() -> None:
    """Launched until 10 ms: a request of 1 ms is in the second step, which is launched until 20. Without launches it
    waits for the two steps that are under way."""
    late = played((5, 5), (10, 2), [(0, 100, 3), (1, 100, 2)])[1]
    assert late[0] == pytest.approx(22)  # the third step is launched by then
    assert played((5, 5), (0, 0), [(0, 100, 9), (1, 100, 2)])[1][0] == pytest.approx(15)


def test_the_way_in_and_out() -> None:
    """In: 1 ms and 2 us for each of 500 tokens, 0.3 ms of handing over, 0.7 ms to the scheduler. Out: 4 us for each
    token of the prompt before the first token alone, 0.7 ms."""
    front = FrontEnd(request_us=1000, prompt_token_us=2, handover_us=300, first_token_us=4, token_us=0, latency_us=700)
    times = played((10, 10), (0, 0), [(0, 500, 3)], front)[0]
    assert times == pytest.approx([3 + 10 + 2 + 0.7, 3 + 20 + 0.7, 3 + 30 + 0.7])


def test_no_token_overtakes_the_one_before() -> None:
    """First tokens take 20 ms here; those after them come 5 ms apart, and wait."""
    times = played((5, 5), (0, 0), [(0, 2000, 6)], FrontEnd(first_token_us=10))[0]
    assert times == pytest.approx([25, 25, 25, 25, 25, 30])


def test_tokens_queue_behind_those_of_the_step_before() -> None:
    """Two requests, the first of which is alone in the first two steps of 5 ms. A token is taken in for 2 ms and handed
    out for 4; those of one step are taken in together. From the first token on the front end is busy to the last."""
    front = FrontEnd(output_us=2000, token_us=4000)
    times = played((5, 5), (0, 0), [(0, 100, 4), (0, 100, 4)], front)
    assert times[0][:3] == pytest.approx([5 + 6, 11 + 6, 17 + 2 * 2 + 4])
    assert times[1][0] == pytest.approx(17 + 2 * 2 + 2 * 4)
    assert max(times[0][-1], times[1][-1]) == pytest.approx(5 + 8 * 6)


def test_a_token_costs_more_while_the_front_end_is_behind() -> None:
    """Two requests, steps of 5 ms. It hands out a token alone in 4 ms, and is done with that when the next step ends.
    Two together take 8, so it is still at them when the step after ends, whose tokens take 6 ms each."""
    front = FrontEnd(token_us=4000, behind_us=2000)
    times = played((5, 5), (0, 0), [(0, 100, 4), (0, 100, 4)], front)
    assert times[0][:3] == pytest.approx([5 + 4, 10 + 4, 15 + 4])
    assert times[1][:2] == pytest.approx([15 + 2 * 4, 23 + 2 * 6])
    never = played((10, 10), (0, 0), [(0, 100, 4), (0, 100, 4)], front)
    assert never == played((10, 10), (0, 0), [(0, 100, 4), (0, 100, 4)], FrontEnd(token_us=4000))


def test_a_request_waits_while_tokens_are_handed_out() -> None:
    """It comes at 11 ms, while the front end hands out the step's token from 10 to 14, and is taken in after that."""
    front = FrontEnd(request_us=1000, token_us=4000)
    times = played((10, 10), (0, 0), [(0, 100, 1), (12, 100, 1)], front)
    assert times[0] == pytest.approx([15])
    assert times[1] == pytest.approx([15 + 1 + 10 + 4])


def test_requests_are_handed_over_one_by_one() -> None:
    """Three together: all are taken in until 3 ms, then handed over at 4, 5 and 6. The first step begins with the first
    alone, at 5 the second is launched with the second alone. The fourth waits for the front end until 6 and is with the
    third in the third step."""
    front = FrontEnd(request_us=1000, handover_us=1000)
    times = played((10, 10), (1, 1), [(0, 100, 1)] * 3 + [(3.5, 100, 1)], front)
    assert [each[0] for each in times] == pytest.approx([14, 24, 34, 34])


def test_where_launches_differ_gpu_and_cpu_wait_for_each_other() -> None:
    """One prompt after the other, whose kernels take as long to launch in the mean as the GPU takes. How long the
    longer of both takes in the mean is known for lognormal launches (Black and Scholes 1973: a call at the money)."""
    world = emulate(Hardware(gpu="a100", kv_tokens=60_000).setup("vllm", "7b", 4096))
    step = Step(emits=[Sequence(0, 600, 1)])
    step.prefill(600, 0)
    gpu_s = world.with_profile(ServerProfile(scheduler="vllm@v1")).cost(step)
    own = Overheads(launch_eager_layer_us=gpu_s * 1e6 / 32, launch_spread=0.25, graph_tokens=512)
    world = world.with_profile(ServerProfile(scheduler="vllm@v1", overheads=own))
    replies = virtual.simulate(world, [(0.0, 600, 1)] * 4000, parse_streams(1))
    mean_s = statistics.mean(first_s - sent_s for sent_s, first_s, _ in virtual.bounds(replies))
    assert mean_s == pytest.approx(2 * gpu_s * statistics.NormalDist().cdf(0.25 / 2), rel=0.005)
