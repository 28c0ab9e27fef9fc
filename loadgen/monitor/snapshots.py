"""What a run has measured so far, once a second, in `snapshot.json`, by a thread that reads the run's directory.

`Recorder` follows the records as they are written (the run's own files, or the workers') and adds them up; it is
given the clients' live counters and the last sample of the server. So the clients' hot path does nothing for it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from loadgen.monitor.messages import PERIOD_S, Live, View
from loadgen.monitor.server_view import ServerSample
from loadgen.monitor.tail import RecordTail
from loadgen.monitor.totals import Totals
from loadgen.rundir import Manifest, MetricFamily, MetricSample, RunError, Snapshot, read_manifest, write_snapshot
from loadgen.rundir.parts import OF_THE_RUN

if TYPE_CHECKING:  # it loads rich, which a run without a view does without
    from loadgen.monitor.view import Drawing, Recent


class Recorder:
    """Follows one run's directory."""

    def __init__(self, directory: Path, manifest: Manifest, recent: Recent | None = None) -> None:
        """recent: is given the records, too."""
        self._directory, self._manifest, self._recent = directory, manifest, recent
        self.totals = Totals()
        self._records = RecordTail(directory)
        self.live: Live | None = None
        self.sample: ServerSample | None = None

    def write(self, over: bool = False) -> None:
        """Brings the snapshot up to date. over: nobody writes any more."""
        clients = self._manifest.client_processes or 1
        writers = self._records.writers
        if over and OF_THE_RUN not in writers and len(writers) < clients:
            # A file came and was joined with the others between two looks: from the beginning, which is not long ago.
            self.totals, self._records = Totals(), RecordTail(self._directory)
        self.follow()
        state: Literal["running", "finished", "stopped"] = "running"
        if over:
            ended = self.totals.clients
            state = "finished" if set(ended) == {"complete"} and len(ended) >= clients else "stopped"
        families = [*self.totals.families(), *self._live_families(over), *self._server_families()]
        snapshot = Snapshot(
            run_id=self._manifest.run_id, program="loadgen", state=state, labels=labels(self._manifest),
            families=families,
        )  # fmt: skip
        write_snapshot(self._directory, snapshot)

    def follow(self) -> None:
        """Adds up the records that are new."""
        for record in self._records.records():
            self.totals.add(record)
            if self._recent is not None:
                self._recent.add(record)

    def _live_families(self, over: bool) -> Iterator[MetricFamily]:
        planned = self._manifest.requests_planned
        if planned is None and self.live is not None:
            planned = self.live.planned
        if planned is not None:
            yield MetricFamily(
                "llm_dissect_requests_planned", "gauge", "Measured requests of the whole run.", [MetricSample(planned)]
            )
        in_flight = 0 if over or self.live is None else self.live.in_flight
        yield MetricFamily(
            "llm_dissect_requests_in_flight", "gauge", "Requests sent and not over.", [MetricSample(in_flight)]
        )
        falling_per_s = None if over or self.live is None else self.live.falling_per_s
        yield MetricFamily(
            "llm_dissect_backlog_growth_requests_per_second",
            "gauge",
            "Requests that arrive a second beyond those that leave, while the server falls behind; else 0.",
            [MetricSample(falling_per_s or 0.0)],
        )
        events = 0 if self.live is None else self.live.events
        yield MetricFamily(
            "llm_dissect_events_received",
            "counter",
            "Events that carried output, as they come.",
            [MetricSample(events)],
        )

    def _server_families(self) -> Iterator[MetricFamily]:
        if self.sample is None:
            return
        for name, family, kind, help_text in _SERVER:
            if name in self.sample.metrics:
                yield MetricFamily(family, kind, help_text, [MetricSample(self.sample.metrics[name])])
        for family, (kind, help_text, series) in _GPU.items():
            samples = [
                MetricSample(value / divisor, {"gpu": str(gpu.index), **labels})
                for attribute, divisor, labels in series
                for gpu in self.sample.gpus
                if (value := getattr(gpu, attribute)) is not None
            ]
            if samples:
                yield MetricFamily(family, kind, help_text, samples)


