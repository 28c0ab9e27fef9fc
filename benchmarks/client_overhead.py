"""What load-generating clients cost and how true their numbers are, measured side by side on this machine.

    python benchmarks/client_overhead.py [--quick] [--tools loadgen,floor,vllm] [--rounds 3] [--out FILE]
        [--before CHECKOUT]

The embedded server runs on one core and stamps every event as it sends it; each client in turn runs on another core and
is watched from outside. Clients take turns within a round, in an order that turns around with every round, because the
level of a shared machine drifts: ratios are taken within a round. Medians of rounds are written to
docs/lab/client_overhead.md, every row to the JSON file beside it; where all tools run, README.md gets its table. No
number of a client's cost comes from that client. Linux with two free cores, gcc and taskset.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from side_by_side.clients import CLIENTS, FLOOR, ROOT, Client, Floats, Reported, Shape, Work, before
from side_by_side.report import NAN, Row, write_readme, write_report
from side_by_side.watch import Watched, watch

CLIENT_TIMEOUT_S = 240.0
LAG_LIMIT_MS = 6.0  # receive lag p99 up to which a rate counts as sustained
LONGEST_TOKENS = 131_072  # a prompt and a reply of a trace
ON_PACE = 0.97  # the server must deliver this part of the asked rate for it to count

A = Shape(requests=1000, output_tokens=128, ttft_ms=200, gap_ms=20)
A_SHORT = dataclasses.replace(A, output_tokens=8)  # the same start and end: the difference is the price of tokens
B = Shape(requests=1000, output_tokens=256, ttft_ms=200, gap_ms=10)
C = Shape(requests=5000, output_tokens=32, ttft_ms=5000, gap_ms=50)
PACED = Shape(requests=500, output_tokens=16, ttft_ms=50, gap_ms=10, rate_per_s=50)
POISSON = dataclasses.replace(PACED, law="poisson")
QUICK = Shape(requests=50, output_tokens=16, ttft_ms=50, gap_ms=10)
RAMP_GAPS_MS = (20.0, 14.0, 10.0, 8.0, 7.0, 6.0, 5.0, 4.0)
RAMP_TRIES = 2  # a rate is sustained when one of them held it: any single one may be disturbed

OURS = ("loadgen", "loadgen-kernel", "loadgen-aiohttp")


@dataclass(frozen=True)
class Truth:
    """The server's stamps of the requests that count: the last `n` received (a client may try the server first).

    received_ns (n,); events (n,) objects, each the send stamps of one request's events.
    """

    ids: list[str]
    received_ns: NDArray[np.int64]
    events: list[NDArray[np.int64]]

    @property
    def first_ns(self) -> NDArray[np.int64]:
        return np.array([each[0] for each in self.events])

    @property
    def gaps_ms(self) -> Floats:
        return np.concatenate([np.diff(each) for each in self.events]) / 1e6

    @property
    def window_ns(self) -> tuple[int, int]:
        """From the first request received to the last event sent."""
        return int(self.received_ns.min()), max(int(each[-1]) for each in self.events)

    @property
    def tokens(self) -> int:
        return sum(len(each) for each in self.events)


class Failed(Exception):
    """A client that gave no usable result, with the reason for the table."""


@contextlib.contextmanager
def embedded_server(shape: Shape, core: int, stamps: Path) -> Iterator[str]:
    """Runs the embedded server on one core while the block lasts; gives its URL. `stamps` is there afterwards."""
    longest = max(4096, shape.input_tokens + shape.output_tokens) if shape.trace is None else LONGEST_TOKENS
    process = subprocess.Popen(
        [
            "taskset", "-c", str(core), sys.executable, "-m", "servers", "--dialect", "vllm", "--port", "0",
            "--max-model-len", str(longest),
            "--ttft-ms", f"{shape.ttft_ms:g}", "--itl-ms", f"{shape.gap_ms:g}", "--stamps", str(stamps),
            "--exit-with-stdin",
        ],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise Failed("the embedded server did not start")
        yield str(json.loads(line)["url"])
    finally:
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def read_truth(stamps: Path, shape: Shape) -> Truth:
    with np.load(stamps) as file:
        ids, received, offsets, sent = (file[name] for name in ("request_id", "received_ns", "offsets", "sent_ns"))
    rows = [row for row in np.argsort(received, kind="stable").tolist() if offsets[row + 1] > offsets[row]]
    rows = rows[-shape.requests :]
    if not rows:
        raise Failed("no request reached the server")
    events = [sent[offsets[row] : offsets[row + 1]] for row in rows]
    return Truth([str(ids[row]) for row in rows], received[rows], events)


def errors_ms(truth: Truth, reported: Reported) -> dict[str, float]:
    """How far the client's times are from the server's stamps."""
    row_of = {id: row for row, id in enumerate(truth.ids)}
    true_ttft_ms = (truth.first_ns - truth.received_ns) / 1e6
    if reported.ids is None or any(id not in row_of for id in reported.ids):
        both = [np.percentile(values, [50, 99]) for values in (reported.ttft_ms, true_ttft_ms)]
        p50, p99 = (both[0] - both[1]).tolist()
        return {"ttft_error_p50_ms": p50, "ttft_error_p99_ms": p99}
    rows = [row_of[id] for id in reported.ids]
    p50, p99 = np.percentile(reported.ttft_ms - true_ttft_ms[rows], [50, 99]).tolist()
    errors = {"ttft_error_p50_ms": p50, "ttft_error_p99_ms": p99}
    if reported.arrivals_ns is not None:
        pairs = [(arrived, truth.events[row]) for arrived, row in zip(reported.arrivals_ns, rows, strict=True)]
        if any(len(arrived) != len(sent) for arrived, sent in pairs):
            raise Failed("it recorded another number of events than the server sent")
        lag_ms = np.concatenate([arrived - sent for arrived, sent in pairs]) / 1e6
        errors["lag_p50_ms"], errors["lag_p99_ms"] = np.percentile(lag_ms, [50, 99]).tolist()
        errors["first_late_p99_ms"] = float(np.percentile([a[0] - s[0] for a, s in pairs], 99)) / 1e6
    return errors


def pacing_ms(truth: Truth, reported: Reported, shape: Shape) -> dict[str, float]:
    """How requests kept to their due times: a grid for a constant rate, else the client's own schedule."""
    found = {}
    if reported.sent_ns is not None:
        found["own_spread_ms"] = float(np.ptp(reported.sent_ns)) / 1e6
    if shape.rate_per_s is None:
        return found
    due_ns = np.arange(len(truth.ids)) / shape.rate_per_s * 1e9
    if reported.send_lag_ms is not None and reported.sent_ns is not None:
        found["own_send_lag_p99_ms"] = float(np.percentile(reported.send_lag_ms, 99))
        found["own_send_lag_max_ms"] = float(reported.send_lag_ms.max())
        if shape.law != "constant":
            due_ns = np.sort(reported.sent_ns - reported.send_lag_ms * 1e6)
    late_ns = truth.received_ns - truth.received_ns[0] - (due_ns - due_ns[0])
    deviation_ms = np.abs(late_ns - np.median(late_ns)) / 1e6
    found["deviation_p50_ms"], found["deviation_p99_ms"] = np.percentile(deviation_ms, [50, 99]).tolist()
    return found


