"""From a run directory to its report: numbers (report.json), text (report.md), the page (report.html) and the figures:
the latencies' CDF, the run over time, and ttft by prompt length where lengths differ.

`build` is pure; the same records and manifest always give the same report. The word `emulated` must stand in every
output of an emulated run.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from backends import foreign_files
from backends.untrusted import UNDECODABLE
from loadgen import rundir
from loadgen.config import Config, ConfigError, price_of
from loadgen.document import files
from loadgen.document.files import ReportError
from loadgen.monitor import server_view
from loadgen.monitor.server_view import ServerView
from loadgen.report import abandoned, findings, metrics, reasoning, schema, sessions, sharing, slices, stalls
from loadgen.report.finding import Finding
from loadgen.report.findings.stream import is_delivery
from loadgen.report.metrics import CONVENTIONS, METRICS, Convention
from loadgen.report.pages import charts, parts, run, runs
from loadgen.report.pages.charts import Shown
from loadgen.report.schema import SCHEMA, Numbers, Report
from loadgen.report.text import name_of
from loadgen.rundir import Manifest, contradictions, records
from loadgen.rundir.outcomes import OUTCOMES
from loadgen.rundir.records import ClientFacts, Recorded, RequestTable
from loadgen.steady import changes, flows, keeping_up

MAX_ERRORS = 5  # distinct messages that a report lists
MOST_MODELS = 64  # names that replies gave
MAX_ERROR_CHARACTERS = 300


def build(
    manifest: Manifest,
    table: RequestTable,
    facts: Sequence[ClientFacts],
    slos: Mapping[str, float] | None = None,
    convention: str = "loadgen",
    seen: ServerView | None = None,
    doubts: Sequence[str] = (),
) -> Report:
    """The report of a run from its records (`table`) and the facts of each client process.

    slos: limits in ms by `ttft`, `tpot`, `e2el`, for goodput. seen: the server's own view. Raises ReportError.
    """
    rules, measured, kept = _rules(convention), table.measured(), flows.kept(table, manifest)
    duration_s, tokens, full = metrics.duration_s(measured, rules), _tokens(measured), slices.full_slots(kept, manifest)
    silent = stalls.find(measured, _worst(facts, "loop_lag_max_ms"))
    summaries = {name: metrics.summary(metrics.sample(measured, name, rules), rules.percentile) for name in METRICS}
    server, requests = seen.server if seen is not None else None, slices.by_the_server(measured, rules)
    numbers = Numbers(
        schema=SCHEMA,
        version=manifest.version,
        run_id=manifest.run_id,
        backend=manifest.backend,
        model=manifest.model,
        server_version=manifest.server_version,
        arrival=manifest.arrival,
        emulated=manifest.emulated,
        convention=convention,
        convention_differs=rules.differs,
        offered_requests_per_s=_offered(manifest, measured.scheduled_ns[measured.turn == 0]),
        requests=_requests(manifest, measured),
        tokens=tokens,
        duration_s=duration_s,
        throughput=(throughput := _throughput(measured, duration_s, full)),
        metrics=summaries,
        goodput=(goodput := _goodput(measured, slos, rules, duration_s if full is None else full.seconds)),
        burst=_burst(measured),
        client=_client(facts),
        ceiling=_ceiling(manifest, measured, facts),
        server=server,
        gpus=_gpus(seen, tokens.output),
        errors=_errors(measured),
        asked_prompt_tokens=slices.lengths(sessions.added_tokens(measured), manifest.config.get("input_tokens")),
        asked_output_tokens=slices.lengths(measured.asked_tokens, manifest.config.get("output_tokens")),
        **_on_the_wire(manifest, measured, facts, rules, full),
        ttft_by_prompt=slices.ttft_by_prompt(measured, rules),
        sharing=sharing.build(measured, server, rules),
        phases=slices.by_phase(measured, manifest.phases, rules),
        stalls=silent,
        sessions=_sessions(manifest, measured, rules),
        turns=sessions.by_turn(measured, rules),
        **{name: getattr(manifest, name) for name in ("emulation", "timetable", "launch", "cluster")},
        server_requests=requests,
        stamps=slices.stamps(requests, server, summaries if full is None else _meanwhile(kept, summaries, rules)),
        economics=_economics(manifest, seen, summaries["tpot_ms"], throughput, goodput),
        **stalls.of_client(measured, facts, rules),
        steady=_steady(kept, manifest, rules, silent),
        reply_models=dict(Counter(measured.models.values()).most_common(MOST_MODELS)),
    )
    return _judged(numbers, findings.find(numbers, table, measured, facts, manifest, doubts))


def _meanwhile(
    kept: RequestTable, summaries: Mapping[str, metrics.Summary], rules: Convention
) -> dict[str, metrics.Summary]:
    """The metrics with the replies of a warm-up that handed its slots over, which a server counts as they end; their
    first tokens came before."""
    found = {name: metrics.summary(metrics.sample(kept, name, rules), rules.percentile) for name in METRICS}
    return {**found, "ttft_ms": summaries["ttft_ms"]}


def _judged(numbers: Numbers, listed: list[Finding]) -> Report:
    verdict = schema.Verdict(all(finding.severity != "invalid" for finding in listed), listed)
    return Report(**msgspec.structs.asdict(numbers), verdict=verdict)


def _rules(convention: str) -> Convention:
    if convention not in CONVENTIONS:
        raise ReportError(f"Unknown convention {convention!r}; use one of {', '.join(CONVENTIONS)}.")
    return CONVENTIONS[convention]


def _requests(manifest: Manifest, measured: RequestTable) -> schema.Requests:
    by_outcome = Counter(measured.outcome.tolist())
    ok = int(measured.ok.sum())
    return schema.Requests(
        planned=manifest.requests_planned,
        ok=ok,
        failed=len(measured) - ok - int(measured.abandoned.sum()),
        by_outcome={OUTCOMES[code]: by_outcome[code] for code in sorted(by_outcome)},
    )


def _tokens(measured: RequestTable) -> schema.TokenCounts:
    ok = measured.ok
    return schema.TokenCounts(metrics.total(measured.prompt_tokens[ok]), metrics.total(measured.output_tokens[ok]))


def _throughput(measured: RequestTable, duration_s: float | None, full: slices.FullSlots | None) -> schema.Throughput:
    if full is not None:
        return schema.Throughput(*map(full.rates.get, ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")))
    rates = {name: _per_s(count, duration_s) for name, count in metrics.counts(measured).items()}
    return schema.Throughput(**{"output_tokens_per_s": None, **rates})


def _per_s(count: int | None, duration_s: float | None) -> float | None:
    return None if count is None or duration_s is None else count / duration_s


def _goodput(
    measured: RequestTable, slos: Mapping[str, float] | None, rules: Convention, duration_s: float | None
) -> schema.Goodput | None:
    if not slos:
        return None
    try:
        good = metrics.good_count(measured, slos, rules)
    except ValueError as error:
        raise ReportError(str(error)) from None
    return schema.Goodput(slos_ms=dict(slos), good=good, request_goodput=_per_s(good, duration_s))


def _on_the_wire(
    manifest: Manifest,
    measured: RequestTable,
    facts: Sequence[ClientFacts],
    rules: Convention,
    full: slices.FullSlots | None,
) -> dict[str, Any]:
    """The numbers that say over what, and how, tokens came, and what the client did beside reading them."""
    return {
        "abandoned": abandoned.build(measured, rules),
        "resent": abandoned.resent(measured, rules),
        "by_adapter": slices.by_adapter(measured, rules),
        "by_priority": slices.by_priority(measured, rules),
        "items": slices.items(measured),
        "images": slices.images(measured, manifest.config.get("images")),
        "full_slots_s": None if full is None else full.seconds,
        "connect_ms": _connecting(facts),
        "retried_connections": len(measured.retried),
        "wire": manifest.wire,
        "quick_acks": bool(manifest.config.get("quick_acks")),
        "imported": "" if manifest.imported is None else manifest.imported.tool,
        "ttft_answer_ms": reasoning.ttft_answer(measured, rules),
        "reasoning": reasoning.build(measured, rules),
        "ttft_of_delivery": is_delivery(measured),
    }


def _burst(measured: RequestTable) -> schema.Burst | None:
    """None when fewer than two requests due at t = 0 were sent."""
    due, spread_ms = metrics.send_spread_ms(measured)
    return None if spread_ms is None else schema.Burst(due, spread_ms)


def _worst(facts: Sequence[ClientFacts], name: str) -> float | None:
    """The largest of the processes' values: percentiles of separate processes cannot be merged exactly."""
    return max((value for fact in facts if (value := getattr(fact, name)) is not None), default=None)


