"""The ways a number can be wrong, and whether this run is. Pure: reported numbers, records and facts in, findings out.

Every threshold is a constant with its reason. `invalid` means that the numbers do not describe the server under the
load that was asked for (exit code 4); `warning` that a reader must know it to read them; `info` that it explains them.
A finding must never change a number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec import UNSET

import backends
from backends.untrusted import printable
from loadgen.document.content import number
from loadgen.report import abandoned, cluster, sessions, sharing, slices
from loadgen.report.finding import Finding, Severity, share, worst_first
from loadgen.report.findings import client, server, stream
from loadgen.report.metrics import PERCENTILES
from loadgen.report.schema import Numbers, SteadyWindow
from loadgen.rundir import Manifest, contradictions
from loadgen.rundir.launch_facts import LaunchFacts
from loadgen.rundir.outcomes import OUTCOMES
from loadgen.rundir.records import ClientFacts, RequestTable
from loadgen.steady import flows, keeping_up

# p99 is a statement about the slowest hundredth. When more than a hundredth of the requests have no latency at all, the
# p99 of the rest is not the p99 of the load.
LOST_INVALID_RATIO = 0.01
# Counting failures as endless moves p99 by more than this: worth showing.
SURVIVORS_SHIFT_RATIO = 0.01
# A token or two of template or BOS changes little; a workload shorter by a tenth is another workload, and flatters.
LENGTH_WARNING_RATIO = 0.01
SHORTER_INVALID_RATIO = 0.1
STALLS_NAMED = MODELS_NAMED = 3
_DATE = re.compile(r"[-@:](latest|[0-9]{4}(-?[0-9]{2}){0,2})$")
COLD_LOAD_US = 100_000  # longer, and a model was read from a disk
# Of a rate that a server was seen to serve at its limit: one that it keeps up with.
LOWER_RATIO = 0.9
# Failures after the last reply: so many, and so unlikely beside those before, are a server that has ended.
DIED_LEAST, DIED_CHANCE = 10, 1e-6
_NOT_FAILED = ("abandoned", "cancelled", "dropped", "node_lost")
# By how much start and end of a run may move its numbers before a reader must know.
TRANSIENT_THROUGHPUT_RATIO, TRANSIENT_P99_RATIO = 0.03, 0.1
# Chance that all of n samples lie below the true percentile; half of 5 %, as in a two-sided 95 % interval.
PERCENTILE_MISS_PROBABILITY = 0.025


def find(
    numbers: Numbers,
    table: RequestTable,
    measured: RequestTable,
    facts: Sequence[ClientFacts],
    manifest: Manifest,
    doubts: Sequence[str] = (),
) -> list[Finding]:
    """Everything that a reader of `numbers` must know, worst first. measured: the part of `table` that counts. doubts:
    what contradicts itself in the run's directory besides its records, as clauses."""
    of_stream = stream.find(numbers, measured)
    waited = stream.waited_for_acks(of_stream)
    listed = [
        *_imported(manifest),
        *_contradictions(doubts, contradictions.of_records(table, measured, facts, manifest)),
        *_server_ended(numbers.launch, measured),
        *_cluster(numbers),
        *_completeness(manifest, measured, facts),
        *_dropped(measured),
        *_warm_up(table, len(table) - len(measured)),
        *_failures(measured),
        *client.find(numbers, facts),
        *of_stream,
        *_goodput(numbers),
        *_other_models(numbers, measured),
        *_lengths(measured, numbers),
        *_counts(measured),
        *abandoned.find(numbers),
        *sessions.find(measured, manifest),
        *_repeated(measured, manifest),
        *sharing.find(measured, numbers, manifest),
        *_cold(measured),
        *_stalls(numbers),
        *_keeping_up(numbers),
        *_speculation(numbers, manifest),
        *(() if waited else _unsteady(numbers)),  # the kernel acknowledges a connection's first packets at once
        *_transient(numbers),
        *server.find(numbers),
        *slices.apart(numbers),
        *_insecure(manifest),
        *_samples(numbers),
    ]
    return worst_first(listed)


