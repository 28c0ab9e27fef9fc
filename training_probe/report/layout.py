"""A table of text, and how it looks in a terminal, in Markdown, in LaTeX and on a page. Pure.

Cells hold plain text; each way of showing it escapes what would be obeyed there. What is missing is an empty cell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from textwrap import fill

from backends.untrusted import escaped
from loadgen.document import content
from loadgen.document.content import number
from loadgen.report.text import markdown_text

MOST_ROWS = 24  # of a table that stands open on a page; a longer one opens when it is asked for
GAP = "  "

_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}", **{sign: rf"\{sign}" for sign in "{}$&#%_"},
    **{sign: rf"{{{sign}}}" for sign in "[]*"},  # a row may not begin with them: they belong to the \\ before it
}  # fmt: skip


class Exact(str):
    """The text of a number in a table, with the exact number behind it."""

    value: float

    def __new__(cls, text: str, value: float) -> Exact:
        made = super().__new__(cls, text)
        made.value = value
        return made


def exact(text: str, value: float | None) -> str:
    """The text of a cell; with the number behind it, where there is one."""
    return text if value is None else Exact(text, value)


def known(value: float | None) -> str:
    """A cell with this number; an empty one for None."""
    return "" if value is None else Exact(number(value), value)


@dataclass(frozen=True)
class Column:
    """group: a heading over neighbours that share it. optional: the group may be left out of a narrow terminal."""

    head: str
    group: str = ""
    left: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Table:
    """rows: one cell a column. caption: sentences. notes: what the numbers in square brackets stand for, from 1."""

    key: str  # of labels and file names
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def keeping(self, kept: set[int]) -> Table:
        """The table of these columns only."""
        columns = tuple(column for at, column in enumerate(self.columns) if at in kept)
        rows = tuple(tuple(value for at, value in enumerate(row) if at in kept) for row in self.rows)
        return replace(self, columns=columns, rows=rows)

    def without_empty(self) -> Table:
        """Without columns that hold nothing."""
        return self.keeping({at for at in range(len(self.columns)) if any(row[at] for row in self.rows)})

    def groups(self) -> list[tuple[str, int]]:
        """(heading, columns under it), from the left."""
        return [(group, len(list(each))) for group, each in groupby(self.columns, key=lambda column: column.group)]


class Remarks:
    """Numbers the remarks of one table; the same words get the same number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def mark(self, remark: str) -> str:
        """` [2]`; nothing for no remark."""
        return f" [{self.numbers.setdefault(remark, len(self.numbers) + 1)}]" if remark else ""


def latex_text(text: str) -> str:
    """Printable text that LaTeX shows as it is."""
    return "".join(_LATEX.get(sign, sign) for sign in escaped(text))


def text(table: Table, width: int) -> str:
    """For a terminal of `width` columns. Optional groups go, from the right, until it fits; a line below names them."""
    left_out: list[str] = []
    while _width(table) > width:
        group = next((column.group for column in reversed(table.columns) if column.optional), None)
        if group is None:
            break
        table = table.keeping({at for at, column in enumerate(table.columns) if column.group != group})
        left_out.insert(0, group)
    widths = _widths(table)
    lines = [escaped(table.title), ""]
    if any(column.group for column in table.columns):
        lines.append(_group_line(table, widths))
    lines.append(_line([column.head for column in table.columns], table, widths))
    lines += [_line(list(row), table, widths) for row in table.rows]
    below = list(table.caption)
    if left_out:
        below.append(f"Left out for want of width: {', '.join(left_out)}; the report has all.")
    below += [f"[{number}] {note}" for number, note in enumerate(table.notes, 1)]
    lines += ["", *(fill(escaped(sentence), width, subsequent_indent="    ") for sentence in below)]
    return "\n".join(lines).rstrip() + "\n"


def _widths(table: Table) -> list[int]:
    widths = [
        max(len(escaped(value)) for value in (column.head, *(row[at] for row in table.rows)))
        for at, column in enumerate(table.columns)
    ]
    end = 0
    for group, count in table.groups():  # a heading that is longer than what stands under it
        end += count
        missing = len(escaped(group)) - sum(widths[end - count : end]) - len(GAP) * (count - 1)
        widths[end - 1] += max(0, missing)
    return widths


def _width(table: Table) -> int:
    return sum(_widths(table)) + len(GAP) * (len(table.columns) - 1)


def _group_line(table: Table, widths: list[int]) -> str:
    parts, end = [], 0
    for group, count in table.groups():
        end += count
        room = sum(widths[end - count : end]) + len(GAP) * (count - 1)
        shown = escaped(group)
        parts.append(f" {shown} ".center(room, "-") if shown and len(shown) + 4 <= room else shown.center(room))
    return GAP.join(parts).rstrip()


def _line(values: list[str], table: Table, widths: list[int]) -> str:
    placed = (
        escaped(value).ljust(width) if column.left else escaped(value).rjust(width)
        for value, column, width in zip(values, table.columns, widths, strict=True)
    )
    return GAP.join(placed).rstrip()


def markdown(table: Table) -> str:
    """A section of a page. Markdown has no headings over columns, so each column's has two lines."""
    heads = (
        "<br>".join(markdown_text(part) for part in (column.group, column.head) if part) for column in table.columns
    )
    lines = [f"## {markdown_text(table.title)}", "", f"| {' | '.join(heads)} |"]
    lines.append("|" + "".join(":---|" if column.left else "---:|" for column in table.columns))
    lines += [f"| {' | '.join(markdown_text(value) for value in row)} |" for row in table.rows]
    lines += ["", *(markdown_text(sentence) for sentence in table.caption), ""]
    lines += [f"- \\[{number}\\] {markdown_text(note)}" for number, note in enumerate(table.notes, 1)]
    return "\n".join(lines).rstrip() + "\n"


def section(table: Table) -> content.Section:
    """A section of a page."""
    return content.Section(id=_label(table), title=table.title, blocks=blocks(table, ""))


def blocks(table: Table, caption: str) -> list[content.Block]:
    """The table on a page, with what stands below it. The columns of text on the left are one there, and a heading over
    columns is the first line of each."""
    texts = next((at for at, column in enumerate(table.columns) if not column.left), 0)
    joined = max(texts, 1)
    heads = ["\n".join(part for part in (column.group, column.head) if part) for column in table.columns]
    folded = len(table.rows) > MOST_ROWS
    shown = content.Table(
        headers=[", ".join(heads[:joined]), *heads[joined:]],
        rows=[[", ".join(filter(None, row[:joined])), *map(_cell, row[joined:])] for row in table.rows],
        caption=": ".join(filter(None, (caption, f"{len(table.rows)} rows"))) if folded else caption,
        folded=folded,
        numeric=texts > 0,
    )
    below = [*table.caption, *(f"[{number}] {note}" for number, note in enumerate(table.notes, 1))]
    return [shown, *(content.Text(text=sentence) for sentence in below)]


def _cell(value: str) -> content.Cell:
    return content.Number(text=str(value), value=value.value) if isinstance(value, Exact) else value


def _label(table: Table) -> str:
    return re.sub(r"[^a-z0-9-]", "-", table.key.lower())


def latex(table: Table) -> str:
    """A `table*` that needs the packages booktabs, graphicx and textcomp."""
    columns = "".join("l" if column.left else "r" for column in table.columns)
    caption = " ".join(latex_text(sentence) for sentence in (f"{table.title}.", *table.caption))
    lines = [r"\begin{table*}", r"\centering", rf"\caption{{{caption}}}", rf"\label{{tab:{_label(table)}}}"]
    lines += [r"\resizebox{\textwidth}{!}{%", rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    if any(column.group for column in table.columns):
        lines += _latex_groups(table)
    lines += [_latex_row(column.head for column in table.columns), r"\midrule"]
    lines += [_latex_row(row) for row in table.rows]
    lines += [r"\bottomrule", r"\end{tabular}}"]
    lines += [rf"\par\footnotesize [{number}] {latex_text(note)}" for number, note in enumerate(table.notes, 1)]
    return "\n".join([*lines, r"\end{table*}"]) + "\n"


def latex_file(tables: Iterable[Table]) -> str:
    """tables.tex, to be included in a document."""
    needs = "% \\usepackage{booktabs,graphicx} and \\usepackage[T1]{fontenc} go before \\begin{document}\n"
    return "\n".join([needs, *map(latex, tables)])


def _latex_groups(table: Table) -> list[str]:
    headings, rules, at = [], [], 1
    for group, count in table.groups():
        headings.append(rf"\multicolumn{{{count}}}{{c}}{{{latex_text(group)}}}")
        if group:
            rules.append(rf"\cmidrule(lr){{{at}-{at + count - 1}}}")
        at += count
    return [" & ".join(headings) + r" \\", "".join(rules)]


def _latex_row(values: Iterable[str]) -> str:
    return " & ".join(latex_text(value) for value in values) + r" \\"