def _offered(manifest: Manifest, due_ns: NDArray[np.int64]) -> float | None:
    """The mean rate of what was due then (n,), requests or sessions, as it was drawn; None without a rate."""
    if manifest.arrival.partition(":")[0] not in metrics.RATES or len(due_ns) < 2:
        return None
    return _per_s(len(due_ns) - 1, float(due_ns.max() - due_ns.min()) / 1e9 or None)  # at 1e9/s all may be due at once


def _sessions(manifest: Manifest, measured: RequestTable, rules: Convention) -> schema.SessionStats | None:
    planned = manifest.requests_planned
    offered_per_s = _offered(manifest, sessions.opened(measured).begin_ns)
    return sessions.build(measured, rules, offered_per_s, planned is None or len(measured) >= planned)


def _steady(
    kept: RequestTable, manifest: Manifest, rules: Convention, silent: Sequence[schema.Stall]
) -> schema.Steady | None:
    """None of a burst, whose transient is what it measures. kept: as `flows.kept` has it."""
    measured = kept.measured()
    of_sessions = bool((measured.turn > 0).any())
    if of_sessions:
        flow = flows.of_sessions(sessions.opened(measured), manifest)
    else:
        flow = flows.of_requests(measured, manifest)
    slots = flows.slots(manifest.arrival)
    if flow is None and slots is None:
        return None
    unit: Literal["requests", "sessions"] = "sessions" if of_sessions else "requests"
    seen = None if flow is None else keeping_up.judge(flow, unit)
    change = None
    if not of_sessions and not flows.changes(manifest.arrival):  # histories grow, and a pace with them
        pauses = [(stall.start_s, stall.end_s) for stall in silent]
        change = changes.find(flows.stamps(kept, manifest), pauses)
    found, why = slices.window(kept, manifest, rules, change)
    if seen is not None and seen.word == "fell_behind":
        found, why = None, "the server fell behind"
    peak = None
    if slots is not None:
        sent, ended = (each[each != -1] for each in (kept.sent_ns, kept.done_ns))
        peak = int(metrics.under_way(sent, ended)[1].max(initial=0))
    return schema.Steady(
        unit=unit,
        keeping_up=seen,
        window=found,
        why=why,
        peak=peak,
        change=change,
    )


