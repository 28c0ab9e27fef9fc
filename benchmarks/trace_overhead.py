"""What a trace costs loadgen, beside a load of fixed lengths in the same run; and how soon a large trace starts.

    python benchmarks/trace_overhead.py [--rounds 3] [--requests 600] [--start-requests 100000] [--out FILE]

Prompts of a trace are built while streams run, some hundreds ahead: this must make no request late and no event. Both
loads have the same number of requests, the same rate, and the same mean lengths; they take turns, and ratios are taken
within a round. Traces are made by make_trace.py. Server, client, watcher and words are those of client_overhead.py,
whose needs this has too. Writes docs/lab/trace_overhead.md and, with every row, a JSON file
beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from client_overhead import Bench, Failed, embedded_server, prepare
from side_by_side.clients import CLIENTS, ROOT, Shape
from side_by_side.report import Row
from side_by_side.report import command as typed
from side_by_side.report import machine as this_machine
from side_by_side.watch import watch

from loadgen.rundir import records

RATE_PER_S = 40.0
REPLY_TOKENS = 100  # at the median; prompts are as long as make_trace.py makes them: 7000 tokens at the median
TTFT_MS, GAP_MS = 200.0, 20.0
PLAYED_S = 10  # from the start of a process that plays a large trace to its Ctrl-C
START_LIMIT_S, RSS_LIMIT_MB = 5.0, 300.0

Cost = tuple[str, Callable[[Row], float]]
COSTS: tuple[Cost, ...] = (
    ("CPU, window us/token", lambda row: row.cpu_us),
    ("whole life us/token", lambda row: row.life_cpu_us),
    ("send lag p99 ms", lambda row: row.own_send_lag_p99_ms),
    ("send lag max ms", lambda row: row.own_send_lag_max_ms),
    ("event late p50 ms", lambda row: row.lag_p50_ms),
    ("event late p99 ms", lambda row: row.lag_p99_ms),
    ("RSS life MB", lambda row: row.life_rss_mb),
    ("others on its core %", lambda row: row.others_percent),
)


@dataclass(frozen=True)
class Start:
    """How a run of a large trace began. start_s: from the process's start to t = 0; memory is of its whole tree."""

    lines: int
    start_s: float
    rss_before_mb: float
    rss_life_mb: float


def make_trace(path: Path, requests: int, *options: str) -> list[dict[str, int]]:
    command = [sys.executable, str(ROOT / "benchmarks/make_trace.py"), "--requests", str(requests), "--out", str(path)]
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in path.read_text().splitlines()]


def shapes(path: Path, requests: int) -> tuple[Shape, Shape]:
    """The load of fixed lengths with Poisson arrivals, and the trace."""
    options = ["--rate", str(RATE_PER_S), "--output-tokens", str(REPLY_TOKENS)]
    lines = make_trace(path, requests, *options)
    fixed = Shape(
        requests=requests,
        output_tokens=round(float(np.mean([line["output_length"] for line in lines]))),
        ttft_ms=TTFT_MS,
        gap_ms=GAP_MS,
        rate_per_s=RATE_PER_S,
        law="poisson",
        input_tokens=round(float(np.mean([line["input_length"] for line in lines]))),
    )
    return fixed, dataclasses.replace(fixed, law="trace", trace=str(path))


def started(bench: Bench, directory: Path, requests: int) -> Start:
    """Plays a large trace for some seconds. There is no warm-up, whose time would be the server's."""
    trace, out = directory / "large.jsonl", directory / "run"
    lines = len(make_trace(trace, requests))
    shape = Shape(requests=requests, output_tokens=1, ttft_ms=TTFT_MS, gap_ms=GAP_MS, trace=str(trace))
    with embedded_server(shape, bench.server_core, directory / "stamps.npz") as url:
        command = [
            "timeout", "--foreground", "--signal", "INT", str(PLAYED_S), str(ROOT / ".venv/bin/loadgen"), "run",
            "--backend", "vllm", "--url", url, "--trace", str(trace), "--no-calibrate", "--warmup", "0",
            "--no-server-metrics", "--out", str(out),
        ]  # fmt: skip
        watched = watch(command, bench.client_core, directory / "log", {}, 120)
    try:
        t0_ns = records.read_header(out).t0_monotonic_ns
    except records.RecordsError as error:
        raise Failed(f"it had not started after {PLAYED_S} s: {error}") from error
    return Start(
        lines=lines,
        start_s=(t0_ns - watched.started_ns) / 1e9,
        rss_before_mb=watched.peak_rss_bytes(0, t0_ns) / 1e6,
        rss_life_mb=watched.peak_rss_bytes() / 1e6,
    )


