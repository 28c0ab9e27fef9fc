"""A page with every kind of block and chart, and strings that try to be markup."""

from __future__ import annotations

import math

from loadgen.document.content import (
    Chart,
    Code,
    Document,
    Items,
    Link,
    ListItem,
    Mark,
    Number,
    Section,
    Series,
    Shade,
    Table,
    Text,
)

NASTY = "</script><img src=x onerror=alert(1)>\"'&\u202e\x1b[31m\u2028"


def cdf(scale_ms: float, points: int = 1000) -> tuple[list[float], list[float]]:
    """An exponential distribution: p(q) = -scale ln(1 - q), known at every q."""
    ys = [(number + 0.5) / points for number in range(points)]
    return [-scale_ms * math.log(1 - y) for y in ys], ys


def latencies() -> Chart:
    fast, slow = cdf(100.0), cdf(250.0)
    return Chart(
        title="Time to first token",
        x_label="ttft (ms)",
        y_label="fraction of requests",
        series=[
            Series(name="run A", x=fast[0], y=fast[1]),
            Series(name="run B", x=slow[0], y=slow[1], colour=1, dashed=True),
        ],
        marks=[Mark(axis="x", value=500, label="objective 500 ms")],
        log=["x", "y"],
        quantile=True,
        note="All 1000 requests.",
    )


def over_time() -> list[Chart]:
    xs = [float(second) for second in range(121)]
    rate = [8 + 2 * math.sin(x / 9) for x in xs]
    gap: list[float | None] = [None if 50 <= x < 60 else 400 + 120 * math.sin(x / 7) for x in xs]
    phases = [
        Shade(start=0, end=40, label="ramp"),
        Shade(start=40, end=100, label="steady"),
        Shade(start=70, end=73, label="stall", tone="bad"),
        Shade(start=100, end=120, label="drain"),
    ]
    return [
        Chart(
            title="Rate",
            x_label="time since the start (s)",
            y_label="requests/s",
            series=[
                Series(name="offered", x=xs, y=rate, kind="step"),
                Series(name="finished", x=xs, y=[max(0.0, y - 0.5) for y in rate], kind="step", colour=1, dashed=True),
            ],
            shades=phases,
            sync="time",
            origin="emulated",
        ),
        Chart(
            title="Power",
            x_label="time since the start (s)",
            y_label="W",
            series=[
                Series(name="GPU 0", group="power", x=xs, y=gap, colour=2),
                Series(name="GPU 1", group="power", x=xs, y=[y and y + 60 for y in gap], colour=2),
                Series(
                    name="model",
                    x=xs,
                    y=[450.0] * len(xs),
                    low=[400.0] * len(xs),
                    high=[500.0] * len(xs),
                    colour=3,
                    dashed=True,
                ),
            ],
            shades=phases,
            marks=[Mark(axis="y", value=700, label="limit 700 W")],
            sync="time",
            from_zero=False,
        ),
    ]


def pareto() -> Chart:
    return Chart(
        title="Throughput against latency",
        x_label="output tokens/s",
        y_label="ttft p99 (ms)",
        series=[
            Series(
                name="runs",
                kind="points",
                x=[1200, 2400, 4700, 8800],
                y=[80, 95, 180, 900],
                low=[75, 90, 150, 700],
                high=[90, 105, 230, 1300],
                labels=["rate 1", "rate 2", "rate 4", "rate 8"],
                hrefs=["other.html", "rate 2/report.html", "javascript:alert(1)", ""],
            ),
            Series(name="curve", x=[1200, 2400, 4700, 8800], y=[80, 95, 180, 900], colour=6, dashed=True),
        ],
        log=["x", "y"],
        log_now=["y"],
        origin="predicted",
    )


def bars() -> list[Chart]:
    names = ["7b seq 512 batch 16", "7b seq 1024 batch 8", "13b seq 512 batch 4", NASTY]
    parts = ["forward", "backward", "optimizer"]
    return [
        Chart(
            title="Tokens per second and GPU",
            x_label="model, sequence, batch",
            y_label="tokens/s per GPU",
            categories=names,
            series=[
                Series(
                    name="ours",
                    kind="bars",
                    x=[0, 1, 2, 3],
                    y=[15000, 14200, 8100, 300],
                    low=[14500, 14000, 7900, 250],
                    high=[15500, 14400, 8300, 350],
                ),
                Series(name="paper", kind="bars", x=[0, 1, 3], y=[14100, 13900, 250], colour=1, dashed=True),
            ],
        ),
        Chart(
            title="Time of a step",
            x_label="cell",
            y_label="ms",
            categories=[f"cell-number-{number}-of-a-long-name" for number in range(12)],
            stacked=True,
            series=[
                Series(name=part, kind="bars", x=list(range(12)), y=[(k + 1) * (10 + n) for n in range(12)], colour=k)
                for k, part in enumerate(parts)
            ],
        ),
    ]


def nothing() -> Chart:
    return Chart(title="KV cache", x_label="s", y_label="%", series=[Series(name="kv", x=[0, 1], y=[None, math.nan])])


def page() -> Document:
    table = Table(
        headers=["metric", "p50", "p99", "run"],
        rows=[
            ["ttft", Number(text="69.3 ms", value=69.31471805599453), "461 ms", Link(text="run A", href="other.html")],
            [NASTY, Number(text="unknown"), "-", Link(text="no link", href="javascript:alert(1)")],
        ],
        caption="Latencies",
    )
    wide = Table(
        headers=[f"column {number}" for number in range(30)],
        rows=[[f"cell {number}" for number in range(30)]],
        caption="All columns",
        numeric=False,
        folded=True,
    )
    findings = Items(
        items=[
            ListItem(head="Client was late", text="p99 lag 12 ms.", advice="Use --workers 4.", tone="warning"),
            ListItem(head="Requests failed", text=f"3 of 1000: {NASTY}", tone="bad"),
            ListItem(head="Server was idle before", tone="good"),
            ListItem(head="Clock", text="monotonic"),
        ]
    )
    return Document(
        title=f"Run A {NASTY}",
        verdict="The numbers can be trusted.",
        tone="good",
        origin="emulated",
        footer="llm-dissect 0.1.0",
        sections=[
            Section(id="verdict", title="Verdict", blocks=[findings, Text(text=NASTY, tone="warning")]),
            Section(id="numbers", title="Numbers", blocks=[table, wide]),
            Section(id="latencies", title="Latencies", blocks=[latencies(), pareto()]),
            Section(id="time", title="Over time", blocks=[*over_time(), nothing()]),
            Section(id="training", title="Training", blocks=bars()),
            Section(
                id="repeat",
                title="How to repeat it",
                blocks=[
                    Code(text="loadgen run \\\n  --rate 8 --requests 1000 \\\n  --out runs/a"),
                    Text(text="Plain text."),
                ],
            ),
        ],
    )
