"""What pages of all kinds are put together from: numbers as cells, findings, CDFs, and where numbers come from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.document.content import Chart, Series, number
from loadgen.report.metrics import Distribution
from loadgen.report.pages import series
from loadgen.rundir import Manifest
from loadgen.steady.blocks import Bounds

LEAST_STEPS = 250  # of each CDF, however many share a chart
_DIGITS = 5  # significant: what a pixel can show


def interval(bounds: Bounds | None) -> str:
    """A 95 % interval as text; a dash where there is none."""
    return "-" if bounds is None else f"{number(bounds[0])} to {number(bounds[1])}"


def settings(manifest: Manifest) -> dict[str, Any]:
    """What a run was made with, by name: the configuration (but for `out`), the server and the machine."""
    fields = ("version", "backend", "model", "url", "emulated", "server_version", "arrival", "requests_planned")
    machine = manifest.machine
    return {
        **{f"config.{key}": value for key, value in manifest.config.items() if key != "out"},
        **{key: getattr(manifest, key) for key in fields},
        **{f"machine.{key}": getattr(machine, key) for key in machine.__struct_fields__},
    }


def differing(runs: Sequence[Manifest]) -> dict[str, list[Any]]:
    """What was set differently, with the value of each run."""
    known = [settings(run) for run in runs]
    by_name = {name: [each.get(name) for each in known] for name in sorted(set().union(*known))}
    return {name: values for name, values in by_name.items() if any(value != values[0] for value in values)}


def shared_origin(origins: Iterable[str]) -> str:
    """Where the numbers of several runs come from: "partly" where a part was measured."""
    distinct = set(origins)
    named = " and ".join(sorted(distinct - {""}))
    return f"partly {named}" if named and "" in distinct else named


def href(page: Path, directory: Path) -> str:
    """From a page in the directory to another page, as a relative path; empty where that is not there."""
    if not page.is_file():
        return ""
    path = Path(os.path.relpath(page, directory)).as_posix()
    return f"./{path}" if path.startswith("#") or ":" in path.partition("/")[0] else path


def rounded(values: NDArray[Any]) -> list[float | None]:
    """The values (n,) of a curve, to 5 significant digits; None, a gap, where one is not finite."""
    exact = np.asarray(values, np.float64)
    finite = np.isfinite(exact)
    known = np.where(finite, exact, 0.0)
    with np.errstate(divide="ignore"):
        magnitude = np.floor(np.log10(np.abs(known)))
    places = np.where(known == 0, 0, _DIGITS - 1 - magnitude).clip(-300, 300)
    # Powers of ten up to 22 are exact, so what is divided by one has the shortest text.
    up, down = 10.0 ** np.maximum(places, 0), 10.0 ** np.maximum(-places, 0)
    short: list[float | None] = (np.round(known * up / down) / up * down).tolist()
    if not finite.all():
        short = [value if here else None for value, here in zip(short, finite.tolist(), strict=True)]
    return short


class Curve(NamedTuple):
    """A distribution in a chart of CDFs. colour: of the palette, the same in every chart of a page."""

    name: str
    sample: Distribution
    colour: int = 0
    origin: str = ""


def cdf(title: str, curves: Sequence[Curve], x_label: str, *, log_now: bool = False, id: str = "") -> Chart:
    """CDFs over each other, each switched by its name. Hover reads a quantile."""
    steps = max(LEAST_STEPS, series.MAX_STEPS // max(1, len(curves)))
    most = max((len(curve.sample.values) for curve in curves), default=0)
    return Chart(
        title=title,
        x_label=x_label,
        y_label="fraction of values",
        series=[_step(curve, steps) for curve in curves],
        id=id,
        origin=shared_origin(curve.origin for curve in curves),
        log=("x",),
        log_now=("x",) if log_now else (),
        quantile=True,
        note=cdf_rule(steps) if most > steps else "",
    )


def cdf_rule(steps: int) -> str:
    """By which values are left out of a CDF."""
    return (
        f"Of more than {steps} values only every k-th is drawn, always with the smallest and the largest: a curve is "
        f"within 1/{steps} of the exact share."
    )


def _step(curve: Curve, steps: int) -> Series:
    x, share = series.cdf(curve.sample, steps)
    return Series(name=curve.name, x=rounded(x), y=rounded(share), kind="step", group=curve.name, colour=curve.colour)
