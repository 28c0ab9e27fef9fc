"""One picture of a run while it lasts, as lines for a terminal: at most MAX_LINES of them, none wider than asked.

A line is made of fields, such as `p99 412 ms`, and breaks between two of them; a field that fits on no line is left
out, so no number is ever cut. Text that came from a server is escaped, and never read as markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.text import Text

from backends.untrusted import printable
from loadgen.monitor.server_view import ServerSample
from loadgen.steady.live import words

MAX_LINES = 15
LABEL_COLUMNS = 10
MOST_OUTCOMES = 3  # that are shown by name
BARS = "▁▂▃▄▅▆▇█"
MIN_SPARK, MAX_SPARK = 8, 60  # columns
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
        _bar(frame, width),
        *_row("requests", list(_requests(frame)), width),
        *_row("server", [] if frame.falling_per_s is None else [words(frame.falling_per_s)], width, style="red"),
        *_row("failed", list(_failed(frame.failed)), width, style="red"),
        *_row("tokens/s", [f"{frame.tokens_per_s:,.0f}"], width, frame.tokens_history),
        *(line for name in frame.ttft_ms for line in _ttft(frame, name, width)),
        *_row("client", [f"CPU {_percent(frame.cpu_ratio)} of a core", f"loop lag {_ms(frame.loop_lag_ms)}"], width),
        *_row("server", list(_server(frame.sample, frame.sample_age_s)), width),
        *_row("GPUs", list(_gpus(frame.sample)), width),
    ][: min(height, MAX_LINES)]


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
    return [text, *_row("load", [load], width)]


def _bar(frame: Frame, width: int) -> Text:
    """How much of the run is over, and how long it may still take."""
    ratio = frame.done_ratio
    elapsed = f"{clock(frame.elapsed_s)} gone"
    left = f", about {clock(frame.left_s)} left" if frame.left_s is not None else ""
    percent = "" if ratio is None else f"{int(100 * ratio):3d} %  "
    tail = next(
        (t for t in (f"  {percent}{elapsed}{left}", f"  {percent}{elapsed}", f"  {elapsed}") if len(t) < width), ""
    )
    columns = width - len(tail)
    filled = 0 if ratio is None else round(columns * ratio)
    return Text.assemble(("━" * filled, "green"), ("─" * (columns - filled), "dim"), tail)


def clock(seconds: float) -> str:
    """0:07, 12:34, 1:02:03."""
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


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
    return _row(f"ttft {name}", [_ms(frame.ttft_ms[name])], width, frame.ttft_history.get(name, ()))


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


def _row(
    label: str, fields: Sequence[str], width: int, history: Sequence[float | None] = (), style: str = ""
) -> list[Text]:
    """The fields behind their label, on as many lines as they need; behind them what happened before, where there is
    room. Nothing without fields."""
    rows: list[str] = []
    for each in (each for each in fields if LABEL_COLUMNS + cell_len(each) < width):
        if rows and LABEL_COLUMNS + cell_len(rows[-1]) + 2 + cell_len(each) < width:  # less one: a comma may follow
            rows[-1] += f", {each}"
        else:
            rows.append(each)
    shown = [
        Text.assemble((f"{'' if number else label:<{LABEL_COLUMNS}}", "dim"), (row, style))
        for number, row in enumerate(rows)
    ]
    for earlier in shown[:-1]:
        earlier.append(",")
    if shown and history and (room := min(width - max(24, shown[-1].cell_len + 2), MAX_SPARK)) >= MIN_SPARK:
        shown[-1].pad_right(max(0, 24 - shown[-1].cell_len - 2))
        shown[-1].append("  " + sparkline(history[-room:]), style="cyan")
    return shown


def sparkline(values: Sequence[float | None]) -> str:
    """A bar for each value, from 0 to the largest; a space for None."""
    most = max((value for value in values if value is not None), default=0.0)
    return "".join(
        " " if value is None else BARS[round((len(BARS) - 1) * value / most) if most > 0 else 0] for value in values
    )
