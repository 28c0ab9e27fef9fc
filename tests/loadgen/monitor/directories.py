"""Run directories as the sidecar finds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadgen import rundir
from loadgen.rundir import Manifest, MetricFamily, Snapshot
from loadgen.rundir.records import ClientFacts, Record, RecordsFile

RUN = "20261121-120000-abc123"
FACTS: dict[str, Any] = dict.fromkeys(ClientFacts.__struct_fields__, 0) | {"state": "complete", "stalls": ()}


def write_manifest(directory: Path, run_id: str = RUN, clients: int = 1) -> Manifest:
    manifest = Manifest(
        run_id=run_id, version="1", started_unix_s=0.0, argv=[], config={}, backend="vllm", model="m", url="http://h",
        emulated=True, requests_planned=50, arrival="burst", machine=rundir.this_machine(),
        client_processes=clients,
    )  # fmt: skip
    rundir.write_manifest(directory, manifest)
    return manifest


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


def write_records(path: Path, requests: list[Record], close: bool = True) -> None:
    file = RecordsFile(path, "r1", "1", 0)
    for request in requests:
        file.write(request)
    if close:
        file.close(ClientFacts(**FACTS))


def read_snapshot(directory: Path) -> Snapshot:
    return msgspec.json.decode((directory / rundir.SNAPSHOT_FILE).read_bytes(), type=Snapshot)


def family(snapshot: Snapshot, name: str) -> MetricFamily:
    return next(request for request in snapshot.families if request.name == name)


def value(snapshot: Snapshot, name: str, **labels: str) -> float:
    return next(sample.value for sample in family(snapshot, name).samples if sample.labels == labels)
