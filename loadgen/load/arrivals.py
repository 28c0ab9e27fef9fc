"""When requests are due: arrival laws, drawn in full before the clock starts, and closed loops that grow. Pure."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Literal

import msgspec

from backends.untrusted import escaped
from loadgen.rundir import MOST_PHASES, Phase

if TYPE_CHECKING:  # numpy is loaded to draw: options are read without it
    import numpy as np
    from numpy.typing import NDArray

Kind = Literal["burst", "constant", "poisson", "gamma", "ramp", "steps"]
FORMS = "burst, constant:R, poisson:R, gamma:R:CV, ramp:R0:R1:SECONDS or steps:R@S,R@S,..."
RAMP_PHASES = 5  # that a ramp is reported in


class Stretch(msgspec.Struct, frozen=True):
    """Some seconds in which the rate, in requests/s, goes evenly from one value to another."""

    seconds: float
    first: float
    last: float

    @property
    def requests(self) -> float:
        """How many are due in it, in the mean."""
        return self.seconds * (self.first + self.last) / 2


class Arrival(msgspec.Struct, frozen=True):
    """An arrival law. `rate` in requests/s; `cv`: coefficient of variation of the gaps (gamma), 1 = Poisson. ramp and
    steps are Poisson arrivals whose rate changes as `stretches` say, and end with the last of them."""

    kind: Kind
    rate: float = 0.0
    cv: float = 1.0
    stretches: tuple[Stretch, ...] = ()

    def __str__(self) -> str:
        if self.kind == "ramp":
            (ramp,) = self.stretches
            return f"ramp:{ramp.first:g}:{ramp.last:g}:{ramp.seconds:g}"
        if self.kind == "steps":
            return "steps:" + ",".join(f"{step.first:g}@{step.seconds:g}" for step in self.stretches)
        parts = {"burst": "", "gamma": f":{self.rate:g}:{self.cv:g}"}
        return self.kind + parts.get(self.kind, f":{self.rate:g}")

    @property
    def lasts_s(self) -> float | None:
        """When the law itself ends; None where it goes on."""
        return sum(each.seconds for each in self.stretches) if self.stretches else None

    def phases(self, what: str = "requests") -> list[Phase]:
        """The parts in which a changing rate is reported; none where it is one law throughout. what: arrives."""
        if self.kind == "ramp":
            (ramp,) = self.stretches
            return _ramp_phases(ramp.first, ramp.last, ramp.seconds, f"{what}/s")
        ends = list(itertools.accumulate((each.seconds for each in self.stretches), initial=0.0))
        return [
            Phase(f"{each.first:g} {what}/s", start, end)
            for each, (start, end) in zip(self.stretches, itertools.pairwise(ends), strict=True)
        ]


def _ramp_phases(first: float, last: float, seconds: float, unit: str) -> list[Phase]:
    def at(part: int) -> tuple[float, float]:
        return first + (last - first) * part / RAMP_PHASES, seconds * part / RAMP_PHASES

    pairs = itertools.pairwise(map(at, range(RAMP_PHASES + 1)))
    return [Phase(f"{low:g} to {high:g} {unit}", start, end) for (low, start), (high, end) in pairs]


_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"


def parse(text: str) -> Arrival:
    """'burst', 'constant:R', 'poisson:R', 'gamma:R:CV', 'ramp:R0:R1:SECONDS' or 'steps:R@S,R@S,...'. Raises ValueError
    with one sentence."""
    kind, _, rest = text.partition(":")
    numbers = rest.replace("@", ":").replace(",", ":") if kind == "steps" else rest
    forms = {
        "burst": "", "constant": _NUMBER, "poisson": _NUMBER, "gamma": f"{_NUMBER}:{_NUMBER}",
        "ramp": f"{_NUMBER}:{_NUMBER}:{_NUMBER}", "steps": f"{_NUMBER}@{_NUMBER}(,{_NUMBER}@{_NUMBER})*",
    }  # fmt: skip
    if kind not in forms or re.fullmatch(forms[kind], rest) is None or (kind == "burst" and text != kind):
        raise ValueError(f"arrival '{escaped(text)}' is not understood; use {FORMS} with R in requests per second.")
    values = [float(word) for word in numbers.split(":") if word]
    if kind == "burst":
        return Arrival("burst")
    if kind == "ramp":
        arrival = Arrival("ramp", stretches=(Stretch(values[2], values[0], values[1]),))
    elif kind == "steps":
        if len(values) > 2 * MOST_PHASES:
            raise ValueError(f"arrival steps has {len(values) // 2} steps; it may have {MOST_PHASES}.")
        pairs = zip(values[::2], values[1::2], strict=True)
        arrival = Arrival("steps", stretches=tuple(Stretch(seconds, rate, rate) for rate, seconds in pairs))
    elif kind == "gamma":
        arrival = Arrival("gamma", values[0], values[1])
    else:
        arrival = Arrival("constant" if kind == "constant" else "poisson", values[0])
    if arrival.stretches:
        if (
            min(each.seconds for each in arrival.stretches) <= 0
            or sum(each.requests for each in arrival.stretches) <= 0
        ):
            raise ValueError(f"arrival '{escaped(text)}' needs seconds above zero and a rate above zero somewhere.")
    elif arrival.rate <= 0 or arrival.cv <= 0:
        raise ValueError(f"arrival '{text}' needs a rate and a variation above zero.")
    return arrival


def draw(arrival: Arrival, requests: int | None, duration_s: float | None, seed: int) -> NDArray[np.int64]:
    """Due times in nanoseconds since t = 0, ascending: `requests` of them, or all those before `duration_s`, or both; a
    law that ends by itself gives no more than it has.

    constant: k / rate. poisson, gamma: gaps of mean 1 / rate, the first one from t = 0. burst: all at 0. ramp, steps:
    Poisson arrivals of rate 1 at the times when so many requests are due in the mean (the inverse of the summed rate).
    The same seed gives the same times; a shorter schedule is the beginning of a longer one.
    """
    import numpy as np

    if requests is None and not arrival.stretches and (duration_s is None or arrival.kind == "burst"):
        raise ValueError("a schedule needs a number of requests, or a rate and a duration.")
    if arrival.kind == "burst":
        return np.zeros(requests or 0, np.int64)
    rng = np.random.default_rng((seed, 0xA771))
    # with a changing rate the clock counts requests due in the mean, and is turned into seconds at the end
    total = sum(each.requests for each in arrival.stretches)
    rate, end = (1.0, total) if arrival.stretches else (arrival.rate, duration_s)
    times: list[NDArray[np.float64]] = [np.empty(0)]
    count, last = 0, 0.0
    while (requests is None or count < requests) and (end is None or last < end):
        if arrival.kind == "constant":
            part = np.arange(count, count + 4096) / rate
        else:
            shape = arrival.cv**-2 if arrival.kind == "gamma" else 1.0
            part = last + np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), 4096))
        times.append(part)
        count += len(part)
        last = float(part[-1])
    seconds = np.concatenate(times)[:requests]
    if arrival.stretches:
        seconds = _when(arrival.stretches, seconds[seconds < total])
    if duration_s is not None:
        seconds = seconds[seconds < duration_s]
    return (seconds * 1e9).astype(np.int64)


def _when(stretches: tuple[Stretch, ...], due: NDArray[np.float64]) -> NDArray[np.float64]:
    """When so many requests are due in the mean, in seconds; shape (n,), as `due`, ascending."""
    import numpy as np

    before = np.cumsum([0.0, *(each.requests for each in stretches)])
    starts = np.cumsum([0.0, *(each.seconds for each in stretches)])
    seconds = np.empty(len(due))
    which = np.clip(np.searchsorted(before, due, side="right") - 1, 0, len(stretches) - 1)
    for index, stretch in enumerate(stretches):
        rest = due[which == index] - before[index]
        # first * t + slope * t^2 / 2 = rest, solved so that a slope of zero needs no case of its own
        slope = (stretch.last - stretch.first) / stretch.seconds
        root = np.sqrt(np.maximum(stretch.first**2 + 2 * slope * rest, 0.0))
        part = np.divide(2 * rest, stretch.first + root, out=np.zeros_like(rest), where=rest > 0)
        seconds[which == index] = starts[index] + np.minimum(part, stretch.seconds)
    return seconds


class Streams(msgspec.Struct, frozen=True):
    """A closed loop: how many requests are kept in flight, from `first` evenly to `last` within `seconds`."""

    first: int
    last: int
    seconds: float = 0.0

    def __str__(self) -> str:
        return str(self.last) if not self.seconds else f"{self.first}:{self.last}:{self.seconds:g}"

    @property
    def most(self) -> int:
        return max(self.first, self.last)

    def at(self, elapsed_s: float) -> int:
        """How many at that time. A stream begins, or ends, when the straight line passes its number."""
        if elapsed_s >= self.seconds:
            return self.last
        moved = (self.last - self.first) * max(0.0, elapsed_s) / self.seconds
        return self.first + (int(moved) if moved >= 0 else -int(-moved))

    def start_s(self, stream: int) -> float:
        """When stream `stream` (from 0) sends its first request."""
        if stream < self.first:
            return 0.0
        return self.seconds * (stream + 1 - self.first) / (self.last - self.first)

    def phases(self, what: str = "in flight") -> list[Phase]:
        """The parts in which a ramp is reported, and what comes after it. what: follows the numbers."""
        if not self.seconds:
            return []
        after = Phase(f"{self.last} {what}", self.seconds, None)
        return [*_ramp_phases(self.first, self.last, self.seconds, what), after]


def parse_streams(text: str | int) -> Streams:
    """A number, or 'FIRST:LAST:SECONDS'. Raises ValueError with one sentence."""
    match = re.fullmatch(rf"(\d{{1,9}})(?::(\d{{1,9}}):{_NUMBER})?", str(text))
    if match is None:
        raise ValueError(
            f"--concurrency '{escaped(str(text))}' is not understood; use a number, or FIRST:LAST:SECONDS for a ramp."
        )
    first, last, seconds = match.groups()
    if last is None:
        return Streams(int(first), int(first))
    streams = Streams(int(first), int(last), float(seconds))
    if min(streams.first, streams.last) < 1 or streams.seconds <= 0:
        raise ValueError(f"--concurrency '{text}' needs at least 1 request in flight and seconds above zero.")
    return streams if streams.first != streams.last else Streams(streams.last, streams.last)
