"""A report in words and tables: for the terminal, and what its page shares with that.

Text that came from a server is escaped for the place where it is shown. An emulated run says so first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from backends.untrusted import escaped
from loadgen.document import terminal
from loadgen.document.content import (
    Cell,
    Document,
    Items,
    ListItem,
    Section,
    Table,
    Text,
    Tone,
    cell,
    cell_text,
    number,
)
from loadgen.monitor.server_view import ServerStats
from loadgen.report import abandoned, cluster
from loadgen.report.finding import Finding, share
from loadgen.report.metrics import ITEMS, Summary
from loadgen.report.schema import (
    AskedStats,
    Economics,
    GpuUse,
    LengthStats,
    Numbers,
    PhaseStats,
    Reasoning,
    Report,
    Requests,
    RequestStage,
    ServerRequests,
    SessionStats,
    Sharing,
    Steady,
    SteadyWindow,
    Throughput,
    TurnStats,
)
from loadgen.rundir import Manifest
from loadgen.rundir.emulation import HeldOut, kind_of_load
from loadgen.rundir.launch_facts import LaunchFacts
from loadgen.rundir.outcomes import AS_PLANNED
from loadgen.steady.window import Estimate

T = TypeVar("T")


def name_of(report: Report) -> str:
    return f"{report.backend} {report.model}"


QUICK_ACKS = "Quick ACKs: each read was acknowledged at once (--quick-acks), which ordinary clients do not do."


def origin(numbers: Numbers | Manifest) -> str:
    """Where a run's numbers come from: "predicted" by a model of the hardware, "emulated" on the embedded server's
    fixed timetable, which predicts nothing, or "", measured."""
    if not numbers.emulated:
        return ""
    return "predicted" if numbers.emulation is not None else "emulated"


def timetable_line(report: Report) -> str:
    """What is true on the embedded server's timetable beside what was measured, and what its machine added."""
    truth, ttft, tpot = report.timetable, report.metrics["ttft_ms"], report.metrics["tpot_ms"]
    if truth is None or truth.ttft_ms is None or not truth.tokens or report.items is not None:
        return ""
    jitter = f", each +- {100 * truth.jitter_ratio:g} %" if truth.jitter_ratio else ""
    return (
        f"Known truth: ttft {number(truth.ttft_ms)} ms (measured p50 {number(ttft.p50)}), tpot {number(truth.tpot_ms)} "
        f"ms (measured {number(tpot.p50)}){jitter}. The embedded server itself sent tokens "
        f"{number(truth.late_p50_ms)} ms late "
        f"(p50), {number(truth.late_p99_ms)} ms (p99): what this machine adds."
    )


def known(value: T | UnsetType) -> T | None:
    return None if value is UNSET else value


def _held_out(report: Report) -> Sequence[HeldOut]:
    """The errors that apply to the numbers of this run: of the same kind of load, and none where it was not at the
    hardware's own speed."""
    emulation = report.emulation
    if emulation is None or emulation.speed != 1:
        return ()
    return of_load(emulation.held_out, _kind_of_load(report)) if emulation.architecture else emulation.held_out


def is_vouched_for(report: Report) -> bool:
    """Whether errors of its kind are known, where it is a prediction at the hardware's own speed."""
    return report.emulation is None or report.emulation.speed != 1 or bool(_held_out(report))


def of_load(held_out: Iterable[HeldOut], load: str) -> tuple[HeldOut, ...]:
    """Those of such a load, as of `kind_of_load`."""
    return tuple(run for run in held_out if run.load == load)


def _kind_of_load(report: Report) -> str:
    return kind_of_load(report.arrival, (report.tokens.prompt or 0) / max(report.requests.ok, 1))