def _connecting(facts: Sequence[ClientFacts]) -> schema.Connecting | None:
    if not facts:
        return None
    connections = sum(fact.connections for fact in facts)
    return schema.Connecting(connections, _worst(facts, "connect_p50_ms"), _worst(facts, "connect_max_ms"))


def _client(facts: Sequence[ClientFacts]) -> schema.ClientUse | None:
    if not facts:
        return None
    events = sum(fact.events for fact in facts)
    lags = [f"{lag}_lag_{statistic}_ms" for lag in ("loop", "receive") for statistic in ("p50", "p99", "max")]
    return schema.ClientUse(
        processes=len(facts),
        cpu_us_per_event=1e6 * sum(fact.cpu_s for fact in facts) / events if events else None,
        cpu_peak_ratio=_worst(facts, "cpu_peak_ratio"),
        peak_rss_mb=sum(fact.peak_rss_bytes for fact in facts) / 1e6,
        **{name: _worst(facts, name) for name in lags},
    )


def _ceiling(manifest: Manifest, measured: RequestTable, facts: Sequence[ClientFacts]) -> schema.CeilingUse | None:
    ceiling = manifest.ceiling
    if ceiling is None:
        return None
    peak = metrics.peak_events_per_s(measured)
    return schema.CeilingUse(
        **msgspec.structs.asdict(ceiling),
        peak_events_per_s=peak,
        headroom_ratio=ceiling.events_per_s_per_core * max(1, len(facts)) / peak if peak else None,
    )