def judge(watched: Watched, truth: Truth, reported: Reported, shape: Shape) -> Row:
    first_ns, last_ns = truth.window_ns
    gaps_ms = reported.gaps_ms
    streamed = [each for each in truth.events if len(each) > 1]
    paces = [(len(each) - 1) * shape.gap_ms * 1e6 / (each[-1] - each[0]) for each in streamed]
    return Row(
        cpu_us=watched.cpu_between_ns(first_ns, last_ns) / 1e3 / truth.tokens,
        life_cpu_us=watched.life_cpu_ns / 1e3 / truth.tokens,
        others_percent=watched.others_ratio(first_ns, last_ns) * 100,
        rss_mb=watched.peak_rss_bytes(first_ns, last_ns) / 1e6,
        life_rss_mb=watched.peak_rss_bytes() / 1e6,
        start_s=(first_ns - watched.started_ns) / 1e9,
        makespan_s=reported.duration_s,
        spread_ms=float(np.ptp(truth.received_ns)) / 1e6,
        gap_p99_ms=NAN if gaps_ms is None else float(np.percentile(gaps_ms, 99)),
        true_gap_p99_ms=float(np.percentile(truth.gaps_ms, 99)),
        short_gaps_percent=NAN if gaps_ms is None else float((gaps_ms < 1).mean()) * 100,
        true_short_gaps_percent=float((truth.gaps_ms < 1).mean()) * 100,
        server_pace=float(np.median(paces)),
        **errors_ms(truth, reported),
        **pacing_ms(truth, reported, shape),
    )


