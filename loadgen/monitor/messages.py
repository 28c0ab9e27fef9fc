"""The messages between a run and its monitoring sidecar: JSON, one message a line, each with its type."""

from __future__ import annotations

from typing import Self
from urllib.parse import urlsplit

import msgspec

from backends.protocol import Backend, HttpRequest
from loadgen.monitor.server_view import GPU_SERIES
from loadgen.target import Target

PERIOD_S = 1.0


class MetricsSource(Target, frozen=True, kw_only=True):
    """A server's Prometheus metrics. series: our name of a series -> the server's (`Backend.server_metrics`). replicas:
    the /metrics of those behind a router; empty: the server's own at metrics_path. The token is in messages alone,
    never in an argument or a file."""

    series: dict[str, str]
    replicas: tuple[str, ...] = ()
    metrics_path: str = "/metrics"

    @classmethod
    def of(cls, target: Target, backend: Backend, replicas: tuple[str, ...]) -> Self:
        series, path = dict(backend.server_metrics), backend.metrics_path
        if replicas:  # one of them may be a page of GPUs
            series |= GPU_SERIES
        return cls(**msgspec.structs.asdict(target), series=series, replicas=replicas, metrics_path=path)

    @property
    def metrics_urls(self) -> tuple[str, ...]:
        return self.replicas or (self.url_of(self.metrics_path),)

    def headers_for(self, url: str, request: HttpRequest) -> dict[str, str]:
        """What a request to that address carries: secrets go to the server itself alone."""
        same = urlsplit(url)[:2] == self.parts[:2]
        return self.headers(request) if same else dict(request.headers)


class Prepare(msgspec.Struct, tag=True):
    """Import now what sampling a server needs, and what drawing the view does: half a second of CPU that the run does
    not wait for later."""

    sample: bool = False
    draw: bool = False


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a load before it begins. duration_s: until when a closed loop sends. last_due_s: when the last
    request is due, or the last session begins. reply_tokens: of each reply, where all are asked for as many."""

    duration_s: float | None = None
    last_due_s: float | None = None
    reply_tokens: int | None = None


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Draw the live view. fd: of the terminal, as the process inherits it."""

    fd: int
    expected: Expected


class Begin(msgspec.Struct, tag=True, kw_only=True):
    """Watch this run directory, whose manifest is there. gpus: NVML indices. metrics_port: of a page on 127.0.0.1."""

    directory: str
    run_id: str
    source: MetricsSource | None = None
    gpus: list[int] = []
    period_s: float = PERIOD_S
    metrics_port: int | None = None
    view: View | None = None

    @property
    def samples(self) -> bool:
        return bool(self.source is not None and self.source.series) or bool(self.gpus)


class Live(msgspec.Struct, tag=True):
    """The clients' own counters, added up over all client processes; of CPU and lag the worst process'. drawn: whether
    the view may be drawn now, which a program in the background may not. latest_ttft_ms: a sample of the latest, where
    the records are on other machines. falling_per_s: by how many requests a second more arrive than leave, while the
    server falls behind."""

    planned: int | None
    in_flight: int
    events: int = 0  # also of requests in flight
    events_in_flight: int = 0
    done: int = 0
    failed: int = 0
    elapsed_s: float = 0.0
    cpu_ratio: float = 0.0
    loop_lag_ms: float = 0.0
    latest_ttft_ms: list[float] = []
    falling_per_s: float | None = None
    stopping: bool = False
    drawn: bool = False


class TakeSample(msgspec.Struct, tag=True):
    """Take one more sample now."""

    number: int


class End(msgspec.Struct, tag=True):
    """The run is over. Where standard input ends without it, the run was killed."""


class Begun(msgspec.Struct, tag=True):
    """The reply to a Begin that samples: the first sample is written. problem: why none will be, a clause."""

    problem: str | None = None


class SampleTaken(msgspec.Struct, tag=True):
    """The reply to the TakeSample of that number."""

    number: int


Order = Prepare | Begin | Live | TakeSample | End
Reply = Begun | SampleTaken
