"""What stands on a page, for tests of its content."""

from __future__ import annotations

from typing import Any

from loadgen.document.content import Block, Document, Link, Series, Table


def blocks_of(page: Document, section: str) -> list[Any]:
    return [block for each in page.sections if each.id == section for block in each.blocks]


def every_block(page: Document) -> list[Block]:
    return [block for section in page.sections for block in section.blocks]


def links(page: Document) -> dict[str, str]:
    """Of all tables: where each text leads."""
    tables = [block for block in every_block(page) if isinstance(block, Table)]
    cells = [cell for table in tables for row in table.rows for cell in row]
    return {cell.text: cell.href for cell in cells if isinstance(cell, Link)}


def points(chart: Any) -> list[Series]:
    return [series for series in chart.series if series.kind == "points"]


def rows(table: Table) -> list[dict[str, Any]]:
    """Of headers that are all different: the cells of each row by header."""
    return [dict(zip(table.headers, row, strict=True)) for row in table.rows]