@dataclass(frozen=True)
class Bench:
    """Where things run: one core for the server and this watcher, one for the client."""

    server_core: int
    client_core: int
    tokenizer: Path

    def run(self, client: Client, shape: Shape) -> Row:
        """One client, once. Raises Failed."""
        with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
            directory = Path(scratch)
            stamps, log, results = directory / "stamps.npz", directory / "log", directory / "client"
            results.mkdir()
            with embedded_server(shape, self.server_core, stamps) as url:
                work = Work(shape, url, model_name(url), self.tokenizer, results)
                watched = watch(client.command(work), self.client_core, log, client.env, CLIENT_TIMEOUT_S)
            # 4: loadgen calls its own numbers invalid; they are compared all the same
            if watched.exit_code not in (0, 4):
                tail = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
                raise Failed(f"exit code {watched.exit_code}: {tail[0][:160]}")
            truth = read_truth(stamps, shape)
            if truth.tokens != shape.tokens:
                raise Failed(f"the server sent it {truth.tokens} of {shape.tokens} tokens")
            try:
                return judge(watched, truth, client.read(results), shape)
            except (OSError, KeyError, ValueError, IndexError) as error:
                raise Failed(f"its results cannot be read: {type(error).__name__} {error}") from error

    def round(self, clients: Sequence[Client], shape: Shape, name: str) -> dict[str, Row | str]:
        """Every client once; a string is the reason why there is no row."""
        rows: dict[str, Row | str] = {}
        for client in clients:
            try:
                rows[client.name] = row = self.run(client, shape)
                outcome = f"{row.cpu_us:.2f} us/token, TTFT error p99 {row.ttft_error_p99_ms:.2f} ms"
            except Failed as failure:
                rows[client.name] = outcome = str(failure)
            print(f"{name} {client.name}: {outcome}", flush=True)
        return rows

    def marginal_round(self, clients: Sequence[Client], shape: Shape, short: Shape, name: str) -> dict[str, Row | str]:
        """A round that also prices a token alone: life CPU of `shape` minus that of `short`, per token more."""
        rows = self.round(clients, shape, name)
        base = self.round([client for client in clients if isinstance(rows[client.name], Row)], short, f"{name}, short")
        for key, less in base.items():
            row = rows[key]
            if isinstance(row, Row) and isinstance(less, Row):
                more_us = row.life_cpu_us * shape.tokens - less.life_cpu_us * short.tokens
                rows[key] = dataclasses.replace(row, marginal_cpu_us=more_us / (shape.tokens - short.tokens))
        return rows

    def ceiling(self, client: Client) -> list[tuple[Shape, Row]]:
        """Rates rising until the client's receive lag passes the limit or the server cannot deliver the rate."""
        steps: list[tuple[Shape, Row]] = []
        for gap_ms in RAMP_GAPS_MS:
            shape = dataclasses.replace(A, gap_ms=gap_ms, output_tokens=int(2000 / gap_ms))
            tries: list[Row] = []
            for _ in range(RAMP_TRIES):
                row = self.round([client], shape, f"{shape.events_per_s:,.0f} events/s")[client.name]
                if isinstance(row, Row):
                    tries.append(row)
                    if held(row):
                        break
            if not tries:
                break
            steps.append((shape, min(tries, key=lambda row: (not held(row), row.lag_p99_ms))))
            if not held(steps[-1][1]):
                break
        return steps


