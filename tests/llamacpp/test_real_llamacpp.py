"""loadgen against llama.cpp's own server on a CPU: started, measured in every way, and ended.

The server is the second opinion: what it timed of each request (`timings`), and what it counts (/metrics).
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from backends import catalog
from backends.launch import LaunchError
from backends.llamacpp.gguf_model import write_random
from loadgen.monitor import server_view
from loadgen.rundir import records
from tests.lateness import measured_lateness
from tests.llamacpp.conftest import CONFIG, LENGTH, SLOTS, Loadgen, completion, serving

pytestmark = pytest.mark.llamacpp

TPOT_RATIO = 0.02
SEND_MS = 0.2  # from a token's end to the client's read of it, where nobody is late


def counters(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("llamacpp:")}


def test_from_start_to_end(model: Path, loadgen: Loadgen, tmp_path: Path) -> None:
    """A burst at a server that is started for it: no GPU is named, and none is needed."""
    out = tmp_path / "run"
    done = loadgen(
        "run", "--backend", "llamacpp", "--launch", "process", "--model", model, "--dummy-weights",
        "--max-running", "2", "--max-model-len", "128", "--server-arg=--threads=1", "--requests", "24",
        "--input-tokens", "32", "--output-tokens", "8", "--no-calibrate", "--out", out,
    )  # fmt: skip
    report = done.result()
    assert report["requests"]["ok"] == 24 and not report["emulated"]
    assert report["tokens"] == {"prompt": 24 * 32, "output": 24 * 8}
    launch = json.loads((out / "manifest.json").read_text())["launch"]
    assert launch["version"] and launch["max_running"] == 2 and "ended" not in launch
    assert "--parallel 2 --no-kv-unified" in launch["command"]
    assert "listening on" in (out / "server.log").read_text()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(json.loads((out / "manifest.json").read_text())["url"], timeout=5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    "shape",
    [
        {"model_type": "mistral", "head_dim": 16},
        {"model_type": "qwen2", "tie_word_embeddings": True},
        {"model_type": "qwen3", "head_dim": 32},
    ],
    ids=lambda shape: shape["model_type"],
)
def test_random_weights_are_a_model_that_it_serves(shape: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    config = {**CONFIG, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 300, **shape}
    write_random(catalog.from_config("small", config), dtype, tmp_path / "small.gguf")
    with serving(tmp_path / "small.gguf") as address:
        reply = completion(address, prompt=[260, 261, 299], n_predict=4, ignore_eos=True, return_tokens=True)
    assert (reply["tokens_evaluated"], reply["tokens_predicted"], len(reply["tokens"])) == (3, 4, 4)


def test_a_token_takes_as_long_as_the_server_says(url: str, loadgen: Loadgen, tmp_path: Path) -> None:
    """The client stamps the first token and the last one as they are read; each may be late by what the machine makes
    of a program that waits."""
    with measured_lateness() as watched:
        done = loadgen(
            "run", "--backend", "llamacpp", "--url", url, "--concurrency", "1", "--requests", "200",
            "--input-tokens", "16", "--output-tokens", "48", "--no-calibrate", "--out", tmp_path / "run",
        )  # fmt: skip
    told = done.result()["server_requests"]
    own_ms, client_ms = told["metrics"]["tpot_ms"]["mean"], told["client"]["tpot_ms"]["mean"]
    late_ms = (SEND_MS + 2 * watched.during(tmp_path / "run").mean_ms) / 47
    print(
        f"tpot of 200 requests: the server's {own_ms:.4f} ms, the client's {client_ms:.4f} ({late_ms:.4f} of lateness)"
    )
    assert told["requests"] == 200
    assert client_ms == pytest.approx(own_ms, rel=TPOT_RATIO, abs=late_ms)
    assert "By the server's own clock, mean ms (its replies): prefill" in done.err


def test_its_queue_is_what_the_client_waits_for(url: str, loadgen: Loadgen, tmp_path: Path) -> None:
    """Of a burst: whenever the server was sampled, it held as many requests as the client had under way, and at most
    SLOTS of them ran. Requests begin and end while a sample is on its way."""
    before, out = counters(url), tmp_path / "run"
    done = loadgen(
        "run", "--backend", "llamacpp", "--url", url, "--requests", "80", "--input-tokens", "128",
        "--output-tokens", "64", "--warmup", "4", "--no-calibrate", "--out", out,
    )  # fmt: skip
    report = done.result()
    table = records.read(out)[0].measured()
    t0_ns = records.read_header(out).t0_monotonic_ns
    seen = 0
    for sample in server_view.samples(out, report["run_id"]):
        held, at_ns = sample.metrics, sample.at_ns - t0_ns
        if not (0 < at_ns < table.done_ns.max()) or "running" not in held:
            continue
        seen += 1
        under_way = [
            int(((table.sent_ns <= when) & (when < table.done_ns)).sum()) for when in (at_ns - 10**8, at_ns + 10**8)
        ]
        assert held["running"] <= SLOTS
        assert min(under_way) - SLOTS <= held["running"] + held["waiting"] <= max(under_way) + SLOTS
    assert seen > 0 and report["server"]["waiting_max"] > 0 and report["server"]["running_max"] == SLOTS
    after = counters(url)
    for series, tokens in (("prompt_tokens_total", 84 * 128), ("tokens_predicted_total", 84 * 64)):
        # it counts what it computed for a request that had to be sent twice, too
        assert after[f"llamacpp:{series}"] - before[f"llamacpp:{series}"] >= tokens


def test_agents_begin_others_and_wait_for_them(url: str, loadgen: Loadgen, tmp_path: Path) -> None:
    """Each reply begins two others side by side; no turn is sent before what it waits for has ended."""
    out = tmp_path / "run"
    report = loadgen(
        "run", "--backend", "llamacpp", "--url", url, "--sessions", "2", "--turns", "2", "--subagents", "1:2:2",
        "--think-time", "0.05", "--input-tokens", "8", "--first-tokens", "24", "--output-tokens", "4", "--warmup", "2",
        "--seed", "1", "--no-calibrate", "--out", out,  # another test must not find these prompts in the cache
    ).result()  # fmt: skip
    assert report["requests"]["ok"] == 12 and report["sessions"]["ended"] == 2
    table = records.read(out)[0].measured()
    row_of = {(int(table.session[row]), int(table.turn[row])): row for row in range(len(table))}
    for (session, turn), row in row_of.items():
        for before in table.afters.get(int(table.id[row]), [turn - 1] if turn > 1 else []):
            assert table.sent_ns[row] >= table.scheduled_ns[row] >= table.done_ns[row_of[session, before]]
    assert [table.afters[int(table.id[row_of[0, turn]])] for turn in (4, 6)] == [[1], [1, 3, 5]]
    parts = [report["sessions"][name]["mean"] for name in ("task_ms", "tokens_wait_ms", "tools_ms")]
    assert parts[0] == pytest.approx(parts[1] + parts[2]) and parts[2] >= 0


def test_sessions_repeat_what_was_said_and_find_it_in_the_cache(url: str, loadgen: Loadgen, tmp_path: Path) -> None:
    done = loadgen(
        "run", "--backend", "llamacpp", "--url", url, "--sessions", "2", "--turns", "4", "--think-time", "0.05",
        "--input-tokens", "24", "--output-tokens", "16", "--concurrency", "2", "--no-calibrate", "--warmup", "0",
        "--out", tmp_path / "run",
    )  # fmt: skip
    report = done.result()
    assert report["requests"]["ok"] == 8 and report["sessions"]["ended"] == 2
    table = records.read(tmp_path / "run")[0]
    assert sorted(table.prompt_tokens.tolist()) == sorted([24, 64, 104, 144] * 2)  # each turn adds 16 + 24
    later = table.turn > 1
    # all but the last token of the reply, whose KV no step has computed
    assert (table.cached_tokens[later] >= table.shared_tokens[later] - 1).all() and not table.cached_tokens[
        ~later
    ].any()


def test_nothing_comes_from_the_cache_where_it_is_not_meant_to(url: str, loadgen: Loadgen, tmp_path: Path) -> None:
    for number in range(2):  # the same prompts twice
        done = loadgen(
            "run", "--backend", "llamacpp", "--url", url, "--requests", "4", "--input-tokens", "64",
            "--output-tokens", "4", "--no-stream", "--no-calibrate", "--out", tmp_path / str(number),
        )  # fmt: skip
        assert done.result()["requests"]["ok"] == 4
        assert not records.read(tmp_path / str(number))[0].cached_tokens.any()


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_the_openai_routes(backend: str, url: str, loadgen: Loadgen, tmp_path: Path) -> None:
    """With prompts of one's own: a vocabulary of bytes has no words whose tokens could be counted beforehand."""
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text("".join(f'{{"prompt": "prompt {number}", "output_tokens": 6}}\n' for number in range(4)))
    done = loadgen(
        "run", "--backend", backend, "--url", url, "--dataset", dataset, "--warmup", "0", "--no-calibrate",
        "--out", tmp_path / "run",
    )  # fmt: skip
    assert done.code in (0, 4), done.err
    table = records.read(tmp_path / "run")[0].measured()
    assert table.ok.all() and (table.output_tokens == 6).all() and (table.events == 6).all()