def economics_lines(economics: Economics) -> Iterator[str]:
    """A sentence for users, one for GPUs, and one for prices, as far as they are known."""
    if economics.interactivity_tokens_per_s is not None:
        yield (
            f"A user sees {number(economics.interactivity_tokens_per_s)} tokens/s (1 / tpot p50), "
            f"{number(economics.tps_per_user)} by MLPerf's tps_per_user (p90)."
        )
    if economics.output_tokens_per_s_per_gpu is not None:
        yield (
            f"A GPU gives {number(economics.output_tokens_per_s_per_gpu)} output tokens/s, "
            f"{number(economics.total_tokens_per_s_per_gpu)} total tokens/s ({number(economics.gpus)} of them)."
        )
    if economics.gpu_hour_price is not None and economics.gpus is None:
        yield "Tokens have no price: how many GPUs share the model is not known; name them with --gpus."
    if economics.price_per_million_tokens is not None:
        good = economics.goodput_requests_per_price
        both = f"{number(economics.price_per_million_tokens)}"
        price = f"tokens of prompts cost {both} {economics.currency}"
        if economics.price_per_million_output_tokens is not None:
            output = number(economics.price_per_million_output_tokens)
            price = f"output tokens cost {output} {economics.currency}, a million of prompt and output together {both}"
        yield (
            f"A million {price}, at {number(economics.gpu_hour_price)} {economics.currency} a GPU hour"
            + ("." if good is None else f"; 1 {economics.currency} buys {number(good)} requests within the limits.")
        )


def rates(throughput: Throughput) -> str:
    """Requests and what they came to, a second; of replies that are no texts, items and tokens of the prompts alone."""
    made, both = f"{number(throughput.output_tokens_per_s)} output tokens/s", "total"
    if throughput.items_per_s is not None:
        made, both = f"{number(throughput.items_per_s)} items/s", "prompt"
    tokens = f"{number(throughput.total_tokens_per_s)} {both} tokens/s"
    return f"{number(throughput.requests_per_s)} requests/s, {made}, {tokens}"


def _content_lines(report: Report) -> Iterator[str]:
    """What requests hold beside one text."""
    items, images = report.items, report.images
    if items is not None:
        tokens = "" if items.tokens_mean is None else f", of {number(items.tokens_mean)} tokens each in the mean"
        yield (
            f"Items: {number(items.items)} answered{tokens}; {number(items.batch_mean)} a request in the mean, "
            f"{number(items.batch_max)} at the most."
        )
    if images is not None:
        sizes = (
            "which the server does not count"
            if images.tokens_mean is None
            else (f"{number(images.tokens_mean)} tokens each as the server counts")
        )
        yield f"Images: {images.count} of {images.size} a request, {sizes}."


FULL_SLOTS = "full slots, from the first sent to the last sent, since the warm-up handed its slots over"


def not_ok(requests: Requests) -> str:
    """How many failed, by their outcomes, and how many the client gave up."""
    outcomes = ", ".join(f"{count} {name}" for name, count in requests.by_outcome.items() if name not in AS_PLANNED)
    given_up = requests.by_outcome.get("abandoned")
    return (
        f"{number(requests.failed)} failed"
        + (f" ({outcomes})" if outcomes else "")
        + (f", {number(given_up)} given up" if given_up else "")
    )