_SERVER: tuple[tuple[str, str, Literal["gauge", "counter"], str], ...] = (
    ("running", "llm_dissect_server_requests_running", "gauge", "Requests in the server's batch, as it says."),
    ("waiting", "llm_dissect_server_requests_waiting", "gauge", "Requests in the server's queue, as it says."),
    ("kv_cache_usage_ratio", "llm_dissect_server_kv_cache_usage_ratio", "gauge", "Part of the KV cache in use."),
    (
        "preemptions",
        "llm_dissect_server_preemptions",
        "counter",
        "Sequences that it put off for want of memory.",
    ),
)
_Series = tuple[str, float, dict[str, str]]  # an attribute of GpuSample, what divides it, labels
_GPU: dict[str, tuple[Literal["gauge", "counter"], str, list[_Series]]] = {
    "llm_dissect_gpu_memory_used_bytes": (
        "gauge", "Memory in use on a GPU of the server.", [("memory_used_bytes", 1, {})],
    ),
    "llm_dissect_gpu_power_watts": ("gauge", "Power that a GPU of the server draws.", [("power_w", 1, {})]),
    "llm_dissect_gpu_utilization_ratio": (
        "gauge", "Part of the time in which any kernel ran on it.", [("utilization_ratio", 1, {})],
    ),
    "llm_dissect_gpu_energy_joules": (
        "counter", "Energy that it has taken since its driver was loaded.", [("energy_mj", 1e3, {})],
    ),
    "llm_dissect_gpu_throttled_seconds": (
        "counter", "How long heat, or its power limit, has held its clocks back since its driver was loaded.",
        [("thermal_ns", 1e9, {"reason": "heat"}), ("power_ns", 1e9, {"reason": "power"})],
    ),
}  # fmt: skip


def labels(manifest: Manifest) -> dict[str, str]:
    """What `llm_dissect_run_info` says of a serving run."""
    return {
        "backend": manifest.backend,
        "model": manifest.model,
        "arrival": manifest.arrival,
        "emulated": str(manifest.emulated).lower(),
        "version": manifest.version,
    }


class Snapshots:
    """Writes them, serves them where a port is given, and draws the view where there is one, in threads of their own
    until `end`."""

    def __init__(self, directory: Path, metrics_port: int | None = None, view: View | None = None) -> None:
        self._live: Live | None = None
        self._sample: ServerSample | None = None
        self._directory, self._metrics_port, self._view = directory, metrics_port, view
        self._woken, self._over, self._erase = threading.Event(), False, False
        self._up_to_date = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def take(self, live: Live) -> None:
        """The clients' counters as they are now."""
        self._live = live
        if live.drawn:
            self._woken.set()

    def keep(self, sample: ServerSample) -> None:
        """The last sample that shows anything is in the snapshots."""
        if sample.metrics or sample.gpus:
            self._sample = sample

    def end(self, erase: bool = False) -> bool:
        """Waits for the last one; whether it was written. erase: the view goes, since nobody wrote below it."""
        self._over, self._erase = True, erase
        self._woken.set()
        self._thread.join()
        return self._up_to_date

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.nice(10)  # on Linux, this thread and those that it starts: the clients' cores come first
        if self._metrics_port is not None:
            from loadgen.monitor.exporter import in_background

            with contextlib.suppress(RunError):  # somebody took the port meanwhile
                in_background(self._directory, self._metrics_port)
        manifest = read_manifest(self._directory)
        if self._view is None:
            self._write_until_over(Recorder(self._directory, manifest))
            return
        from loadgen.monitor.view import Drawing

        drawing = Drawing(self._view, manifest)
        self._write_until_over(Recorder(self._directory, manifest, drawing.recent), drawing)

    def _write_until_over(self, recorder: Recorder, drawing: Drawing | None = None) -> None:
        """A snapshot every PERIOD_S, and a picture for each message of the clients that is to be drawn."""
        due, drawn = time.monotonic(), None
        while not self._over:
            if drawing is not None and (live := self._live) is not None and live.drawn and live is not drawn:
                recorder.follow()
                drawing.show(live, recorder.totals, self._sample)
                drawn = live
            if time.monotonic() >= due:
                due = max(due + PERIOD_S, time.monotonic())
                self._write(recorder)
            self._woken.wait(max(0.0, due - time.monotonic()))
            self._woken.clear()
        if drawing is not None:
            drawing.end(self._erase)
        self._write(recorder, over=True)
        self._up_to_date = True

    def _write(self, recorder: Recorder, over: bool = False) -> None:
        recorder.live, recorder.sample = self._live, self._sample
        with contextlib.suppress(OSError):  # a full disk: the next one may have room
            recorder.write(over)
