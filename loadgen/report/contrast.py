"""Two sides of a comparison: values, their difference and ratio, and the 95 % intervals of both between runs. Pure.

Between runs: Student's t with Welch's degrees of freedom (Welch 1947), (a + b)^2 / (a^2 / (n_A - 1) + b^2 / (n_B - 1))
where a and b are the variances of the two means. A difference B - A lies within t sqrt(a + b) of what was measured. A
ratio is taken on logarithms: log m has the variance s^2 / (n m^2), so B / A lies within exp(+-t sqrt(a + b)), where a
and b are those. A side with one run has no spread of its own; the other side's serves for both.

Within runs: of two values with intervals of their own (`of_estimates`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev, variance

import msgspec

from loadgen.steady.blocks import Bounds, t_975
from loadgen.steady.window import Estimate

CONFIDENCE = 0.95
MANY = 1e9  # degrees of freedom: the normal distribution
MOST_WITHIN = 12.0  # degrees of freedom of two runs, since neighbouring blocks are a little alike: by experiment
BETTER, WORSE, SAME, NO_INTERVAL = "B is better", "B is worse", "no difference shown", "no interval"


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


def direction(change: Contrast, lower_is_better: bool) -> str:
    """What the difference's interval shows of B: BETTER, WORSE, SAME or NO_INTERVAL, which a value that is compared as
    it is has, too."""
    if change.shows == SAME:
        return SAME
    if change.difference_ci is None or change.difference_ci[0] == change.difference_ci[1]:
        return NO_INTERVAL
    return WORSE if (change.difference_ci[0] > 0) == lower_is_better else BETTER


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


def of_estimates(a: Estimate | None, b: Estimate | None) -> Contrast:
    """Of two values with intervals of their own, which need not lie evenly about them: the squared distances to their
    ends add up (Zou and Donner 2008), those of a ratio in logarithms; each as a standard error, since Student's t has
    more degrees of freedom in both together (Welch)."""
    if a is None or b is None or a.bounds is None or b.bounds is None:
        return contrast(None if a is None else a.value, None if b is None else b.value)
    (a_low, a_high), (b_low, b_high) = a.bounds, b.bounds
    freedom_a, freedom_b = (max(1, each.blocks - 1) if each.blocks else MANY for each in (a, b))

    def apart(of_a: float, of_b: float) -> float:
        variances = (of_a / t_975(freedom_a)) ** 2, (of_b / t_975(freedom_b)) ** 2
        return _welch(variances, (freedom_a, freedom_b), MOST_WITHIN if a.blocks and b.blocks else MANY)

    below, above = apart(a_high - a.value, b.value - b_low), apart(a.value - a_low, b_high - b.value)
    difference, ratio_ci = b.value - a.value, None
    if min(a.value, b.value, a_low, b_low) > 0:
        falls = apart(math.log(a_high / a.value), math.log(b.value / b_low))
        rises = apart(math.log(a.value / a_low), math.log(b_high / b.value))
        ratio_ci = b.value / a.value * math.exp(-falls), b.value / a.value * math.exp(rises)
    return contrast(a.value, b.value, (difference - below, difference + above), ratio_ci)


def _reach(a: Sequence[float], b: Sequence[float], unit_a: float, unit_b: float) -> float | None:
    """Half of Welch's interval of the difference of two means, each in its unit; None without a spread."""
    spreads = [variance(runs) / unit**2 if len(runs) > 1 else None for runs, unit in ((a, unit_a), (b, unit_b))]
    known = [spread for spread in spreads if spread is not None]
    if not known:
        return None
    counts = (len(a), len(b))
    parts = [(known[0] if spread is None else spread) / n for spread, n in zip(spreads, counts, strict=True)]
    if len(known) == 1:
        return t_975(max(counts) - 1) * math.sqrt(sum(parts))
    return _welch((parts[0], parts[1]), (counts[0] - 1, counts[1] - 1))


def _welch(variances: tuple[float, float], freedom: tuple[float, float], most: float = MANY) -> float:
    """Half of the interval of a difference of means that have these variances."""
    total = sum(variances)
    if total == 0:
        return 0.0
    lost = sum((each / total) ** 2 / n for each, n in zip(variances, freedom, strict=True))
    return t_975(min(most, 1 / lost)) * math.sqrt(total)


def mean_interval(values: Sequence[float]) -> Bounds | None:
    """95 % interval of the mean of which these are a sample; None below two."""
    if len(values) < 2:
        return None
    mean, reach = fmean(values), t_975(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return mean - reach, mean + reach


def _shows(interval: Bounds) -> str:
    if interval[0] <= 0 <= interval[1]:
        return SAME
    return "B is higher" if interval[0] > 0 else "B is lower"