def test_sweep(url: str, loadgen: Loadgen, tmp_path: Path) -> None:
    done = loadgen(
        "sweep", "--backend", "llamacpp", "--url", url, "--concurrencies", "1", "4", "--requests", "12",
        "--input-tokens", "32", "--output-tokens", "16", "--no-calibrate", "--out", tmp_path / "sweep",
    )  # fmt: skip
    swept = done.result()
    assert swept["complete"] and [each["state"] for each in swept["runs"]] == ["finished"] * 2
    assert {(wait["by"], wait["idle"]) for wait in swept["waits"].values()} == {("metrics", True)}


def test_search(url: str, loadgen: Loadgen, tmp_path: Path) -> None:
    """Two slots: with three requests in flight one of them waits for a whole other, and none with two."""
    alone = loadgen(
        "run", "--backend", "llamacpp", "--url", url, "--concurrency", "2", "--requests", "10", "--input-tokens", "128",
        "--output-tokens", "48", "--no-calibrate", "--out", tmp_path / "alone",
    ).result()  # fmt: skip
    limit_ms = 3 * alone["metrics"]["e2el_ms"]["max"]
    done = loadgen(
        "search", "--backend", "llamacpp", "--url", url, "--axis", "concurrency", "--slo", f"e2el_ms={limit_ms:.0f}",
        "--attain", "0.8", "--budget-minutes", "0.2", "--input-tokens", "128", "--output-tokens", "48",
        "--out", tmp_path / "search",
    )  # fmt: skip
    found = done.result()
    assert not found["emulated"] and found["probes"]
    assert found["concurrency"]["value"] is None or found["concurrency"]["value"] >= 1


