"""A load for an hour: whether memory and open files stay flat, and whether the last requests leave as punctually as the
first ones.

    python benchmarks/soak.py [--requests 10000000] [--duration 3600] [--rate 1000] [--note TEXT]
    python benchmarks/soak.py --duration 120 --window 20 --every 2 --out /tmp/rehearsal    # a rehearsal

The embedded server, `loadgen run` with its sidecar and `loadgen export` are processes of their own. Every 10 seconds
this script reads their memory (PSS, from /proc/PID/smaps_rollup) and open files, and scrapes both exporters. A thread
of it sleeps 10 ms at a time: how late it wakes is the lateness of the machine itself. Lags of requests are from the
records. Afterwards `loadgen report` builds the report again over all parts of the records. Linux only; writes OUT.json
and OUT.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from side_by_side.report import command as typed
from side_by_side.report import machine as this_machine

from backends import exit_codes
from loadgen.client.engine import SPARE_CONNECTIONS
from loadgen.rundir import parts, records

LOADGEN = (sys.executable, "-c", "from loadgen.cli import main; main()")
CONTROL_S = 0.01
BYTES_A_TOKEN = 8  # that may be kept
FLAT_RATIO = 1.05
ALIKE_RATIO, ALIKE_MS = 1.5, 0.1
PERCENTILES = (50, 90, 99, 99.9)
OK_TOTAL = re.compile(r'llm_dissect_requests_total\{.*outcome="ok".*\} (\S+)')


@dataclass(frozen=True)
class Sample:
    """One look at one process: monotonic seconds, and how many of its handles are sockets and how many are not."""

    at_s: float
    process: str
    pss_bytes: int
    rss_bytes: int
    files: int
    sockets: int


@dataclass(frozen=True)
class Scrape:
    """One page of an exporter; no bytes where it did not answer."""

    at_s: float
    exporter: str
    took_ms: float
    page_bytes: int
    ok_requests: float


@dataclass
class Watch:
    """What was seen from outside while the load ran."""

    samples: list[Sample] = field(default_factory=list)
    scrapes: list[Scrape] = field(default_factory=list)
    control_at_ns: array[int] = field(default_factory=lambda: array("q"))
    control_late_ns: array[int] = field(default_factory=lambda: array("q"))

    def control(self, over: threading.Event) -> None:
        while not over.is_set():
            due_ns = time.monotonic_ns() + int(CONTROL_S * 1e9)
            time.sleep(CONTROL_S)
            now_ns = time.monotonic_ns()
            self.control_at_ns.append(due_ns)
            self.control_late_ns.append(now_ns - due_ns)

    def look(self, processes: dict[str, int], exporters: dict[str, str]) -> None:
        for name, pid in processes.items():
            with contextlib.suppress(OSError, KeyError):
                self.samples.append(_sample(name, pid))
        for name, url in exporters.items():
            self.scrapes.append(_scrape(name, url))


def _sample(name: str, pid: int) -> Sample:
    proc = Path(f"/proc/{pid}")
    lines = (line.split() for line in (proc / "smaps_rollup").read_text().splitlines()[1:])
    sizes = {words[0]: int(words[1]) * 1024 for words in lines}
    kinds = [os.readlink(entry.path).startswith("socket:") for entry in os.scandir(proc / "fd")]  # noqa: PTH115
    sockets = sum(kinds)
    return Sample(time.monotonic(), name, sizes["Pss:"], sizes["Rss:"], len(kinds) - sockets, sockets)


def _scrape(name: str, url: str) -> Scrape:
    at_s, page = time.monotonic(), b""
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as reply:
        page = reply.read()
    found = OK_TOTAL.search(page.decode())
    took_ms = (time.monotonic() - at_s) * 1000
    return Scrape(at_s, name, took_ms, len(page), float(found[1]) if found else 0.0)


@contextlib.contextmanager
def _started(log: Path, *argv: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server of loadgen and the URL that it prints; ended with the block."""
    with log.open("wb") as out:
        process = subprocess.Popen([*LOADGEN, *argv], stdout=out, stderr=out)
    try:
        while not (found := re.search(r"http://[\w.:/]+", log.read_text())):
            if process.poll() is not None:
                raise SystemExit(f"{argv[0]} did not start: {log.read_text()}")
            time.sleep(0.1)
        yield process, found[0]
    finally:
        process.terminate()
        process.wait()


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def soak(chosen: argparse.Namespace, place: Path) -> tuple[Watch, Path]:
    """Runs the load and watches it; what was seen, and the run directory."""
    runs, watch, over = place / "runs", Watch(), threading.Event()
    runs.mkdir()
    control = threading.Thread(target=watch.control, args=(over,), daemon=True)
    server = ("serve", "--port", "0", "--ttft-ms", "20", "--itl-ms", "10")
    with (
        _started(place / "server.log", *server) as (serving, url),
        _started(place / "export.log", "export", "--runs", str(runs), "--port", str(chosen.port)) as (exporting, page),
        (place / "run.log").open("wb") as log,
    ):
        argv = [
            *LOADGEN, "run", "--backend", "vllm", "--url", url, "--arrival", f"poisson:{chosen.rate}",
            "--duration", str(chosen.duration), "--requests", str(chosen.requests),
            "--input-tokens", str(chosen.input_tokens), "--output-tokens", str(chosen.output_tokens),
            "--no-calibrate", "--metrics-port", str(chosen.port + 1), "--out", str(runs / "soak"),
        ]  # fmt: skip
        client = subprocess.Popen(argv, stdout=log, stderr=log)
        control.start()
        exporters = {"loadgen export": page, "--metrics-port": f"http://127.0.0.1:{chosen.port + 1}/metrics"}
        try:
            due = time.monotonic()
            while client.poll() is None:
                sidecars = dict(zip(["sidecar"], _children(client.pid), strict=False))
                watch.look({"client": client.pid, "server": serving.pid, "exporter": exporting.pid, **sidecars},
                           exporters)  # fmt: skip
                due += chosen.every
                with contextlib.suppress(subprocess.TimeoutExpired):
                    client.wait(max(0.0, due - time.monotonic()))
        finally:
            client.terminate()
            client.wait()
            over.set()
        watch.scrapes.append(_scrape("loadgen export", page))
    if client.returncode not in (exit_codes.OK, exit_codes.INVALID):
        raise SystemExit(f"the run failed: {(place / 'run.log').read_text()[-2000:]}")
    return watch, runs / "soak"