def _gpus(seen: ServerView | None, output_tokens: int | None) -> schema.GpuUse | None:
    if seen is None or seen.gpus is None:
        return None
    energy_j = seen.gpus.energy_j
    return schema.GpuUse(
        **msgspec.structs.asdict(seen.gpus),
        j_per_output_token=energy_j / output_tokens if energy_j is not None and output_tokens else None,
    )


def _sharing_gpus(manifest: Manifest, seen: ServerView | None) -> int | None:
    """How many GPUs share the model: modelled ones, those of a server that loadgen started, or, of a server that was
    there, those that --gpus names. None where nothing says."""
    if manifest.emulation is not None:
        return manifest.emulation.gpus
    if manifest.launch is not None:
        return len(manifest.launch.gpus) or None
    if manifest.config.get("gpus") is None or seen is None or seen.gpus is None:
        return None
    return len(seen.gpus.each) or None


def _economics(
    manifest: Manifest,
    seen: ServerView | None,
    tpot_ms: metrics.Summary,
    throughput: schema.Throughput,
    goodput: schema.Goodput | None,
) -> schema.Economics | None:
    """None where no tpot is known, no number of GPUs and no price."""
    count, (price, currency) = _sharing_gpus(manifest, seen), _price(manifest)
    if count is None and tpot_ms.p50 is None and price is None:
        return None
    output, total = throughput.output_tokens_per_s, throughput.total_tokens_per_s
    good = None if goodput is None else goodput.request_goodput
    per_million = metrics.price_per_million(price, count, good)
    return schema.Economics(
        interactivity_tokens_per_s=_over(1000, tpot_ms.p50),
        tps_per_user=_over(1000, tpot_ms.p90),
        gpus=count,
        output_tokens_per_s_per_gpu=_over(output, count),
        total_tokens_per_s_per_gpu=_over(total, count),
        currency=currency,
        gpu_hour_price=price,
        price_per_million_output_tokens=metrics.price_per_million(price, count, output),
        price_per_million_tokens=metrics.price_per_million(price, count, total),
        goodput_requests_per_price=_over(metrics.MILLION, per_million),
    )


def _price(manifest: Manifest) -> tuple[float, str] | tuple[None, None]:
    """The price that the run was started with; none where the manifest's is no price."""
    text = manifest.config.get("gpu_hour_price")
    with contextlib.suppress(ValueError):
        return price_of(text) if isinstance(text, str) else (None, None)
    return None, None


def _over(value: float | None, by: float | None) -> float | None:
    return None if value is None or not by else value / by


def _errors(measured: RequestTable) -> list[schema.ErrorCount]:
    """The most frequent messages, each with its outcome and how many requests it ended."""
    failed = np.isin(measured.id, list(measured.errors))
    outcome_of = dict(zip(measured.id[failed].tolist(), measured.outcome[failed].tolist(), strict=True))
    counts = Counter((OUTCOMES[outcome_of[key]], text[:MAX_ERROR_CHARACTERS]) for key, text in measured.errors.items())
    return [schema.ErrorCount(count, outcome, message) for (outcome, message), count in counts.most_common(MAX_ERRORS)]


def from_directory(
    directory: Path,
    slos: Mapping[str, float] | None = None,
    convention: str = "loadgen",
    written: Recorded | None = None,
) -> tuple[Report, RequestTable]:
    """The report and the records of a run directory. Raises ReportError, RunError or RecordsError.

    slos: limits for goodput; None takes those that the run was started with. written: what `records.read` would give,
    where it is known.
    """
    manifest = rundir.read_manifest(directory)
    if slos is None:
        slos = _slos(directory, manifest)
    table, facts = written or records.read(directory)
    header = records.read_header(directory)
    t0_ns = header.t0_monotonic_ns
    seen = server_view.read(directory, manifest.run_id, t0_ns, t0_ns + int(table.done_ns.max(initial=0)))
    doubts = contradictions.of_files(manifest, header)
    return build(manifest, table, facts, slos, convention, seen or _kept(directory, manifest.run_id), doubts), table


