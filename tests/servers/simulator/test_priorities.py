"""Priorities on the modelled vLLM: who is let in first and who starts over, in virtual time and over the wire."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import backends
from backends.launch import ServerSettings
from backends.protocol import Prompt, Sampling
from loadgen.cli import invoke
from loadgen.rundir import records
from servers.schedulers import Sequence, Step
from servers.schedulers.vllm import BLOCK_TOKENS, CachingVllmV1, VllmV1
from tests.loadgen.client.test_engine import plan
from tests.servers.reader import running

requests = st.lists(
    st.tuples(st.integers(1, 90), st.integers(1, 30), st.sampled_from([-2, 0, 0, 5])), min_size=1, max_size=25
)


@settings(max_examples=80, deadline=None)
@given(queue=requests, blocks=st.integers(9, 30), caching=st.booleans(), asynchronous=st.booleans())
def test_nobody_starts_over_for_one_of_lower_rank_and_all_requests_end(
    queue: list[tuple[int, int, int]], blocks: int, caching: bool, asynchronous: bool
) -> None:
    """Whoever loses its blocks is the last by (priority, arrival) of those that ran; all blocks come back."""
    options = VllmV1.Settings(max_running=6, budget_tokens=64, async_scheduling=asynchronous, by_priority=1)
    scheduler = (CachingVllmV1 if caching else VllmV1)(blocks * BLOCK_TOKENS, options)
    sequences = [Sequence(place, *each[:2], (), "", each[2]) for place, each in enumerate(queue)]
    for sequence in sequences:
        scheduler.add(sequence)
    under_way: deque[Step] = deque()
    for _ in range(5000):
        if all(each.done for each in sequences):
            break
        running_now = [each for each in sequences if each.computed and not each.done]
        before = {each: each.preemptions for each in sequences}
        step = scheduler.schedule()
        lost = [each for each in sequences if each.preemptions > before[each]]
        kept = [each for each in running_now if each not in lost]
        if lost and kept:
            assert min((each.priority, each.index) for each in lost) > max((each.priority, each.index) for each in kept)
        if step is not None:
            under_way.append(step)
        if under_way and (step is None or len(under_way) == scheduler.depth):
            scheduler.finish(under_way.popleft())
    assert all(each.done for each in sequences) and scheduler.used_tokens == 0


def report(*words: str | Path) -> dict[str, Any]:
    directory = Path(words[words.index("--out") + 1])
    assert invoke([str(word) for word in words]) in (0, 4)
    told: dict[str, Any] = json.loads((directory / "report.json").read_bytes())
    return told


COMMON = (
    "predict", "--gpu", "h200", "--model", "7b", "--requests", "200", "--input-tokens", "256", "--output-tokens", "64",
    "--max-running", "8", "--priority", "0:0.3,7:0.7",
)  # fmt: skip


def test_the_lower_priority_waits_less_where_the_policy_says_so(tmp_path: Path) -> None:
    """A burst of 200 at a batch of 8: the first sixty are those of priority 0, whatever their numbers."""
    ranked = report(*COMMON, "--scheduler-arg", "by_priority=1", "--out", tmp_path / "ranked")
    plain = report(*COMMON, "--out", tmp_path / "plain")
    first, second = ranked["by_priority"]
    assert (first["name"], second["name"]) == ("0", "7") and first["requests"] + second["requests"] == 200
    assert first["metrics"]["ttft_ms"]["max"] <= second["metrics"]["ttft_ms"]["min"]
    same, other = plain["by_priority"]
    assert same["metrics"]["ttft_ms"]["mean"] == pytest.approx(other["metrics"]["ttft_ms"]["mean"], rel=0.25)
    assert "By priority" in (tmp_path / "ranked" / "report.md").read_text()
    table = records.read(tmp_path / "ranked")[0].measured()
    assert set(table.priorities.values()) == {7} and len(table.priorities) == second["requests"]


def test_over_the_wire_each_request_says_its_priority(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        told = report(
            "run", "--url", f"http://127.0.0.1:{server.port}", "--requests", "40", "--priority", "0:1,3:1",
            "--output-tokens", "2", "--input-tokens", "8", "--no-calibrate", "--no-server-metrics",
            "--out", tmp_path / "run",
        )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "run" / "requests.jsonl").read_text().splitlines()[1:-1]]
    asked = [line["priority"] for line in lines if line["phase"] == "measured"]
    assert set(asked) == {0, 3} and len(asked) == 40
    assert [(each["name"], each["requests"]) for each in told["by_priority"]] == [
        ("0", asked.count(0)), ("3", asked.count(3)),
    ]  # fmt: skip


@pytest.mark.parametrize("backend", ["vllm", "vllm-generate", "sglang", "openai", "openai-chat", "embeddings"])
def test_a_body_has_the_priority_and_is_else_the_same(backend: str) -> None:
    job, of = plan("http://h:1").job, backends.get(backend)
    prompt = Prompt(2, [5, 6], "a b") if of.prompt_kind == "token_ids" else Prompt(2, None, "a b")
    plain, asked = (json.loads(job.request(of, prompt, Sampling(3), "", each).body) for each in (None, -4))
    assert asked == {**plain, "priority": -4} != plain


@pytest.mark.parametrize(
    ("backend", "flags"), [("vllm", "--scheduling-policy priority"), ("sglang", "--enable-priority-scheduling")]
)
def test_a_server_that_is_started_schedules_by_priority_where_requests_have_one(backend: str, flags: str) -> None:
    adapter = backends.get(backend).adapter
    assert adapter is not None
    for by_priority in (False, True):
        settings = ServerSettings(
            model="m", served_name="m", tp=1, dtype="float16", max_model_len=9, max_running=9, max_requests=9,
            memory_ratio=0.8, host="h", port=1, config_dir="/", by_priority=by_priority,
        )  # fmt: skip
        assert (flags in " ".join(adapter.invoke(settings).arguments)) == by_priority
