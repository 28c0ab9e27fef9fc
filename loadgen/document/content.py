"""A result as people see it, as data: sections of text, tables, code and charts. `html` renders it as a page,
`markdown` and `terminal` as text, and `figure` draws its charts.

Every string is data, never markup: rendering escapes all of it. None in a list of numbers is a gap in a line.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal

import msgspec

Tone = Literal["plain", "good", "warning", "bad"]
Numbers = Sequence[float | None]


def number(value: float | None) -> str:
    """At least three significant figures, counts whole; a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    for decimals, least in ((1, 100), (2, 1)):
        if abs(value) >= least:
            return f"{value:.{decimals}f}"
    return f"{value:.3f}"


def made_by(origin: str) -> str:
    """What a reader must know first of numbers of this origin."""
    first = origin.upper() if "emulated" in origin else f"EMULATED ({origin})"
    return f"{first}: emulated hardware, no real server; these numbers describe no real hardware."


class DocumentPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a document, as the script of the page reads it."""


class Link(DocumentPart, frozen=True):
    """A way to another page: `href` is a relative path of files beside this one, or `#ID` of a section. The path is as
    the file system has it (rendering quotes it). Anything else, such as a URL with a scheme, is shown as plain text."""

    text: str
    href: str


class Number(DocumentPart, frozen=True):
    """A number in a table: `text` is shown, `value` is the exact number behind it (None: unknown)."""

    text: str
    value: float | None = None


class Text(DocumentPart, tag="text", frozen=True):
    """A paragraph; `tone` colours it."""

    text: str
    tone: Tone = "plain"


class ListItem(DocumentPart, frozen=True):
    """An item: `head` in bold, then `text`, and `advice` on a line of its own."""

    head: str
    text: str = ""
    advice: str = ""
    tone: Tone = "plain"


class Items(DocumentPart, tag="items", frozen=True):
    """A list, such as findings."""

    items: Sequence[ListItem]


class Code(DocumentPart, tag="code", frozen=True):
    """A command, or a text to be shown as it is; a button copies it."""

    text: str


Cell = str | Link | Number


def cell(value: float | None) -> Number:
    """A number as texts show it, with the exact one behind it."""
    return Number(number(value), None if value is None else float(value))


def cell_text(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell.text


class Column(DocumentPart, frozen=True):
    """group: a heading over neighbours that share it. left: it is text and no number. optional: a narrow terminal may
    leave it out, with its group."""

    head: str
    group: str = ""
    left: bool = False
    optional: bool = False


class Table(DocumentPart, tag="table", frozen=True):
    """Rows of cells under headers. `numeric`: all columns but the first are aligned right, where no `Column` says
    otherwise. `folded`: on a page it is behind its caption until asked for. below: sentences under it. notes: what the
    numbers in square brackets stand for, from 1. id: its name in files."""

    headers: Sequence[str | Column]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    numeric: bool = True
    folded: bool = False
    below: Sequence[str] = ()
    notes: Sequence[str] = ()
    id: str = ""

    @property
    def columns(self) -> list[Column]:
        return [
            header if isinstance(header, Column) else Column(header, left=not self.numeric or not at)
            for at, header in enumerate(self.headers)
        ]

    def texts(self) -> list[list[str]]:
        return [[cell_text(cell) for cell in row] for row in self.rows]

    def groups(self) -> list[tuple[str, int]]:
        """(heading, columns under it), from the left."""
        return [(group, len(list(each))) for group, each in groupby(self.columns, key=lambda column: column.group)]

    def keeping(self, kept: Container[int]) -> Table:
        """The table of these columns only."""
        columns = [column for at, column in enumerate(self.columns) if at in kept]
        rows = [[cell for at, cell in enumerate(row) if at in kept] for row in self.rows]
        return msgspec.structs.replace(self, headers=columns, rows=rows)

    def without_empty(self) -> Table:
        """Without columns that hold nothing."""
        texts = self.texts()
        return self.keeping([at for at in range(len(self.headers)) if any(row[at] for row in texts)])


class Series(DocumentPart, frozen=True):
    """One curve. x, y: as long as each other, x ascending, in the units of the axes. kind: how it is drawn; a step
    holds its y until the next x. low, high: a band or whiskers around y. labels: what hover says of each point
    beside its numbers; names: what stands beside it. hrefs: where a click on each point leads, "" nowhere. group:
    series of one group are switched together; the legend shows it once ("" is the series alone). colour: number of a
    colour of the palette. A bar without a value has its label in its place in a figure."""

    name: str
    x: Numbers
    y: Numbers
    kind: Literal["line", "step", "points", "bars"] = "line"
    low: Numbers | None = None
    high: Numbers | None = None
    labels: Sequence[str] | None = None
    names: Sequence[str] | None = None
    hrefs: Sequence[str] | None = None
    group: str = ""
    colour: int = 0
    dashed: bool = False


class Shade(DocumentPart, frozen=True):
    """A stretch of the x axis: a phase of the load, a stall of the server, the bracket of a search."""

    start: float
    end: float
    label: str
    tone: Tone = "plain"


class Mark(DocumentPart, frozen=True):
    """A line across the chart at a value of one axis."""

    axis: Literal["x", "y"]
    value: float
    label: str


class Chart(DocumentPart, tag="chart", frozen=True):
    """Curves over one x axis.

    x_label, y_label: what an axis counts and in parentheses its unit, "ttft (ms)", or a unit of one word, "requests/s";
    hover uses the unit. origin: "emulated", "predicted" or "", which stands on the chart itself. log: the axes that may
    be switched to logarithmic, and log_now: those that begin so. quantile: the chart is a CDF with y from 0 to 1, and
    hover reads the x at the y under the pointer: of a line between its points, of a step the first x with as much.
    categories: names of x = 0, 1, 2, ... of bars. stacked: the bars of one x stand on each other. sync: charts of one
    name share cursor and zoom. from_zero: the linear y axis begins at 0. note: one line under the chart, such as the
    rule by which points were left out. id: its anchor. A chart without a finite point says "no data".
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    id: str = ""
    origin: str = ""
    shades: Sequence[Shade] = ()
    marks: Sequence[Mark] = ()
    log: Sequence[Literal["x", "y"]] = ()
    log_now: Sequence[Literal["x", "y"]] = ()
    quantile: bool = False
    categories: Sequence[str] = ()
    sync: str = ""
    stacked: bool = False
    from_zero: bool = True
    note: str = ""


