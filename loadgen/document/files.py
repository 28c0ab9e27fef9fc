"""A result as files of its directory: its numbers, its page, its Markdown and its figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from backends.exit_codes import UserError
from loadgen import rundir
from loadgen.document import html, markdown
from loadgen.document.content import Document

NO_MEMORY = (MemoryError, ImportError)  # what matplotlib raises under a limit: it may not even load


class ReportError(UserError, ValueError):
    """A report that cannot be made as asked, or not be written. The message says what to do."""


def json_text(numbers: object) -> str:
    """For a file that people read, too."""
    return msgspec.json.format(msgspec.json.encode(numbers), indent=2).decode() + "\n"


def json_line(numbers: object) -> str:
    """One line, ASCII: what a server sent must not reach a terminal as it is."""
    return json.dumps(msgspec.to_builtins(numbers))


def save(directory: Path, texts: Mapping[str, str]) -> None:
    """Writes files by their names, each at once, replacing earlier ones. Raises ReportError."""
    try:
        for name, text in texts.items():
            rundir.replace(directory / name, text.encode())
    except OSError as error:
        raise _unwritten(directory, error) from None


def write(page: Path, document: Document, text: str = "", *, figures: bool = False) -> None:
    """Writes the document's page and, beside it, its Markdown into the file `text`, and the figures that are asked for.
    Raises ReportError."""
    directory = page.parent
    document = document.drawn(directory, asked=figures)
    try:
        save(directory, {page.name: html.render(document), **({text: markdown.render(document)} if text else {})})
        if document.figures:
            from loadgen.document import figure  # after the numbers are safe

            figure.write(document, directory)
    except OSError as error:
        raise _unwritten(directory, error) from None
    except NO_MEMORY as error:
        unloaded = isinstance(error, ImportError)
        why = f"what draws them cannot load: {error}" if unloaded else "there is no memory for them"
        raise ReportError(f"the figures are not drawn, since {why}; the numbers and the page are written.") from None


def _unwritten(directory: Path, error: OSError) -> ReportError:
    return ReportError(f"cannot write the report to {directory}: {error.strerror or error}.")