def min_samples(thousandths: int) -> int:
    """Samples that a percentile needs: 72 for p95, 368 for p99, 3688 for p99.9.

    With fewer, the largest of them is below the true percentile with a probability above 2.5 %: p ** n > 0.025.
    """
    return math.ceil(math.log(PERCENTILE_MISS_PROBABILITY) / math.log(thousandths / 1000))


def too_few(samples: int, percentiles: Mapping[str, int] = PERCENTILES) -> dict[str, int]:
    """The percentiles (by name, in thousandths) for which these are too few, and how many each needs; none without
    samples."""
    needs = {name: min_samples(thousandths) for name, thousandths in percentiles.items()}
    return {name: least for name, least in needs.items() if 0 < samples < least}


def _contradictions(*clauses: Sequence[str]) -> Iterator[Finding]:
    listed = [clause for each in clauses for clause in each]
    if listed:
        yield Finding(
            code="CONTRADICTION",
            severity="invalid",
            message=f"The files of the run contradict themselves: {'; '.join(listed)}.",
            advice="Do not use these numbers: files were changed, or are of several runs; copy the directory again.",
        )


def _server_ended(launch: LaunchFacts | None, measured: RequestTable) -> Iterator[Finding]:
    ended, since = UNSET if launch is None else launch.ended, _silent_since(measured)
    if ended is UNSET and since is None:
        return
    message = "" if ended is UNSET else f"The server did not live to the end of the run: {ended}"
    if since is not None:
        silent = f"From {number(since[0])} s on it answered nothing: all {since[1]} requests that ended later failed."
        message = f"{message} {silent}" if message else silent.replace("it", "the server", 1)
    yield Finding(
        code="SERVER_ENDED",
        severity="invalid",
        message=message,
        advice="Read the server's log; mend that and run again.",
    )


def _silent_since(measured: RequestTable) -> tuple[float, int] | None:
    """When the last request ended ok, seconds of the run, and how many failed after it, where chance alone would not
    have let all of them fail."""
    ok, failed = measured.ok, ~measured.ok & ~np.isin(measured.outcome, [OUTCOMES.index(each) for each in _NOT_FAILED])
    if not ok.any():
        return None
    last_ns = int(measured.done_ns[ok].max())
    later = failed & (measured.done_ns > last_ns)
    before, n = int((failed & ~later).sum()), int(later.sum())
    if n < DIED_LEAST or n * math.log((before + 1) / (before + int(ok.sum()) + 2)) > math.log(DIED_CHANCE):
        return None
    return last_ns / 1e9, n


def _cluster(numbers: Numbers) -> Iterator[Finding]:
    if numbers.cluster is not None:
        yield from cluster.find(numbers.cluster, numbers.metrics["ttft_ms"].p50)


def _lost_processes(manifest: Manifest) -> int:
    """Client processes whose machine was lost, which another finding tells."""
    return 0 if manifest.cluster is None else sum(node.client_processes for node in manifest.cluster.lost)


def _cold(measured: RequestTable) -> Iterator[Finding]:
    """Requests that met a server without its model."""
    cold = sum((record.load_us or 0) > COLD_LOAD_US for record in measured.server.values())
    if cold:
        yield Finding(
            code="COLD_LOAD",
            severity="warning",
            message=f"The server loaded the model first for {cold} of the requests, by its own account.",
            advice="Raise --warmup, or have the server keep its model; ttft holds the load's time.",
        )


def _insecure(manifest: Manifest) -> Iterator[Finding]:
    if manifest.config.get("insecure"):
        yield Finding(
            code="INSECURE",
            severity="warning",
            message="The server's certificate was not checked (--insecure): whoever answered was measured.",
            advice="Name the file of the certificate's authority with --ca.",
        )