def summary_lines(report: Report) -> list[str]:
    """Requests, throughput, burst, goodput, client, server and GPUs in a line each. Numbers and our own words only."""
    requests, throughput = report.requests, report.throughput
    held_out = _held_out(report)
    lines = [
        *map(escaped, _held_out_lines(report, judged=False)),
        f"Requests: {number(requests.ok)} ok, {not_ok(requests)}"
        + (f", {number(requests.planned)} planned" if requests.planned is not None else "")
        + f"; {number(report.duration_s)} s from the first sent to the last ended.",
        *_load_lines(report),
        *filter(None, [timetable_line(report)]),
        f"Throughput: {rates(throughput)}"
        + ("" if report.full_slots_s is None else f" in the {number(report.full_slots_s)} s of {FULL_SLOTS}")
        + (f" (held out: off by {_off(held_out, 'throughput')})." if held_out else "."),
    ]
    goodput, burst, client, ceiling = report.goodput, report.burst, report.client, report.ceiling
    if goodput is not None and goodput.request_goodput is not None:
        limits = ", ".join(f"{name} <= {number(limit)} ms" for name, limit in goodput.slos_ms.items())
        lines.append(f"Goodput: {number(goodput.request_goodput)} requests/s within {limits}.")
    if report.economics is not None:
        lines += economics_lines(report.economics)
    if report.sharing is not None:
        lines.append(_sharing_line(report.sharing))
    if burst is not None:
        first = "Burst" if report.arrival == "burst" else "Start"
        lines.append(
            f"{first}: {number(burst.requests)} requests due at t = 0, sent within {number(burst.send_spread_ms)} ms."
        )
    lines += _content_lines(report)
    lines += abandoned.lines(report)
    lines += _length_lines(report)
    if report.retried_connections:
        lines.append(
            f"Retried connections: {number(report.retried_connections)} requests met one that had been closed."
        )
    if client is not None and client.cpu_us_per_event:
        lines.append(
            f"Client: {number(client.cpu_us_per_event)} us of CPU an event, busiest second "
            f"{number(client.cpu_peak_ratio)} of a core, {number(client.peak_rss_mb)} MB, loop lag p99 "
            f"{number(client.loop_lag_p99_ms)} ms."
        )
    if ceiling is not None and ceiling.headroom_ratio is not None:
        lines.append(
            f"Ceiling: {number(ceiling.events_per_s_per_core)} events/s a core, {number(ceiling.headroom_ratio)} "
            f"times what the busiest second needed ({number(ceiling.peak_events_per_s)})."
        )
    lines += _wire_lines(report)
    if report.cluster is not None:
        lines += cluster.lines(report.cluster)
    if report.server_requests is not None:
        lines += filter(None, [_server_requests_line(report.server_requests)])
    if report.server is not None:
        lines += _server_lines(report.server, requests.ok > 0)
    lines += _stamp_lines(report.stamps)
    if report.gpus is not None:
        lines += _gpu_lines(report.gpus)
    return [*lines, *map(escaped, _emulation_lines(report))]


def _length_lines(report: Report) -> Iterator[str]:
    """How long prompts and replies were to be, where they were not all alike."""
    prompt = "Asked prompt tokens" if report.sessions is None else "Prompt tokens that a turn adds"
    for what, lengths in ((prompt, report.asked_prompt_tokens), ("Asked output tokens", report.asked_output_tokens)):
        if lengths is not None:
            names = (name for name in LengthStats.__struct_fields__ if name != "law")
            shown = ", ".join(f"{name} {number(getattr(lengths, name))}" for name in names)
            law = f", drawn from {escaped(lengths.law)}" if lengths.law else ""
            yield f"{what}{law}: {shown}."


QUICK_ACKS = "Quick ACKs: each read was acknowledged at once (--quick-acks), which ordinary clients do not do."


def _wire_lines(report: Report) -> Iterator[str]:
    """How reads were acknowledged, and what the wire adds."""
    if report.quick_acks:
        yield QUICK_ACKS
    if report.wire is not None:
        yield (
            f"Wire: first token after {number(report.wire.ttft_ms)} ms, with quick ACKs after "
            f"{number(report.wire.ttft_quick_ms)} ms (medians of {report.wire.n} requests, one at a time, before the "
            "load)."
        )


def _load_lines(report: Report) -> Iterator[str]:
    """What was offered, and what came of it."""
    offered = report.offered_requests_per_s
    if offered is not None:
        yield f"Offered: {number(offered)} requests/s in the mean, as they were drawn."
    if report.steady is not None:
        yield from _steady_lines(report.steady)
    if report.reasoning is not None:
        yield _reasoning_line(report.reasoning)
    if report.sessions is not None:
        yield from _sessions_lines(report.sessions)


def _reasoning_line(reasoning: Reasoning) -> str:
    line = (
        f"Reasoning: {number(reasoning.replies)} replies thought for {number(reasoning.thinking_tokens_mean)} tokens "
        f"in the mean, {number(100 * reasoning.thinking_ratio)} % of their output"
    )
    if reasoning.thinking_ms.mean is None:
        return f"{line}; none of it was told apart as it came."
    return f"{line}, and for {number(reasoning.thinking_ms.mean / 1000)} s from the first token to the answer."


KEPT_UP = {
    "kept_up": "The server kept up",
    "near_limit": "The server was near its limit, not settled in this run",
    "fell_behind": "The server fell behind",
}


