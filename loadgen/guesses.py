"""What people type who know another tool: its name for an option becomes ours where the meaning is one; elsewhere
a sentence says which of ours to take. Pure, and before the command line is parsed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from loadgen.config import ConfigError

LOADS = ("run", "sweep", "search", "doctor", "compose", "predict", "breakdown", "plan")  # commands with a load
# Names of vLLM's and SGLang's benchmarks, guidellm, aiperf, wrk, hey, k6 and locust.
SAME = {
    name: ours
    for ours, others in {
        "--requests": ("--num-prompts", "--num-requests", "--request-count", "--max-requests", "-n"),
        "--input-tokens": ("--isl", "--input-len", "--random-input-len", "--random-input", "--prompt-tokens"),
        "--output-tokens": ("--osl", "--output-len", "--random-output-len", "--random-output", "--max-tokens"),
        "--concurrency": ("--users", "--max-concurrency", "--vus", "--connections", "-c"),
        "--duration": ("--max-seconds", "--benchmark-duration", "--run-time", "-d"),
        "--out": ("--output-dir", "--artifact-dir", "--result-dir", "-o"),
        "--url": ("--base-url", "--target", "--endpoint"),
        "--tp": ("--tensor-parallel-size",),
        "--warmup": ("--num-warmups", "--warmup-requests", "--warmup-request-count"),
        "--seed": ("--random-seed",),
    }.items()
    for name in others
}
RATES = ("--rate", "--rps", "--qps", "--request-rate")
HINTS = {
    "--timeout": "give --total-timeout for a whole reply, --first-byte-timeout or --idle-timeout",
    "--api-key": "name the environment variable that holds the key: --api-key-env NAME",
    "--host": "give the whole address: --url http://HOST:PORT",
}
IN_SECONDS = (
    "--duration", "--connect-timeout", "--first-byte-timeout", "--idle-timeout", "--total-timeout", "--ready-timeout",
    "--think-time", "--trace-from",
)  # fmt: skip
SWEPT = (
    "--rates", "--concurrency", "--concurrencies", "--requests", "--duration", "--input-tokens", "--output-tokens",
    "--sessions", "--turns", "--think-time",
)  # fmt: skip
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}
_PER_SECOND = re.compile(r"^([\d.]+)(?:/s|rps|qps|req/s)$")


def meant(tokens: Sequence[str]) -> list[str]:
    """The command line with other tools' names and units as ours. A URL alone is measured. Raises ConfigError."""
    if tokens and re.match(r"https?://", tokens[0]):
        tokens = ["run", *tokens]
    if not tokens or tokens[0] not in LOADS:
        return list(tokens)
    command = tokens[0]
    return [command, *_options(command, [*_split(command, tokens[1:])])]


def _split(command: str, tokens: Sequence[str]) -> Iterator[str]:
    """--name=value as two words, which the rest here reads; but for values that begin with a dash."""
    known = (*SAME, *RATES, *HINTS, *IN_SECONDS, *SWEPT, "--burstiness", "--slo", "--budget-minutes")
    for position, token in enumerate(tokens):
        name, equals, value = token.partition("=")
        if equals and name in known and not value.startswith("-"):
            yield from (name, value)
        elif position == 0 and command == "run" and re.match(r"https?://", token):
            yield from ("--url", token)
        else:
            yield token


def _options(command: str, tokens: list[str]) -> Iterator[str]:
    burstiness = _take(tokens, "--burstiness")
    queue, option = iter(tokens), ""
    for token in queue:
        if option and token not in SAME and not token.startswith("--"):
            yield from _value(command, option, token)
            continue
        if token in HINTS and command in ("run", "sweep", "search"):
            raise ConfigError(f"there is no {token}; {HINTS[token]}.")
        if token in RATES and command in ("run", "doctor", "predict", "breakdown", "compose"):
            yield from ("--arrival", _arrival(token, next(queue, ""), burstiness))
        elif token in RATES and command == "search":
            raise ConfigError(f"{token}: `loadgen search` finds the rate; leave it out, or use `loadgen run`.")
        else:
            option = _name(command, token)
            yield option


def _name(command: str, token: str) -> str:
    if token in RATES and command in ("sweep", "plan"):
        return "--rates" if command == "sweep" else "--rate"
    if token == "--slo" and command in ("run", "sweep", "predict"):
        return "--goodput"
    if token == "--goodput" and command in ("search", "plan"):
        return "--slo"
    return SAME.get(token, token)


def _value(command: str, option: str, value: str) -> Iterator[str]:
    """A value as the option takes it: 60s as 60, 10/s as 10, and 1,8,64 as three where a sweep takes several."""
    several = re.fullmatch(r"[^:,]+(,[^:,]+)+", value)
    if several and command == "run" and option == "--concurrency":
        raise ConfigError(f"{option} is several, and a run has one; use `loadgen sweep {option} {value}`.")
    for each in value.split(",") if several and command == "sweep" and option in SWEPT else [value]:
        if option in IN_SECONDS:
            yield _in(each, 1)
        elif option == "--budget-minutes":
            yield _in(each, 60) if each.endswith(tuple("smhn")) else each
        elif option in ("--rates", "--rate"):
            yield _PER_SECOND.sub(r"\1", each)
        elif option == "--arrival":
            yield re.sub(r"(?<=\d)/s\b", "", each)
        else:
            yield each


def _take(tokens: list[str], name: str) -> str | None:
    """Takes an option and its value out of the words."""
    if name not in tokens[:-1]:
        return None
    at = tokens.index(name)
    value = tokens[at + 1]
    del tokens[at : at + 2]
    return value


def _arrival(name: str, rate: str, burstiness: str | None) -> str:
    """The --arrival of a rate as vLLM's benchmark has it: a Poisson process, `inf` for a burst. Its burstiness is the
    shape of a gamma law, whose gaps vary by 1 / sqrt(shape)."""
    if "," in rate:
        raise ConfigError(f"{name} is several, and a run has one; use `loadgen sweep --rates {rate}`.")
    rate = _PER_SECOND.sub(r"\1", rate)
    try:
        number, shape = float(rate), float(burstiness or 1)
    except ValueError:
        raise ConfigError(f"{name} '{rate}' is no rate; give requests a second, such as --arrival poisson:8.") from None
    if math.isinf(number):
        return "burst"
    return f"poisson:{rate}" if shape == 1 or shape <= 0 else f"gamma:{rate}:{1 / math.sqrt(shape):.6g}"


def _in(text: str, unit_s: int) -> str:
    """A time such as 60s, 2m or 1h in units of so many seconds; anything else as it is."""
    match = re.fullmatch(r"([\d.]+)(s|m|min|h|)", text)
    return f"{float(match[1]) * _SECONDS[match[2]] / unit_s:g}" if match else text
