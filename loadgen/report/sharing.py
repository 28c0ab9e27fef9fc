"""Prompts that begin alike: how much of them a server could have kept from earlier requests, and how much it did. Pure.

What could be shared is known from the load alone: each record has the tokens of its prompt's beginning that an earlier
request of the load has sent. No order of the requests makes the sum of these larger, so a server that took more from
its cache has met some of the prompts before the run.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from loadgen.monitor.server_view import ServerStats
from loadgen.report import metrics
from loadgen.report.finding import Finding, Severity, share
from loadgen.report.metrics import Convention, Distribution, Summary, total
from loadgen.report.schema import Numbers, Sharing
from loadgen.rundir import Manifest
from loadgen.rundir.records import RequestTable

# A block or two of a shared template is cached by any server. Above one percent ttft is that of a warm cache; when a
# tenth of the prompt tokens was never computed although every prompt is meant to be new, prefill was not measured.
# Where prompts begin alike, both are of the tokens beyond those that the load shares.
CACHED_WARNING_RATIO = 0.01
CACHED_INVALID_RATIO = 0.1
# By the server's own counter, which tells of single tokens. Fewer than a block of any server that caches blocks are
# first tokens that were drawn alike. One a prompt may be that which all begin with (BOS), which spares a server
# nothing; but the blocks of a few prompts sum up to as much.
BLOCK_TOKENS = 16
OWN_PROMPTS_ADVICE = "Turn the server's prefix cache off, or quote ttft as that of a warm cache."


def shareable_tokens(measured: RequestTable) -> int:
    """The most tokens that a server can take from its cache when it had none of these prompts before; 0 for a load that
    shares nothing."""
    return int(measured.shared_tokens[measured.sent_ns != -1].sum())


def build(measured: RequestTable, server: ServerStats | None, rules: Convention) -> Sharing | None:
    """None for a load that shares nothing."""
    if not shareable_tokens(measured):
        return None
    ok = measured.ok
    # Whether replies count at all; vLLM leaves the count out of a reply where it is 0.
    replies_count = bool((measured.cached_tokens[ok] != -1).any())
    hits = None if server is None else server.prefix_cache_hits
    cached = total(measured.cached_tokens[ok]) if replies_count else hits
    prompt, shareable = total(measured.prompt_tokens[ok]), int(measured.shared_tokens[ok].sum())
    warm = (measured.cached_tokens if replies_count else measured.shared_tokens) > 0
    return Sharing(
        prompt_tokens=prompt,
        shareable_tokens=shareable,
        cached_tokens=cached,
        cached_by=None if cached is None else "replies" if replies_count else "server",
        cached_of_prompt_ratio=None if cached is None or not prompt else cached / prompt,
        cached_of_shareable_ratio=None if cached is None or not shareable else cached / shareable,
        warm_by="cached_tokens" if replies_count else "shared_tokens",
        ttft_cold_ms=_ttft(measured, ok & ~warm, rules),
        ttft_warm_ms=_ttft(measured, ok & warm, rules),
    )


def _ttft(measured: RequestTable, chosen: NDArray[np.bool_], rules: Convention) -> Summary:
    ttft_ms = metrics.column(measured, "ttft_ms", rules)[chosen]
    return metrics.summary(Distribution(np.sort(ttft_ms[~np.isnan(ttft_ms)]), 1.0), rules.percentile)


def find(measured: RequestTable, numbers: Numbers, manifest: Manifest) -> Iterator[Finding]:
    """What the replies (CACHED_TOKENS) and the server's counters (PREFIX_CACHE) tell of its prefix cache."""
    # One's own prompts may share what they like; and of a turn that nobody counted, nobody knows what it shares.
    uncounted = bool(((measured.turn > 1) & (measured.shared_tokens == 0) & (measured.sent_ns != -1)).any())
    meant = manifest.config.get("dataset") is not None or uncounted
    by_replies = list(_by_replies(measured, meant))
    yield from by_replies
    if numbers.server is not None:
        explained = any(finding.severity == "info" for finding in by_replies)  # once is enough
        by_server = _by_server(measured, numbers.server, meant)
        yield from (finding for finding in by_server if not (explained and finding.severity == "info"))


def _by_replies(measured: RequestTable, meant: bool) -> Iterator[Finding]:
    ok = measured.ok & (measured.cached_tokens != -1)
    cached, shareable = total(measured.cached_tokens[ok]), shareable_tokens(measured)
    prompt = total(measured.prompt_tokens[measured.ok if shareable else ok])
    if cached is None or not prompt:
        return
    beyond = cached - shareable
    if beyond <= CACHED_WARNING_RATIO * prompt:
        if shareable:
            yield _as_the_load_allows("CACHED_TOKENS", cached, shareable)
        return
    allowed = f", of which the load shares {share(shareable, prompt)}" if shareable else ""
    yield Finding(
        code="CACHED_TOKENS",
        severity="invalid" if beyond > CACHED_INVALID_RATIO * prompt and not meant else "warning",
        message=f"The server took {share(cached, prompt)} of the prompt tokens from its prefix cache{allowed}; ttft "
        "and throughput are those of a warm cache.",
        advice=OWN_PROMPTS_ADVICE if meant else "Use another --seed, restart the server, or turn its prefix cache off.",
    )


def _by_server(measured: RequestTable, server: ServerStats, meant: bool) -> Iterator[Finding]:
    hits, queries, shareable = server.prefix_cache_hits, server.prefix_cache_queries, shareable_tokens(measured)
    if hits is None:
        return
    if shareable and hits <= shareable:
        if hits or server.covered:  # else the hits may be where there are no samples
            yield _as_the_load_allows("PREFIX_CACHE", hits, shareable)
        return
    if not hits:
        return
    severity, meaning = _severity(hits - shareable, int((measured.sent_ns != -1).sum()))
    if meant:
        severity, meaning = "warning", "; ttft is that of a warm cache."
    else:
        allowed = f"no more than {shareable} could be shared" if shareable else "every prompt is meant to be new"
        meaning = f", although {allowed}{meaning}."
    yield Finding(
        code="PREFIX_CACHE",
        severity=severity,
        message=f"The server counted {hits} prompt tokens found in its prefix cache"
        + (f" ({share(hits, queries)} of those looked up)" if queries else "")
        + meaning,
        advice=OWN_PROMPTS_ADVICE
        if meant
        else "Use another --seed, restart the server, or turn its prefix cache off; let nobody else use it.",
    )


def _severity(beyond: int, sent: int) -> tuple[Severity, str]:
    """How bad it is that the server found so many tokens more than so many prompts may share, and why it is not."""
    if beyond < BLOCK_TOKENS:
        return "info", "; fewer than a block move no number"
    if beyond <= sent:
        return "warning", "; one a prompt may be a token that all begin with"
    return "invalid", ""


def _as_the_load_allows(code: str, cached: int, shareable: int) -> Finding:
    if not cached:
        return Finding(
            code=code,
            severity="info",
            message=f"The server found none of the {shareable} prompt tokens that could be shared in its prefix cache.",
            advice="Its prefix cache is off or too small, or its blocks are longer than what prompts share.",
        )
    return Finding(
        code=code,
        severity="info",
        message=f"The server took {cached} of the {shareable} prompt tokens that could be shared from its prefix cache "
        f"({share(cached, shareable)}).",
        advice="Read ttft of cold and warm requests apart: that of all together holds for this sharing alone.",
    )
