"""What a comparison of two measurements shows, whatever was measured: every difference with its 95 % intervals, as a
table and as charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from loadgen.document.content import Cell, Chart, Mark, Series, Table, cell
from loadgen.report.contrast import BETTER, NO_INTERVAL, SAME, WORSE, Contrast, direction
from loadgen.steady.blocks import Bounds

MOST_OF_CHART = 24  # differences; more go into the next chart


class Difference(NamedTuple):
    """name: as people read it. lower_is_better: of the measure."""

    name: str
    change: Contrast
    lower_is_better: bool


def table(rows: Sequence[Difference], *, folded: bool = False) -> Table:
    """Folded, its caption says how many rows there are. A value that is compared as it is shows nothing."""
    lines: list[list[Cell]] = []
    for name, change, lower_is_better in rows:
        known = direction(change, lower_is_better) != NO_INTERVAL
        low, high = (known and change.difference_ci) or (None, None)
        ratio_low, ratio_high = (known and change.ratio_ci) or (None, None)
        values = (change.a, change.b, change.difference, low, high, change.ratio, ratio_low, ratio_high)
        lines.append([name, *map(cell, values), change.shows if known and change.shows else "-"])
    headers = ["what", "A", "B", "B - A", "95 % from", "to", "B / A", "95 % from", "to", "shows"]
    return Table(headers, lines, f"{len(rows)} rows" if folded else "", folded=folded)


def charts(title: str, rows: Sequence[Difference], origin: str = "", *, unit: str = "") -> Iterator[Chart]:
    """B over A less 1 in percent, or with a unit B - A: a point with its interval for each that is known."""
    known = [(row, spot) for row in rows if (spot := _spot(row.change, relative=not unit)) is not None]
    for start in range(0, max(1, len(known)), MOST_OF_CHART):
        part = known[start : start + MOST_OF_CHART]
        yield Chart(
            title=title + (f" ({start // MOST_OF_CHART + 1})" if len(known) > MOST_OF_CHART else ""),
            x_label="",
            y_label=f"difference ({unit or '%'})",
            series=[*_whiskers(part)],
            origin=origin,
            marks=[Mark("y", 0.0, "no difference")],
            categories=[row.name for row, _ in part],
            from_zero=False,
            note="Whiskers are 95 % intervals. More is worse of a time or a size, and better of a throughput.",
        )


def _spot(change: Contrast, *, relative: bool) -> tuple[float, Bounds | None] | None:
    if not relative:
        return None if change.difference is None else (change.difference, change.difference_ci)
    if change.ratio is None:
        return None
    low, high = change.ratio_ci or (None, None)
    interval = None if low is None or high is None else (100 * (low - 1), 100 * (high - 1))
    return 100 * (change.ratio - 1), interval


def _whiskers(spots: Sequence[tuple[Difference, tuple[float, Bounds | None]]]) -> Iterator[Series]:
    """In a colour for what each interval shows."""
    for colour, what in enumerate((SAME, WORSE, BETTER, NO_INTERVAL)):
        mine = [
            (x, row.name, spot)
            for x, (row, spot) in enumerate(spots)
            if direction(row.change, row.lower_is_better) == what
        ]
        if mine:
            x, names, values = zip(*mine, strict=True)
            bounds = [interval or (None, None) for _, interval in values]
            yield Series(
                what, x, [value for value, _ in values], kind="points", low=[low for low, _ in bounds],
                high=[high for _, high in bounds], labels=names, colour=colour,
            )  # fmt: skip
