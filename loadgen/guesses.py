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
    "--json": "the last line of standard output is JSON where it is no terminal: `loadgen run ... | tail -n 1`",
    "--host": "give the whole address: --url http://HOST:PORT",
}
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}


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
    for position, token in enumerate(tokens):
        name, equals, value = token.partition("=")
        known = name in SAME or name in RATES or name in HINTS or name in ("--burstiness", "--slo", "--duration")
        if equals and known and not value.startswith("-"):
            yield from (name, value)
        elif position == 0 and command == "run" and re.match(r"https?://", token):
            yield from ("--url", token)
        elif command == "sweep" and re.fullmatch(r"[\d.]+(,[\d.]+)+", token):
            yield from token.split(",")
        else:
            yield token


def _options(command: str, tokens: list[str]) -> Iterator[str]:
    burstiness = _take(tokens, "--burstiness")
    queue = iter(tokens)
    for token in queue:
        if token in HINTS and command in ("run", "sweep", "search"):
            raise ConfigError(f"there is no {token}; {HINTS[token]}.")
        if token in RATES and command in ("run", "doctor", "predict", "breakdown", "compose"):
            yield from ("--arrival", _arrival(token, next(queue, ""), burstiness))
        elif token in RATES and command == "sweep":
            yield "--rates"
        elif token in RATES and command == "search":
            raise ConfigError(f"{token}: `loadgen search` finds the rate; leave it out, or use `loadgen run`.")
        elif token == "--slo" and command in ("run", "sweep", "predict"):
            yield "--goodput"
            yield from _limits(next(queue, ""))
        elif (ours := SAME.get(token, token)) == "--duration":
            yield from (ours, _in_seconds(next(queue, "")))
        else:
            yield ours


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
    rate = re.sub(r"(/s|rps|qps|req/s)$", "", rate)
    try:
        number, shape = float(rate), float(burstiness or 1)
    except ValueError:
        raise ConfigError(f"{name} '{rate}' is no rate; give requests a second, such as --arrival poisson:8.") from None
    if math.isinf(number):
        return "burst"
    return f"poisson:{rate}" if shape == 1 or shape <= 0 else f"gamma:{rate}:{1 / math.sqrt(shape):.6g}"


def _limits(text: str) -> Iterator[str]:
    """ttft_ms=500,tpot_ms=50 and ttft<500ms as --goodput takes them: ttft:500."""
    for limit in re.split(r"[,\s]+", text.strip()):
        match = re.fullmatch(r"(\w+?)(?:_ms)?\s*(?:[:=]|<=?)\s*([\d.]+)(?:ms)?", limit)
        yield f"{match[1]}:{match[2]}" if match else limit


def _in_seconds(text: str) -> str:
    match = re.fullmatch(r"([\d.]+)(s|m|min|h|)", text)
    return f"{float(match[1]) * _SECONDS[match[2]]:g}" if match else text