Block = Text | Items | Code | Table | Chart


class Section(DocumentPart, frozen=True):
    """A part of the document under a heading; `id` is its anchor. figures: the files that its charts are drawn into
    together, by their names; the suffix says how. detail: a terminal does without it."""

    id: str
    title: str
    blocks: Sequence[Block]
    figures: Sequence[str] = ()
    detail: bool = False

    @property
    def charts(self) -> list[Chart]:
        return [block for block in self.blocks if isinstance(block, Chart)]


class Tile(DocumentPart, frozen=True):
    """A number that is seen first: what it is, with its unit; its values by name; and where it leads, `#ID`."""

    label: str
    values: Sequence[tuple[str, Number]]
    href: str = ""


class Document(DocumentPart, frozen=True):
    """A result. verdict: one line under the title, coloured by `tone`; doubt: what it adds in the colour of a warning.
    origin: "emulated", "predicted" or "" of all of it, told beside the title. stamp: what its figures say in red, since
    they leave it without its pages, such as INVALID. tiles: the main numbers, under the verdict. footer: one line at
    the end, such as what wrote the document."""

    title: str
    verdict: str
    sections: Sequence[Section]
    tone: Tone = "plain"
    origin: str = ""
    footer: str = ""
    doubt: str = ""
    stamp: str = ""
    tiles: Sequence[Tile] = ()

    def drawn(self, directory: Path, *, asked: bool) -> Document:
        """As it is written into a directory: figures that nobody asks for are drawn only where they lie already, since
        what they show may have changed."""
        sections = [
            section
            if asked or any((directory / name).exists() for name in section.figures)
            else msgspec.structs.replace(section, figures=())
            for section in self.sections
        ]
        return msgspec.structs.replace(self, sections=sections)

    @property
    def figures(self) -> list[tuple[str, str]]:
        """The first file of each figure, and what it shows."""
        return [(section.figures[0], section.title) for section in self.sections if section.figures and section.charts]
