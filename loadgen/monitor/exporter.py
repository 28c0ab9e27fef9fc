"""The snapshots of all runs in a directory, as one page for Prometheus: `loadgen export`, and `--metrics-port`.

Each run's snapshot is rendered once with prometheus-client, whenever its file has changed, and kept as text; a scrape
puts the texts together, so it costs next to nothing however many requests are behind them. A snapshot that cannot be
read is left out and counted as long as it is there, and a run that is there twice (a copy, a link) is shown once, as it
was written last. Runs age out: finished ones after `keep_s`, and those that claim to run but have not written for
STALE_S are `stale`, and gone after `keep_s` as well. Binds to 127.0.0.1 unless told otherwise.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import msgspec
from prometheus_client import exposition, openmetrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.samples import Exemplar

from loadgen.rundir import SNAPSHOT_FILE, SNAPSHOT_SCHEMA, Family, RunError, Snapshot

HOST = "127.0.0.1"
STALE_S = 30.0
KEEP_S = 7 * 86400.0
MOST_BYTES = 1 << 26  # no snapshot of ours is nearly as large
REQUEST_TIMEOUT_S = 30.0

Lines = dict[str, tuple[bytes, bytes]]  # family -> its HELP and TYPE, its samples


class _Kept(NamedTuple):
    changed: tuple[int, int]  # time and size of the file
    run_id: str
    state: str
    metrics: list[Metric]
    texts: dict[bool, Lines]  # by whether it is OpenMetrics, as soon as it has been asked for

    def text(self, open_metrics: bool) -> Lines:
        if open_metrics not in self.texts:
            self.texts[open_metrics] = _rendered(self.metrics, open_metrics)
        return self.texts[open_metrics]


class Exporter:
    """Renders what is in `runs`: a directory of run directories, or one of them."""

    def __init__(self, runs: Path, keep_s: float = KEEP_S, now: Callable[[], float] = time.time) -> None:
        self._runs, self._keep_s, self._now = runs, keep_s, now
        self._kept: dict[str, _Kept] = {}
        self._lock = threading.Lock()

    def page(self, open_metrics: bool) -> bytes:
        """The whole page, in OpenMetrics or in Prometheus' older text format."""
        begun = time.perf_counter()
        with self._lock:
            present, broken = self._present(open_metrics)
            texts = [kept.text(open_metrics) for kept in present]
        own = _rendered(self._own(len(texts), broken, time.perf_counter() - begun), open_metrics)
        merged: dict[str, tuple[bytes, list[bytes]]] = {}
        for text in (*texts, own):
            for name, (head, body) in text.items():
                ours, bodies = merged.setdefault(name, (head, []))
                if head.split()[-1] == ours.split()[-1]:  # another version's help may differ, its type may not
                    bodies.append(body)
        parts = [part for head, bodies in merged.values() for part in (head, *bodies)]
        return b"".join([*parts, b"# EOF\n"] if open_metrics else parts)

    def _present(self, open_metrics: bool) -> tuple[list[_Kept], int]:
        """The runs to be shown now, those that were written first first; they have their texts. With them how many
        snapshots cannot be read."""
        found: dict[str, _Kept] = {}
        broken = 0
        for path, file in sorted(self._files(), key=lambda each: (each[1].st_mtime_ns, each[0])):
            age_s = self._now() - file.st_mtime
            if age_s > self._keep_s:
                continue
            changed, stale = (file.st_mtime_ns, file.st_size), age_s > STALE_S
            kept = self._kept.get(path)
            try:
                if kept is None or kept.changed != changed or (stale and kept.state == "running"):
                    kept = _read(path, changed, stale)
                kept.text(open_metrics)  # what cannot be written shows here
            except FileNotFoundError:  # the run was removed while we looked
                continue
            except Exception:  # whatever it is that somebody wrote there, the other runs are shown
                broken += 1
                continue
            found[path] = kept
        self._kept = found
        return list({kept.run_id: kept for kept in found.values()}.values()), broken

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        for directory in (str(self._runs), *_entries(self._runs)):
            path = os.path.join(directory, SNAPSHOT_FILE)  # noqa: PTH118  fifty Paths cost more than fifty stats
            with contextlib.suppress(OSError):
                found = os.stat(path)  # noqa: PTH116
                if stat.S_ISREG(found.st_mode):  # a pipe would be waited for
                    yield path, found

    def _own(self, runs: int, broken: int, seconds: float) -> list[Metric]:
        return [
            GaugeMetricFamily("bench_exporter_runs", "Runs that are shown.", value=runs),
            GaugeMetricFamily("bench_exporter_broken_snapshots", "Snapshots that cannot be read.", value=broken),
            GaugeMetricFamily("bench_exporter_scrape_seconds", "What this page took to collect.", value=seconds),
        ]


def _entries(runs: Path) -> list[str]:
    try:
        with os.scandir(runs) as entries:
            return [entry.path for entry in entries]
    except OSError:
        return []