def text(fixed: Shape, trace: Shape, rounds: Sequence[tuple[Row, Row]], starts: Sequence[Start]) -> str:
    lines = []
    for name, cost in COSTS:
        pairs = [(cost(first), cost(second)) for first, second in rounds]
        ratio = float(np.median([second / first if first else np.nan for first, second in pairs]))
        medians = np.median(pairs, axis=0)
        shown = "-" if np.isnan(ratio) else f"{ratio:.2f}"
        lines.append(f"| {name} | {medians[0]:.2f} | {medians[1]:.2f} | {shown} |")
    start_s = float(np.median([start.start_s for start in starts]))
    rss_mb = max(start.rss_life_mb for start in starts)
    held = "held" if start_s < START_LIMIT_S and rss_mb < RSS_LIMIT_MB else "NOT held"
    return "\n".join(
        [
            "# What a trace costs loadgen",
            "",
            f"Measured {this_machine()}, by `{typed()}`.",
            "Raw results: trace_overhead.json. Words as in [client_overhead.md](client_overhead.md).",
            "",
            f"## A trace beside fixed lengths: {fixed.requests} requests, {RATE_PER_S:g} a second, prompts of "
            f"{fixed.input_tokens:,} and replies of {fixed.output_tokens} tokens in the mean",
            "",
            f"{len(rounds)} round(s), {trace.tokens:,} tokens of the trace and {fixed.tokens:,} of fixed length; "
            f"first token after {TTFT_MS:g} ms, then every {GAP_MS:g} ms.",
            "The CPU time of building prompts is in that of the tokens.",
            "",
            "| median of the rounds | fixed | trace | trace / fixed |",
            "|---|---:|---:|---:|",
            *lines,
            "",
            f"## The start of a trace of {starts[0].lines:,} lines",
            "",
            f"From the process's start to t = 0: **{start_s:.2f} s**; most memory, of the process tree: {rss_mb:.0f} "
            f"MB. The limits of {START_LIMIT_S:g} s and {RSS_LIMIT_MB:g} MB were {held}. No warm-up, whose time is the "
            f"server's; no calibration. Stopped {PLAYED_S} s after its start.",
            "",
            "| try | start s | RSS before t = 0, MB | RSS life MB |",
            "|---|---:|---:|---:|",
            *(
                f"| {number} | {start.start_s:.2f} | {start.rss_before_mb:.0f} | {start.rss_life_mb:.0f} |"
                for number, start in enumerate(starts, 1)
            ),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--start-requests", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/lab/trace_overhead.md")
    options = parser.parse_args()

    bench = prepare()
    ours = next(client for client in CLIENTS if client.name == "loadgen")
    rounds: list[tuple[Row, Row]] = []
    starts: list[Start] = []
    with tempfile.TemporaryDirectory(prefix="trace-bench-") as scratch:
        fixed, trace = shapes(Path(scratch) / "trace.jsonl", options.requests)
        for number in range(options.rounds):
            directory = Path(scratch) / str(number)
            directory.mkdir()
            try:
                starts.append(started(bench, directory, options.start_requests))
                print(
                    f"round {number + 1} start: {starts[-1].start_s:.2f} s, {starts[-1].rss_life_mb:.0f} MB", flush=True
                )
                rounds.append((bench.run(ours, fixed), bench.run(ours, trace)))
            except Failed as failure:
                sys.exit(f"trace_overhead.py: {failure}")
            costs = ", ".join(f"{name} {cost(rounds[-1][0]):.2f} / {cost(rounds[-1][1]):.2f}" for name, cost in COSTS)
            print(f"round {number + 1} fixed / trace: {costs}", flush=True)
        options.out.write_text(text(fixed, trace, rounds, starts))
    found = {
        "machine": this_machine(),
        "command": typed(),
        "shape": dataclasses.asdict(fixed),
        "rounds": [{"fixed": dataclasses.asdict(a), "trace": dataclasses.asdict(b)} for a, b in rounds],
        "starts": [dataclasses.asdict(start) for start in starts],
    }
    text_json = json.dumps(found, indent=1).replace("NaN", "null")
    options.out.with_suffix(".json").write_text(text_json + "\n")
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