def held(row: Row) -> bool:
    """The client kept up with the rate, and the server delivered it."""
    return row.lag_p99_ms <= LAG_LIMIT_MS and row.server_pace >= ON_PACE


def model_name(url: str) -> str:
    with urllib.request.urlopen(f"{url.rstrip('/')}/v1/models", timeout=10) as reply:
        return str(json.load(reply)["data"][0]["id"])


def prepare() -> Bench:
    """Compiles the floor, trains the tiny tokenizer, picks the cores. Exits when it cannot."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2 or not shutil.which("taskset") or not shutil.which("gcc"):
        sys.exit("client_overhead.py needs Linux with two cores, taskset and gcc; install what is missing.")
    os.sched_setaffinity(0, {cores[0]})
    FLOOR.parent.mkdir(exist_ok=True)
    subprocess.run(["gcc", "-O2", "-o", str(FLOOR), str(ROOT / "benchmarks/epoll_client.c")], check=True)
    tokenizer = ROOT / "build/tiny_model"
    if not (tokenizer / "config.json").exists():
        subprocess.run([sys.executable, str(ROOT / "tests/vllm/tiny_model.py"), str(tokenizer)], check=True)
    return Bench(cores[0], cores[-1], tokenizer)


def main() -> None:
    names = [client.name for client in CLIENTS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="loadgen and the floor, one small round: seconds")
    parser.add_argument("--tools", default="", help=f"comma-separated, of: {', '.join(names)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/lab/client_overhead.md")
    parser.add_argument("--before", type=Path, help="a checkout whose loadgen takes turns with this one's, as `before`")
    options = parser.parse_args()
    tools = options.tools.split(",") if options.tools else (["floor", "loadgen"] if options.quick else names)
    if unknown := set(tools) - set(names):
        parser.error(f"unknown tool {', '.join(sorted(unknown))}; known are {', '.join(names)}")

    bench = prepare()
    chosen = [client for client in CLIENTS if client.name in tools]
    chosen += [] if options.before is None else [before(options.before)]
    there = [client for client in chosen if client.needs.exists()]
    missing = {each.name: "not installed (benchmarks/peers.sh says why)" for each in chosen if each not in there}
    ours = [client for client in there if client.name in OURS]
    leanest = [client for client in there if client.name in ("floor", "loadgen", "loadgen-kernel", "before")]
    many = [client for client in there if client in leanest or client.name in ("sglang", "vllm")]
    rounds: dict[str, list[dict[str, Row | str]]] = {}
    plan: list[tuple[str, Shape, Sequence[Client]]]
    plan = [("quick", QUICK, there)] if options.quick else [("A", A, there), ("B", B, leanest), ("C", C, many)]
    bench.round(there, QUICK, "not counted")  # each keeps its bytecode, as where it was used before
    for number in range(1 if options.quick else options.rounds):
        for name, shape, clients in plan:
            label = f"round {number + 1} {name}"
            turns = clients[::-1] if number % 2 else clients  # whoever comes second meets a warmer machine
            if name == "A":
                found = bench.marginal_round(turns, shape, A_SHORT, label)
            else:
                found = bench.round(turns, shape, label)
            rounds.setdefault(name, []).append({**found, **(missing if clients is there else {})})
    ceiling = []
    if not options.quick:
        rounds["paced"] = [bench.round([client for client in there if client.rates], PACED, "constant 50/s")]
        rounds["poisson"] = [bench.round(ours[:1], POISSON, "Poisson 50/s")]
        ceiling = bench.ceiling(ours[0]) if ours else []
    shapes = {"A": A, "B": B, "C": C, "paced": PACED, "poisson": POISSON, "quick": QUICK}
    write_report(options.out, rounds, shapes, ceiling, LAG_LIMIT_MS, ON_PACE)
    print(f"wrote {options.out}")
    if "A" in rounds and not options.tools:
        write_readme(ROOT / "README.md", rounds["A"])
        print("wrote the table of clients in README.md")


if __name__ == "__main__":
    main()
