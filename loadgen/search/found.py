"""search.json: what a search was asked, its probes, and what they say; with its text and its figure.

The file is written after every probe, so it is also from where a search that was killed goes on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from backends.untrusted import UNDECODABLE, escaped, reason
from loadgen import rundir
from loadgen.report.text import EMULATED, number
from loadgen.rundir import RunError
from loadgen.search import objective
from loadgen.search.highest import Answer, Ended, Goal, Guess, Probe, answer, wilson

SCHEMA, FILE = "loadgen.search/1", "search.json"
AxisName = Literal["rate", "concurrency"]
UNITS = {"rate": "requests/s", "concurrency": "requests in flight"}
CLIENT_LIMITS = ("LOOP_LAG", "CLIENT_CPU", "SEND_LAG", "DROPPED")  # findings that say so where they are `invalid`
FULL_KV_RATIO = 0.98


class Range(msgspec.Struct, frozen=True):
    """An estimate and its interval of 95 %; None where there is no answer, or no probe bounds it on that side."""

    value: float | None
    low: float | None
    high: float | None


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """One probe. kind: `alone`, of a request at a time; `saturation`, of a closed loop, which says where to begin; and
    `probe`, at a load. missed: share of the requests that missed each limit."""

    number: int
    directory: str
    kind: Literal["alone", "saturation", "probe"]
    probe: Probe
    attained_ratio: float | None
    missed: dict[str, float] = {}
    kv_cache_usage_max_ratio: float | None = None
    preemptions: int | None = None
    findings: list[str] = []

    @property
    def by_client(self) -> bool:
        """Whether the client was the limit."""
        return any(code in CLIENT_LIMITS for code in self.findings)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What is sought. config: the options of the run that differ from their defaults."""

    slo_ms: dict[str, float]
    attain: float
    axis: AxisName
    budget_s: float
    config: dict[str, Any]

    @property
    def goal(self) -> Goal:
        return Goal(attain=self.attain, budget_s=self.budget_s, whole=self.axis == "concurrency")


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """search.json. rate_per_s, or concurrency: the highest load that meets the objective. attained_ratio: the share of
    requests that meet it there. started_from: where the first load came from, in words."""

    schema: str = SCHEMA
    version: str
    backend: str = ""
    model: str = ""
    emulated: bool = False
    asked: Asked
    rate_per_s: Range | None = None
    concurrency: Range | None = None
    attained_ratio: float | None = None
    attained_interval: tuple[float, float] | None = None
    lower_bound: bool = False
    limited_by: str | None = None
    ended_because: str = "it goes on"
    ended: str = "running"
    guess: Guess | None = None
    started_from: str = ""
    probes: list[Shown] = []

    @property
    def loads(self) -> list[Probe]:
        """What the statistics see."""
        return [shown.probe for shown in self.probes if shown.kind == "probe"]

    @property
    def spent_s(self) -> float:
        return sum(shown.probe.seconds for shown in self.probes)

    @property
    def range(self) -> Range:
        return self.rate_per_s or self.concurrency or Range(None, None, None)


def with_answer(found: Found, ended: Ended | None) -> Found:
    """With what its probes say, and why it ended; None: it goes on, or was stopped."""
    none = ended is not None and ended.code == "none"
    result = Answer(value=None, low=0.0, high=math.inf, attained=None, attained_low=None, attained_high=None)
    if found.guess is not None and found.loads and not none:
        result = answer(found.asked.goal, found.guess, found.loads, ended)
    sought = Range(result.value, _finite(result.low) or None, _finite(result.high))
    interval = None
    if result.attained_low is not None and result.attained_high is not None:
        interval = (result.attained_low, result.attained_high)
    return msgspec.structs.replace(
        found,
        rate_per_s=sought if found.asked.axis == "rate" else None,
        concurrency=sought if found.asked.axis == "concurrency" else None,
        attained_ratio=result.attained,
        attained_interval=interval,
        lower_bound=_is_lower_bound(found, result.value),
        limited_by=_limited_by(found, result.value, none),
        ended=found.ended if ended is None else ended.code,
        ended_because=found.ended_because if ended is None else ended.reason,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _is_lower_bound(found: Found, value: float | None) -> bool:
    """Whether the client, and not the server, was the limit just above the answer."""
    above = _above(found, value)
    return above is not None and above.by_client


def _above(found: Found, value: float | None) -> Shown | None:
    """The lowest probe that missed what is wanted; where none did, the highest of all."""
    probes = [shown for shown in found.probes if shown.kind == "probe"]
    missed = [
        shown
        for shown in probes
        if shown.probe.ended_per_s is not None or (shown.probe.share or 0.0) < found.asked.attain
    ]
    by_load = sorted(missed, key=lambda shown: shown.probe.load)
    at_least = [shown for shown in by_load if value is None or shown.probe.load >= 0.98 * value]
    return next(iter(at_least), by_load[-1] if by_load else max(probes, key=lambda s: s.probe.load, default=None))


def _limited_by(found: Found, value: float | None, none: bool) -> str | None:
    """What was in the way of more: client, preemptions, KV cache, a metric, or the throughput where requests pile up
    before they miss a limit."""
    shown = found.probes[0] if none and len(found.probes) == 1 else _above(found, value)
    if shown is None:
        return None
    if shown.by_client:
        return "client"
    if shown.preemptions and shown.preemptions > (1 - found.asked.attain) * shown.probe.requests:
        return "preemptions"
    if (shown.kv_cache_usage_max_ratio or 0.0) >= FULL_KV_RATIO:
        return "kv"
    worst = max(shown.missed, key=lambda name: shown.missed[name], default=None)
    if worst is None or shown.missed[worst] == 0:
        return "throughput" if shown.probe.ended_per_s is not None else None
    return worst


def write(directory: Path, found: Found) -> None:
    """Replaces search.json. Raises RunError."""
    try:
        rundir.replace(directory / FILE, msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    except OSError as error:
        raise RunError(f"cannot write to {directory}: {error.strerror or error}; name another --out.") from None


def read(directory: Path) -> Found:
    """Raises RunError."""
    path = directory / FILE
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Found)
    except OSError as error:
        why = error.strerror or str(error)
        raise RunError(f"cannot read {path}: {why}; name the --out of a search with --resume.") from None
    except UNDECODABLE as error:
        raise RunError(f"{path} is no search of this version: {reason(error)}.") from None
    if found.schema != SCHEMA:
        raise RunError(f"{path} has schema '{found.schema}', and this version reads {SCHEMA}.")
    return found


def to_json(found: Found) -> str:
    """One line, ASCII."""
    return json.dumps(msgspec.to_builtins(found))


def sentence(found: Found) -> str:
    """The answer in one sentence."""
    unit, share = UNITS[found.asked.axis], f"{100 * found.asked.attain:g} %"
    wanted = f"{share} of the requests within {objective.text(found.asked.slo_ms)}"
    value, low, high = found.range.value, found.range.low, found.range.high
    if value is None:
        if found.ended == "none":
            return f"No load meets the objective ({wanted}): {found.ended_because}."
        return f"There is no answer yet ({wanted}): {found.ended_because}."
    lower = "At least " if found.lower_bound else ""
    between = f"between {number(low or 0.0)} and {number(high)}" if high is not None else f"above {number(low or 0.0)}"
    text = f"{lower}{number(value)} {unit}, {between} with 95 % confidence: {wanted}."
    return f"{text} The client was the limit, so the server may take more." if found.lower_bound else text


def _row(shown: Shown, attain: float) -> tuple[str, ...]:
    probe = shown.probe
    share = probe.share
    interval = ""
    if share is not None and probe.counted:
        low, high = wilson(share, max(1.0, probe.counted / probe.dispersion), 1.96)
        interval = f"{100 * max(0.0, low):.2f} to {100 * min(1.0, high):.2f}"
    missed = ", ".join(f"{name} {100 * each:.1f} %" for name, each in shown.missed.items() if each > 1 - attain)
    verdict = probe.verdict.replace("_", " ") if shown.kind == "probe" else shown.kind
    shown_share = "-" if share is None else f"{100 * share:.2f}"
    return (
        str(shown.number), number(probe.load), verdict, shown_share, interval, str(probe.counted), str(probe.requests),
        f"{probe.seconds:.0f}", missed or "-",
    )  # fmt: skip


HEADINGS = ("probe", "load", "verdict", "met %", "95 %", "counted", "sent", "s", "missed most")


def render(found: Found) -> str:
    """For a terminal: plain text, nothing in it that a terminal obeys."""
    rows = [HEADINGS, *(_row(shown, found.asked.attain) for shown in found.probes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [EMULATED, ""] if found.emulated else []
    lines += [f"Highest {UNITS[found.asked.axis]} of {found.backend} {found.model}".rstrip(), "", sentence(found), ""]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += ["", f"Ended because {found.ended_because}. Began at {found.started_from}."]
    lines += [f"What limited next: {found.limited_by}."] if found.limited_by else []
    return "\n".join(map(escaped, lines)) + "\n"


def markdown(found: Found) -> str:
    lines = [f"# Highest {UNITS[found.asked.axis]} of {found.backend} {found.model}", ""]
    lines += ["**EMULATED: modelled hardware, no real server.**", ""] if found.emulated else []
    lines += [sentence(found), "", f"Ended because {found.ended_because}. Began at {found.started_from}."]
    lines += [f"What limited next: {found.limited_by}."] if found.limited_by else []
    lines += ["", "| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(_row(shown, found.asked.attain)) + " |" for shown in found.probes]
    lines += ["", "![probes](search.png)"]
    return "\n".join(map(escaped, lines)) + "\n"


def draw(found: Found, path: Path) -> None:
    """Writes each probe's share over its load, with the answer and its interval."""
    import matplotlib

    from loadgen.report import figures

    colours: Mapping[str, str] = dict(zip(("met", "missed", "falls_behind", "unsure"), figures.COLOURS, strict=False))
    title = figures.marked(sentence(found), found.emulated, False, 1)
    with matplotlib.rc_context(figures.STYLE):  # type: ignore[arg-type]
        figure = figures.titled(8.0, 4.4, *title)
        axis = figure.subplots()
        for probe in found.loads:
            if probe.share is None:
                continue
            low, high = wilson(probe.share, max(1.0, probe.counted / probe.dispersion), 1.96)
            colour = colours[probe.verdict]
            axis.plot([probe.load] * 2, [100 * max(0.0, low), 100 * min(1.0, high)], color=colour, linewidth=1.2)
            axis.plot(probe.load, 100 * probe.share, "o", color=colour, markersize=5)
        for name, colour in colours.items():
            axis.plot([], [], "o", color=colour, label=name.replace("_", " "))
        axis.axhline(100 * found.asked.attain, color=figures.INK, linewidth=0.8, linestyle=":")
        if found.range.value is not None:
            axis.axvline(found.range.value, color=figures.INK, linewidth=1.0)
            loads = [probe.load for probe in found.loads]
            axis.axvspan(found.range.low or 0.0, found.range.high or max(loads), color=figures.GRID, alpha=0.6)
        axis.set_ylim(0, 102)
        axis.set_xlim(left=0)
        axis.set_xlabel(UNITS[found.asked.axis])
        axis.set_ylabel("requests that meet the objective, %")
        axis.legend(loc="lower left")
        figure.savefig(path, dpi=160)
