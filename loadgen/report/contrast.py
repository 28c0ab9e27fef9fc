"""Two sides of a comparison: values, their difference and ratio, and the 95 % intervals of both between runs. Pure.

Between runs: Student's t with Welch's degrees of freedom (Welch 1947), (a + b)^2 / (a^2 / (n_A - 1) + b^2 / (n_B - 1))
where a and b are the variances of the two means. A difference B - A lies within t sqrt(a + b) of what was measured. A
ratio is taken on logarithms: log m has the variance s^2 / (n m^2), so B / A lies within exp(+-t sqrt(a + b)), where a
and b are those. A side with one run has no spread of its own; the other side's serves for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev, variance

import msgspec

CONFIDENCE = 0.95
SAME = "no difference shown"
# Student's t, 97.5 %, of 1 to 30 degrees of freedom; beyond, the normal distribution's is at most 4 % too small.
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
NORMAL_975 = 1.96

Bounds = tuple[float, float]


class Contrast(msgspec.Struct, frozen=True, kw_only=True):
    """Both values, their difference (B - A) and ratio (B / A), 95 % intervals of the two, and what the difference's
    shows. None where it is not defined."""

    a: float | None
    b: float | None
    difference: float | None
    difference_ci: Bounds | None
    ratio: float | None
    ratio_ci: Bounds | None
    shows: str | None


def contrast(
    a: float | None, b: float | None, difference_ci: Bounds | None = None, ratio_ci: Bounds | None = None
) -> Contrast:
    return Contrast(
        a=a,
        b=b,
        difference=b - a if a is not None and b is not None else None,
        difference_ci=difference_ci,
        ratio=b / a if a and b is not None else None,
        ratio_ci=ratio_ci,
        shows=_shows(difference_ci) if difference_ci is not None else None,
    )


def as_it_is(a: float | None, b: float | None) -> Contrast:
    """Contrasts two values without noise: each interval is the value itself."""
    plain = contrast(a, b)
    difference, ratio = ((value, value) if value is not None else None for value in (plain.difference, plain.ratio))
    return contrast(a, b, difference, ratio)


def of_runs(a: Sequence[float], b: Sequence[float]) -> Contrast:
    """Contrasts one value a run, at least one a side; intervals need two runs on one side, ratios values above 0."""
    mean_a, mean_b = fmean(a), fmean(b)
    reach = _reach(a, b, 1.0, 1.0)
    difference_ci = None if reach is None else (mean_b - mean_a - reach, mean_b - mean_a + reach)
    return contrast(mean_a, mean_b, difference_ci, ratio_interval(a, b))


def ratio_interval(a: Sequence[float], b: Sequence[float]) -> Bounds | None:
    """95 % interval of B / A, each the mean of its runs; None where no side has two runs, or a value is not above 0."""
    if min(*a, *b) <= 0:
        return None
    reach = _reach(a, b, fmean(a), fmean(b))
    return None if reach is None else _times(fmean(b) / fmean(a), reach)


def _times(ratio: float, reach: float) -> Bounds:
    return ratio * math.exp(-reach), ratio * math.exp(reach)


def widened(of: Contrast, a: Sequence[float], b: Sequence[float]) -> Contrast:
    """With intervals no narrower than Welch's over parts of A and of B (at least two each), about the same values."""
    if of.difference is None or of.difference_ci is None or min(len(a), len(b)) < 2:
        return of
    apart = _reach(a, b, 1.0, 1.0) or 0.0
    difference_ci = _union(of.difference_ci, (of.difference - apart, of.difference + apart))
    ratio_ci = of.ratio_ci
    if of.ratio is not None and ratio_ci is not None and of.ratio > 0 and min(*a, *b) > 0:
        ratio_ci = _union(ratio_ci, _times(of.ratio, _reach(a, b, fmean(a), fmean(b)) or 0.0))
    return contrast(of.a, of.b, difference_ci, ratio_ci)


def _union(a: Bounds, b: Bounds) -> Bounds:
    return min(a[0], b[0]), max(a[1], b[1])


def _reach(a: Sequence[float], b: Sequence[float], unit_a: float, unit_b: float) -> float | None:
    """Half of Welch's interval of the difference of two means, each in its unit; None without a spread."""
    spreads = [variance(runs) / unit**2 if len(runs) > 1 else None for runs, unit in ((a, unit_a), (b, unit_b))]
    known = [spread for spread in spreads if spread is not None]
    if not known:
        return None
    counts = (len(a), len(b))
    parts = [(known[0] if spread is None else spread) / n for spread, n in zip(spreads, counts, strict=True)]
    total = sum(parts)
    if total == 0:
        return 0.0
    if len(known) == 1:
        freedom: float = max(counts) - 1
    else:
        freedom = total**2 / sum(part**2 / (n - 1) for part, n in zip(parts, counts, strict=True))
    return t_975(freedom) * math.sqrt(total)


def mean_interval(values: Sequence[float]) -> Bounds | None:
    """95 % interval of the mean of which these are a sample; None below two."""
    if len(values) < 2:
        return None
    mean, reach = fmean(values), t_975(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return mean - reach, mean + reach


def t_975(freedom: float) -> float:
    """Rounded down to whole degrees of freedom, so the interval is too wide rather than too narrow."""
    whole = max(1, math.floor(freedom + 1e-9))  # n - 1 may come out a rounding error short
    return T_975[whole - 1] if whole <= len(T_975) else NORMAL_975


def _shows(interval: Bounds) -> str:
    if interval[0] <= 0 <= interval[1]:
        return SAME
    return "B is higher" if interval[0] > 0 else "B is lower"