def _steady_lines(steady: Steady) -> Iterator[str]:
    """Whether the server kept up, and with what."""
    seen, unit = steady.keeping_up, steady.unit
    if steady.window is not None:
        yield _window_line(steady.window)
    elif steady.why:
        yield f"No steady state in this run: {steady.why}."
    if seen is None:
        return
    if seen.word == "unknown":
        yield f"Whether the server kept up cannot be told: {seen.why}."
        return
    behind = seen.word == "fell_behind"
    interval = f" (95 % CI {number(seen.served_ci[0])} to {number(seen.served_ci[1])})" if seen.served_ci else ""
    growth = f", {number(seen.growth_per_s)} more a second waited" if behind else ""
    yield (
        f"{KEPT_UP[seen.word]}: from {number(seen.from_s)} to {number(seen.to_s)} s {number(seen.offered_per_s)} "
        f"{unit}/s arrived, {number(seen.served_per_s)}{interval if behind else ''} were answered{growth}."
    )


RATES = {"requests_per_s": "requests/s", "output_tokens_per_s": "output tokens/s", ITEMS: "items/s"}


def _window_line(window: SteadyWindow) -> str:
    rates = [
        f"{estimate(value)} {what}"
        for name, what in RATES.items()
        if (value := window.throughput.get(name)) is not None
    ]
    return (
        f"Steady state: from {number(window.from_s)} to {number(window.to_s)} s, in which {number(window.requests)} "
        f"requests were sent: {', '.join(rates)}."
    )


def estimate(of: Estimate | None) -> str:
    """A value with its 95 % interval."""
    if of is None:
        return "-"
    return number(of.value) + ("" if of.low is None else f" ({number(of.low)} to {number(of.high)})")


def bounded(of: Estimate | None) -> str:
    """A dash too where too little was measured for an interval."""
    return estimate(None if of is None or of.low is None else of)


def _sessions_lines(sessions: SessionStats) -> Iterator[str]:
    """How many sessions there were, and how well their think times were kept."""
    ended = "an unknown number" if sessions.ended is None else number(sessions.ended)
    yield (
        f"Sessions: {number(sessions.begun)} begun, {ended} ended"
        + (f", {number(sessions.failed)} failed" if sessions.failed else "")
        + f"; {number(sessions.turns)} turns; at most {number(sessions.open_max)} open and "
        f"{number(sessions.thinking_max)} thinking at once."
    )
    if sessions.offered_sessions_per_s is not None:
        yield f"Offered: {number(sessions.offered_sessions_per_s)} sessions/s in the mean, as they were drawn."
    think_ms, lag = sessions.think_time_ms.mean, sessions.turn_lag_ms
    if think_ms is not None:
        yield (
            f"Think time: {number(think_ms / 1000)} s in the mean; the next turn left {number(lag.p50)} ms (p50), "
            f"{number(lag.p99)} ms (p99) after it was due."
        )


def _sharing_line(sharing: Sharing) -> str:
    """How much of what prompts share came from the server's prefix cache."""
    shareable = f"{number(sharing.shareable_tokens)} prompt tokens that could be shared"
    if sharing.cached_tokens is None:
        return f"Shared prefixes: {shareable}; the server does not tell what it took from its prefix cache."
    cached = sharing.cached_tokens
    ratios = [share(cached, sharing.shareable_tokens)] if sharing.shareable_tokens else []
    ratios += [f"{share(cached, sharing.prompt_tokens)} of all prompt tokens"] if sharing.prompt_tokens else []
    counted = "the replies' count" if sharing.cached_by == "replies" else "the server's counters"
    return f"Shared prefixes: {number(cached)} of the {shareable} came from the prefix cache by {counted}" + (
        f" ({', '.join(ratios)})." if ratios else "."
    )


