"""Wrong replies on purpose: what a client must notice, in the wire form in which real servers and networks do it.

A fault strikes every `every`-th generation request, counted from 1; where several would strike one request the first
named does. A reply that breaks "midway" has sent half of its tokens, rounded down.
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = {
    "reset": "the connection is reset midway",
    "truncate": "the connection is closed cleanly midway",
    "stall": "nothing more is sent midway, the connection stays open",
    "http_error:STATUS": "an error status with the server's own body",
    "stream_error": "the server's error event inside a stream with status 200",
    "short": "half of the output, finished by a stop",
    "merge": "two tokens in one event",
    "coalesce": "four events in one write",
    "no_done": "no [DONE] at the end",
    "refuse": "the connection is closed before any byte",
    "cached": "half of the prompt reported as cached",
    "wrong_prompt_tokens": "one prompt token too many reported",
    "garbage": "an event midway that is no JSON",
}
# What a dialect has no way to say: TGI and LightLLM report no cached tokens, and nothing ends their streams.
UNKNOWN = {"tgi": ("cached", "no_done"), "lightllm": ("cached", "no_done")}
MIDWAY = frozenset({"reset", "truncate", "stall", "stream_error", "garbage"})


@dataclass(frozen=True)
class Fault:
    kind: str
    every: int
    status: int = 0


def parse(text: str, dialect: str) -> Fault:
    """`KIND:EVERY`, or `http_error:STATUS:EVERY`. Raises ValueError with one sentence."""
    kind, *numbers = text.split(":")
    with_status = f"{kind}:STATUS" in KINDS
    if kind not in KINDS and not with_status:
        raise ValueError(f"there is no fault {kind!r}; the faults are {', '.join(KINDS)}.")
    if len(numbers) != 1 + with_status or not all(number.isdecimal() and int(number) > 0 for number in numbers):
        form = "http_error:STATUS:EVERY" if with_status else f"{kind}:EVERY"
        raise ValueError(f"fault {text!r} is not of the form {form}, each a whole number from 1.")
    if kind in UNKNOWN.get(dialect, ()):
        raise ValueError(f"fault {text!r} cannot happen here: the {dialect} protocol has nothing of the kind.")
    status = int(numbers[0]) if with_status else 0
    if with_status and not 400 <= status <= 599:
        raise ValueError(f"fault {text!r}: {status} is no error status; it must be from 400 to 599.")
    return Fault(kind, int(numbers[-1]), status)


def striking(faults: tuple[Fault, ...], number: int) -> Fault | None:
    """The fault that strikes the `number`-th request, counted from 1."""
    return next((fault for fault in faults if number % fault.every == 0), None)
