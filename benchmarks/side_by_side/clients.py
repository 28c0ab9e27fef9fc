"""The clients that are compared: how each is called, and how its own results are read.

`CLIENTS` is the table. Every client gets the same work (a burst or a constant rate of `Shape`) and is asked for the
cheapest way of doing it that it offers: token ids where it can send them, no re-tokenizing of replies where that can be
turned off, no progress display. What it reports is read from the files it writes; what it does not report is None.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.rundir import records

ROOT = Path(__file__).resolve().parents[2]
VLLM_PYTHON = ROOT / ".venv-vllm/bin/python"
PEERS = ROOT / ".venv-peers"
FLOOR = ROOT / "build/epoll_client"

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Shape:
    """What is asked of a client and of the server. `rate_per_s` None is a burst; TTFT and gap are the server's.

    `law` (constant or poisson) is for a client that offers both; the others send at a constant rate. `trace`: a file in
    Mooncake's format, with `requests` lines, that loadgen plays instead; lengths and rate are then its means.
    `concurrency`: of vllm and guidellm, so many at a time in place of a burst.
    """

    requests: int
    output_tokens: int
    ttft_ms: float
    gap_ms: float
    rate_per_s: float | None = None
    law: str = "constant"
    input_tokens: int = 512
    trace: str | None = None
    concurrency: int | None = None

    @property
    def tokens(self) -> int:
        if self.trace is None:
            return self.requests * self.output_tokens
        return sum(json.loads(line)["output_length"] for line in Path(self.trace).read_text().splitlines())

    @property
    def events_per_s(self) -> float:
        return self.requests / self.gap_ms * 1000


@dataclass(frozen=True)
class Work:
    """One call of a client: `directory` is its own, `tokenizer` a model directory that fits the server."""

    shape: Shape
    url: str
    model: str
    tokenizer: Path
    directory: Path

    @property
    def port(self) -> str:
        return self.url.rpartition(":")[2].strip("/")


@dataclass(frozen=True)
class Reported:
    """What a client says. Arrays are over requests (n,) but for `gaps_ms` (all gaps, flat).

    ids: the X-Request-Id that the server saw. sent_ns and arrivals_ns (one array a request): monotonic clock.
    send_lag_ms: how late it sent by its own account. tpot_ms: likewise its time per token after the first, of each
    request or of the median one.
    """

    ttft_ms: Floats
    gaps_ms: Floats | None
    duration_s: float
    ids: list[str] | None = None
    sent_ns: NDArray[np.int64] | None = None
    arrivals_ns: list[NDArray[np.int64]] | None = None
    send_lag_ms: Floats | None = None
    tpot_ms: Floats | None = None


@dataclass(frozen=True)
class Client:
    """`name` on the command line, `title` in the table. `needs` must exist; `rates`: it can send at a constant rate."""

    name: str
    title: str
    needs: Path
    command: Callable[[Work], list[str]]
    read: Callable[[Path], Reported]
    rates: bool = True
    env: Mapping[str, str] = field(default_factory=dict)


def _flat(lists: Any, scale: float = 1.0) -> Floats:
    return np.concatenate([np.asarray(each, dtype=np.float64) for each in lists]) * scale


# --- ours -------------------------------------------------------------------------------------------------------------


def _loadgen(*extra: str, program: Path = ROOT / ".venv/bin/loadgen") -> Callable[[Work], list[str]]:
    def command(work: Work) -> list[str]:
        shape = work.shape
        arrival = [] if shape.rate_per_s is None else ["--arrival", f"{shape.law}:{shape.rate_per_s:g}"]
        drawn = [
            "--requests", str(shape.requests), "--input-tokens", str(shape.input_tokens),
            "--output-tokens", str(shape.output_tokens), *arrival,
        ]  # fmt: skip
        load = drawn if shape.trace is None else ["--trace", shape.trace]
        return [
            str(program), "run", "--backend", "vllm", "--url", work.url, *load, "--no-calibrate", "--warmup", "0",
            "--no-server-metrics",  # other clients do not look at the server or its GPUs either
            "--out", str(work.directory / "run"), *extra,
        ]  # fmt: skip

    return command


def read_loadgen(directory: Path) -> Reported:
    run = directory / "run"
    header = records.read_header(run)
    table = records.read(run)[0]
    t0_ns = header.t0_monotonic_ns
    arrivals = [t0_ns + table.arrivals_ns(row) for row in range(len(table))]
    return Reported(
        ttft_ms=(table.first_token_ns - table.sent_ns) / 1e6,
        gaps_ms=table.itl_us / 1e3,
        duration_s=float(table.done_ns.max() - table.sent_ns.min()) / 1e9,
        ids=[f"{header.run_id}-{id}" for id in table.id.tolist()],
        sent_ns=t0_ns + table.sent_ns,
        arrivals_ns=arrivals,
        send_lag_ms=(table.sent_ns - table.scheduled_ns) / 1e6,
    )


# --- the floor --------------------------------------------------------------------------------------------------------


def _floor(work: Work) -> list[str]:
    shape = work.shape
    counts = [str(n) for n in (shape.requests, shape.input_tokens, shape.output_tokens)]
    return [str(FLOOR), work.port, *counts, work.model, str(work.directory / "stamps.bin")]


def _read_floor(directory: Path) -> Reported:
    words = np.fromfile(directory / "stamps.bin", dtype=np.int64)
    sent, arrivals, at = [], [], 0
    while at < len(words):
        n = int(words[at + 1])
        sent.append(int(words[at]))
        arrivals.append(words[at + 2 : at + 2 + n])
        at += 2 + n
    sent_ns = np.array(sent)
    return Reported(
        ttft_ms=np.array([each[0] for each in arrivals] - sent_ns) / 1e6,
        gaps_ms=_flat([np.diff(each) for each in arrivals], 1e-6),
        duration_s=(max(int(each[-1]) for each in arrivals) - min(sent)) / 1e9,
        ids=[f"floor-{row}" for row in range(len(sent))],
        sent_ns=sent_ns,
        arrivals_ns=arrivals,
    )


# --- other tools ------------------------------------------------------------------------------------------------------

# `vllm bench serve` looks for a distribution called vllm, which the CPU build is not: its module is called instead.
_VLLM_BENCH = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "p = argparse.ArgumentParser(); add_cli_args(p); main(p.parse_args())"
)
# The package's __init__ needs torch and a GPU stack; its Rust client is one extension module that needs nothing.
_SGLANG_RUST = (
    "import glob, importlib.util as u, sys, sysconfig; "
    "path = glob.glob(sysconfig.get_path('purelib') + '/sglang/srt/rust_extensions/_bench*.so')[0]; "
    "spec = u.spec_from_file_location('sglang.srt.rust_extensions._bench', path); "
    "module = u.module_from_spec(spec); spec.loader.exec_module(module); "
    "module.run_argv(['sglang-bench', *sys.argv[1:]])"
)


def _vllm(work: Work) -> list[str]:
    shape = work.shape
    rate = [] if shape.rate_per_s is None else ["--request-rate", f"{shape.rate_per_s:g}", "--burstiness", "inf"]
    at_once = [] if shape.concurrency is None else ["--max-concurrency", str(shape.concurrency)]
    return [
        str(VLLM_PYTHON), "-c", _VLLM_BENCH, "--backend", "openai", "--base-url", work.url,
        "--endpoint", "/v1/completions", "--model", work.model, "--tokenizer", str(work.tokenizer),
        "--dataset-name", "random", "--random-input-len", str(shape.input_tokens),
        "--random-output-len", str(shape.output_tokens), "--num-prompts", str(shape.requests),
        "--ignore-eos", "--temperature", "0", "--disable-tqdm", "--save-result", "--save-detailed",
        "--result-dir", str(work.directory), "--result-filename", "result.json", *rate, *at_once,
    ]  # fmt: skip


def _read_vllm(directory: Path) -> Reported:
    result = json.loads((directory / "result.json").read_text())
    sent_ns = (np.array(result["start_times"]) * 1e9).astype(np.int64)  # perf_counter is the monotonic clock on Linux
    return Reported(
        np.array(result["ttfts"]) * 1e3, _flat(result["itls"], 1e3), result["duration"], sent_ns=sent_ns,
        tpot_ms=np.array([result["median_tpot_ms"]]),
    )  # fmt: skip


def _sglang(work: Work) -> list[str]:
    shape = work.shape
    return [
        str(PEERS / "sglang/bin/python"), "-c", _SGLANG_RUST, "--backend", "vllm", "--base-url", work.url,
        "--model", work.model, "--dataset-name", "random-ids", "--tokenize-prompt", "--vocab-size", "4000",
        "--disable-retokenize", "--random-input-len", str(shape.input_tokens),
        "--random-output-len", str(shape.output_tokens), "--random-range-ratio", "1",
        "--num-prompts", str(shape.requests), "--warmup-requests", "0", "--disable-tqdm",
        "--output-file", str(work.directory / "result.jsonl"), "--output-details",
    ]  # fmt: skip


def _read_sglang(directory: Path) -> Reported:
    result = json.loads((directory / "result.jsonl").read_text().strip().splitlines()[-1])
    return Reported(np.array(result["ttfts"]) * 1e3, _flat(result["itls"], 1e3), result["duration"])


def _aiperf(work: Work) -> list[str]:
    shape = work.shape
    load = ["--concurrency", str(shape.requests)]
    if shape.rate_per_s is not None:
        load = ["--request-rate", f"{shape.rate_per_s:g}", "--request-rate-mode", "constant"]
    return [
        str(PEERS / "aiperf/bin/aiperf"), "profile", "--model", work.model, "--tokenizer", str(work.tokenizer),
        "--url", work.url, "--endpoint-type", "completions", "--streaming", "--request-count", str(shape.requests),
        "--synthetic-input-tokens-mean", str(shape.input_tokens), "--output-tokens-mean", str(shape.output_tokens),
        "--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--ui", "none",
        "--export-level", "records", "--artifact-dir", str(work.directory), *load,
    ]  # fmt: skip


def _read_aiperf(directory: Path) -> Reported:
    rows = [json.loads(line) for line in (directory / "profile_export.jsonl").read_text().splitlines()]
    metrics = [row["metrics"] for row in rows]
    begun = [row["metadata"]["request_start_ns"] for row in rows]
    ended = [row["metadata"]["request_end_ns"] for row in rows]
    return Reported(
        ttft_ms=np.array([each["time_to_first_token"]["value"] for each in metrics]),
        gaps_ms=_flat([each["inter_chunk_latency"]["value"] for each in metrics]),
        duration_s=(max(ended) - min(begun)) / 1e9,
        ids=[row["metadata"]["x_request_id"] for row in rows],
    )


def _guidellm(work: Work) -> list[str]:
    shape = work.shape
    profile = f"kind=throughput,max_concurrency={shape.requests}"
    if shape.rate_per_s is not None:
        profile = f"kind=constant,rate={shape.rate_per_s:g}"
    if shape.concurrency is not None:
        profile = f"kind=concurrent,streams={shape.concurrency}"
    return [
        str(PEERS / "guidellm/bin/guidellm"), "run",
        "--backend", f"kind=openai_http,target={work.url},model={work.model},request_format=/v1/completions",
        "--profile", profile, "--constraint", f"kind=max_requests,count={shape.requests}",
        "--tokenizer", f"kind=huggingface_auto,model={work.tokenizer}",
        "--data", f"kind=synthetic_text,prompt_tokens={shape.input_tokens},output_tokens={shape.output_tokens}",
        "--output", f"kind=json,path={work.directory / 'result.json'}", "--disable-progress",
    ]  # fmt: skip


def _read_guidellm(directory: Path) -> Reported:
    benchmark = json.loads((directory / "result.json").read_text())["benchmarks"][0]
    rows = benchmark["requests"]["successful"]
    ttft_ms, tpot_ms = (
        np.array([row[name] for row in rows]) for name in ("time_to_first_token_ms", "inter_token_latency_ms")
    )
    return Reported(ttft_ms, None, benchmark["duration"], tpot_ms=tpot_ms)


_OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1"}
_OURS = ROOT / ".venv/bin/loadgen"


def before(checkout: Path) -> Client:
    """The loadgen of another checkout, such as an earlier commit's, with an environment of its own in .venv."""
    program = checkout.absolute() / ".venv/bin/loadgen"
    return Client("before", "loadgen of --before", program, _loadgen(program=program), read_loadgen)


def _peer(name: str) -> Path:
    return PEERS / name / "installed"  # written by peers.sh when the installation is complete


CLIENTS = (
    Client("floor", "C epoll, no JSON (the floor)", FLOOR, _floor, _read_floor, rates=False),
    Client("loadgen", "**loadgen**", _OURS, _loadgen(), read_loadgen),
    Client("loadgen-kernel", "loadgen --kernel-timestamps", _OURS, _loadgen("--kernel-timestamps"), read_loadgen),
    Client("loadgen-aiohttp", "loadgen --transport aiohttp", _OURS, _loadgen("--transport", "aiohttp"), read_loadgen),
    Client("sglang", "SGLang bench 0.5.23, Rust client", _peer("sglang"), _sglang, _read_sglang, rates=False),
    Client("vllm", "vLLM bench serve 0.32", ROOT / ".venv-vllm/installed", _vllm, _read_vllm, env=_OFFLINE),
    Client("aiperf", "aiperf 0.13", _peer("aiperf"), _aiperf, _read_aiperf),
    Client("guidellm", "guidellm 0.8.1", _peer("guidellm"), _guidellm, _read_guidellm, env=_OFFLINE),
)
