"""Wrong replies on purpose: what a client must notice, in the wire form in which real servers and networks do it.

A fault strikes every N-th generation request, counted from 1, or a share of them drawn from the seed and the request's
number, or one request alone (a script); where several would strike one request the first named does. A reply that
breaks "midway" has sent half of its tokens, rounded down. Some faults are the whole server's and strike no request of
their own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from backends.untrusted import read_json

KINDS = {
    "reset": "the connection is reset midway",
    "truncate": "the connection is closed cleanly midway",
    "stall": "nothing more is sent midway, the connection stays open",
    "http_error:STATUS": "an error status with the server's own body",
    "json_error": "the server's own error body with status 200, in place of a reply",
    "stream_error": "the server's error event inside a stream with status 200",
    "empty": "status 200 with an empty body",
    "done_only": "a stream of nothing but [DONE]",
    "short": "half of the output, finished by a stop",
    "merge": "two tokens in one event",
    "coalesce": "four events in one write",
    "no_done": "no [DONE] at the end",
    "late_token": "one more token after the end",
    "junk_after": "bytes after the last chunk",
    "unasked_reply": "a second whole reply after the first",
    "close_idle": "the connection is closed after the reply, unannounced",
    "unnoticed": "a client that leaves is not noticed: its reply goes on to the end, in its slot",
    "refuse": "the connection is closed before any byte",
    "cached": "half of the prompt reported as cached",
    "wrong_prompt_tokens": "one prompt token too many reported",
    "garbage": "an event midway that is no JSON",
    "bad_chunk": "a chunk size midway that is no number",
    "die": "the server's process ends, with exit code 1",
}
WHEN = "N (every N-th request), P% (that share of them, drawn from the seed) or @N (the N-th alone)"
# Of the whole server: the form of its amount, what is wrong, and from what up to what the amount may be.
CONDITIONS = {
    "slow_start": ("SECONDS", "for so long after it listens, /health and generations are answered with 503", 0, 86_400),
    "kv_exhaustion": ("SHARE%", "the modelled KV cache keeps only that share", 0, 1),
    "slow_rank": ("FACTOR", "one of the modelled GPUs takes so many times as long for each step, and all wait", 1, 1e6),
}
MODELLED = ("kv_exhaustion", "slow_rank")  # need --gpu
# What a dialect has no way to express: TGI and LightLLM report no cached tokens, and nothing ends their streams.
# LightLLM writes an event for each token, whose id it carries, however far behind its reader is.
UNKNOWN = {"tgi": ("cached", "done_only", "no_done"), "lightllm": ("cached", "done_only", "no_done", "merge")}
AT_ONCE = frozenset({"refuse", "http_error", "json_error", "empty"})  # in place of a reply
FIRST = frozenset({"done_only"})  # in place of the first token
MIDWAY = frozenset({"reset", "truncate", "stall", "stream_error", "garbage", "bad_chunk"})


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Strikes by `every`, `share` or `only`, whichever is set. `amount`: a condition's seconds, share or factor."""

    kind: str
    every: int = 0
    share: float = 0.0
    only: int = 0
    status: int = 0
    amount: float = 0.0

    def strikes(self, number: int, seed: int) -> bool:
        if self.share:
            return random.Random(f"{seed}:{number}:{self.kind}:{self.status}").random() < self.share
        return number == self.only or (self.every > 0 and number % self.every == 0)


@dataclass(frozen=True)
class Faults:
    """All faults of one server. `seed` draws the requests that a share of them strikes."""

    faults: tuple[Fault, ...] = ()
    seed: int = 0

    def striking(self, number: int) -> Fault | None:
        """The fault that strikes the `number`-th request, counted from 1."""
        return next((fault for fault in self.faults if fault.strikes(number, self.seed)), None)

    def amount(self, kind: str, otherwise: float) -> float:
        """That of the condition `kind`; of several the last."""
        return next((fault.amount for fault in reversed(self.faults) if fault.kind == kind), otherwise)

    def modelled(self) -> list[str]:
        """The kinds among them that only modelled hardware has."""
        return [fault.kind for fault in self.faults if fault.kind in MODELLED]


NO_FAULTS = Faults()


class _Scripted(msgspec.Struct, forbid_unknown_fields=True):
    request: int
    kind: str


def read(texts: Iterable[str], dialect: str, seed: int = 0) -> Faults:
    """Faults as `parse` takes them, or in the files NAME.json that are named among them, each a list of
    {"request": N, "kind": KIND}. Raises ValueError with one sentence."""
    return Faults(tuple(parse(text, dialect) for text in _expanded(texts)), seed)


def parse(text: str, dialect: str) -> Fault:
    """`KIND:WHEN`, `http_error:STATUS:WHEN`, or a condition and its amount. Raises ValueError with one sentence."""
    kind, *rest = text.split(":")
    if kind in CONDITIONS:
        return _condition(text, kind, rest)
    with_status = f"{kind}:STATUS" in KINDS
    if kind not in KINDS and not with_status:
        raise ValueError(f"there is no fault {kind!r}; the faults are {', '.join([*KINDS, *CONDITIONS])}.")
    when = _when(rest[-1]) if len(rest) == 1 + with_status else None
    if when is None or not all(_whole(each) for each in rest[:-1]):
        form = "http_error:STATUS:WHEN" if with_status else f"{kind}:WHEN"
        raise ValueError(f"fault {text!r} is not of the form {form}, where WHEN is {WHEN}.")
    if kind in UNKNOWN.get(dialect, ()):
        raise ValueError(f"fault {text!r} cannot happen here: the {dialect} protocol has nothing of the kind.")
    status = int(rest[0]) if with_status else 0
    if with_status and not 400 <= status <= 599:
        raise ValueError(f"fault {text!r}: {status} is no error status; it must be from 400 to 599.")
    every, share, only = when
    return Fault(kind=kind, every=every, share=share, only=only, status=status)


def _when(text: str) -> tuple[int, float, int] | None:
    """(every, share, only), one of them set; None for what is none of them."""
    if text.endswith("%"):
        share = _number(text[:-1]) / 100
        return (0, share, 0) if 0 < share <= 1 else None
    if text.startswith("@"):
        return (0, 0.0, int(text[1:])) if _whole(text[1:]) else None
    return (int(text), 0.0, 0) if _whole(text) else None


def _condition(text: str, kind: str, rest: list[str]) -> Fault:
    form, _, low, high = CONDITIONS[kind]
    percent = form.endswith("%")
    value = math.nan
    if len(rest) == 1 and rest[0].endswith("%") == percent:
        value = _number(rest[0].removesuffix("%")) / (100 if percent else 1)
    if not low < value <= high:
        most = f"{high:.0%}" if percent else f"{high:.0f}"
        raise ValueError(f"fault {text!r} is not of the form {kind}:{form}, above {low} and at most {most}.")
    return Fault(kind=kind, amount=value)


def _expanded(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        if not text.endswith(".json"):
            yield text
            continue
        form = '; it is a list of {"request": N, "kind": KIND}'
        script = read_json(text, list[_Scripted], ValueError, "is no script of faults", form)
        yield from (f"{each.kind}:@{each.request}" for each in script)


def _whole(text: str) -> bool:
    """Whether it is a whole number from 1."""
    return text.isascii() and text.isdecimal() and int(text) > 0


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