def latencies(report: Report) -> Iterator[tuple[str, Summary]]:
    """The rows of the table; ttft and tpot of the answer too, where reasoning is told apart; of cold and warm requests,
    where prompts begin alike and the server did not count that it kept nothing."""
    for name, summary in report.metrics.items():
        if report.items is not None and not summary.n:  # what no stream has
            continue
        delivered = name == "ttft_ms" and report.ttft_of_delivery
        yield "ttft, of a delivery" if delivered else name.removesuffix("_ms"), summary
        if name == "ttft_ms" and report.ttft_answer_ms is not None:
            yield "ttft, of the answer", report.ttft_answer_ms
        if name == "tpot_ms" and report.reasoning is not None and report.reasoning.answer_tpot_ms.n:
            yield "tpot, of the answer", report.reasoning.answer_tpot_ms
        if name == "ttft_ms" and report.sharing is not None and report.sharing.cached_tokens != 0:
            yield "ttft, cold", report.sharing.ttft_cold_ms
            yield "ttft, warm", report.sharing.ttft_warm_ms


def launch_line(launch: LaunchFacts) -> str:
    """What was started for the run, and how."""
    image = known(launch.image_digest) or launch.image
    where = f"Docker image {image}" if image else f"a process{f' (version {launch.version})' if launch.version else ''}"
    cards, p2p = launch.gpus, launch.p2p
    on = f" on {len(cards)} x {cards[0].name} (driver {launch.driver})" if cards else " without a GPU"
    replicas = f", {launch.data_parallel} replicas" if launch.data_parallel else ""
    parts = [f"{where}, tensor parallel {launch.tensor_parallel}{replicas}{on}, {launch.dtype}"]
    if len(cards) > 1:
        parts.append(f"P2P {'on' if p2p.enabled else 'off'}: {p2p.reason}")
    if (kv_cache_tokens := known(launch.kv_cache_tokens)) is not None:
        parts.append(f"KV cache of {number(kv_cache_tokens)} tokens")
    if (ready_s := known(launch.ready_s)) is not None:
        parts.append(f"ready after {number(ready_s)} s")
    return f"Started: {'; '.join(parts)}."


def _emulation_lines(report: Report) -> Iterator[str]:
    """What was modelled, and how far off the same model was on real runs like this one that it had not seen."""
    emulation = report.emulation
    if emulation is None:
        return
    yield (
        f"Modelled: {emulation.scheduler} on {emulation.gpus} x {emulation.gpu} "
        f"({'one GPU' if emulation.gpus == 1 else 'joined by ' + emulation.topology}), {emulation.formats}, KV "
        f"cache of {number(emulation.kv_cache_tokens)} tokens; profile {emulation.profile}."
    )
    yield from (f"Note: {note}" for note in emulation.notes)
    if emulation.gpu_error:
        yield f"Operators of {emulation.gpu}, how far off: {emulation.gpu_error}."
    speed = emulation.speed
    if speed != 1:
        changed = f"{speed:g} times shorter" if speed > 1 else f"{1 / speed:g} times longer"
        yield f"Speed: times here are {changed} than modelled, and rates as much the other way (--speed {speed:g})."
    else:
        yield from _held_out_lines(report, judged=True)
    if emulation.profile_assumed:
        yield f"The software's times are of {', '.join(emulation.profile_gpus)}; assumed here."


def _held_out_lines(report: Report, judged: bool) -> Iterator[str]:
    """Of a prediction the line of its errors, where there are any as `judged` says: none goes before all numbers."""
    emulation, held_out = report.emulation, _held_out(report)
    if emulation is None or emulation.speed != 1 or bool(held_out) != judged:
        return
    which = ""  # an older manifest does not tell them apart
    if emulation.architecture:
        which = like(emulation.architecture, _kind_of_load(report), emulation.gpu, emulation.quantization)
    yield held_out_line(held_out, which, max(emulation.held_out_of, len(emulation.held_out)))


def like(architecture: str, load: str, gpu: str, quantization: str | None) -> str:
    """Runs that a prediction's errors may be of, as words after their number."""
    weights = "" if quantization is None else f", weights in {quantization}"
    return f" of its kind ({architecture}, {load}, {gpu}{weights})"


