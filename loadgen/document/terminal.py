"""A document for a terminal: plain text, nothing in it that a terminal obeys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import assert_never

from backends.untrusted import escaped
from loadgen.document.content import Block, Chart, Code, Document, Items, Table, Text, made_by

GAP = "  "
WIDEST = 10_000  # columns: nothing is broken or left out


def render(document: Document, width: int) -> str:
    """In lines of `width` columns, but for tables and code: what is no detail. Charts are in the figures."""
    lines = [*(wrap(made_by(document.origin), width) if document.origin else []), *_text(document.title, width), ""]
    lines += _text(document.verdict, width)
    shown = [section for section in document.sections if not section.detail]
    for section in shown:
        blocks = [line for block in section.blocks for line in _block(block, width)]
        while blocks and not blocks[-1]:
            blocks.pop()
        if blocks:
            lines += ["", f"{escaped(section.title)}:", "", *blocks]
    return "\n".join(lines).rstrip() + "\n"


def _text(text: str, width: int, indent: str = "", first: str = "") -> list[str]:
    """Lines of text, further ones indented."""
    return wrap(first + escaped(text), width, initial_indent=indent, subsequent_indent=f"{indent}{' ' * len(first)}")


def _block(block: Block, width: int) -> Iterator[str]:
    match block:
        case Text():
            yield from _text(block.text, width)
        case Items():
            for item in block.items:
                yield from _text(f"{item.head}: {item.text}" if item.head and item.text else item.head + item.text,
                                 width, first="- ")  # fmt: skip
                yield from _text(item.advice, width, indent="  ")
        case Code():
            yield from map(escaped, block.text.split("\n"))
        case Table():
            yield from table(block, width)
        case Chart():
            return
        case _:
            assert_never(block)


def rows(of: Table, width: int = WIDEST) -> list[str]:
    """The heading and the rows of a table alone, without the optional columns that do not fit."""
    return _rows(_fitting(of, width)[0])


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Rows without a heading, as lines of columns from the left."""
    return rows(Table([""] * len(cells[0]), cells, numeric=False))[1:]


def table(of: Table, width: int) -> Iterator[str]:
    """Optional columns go until it fits; a line below names them."""
    of, left_out = _fitting(of, width)
    if of.caption:
        yield from (*_text(of.caption, width), "")
    if any(column.group for column in of.columns):
        yield _group_line(of, _widths(of))
    yield from _rows(of)
    below = [*of.below]
    if left_out:
        below.append(f"Left out for want of width: {', '.join(left_out)}; the report has all.")
    below += [f"[{number}] {note}" for number, note in enumerate(of.notes, 1)]
    yield ""
    for sentence in below:
        yield from wrap(escaped(sentence), width, subsequent_indent="    ")
    yield from [""] if below else []


def _fitting(of: Table, width: int) -> tuple[Table, list[str]]:
    """Without the optional columns that do not fit, from the right, a group of them at a time; the names of those."""
    left_out: list[str] = []
    while sum(_widths(of)) + len(GAP) * (len(of.columns) - 1) > width:
        columns = of.columns
        last = next((at for at in reversed(range(len(columns))) if columns[at].optional), None)
        if last is None:
            break
        group = columns[last].group
        of = of.keeping({at for at, each in enumerate(columns) if at != last and (not group or each.group != group)})
        left_out.insert(0, group or columns[last].head)
    return of, left_out


def _rows(of: Table) -> list[str]:
    widths = _widths(of)
    return [_line(row, of, widths) for row in ([column.head for column in of.columns], *of.texts())]


def _widths(of: Table) -> list[int]:
    rows = [[column.head for column in of.columns], *of.texts()]
    widths = [max(len(escaped(row[at])) for row in rows) for at in range(len(of.columns))]
    end = 0
    for group, count in of.groups():  # a heading that is longer than what stands under it
        end += count
        missing = len(escaped(group)) - sum(widths[end - count : end]) - len(GAP) * (count - 1)
        widths[end - 1] += max(0, missing)
    return widths


def _group_line(of: Table, widths: list[int]) -> str:
    parts, end = [], 0
    for group, count in of.groups():
        end += count
        room = sum(widths[end - count : end]) + len(GAP) * (count - 1)
        shown = escaped(group)
        parts.append(f" {shown} ".center(room, "-") if shown and len(shown) + 4 <= room else shown.center(room))
    return GAP.join(parts).rstrip()


def _line(row: list[str], of: Table, widths: list[int]) -> str:
    placed = (
        escaped(value).ljust(width) if column.left else escaped(value).rjust(width)
        for value, column, width in zip(row, of.columns, widths, strict=True)
    )
    return GAP.join(placed).rstrip()
