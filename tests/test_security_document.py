"""docs/security.md: who is trusted with what, and what is done about the others. Each row of its tables names tests
that hold it, and these are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "security.md"
HELD_BY = "held by"


def rows() -> list[list[str]]:
    """The cells of each row of the tables that say by which tests they hold."""
    found, held = [], False
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells:
            held = False
        elif HELD_BY in cells:
            held = cells[-1] == HELD_BY
        elif held and set(line) - set("|-: "):
            found.append(cells)
    return found


@pytest.mark.parametrize("cells", rows(), ids=lambda cells: cells[0][:40])
def test_each_row_is_held_by_tests_that_are_there(cells: list[str]) -> None:
    named = re.findall(r"`(tests/[\w./]+)`", cells[-1])
    assert named or "the secrets' test" in cells[-1]
    for name in named:
        path = ROOT / name
        files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
        assert files and any(re.search(r"^(async )?def test_", file.read_text(), re.MULTILINE) for file in files), name


def test_whom_the_document_speaks_of() -> None:
    trusted = {cells[0].partition(":")[0] for cells in rows() if len(cells) == 4}
    assert len(trusted) >= 7 and len(rows()) >= 20
    assert any("--resume" in name for name in trusted) and any("run directories" in name for name in trusted)