def _count(measured: RequestTable, *outcomes: str) -> int:
    return int(np.isin(measured.outcome, [OUTCOMES.index(outcome) for outcome in outcomes]).sum())


def _imported(manifest: Manifest) -> Iterator[Finding]:
    """Another tool measured it, and what it did not keep cannot be judged."""
    if manifest.imported is not None:
        yield Finding(
            code="IMPORTED",
            severity="warning",
            message=f"{manifest.imported.tool} measured this, and whether its client kept up cannot be told: "
            f"{manifest.imported.lacks}.",
            advice="Measure with loadgen run for numbers whose client, wire and load are judged.",
        )


def _completeness(manifest: Manifest, measured: RequestTable, facts: Sequence[ClientFacts]) -> Iterator[Finding]:
    if manifest.imported is not None:
        return
    planned, interrupted = manifest.requests_planned, any(fact.state == "interrupted" for fact in facts)
    missing = 0 if interrupted or planned is None else max(0, planned - len(measured))
    if len(facts) + _lost_processes(manifest) < (manifest.client_processes or 1) or missing:
        lost = f"{missing} of {planned} planned requests left no record" if missing else "how many it lost is unknown"
        yield Finding(
            code="KILLED",
            severity="invalid",
            message=f"A client process ended without its last line; {lost}, and its lag and CPU are unknown.",
            advice="Take what finished as a hint and run again; stop a run with Ctrl-C, which completes its records.",
        )
    recorded = f"{len(measured)} requests recorded" + (f" of {planned} planned" if planned is not None else "")
    if manifest.stopped_overloaded:
        yield Finding(
            code="STOPPED_OVERLOADED",
            severity="invalid",
            message="The run was stopped once the server was seen to fall behind (--stop-when-overloaded): "
            f"{recorded}.",
            advice="Throughput is the server's limit; lower the rate to measure latencies.",
        )
    elif interrupted:
        yield Finding(
            code="INTERRUPTED",
            severity="invalid",
            message=f"The run was stopped early: {recorded}.",
            advice="The numbers describe what finished; run to the end for numbers to publish.",
        )


def _dropped(measured: RequestTable) -> Iterator[Finding]:
    dropped = _count(measured, "dropped")
    if not dropped:
        return
    turns, why = sessions.never_sent(measured)
    of_sessions = f" {turns} of them are turns of {why.rstrip('.')}." if turns else ""
    advice = ["Find in the errors what ended those sessions: their later turns need its reply."] if turns else []
    if dropped > turns:
        advice.append("Lower the rate, raise the limit on open files, or add --workers.")
    yield Finding(
        code="DROPPED",
        severity="invalid" if dropped > LOST_INVALID_RATIO * len(measured) else "warning",
        message=f"{dropped} of {len(measured)} requests were due but never sent; the load was lighter than asked."
        + of_sessions,
        advice=" ".join(advice),
    )


def _warm_up(table: RequestTable, sent: int) -> Iterator[Finding]:
    """sent: how many of the first rows are the warm-up's."""
    failed = sent - int(table.ok[:sent].sum()) - _count(table.rows(0, sent), "cancelled")  # with the run
    if failed:
        first = f"; the first: {table.warmup_error}" if table.warmup_error else ""
        yield Finding(
            code="WARMUP",
            severity="warning",
            message=f"{failed} of {sent} warm-up requests failed{first}.",
            advice="Read the error and the server's log; what failed in the warm-up may fail in the load.",
        )


