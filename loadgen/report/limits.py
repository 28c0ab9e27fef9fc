"""Limits of a gate, such as `ttft_p99>+5%` or `ttft_p99<500ms`, and whether a comparison is beyond them. Pure.

A limit names how much worse B may be than A, or what B is to keep whatever A did. It is broken where the near end of
the 95 % interval lies beyond it: where the noise that the interval covers cannot explain the loss. A better B breaks
none of the former, and no limit can be written that B breaks by being better. What has no value, or no interval, is not
known and must never pass.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from backends.untrusted import nearest
from loadgen.config import ConfigError
from loadgen.document.content import number
from loadgen.report.contrast import Contrast, contrast

_LIMIT = re.compile(r"\s*([^\s<>]+)\s*([<>])=?\s*([+-]?)\s*(\d+(?:\.\d*)?|\.\d+)\s*(\S*)\s*", re.ASCII)
_UNITS_OF_B = {"ms": {"": 1.0, "ms": 1.0, "s": 1000.0}, "": {"": 1.0, "/s": 1.0}, "GiB": {"": 1.0, "GiB": 1.0}}
EXAMPLES = "'ttft_p99>+5%' or 'output_tokens_per_s<-3%'"


class Measure(NamedTuple):
    """What a limit may be on. unit: of an absolute limit; empty where only % makes sense."""

    lower_is_better: bool
    unit: str = ""


@dataclass(frozen=True)
class Limit:
    """amount: how much worse B may be, above 0; in `unit`, or as a ratio where that is %. of_b: it is what
    B itself may be."""

    text: str
    metric: str
    measure: Measure
    amount: float
    unit: str
    of_b: bool = False


class Check(msgspec.Struct, frozen=True):
    """What came of one limit, or of one run's verdict. unknown: nothing could be judged. detail: a sentence or two."""

    group: Literal["limit", "run"]
    name: str
    state: Literal["ok", "beyond", "unknown"]
    detail: str


def parse(texts: Sequence[str], known: Mapping[str, Measure], examples: str = EXAMPLES) -> list[Limit]:
    """known: by name. Raises ConfigError."""
    return [_parse(text, known, examples) for text in dict.fromkeys(texts)]


def _parse(text: str, known: Mapping[str, Measure], examples: str) -> Limit:
    match = _LIMIT.fullmatch(text)
    if match is None:
        raise ConfigError(f"--fail-if is '{text}', which is no limit; write such as {examples}.")
    name, sign, direction, digits, unit = match.groups()
    if name not in known:
        raise ConfigError(f"--fail-if: there is no metric '{name}'; {_suggestion(name, known)}")
    measure = known[name]
    units = "% or " + measure.unit if measure.unit else "%"
    rises = ">+" if measure.lower_is_better else "<-"
    unit = next((each for each in ("%", measure.unit) if each and each.lower() == unit.lower()), unit)
    if not direction and (sign == "<") == measure.lower_is_better and unit in _UNITS_OF_B[measure.unit]:
        amount = float(digits) * _UNITS_OF_B[measure.unit][unit]
        return Limit(f"{name}{sign}{amount:g}{measure.unit}", name, measure, amount, measure.unit, of_b=True)
    if not unit:
        raise ConfigError(f"--fail-if '{text}' has no unit; write '{name}{rises}{digits}%', or in {units}.")
    if unit not in ("%", measure.unit):
        raise ConfigError(f"--fail-if '{text}' is in '{unit}'; write it in {units}, as in '{name}{rises}5%'.")
    if (sign, direction or rises[1]) != (rises[0], rises[1]):
        less = "less" if measure.lower_is_better else "more"
        raise ConfigError(
            f"--fail-if '{text}' would fail a better run, since {less} of {name} is better; write "
            f"'{name}{rises}{digits}{unit}'."
        )
    amount = float(digits) / (100 if unit == "%" else 1)
    if unit == "%" and not measure.lower_is_better and amount >= 1:
        raise ConfigError(f"--fail-if '{text}' can never fail, since nothing falls by more than 100%; write less.")
    return Limit(f"{name}{rises}{digits}{unit}", name, measure, amount, unit)


def _suggestion(name: str, known: Mapping[str, Measure]) -> str:
    of_it = [each for each in known if re.fullmatch(f"{re.escape(name)}_[a-z0-9]+", each)]
    if of_it:
        return f"say which of it: {', '.join(of_it)}."
    meant = nearest(name.replace("/", "_per_"), known)
    return f"did you mean '{meant}'?" if meant else f"there are {', '.join(known)}."


def judged(limits: Sequence[Limit], changes: Mapping[str, Mapping[str, Contrast]]) -> list[Check]:
    """What came of each limit for each subject that was compared; "" is the only one."""
    if not changes:
        return [Check("limit", "limits", "unknown", "Nothing ended well in both A and B.")]
    unknown = contrast(None, None)
    return [judge(limit, of.get(limit.metric, unknown), name) for name, of in changes.items() for limit in limits]


def judge(limit: Limit, change: Contrast, subject: str = "") -> Check:
    """Whether B is worse than A by more than the limit. subject: what was compared, where there are several."""
    name = f"{subject}: {limit.text}" if subject else limit.text
    missing = [side for side, value in (("A", change.a), ("B", change.b)) if value is None]
    if missing:
        return Check("limit", name, "unknown", f"{limit.metric} has no value in {' and '.join(missing)}.")
    if limit.of_b:
        return _judge_b(limit, change, name)
    relative = limit.unit == "%"
    point, interval = (change.ratio, change.ratio_ci) if relative else (change.difference, change.difference_ci)
    if point is None or interval is None:
        return Check("limit", name, "unknown", f"{limit.metric} has no interval: too little was measured of it.")
    origin = 1.0 if relative else 0.0
    low, high = interval[0] - origin, interval[1] - origin
    beyond = low > limit.amount if limit.measure.lower_is_better else high < -limit.amount
    worse = point - origin if limit.measure.lower_is_better else origin - point
    detail = f"{limit.metric} is {number(change.a)} in A and {number(change.b)} in B, "
    detail += _amount(point - origin, limit.unit)
    detail += f" (95 % CI {_amount(low, limit.unit)} to {_amount(high, limit.unit)})" if low < high else ""
    detail += ": beyond the limit" if beyond else ": not shown to be beyond the limit" if worse > limit.amount else ""
    return Check("limit", name, "beyond" if beyond else "ok", detail + ".")


def _judge_b(limit: Limit, change: Contrast, name: str) -> Check:
    """The interval is the difference's about A's value, which is no narrower than B's own."""
    if change.a is None or change.b is None or change.difference_ci is None:
        return Check("limit", name, "unknown", f"{limit.metric} has no interval: too little was measured of it.")
    low, high = (change.a + bound for bound in change.difference_ci)
    lower = limit.measure.lower_is_better
    beyond = low > limit.amount if lower else high < limit.amount
    missed = change.b > limit.amount if lower else change.b < limit.amount
    detail = f"{limit.metric} is {number(change.b)} in B"
    detail += f" (95 % CI {number(low)} to {number(high)})" if low < high else ""
    detail += ": beyond the limit" if beyond else ": not shown to be beyond the limit" if missed else ""
    return Check("limit", name, "beyond" if beyond else "ok", detail + ".")


def _amount(value: float, unit: str) -> str:
    return f"{100 * value:+.1f} %" if unit == "%" else f"{value:+.4g} {unit}"
