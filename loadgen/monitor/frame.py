"""One picture of a run while it lasts, as lines of the live view, none wider than asked. Text that came from a server
is escaped, and never read as markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.text import Text

from backends.untrusted import printable
from loadgen.live_view import MAX_LINES, bar, row
from loadgen.monitor.server_view import ServerSample
from loadgen.steady.live import words

MOST_OUTCOMES = 3  # that are shown by name
SILENT_S = 5.0  # without a good sample: then the last one's age is shown
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What one picture shows. failed: by outcome. done_ratio, left_s: None where they cannot be known yet. ttft_ms: the
    quantiles of the last seconds by name, None where no reply ended in them. Each history has one value a second, the
    newest last."""

    server: str
    load: str
    emulated: bool
    stopping: bool = False
    elapsed_s: float = 0.0
    left_s: float | None = None
    done_ratio: float | None = None
    planned: int | None = None
    sent: int = 0
    done: int = 0
    in_flight: int = 0
    falling_per_s: float | None = None
    failed: Mapping[str, int] = field(default_factory=dict)
    tokens_per_s: float = 0.0
    tokens_history: Sequence[float | None] = ()
    ttft_ms: Mapping[str, float | None] = field(default_factory=dict)
    ttft_history: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    cpu_ratio: float = 0.0
    loop_lag_ms: float = 0.0
    sample: ServerSample | None = None
    sample_age_s: float = 0.0


def lines(frame: Frame, width: int, height: int = MAX_LINES) -> list[Text]:
    """The picture for a terminal of `width` columns; the first `height` lines of it."""
    return [
        *_title(frame, width),
        bar(frame.done_ratio, frame.elapsed_s, frame.left_s, width),
        *row("requests", list(_requests(frame)), width),
        *row("server", [] if frame.falling_per_s is None else [words(frame.falling_per_s)], width, style="red"),
        *row("failed", list(_failed(frame.failed)), width, style="red"),
        *row("tokens/s", [f"{frame.tokens_per_s:,.0f}"], width, frame.tokens_history),
        *(line for name in frame.ttft_ms for line in _ttft(frame, name, width)),
        *row("client", [f"CPU {_percent(frame.cpu_ratio)} of a core", f"loop lag {_ms(frame.loop_lag_ms)}"], width),
        *row("server", list(_server(frame.sample, frame.sample_age_s)), width),
        *row("GPUs", list(_gpus(frame.sample)), width),
    ][:height]


def _title(frame: Frame, width: int) -> list[Text]:
    """What is measured; the load, which has numbers, on a line of its own where both are too long."""
    text = Text("EMULATED ", style="bold yellow") if frame.emulated else Text()
    text.append(printable(frame.server), style="bold")
    if frame.stopping:
        text = Text("stopping, waits for replies  ", style="bold yellow").append_text(text)
    load = printable(frame.load)
    if text.cell_len + 2 + cell_len(load) <= width:
        return [text.append(f", {load}", style="bold")]
    text.truncate(width, overflow="ellipsis")
    return [text, *row("load", [load], width)]


def _requests(frame: Frame) -> Iterator[str]:
    of = "" if frame.planned is None else f" of {frame.planned:,}"
    yield f"{frame.sent:,} sent"
    yield f"{frame.done:,}{of} done"
    yield f"{frame.in_flight:,} in flight"
    if not frame.failed:
        yield "0 failed"


def _failed(failed: Mapping[str, int]) -> Iterator[str]:
    """The most frequent outcomes; the others in one."""
    ordered = sorted(failed.items(), key=lambda each: -each[1])
    for outcome, count in ordered[:MOST_OUTCOMES]:
        yield f"{count:,} {outcome}"
    if others := sum(count for _, count in ordered[MOST_OUTCOMES:]):
        yield f"{others:,} others"


def _ttft(frame: Frame, name: str, width: int) -> list[Text]:
    return row(f"ttft {name}", [_ms(frame.ttft_ms[name])], width, frame.ttft_history.get(name, ()))


def _server(sample: ServerSample | None, age_s: float) -> Iterator[str]:
    metrics = {} if sample is None else sample.metrics
    if metrics and age_s > SILENT_S:
        yield f"silent for {age_s:.0f} s"
    for name in ("running", "waiting"):
        if name in metrics:
            yield f"{metrics[name]:,.0f} {name}"
    if "kv_cache_usage_ratio" in metrics:
        yield f"KV cache {_percent(metrics['kv_cache_usage_ratio'])} full"
    if "kv_reserved_tokens" in metrics:
        yield f"{metrics['kv_reserved_tokens']:,.0f} KV tokens reserved"
    if metrics.get("preemptions"):
        yield f"{metrics['preemptions']:,.0f} preemptions"


def _gpus(sample: ServerSample | None) -> Iterator[str]:
    gpus = [] if sample is None else sample.gpus
    busy = [gpu.utilization_ratio for gpu in gpus if gpu.utilization_ratio is not None]
    memory = [gpu.memory_used_bytes for gpu in gpus if gpu.memory_used_bytes is not None]
    power = [gpu.power_w for gpu in gpus if gpu.power_w is not None]
    if busy:
        yield f"{_percent(sum(busy) / len(busy))} busy"
    if memory:
        yield f"{sum(memory) / GIB:,.1f} GiB used"
    if power:
        yield f"{sum(power):,.0f} W"


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.0f} %"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"