def _slos(directory: Path, manifest: Manifest) -> Mapping[str, float]:
    """The limits that the run was started with. Raises ReportError."""
    try:
        return Config(goodput=msgspec.convert(manifest.config.get("goodput", ()), tuple[str, ...])).slos
    except (ConfigError, msgspec.ValidationError) as error:
        raise ReportError(f"{directory}/manifest.json has no goodput of a run: {error}") from None


class _Kept(ServerView, kw_only=True):
    """The parts of an earlier report that the records cannot give again."""

    schema: str
    run_id: str


def _kept(directory: Path, run_id: str) -> ServerView | None:
    """The server's view in the run's report.json, for a run whose samples are gone; None where it has no such report.
    Without it, making the report again would take away what nothing can bring back."""
    try:
        kept = msgspec.json.decode(foreign_files.read_bytes(directory / "report.json"), type=_Kept)
    except (OSError, *UNDECODABLE):
        return None
    return kept if (kept.schema, kept.run_id) == (SCHEMA, run_id) else None


def write(directory: Path, report: Report, table: RequestTable, *, figures: bool = False) -> None:
    """Writes report.json, report.md, report.html and the figures of the page that are asked for, replacing earlier
    ones. Raises ReportError, or RunError where the manifest is lost."""
    gc.disable()  # modules and figures are thousands of objects, and each search for cycles looks at the run's as well
    try:
        files.save(directory, {"report.json": files.json_text(report)})
        page = run.page(shown_run(directory, report, table))
        files.write(directory / run.FILE, page, "report.md", figures=figures)
    finally:
        gc.enable()


def shown_run(directory: Path, report: Report, table: RequestTable, place: int = 0, name: str = "") -> Shown:
    """A run as pages show it. place: among the runs of its page."""
    manifest = rundir.read_manifest(directory)
    samples = server_view.samples(directory, report.run_id)
    t0_ns = records.read_header(directory).t0_monotonic_ns if samples else 0
    at_s = [((sample.at_ns - t0_ns) / 1e9, sample) for sample in samples]
    shown = name or name_of(report)
    return Shown(shown, report, manifest, table.measured(), at_s, place, flows.kept(table, manifest))


def overlay(directories: Sequence[Path], out_path: Path, convention: str = "loadgen") -> list[Report]:
    """Writes several runs over each other, a curve each, into `out_path`: a page (.html), or the figure of their CDFs
    (.png or .svg); gives their reports back.

    Raises ReportError, RunError or RecordsError.
    """
    if out_path.suffix not in (".html", ".png", ".svg"):
        raise ReportError(f"{out_path} must end in .html, .png or .svg.")
    shown = [
        shown_run(directory, *from_directory(directory, convention=convention), place, name)
        for place, (directory, name) in enumerate(zip(directories, _names(directories), strict=True))
    ]
    if len({each.origin for each in shown}) > 1:
        shown = [replace(each, name=f"{each.name} ({each.origin or 'measured'})") for each in shown]
    shown = [each if each.report.verdict.valid else replace(each, name=f"{each.name} (INVALID)") for each in shown]
    hrefs = [parts.href(directory / run.FILE, out_path.parent) for directory in directories]
    page = runs.page(shown, hrefs)
    if out_path.suffix == ".html":
        files.write(out_path, page)
    else:
        from loadgen.document import figure

        named = [replace(each, name=f"{each.name}: {name_of(each.report)}") for each in shown]
        try:
            figure.draw(charts.latencies(named), "Latency by run", [out_path], page.origin, page.stamp)
        except OSError as error:
            raise ReportError(f"cannot write {out_path}: {error.strerror or error}.") from None
    return [each.report for each in shown]


def _names(directories: Sequence[Path]) -> list[str]:
    """A name for each that no other has: the end of its path, as long as it takes."""
    paths = [directory.resolve().parts for directory in directories]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{number} {directory}" for number, directory in enumerate(directories, 1)]  # one of them twice
