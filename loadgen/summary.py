"""What a person at a terminal has at the end: one screen, the verdict first. Everything else is in the files.

No line is wider than the terminal. The worst finding is whole, the others while the screen has room, and the rest are
named. Text that came from
a server is escaped, and never read as markup.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from backends.untrusted import escaped
from loadgen import terminal
from loadgen.document import terminal as renderer
from loadgen.document.content import Document, Table, made_by, number
from loadgen.document.files import ReportError
from loadgen.report import sweeps
from loadgen.report.finding import Finding
from loadgen.report.metrics import ITEMS
from loadgen.report.repeats import Repeated
from loadgen.report.schema import Report
from loadgen.report.sweeps import Swept
from loadgen.report.text import QUICK_ACKS, name_of, not_ok, origin, rates, timetable_line, verdict_line

SCREEN_LINES, FILES_LINES = 24, 4  # of them, those that name the files
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")
STATISTICS = ("mean", "p50", "p90", "p99", "max")
SWEPT = {
    "requests/s": "requests_per_s", "tokens/s": "output_tokens_per_s", "ttft p50": "ttft_p50", "ttft p99": "ttft_p99",
    "tpot p50": "tpot_p50", "tpot p99": "tpot_p99", "e2el p50": "e2el_p50", "e2el p99": "e2el_p99",
}  # fmt: skip
SWEPT_ITEMS = {
    "requests/s": "requests_per_s", "items/s": ITEMS, "prompt tokens/s": "total_tokens_per_s", "e2el p50": "e2el_p50",
    "e2el p99": "e2el_p99",
}  # fmt: skip
STYLES = {"invalid": "bold red", "warning": "yellow", "info": "dim"}


def publish(
    directory: Path, shown: str | Sequence[Text], write: Callable[[], object], as_json: str, program: str = "loadgen",
    unasked: str = terminal.UNASKED_JSON,
) -> None:  # fmt: skip
    """How every command ends: prints its result, writes the result's files, names the files in the directory, and
    prints the result as JSON for scripts. shown: a text, or the lines of one screen. unasked: as `result_line` has it.
    """
    if isinstance(shown, str):
        terminal.result(shown)
    else:
        terminal.show(shown)
    try:
        write()
    except ReportError as error:  # it is printed all the same
        terminal.say_error(program, error)
    if isinstance(shown, str):
        terminal.result(f"\n{directory}/: " + ", ".join(sorted(escaped(path.name) for path in directory.iterdir())))
    else:
        terminal.show(files(directory, terminal.columns(sys.stderr)))
    terminal.result_line(as_json, unasked)


def rendered(document: Document) -> str:
    """A result as text for standard error."""
    return renderer.render(document, terminal.width(sys.stderr))


def of_run(report: Report, columns: int) -> list[Text]:
    """The screen of a run, but for its files."""
    top = _verdict(report, columns) + _emulated(origin(report), columns)
    top += _quick_acks(report.quick_acks, columns)
    below = [Text(), *_facts(report, columns), Text(), *_latencies(report, columns)]
    room = SCREEN_LINES - FILES_LINES - len(top) - len(below)
    return [*top, *_findings(report.verdict.findings, columns, room), *below]


def of_sweep(swept: Swept, columns: int) -> list[Text]:
    """The screen of a sweep, but for its files: its points, and what is wrong with its runs."""
    begun = [run for run in swept.runs if run.state != "waiting"]
    verdict = _of_runs([run.valid and run.state == "finished" for run in begun], columns)
    head = [
        *verdict,
        *_emulated("emulated" * swept.emulated, columns),
        *wrapped(Text(sweeps.title(swept)), columns),
    ]
    head += _quick_acks(bool(swept.plan.options.get("quick_acks")), columns)
    unit = f", {swept.plan.unit}" if swept.plan.unit else ""
    shown = SWEPT_ITEMS if sweeps.of_items(swept) else SWEPT
    rows = []
    for point in swept.points:
        verdict_of = "-" if not point.runs else "VALID" if point.valid else "INVALID"
        values = [number(sweeps.mean(point, name)) for name in shown.values()]
        rows.append([point.value, f"{len(point.runs)} of {swept.plan.repeat}", *values, verdict_of])
    wrong = [f"{run.directory}: {' '.join(run.reasons)}" for run in begun if run.reasons]
    points = Table([swept.plan.varies + unit, "runs", *shown, "verdict"], rows)
    return of_table(head, points, [*wrong, "Latencies are in milliseconds."], columns)


def of_repeats(repeated: Repeated, columns: int) -> list[Text]:
    """The screen of several runs of one server, but for their files."""
    what = escaped(f"{len(repeated.runs)} of {repeated.planned} runs of {repeated.backend} {repeated.model}")
    verdict = _of_runs([run.valid for run in repeated.runs], columns)
    head = [*verdict, *_emulated("emulated" * repeated.emulated, columns), *wrapped(Text(what), columns)]
    head += _quick_acks(repeated.quick_acks, columns)
    names = [f"{name.removesuffix('_ms')}_{statistic}" for name in LATENCIES for statistic in ("p50", "p99")]
    rows = []
    for name in ("requests_per_s", "output_tokens_per_s", ITEMS, *names):
        if (over := repeated.metrics.get(name)) is not None and over.mean is not None:
            interval = f"{number(over.ci[0])} to {number(over.ci[1])}" if over.ci else "-"
            rows.append([name, number(over.mean), " ".join(map(number, over.runs)), interval])
    wrong = [f"{run.directory}: {' '.join(run.reasons)}" for run in repeated.runs if run.reasons]
    metrics = Table(["", "mean", "runs", "95 % CI"], rows)
    return of_table(head, metrics, [*wrong, "Latencies are in milliseconds."], columns)


def of_table(head: Sequence[Text], of: Table, remarks: Sequence[str], columns: int) -> list[Text]:
    """A screen around a table. Of rows that do not fit the last are kept."""
    lines = table(of, columns)
    below = [line for remark in remarks[:3] for line in wrapped(Text(escaped(remark)), columns, most=4)]
    room = SCREEN_LINES - FILES_LINES - len(head) - len(below) - 3  # the heading and two empty lines
    left = len(of.rows) - room
    shown = (
        lines if left <= 0 else [lines[0], Text(f"{left + 1} more are in the files", style="dim"), *lines[left + 2 :]]
    )
    return [*head, Text(), *shown, Text(), *below]


def table(of: Table, columns: int) -> list[Text]:
    """A line for each row after that of the heading. Columns that do not fit are left out, the last but one first."""
    last = len(of.headers) - 1
    headers = [msgspec.structs.replace(each, optional=0 < at < last) for at, each in enumerate(of.columns)]
    lines = [Text(line) for line in renderer.rows(msgspec.structs.replace(of, headers=headers), columns)]
    lines[0].stylize("dim")
    for line in lines:
        line.truncate(columns, overflow="ellipsis")
    return lines


def _of_runs(valid: Sequence[bool], columns: int) -> list[Text]:
    if all(valid):
        return [Text("VALID", style="bold green")]
    text = f"INVALID: {valid.count(False)} of {len(valid)} runs, do not quote their numbers"
    return wrapped(Text(text, style="bold red"), columns)


def line(name: str, report: Report, state: str = "finished") -> str:
    """A run in a line, while others follow."""
    verdict = "VALID" if report.verdict.valid else "INVALID"
    first = "ttft" if report.items is None else "e2el"
    latency = report.metrics[f"{first}_ms"]
    return (
        f"{name}: {verdict}, {state}: {rates(report.throughput)}, {first} p50 {number(latency.p50)} ms, "
        f"p99 {number(latency.p99)} ms"
    )


def files(directory: Path, columns: int) -> list[Text]:
    """Where everything is; first what a person reads."""
    present = (path.name for path in directory.iterdir())
    names = sorted(present, key=lambda name: (not name.endswith(".html"), not name.endswith(".md"), name))
    return [Text(), *wrapped(Text(escaped(f"{directory}/: {', '.join(names)}")), columns, most=FILES_LINES - 1)]


def wrapped(text: Text, columns: int, most: int | None = None) -> list[Text]:
    """In lines, broken between words; `most`: the rest is cut off."""
    broken = list(text.wrap(Console(width=columns), columns))
    for line in broken:
        line.rstrip()
    if most is not None and len(broken) > most:
        rest = Text(" ").join(broken[most - 1 :])
        rest.truncate(columns, overflow="ellipsis")
        return [*broken[: most - 1], rest]
    return broken


def _emulated(origin: str, columns: int) -> list[Text]:
    return wrapped(Text(made_by(origin), style="bold yellow"), columns) if origin else []


def _quick_acks(given: bool, columns: int) -> list[Text]:
    return wrapped(Text(QUICK_ACKS), columns) if given else []


def _verdict(report: Report, columns: int) -> list[Text]:
    style = "bold red" if not report.verdict.valid else "bold yellow" if report.imported else "bold green"
    return wrapped(Text(verdict_line(report), style=style), columns)


def _findings(findings: Sequence[Finding], columns: int, room: int) -> list[Text]:
    """The worst whole, the others while there is room; the rest by their names."""
    lines: list[Text] = []
    for shown, finding in enumerate(findings):
        more = list(_finding(finding, columns))
        if lines and len(lines) + len(more) > room - 1:
            codes = ", ".join(each.code for each in findings[shown:])
            left = Text(f"and {len(findings) - shown} more, in report.md: {codes}", style="dim")
            return [*lines, *(Text("  ").append_text(line) for line in wrapped(left, columns - 2, most=2))]
        lines += more
    return lines


def _finding(finding: Finding, columns: int) -> Iterator[Text]:
    style = STYLES[finding.severity]
    what = Text.assemble((f"{finding.severity} {finding.code}", style), f": {escaped(finding.message)}")
    for text, indent in ((what, 2), (Text(escaped(finding.advice)), 4)):
        for line in wrapped(text, columns - indent):
            yield Text(" " * indent).append_text(line)


def _facts(report: Report, columns: int) -> Iterator[Text]:
    """What was measured, and how much of it."""
    requests, goodput = report.requests, report.goodput
    facts = [
        f"{name_of(report)}, {report.arrival}",
        f"{number(requests.ok)} requests ok, {not_ok(requests)}"
        + (f" of {number(requests.planned)}" if requests.planned is not None else "")
        + f", in {number(report.duration_s)} s",
        rates(report.throughput),
    ]
    if goodput is not None and goodput.request_goodput is not None:
        limits = ", ".join(f"{name} <= {number(limit)} ms" for name, limit in goodput.slos_ms.items())
        facts.append(f"goodput {number(goodput.request_goodput)} requests/s within {limits}")
    for fact in facts:
        yield from wrapped(Text(escaped(fact)), columns, most=2)
    if truth := timetable_line(report):
        yield from wrapped(Text(truth), columns)
    for error in report.errors[:1]:
        message = Text(escaped(f"{error.count} x {error.outcome}: {error.message}"))
        yield from wrapped(message, columns, most=1)


def _latencies(report: Report, columns: int) -> list[Text]:
    rows = [
        [name.removesuffix("_ms"), *(number(getattr(report.metrics[name], each)) for each in STATISTICS)]
        for name in LATENCIES
        if report.items is None or report.metrics[name].n  # of no stream few
    ]
    return table(Table(["latency, ms", *STATISTICS], rows), columns)