def _failures(measured: RequestTable) -> Iterator[Finding]:
    if measured.abandoned.any():
        measured = measured.select(~measured.abandoned)
    ok = int(measured.ok.sum())
    failed = len(measured) - ok - _count(measured, "cancelled", "dropped")
    if ok == 0:
        yield Finding(
            code="NO_SUCCESS",
            severity="invalid",
            message=f"None of {len(measured)} measured requests succeeded.",
            advice="Read the errors; check the address, the model name and the server's log.",
        )
    if failed:
        yield Finding(
            code="FAILED_REQUESTS",
            severity="invalid" if failed > LOST_INVALID_RATIO * len(measured) else "warning",
            message=f"{failed} of {len(measured)} requests failed ({share(failed, len(measured))}).",
            advice="Read the errors and the server's log; lower the load until none fails, or report the failures.",
        )
    lost = len(measured) - ok
    if lost and ok:
        yield from _survivors(measured, lost)


def _survivors(measured: RequestTable, lost: int) -> Iterator[Finding]:
    """Latencies cover requests that ended ok; what if the others count as endless?"""
    latencies = np.sort((measured.done_ns - measured.sent_ns)[measured.ok]) / 1e6
    rank = math.ceil(0.99 * len(measured)) - 1  # nearest rank among all requests, the lost ones last
    endless = rank >= len(latencies)
    shown, adjusted = float(np.percentile(latencies, 99)), math.inf if endless else float(latencies[rank])
    if adjusted <= shown * (1 + SURVIVORS_SHIFT_RATIO):
        return
    yield Finding(
        code="SURVIVORS",
        severity="invalid" if lost > LOST_INVALID_RATIO * len(measured) else "warning",
        message=f"{lost} of {len(measured)} requests have no latency; p99 of e2el is {shown:.0f} ms without them and "
        + ("endless" if endless else f"{adjusted:.0f} ms")
        + " when they count as slowest.",
        advice="Do not compare these percentiles with a run in which all requests succeeded.",
    )


def _goodput(numbers: Numbers) -> Iterator[Finding]:
    if numbers.goodput is not None and numbers.goodput.good is None:
        yield Finding(
            code="GOODPUT",
            severity="warning",
            message="Goodput is not given: whether requests keep its limits on ttft or tpot cannot be known.",
            advice="End what hides their tokens (HIDDEN_TOKENS, BUFFERED), or limit e2el instead.",
        )


def _other_models(numbers: Numbers, measured: RequestTable) -> Iterator[Finding]:
    """Replies that name another model: a gateway's fallback, a router's alias, or a name with its date."""
    others = len(measured.models)
    if not others:
        return
    listed = list(numbers.reply_models.items())
    named = ", ".join(f"{printable(name)} ({count})" for name, count in listed[:MODELS_NAMED])
    more = f" and {len(listed) - MODELS_NAMED} more" if len(listed) > MODELS_NAMED else ""
    same = all(_is_same(numbers.model, name) for name in numbers.reply_models)
    yield Finding(
        code="OTHER_MODEL",
        severity="info" if same else "warning" if others == len(measured) and len(listed) == 1 else "invalid",
        message=f"{others} of {len(measured)} replies name another model than {printable(numbers.model)}, which was "
        f"asked for: {named}{more}.",
        advice="It is the same one under its whole name."
        if same
        else "A gateway may have fallen back to another model, or the name is an alias: look at its configuration, and "
        "ask for the model by its own name.",
    )


def _is_same(asked: str, named: str) -> bool:
    """Whether two names of a model are one but for its owner and its date."""
    ours, theirs = (_DATE.sub("", name.lower().rpartition("/")[2]) for name in (asked, named))
    return ours == theirs


def _piece_tokens(backend: str) -> int | None:
    """Its `Backend.piece_tokens`; None also for one that is not installed here."""
    return backends.get(backend).piece_tokens if backend in backends.available() else None


