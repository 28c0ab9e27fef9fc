"""Requests, manifests and client facts for tests, with every value plain to see. Times in milliseconds here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loadgen import rundir
from loadgen.rundir.records import ClientFacts, Record, RecordsFile

MS = 1_000_000


def request(
    id: int = 0,
    *,
    scheduled: float = 0,
    sent: float = 1,
    first: float = 101,
    gaps: tuple[float, ...] = (20, 20, 20),
    done: float | None = None,
    **changes: Any,
) -> Record:
    """An ok request, ms: by default 4 tokens 20 ms apart, the first 100 ms after it was sent."""
    last = first + sum(gaps)
    values: dict[str, Any] = {
        "id": id,
        "scheduled_ns": round(scheduled * MS),
        "sent_ns": round(sent * MS),
        "headers_ns": round(first * MS),
        "first_token_ns": round(first * MS),
        "last_token_ns": round(last * MS),
        "done_ns": round((last if done is None else done) * MS),
        "prompt_tokens": 10,
        "output_tokens": len(gaps) + 1,
        "asked_prompt_tokens": 10,
        "asked_tokens": len(gaps) + 1,
        "events": len(gaps) + 1,
        "status": 200,
        "outcome": "ok",
        "itl_us": [round(gap * 1000) for gap in gaps],
    }
    return Record(**{**values, **changes})


def failure(
    id: int = 0, outcome: str = "http_error", *, sent: float | None = 1, done: float = 5, **changes: Any
) -> Record:
    """A request without a reply, ms."""
    values: dict[str, Any] = {
        "id": id,
        "scheduled_ns": 0,
        "sent_ns": None if sent is None else round(sent * MS),
        "done_ns": None if sent is None else round(done * MS),
        "asked_prompt_tokens": 10,
        "asked_tokens": 4,
        "outcome": outcome,
        "error": "no reason given",
    }
    return Record(**{**values, **changes})


def facts(**changes: Any) -> ClientFacts:
    """A client that had nothing to complain of."""
    values: dict[str, Any] = {
        "state": "complete",
        "wall_s": 10.0,
        "cpu_s": 2.0,
        "cpu_peak_ratio": 0.4,
        "peak_rss_bytes": 50_000_000,
        "events": 1000,
        "loop_lag_p50_ms": 0.1,
        "loop_lag_p99_ms": 0.5,
        "loop_lag_max_ms": 3.0,
        "connections": 100,
        "connect_p50_ms": 0.2,
        "connect_max_ms": 2.0,
    }
    return ClientFacts(**{**values, **changes})


def manifest(**changes: Any) -> rundir.Manifest:
    values: dict[str, Any] = {
        "run_id": "20261121-120000-abc123",
        "version": "0.1.0",
        "started_unix_s": 1795262400.0,
        "argv": ["loadgen", "run"],
        "config": {"requests": 10_000, "seed": 0},
        "backend": "vllm",
        "model": "llama-2-7b",
        "url": "http://127.0.0.1:8000",
        "emulated": False,
        "arrival": "burst",
        "machine": rundir.Machine(platform="Linux", python="3.11", cpu_count=2, hostname="here"),
    }
    return rundir.Manifest(**{**values, **changes})


def write_run(directory: Path, records: list[Record], run: rundir.Manifest, client: ClientFacts | None) -> Path:
    """A run directory as the engine leaves it; `client` None: as a kill leaves it."""
    directory.mkdir()
    rundir.write_manifest(directory, run)
    file = RecordsFile(directory / "requests.jsonl", run.run_id, run.version, 0, model=run.model)
    for record in records:
        file.write(record)
    if client is not None:
        file.close(client)
    return directory
