"""One browser for all tests of pages, and the page that has everything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loadgen.document.content import Document, Section
from loadgen.document.html import render
from tests.browser import pages
from tests.browser.chromium import Chromium


@pytest.fixture(scope="session")
def chromium() -> Iterator[Chromium]:
    browser = Chromium()
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every kind of block, and those that its links lead to."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "rate 2").mkdir()
    for path in (folder / "other.html", folder / "rate 2" / "report.html"):
        other = Document(title="Another page", verdict="", sections=[Section(id="only", title="Only", blocks=[])])
        path.write_text(render(other), encoding="utf-8")
    path = folder / "page.html"
    path.write_text(render(pages.page()), encoding="utf-8")
    return path