def _lengths(measured: RequestTable, numbers: Numbers) -> Iterator[Finding]:
    for code, counted, requested, noun in (
        ("PROMPT_LENGTH", measured.prompt_tokens, measured.asked_prompt_tokens, "prompt"),
        ("OUTPUT_LENGTH", measured.output_tokens, measured.asked_tokens, "output"),
    ):
        known = measured.ok & (counted != -1) & (requested > 0)
        if noun == "prompt" and numbers.images is not None:  # whose tokens come on top
            continue
        wrong = int((counted[known] != requested[known]).sum())
        if not wrong:
            continue
        got, wanted = int(counted[known].sum()), int(requested[known].sum())
        deviation = float(np.abs(counted[known] - requested[known]).sum()) / wanted
        shorter = (wanted - got) / wanted
        severity: Severity = "info" if deviation <= LENGTH_WARNING_RATIO else "warning"
        piece = _piece_tokens(numbers.backend)
        yield Finding(
            code=code,
            severity="invalid" if shorter > SHORTER_INVALID_RATIO else severity,
            message=f"{wrong} of {int(known.sum())} replies had another {noun} length than asked: {got} {noun} tokens "
            f"by the server's count, {wanted} asked.",
            advice="Give --tokenizer, or token ids, for exact prompts; chat templates and BOS tokens add to a prompt."
            if noun == "prompt"
            else f"This server generates over {piece} tokens in whole pieces of {piece}, and ends before one that does "
            f"not fit its limit: ask for at most {piece}, or for a multiple of it that fits."
            if piece is not None and (requested[known] > piece).any()
            else "Check that the server can force the length and that its context is long enough for it.",
        )


def _counts(measured: RequestTable) -> Iterator[Finding]:
    ok = int(measured.ok.sum())
    missing = int((measured.output_tokens[measured.ok] == -1).sum())
    if missing:
        yield Finding(
            code="NO_TOKEN_COUNT",
            severity="warning",
            message=f"The server gave no output token count for {missing} of {ok} replies: their tpot is undefined and "
            "token throughput leaves them out.",
            advice="Events are not counted as tokens; use a backend or a server version that reports usage.",
        )
    unchecked = int((measured.prompt_tokens[measured.ok] == -1).sum())
    if unchecked:
        yield Finding(
            code="NO_PROMPT_COUNT",
            severity="warning",
            message=f"The server gave no prompt token count for {unchecked} of {ok} replies: whether prompts had "
            "the length asked for is unknown.",
            advice="Stream the replies, or use a backend or a server version that reports usage.",
        )


def _repeated(measured: RequestTable, manifest: Manifest) -> Iterator[Finding]:
    prompts, of_sessions = manifest.dataset_prompts, len(np.unique(measured.session[measured.turn > 0]))
    warmup = manifest.config.get("warmup")  # a manifest may be anybody's
    sent = (of_sessions or len(measured)) + (warmup if type(warmup) is int else 0)
    if prompts and sent > prompts:
        yield Finding(
            code="REPEATED_PROMPTS",
            severity="warning",
            message=f"The {prompts} prompts of the dataset were sent {sent / prompts:.1f} times each, the warm-up "
            "included; a server with a prefix cache computes a prompt once.",
            advice="Turn the server's prefix cache off, or give a prompt for each request; else quote ttft as that of "
            "a warm cache.",
        )


def _stalls(numbers: Numbers) -> Iterator[Finding]:
    """What a stall is stands in stalls.py."""
    if not numbers.stalls:
        return
    count, total_s = len(numbers.stalls), sum(stall.end_s - stall.start_s for stall in numbers.stalls)
    named = [f"{stall.end_s - stall.start_s:.1f} s at {stall.start_s:.1f} s" for stall in numbers.stalls[:STALLS_NAMED]]
    times = f"{', '.join(named[:-1])} and {named[-1]}" if len(named) > 1 else named[0]
    run = f", {share(total_s, numbers.duration_s)} of the run" if numbers.duration_s else ""
    yield Finding(
        code="SERVER_STALL",
        severity="warning",
        message=f"No stream got anything for {times}"
        + (f" (the first {STALLS_NAMED} of {count} times)" if count > STALLS_NAMED else "")
        + f", far longer than a step, though replies were under way: {total_s:.1f} s in all{run}.",
        advice="A server that compiles kernels does this in its first seconds: let the same load warm it up first "
        "with --warmup-load. Where the stall comes back, read the server's log.",
    )


