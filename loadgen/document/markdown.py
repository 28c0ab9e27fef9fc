"""A document as Markdown. Every string of it is shown as it is, and none is obeyed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import assert_never
from urllib.parse import quote

from backends.untrusted import escaped
from loadgen.document.content import Block, Cell, Chart, Code, Document, Items, Link, Table, Text, cell_text, made_by

INDENT = "      "  # of code


def shown(text: str) -> str:
    """Printable text that Markdown shows as it is."""
    safe = escaped(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|!#~$])", r"\\\1", safe)


def render(document: Document) -> str:
    """The file's text, with the document's figures."""
    lines = [f"# {shown(document.title)}", ""]
    if document.origin:
        lines += [f"> **{shown(made_by(document.origin))}**", ""]
    lines += [f"**{shown(document.verdict)}**" + (f", {shown(document.doubt)}" if document.doubt else ""), ""]
    for section in document.sections:
        blocks = [line for block in section.blocks for line in _block(block)]
        pictures = [line for name in section.figures[:1] if section.charts for line in _picture(section.title, name)]
        if blocks or pictures:
            lines += [f"## {shown(section.title)}", "", *blocks, *pictures]
    return "\n".join([*lines, shown(document.footer)]).rstrip() + "\n"


def _picture(title: str, name: str) -> list[str]:
    return [f"![{shown(title)}]({quote(name)})", ""]


def _block(block: Block) -> Iterator[str]:
    match block:
        case Text():
            yield from (shown(block.text), "")
        case Items():
            for item in block.items:
                head = f"**{shown(item.head)}**{': ' if item.text else ''}" if item.head else ""
                yield f"- {head}{shown(item.text)}"
                if item.advice:
                    yield f"  {shown(item.advice)}"
            yield ""
        case Code():
            yield from (*(f"{INDENT}{escaped(line)}" for line in block.text.split("\n")), "")
        case Table():
            yield from table(block)
        case Chart():
            return
        case _:
            assert_never(block)


def table(of: Table) -> Iterator[str]:
    """Markdown has no headings over columns, so each column's has two lines."""
    if of.caption:
        yield from (f"**{shown(of.caption)}**", "")
    heads = ("<br>".join(shown(part) for part in (column.group, column.head) if part) for column in of.columns)
    yield f"| {' | '.join(heads)} |"
    yield "|" + "".join(":---|" if column.left else "---:|" for column in of.columns)
    yield from (f"| {' | '.join(map(_cell, row))} |" for row in of.rows)
    yield ""
    if of.below:
        yield from (*map(shown, of.below), "")
    if of.notes:
        yield from (*(f"- \\[{number}\\] {shown(note)}" for number, note in enumerate(of.notes, 1)), "")


def _cell(cell: Cell) -> str:
    text = shown(cell_text(cell))
    return f"[{text}]({quote(cell.href)})" if isinstance(cell, Link) and cell.href[:1] not in ("", "#") else text
