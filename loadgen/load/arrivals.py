"""When requests are due: arrival laws, drawn in full before the clock starts. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:  # numpy is loaded to draw: options are read without it
    import numpy as np
    from numpy.typing import NDArray

Kind = Literal["burst", "constant", "poisson", "gamma"]


class Arrival(msgspec.Struct, frozen=True):
    """An arrival law. `rate` in requests/s; `cv`: coefficient of variation of the gaps (gamma), 1 = Poisson."""

    kind: Kind
    rate: float = 0.0
    cv: float = 1.0

    def __str__(self) -> str:
        parts = {"burst": "", "gamma": f":{self.rate:g}:{self.cv:g}"}
        return self.kind + parts.get(self.kind, f":{self.rate:g}")


def parse(text: str) -> Arrival:
    """'burst', 'constant:R', 'poisson:R' or 'gamma:R:CV'. Raises ValueError with one sentence."""
    number = r"(\d+(?:\.\d*)?|\.\d+)"
    match = re.fullmatch(rf"(burst)|(constant|poisson):{number}|(gamma):{number}:{number}", text)
    if match is None:
        raise ValueError(
            f"arrival '{text}' is not understood; use burst, constant:R, poisson:R or gamma:R:CV "
            "with R in requests per second."
        )
    burst, steady, rate, gamma, gamma_rate, cv = match.groups()
    if burst:
        return Arrival("burst")
    if gamma:
        arrival = Arrival("gamma", float(gamma_rate), float(cv))
    else:
        arrival = Arrival("constant" if steady == "constant" else "poisson", float(rate))
    if arrival.rate <= 0 or arrival.cv <= 0:
        raise ValueError(f"arrival '{text}' needs a rate and a variation above zero.")
    return arrival


def draw(arrival: Arrival, requests: int | None, duration_s: float | None, seed: int) -> NDArray[np.int64]:
    """Due times in nanoseconds since t = 0, ascending: `requests` of them, or all those before `duration_s`, or both.

    constant: k / rate. poisson, gamma: gaps of mean 1 / rate, the first one from t = 0. burst: all at 0.
    The same seed gives the same times; a shorter schedule is the beginning of a longer one.
    """
    import numpy as np

    if requests is None and (duration_s is None or arrival.kind == "burst"):
        raise ValueError("a schedule needs a number of requests, or a rate and a duration.")
    if arrival.kind == "burst":
        return np.zeros(requests or 0, np.int64)
    rng = np.random.default_rng((seed, 0xA771))
    times: list[NDArray[np.float64]] = [np.empty(0)]
    count, end_s = 0, 0.0
    while (requests is None or count < requests) and (duration_s is None or end_s < duration_s):
        if arrival.kind == "constant":
            part = np.arange(count, count + 4096) / arrival.rate
        else:
            shape = 1.0 if arrival.kind == "poisson" else arrival.cv**-2
            part = end_s + np.cumsum(rng.gamma(shape, 1.0 / (arrival.rate * shape), 4096))
        times.append(part)
        count += len(part)
        end_s = float(part[-1])
    seconds = np.concatenate(times)[:requests]
    if duration_s is not None:
        seconds = seconds[seconds < duration_s]
    return (seconds * 1e9).astype(np.int64)