def held_out_line(held_out: Sequence[HeldOut], which: str, of: int) -> str:
    """How far off a profile was on runs that it was not fitted to. which: of them, as of `like`; of: how many there are
    of all kinds."""
    if not of:
        return "Held out: no real run was kept aside for this profile, so nobody knows how far off these numbers are."
    if not held_out:
        return f"Held out: of {of} real runs none is{which}, so nobody knows how far off these numbers are."
    errors = ", ".join(f"{what} {_off(held_out, name)}" for name, what in HELD_OUT.items())
    runs = f"{len(held_out)} real run{'' if len(held_out) == 1 else 's'}{which}"
    return f"Held out: off by, median and at worst of {runs} that it was not fitted to: {errors}."


# errors of a profile: throughput as a ratio, latencies as the distance of distributions (Wasserstein-1 over the mean)
HELD_OUT = {"throughput": "throughput", "ttft_w1": "ttft", "tpot_w1": "tpot", "e2el_w1": "e2el"}


def off_by(held_out: Sequence[HeldOut], name: str) -> tuple[float, float]:
    """The median and the largest error of that name in HELD_OUT, in percent."""
    off = [100 * abs(getattr(run, name)) for run in held_out]
    return median(off), max(off)


def _off(held_out: Sequence[HeldOut], name: str) -> str:
    usual, worst = off_by(held_out, name)
    return f"{usual:.1f}, {worst:.1f} %"


def off_by_metric(report: Report) -> dict[str, str]:
    """By row of the table: how far off a predicted distribution was on real runs; empty for what was measured."""
    held_out = _held_out(report)
    if not held_out:
        return {}
    return {
        name.removesuffix("_ms"): _off(held_out, f"{base}_w1")
        for name in report.metrics
        if (base := name.partition("_")[0]) in ("ttft", "tpot", "e2el")
    }


def _server_lines(server: ServerStats, answered: bool) -> Iterator[str]:
    """The server's own counts, as far as it has them. `answered`: whether a request
    was: then samples that saw none running came too seldom, and their largest values say nothing."""
    kv_ratio = server.kv_cache_usage_max_ratio
    unseen = answered and server.running_max == 0
    largest = _phrases(
        ("at most {} running", server.running_max),
        ("at most {} waiting", server.waiting_max),
        ("KV cache at most {} % full", None if kv_ratio is None else 100 * kv_ratio),
        ("at most {} tokens of KV cache reserved", server.kv_reserved_max_tokens),
        ("at most {} paused", server.paused_max),
        ("at most {} adapters running", known(server.adapters_running_max)),
        ("at most {} adapters waiting", known(server.adapters_waiting_max)),
        ("at most {} adapters loaded", known(server.adapters_loaded_max)),
    )
    if unseen:
        largest = [f"sampled too seldom to see a request running ({server.samples} samples)"]
    phrases = largest + _phrases(
        ("{} preemptions", server.preemptions),
        ("{} prompt tokens from its prefix cache", server.prefix_cache_hits),
    )
    if phrases:
        yield f"Server: {', '.join(phrases)}."
    if server.replicas:
        shares = ", ".join(f"{escaped(each.url)} {number(each.generation_tokens)}" for each in server.replicas)
        yield f"Replicas: output tokens of each of {len(server.replicas)}: {shares}."


def replica_rows(server: ServerStats) -> Iterator[list[str]]:
    """What each replica counted, by its address."""
    for each in server.replicas or ():
        kv_percent = None if each.kv_cache_usage_max_ratio is None else 100 * each.kv_cache_usage_max_ratio
        counted = (each.running_max, each.waiting_max, kv_percent, each.prompt_tokens, each.generation_tokens,
                   each.prefix_cache_hits, each.preemptions, each.silent)  # fmt: skip
        yield [escaped(each.url), *map(number, counted)]


REPLICA_HEADS = (
    "replica", "running, most", "waiting, most", "KV cache %, most", "prompt tokens", "output tokens", "cached tokens",
    "preemptions", "samples unanswered",
)  # fmt: skip


def _server_requests_line(counted: ServerRequests) -> str:
    """What replies count."""
    phrases = _phrases(("{} retractions", counted.retractions or None), ("{} tokens drafted", counted.drafted_tokens),
                       ("{} of them accepted", counted.accepted_tokens))  # fmt: skip
    return f"By the server's replies: {', '.join(phrases)}." if phrases else ""