def _keeping_up(numbers: Numbers) -> Iterator[Finding]:
    """Words and thresholds stand in loadgen/steady/keeping_up.py."""
    if numbers.steady is None or numbers.steady.keeping_up is None:
        return
    unit, seen = numbers.steady.unit, numbers.steady.keeping_up
    lower = f"Offer less than {number(LOWER_RATIO * (seen.served_per_s or 0.0))} {unit}/s"
    rates = f"{number(seen.offered_per_s)} {unit}/s arrived and {number(seen.served_per_s)} were answered"
    if seen.word == "fell_behind":
        yield Finding(
            code="OVERLOADED",
            severity="invalid",
            message=f"The server fell behind: from {number(seen.from_s)} s on {rates}, so {number(seen.growth_per_s)} "
            f"more a second waited. Latencies tell how long the run was. Throughput holds: it is the server's limit "
            "under this load.",
            advice=f"{lower} to measure latencies; loadgen search finds the highest rate that meets an objective.",
        )
    elif seen.word == "near_limit":
        yield Finding(
            code="NEAR_LIMIT",
            severity="warning",
            message=f"The server was near its limit, and this run is too short to settle whether it keeps up: {rates}.",
            advice=f"{lower}, or send for several times as long; latencies may be those of a queue that still grew.",
        )


def _speculation(numbers: Numbers, manifest: Manifest) -> Iterator[Finding]:
    """Drafts that were guessed of drawn words: how many were accepted says nothing about users' text."""
    counted = numbers.server_requests
    if counted is None or not counted.drafted_tokens or manifest.config.get("dataset"):
        return
    accepted = counted.accepted_tokens or 0
    yield Finding(
        code="SPECULATION",
        severity="warning",
        message=f"The server accepted {accepted:,} of {counted.drafted_tokens:,} drafted tokens "
        f"({share(accepted, counted.drafted_tokens)}) of prompts whose words were drawn: how many it accepts of users' "
        "text, and so its pace, may be quite another.",
        advice="Send users' own prompts (--dataset), or measure without speculative decoding.",
    )


def _unsteady(numbers: Numbers) -> Iterator[Finding]:
    """How the server's pace changed; what a change is stands in loadgen/steady/changes.py."""
    change = None if numbers.steady is None else numbers.steady.change
    if change is None:
        return
    if change.kind == "slow_start":
        message = f"The server was slow for its first {number(change.at_s)} s: a token took {1 / change.ratio:.2f} "
        message, advice = f"{message}times as long as later.", "Let the same load warm it up first with --warmup-load."
    elif change.kind == "level_shift":
        message = f"The server changed its pace at {number(change.at_s)} s: from then on a token took "
        message += f"{change.ratio:.2f} times as long as before."
        advice = "Find in its log what happened then (a worker lost, another job on its machine); repeat the run."
    else:
        message = (
            f"The server's pace drifted: a token took {100 * (change.per_minute or 0.0):+.1f} % longer from minute "
        )
        message += f"to minute, {100 * (change.ratio - 1):+.0f} % in all."
        advice = "GPUs that grow warm do this; let the server run under load until it has settled (--warmup-load)."
    yield Finding(code="UNSTEADY", severity="warning", message=message, advice=advice)