def build_report(run: Path) -> dict[str, Any]:
    """`loadgen report` in a process of its own: the requests that it counts, its time and its largest memory."""
    begun = time.monotonic()
    process = subprocess.Popen([*LOADGEN, "report", str(run)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    report = json.loads(out.splitlines()[-1])
    return {
        "exit_code": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - begun,
        "peak_rss_bytes": usage.ru_maxrss * 1024,
        "ok": report["requests"]["ok"], "failed": report["requests"]["failed"],
        "client": report["client"], "findings": [each["code"] for each in report["verdict"]["findings"]],
        "ttft_ms": report["metrics"]["ttft_ms"],
    }  # fmt: skip


def memory(samples: list[Sample], begun_s: float, ended_s: float, tokens_per_s: float) -> dict[str, Any]:
    """Of one process, from the first tenth of the load on: its memory then and at most, and what that is a token."""
    tenth_s = begun_s + (ended_s - begun_s) / 10
    later = [each for each in samples if tenth_s <= each.at_s <= ended_s]
    few = max(1, len(later) // 20)
    base = float(np.median([each.pss_bytes for each in later[:few]]))
    last = float(np.median([each.pss_bytes for each in later[-few:]]))
    peak = max(later, key=lambda each: each.pss_bytes)
    tokens = tokens_per_s * (peak.at_s - tenth_s)
    return {
        "first_tenth_pss_bytes": base, "last_pss_bytes": last, "peak_pss_bytes": peak.pss_bytes,
        "peak_ratio": peak.pss_bytes / base, "tokens_until_peak": tokens,
        "growth_bytes_a_token": max(0.0, peak.pss_bytes - base) / max(1.0, tokens),
        "files": [
            int(np.median([each.files for each in later[:few]])), max(each.files for each in later),
            int(np.median([each.files for each in later[-few:]])),
        ],
        "sockets": [later[0].sockets, max(each.sockets for each in later), later[-1].sockets],
    }  # fmt: skip


def _percentiles_ms(values_ns: NDArray[np.int64]) -> dict[str, float]:
    named = {f"p{q:g}": float(np.percentile(values_ns, q)) / 1e6 for q in PERCENTILES}
    return {"n": len(values_ns), **named, "max": float(values_ns.max()) / 1e6}


def lags(table: records.RequestTable, watch: Watch, t0_ns: int, window_s: float) -> dict[str, Any]:
    """Lags in the first and the last window of the schedule: of sends, of first tokens (behind 20 ms), of the machine's
    own timers."""
    window_ns = int(window_s * 1e9)
    last_ns = int(table.scheduled_ns.max())
    control_at = np.asarray(watch.control_at_ns) - t0_ns
    control_late = np.asarray(watch.control_late_ns)
    found: dict[str, Any] = {}
    for name, begin, end in (("first", 0, window_ns), ("last", last_ns - window_ns, last_ns)):
        rows = table.ok & (table.scheduled_ns >= begin) & (table.scheduled_ns < end)
        control = control_late[(control_at >= begin) & (control_at < end)]
        found[name] = {
            "send_lag_ms": _percentiles_ms((table.sent_ns - table.scheduled_ns)[rows]),
            "ttft_ms": _percentiles_ms((table.first_token_ns - table.sent_ns)[rows]),
            "machine_ms": _percentiles_ms(control),
        }
    return found


def most_in_flight(table: records.RequestTable) -> int:
    """At any time, of the requests that were sent and ended."""
    whole = (table.sent_ns >= 0) & (table.done_ns >= 0)
    times = np.concatenate((table.sent_ns[whole], table.done_ns[whole]))
    steps = np.repeat(np.array([1, -1], np.int8), int(whole.sum()))
    return int(np.cumsum(steps[np.argsort(times, kind="stable")], dtype=np.int64).max())


def results(watch: Watch, run: Path, window_s: float) -> dict[str, Any]:
    """All numbers, from what was seen and from the records."""
    report = build_report(run)
    t0_ns = records.read_header(run).t0_monotonic_ns
    table = records.read(run)[0].measured()
    begun_s, ended_s = t0_ns / 1e9, (t0_ns + int(table.scheduled_ns.max())) / 1e9
    tokens = int(table.output_tokens[table.ok].sum())
    by_process = {
        name: memory([each for each in watch.samples if each.process == name], begun_s, ended_s,
                     tokens / (ended_s - begun_s))
        for name in ("client", "sidecar", "server", "exporter")
    }  # fmt: skip
    during = [each for each in watch.scrapes if begun_s + 5 <= each.at_s <= ended_s]
    return {
        "requests": len(table), "ok": int(table.ok.sum()), "tokens": tokens, "seconds": ended_s - begun_s,
        "most_in_flight": most_in_flight(table), "processes": by_process,
        "lags": lags(table, watch, t0_ns, min(window_s, (ended_s - begun_s) / 2)),
        "files_of_records": {each.path.name: each.path.stat().st_size for each in parts.find(run)},
        "report": report,
        "scrapes": {
            "n": len(during), "failed": sum(not each.page_bytes for each in during),
            "median_ms": float(np.median([each.took_ms for each in during])),
            "max_ms": max(each.took_ms for each in during), "last_ok_requests": watch.scrapes[-1].ok_requests,
        },
        "samples": [
            [round(each.at_s - begun_s, 1), each.process, each.pss_bytes, each.rss_bytes, each.files, each.sockets]
            for each in watch.samples
        ],
    }  # fmt: skip


def verdicts(found: dict[str, Any]) -> dict[str, bool]:
    """What had to hold, and whether it held."""
    held: dict[str, bool] = {}
    for name, seen in found["processes"].items():
        first = FLAT_RATIO * seen["first_tenth_pss_bytes"]
        allowed = first + BYTES_A_TOKEN * seen["tokens_until_peak"]
        held[f"memory of the {name} is flat within 5 %, beyond 8 bytes a token"] = seen["peak_pss_bytes"] <= allowed
        if name != "client":  # whoever else has no reason to keep anything
            held[f"memory of the {name} is flat within 5 %"] = seen["peak_pss_bytes"] <= first
        held[f"open files of the {name} are as many at the end"] = seen["files"][0] == seen["files"][2]
    for name in ("client", "server"):
        sockets = found["processes"][name]["sockets"]
        most = found["most_in_flight"] + SPARE_CONNECTIONS + 8  # scrapes, the listening socket, the sidecar's pipes
        held[f"sockets of the {name} are no more than requests in flight"] = max(sockets) <= most
    first, last = found["lags"]["first"], found["lags"]["last"]
    for name in ("p50", "p99"):
        machine = max(0.0, last["machine_ms"][name] - first["machine_ms"][name])
        limit = ALIKE_RATIO * first["send_lag_ms"][name] + ALIKE_MS + machine
        held[f"send lag {name} of the last window is like the first's"] = last["send_lag_ms"][name] <= limit
    held["the records are in several files"] = len(found["files_of_records"]) > 1
    held["the report counts every request of all files"] = found["report"]["ok"] == found["ok"] > 0
    held["no request failed"] = found["report"]["failed"] == 0
    held["every scrape was answered"] = found["scrapes"]["failed"] == 0
    held["the exporter counts what the report counts"] = found["scrapes"]["last_ok_requests"] == found["ok"]
    return held


def markdown(found: dict[str, Any], note: str) -> str:
    """The results as a document."""
    memories = [
        f"| {name} | {seen['first_tenth_pss_bytes'] / 1e6:.1f} | {seen['peak_pss_bytes'] / 1e6:.1f} "
        f"| {seen['last_pss_bytes'] / 1e6:.1f} | {seen['growth_bytes_a_token']:.3f} "
        f"| {' / '.join(map(str, seen['files']))} | {' / '.join(map(str, seen['sockets']))} |"
        for name, seen in found["processes"].items()
    ]
    lag_rows = [
        f"| {what}, {window} | " + " | ".join(f"{found['lags'][window][key][f'p{q:g}']:.3f}" for q in PERCENTILES)
        + f" | {found['lags'][window][key]['max']:.1f} |"
        for key, what in (("send_lag_ms", "send lag"), ("ttft_ms", "ttft"), ("machine_ms", "the machine's own timers"))
        for window in ("first", "last")
    ]  # fmt: skip
    report, client = found["report"], found["report"]["client"]
    held = [f"| {what} | {'yes' if ok else '**no**'} |" for what, ok in verdicts(found).items()]
    sizes = ", ".join(f"`{name}` {size / 1e6:.0f} MB" for name, size in found["files_of_records"].items())
    return "\n".join([
        "# Soak", "",
        f"`{typed()}` on {this_machine()}. {note}".rstrip(), "",
        f"{found['requests']:,} requests in {found['seconds']:.0f} s, {found['ok']:,} ok, {found['tokens']:,} output "
        f"tokens. At most {found['most_in_flight']:,} were in flight at a time. The client used "
        f"{client['cpu_us_per_event']:.0f} us of CPU an event, {client['cpu_peak_ratio']:.2f} of a core in its busiest "
        f"second. Its event loop was late by {client['loop_lag_p50_ms']:.3f} ms (p50), {client['loop_lag_p99_ms']:.2f} "
        f"ms (p99), {client['loop_lag_max_ms']:.0f} ms (at most) over the whole run.", "",
        "| must hold | held |", "|---|---|", *held, "",
        "Memory is PSS in MB: at the first tenth of the load, at most afterwards, at the end. Growth is the peak above "
        "the first tenth, in bytes an output token. Handles: at the first tenth, at most, at the end.", "",
        "| process | first tenth | peak | end | growth | other handles | sockets |",
        "|---|---:|---:|---:|---:|---:|---:|", *memories, "",
        "Lags in ms, in the first and the last window:", "",
        "| | " + " | ".join(f"p{q:g}" for q in PERCENTILES) + " | max |", "|---|" + "---:|" * 5, *lag_rows, "",
        f"Records: {sizes}. `loadgen report` read them in {report['seconds']:.0f} s with at most "
        f"{report['peak_rss_bytes'] / 1e6:.0f} MB, {report['peak_rss_bytes'] / found['requests']:.0f} bytes a request. "
        f"Findings: {', '.join(report['findings']) or 'none'}.", "",
        f"{found['scrapes']['n']} scrapes took {found['scrapes']['median_ms']:.0f} ms (median), "
        f"{found['scrapes']['max_ms']:.0f} ms at most.", "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000_000)
    parser.add_argument("--duration", type=float, default=3600.0, help="seconds")
    parser.add_argument("--rate", type=float, default=1000.0, help="requests a second")
    parser.add_argument("--input-tokens", type=int, default=8)
    parser.add_argument("--output-tokens", type=int, default=4)
    parser.add_argument("--window", type=float, default=600.0, help="seconds at both ends whose lags are compared")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two looks")
    parser.add_argument("--port", type=int, default=19464, help="of the exporter; the run's own is the next one")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("soak"))
    parser.add_argument("--note", default="", help="a sentence for the document, such as who else used the machine")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        watch, run = soak(chosen, Path(place))
        found = results(watch, run, chosen.window)
    head = {"machine": this_machine(), "command": typed(), "note": chosen.note, "verdicts": verdicts(found)}
    chosen.out.with_suffix(".json").write_text(json.dumps({**head, **found}) + "\n")
    chosen.out.with_suffix(".md").write_text(markdown(found, chosen.note))
    for what, ok in verdicts(found).items():
        print("yes" if ok else "NO ", what)


if __name__ == "__main__":
    main()
