"""The snapshots of all runs in a directory, as one page for Prometheus: `loadgen export`, and `--metrics-port`.

Every scrape reads the snapshots anew and has prometheus-client write them, in the format that is asked for: Prometheus'
text, or OpenMetrics with its exemplars. A snapshot that cannot be read is left out and counted as long as it is there,
and a run that is there twice (a copy, a link) is shown once, as it was written last. Each metric that had a name before
`llm_dissect_` has it for one release more, also of snapshots that say the old one. Runs age out: finished ones after
`keep_s`, and those that claim to run but have not written for STALE_S are `stale`, and gone after `keep_s` as well.
Binds to 127.0.0.1 unless it is given another address.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

import msgspec
from prometheus_client import exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.samples import Exemplar

from backends import foreign_files
from backends.untrusted import escaped
from loadgen.rundir import SNAPSHOT_FILE, SNAPSHOT_SCHEMA, MetricFamily, RunError, Snapshot

HOST = "127.0.0.1"
STALE_S = 30.0
KEEP_S = 7 * 86400.0
_SUFFIXES = {"counter": ("total", "created"), "histogram": ("bucket", "sum", "count", "created")}  # of its series
MOST_ID_CHARACTERS = 118  # of a request's id: OpenMetrics gives an exemplar 128 with the label's name
REQUEST_TIMEOUT_S = 30.0
MOST_CONNECTIONS = 64  # at once; who comes then is refused
MOST_WAIT_S = 1.0  # for a page
PREFIX, OLD_PREFIX = "llm_dissect_", "bench_"
_NAME, _LABEL = re.compile(f"{PREFIX}[a-zA-Z0-9_]+"), re.compile("[a-zA-Z_][a-zA-Z0-9_]*")
STATES = ("running", "finished", "stopped", "stale")
_STATE = f"{PREFIX}run_state"
_NEW = {  # since they were renamed
    f"{PREFIX}{name}" for name in (
        "gpu_energy_joules", "gpu_throttled_seconds", "training_steps", "training_tokens",
        "training_energy_joules_per_token", "training_throttled_ratio",
    )
}  # fmt: skip
_OF_EACH_RUN = ("llm_dissect_run_info", _STATE, "llm_dissect_run_updated_timestamp_seconds")
_OWN = ("llm_dissect_exporter_runs", "llm_dissect_exporter_broken_snapshots", "llm_dissect_exporter_scrape_seconds")


class Exporter:
    """Shows what is in `runs`: a directory of run directories, or one of them."""

    def __init__(self, runs: Path, keep_s: float = KEEP_S, now: Callable[[], float] = time.time) -> None:
        self._runs, self._keep_s, self._now = runs, keep_s, now

    def page(self, accept: str = "") -> tuple[bytes, str]:
        """The whole page in the best format of an Accept header, and its content type; for a header that makes no sense
        in Prometheus' text."""
        with contextlib.suppress(Exception):  # of versions and escapings that prometheus-client cannot read
            encode, content_type = exposition.choose_encoder(accept)
            if content_type.isascii() and content_type.isprintable():
                return encode(self), content_type
        encode, content_type = exposition.choose_encoder("")
        return encode(self), content_type

    def collect(self) -> Iterator[Metric]:
        """Each family with the samples of all runs, as prometheus-client collects them."""
        begun = time.perf_counter()
        runs, broken = self._present()
        merged: dict[str, Metric] = {}
        for metrics in runs:
            for name, metric in metrics.items():
                ours = merged.setdefault(name, metric)
                if ours is not metric and ours.type == metric.type:  # another version's help may differ, its type not
                    ours.samples += metric.samples
        seconds = time.perf_counter() - begun
        own = (
            GaugeMetricFamily("llm_dissect_exporter_runs", "Runs that are shown.", value=len(runs)),
            GaugeMetricFamily("llm_dissect_exporter_broken_snapshots", "Snapshots that cannot be read.", value=broken),
            GaugeMetricFamily("llm_dissect_exporter_scrape_seconds", "What this page took to collect.", value=seconds),
        )
        for metric in (*merged.values(), *own):
            yield metric
            if metric.name not in _NEW:
                yield _under_old_name(metric)

    def _present(self) -> tuple[list[dict[str, Metric]], int]:
        """The metrics by name of each run to be shown now, and how many snapshots cannot be read."""
        present: dict[str, dict[str, Metric]] = {}
        owners: dict[str, str] = {}  # of a series, the family
        broken = 0
        for path, file in sorted(self._files(), key=lambda each: (each[1].st_mtime_ns, each[0])):
            age_s = self._now() - file.st_mtime
            if age_s > self._keep_s:
                continue
            try:
                snapshot = _read(path, self._runs)
                state = "stale" if snapshot.state == "running" and age_s > STALE_S else snapshot.state
                metrics = _checked(_metrics(snapshot, state, file.st_mtime), owners)
            except FileNotFoundError:  # the run was removed while we looked
                continue
            except Exception:  # whatever it is that somebody wrote there, the other runs are shown
                broken += 1
                continue
            present[snapshot.run_id] = metrics
        return list(present.values()), broken

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        for directory in (str(self._runs), *_entries(self._runs)):
            path = os.path.join(directory, SNAPSHOT_FILE)  # noqa: PTH118  fifty Paths cost more than fifty stats
            with contextlib.suppress(OSError):
                file = os.stat(path)  # noqa: PTH116
                if stat.S_ISREG(file.st_mode):
                    yield path, file


