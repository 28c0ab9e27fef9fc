"""The documents: their links lead somewhere, and README.md is a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/*.md", "benchmarks/**/*.md", "compose/*.md")
    for path in ROOT.glob(pattern)
)
MOST_LINES = 120  # of README.md


def anchors(document: Path) -> set[str]:
    """Those that GitHub makes of the headings."""
    text = re.sub(r"^```.*?^```", "", (ROOT / document).read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / document).read_text()):
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        if "://" in link:
            continue
        if not (ROOT / target).exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_readme_is_a_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES
