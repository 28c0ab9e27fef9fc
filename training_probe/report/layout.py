"""Tables of training: how they are built, and tables.tex. Pure.

Cells hold plain text; each way of showing it escapes what would be obeyed there. What is missing is an empty cell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from backends.untrusted import escaped
from loadgen.document.content import Cell, Column, Number, Table, number

MOST_ROWS = 24  # of a table that stands open on a page; a longer one opens when it is asked for

_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}", **{sign: rf"\{sign}" for sign in "{}$&#%_"},
    **{sign: rf"{{{sign}}}" for sign in "[]*"},  # a row may not begin with them: they belong to the \\ before it
}  # fmt: skip


def exact(text: str, value: float | None) -> Cell:
    """The text of a cell; with the number behind it, where there is one."""
    return text if value is None else Number(text, value)


def known(value: float | None) -> Cell:
    """A cell with this number; an empty one for None."""
    return "" if value is None else Number(number(value), value)


def titled(
    id: str, title: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]], below: Sequence[str] = (),
    notes: Iterable[str] = (),
) -> Table:  # fmt: skip
    return Table(columns, rows, title, folded=len(rows) > MOST_ROWS, below=below, notes=[*notes], id=id)


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


def _label(table: Table) -> str:
    return re.sub(r"[^a-z0-9-]", "-", table.id.lower())


def latex(table: Table) -> str:
    """A `table*` that needs the packages booktabs, graphicx and textcomp."""
    columns = "".join("l" if column.left else "r" for column in table.columns)
    caption = " ".join(latex_text(sentence) for sentence in (f"{table.caption}.", *table.below))
    lines = [r"\begin{table*}", r"\centering", rf"\caption{{{caption}}}", rf"\label{{tab:{_label(table)}}}"]
    lines += [r"\resizebox{\textwidth}{!}{%", rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    if any(column.group for column in table.columns):
        lines += _latex_groups(table)
    lines += [_latex_row(column.head for column in table.columns), r"\midrule"]
    lines += [_latex_row(row) for row in table.texts()]
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
