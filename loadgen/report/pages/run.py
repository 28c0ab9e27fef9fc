"""The page of a run: its verdict, what was measured on what, numbers with intervals, charts, the slowest requests,
errors by outcome, and how to repeat it. Pure: the same records always give the same page."""

from __future__ import annotations

import json
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from loadgen.document.content import (
    Block,
    Cell,
    Code,
    Document,
    Items,
    ListItem,
    Section,
    Table,
    Text,
    Tile,
    Tone,
    cell,
    number,
)
from loadgen.report import cluster, metrics, text
from loadgen.report.pages import charts, intervals
from loadgen.report.pages.charts import Shown
from loadgen.report.pages.parts import interval
from loadgen.report.schema import Report
from loadgen.rundir.outcomes import OUTCOMES

FILE = "report.html"
SLOWEST = 20
MAX_ERROR_CHARACTERS = 300
RATES = {
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "output tokens/s",
    metrics.ITEMS: "items/s",
    "total_tokens_per_s": "total tokens/s",
    metrics.GOODPUT: "goodput, requests/s",
}


def page(run: Shown) -> Document:
    report = run.report
    prompts = charts.by_prompt([run])
    sections = [
        Section("verdict", "Verdict", list(_verdict(report))),
        Section("numbers", "Numbers", list(_numbers(run))),
        Section("latency", "Latency distributions", charts.latencies([run]), ("cdf.svg", "cdf.png")),
        Section("time", "Over time", over_time([run]), ("timeline.png",)),
        *(
            []
            if prompts is None
            else [Section("prompts", "Prompt length", [prompts, *text.prompt_tables(report)], ("ttft_by_prompt.png",))]
        ),
        Section("slowest", "Slowest requests", list(_slowest(run))),
        Section("errors", "Errors", list(_errors(run))),
        Section("setup", "What was measured on what", setup(run)),
        Section("repeat", "The command, and how to repeat it", list(_repeat(run))),
    ]
    return Document(
        title=f"{text.name_of(report)}, {report.arrival}",
        verdict=text.verdict_line(report),
        doubt=_doubt(report),
        stamp="" if report.verdict.valid else "INVALID",
        tiles=list(_tiles(report)),
        sections=sections,
        tone=tone(report),
        origin=text.origin(report),
        footer=f"Run {report.run_id}, llm-dissect {report.version}. {report.convention_differs}",
    )


def tone(report: Report) -> Tone:
    """The tone of its verdict."""
    return "good" if report.verdict.valid else "bad"


def _doubt(report: Report) -> str:
    """What a valid run's verdict adds; of a prediction also that no errors of its kind are known."""
    warnings = sum(finding.severity == "warning" for finding in report.verdict.findings)
    doubts = [f"{warnings} warning{'' if warnings == 1 else 's'}"] if warnings else []
    if not text.is_vouched_for(report):
        doubts.append("no real run of its kind to say how far off it is")
    return ", ".join(doubts) if report.verdict.valid else ""


def _tiles(report: Report) -> Iterator[Tile]:
    """The numbers that a reader looks for first."""
    throughput, goodput, use = report.throughput, report.goodput, report.gpus
    made = metrics.ITEMS if report.items is not None else "output_tokens_per_s"
    yield Tile(RATES[made], [("", cell(getattr(throughput, made)))], "#rates")
    for metric in ("ttft_ms", "tpot_ms", "e2el_ms") if report.items is None else ("e2el_ms",):
        summary, name = report.metrics[metric], metric.removesuffix("_ms")
        yield Tile(f"{name}, ms", [("p50", cell(summary.p50)), ("p99", cell(summary.p99))], f"#{name}")
    if goodput is not None and goodput.request_goodput is not None:
        yield Tile("goodput, requests/s", [("", cell(goodput.request_goodput))], "#numbers")
    economics = report.economics
    if economics is not None and economics.price_per_million_output_tokens is not None:
        price = cell(economics.price_per_million_output_tokens)
        yield Tile(f"{economics.currency} a million output tokens", [("", price)], "#setup")
    if use is not None and use.j_per_output_token is not None:
        yield Tile("J an output token", [("", cell(use.j_per_output_token))], "#power")


def _verdict(report: Report) -> Iterator[Block]:
    if report.verdict.findings:
        yield text.listed(report.verdict.findings)
    else:
        yield Text("Nothing was found that speaks against these numbers.", "good")


