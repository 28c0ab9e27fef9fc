"""What is on a page, as data."""

from __future__ import annotations

from loadgen.document.content import Block, Chart, Document, Table


def blocks(page: Document) -> list[Block]:
    return [block for section in page.sections for block in section.blocks]


def charts_of(page: Document) -> dict[str, Chart]:
    """By their titles."""
    return {block.title: block for block in blocks(page) if isinstance(block, Chart)}


def numbers_of(page: Document) -> list[float | None]:
    """The numbers of its tables."""
    tables = (block for block in blocks(page) if isinstance(block, Table))
    cells = (cell for table in tables for row in table.rows for cell in row)
    return [cell.value for cell in cells if not isinstance(cell, str) and hasattr(cell, "value")]
