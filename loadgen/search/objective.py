"""What a server is to keep: limits on the latencies of a request, such as `--slo ttft_ms=500,tpot_ms=50`
or `ttft_p99<500ms`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from backends.untrusted import nearest
from loadgen.config import ConfigError
from loadgen.option_types import latency_limit

METRICS = ("ttft", "tpot", "e2el")
HELP = "use ttft_ms=500,tpot_ms=50 (or e2el_ms), above 0, or 'ttft<500ms'."


def parse(slo: str) -> dict[str, float]:
    """Milliseconds by metric, from 'ttft<500ms,tpot<50ms' or 'ttft_ms=500,tpot_ms=50'. Raises ConfigError."""
    limits_ms: dict[str, float] = {}
    for item in slo.split(","):
        limit = latency_limit(item)
        if limit is None:
            name, equals, _ = (part.strip() for part in item.partition("="))
            wrong = name.removesuffix("_ms") not in METRICS or not name.endswith("_ms")
            if equals and wrong and (nearest_metric := _nearest_metric(name)) is not None:
                raise ConfigError(f"--slo has no '{name}'; did you mean {nearest_metric}_ms, in milliseconds?")
            raise ConfigError(f"--slo '{item.strip()}' is not understood; {HELP}")
        if limit.metric in limits_ms:
            raise ConfigError(f"--slo limits {limit.metric}_ms twice; give each once.")
        limits_ms[limit.metric] = limit.limit_ms
    return limits_ms


def share(slo: str, flag: str, given: float | None) -> float | None:
    """The share of the requests that is to keep all limits: `given` with the option `flag`, or that of the percentile
    that the limits name, 0.99 of `ttft_p99<500ms`; None where there is neither. Raises ConfigError where they differ.
    """
    limits = filter(None, map(latency_limit, slo.split(",")))
    named = {limit.percentile / 100 for limit in limits if limit.percentile is not None}
    if len(named | ({given} if given is not None else set())) > 1:
        raise ConfigError(f"--slo and {flag} name several shares of the requests, and one holds for all; name one.")
    return named.pop() if named else given


def _nearest_metric(name: str) -> str | None:
    """The metric that was probably meant: with another unit, under another tool's name, or misspelt."""
    word = name.lower()
    for unit in ("_ms", "_s", "_us", "_ns", "_sec", "_seconds", "_milliseconds"):
        word = word.removesuffix(unit)
    others = {"e2e": "e2el", "latency": "e2el", "request_latency": "e2el", "itl": "tpot", "time_to_first_token": "ttft"}
    return others.get(word) or nearest(word, METRICS)


def text(limits_ms: Mapping[str, float]) -> str:
    return ", ".join(f"{name} <= {limit:g} ms" for name, limit in limits_ms.items())


class Times(NamedTuple):
    """Columns (n,) as of `rundir.records`: -1 where something never happened."""

    sent_ns: NDArray[np.int64]
    first_token_ns: NDArray[np.int64]
    last_token_ns: NDArray[np.int64]
    done_ns: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    first_tokens: NDArray[np.int64]
    ok: NDArray[np.bool_]


def lateness(limits_ms: Mapping[str, float], times: Times) -> dict[str, NDArray[np.float64]]:
    """How many times its limit each metric of each request (n,) is: above 1 the request misses it. Infinite where the
    request failed or the metric is not known; below two output tokens any tpot is met. As `metrics.good` judges."""
    late: dict[str, NDArray[np.float64]] = {}
    for name, limit_ms in limits_ms.items():
        begin = times.first_token_ns if name == "tpot" else times.sent_ns
        end = {"ttft": times.first_token_ns, "tpot": times.last_token_ns, "e2el": times.done_ns}[name]
        known = times.ok & (begin != -1) & (end != -1)
        took_ms = (end - begin) / 1e6
        if name == "tpot":
            short = (times.output_tokens == 0) | (times.output_tokens == 1)
            took_ms = np.where(short, 0.0, took_ms / np.maximum(times.output_tokens - times.first_tokens, 1))
            known = times.ok & (short | (known & (times.first_tokens >= 0) & (times.output_tokens >= 2)))
        late[name] = np.where(known, took_ms / limit_ms, np.inf)
    return late