def setup(run: Shown) -> list[Block]:
    """Model, server, GPUs, flags, load and client; all options behind them."""
    rows = [(what, value) for what, value in _facts(run) if value]
    options = [[name, option(value)] for name, value in run.manifest.config.items() if value not in (None, [], ())]
    return [
        Table(headers=["", "value"], rows=rows, caption="Server, load, client", numeric=False, folded=True),
        Table(headers=["option", "value"], rows=options, caption="All options", numeric=False, folded=True),
    ]


def option(value: object) -> str:
    """The value of an option, as text."""
    return value if isinstance(value, str) else "-" if value is None else json.dumps(value, ensure_ascii=False)


def differing(settings: Mapping[str, Sequence[object]], runs: Sequence[str], caption: str = "") -> Table:
    """What was set differently, with the value of each run."""
    rows = [[name, *map(option, values)] for name, values in settings.items()]
    return Table(headers=["setting", *runs], rows=rows, caption=caption, numeric=False)


def _facts(run: Shown) -> Iterator[tuple[str, str]]:
    report, manifest, launch = run.report, run.manifest, run.report.launch
    yield "model", report.model
    yield "server", f"{report.backend} {report.server_version or '(version unknown)'} at {manifest.url}"
    if manifest.kv_cache_tokens is not None and launch is None:
        yield "its KV cache", f"{number(manifest.kv_cache_tokens)} tokens"
    if manifest.server_settings and launch is None:
        yield "its settings", ", ".join(f"{name} {value}" for name, value in manifest.server_settings.items())
    if launch is not None:
        yield "started", text.launch_line(launch).removeprefix("Started: ")
        yield "its command", launch.command
        yield "its notes", " ".join(launch.notes)
    yield "GPUs", _gpus(report)
    emulation = report.emulation
    if emulation is not None:
        yield "modelled", f"{emulation.scheduler} on {emulation.gpus} x {emulation.gpu}, {emulation.formats}"
        yield "profile", emulation.profile
    yield "load", _load(run)
    yield "not sent", manifest.left_out
    machine, client = manifest.machine, report.client
    processes = manifest.client_processes or (client.processes if client is not None else None)
    yield (
        "client",
        f"llm-dissect {report.version}, "
        + (f"{processes} process{'' if processes == 1 else 'es'} on " if processes else "")
        + f"{machine.hostname}: {machine.cpu_count} CPUs, Python {machine.python}, {machine.platform}",
    )
    if report.cluster is not None:
        yield "machines", " ".join(cluster.lines(report.cluster))
    yield "started at", _utc(manifest.started_unix_s)
    yield "run", report.run_id