STAMP_HEADS = ("mean, ms", "server", "client", "between")


def stamp_rows(stamps: Sequence[RequestStage]) -> Iterator[list[str]]:
    """The server's own time of each part of a request, the client's, and what lies between."""
    for stamp in stamps:
        yield [stamp.name, number(stamp.server_ms), number(stamp.client_ms), number(stamp.between_ms)]


def _stamp_lines(stamps: Sequence[RequestStage]) -> Iterator[str]:
    if stamps:
        parts = [
            f"{name} {own}" + (f" (client {client}, between {between})" if client != number(None) else "")
            for name, own, client, between in stamp_rows(stamps)
        ]
        sources = " and ".join(dict.fromkeys(stamp.by for stamp in stamps))
        yield f"By the server's own clock, mean ms ({sources}): {', '.join(parts)}."


def _gpu_lines(gpus: GpuUse) -> Iterator[str]:
    phrases = _phrases(
        ("at most {} GiB of memory used", None if gpus.memory_peak_bytes is None else gpus.memory_peak_bytes / 2**30),
        ("{} W on average", gpus.power_mean_w),
        ("{} J", gpus.energy_j),
        ("{} J an output token", gpus.j_per_output_token),
    )
    if phrases:
        yield f"GPUs ({len(gpus.each)}): {', '.join(phrases)}."


def _phrases(*templates: tuple[str, float | None]) -> list[str]:
    """The phrases whose number is known, with it."""
    return [template.format(number(value)) for template, value in templates if value is not None]


def verdict_line(report: Report) -> str:
    if report.imported and report.verdict.valid:
        return escaped(f"NOT JUDGED: {report.imported} measured this")
    return "VALID" if report.verdict.valid else "INVALID: do not quote these numbers"


def render(report: Report) -> str:
    """A summary for a terminal: plain text (no markup), nothing in it that a terminal obeys."""
    return terminal.render(summary(report), terminal.WIDEST)


def summary(report: Report) -> Document:
    """What a terminal shows of a run; the page (`pages/run.py`) has all."""
    facts = [Text(line) for line in summary_lines(report)]
    facts += [] if report.launch is None else [Text(launch_line(report.launch))]
    definitions = f"By the definitions of {report.convention_differs}"
    rows = [[str(error.count), error.outcome, error.message] for error in report.errors]
    errors = [Table(["requests", "outcome", "message"], rows, numeric=False)] if rows else []
    sections = [
        Section("numbers", "Numbers", facts),
        Section("latency", "Latency", [latency_table(report), *part_tables(report), *prompt_tables(report)]),
        Section("definitions", "Definitions", [Text(definitions)] if report.convention != "loadgen" else []),
        Section("findings", "Findings", [listed(report.verdict.findings)]),
        Section("errors", "Errors", errors),
    ]
    return Document(
        title=f"{name_of(report)}, {report.arrival}, run {report.run_id}",
        verdict=f"Verdict: {verdict_line(report)}",
        sections=sections,
        origin=origin(report),
    )


TONES: dict[str, Tone] = {"invalid": "bad", "warning": "warning", "info": "plain"}  # by severity


def listed(findings: Iterable[Finding]) -> Items:
    return Items(
        [ListItem(f"{each.severity} {each.code}", each.message, each.advice, TONES[each.severity]) for each in findings]
    )


STATISTICS = ("n", "mean", "p50", "p90", "p95", "p99", "p99_9", "max")  # of a Summary


def summaries(first: str, rows: Mapping[str, Summary], caption: str = "", *, folded: bool = False) -> Table:
    """A table of the statistics of samples, by name. first: the header of the names."""
    cells: list[list[Cell]] = [
        [name, *(cell(getattr(each, statistic)) for statistic in STATISTICS)] for name, each in rows.items()
    ]
    return Table([first, *(name.replace("_", ".") for name in STATISTICS)], cells, caption, folded=folded)


