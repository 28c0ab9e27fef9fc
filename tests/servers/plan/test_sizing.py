"""How much one server takes of sessions and of a trace, beside what is known of plain requests."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from loadgen import cli
from loadgen.config import Config
from loadgen.load.load import Load
from servers.plan.sizing import Demand, LatencyLimits, SizedServer, session_trial, trace_rate
from servers.simulator.build import Emulated, emulate
from servers.simulator.options import Hardware

LIMITS = LatencyLimits(seconds={"ttft": 1.0, "tpot": 0.05})


def server(kv_tokens: int | None = None) -> Emulated:
    hardware = Hardware(gpu="h200", kv_tokens=kv_tokens, prefix_caching="on")
    return emulate(hardware.setup("vllm", "llama-3-8b", 8192))


def sessions(count: int = 60, turns: int | str = 4, think_s: float = 0.5, **options: object) -> Load:
    words = {"input_tokens": 200, "output_tokens": 40} | options
    return Config(sessions=count, turns=turns, think_time=think_s, **words).load  # type: ignore[arg-type]


def trace(directory: Path, gap_ms: int = 250, lines: int = 400) -> Path:
    path = directory / "trace.jsonl"
    rows = [
        {"timestamp": at * gap_ms, "input_length": 300, "output_length": 20, "hash_ids": [at]} for at in range(lines)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_sessions_of_one_turn_are_single_requests() -> None:
    single = Config(requests=4000, input_tokens=200, output_tokens=40).load
    of_requests = SizedServer(server(), Demand(rate=1.0, load=single), LIMITS)
    of_sessions = SizedServer(server(), Demand(rate=1.0, load=sessions(400, 1), requests=400), LIMITS)
    assert of_sessions.capacity == pytest.approx(of_requests.capacity, rel=1e-6)
    rates = [each.highest()[0] for each in (of_requests, of_sessions)]
    assert rates[0] / rates[1] == pytest.approx(1.0, abs=0.11)  # each is found within 10 %


def test_turns_and_not_thinking_fill_a_server() -> None:
    """A session of four turns is some four requests; how long people think changes how many sessions are open."""
    quick, slow = (
        SizedServer(server(), Demand(rate=1.0, load=sessions(100, 4, think_s), requests=400), LIMITS)
        for think_s in (0.1, 3.0)
    )
    single = SizedServer(server(), Demand(rate=1.0, load=sessions(400, 1), requests=400), LIMITS)
    assert quick.capacity == slow.capacity
    assert single.capacity / 8 < quick.capacity < single.capacity / 3  # prompts grow, and are mostly cached
    assert quick.at(4.0).missed is None and slow.at(4.0).missed is None


@pytest.mark.parametrize(
    ("load", "beyond"),
    [(Config(requests=4000, input_tokens=200, output_tokens=40).load, 2.0), (sessions(2000, 2, 0.1), 2.5)],
    ids=["requests", "sessions"],
)
def test_a_server_that_falls_behind_will_not_do_however_loose_the_limits(load: Load, beyond: float) -> None:
    few = emulate(Hardware(gpu="h200", prefix_caching="on", max_running=8).setup("vllm", "llama-3-8b", 8192))
    sized = SizedServer(few, Demand(rate=1.0, load=load, requests=800), LatencyLimits(seconds={"e2el": 1e9}))
    slow, fast = sized.at(0.6 * sized.capacity), sized.at(beyond * sized.capacity)
    assert slow.missed is None and slow.keeping_up is not None and slow.keeping_up.word == "kept_up"
    assert fast.missed == "throughput" and fast.keeping_up is not None
    assert fast.keeping_up.word == "fell_behind"
    assert fast.keeping_up.served_per_s == pytest.approx(sized.capacity, rel=0.35)  # that is of a burst, drain and all


def test_a_run_of_sessions_is_full_before_it_is_judged() -> None:
    """Twice as many of the same sessions a second: about twice as many requests in flight."""
    demand = Demand(rate=1.0, load=sessions(200, 4, 2.0), requests=800)
    some, more = (session_trial(server(), demand, LIMITS, rate, 10.0).in_flight for rate in (5.0, 10.0))
    assert 1.5 < more / some < 3


def test_turns_that_a_server_refuses_miss_every_limit() -> None:
    demand = Demand(rate=1.0, load=sessions(50, 4, 0.1, input_tokens=3000), requests=200)
    small = emulate(Hardware(gpu="h200").setup("vllm", "llama-3-8b", 4096))
    seen = session_trial(small, demand, LIMITS, 1.0, 1.0)
    assert seen.missed == "ttft" and not math.isnan(seen.percentiles["ttft"])


def test_a_trace_keeps_its_shape_at_any_rate(tmp_path: Path) -> None:
    load = Config(trace=trace(tmp_path)).load.within(8192)
    assert trace_rate(load) == pytest.approx(4.0)
    arrivals = Demand(rate=4.0, load=load).arrivals
    assert [each.at_s for each in arrivals[:3]] == pytest.approx([0.0, 1.0, 2.0])  # one a second, to be scaled
    assert {each.prompt for each in arrivals} == {300}


def test_plan_takes_a_trace_at_its_own_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trace(tmp_path)
    limits = ["plan", "--slo", "ttft_ms=1000", "--gpu", "h200", "--max-gpus", "1", "--requests", "50"]
    assert cli.invoke([*limits, "--trace", str(path), "--trace-speed", "2"]) == 0
    said = capsys.readouterr().out
    assert f"8 requests/s (as in {path}, faster or slower)" in said
    assert f"--trace {path} --trace-speed 2.0000" in said


def test_plan_of_sessions_says_what_it_counts(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --slo ttft_ms=1000 --rate 2 --sessions 30 --turns 2 --think-time 0.5 --gpu h200 --max-gpus 1"
    assert cli.invoke([*words.split(), "--input-tokens", "100", "--output-tokens", "20"]) == 0
    said = capsys.readouterr().out
    assert "2 sessions/s (Poisson, 100 tokens in, 20 out, 2 turns each, 0.5 s to think)" in said
    assert "sessions/s each" in said and "--sessions 30 --turns 2 --think-time 0.5" in said
