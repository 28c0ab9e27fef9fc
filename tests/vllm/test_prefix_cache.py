"""What a load shares, block by block, against the prefix cache of a real vLLM on the CPU. Run by `make test-vllm`.

Requests are sent one after the other, so an earlier one has left its blocks when the next one comes. Each reply tells
how many of its prompt tokens vLLM took from its cache, and vLLM's own counter has their sum.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import serve
from serve import BLOCK_TOKENS

from loadgen.config import Config
from loadgen.load.shapes import Shape
from loadgen.rundir import records

pytestmark = pytest.mark.vllm

HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
# One line a request: the tokens of prompt and reply, and the ids of blocks of 512. What is the same as before:
TRACE = (
    (700, 4, [1, 2]),  # nothing
    (600, 4, [1, 3]),  # the first block, whole
    (700, 4, [1, 2]),  # everything; 700 tokens are 21 blocks of 32 and 28 tokens more
    (512, 4, [1]),  # everything, 16 blocks of 32; the last of them is computed again, for the sake of one token
    (512, 4, [4]),  # nothing
    (900, 4, [4, 1]),  # the first block; the second came before, behind other ones
    (300, 4, [5]),  # nothing
    (300, 4, [5]),  # everything; 9 blocks of 32, and 12 tokens more
)
TRACE_HITS = (0, 512, 672, 480, 0, 512, 0, 288)


def hit_tokens(shape: Shape) -> int:
    """What vLLM's cache holds of a prompt: whole blocks of what an earlier one had, and never the last token, whose
    result is the first token of the reply (get_computed_blocks in vLLM's kv_cache_manager.py)."""
    return min(shape.shared_tokens, shape.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def session_hit_tokens(shape: Shape) -> int:
    """Of a session's later turn: the reply's last token was given out and never went through the model, so the cache
    does not have it."""
    return (shape.shared_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS if shape.shared_tokens else 0


def counted(url: str) -> dict[str, float]:
    """vLLM's own counters of its cache, in tokens."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        lines = [line.split() for line in reply.read().decode().splitlines() if not line.startswith("#")]
    return {name: sum(float(line[-1]) for line in lines if line[0].startswith(f"{name}{{")) for name in (HITS, QUERIES)}


@pytest.fixture(scope="module")
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if "vllm" not in request.config.option.markexpr:
        pytest.skip("needs a real vLLM; run `make test-vllm`")
    directory = tmp_path_factory.mktemp("vllm")
    with serve.real_vllm(directory, prefix_caching=True) as listening:
        yield listening
        if request.session.testsfailed:
            print(f"\nthe end of the server's log:\n{serve.log_end(directory)}")


def check(url: str, out: Path, config: Config, *load: str) -> list[int]:
    """Runs the load one request after the other, and compares what vLLM found with the load's arithmetic. Gives the
    hits of each request. Every load needs a seed of its own: the cache keeps the prompts of those before it."""
    before = counted(url)
    command = [
        str(Path(sys.executable).parent / "loadgen"), "run", "--no-calibrate", "--url", url, "--backend", "vllm",
        "--out", str(out), "--concurrency", "1", "--warmup", "0", *load,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 4), done.stdout[-3000:] + done.stderr[-3000:]
    table = records.read(out)[0]  # 4: on a busy machine, times are poor
    measured = table.measured()
    assert measured.ok.all()

    shapes = config.load.shapes()
    drawn = [shapes.shape(number) for number in range(len(measured))]
    hits = [hit_tokens(shape) for shape in drawn]
    gained = {name: value - before[name] for name, value in counted(url).items()}
    assert gained == {HITS: sum(hits), QUERIES: table.prompt_tokens.sum()}
    assert [max(0, cached) for cached in measured.cached_tokens.tolist()] == hits  # vLLM tells none where there is none
    assert measured.shared_tokens.tolist() == [shape.shared_tokens for shape in drawn]

    report = json.loads((out / "report.json").read_text())
    assert report["sharing"]["cached_tokens"] == report["server"]["prefix_cache_hits"] == sum(hits)
    assert report["sharing"]["shareable_tokens"] == sum(shape.shared_tokens for shape in drawn)
    assert report["sharing"]["ttft_warm_ms"]["n"] == sum(map(bool, hits))
    found = {each["code"]: each["severity"] for each in report["verdict"]["findings"]}
    assert found["CACHED_TOKENS"] == "info" and "PREFIX_CACHE" not in found  # the same, and said once
    return hits


@pytest.mark.parametrize("tokens", [96, 100])
def test_shared_prefixes(tokens: int, url: str, tmp_path: Path) -> None:
    config = Config(requests=24, input_tokens="160", output_tokens="4", prefix=f"4:{tokens}", seed=tokens)
    load = ["--requests", "24", "--input-tokens", "160", "--output-tokens", "4", "--prefix", f"4:{tokens}"]
    hits = check(url, tmp_path / "run", config, "--seed", str(tokens), *load)
    assert hits.count(0) == 4 and sum(hits) == 20 * 96  # the first request of each group finds nothing


def test_a_trace_of_blocks(url: str, tmp_path: Path) -> None:
    lines = [
        {"timestamp": 100 * at, "input_length": prompt, "output_length": reply, "hash_ids": ids}
        for at, (prompt, reply, ids) in enumerate(TRACE)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    hits = check(url, tmp_path / "run", Config(trace=trace, seed=7), "--seed", "7", "--trace", str(trace))
    assert tuple(hits) == TRACE_HITS


def test_sessions(url: str, tmp_path: Path) -> None:
    """vLLM takes the ids of all that was said, its own replies' among them, and finds every whole block of it."""
    load = ["--sessions", "6", "--turns", "uniform:2:5", "--input-tokens", "uniform:20:70", "--output-tokens", "9"]
    config = Config(
        sessions=6, turns="uniform:2:5", input_tokens="uniform:20:70", output_tokens="9", think_time=0.2, seed=11
    )
    before = counted(url)
    command = [
        str(Path(sys.executable).parent / "loadgen"), "run", "--no-calibrate", "--url", url, "--backend", "vllm",
        "--out", str(tmp_path / "run"), "--warmup", "0", "--think-time", "0.2", "--seed", "11", *load,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 4), done.stdout[-3000:] + done.stderr[-3000:]  # 4: on a busy machine, times are poor
    table = records.read(tmp_path / "run")[0]
    measured = table.measured()
    turns = config.load.turns()
    assert turns is not None and len(measured) == turns.total > 15 and measured.ok.all()
    shapes = [config.load.shapes().shape(number) for number in range(turns.total)]
    hits = [session_hit_tokens(shape) for shape in shapes]
    assert measured.prompt_tokens.tolist() == [shape.prompt_tokens for shape in shapes]
    assert measured.shared_tokens.tolist() == [shape.shared_tokens for shape in shapes]
    assert [max(0, cached) for cached in measured.cached_tokens.tolist()] == hits
    gained = {name: value - before[name] for name, value in counted(url).items()}
    assert gained == {HITS: sum(hits), QUERIES: table.prompt_tokens.sum()} and sum(hits) > 500
    for number in range(turns.total):
        if not turns.is_last(number):
            due_ns = measured.done_ns[number] + turns.think_ns(number + 1)
            assert measured.scheduled_ns[number + 1] == due_ns <= measured.sent_ns[number + 1]


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_sessions_of_text(backend: str, url: str, tmp_path: Path) -> None:
    """What vLLM wrote stands in the next prompt: every turn is longer by at least the new words."""
    command = [
        str(Path(sys.executable).parent / "loadgen"), "run", "--no-calibrate", "--url", url, "--backend", backend,
        "--out", str(tmp_path / "run"), "--warmup", "1", "--sessions", "3", "--turns", "3", "--think-time", "0.1",
        "--input-tokens", "40", "--output-tokens", "8", "--seed", "12",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 4), done.stdout[-3000:] + done.stderr[-3000:]
    measured = records.read(tmp_path / "run")[0].measured()
    assert len(measured) == 9 and measured.ok.all()
    for number in (0, 1, 3, 4, 6, 7):
        assert measured.prompt_tokens[number + 1] > measured.prompt_tokens[number] + 35
