"""Snapshots of serving runs: totals against the report's own arithmetic, files that grow, the process beside a run."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from loadgen import rundir
from loadgen.client.engine import Snapshot as Seen
from loadgen.event_loop import run_loop
from loadgen.monitor.snapshots import Live, Recorder, watching
from loadgen.monitor.totals import BOUNDS_S
from loadgen.report import metrics
from loadgen.run import _both
from loadgen.rundir import Family, Manifest, Snapshot, records
from loadgen.rundir.outcomes import OUTCOMES
from loadgen.rundir.records import ClientFacts, Record, RecordsFile

FACTS: dict[str, Any] = dict.fromkeys(ClientFacts.__struct_fields__, 0) | {"state": "complete"}


def manifest(directory: Path, run_id: str = "r1") -> Manifest:
    said = Manifest(
        run_id=run_id, version="1", started_unix_s=0.0, argv=[], config={}, backend="vllm", model="m", url="http://h",
        emulated=True, requests_planned=50, arrival="burst", machine=rundir.this_machine(),
    )  # fmt: skip
    rundir.write_manifest(directory, said)
    return said


def record(number: int, **more: Any) -> Record:
    rng = np.random.default_rng(number)
    gaps = rng.integers(500, 90_000, 9).tolist()
    sent = 1_000_000 * number
    first = sent + int(rng.integers(5_000_000, 3_000_000_000))
    last = first + sum(gaps) * 1000
    usual: dict[str, Any] = {
        "id": number, "scheduled_ns": sent - 20_000, "sent_ns": sent, "first_token_ns": first, "last_token_ns": last,
        "done_ns": last + 5000, "prompt_tokens": 512, "output_tokens": 10, "asked_prompt_tokens": 512,
        "asked_tokens": 10, "events": 10, "outcome": "ok", "itl_us": gaps,
    }  # fmt: skip
    return Record(**{**usual, **more})


def write(path: Path, found: list[Record], close: bool = True) -> None:
    file = RecordsFile(path, "r1", "1", 0)
    for each in found:
        file.write(each)
    if close:
        file.close(ClientFacts(**FACTS))


def read(directory: Path) -> Snapshot:
    return msgspec.json.decode((directory / rundir.SNAPSHOT_FILE).read_bytes(), type=Snapshot)


def family(snapshot: Snapshot, name: str) -> Family:
    return next(each for each in snapshot.families if each.name == name)


def value(snapshot: Snapshot, name: str, **labels: str) -> float:
    return next(sample.value for sample in family(snapshot, name).samples if sample.labels == labels)


def quantile(snapshot: Snapshot, name: str, q: float) -> tuple[float, float]:
    """The bucket that the quantile lies in, its bounds."""
    (histogram,) = family(snapshot, name).histograms
    place = int(np.searchsorted(np.cumsum(histogram.counts), q * sum(histogram.counts)))
    bounds = [0.0, *histogram.bounds, float("inf")]
    return bounds[place], bounds[place + 1]


def test_totals_and_quantiles_are_those_of_the_report(tmp_path: Path) -> None:
    found = [record(number) for number in range(1, 301)]
    found += [
        record(301, outcome="timeout", done_ns=None),
        record(302, phase="warmup"),
        record(303, outcome="refused", sent_ns=None),
    ]
    write(tmp_path / "requests.jsonl", found)
    Recorder(tmp_path, manifest(tmp_path)).write(over=True)
    snapshot, table = read(tmp_path), records.read(tmp_path)[0].measured()
    assert snapshot.state == "finished" and snapshot.program == "loadgen"
    assert value(snapshot, "bench_requests", outcome="ok") == 300 == int(table.ok.sum())
    assert (
        value(snapshot, "bench_requests", outcome="timeout")
        == value(snapshot, "bench_requests", outcome="refused")
        == 1
    )
    assert {sample.labels["outcome"] for sample in family(snapshot, "bench_requests").samples} == set(OUTCOMES)
    assert value(snapshot, "bench_output_tokens") == 3000 and value(snapshot, "bench_prompt_tokens") == 300 * 512
    duration_s = metrics.duration_s(table, metrics.CONVENTIONS["loadgen"])
    assert value(snapshot, "bench_measured_seconds") == pytest.approx(duration_s)
    for name, metric in {
        "bench_time_to_first_token_seconds": "ttft_ms",
        "bench_time_per_output_token_seconds": "tpot_ms",
        "bench_inter_token_latency_seconds": "itl_ms",
        "bench_end_to_end_latency_seconds": "e2el_ms",
        "bench_send_lag_seconds": "send_lag_ms",
    }.items():
        sample = metrics.sample(table, metric, metrics.CONVENTIONS["loadgen"])
        (histogram,) = family(snapshot, name).histograms
        assert sum(histogram.counts) == len(sample.values)
        seconds = sample.values * sample.unit_ms / 1e3
        assert histogram.sum == pytest.approx(float(seconds.sum()))
        for q in (0.5, 0.9, 0.99):
            low, high = quantile(snapshot, name, q)
            assert low - 1e-9 <= float(np.quantile(seconds, q, method="inverted_cdf")) <= high + 1e-9


def test_it_follows_a_file_that_grows_line_by_line_and_byte_by_byte(tmp_path: Path) -> None:
    write(tmp_path / "whole.jsonl", [record(number) for number in range(1, 6)])
    whole = (tmp_path / "whole.jsonl").read_bytes()
    (tmp_path / "whole.jsonl").unlink()
    recorder = Recorder(tmp_path, manifest(tmp_path))
    recorder.live = Live(planned=50, in_flight=7)
    seen = []
    for end in range(0, len(whole), 97):
        (tmp_path / "requests.jsonl").write_bytes(whole[:end])
        recorder.write()
        seen.append(value(read(tmp_path), "bench_requests", outcome="ok"))
    assert seen == sorted(seen) and read(tmp_path).state == "running"
    assert value(read(tmp_path), "bench_requests_in_flight") == 7
    (tmp_path / "requests.jsonl").write_bytes(whole)
    recorder.write(over=True)
    assert value(read(tmp_path), "bench_requests", outcome="ok") == 5
    assert value(read(tmp_path), "bench_requests_in_flight") == 0 and read(tmp_path).state == "finished"


def test_parts_of_workers_are_added_up_and_not_counted_again_when_joined(tmp_path: Path) -> None:
    for shard in range(2):
        write(tmp_path / f"requests.{shard}.jsonl", [record(number) for number in range(shard + 1, 21, 2)])
    recorder = Recorder(tmp_path, manifest(tmp_path))
    recorder.write()
    assert value(read(tmp_path), "bench_requests", outcome="ok") == 20
    records.merge(tmp_path)
    recorder.write()
    assert value(read(tmp_path), "bench_requests", outcome="ok") == 20
    recorder.write(over=True)
    assert value(read(tmp_path), "bench_requests", outcome="ok") == 20 and read(tmp_path).state == "finished"


def parts(directory: Path, numbers: list[list[int]]) -> list[RecordsFile]:
    """A part for each worker, still open."""
    files = [RecordsFile(directory / f"requests.{shard}.jsonl", "r1", "1", 0) for shard in range(len(numbers))]
    for file, ids in zip(files, numbers, strict=True):
        for number in ids:
            file.write(record(number))
    return files


def test_what_workers_wrote_last_is_read_though_their_parts_are_joined_and_gone(tmp_path: Path) -> None:
    files = parts(tmp_path, [[1, 3], [2, 4]])
    recorder = Recorder(tmp_path, manifest(tmp_path))
    recorder.live = Live(planned=50, in_flight=2, clients=2)
    recorder.write()
    for number, file in enumerate(files, 5):
        file.write(record(number))
        file.close(ClientFacts(**FACTS))
    records.merge(tmp_path)
    (tmp_path / "requests.jsonl").unlink()  # it needs not be read again, however long it is
    recorder.write(over=True)
    assert value(read(tmp_path), "bench_requests", outcome="ok") == 6 and read(tmp_path).state == "finished"


def test_a_part_that_was_never_seen_counts_when_it_is_joined(tmp_path: Path) -> None:
    (first,) = parts(tmp_path, [[1]])
    recorder = Recorder(tmp_path, manifest(tmp_path))
    recorder.write()
    first.close(ClientFacts(**FACTS))
    write(tmp_path / "requests.1.jsonl", [record(2), record(3)])
    records.merge(tmp_path)
    recorder.live = Live(planned=50, in_flight=0, clients=2)
    recorder.write(over=True)
    assert value(read(tmp_path), "bench_requests", outcome="ok") == 3 and read(tmp_path).state == "finished"


def test_a_run_of_which_a_worker_died_is_stopped(tmp_path: Path) -> None:
    alive, _ = parts(tmp_path, [[1], [2]])
    recorder = Recorder(tmp_path, manifest(tmp_path))
    recorder.live = Live(planned=50, in_flight=0, clients=2)
    recorder.write()
    alive.close(ClientFacts(**FACTS))
    records.merge(tmp_path)
    recorder.write(over=True)
    assert value(read(tmp_path), "bench_requests", outcome="ok") == 2 and read(tmp_path).state == "stopped"


def test_workers_that_have_said_nothing_yet_are_not_told_of() -> None:
    told: list[Live] = []

    class Ears:
        def tell(self, live: Live) -> None:
            told.append(live)

    tell = _both(lambda clients: None, Ears())  # type: ignore[arg-type]
    tell([])
    tell([Seen(planned=3, done=0, failed=0, in_flight=2, events=5, elapsed_s=1.0, ttft_ms=[])] * 2)
    assert told == [Live(planned=6, in_flight=4, clients=2, events=10)]


def test_a_run_without_its_end_is_stopped_and_garbage_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "requests.jsonl", [record(1), record(2)], close=False)
    with (tmp_path / "requests.jsonl").open("ab") as file:
        file.write(b'{"id": "x"}\nnonsense\n{"id": 3, "phase": "\xff"}\n{"id": 3, "ph')
    Recorder(tmp_path, manifest(tmp_path)).write(over=True)
    assert read(tmp_path).state == "stopped" and value(read(tmp_path), "bench_requests", outcome="ok") == 2


def test_the_servers_view_is_its_last_sample(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"schema": "loadgen.server/1", "run_id": "r1", "series": [], "gpus": ["x"]},
        {"at_ns": 1, "took_ms": 1, "metrics": {"running": 5.0, "waiting": 2.0}},
        {"at_ns": 2, "took_ms": 1, "metrics": {"running": 9.0}, "gpus": [{"index": 3, "memory_used_bytes": 7}]},
        {"at_ns": 3, "took_ms": 1, "error": "no answer"},
    ]  # fmt: skip
    (tmp_path / "server.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Recorder(tmp_path, manifest(tmp_path)).write()
    snapshot = read(tmp_path)
    assert value(snapshot, "bench_server_requests_running") == 9
    assert value(snapshot, "bench_gpu_memory_used_bytes", gpu="3") == 7
    names = {each.name for each in snapshot.families}
    assert "bench_server_requests_waiting" not in names and "bench_gpu_power_watts" not in names


def test_bounds_grow_by_the_root_of_two_and_hold_what_is_measured() -> None:
    assert np.allclose(np.diff(np.log2(BOUNDS_S)), 0.5) and BOUNDS_S[0] == 1e-4 and BOUNDS_S[-1] > 200


def test_the_process_beside_a_run_writes_a_last_snapshot_when_it_is_let_go(tmp_path: Path) -> None:
    said = manifest(tmp_path)
    write(tmp_path / "requests.jsonl", [record(number) for number in range(1, 11)])

    async def beside() -> None:
        async with watching() as watch:
            watch.begin(tmp_path)
            watch.tell(Live(planned=50, in_flight=3))
        assert watch.trouble is None

    asyncio.run(beside())
    snapshot = read(tmp_path)
    assert snapshot.run_id == said.run_id and snapshot.state == "finished"
    assert value(snapshot, "bench_requests", outcome="ok") == 10
    assert value(snapshot, "bench_requests_planned") == 50
    assert snapshot.labels == {"backend": "vllm", "model": "m", "arrival": "burst", "emulated": "true", "version": "1"}


def test_a_run_that_never_began_leaves_no_snapshot(tmp_path: Path) -> None:
    async def beside() -> None:
        async with watching():
            pass

    asyncio.run(beside())
    assert not list(tmp_path.iterdir())


def test_a_port_that_somebody_takes_meanwhile_costs_no_snapshot(tmp_path: Path) -> None:
    manifest(tmp_path)
    write(tmp_path / "requests.jsonl", [record(1)])

    async def beside(port: int) -> None:
        async with watching(port) as watch:
            with socket.create_server(("127.0.0.1", port)):
                watch.begin(tmp_path)
                await watch.end()

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    asyncio.run(beside(port))
    assert read(tmp_path).state == "finished"


def test_a_process_that_dies_does_not_disturb_the_run_and_is_told_of(tmp_path: Path) -> None:
    manifest(tmp_path)

    async def beside() -> str | None:
        async with watching() as watch:
            watch.begin(tmp_path)
            assert watch._process is not None
            watch._process.kill()
            for _ in range(20):
                watch.tell(Live(planned=50, in_flight=3))
                await asyncio.sleep(0.01)
        return watch.trouble

    said = "snapshot.json is missing or not up to date, because the process that writes it died of signal 9."
    assert asyncio.run(beside()) == run_loop(beside()) == said


def test_a_process_that_fails_is_told_of(tmp_path: Path) -> None:
    async def beside() -> str | None:
        async with watching() as watch:
            watch.begin(tmp_path)  # it holds no manifest
        return watch.trouble

    said = asyncio.run(beside())
    assert said is not None and said.endswith("because the process that writes it failed (exit code 1).")


def test_a_process_that_cannot_be_started_does_not_disturb_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))

    async def beside() -> str | None:
        async with watching() as watch:
            watch.begin(tmp_path)
            watch.tell(Live(planned=50, in_flight=3))
        return watch.trouble

    said = asyncio.run(beside())
    assert said is not None and said.endswith("because the process that writes it was not started.")
    assert not list(tmp_path.iterdir())