def with_column(table: Table, header: str, texts: Mapping[str, str]) -> Table:
    """The table with one more column, of texts by the names of its rows; itself without any."""
    if not texts:
        return table
    rows = [[*row, texts.get(cell_text(row[0]), "-")] for row in table.rows]
    return msgspec.structs.replace(table, headers=[*table.headers, header], rows=rows)


def latency_table(report: Report) -> Table:
    return with_column(summaries("latency, ms", dict(latencies(report))), "held out, off by", off_by_metric(report))


_LATENCY_COLUMNS = tuple(f"{name} {statistic}" for name in ("ttft", "tpot", "e2el") for statistic in ("p50", "p99"))
_STEADY = ("mean", "p50", "p99")


def part_tables(report: Report) -> Iterator[Table]:
    """The run in parts, where it has any: its steady state, the phases of its load, the turns of its sessions."""
    if report.steady is not None and report.steady.window is not None:
        headers = (*(f"steady {each}" for each in _STEADY), *(f"whole run {each}" for each in _STEADY))
        rows: list[list[Cell]] = [
            [
                name.removesuffix("_ms"),
                *(bounded(of.get(each)) if each == "p99" else estimate(of.get(each)) for each in _STEADY),
                *(cell(getattr(report.metrics[name], each)) for each in _STEADY),
            ]
            for name, of in report.steady.window.metrics.items()
            if of  # what no stream has
        ]
        yield Table(["latency ms", *headers], rows, "Steady state (95 % CI)")
    if report.phases:
        due = "offered/s" if report.sessions is None else "due/s"
        rows = [
            [
                phase.name, *map(cell, (phase.start_s, phase.end_s, phase.requests)),
                *map(cell, (phase.offered_requests_per_s, phase.finished_requests_per_s)), *_latency_cells(phase),
            ]
            for phase in report.phases
        ]  # fmt: skip
        headers = ("from s", "to s", "requests", due, "finished/s", *_LATENCY_COLUMNS)
        yield Table(["phase, latency ms", *headers], rows, "By phase of the load")
    if report.sessions is not None and report.sessions.task_ms is not None and report.sessions.task_ms.n:
        parts = {
            "to its end": report.sessions.task_ms,
            "waiting for tokens": report.sessions.tokens_wait_ms,
            "tools and people": report.sessions.tools_ms,
        }
        known = {name: summary for name, summary in parts.items() if summary is not None}
        yield summaries("a session, ms", known, "Sessions, from first turn to last")
    if report.turns:
        rows = [
            [
                turn_name(turn), *map(cell, (turn.requests, turn.ok, turn.prompt_tokens_mean, turn.cached_tokens_mean)),
                *_latency_cells(turn),
            ]
            for turn in report.turns
        ]  # fmt: skip
        headers = ("requests", "ok", "prompt tokens", "cached tokens", *_LATENCY_COLUMNS)
        yield Table(["turn, latency ms", *headers], rows, "By turn of the sessions")
    for what, asked in (("adapter", report.by_adapter), ("priority", report.by_priority)):
        rows = [
            [escaped(each.name) or "(the model itself)", *map(cell, (each.requests, each.ok)), *_latency_cells(each)]
            for each in asked
        ]
        if rows:
            yield Table([f"{what}, latency ms", "requests", "ok", *_LATENCY_COLUMNS], rows, f"By {what}")


def turn_name(turn: TurnStats) -> str:
    same = turn.from_turn == turn.to_turn
    return f"turn {turn.to_turn}" if same else f"turns {turn.from_turn} to {turn.to_turn}"


def _latency_cells(part: PhaseStats | TurnStats | AskedStats) -> Iterator[Cell]:
    for each in part.metrics.values():
        yield from (cell(each.p50), cell(each.p99))


def prompt_tables(report: Report) -> Iterator[Table]:
    """ttft by quartile of prompt length; nothing where prompts have about one length."""
    if report.ttft_by_prompt:
        rows = {
            f"{number(quarter.from_tokens)} to {number(quarter.to_tokens)}": quarter.ttft_ms
            for quarter in report.ttft_by_prompt
        }
        yield summaries("ttft, ms, by prompt tokens", rows, "ttft by quarter of the prompts")