def test_prompts_beyond_its_length_or_vocabulary(url: str, loadgen: Loadgen, tmp_path: Path) -> None:
    said = loadgen("run", "--backend", "llamacpp", "--url", url, "--input-tokens", LENGTH, "--out", tmp_path / "long")
    assert said.code == 2 and f"more than the server's limit of {LENGTH}" in said.err
    assert not (tmp_path / "long").exists()
    said = loadgen(
        "run", "--backend", "llamacpp", "--url", url, "--vocab-size", "3001", "--input-tokens", "64",
        "--out", tmp_path / "ids",
    )  # fmt: skip
    assert said.code == 2 and "--vocab-size is 3001 and the model has 3000 tokens; lower it" in said.err


def test_an_error_of_the_server(url: str, loadgen: Loadgen, tmp_path: Path) -> None:
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"prompt": [100000, 1], "output_tokens": 4}\n' * 4)
    done = loadgen(
        "run", "--backend", "llamacpp", "--url", url, "--dataset", dataset, "--warmup", "0", "--no-calibrate",
        "--out", tmp_path / "run",
    )  # fmt: skip
    assert done.code == 4
    report = json.loads(done.out.splitlines()[-1])
    assert report["requests"]["by_outcome"] == {"http_error": 4}
    assert "Prompt contains invalid tokens" in report["errors"][0]["message"]