def _utc(unix_s: float) -> str:
    """Empty for a number that is no time, which a manifest from elsewhere may hold."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s))
    except (OverflowError, ValueError, OSError):
        return ""


def _gpus(report: Report) -> str:
    """As the launch or the samples name them; nothing where nobody looked."""
    names = [card.name for card in report.launch.gpus] if report.launch is not None else []
    if not names and report.gpus is not None:
        names = [each.name for each in report.gpus.each]
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())


def _load(run: Shown) -> str:
    report, config = run.report, run.manifest.config
    planned = report.requests.planned
    phrases = [
        f"{report.arrival}, {number(planned)} requests" if planned is not None else report.arrival,
        *(
            f"{name.replace('_', ' ')} {config[name]}"
            for name in ("duration", "input_tokens", "output_tokens", "thinking_tokens", "images", "dataset",
                         "trace", "prefix", "sessions", "turns", "think_time", "first_tokens", "subagents",
                         "context_tokens", "seed")
            if config.get(name) is not None and (name != "output_tokens" or report.items is None)
        ),
        *(["batch size " + option(config.get("batch_size"))] if report.items is not None else []),
    ]  # fmt: skip
    return ", ".join(phrases)


def _numbers(run: Shown) -> Iterator[Block]:
    report = run.report
    requests = report.requests
    outcomes: list[list[Cell]] = [[name, cell(count)] for name, count in requests.by_outcome.items()]
    yield rates([run])
    late = {name.removesuffix("_ms"): each for name, each in report.late_statistics.items()}
    marks = {name: ", ".join(each).replace("_", ".") for name, each in late.items()}
    extra = ("made by the client's stalls", marks) if marks else ("held out, off by", text.off_by_metric(report))
    yield text.with_column(text.summaries("latency, ms", dict(text.latencies(report)), "Latency"), *extra)
    yield latency_intervals([run])
    yield Text(intervals.MEANING)
    yield from text.part_tables(report)
    if report.server is not None and report.server.replicas:
        yield Table(headers=list(text.REPLICA_HEADS), rows=list(text.replica_rows(report.server)), caption="By replica")
    if report.stamps:
        sources = " and ".join(dict.fromkeys(stamp.by for stamp in report.stamps))
        caption = f"The server's own times, as {sources} have them"
        yield Table(headers=list(text.STAMP_HEADS), rows=list(text.stamp_rows(report.stamps)), caption=caption)
    yield Table(headers=["outcome", "requests"], rows=outcomes, caption="Requests by outcome")
    yield Items(
        items=[ListItem(head, rest) for head, _, rest in (s.partition(": ") for s in text.summary_lines(report))]
    )


def rates(runs: Sequence[Shown]) -> Table:
    """Throughput of each run, with its interval."""
    rows: list[list[Cell]] = []
    measured = [_rates(run) for run in runs]
    slos = [{} if run.report.goodput is None else run.report.goodput.slos_ms for run in runs]
    bounds = [
        intervals.of_rates(run.measured, run.in_blocks, rates, limits, run.report.arrival)
        for run, rates, limits in zip(runs, measured, slos, strict=True)
    ]
    for name, title in RATES.items():
        for run, rates, of_run in zip(runs, measured, bounds, strict=True):
            if name in rates:
                rows.append([_row(runs, run, title), cell(rates[name]), interval(of_run[name])])
    return Table(headers=["throughput", "value", "95 % interval"], rows=rows, caption="Throughput")


def _rates(run: Shown) -> dict[str, float | None]:
    throughput, goodput = run.report.throughput, run.report.goodput
    without = metrics.ITEMS if run.report.items is None else "output_tokens_per_s"
    return {
        **{name: getattr(throughput, name) for name in throughput.__struct_fields__ if name != without},
        **({} if goodput is None else {metrics.GOODPUT: goodput.request_goodput}),
    }


def _row(runs: Sequence[Shown], run: Shown, what: str) -> str:
    return what if len(runs) == 1 else f"{what}: {run.name}"


def latency_intervals(runs: Sequence[Shown]) -> Table:
    """Mean, p50 and p99 of each run, each with its interval."""
    rows: list[list[Cell]] = []
    for metric in charts.latency_titles(runs):
        for run in runs:
            bounds = intervals.of_metric(
                run.measured,
                run.in_blocks,
                metric,
                run.rules,
                tail=intervals.tail_moments(run.measured, run.report.arrival),
            )
            row: list[Cell] = [_row(runs, run, metric.removesuffix("_ms"))]
            for statistic in intervals.STATISTICS:
                row += [cell(getattr(run.report.metrics[metric], statistic)), interval(bounds[statistic])]
            rows.append(row)
    headers = ["latency, ms", *(h for name in intervals.STATISTICS for h in (name, f"95 % interval of {name}"))]
    return Table(headers=headers, rows=rows, caption="Latency with intervals")


def over_time(runs: Sequence[Shown]) -> list[Block]:
    """The charts over time; where nobody sampled the server, a line that says so."""
    drawn, empty = charts.over_time(runs)
    blocks: list[Block] = list(drawn)
    if empty:
        blocks.append(Text(f"Left out, since nothing but zero was sampled: {', '.join(empty)}."))
    if not any(run.samples for run in runs):
        blocks.append(Text("There are no samples of the server (queue, KV cache, preemptions) or of GPUs."))
    return blocks


def _slowest(run: Shown) -> Iterator[Block]:
    """Those of the longest e2el and how their tokens came; behind them those of the longest ttft."""
    by_e2el = _longest(run, "e2el_ms")
    if not len(by_e2el):
        yield Text("No request ended ok.")
        return
    yield _requests(run, by_e2el, f"The {len(by_e2el)} requests of the longest e2el", folded=False)
    yield charts.timelines(run, by_e2el)
    if len(by_ttft := _longest(run, "ttft_ms")):
        yield _requests(run, by_ttft, f"The {len(by_ttft)} requests of the longest ttft", folded=True)


def _longest(run: Shown, metric: str) -> NDArray[np.int64]:
    """Rows of the measured requests that ended ok, the longest first."""
    values = metrics.column(run.measured, metric, run.rules)
    rows = np.flatnonzero(run.measured.ok & ~np.isnan(values))
    return rows[np.argsort(-values[rows], kind="stable")][:SLOWEST]


def _requests(run: Shown, rows: NDArray[np.int64], caption: str, *, folded: bool) -> Table:
    measured = run.measured
    cells: list[list[Cell]] = []
    columns = {name: metrics.column(measured, f"{name}_ms", run.rules) for name in ("ttft", "tpot", "e2el", "send_lag")}
    in_sessions = bool((measured.turn > 0).any())
    for rank, row in enumerate(rows.tolist(), 1):
        gaps_us = measured.itl_us[measured.itl_offsets[row] : measured.itl_offsets[row + 1]]
        cells.append(
            [
                f"{rank}. request {measured.id[row]}",
                *([cell(int(measured.session[row])), cell(int(measured.turn[row]))] if in_sessions else []),
                cell(float(measured.scheduled_ns[row]) / 1e9),
                *(cell(_known(float(column[row]))) for column in columns.values()),
                cell(float(gaps_us.max()) / 1000 if len(gaps_us) else None),
                *(cell(_counted(int(tokens[row]))) for tokens in (measured.prompt_tokens, measured.output_tokens)),
            ]
        )
    turns = ["session", "turn"] if in_sessions else []
    latencies = ["ttft, ms", "tpot, ms", "e2el, ms", "send lag, ms", "longest gap, ms"]
    headers = ["rank, request", *turns, "due, s", *latencies, "prompt tokens", "output tokens"]
    return Table(headers=headers, rows=cells, caption=caption, folded=folded)


def _known(value: float) -> float | None:
    return None if np.isnan(value) else value


def _counted(tokens: int) -> int | None:
    return None if tokens < 0 else tokens


def _errors(run: Shown) -> Iterator[Block]:
    """Each outcome but ok, its most frequent message, and the first request that ended with it."""
    measured = run.measured
    if not len(measured):
        yield Text("No request was measured.", "bad")
        return
    rows: list[list[Cell]] = []
    for code in np.unique(measured.outcome[~measured.ok]).tolist():
        those = np.flatnonzero(measured.outcome == code)
        messages = Counter(measured.errors.get(key, "") for key in measured.id[those].tolist())
        message, times = messages.most_common(1)[0]
        example = next(row for row in those.tolist() if measured.errors.get(int(measured.id[row]), "") == message)
        rows.append(
            [
                OUTCOMES[code],
                cell(len(those)),
                cell(int(measured.id[example])),
                cell(float(measured.scheduled_ns[example]) / 1e9),
                message[:MAX_ERROR_CHARACTERS] or "no message",
                cell(times),
            ]
        )
    if not rows:
        yield Text("Every request ended ok.", "good")
        return
    headers = ["outcome", "requests", "such as request", "due, s", "most frequent message", "requests with it"]
    yield Table(headers=headers, rows=rows, numeric=False)


def _repeat(run: Shown) -> Iterator[Block]:
    manifest, launch = run.manifest, run.report.launch
    yield Text("What was typed:")
    yield Code(shlex.join(manifest.argv))
    repeats = manifest.config.get("repeat")
    if manifest.argv[1:2] not in (["run"], ["predict"]) or (isinstance(repeats, int) and repeats > 1):
        yield Text("This run alone, of several that the command made: its options as a file for loadgen run --config.")
        yield Code("\n".join(_toml(manifest.config)))
    if launch is not None:
        yield Text("The server that was started for it:")
        yield Code(launch.command)
    yield Text(
        "The same options and seed draw the same load; --out needs a new directory. "
        "loadgen report DIRECTORY makes this page again from the records, and loadgen compare A B tells whether two "
        "runs differ."
    )


def _toml(config: Mapping[str, object]) -> Iterable[str]:
    """The options that were set, but for where the run is kept."""
    for name, value in config.items():
        if name not in ("out", "repeat", "dry_run") and value not in (None, [], ()):
            yield f"{name} = {json.dumps(value, ensure_ascii=False)}"