def _transient(numbers: Numbers) -> Iterator[Finding]:
    """What of the numbers is the start or the end of the run, not its steady state."""
    steady = numbers.steady
    if steady is None or (steady.change is not None and steady.window is None):
        return
    seen, sentences = steady.keeping_up, None
    asked = flows.slots(numbers.arrival)
    if seen is not None and seen.why == keeping_up.UNMET:
        sentences = (
            f"The server never saw its load: {seen.why}.",
            f"Send for several times as long as {steady.unit} take; fewer are in flight until then.",
        )
    elif asked is not None and numbers.sessions is None and steady.peak is not None and 0 < steady.peak < asked:
        sentences = (
            f"The concurrency of {asked} was never reached: at most {steady.peak} requests were in flight.",
            f"Send at least {10 * asked} requests, ten for each of those in flight.",
        )
    elif asked is not None and steady.window is None and numbers.requests.ok and not flows.changes(numbers.arrival):
        sentences = (
            f"No part of this run is a steady state: {steady.why}. Its start, when all came at once, and its end, when "
            "fewer were in flight, are in all numbers.",
            f"Send more: ten requests for each of the {asked} in flight, or better 50"
            + (
                f"; --warmup {asked} begins with full slots."
                if numbers.full_slots_s is None and not numbers.items
                else "."
            ),
        )
    elif steady.window is not None:
        sentences = _beside_window(numbers, steady.window)
    if sentences is not None:
        yield Finding(code="TRANSIENT", severity="warning", message=sentences[0], advice=sentences[1])


def _beside_window(numbers: Numbers, window: SteadyWindow) -> tuple[str, str] | None:
    """By what the whole run differs from its steady state, beyond chance."""
    name = "output_tokens_per_s" if "output_tokens_per_s" in window.throughput else "requests_per_s"
    pairs = {
        "throughput": (getattr(numbers.throughput, name), window.throughput[name], TRANSIENT_THROUGHPUT_RATIO),
        "ttft p99": (numbers.metrics["ttft_ms"].p99, window.metrics["ttft_ms"].get("p99"), TRANSIENT_P99_RATIO),
    }
    differences, worst = [], 0.0
    for what, (whole, steady, limit) in pairs.items():
        if whole is None or steady is None or not steady.value or steady.low is None or steady.high is None:
            continue
        off = whole / steady.value - 1
        if abs(off) > limit and not steady.low <= whole <= steady.high:
            differences.append(f"{what} by {100 * off:+.1f} %")
            worst = max(worst, abs(off) / limit if what == "throughput" else 1.0)
    if not differences:
        return None
    enough = math.ceil(worst * (numbers.requests.ok + numbers.requests.failed) / 100) * 100
    more = (
        f"about {enough:,} requests would bring throughput within 3 %" if worst > 1 else "a longer run has less of it"
    )
    return (
        f"The whole run differs from its steady state (from {number(window.from_s)} to {number(window.to_s)} s) in "
        f"{' and '.join(differences)}: its start and its end are in all numbers.",
        f"Quote the steady state's numbers; {more}.",
    )


def _samples(numbers: Numbers) -> Iterator[Finding]:
    """Percentiles for which there are too few requests; or enough, and too few moments of the steady state."""
    n = numbers.requests.ok
    short, window = too_few(n), None if numbers.steady is None else numbers.steady.window
    known = {} if window is None else window.metrics["ttft_ms"]
    unbounded = [each for each in ("p90", "p95", "p99") if each in known and known[each].low is None]
    alike = ", ".join(each for each in unbounded if each not in short)
    messages, advice = [], []
    if short:
        messages.append(
            f"{n} requests are too few for {', '.join(short)}: even the slowest may be below the true value."
        )
        advice.append("Send at least " + ", ".join(f"{least} requests for {name}" for name, least in short.items()))
    if alike:
        messages.append(f"The steady state holds too few independent moments to bound {alike} of ttft.")
        advice.append("Let the run last longer, or repeat it (--repeat 5)")
    if messages:
        yield Finding(
            code="FEW_SAMPLES",
            severity="info" if list(short) in ([], ["p99_9"]) else "warning",
            message=" ".join(messages).replace("p99_9", "p99.9"),
            advice=". ".join(advice).replace("p99_9", "p99.9") + ".",
        )