def _entries(runs: Path) -> list[str]:
    try:
        with os.scandir(runs) as entries:
            return [entry.path for entry in entries]
    except OSError:
        return []


def _read(path: str, runs: Path) -> Snapshot:
    """Raises whatever a file that is no snapshot of ours makes of it."""
    snapshot = msgspec.json.decode(foreign_files.read_bytes(Path(path), runs), type=Snapshot)
    if snapshot.schema != SNAPSHOT_SCHEMA:
        raise ValueError(snapshot.schema)
    return snapshot


def _metrics(snapshot: Snapshot, state: str, updated_s: float) -> Iterator[Metric]:
    """Raises for what prometheus-client could not write: one run must not cost the others their page."""
    run = {"run_id": snapshot.run_id}
    program = {**run, "program": snapshot.program}
    yield _gauge("llm_dissect_run_info", "What was run.", ({**snapshot.labels, **program}, 1))
    states = [({**program, "state": each}, float(each == state)) for each in STATES]
    yield _gauge(_STATE, "Whether a run is in each of the states: 1, or 0.", *states)
    yield _gauge("llm_dissect_run_updated_timestamp_seconds", "When its snapshot was written.", (run, updated_s))
    for family in snapshot.families:
        yield _family(family, run)


def _checked(metrics: Iterator[Metric], owners: dict[str, str]) -> dict[str, Metric]:
    """By name. Raises ValueError for what would make the whole page unreadable: names that Prometheus does not take or
    that a program of its own has, a series twice, or one of a name that another family has."""
    found: dict[str, Metric] = {}
    series: dict[str, str] = {}
    for metric in metrics:
        if metric.name in found or metric.name in _OWN or not _NAME.fullmatch(metric.name):
            raise ValueError(metric.name)
        found[metric.name] = metric
        seen = [(sample.name, *sorted(sample.labels.items())) for sample in metric.samples]
        if len(set(seen)) < len(seen):
            raise ValueError(f"{metric.name} has a series twice")
        for name in (metric.name, *(f"{metric.name}_{suffix}" for suffix in _SUFFIXES.get(metric.type, ()))):
            if series.setdefault(name, metric.name) != metric.name or owners.get(name, metric.name) != metric.name:
                raise ValueError(f"{name} is of two families")
    owners.update(series)
    return found


def _clean(text: str) -> str:
    """Without what a terminal obeys; the format itself takes care of ends of lines."""
    return "\n".join(map(escaped, text.split("\n")))


def _check_labels(names: Iterable[str], reserved: Container[str]) -> None:
    for name in names:
        if name in reserved or name.startswith("__") or not _LABEL.fullmatch(name):
            raise ValueError(name)


def _gauge(name: str, help_text: str, *samples: tuple[dict[str, str], float]) -> Metric:
    """samples: labels, the same of all, and a value each."""
    metric = GaugeMetricFamily(name, help_text, labels=list(samples[0][0]))
    for labels, value in samples:
        _check_labels(labels, ())
        metric.add_metric(list(map(_clean, labels.values())), value)
    return metric


