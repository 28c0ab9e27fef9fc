"""What a run and its monitoring sidecar send each other: one JSON message a line, which names its type."""

from __future__ import annotations

import msgspec

from loadgen.target import Target

PERIOD_S = 1.0


class MetricsSource(Target, frozen=True, kw_only=True):
    """Where requests go, as a server that shows metrics. series: neutral name -> the server's own
    (`Backend.server_metrics`). The token is in messages only, never in an argument or a file."""

    series: dict[str, str]

    @property
    def metrics_url(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1") + "/metrics"


class Prepare(msgspec.Struct, tag=True):
    """Import now what samples of a server will take, which is half a second of CPU."""


class Begin(msgspec.Struct, tag=True, kw_only=True):
    """Watch this run directory, whose manifest is there. gpus: NVML indices. metrics_port: of a page on 127.0.0.1."""

    directory: str
    run_id: str
    source: MetricsSource | None = None
    gpus: list[int] = []
    period_s: float = PERIOD_S
    metrics_port: int | None = None

    @property
    def samples(self) -> bool:
        return bool(self.source is not None and self.source.series) or bool(self.gpus)


class Live(msgspec.Struct, tag=True):
    """What only the clients know: of all of them together."""

    planned: int | None
    in_flight: int
    clients: int = 1  # how many there are
    events: int = 0  # of requests that go on, too


class TakeSample(msgspec.Struct, tag=True):
    """A sample more, now."""

    number: int


class Begun(msgspec.Struct, tag=True):
    """To a Begin with something to sample: the first sample is written. problem: why none will be, a clause."""

    problem: str | None = None


class SampleTaken(msgspec.Struct, tag=True):
    """To the TakeSample of that number."""

    number: int


Order = Prepare | Begin | Live | TakeSample
Reply = Begun | SampleTaken