def _read(path: str, changed: tuple[int, int], stale: bool) -> _Kept:
    """Raises whatever a file that is no snapshot of ours makes of it."""
    if changed[1] > MOST_BYTES:
        raise ValueError(path)
    snapshot = msgspec.json.decode(Path(path).read_bytes(), type=Snapshot)
    if snapshot.schema != SNAPSHOT_SCHEMA:
        raise ValueError(snapshot.schema)
    state = "stale" if stale and snapshot.state == "running" else snapshot.state
    return _Kept(changed, snapshot.run_id, state, list(_metrics(snapshot, state, changed[0] / 1e9)), {})


def _metrics(snapshot: Snapshot, state: str, updated_s: float) -> Iterator[Metric]:
    run = {"run_id": snapshot.run_id}
    program = {**run, "program": snapshot.program}
    yield _gauge("bench_run_info", "What was run.", {**snapshot.labels, **program}, 1)
    yield _gauge("bench_run_state", "The present state of a run.", {**program, "state": state}, 1)
    yield _gauge("bench_run_updated_timestamp_seconds", "When its snapshot was written.", run, updated_s)
    for family in snapshot.families:
        yield from _family(family, run)


def _gauge(name: str, said: str, labels: dict[str, str], value: float) -> Metric:
    metric = GaugeMetricFamily(name, said, labels=list(labels))
    metric.add_metric(list(labels.values()), value)
    return metric


def _family(family: Family, run: dict[str, str]) -> Iterator[Metric]:
    labelled = [*(each.labels for each in family.samples), *(each.labels for each in family.histograms)]
    names = list(run) + sorted({name for labels in labelled for name in labels})
    metric: Any
    if family.type == "histogram":
        metric = HistogramMetricFamily(family.name, family.help, labels=names)
        for histogram in family.histograms:
            bounds = [*(repr(bound) for bound in histogram.bounds), "+Inf"]
            buckets = [
                [bound, count, _exemplar(histogram.exemplars.get(place))]
                for place, (bound, count) in enumerate(zip(bounds, accumulate(histogram.counts), strict=True))
            ]
            metric.add_metric(_values(names, {**run, **histogram.labels}), buckets, histogram.sum)
    else:
        metric = (GaugeMetricFamily if family.type == "gauge" else CounterMetricFamily)(
            family.name, family.help, labels=names
        )
        for sample in family.samples:
            metric.add_metric(_values(names, {**run, **sample.labels}), sample.value)
    yield metric


def _values(names: list[str], labels: dict[str, str]) -> list[str]:
    return [labels.get(name, "") for name in names]


def _exemplar(seen: tuple[str, float] | None) -> Exemplar | None:
    return None if seen is None else Exemplar({"request_id": seen[0]}, seen[1])


class _Collector:
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> list[Metric]:
        return self._metrics


def _rendered(metrics: Iterable[Metric], open_metrics: bool) -> Lines:
    """Each family's text, its head apart from its samples. Raises ValueError for names that are not allowed."""
    encode = openmetrics.exposition.generate_latest if open_metrics else exposition.generate_latest
    found: Lines = {}
    for metric in metrics:
        lines = encode(_Collector([metric])).splitlines(keepends=True)
        body = [line for line in lines if not line.startswith(b"#")]
        head = [line for line in lines if line.startswith((b"# HELP", b"# TYPE", b"# UNIT"))]
        found[metric.name] = (b"".join(head), b"".join(body))
    return found


# HTTP.


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Somebody who hung up or said nothing: no news."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    timeout = REQUEST_TIMEOUT_S  # who connects and says nothing keeps no thread

    def log_message(self, format: str, *args: Any) -> None: ...


def address(host: str, port: int) -> str:
    """Both, as they stand in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def serve(exporter: Exporter, host: str, port: int) -> WSGIServer:
    """A server that listens already and answers as soon as somebody runs it. Raises RunError."""

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [("Allow", "GET, HEAD"), ("Content-Type", "text/plain")])
            return [b"GET /metrics\n"]
        if environ.get("PATH_INFO") not in ("/metrics", "/"):
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"metrics are at /metrics\n"]
        _, content_type = exposition.choose_encoder(environ.get("HTTP_ACCEPT", ""))
        open_metrics = content_type.startswith("application/openmetrics-text")
        known = openmetrics.exposition.CONTENT_TYPE_LATEST if open_metrics else exposition.CONTENT_TYPE_PLAIN_0_0_4
        start_response("200 OK", [("Content-Type", known)])
        return [exporter.page(open_metrics)] if environ["REQUEST_METHOD"] == "GET" else []

    try:
        return make_server(host, port, application, _Server6 if ":" in host else _Server, _Quiet)
    except (OSError, OverflowError) as error:
        said = (getattr(error, "strerror", None) or str(error)).rstrip(".")
        raise RunError(f"cannot listen on {address(host, port)}: {said}; name another address or port.") from None


def in_background(directory: Path, port: int) -> None:
    """Serves one run's snapshot on 127.0.0.1 for as long as this process lives. Raises RunError."""
    threading.Thread(target=serve(Exporter(directory), HOST, port).serve_forever, daemon=True).start()