def _under_old_name(metric: Metric) -> Metric:
    """Goes with the next version. The old state of a run was one series, of the present state."""
    old = Metric(
        metric.name.replace(PREFIX, OLD_PREFIX, 1),
        f"Deprecated, gone in the next version: {metric.name}. {metric.documentation}", metric.type,
    )  # fmt: skip
    old.samples = [
        sample._replace(name=sample.name.replace(PREFIX, OLD_PREFIX, 1))
        for sample in metric.samples
        if metric.name != _STATE or sample.value
    ]
    return old


def _family(family: MetricFamily, run: dict[str, str]) -> Metric:
    name = re.sub(f"^{OLD_PREFIX}", PREFIX, family.name)
    if name in _OF_EACH_RUN:
        raise ValueError(name)
    help_text = _clean(family.help)
    labelled = [*(each.labels for each in family.samples), *(each.labels for each in family.histograms)]
    of_samples = sorted({name for labels in labelled for name in labels})
    _check_labels(of_samples, (*run, "le", "quantile"))
    names = [*run, *of_samples]
    metric: Any
    if family.type == "histogram":
        metric = HistogramMetricFamily(name, help_text, labels=names)
        for histogram in family.histograms:
            ascending = all(low < high for low, high in pairwise(histogram.bounds))
            if not ascending or min(histogram.counts, default=0) < 0:
                raise ValueError(family.name)
            bounds = [*(repr(bound) for bound in histogram.bounds), "+Inf"]
            buckets = [
                [bound, float(count), _exemplar(histogram.exemplars.get(place))]
                for place, (bound, count) in enumerate(zip(bounds, accumulate(histogram.counts), strict=True))
            ]
            metric.add_metric(_values(names, {**run, **histogram.labels}), buckets, histogram.sum)
    else:
        metric = (GaugeMetricFamily if family.type == "gauge" else CounterMetricFamily)(name, help_text, labels=names)
        for sample in family.samples:
            if family.type == "counter" and sample.value < 0:
                raise ValueError(family.name)
            metric.add_metric(_values(names, {**run, **sample.labels}), sample.value)
    return metric  # type: ignore[no-any-return]


def _values(names: list[str], labels: dict[str, str]) -> list[str]:
    return [_clean(labels.get(name, "")) for name in names]


def _exemplar(request: tuple[str, float] | None) -> Exemplar | None:
    if request is None:
        return None
    if len(request[0]) > MOST_ID_CHARACTERS:
        raise ValueError(request[0])
    return Exemplar({"request_id": escaped(request[0])[:MOST_ID_CHARACTERS]}, request[1])


# HTTP.


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, of which there are MOST_CONNECTIONS: further ones are refused at once."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *args: Any, **more: Any) -> None:
        self.free_connections = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(*args, **more)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.free_connections.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        with contextlib.suppress(OSError):
            request.setblocking(False)
            request.send(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free_connections.release()

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

    making = threading.Lock()
    last: dict[str, tuple[float, tuple[bytes, str]]] = {}  # by the Accept header: when it was begun, and the page

    def page(accept: str) -> tuple[bytes, str] | None:
        """One is made at a time, and those who wait share the next, which is begun after they asked. None where it
        takes too long."""
        asked = time.monotonic()
        if not making.acquire(timeout=MOST_WAIT_S):
            return None
        try:
            if accept not in last or last[accept][0] < asked:
                begun = time.monotonic()
                made = exporter.page(accept)
                last.clear()
                last[accept] = begun, made
            return last[accept][1]
        finally:
            making.release()

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [("Allow", "GET, HEAD"), ("Content-Type", "text/plain")])
            return [b"GET /metrics\n"]
        if environ.get("PATH_INFO") not in ("/metrics", "/"):
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"metrics are at /metrics\n"]
        found = page(environ.get("HTTP_ACCEPT", ""))
        if found is None:
            start_response("503 Service Unavailable", [("Retry-After", "1"), ("Content-Type", "text/plain")])
            return [b"too many ask at once\n"]
        start_response("200 OK", [("Content-Type", found[1])])
        return [found[0]] if environ["REQUEST_METHOD"] == "GET" else []

    try:
        return make_server(host, port, application, _Server6 if ":" in host else _Server, _Quiet)
    except (OSError, OverflowError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).rstrip(".")
        raise RunError(f"cannot listen on {address(host, port)}: {reason}; name another address or port.") from None


def in_background(directory: Path, port: int) -> None:
    """Serves one run's snapshot on 127.0.0.1 for as long as this process lives. Raises RunError."""
    threading.Thread(target=serve(Exporter(directory), HOST, port).serve_forever, daemon=True).start()