def test_another_kind_of_server_is_named(url: str, loadgen: Loadgen, tmp_path: Path) -> None:
    done = loadgen("run", "--backend", "vllm", "--url", url, "--out", tmp_path / "run")
    assert done.code == 3
    assert "this is a llama.cpp server, not vLLM; use --backend llamacpp" in done.err


LAYERS = b"llama.block_count" + (4).to_bytes(4, "little")  # as GGUF has it: a key, and the kind of its value


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"no model", "the file is no GGUF, or is cut off"),
        ("half", "the file is no GGUF, or is cut off"),
        ("a layer more", "lacks what its architecture needs (blk.4.attn_norm.weight)"),
    ],
    ids=["text", "half of one", "a layer more than there is"],
)
def test_a_file_that_it_refuses(content: bytes | str, reason: str, loadgen: Loadgen, tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    if isinstance(content, str):
        write_random(catalog.from_config("tiny", CONFIG), "float16", file)
        whole = file.read_bytes()
        more = whole.replace(LAYERS + b"\4", LAYERS + b"\5")
        assert more != whole
        content = whole[: len(whole) // 2] if content == "half" else more
    file.write_bytes(content)
    done = loadgen(
        "run", "--backend", "llamacpp", "--launch", "process", "--model", file, "--requests", "1", "--no-calibrate",
        "--out", tmp_path / "run",
    )  # fmt: skip
    assert done.code == 3
    assert reason in done.err.splitlines()[-1] and "Traceback" not in done.err.splitlines()[-1]


def test_no_random_weights_are_made_of_heads_that_it_cannot_turn(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"odd has heads of 15 numbers, and llama\.cpp turns them in pairs; name"):
        write_random(catalog.from_config("odd", CONFIG | {"head_dim": 15}), "float16", tmp_path / "odd.gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("ratio", "word"), [(0.6, "kept_up"), (1.6, "fell_behind")])
def test_whether_it_kept_up(ratio: float, word: str, url: str, loadgen: Loadgen, tmp_path: Path) -> None:
    """A multiple of what its closed loop gave is offered. Others on the machine may halve or double the server's pace
    meanwhile, which the time that it took by its own clock for a request of the run tells: then once more."""
    load = ("--input-tokens", "32", "--output-tokens", "uniform:16:48", "--no-calibrate", "--url", url)
    words = ["run", "--backend", "llamacpp", *load]
    for attempt in range(4):
        out = tmp_path / str(attempt)
        closed = loadgen(*words, "--concurrency", str(SLOTS), "--requests", "200", "--out", f"{out} closed").result()
        rate_per_s = ratio * closed["throughput"]["requests_per_s"]
        report = loadgen(*words, "--arrival", f"poisson:{rate_per_s:.2f}", "--requests", "400", "--out", out).result()
        own_ms = {name: told["mean"] for name, told in report["server_requests"]["metrics"].items()}
        mean_tokens = report["tokens"]["output"] / report["requests"]["ok"]
        can_per_s = SLOTS * 1e3 / (own_ms["prefill_ms"] + own_ms["tpot_ms"] * (mean_tokens - 1))
        if rate_per_s / can_per_s < 0.75 if word == "kept_up" else rate_per_s / can_per_s > 1.2:
            break
    else:
        pytest.fail(f"the server's pace changed in each of {attempt + 1} attempts")
    said = report["steady"]["keeping_up"]
    assert said["word"] == word
    if word == "fell_behind":
        assert said["served_per_s"] == pytest.approx(can_per_s, rel=0.15)
