"""Snapshots of serving runs: totals against the report's own arithmetic, files that grow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backends.gpus import GpuSample
from loadgen.monitor.messages import Live
from loadgen.monitor.server_view import ServerSample
from loadgen.monitor.snapshots import Recorder, Snapshots
from loadgen.monitor.totals import BOUNDS_S
from loadgen.report import metrics
from loadgen.rundir import Snapshot, records
from loadgen.rundir.outcomes import OUTCOMES
from loadgen.rundir.records import ClientFacts, RecordsFile
from tests.loadgen.monitor.directories import (
    FACTS,
    family,
    record,
    value,
    write_manifest,
    write_records,
)
from tests.loadgen.monitor.directories import read_snapshot as read


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
    write_records(tmp_path / "requests.jsonl", found)
    Recorder(tmp_path, write_manifest(tmp_path)).write(over=True)
    snapshot, table = read(tmp_path), records.read(tmp_path)[0].measured()
    assert snapshot.state == "finished" and snapshot.program == "loadgen"
    assert value(snapshot, "llm_dissect_requests", outcome="ok") == 300 == int(table.ok.sum())
    assert (
        value(snapshot, "llm_dissect_requests", outcome="timeout")
        == value(snapshot, "llm_dissect_requests", outcome="refused")
        == 1
    )
    assert {sample.labels["outcome"] for sample in family(snapshot, "llm_dissect_requests").samples} == set(OUTCOMES)
    assert (
        value(snapshot, "llm_dissect_output_tokens") == 3000
        and value(snapshot, "llm_dissect_prompt_tokens") == 300 * 512
    )
    duration_s = metrics.duration_s(table, metrics.CONVENTIONS["loadgen"])
    assert value(snapshot, "llm_dissect_measured_seconds") == pytest.approx(duration_s)
    for name, metric in {
        "llm_dissect_time_to_first_token_seconds": "ttft_ms",
        "llm_dissect_time_per_output_token_seconds": "tpot_ms",
        "llm_dissect_inter_token_latency_seconds": "itl_ms",
        "llm_dissect_end_to_end_latency_seconds": "e2el_ms",
        "llm_dissect_send_lag_seconds": "send_lag_ms",
    }.items():
        sample = metrics.sample(table, metric, metrics.CONVENTIONS["loadgen"])
        (histogram,) = family(snapshot, name).histograms
        assert sum(histogram.counts) == len(sample.values)
        seconds = np.asarray(sample.values) * sample.unit_ms / 1e3
        assert histogram.sum == pytest.approx(float(seconds.sum()))
        for q in (0.5, 0.9, 0.99):
            low, high = quantile(snapshot, name, q)
            assert low - 1e-9 <= float(np.quantile(seconds, q, method="inverted_cdf")) <= high + 1e-9


def test_it_follows_a_file_that_grows_line_by_line_and_byte_by_byte(tmp_path: Path) -> None:
    write_records(tmp_path / "whole.jsonl", [record(number) for number in range(1, 6)])
    whole = (tmp_path / "whole.jsonl").read_bytes()
    (tmp_path / "whole.jsonl").unlink()
    recorder = Recorder(tmp_path, write_manifest(tmp_path))
    recorder.live = Live(planned=50, in_flight=7)
    seen = []
    for end in range(0, len(whole), 97):
        (tmp_path / "requests.jsonl").write_bytes(whole[:end])
        recorder.write()
        seen.append(value(read(tmp_path), "llm_dissect_requests", outcome="ok"))
    assert seen == sorted(seen) and read(tmp_path).state == "running"
    assert value(read(tmp_path), "llm_dissect_requests_in_flight") == 7
    (tmp_path / "requests.jsonl").write_bytes(whole)
    recorder.write(over=True)
    assert value(read(tmp_path), "llm_dissect_requests", outcome="ok") == 5
    assert value(read(tmp_path), "llm_dissect_requests_in_flight") == 0 and read(tmp_path).state == "finished"


def test_parts_of_workers_are_added_up_and_not_counted_again_when_joined(tmp_path: Path) -> None:
    for shard in range(2):
        write_records(tmp_path / f"requests.{shard}.jsonl", [record(number) for number in range(shard + 1, 21, 2)])
    recorder = Recorder(tmp_path, write_manifest(tmp_path))
    recorder.write()
    assert value(read(tmp_path), "llm_dissect_requests", outcome="ok") == 20
    records.merge(tmp_path)
    recorder.write()
    assert value(read(tmp_path), "llm_dissect_requests", outcome="ok") == 20
    recorder.write(over=True)
    assert value(read(tmp_path), "llm_dissect_requests", outcome="ok") == 20 and read(tmp_path).state == "finished"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts the open files that Linux lists")
def test_full_files_are_followed_to_the_next_and_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgen.rundir.parts.PART_BYTES", 2000)
    file = RecordsFile(tmp_path / "requests.jsonl", "r1", "1", 0)
    recorder = Recorder(tmp_path, write_manifest(tmp_path))
    opened = []
    for number in range(1, 61):
        file.write(record(number))
        if number % 7 == 0:
            recorder.write()
            assert value(read(tmp_path), "llm_dissect_requests", outcome="ok") == number
            opened.append(len(list(Path("/proc/self/fd").iterdir())))
    file.close(ClientFacts(**FACTS))
    recorder.write(over=True)
    assert value(read(tmp_path), "llm_dissect_requests", outcome="ok") == 60 and read(tmp_path).state == "finished"
    assert len(list(tmp_path.glob("requests*"))) > 5 and len(set(opened)) == 1


def parts(directory: Path, numbers: list[list[int]]) -> list[RecordsFile]:
    """A part for each worker, still open."""
    files = [RecordsFile(directory / f"requests.{shard}.jsonl", "r1", "1", 0) for shard in range(len(numbers))]
    for file, ids in zip(files, numbers, strict=True):
        for number in ids:
            file.write(record(number))
    return files


def test_what_workers_wrote_last_is_read_though_their_parts_are_joined_and_gone(tmp_path: Path) -> None:
    files = parts(tmp_path, [[1, 3], [2, 4]])
    recorder = Recorder(tmp_path, write_manifest(tmp_path, clients=2))
    recorder.write()
    for number, file in enumerate(files, 5):
        file.write(record(number))
        file.close(ClientFacts(**FACTS))
    records.merge(tmp_path)
    (tmp_path / "requests.jsonl").unlink()  # it needs not be read again, however long it is
    recorder.write(over=True)
    assert value(read(tmp_path), "llm_dissect_requests", outcome="ok") == 6 and read(tmp_path).state == "finished"


def test_a_part_that_was_never_seen_counts_when_it_is_joined(tmp_path: Path) -> None:
    (first,) = parts(tmp_path, [[1]])
    recorder = Recorder(tmp_path, write_manifest(tmp_path, clients=2))
    recorder.write()
    first.close(ClientFacts(**FACTS))
    write_records(tmp_path / "requests.1.jsonl", [record(2), record(3)])
    records.merge(tmp_path)
    recorder.write(over=True)
    assert value(read(tmp_path), "llm_dissect_requests", outcome="ok") == 3 and read(tmp_path).state == "finished"


def test_a_run_of_which_a_worker_died_is_stopped(tmp_path: Path) -> None:
    alive, _ = parts(tmp_path, [[1], [2]])
    recorder = Recorder(tmp_path, write_manifest(tmp_path, clients=2))
    recorder.write()
    alive.close(ClientFacts(**FACTS))
    records.merge(tmp_path)
    recorder.write(over=True)
    assert value(read(tmp_path), "llm_dissect_requests", outcome="ok") == 2 and read(tmp_path).state == "stopped"


def test_a_run_without_its_end_is_stopped_and_garbage_is_passed_over(tmp_path: Path) -> None:
    write_records(tmp_path / "requests.jsonl", [record(1), record(2)], close=False)
    with (tmp_path / "requests.jsonl").open("ab") as file:
        file.write(b'{"id": "x"}\nnonsense\n{"id": 3, "phase": "\xff"}\n{"id": 3, "ph')
    Recorder(tmp_path, write_manifest(tmp_path)).write(over=True)
    assert read(tmp_path).state == "stopped" and value(read(tmp_path), "llm_dissect_requests", outcome="ok") == 2


def test_the_servers_view_is_its_last_sample_that_shows_anything(tmp_path: Path) -> None:
    write_manifest(tmp_path)
    card = GpuSample(
        index=3, memory_used_bytes=7, power_w=None, utilization_ratio=None, energy_mj=2500, power_ns=3 * 10**9
    )
    snapshots = Snapshots(tmp_path)
    snapshots.keep(ServerSample(at_ns=1, took_ms=1, metrics={"running": 5.0, "waiting": 2.0}))
    snapshots.keep(ServerSample(at_ns=2, took_ms=1, metrics={"running": 9.0}, gpus=[card]))
    snapshots.keep(ServerSample(at_ns=3, took_ms=1, error="no answer"))
    assert snapshots.end()
    snapshot = read(tmp_path)
    assert value(snapshot, "llm_dissect_server_requests_running") == 9
    assert value(snapshot, "llm_dissect_gpu_memory_used_bytes", gpu="3") == 7
    assert value(snapshot, "llm_dissect_gpu_energy_joules", gpu="3") == 2.5
    (throttled,) = family(snapshot, "llm_dissect_gpu_throttled_seconds").samples  # what heat did is not known
    assert (throttled.value, throttled.labels) == (3, {"gpu": "3", "reason": "power"})
    names = {each.name for each in snapshot.families}
    assert "llm_dissect_server_requests_waiting" not in names and "llm_dissect_gpu_power_watts" not in names


def test_bounds_grow_by_the_root_of_two_and_hold_what_is_measured() -> None:
    assert np.allclose(np.diff(np.log2(BOUNDS_S)), 0.5) and BOUNDS_S[0] == 1e-4 and BOUNDS_S[-1] > 200
