"""LoRA adapters on the modelled vLLM: which may run together, when one is loaded, what their slots take of the memory,
and the embedded server's wire."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.cli import invoke
from loadgen.config import Config
from loadgen.report import build
from loadgen.rundir import records
from servers.predict import command as predict
from servers.schedulers import Sequence
from servers.schedulers.vllm import CachingVllmV1, VllmV1
from servers.simulator.build import Emulated, EmulationError, emulate, lora_bytes
from servers.simulator.options import Hardware
from servers.simulator.virtual import Outcome, simulate


def emulated(*options: str, **more: Any) -> Emulated:
    return emulate(Hardware(gpu="h200", scheduler_arg=options, **more).setup("vllm", "7b", 4096))


def played(server: Emulated, **options: Any) -> list[Outcome]:
    load, shapes = predict.drawn(Config(gpu="h200", **options))
    return simulate(server, list(predict.requests(load, shapes)), load.streams)


requests = st.lists(
    st.tuples(st.integers(1, 90), st.integers(1, 12), st.sampled_from(["", "a", "b", "c", "d"])), max_size=25
)


@settings(max_examples=60, deadline=None)
@given(queue=requests, slots=st.integers(1, 3), caching=st.booleans(), asynchronous=st.booleans())
def test_no_more_adapters_run_together_than_there_are_slots_and_all_requests_end(
    queue: list[tuple[int, int, str]], slots: int, caching: bool, asynchronous: bool
) -> None:
    """A step loads just those of its adapters that are in no slot; those that fit are never held up by order."""
    options = VllmV1.Settings(max_running=6, budget_tokens=64, max_loras=slots, async_scheduling=asynchronous)
    scheduler = (CachingVllmV1 if caching else VllmV1)(4096, options)
    sequences = [Sequence(place, prompt, output, (), name) for place, (prompt, output, name) in enumerate(queue)]
    for sequence in sequences:
        scheduler.add(sequence)
    in_slots: set[str] = set()
    under_way, steps = [], 0
    while any(not each.done for each in sequences):
        steps += 1
        assert steps < 2000
        step = scheduler.schedule()
        if step is not None:
            of_it = {each.adapter for each in step.emits} - {""}
            assert len(of_it) <= slots and step.loads >= len(of_it - in_slots)
            in_slots = set(scheduler._slots)
            assert of_it <= in_slots and len(in_slots) <= slots
            under_way.append(step)
        if step is None or len(under_way) == scheduler.depth:
            scheduler.finish(under_way.pop(0))
    assert all(each.emitted == each.output for each in sequences)


@settings(max_examples=30, deadline=None)
@given(queue=requests)
def test_with_a_slot_for_each_adapter_nothing_waits_that_would_not_without(queue: list[tuple[int, int, str]]) -> None:
    sent = [(0.001 * place, prompt, output, (), name) for place, (prompt, output, name) in enumerate(queue)]
    free = simulate(emulated(), [each[:3] for each in sent])
    slotted = simulate(emulated("max_loras=4", "lora_load_ms=0", kv_tokens=100_000), sent)
    same = simulate(emulated(kv_tokens=100_000), sent)
    for one, other in zip(slotted, same, strict=True):
        assert list(one.times_s) == pytest.approx(list(other.times_s))
    assert len(free) == len(slotted)


def test_an_adapter_in_no_slot_costs_its_load_and_one_in_a_slot_none() -> None:
    """One request after another: a, a, b, a, of which all but the second find their adapter in no slot."""
    sent = [(float(place), 20, 5, (), name) for place, name in enumerate("aaba")]
    one = simulate(emulated("max_loras=1", "lora_load_ms=200"), sent)
    ttft = [each.times_s[0] - each.sent_s for each in one]
    assert ttft[0] - ttft[1] == pytest.approx(0.2, abs=5e-3)
    assert ttft[2] == pytest.approx(ttft[0], abs=5e-3) and ttft[3] == pytest.approx(ttft[0], abs=5e-3)
    two = simulate(emulated("max_loras=2", "lora_load_ms=200"), sent)
    assert two[3].times_s[0] - two[3].sent_s == pytest.approx(ttft[1], abs=5e-3)


def test_slots_take_the_memory_of_two_matrices_beside_each_projection() -> None:
    """Llama-2-7B: 32 layers, width 4096, MLP 11008; rank 16, 16 bits."""
    server = emulated("max_loras=1")
    layer = 16 * (4 * (4096 + 4096) + 3 * (4096 + 11008)) * 2
    assert lora_bytes(server.setup, server.settings) == 32 * layer
    plain, slots = emulated(), emulated("max_loras=8", "lora_rank=64")
    per_token = 2 * 32 * 4096 * 2
    assert (plain.kv_tokens - slots.kv_tokens) * per_token == pytest.approx(8 * 4 * 32 * layer, rel=1e-3)


def test_of_a_mixture_adapters_are_not_modelled() -> None:
    with pytest.raises(EmulationError, match="adapters are modelled for dense decoders"):
        emulate(Hardware(gpu="h200", gpus=8, scheduler_arg=("max_loras=2",)).setup("vllm", "mixtral-8x7b", 4096))


def test_prompts_that_begin_alike_are_not_shared_between_adapters() -> None:
    segments = ((7, 64), (8, 64))
    same, other, none = (Sequence(0, 128, 1, segments, name).segments for name in ("a", "b", ""))
    assert same == Sequence(1, 128, 1, segments, "a").segments != other and none == segments
    assert all(0 <= key < 1 << 64 for key, _ in (*same, *other))


def test_few_slots_make_adapters_wait_and_the_report_tells_them_apart(tmp_path: Path) -> None:
    words = ["predict", "--gpu", "h200", "--requests", "200", "--arrival", "poisson:20", "--input-tokens", "64"]
    words += ["--output-tokens", "32", "--adapters", "a:0.4,b:0.4,base:0.2", "--scheduler-arg", "max_loras=1"]
    assert invoke([*words, "--out", str(tmp_path / "p")]) in (0, 4)
    report, table = build.from_directory(tmp_path / "p")
    assert Counter(table.adapters.values()).keys() == {"a", "b"}
    named = {each.name: each for each in report.by_adapter}
    assert named.keys() == {"a", "b", ""} and sum(each.requests for each in named.values()) == 200
    base, worst = (named[name].metrics["ttft_ms"].p50 for name in ("", "b"))
    assert base is not None and worst is not None and base < worst
    assert "By adapter" in (tmp_path / "p" / "report.md").read_text()


def test_over_the_wire_each_request_names_its_adapter_and_a_lacking_one_is_told_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`run` gives the embedded server that it starts the adapters of its load, as it gives it the model."""
    words = ["run", "--launch", "embedded", "--requests", "40", "--input-tokens", "8", "--output-tokens", "4"]
    words += ["--no-calibrate", "--no-server-metrics", "--arrival", "poisson:200"]
    assert invoke([*words, "--adapters", "a:0.6,base:0.4", "--out", str(tmp_path / "r")]) in (0, 4)
    report, table = build.from_directory(tmp_path / "r")
    asked = msgspec.structs.replace(Config(adapters="a:0.6,base:0.4").load.adapters).drawn(0)  # type: ignore[type-var]
    assert table.adapters == {number: "a" for number in range(40) if asked.at(number)}
    assert report.requests.ok == 40 and not report.reply_models
    assert len(records.read(tmp_path / "r")[0].models) == 0
