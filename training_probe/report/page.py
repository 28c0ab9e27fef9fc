"""What a sweep, a breakdown or a micro-benchmark has to tell, as its readers get it: text for a terminal, and
report.json, report.md, tables.tex and figures in a directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill

import msgspec

from backends.untrusted import escaped
from loadgen.report.text import markdown_text
from training_probe.report import layout
from training_probe.report.layout import Table


class ReportError(Exception):
    """A report that cannot be made. One sentence."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """report: what report.json holds. run_id, version: of what measured, as a manifest has them. facts: a sentence or
    two each, plain text that is not escaped. links: further items of their list, as Markdown. draw: writes the figures
    into a directory; their files, with what each shows. figures: the heading over them. after: lines of Markdown below
    them. files: further ones, by name."""

    report: msgspec.Struct
    run_id: object
    version: object

    title: str
    facts: Sequence[str]
    links: Sequence[str] = ()
    tables: Sequence[Table]
    draw: Callable[[Path], Mapping[str, str]]
    figures: str = ""
    after: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    def text(self, width: int) -> str:
        """For a terminal of `width` columns: plain text, nothing in it that a terminal obeys."""
        head = [fill(escaped(line), width) for line in (self.title, "", *self.facts)]
        return "\n".join([*head, "", *(layout.text(table, width) for table in self.tables)])

    def markdown(self, pictures: Mapping[str, str]) -> str:
        """report.md. pictures: file -> what it shows."""
        lines = [f"# {markdown_text(self.title)}", "", *(f"- {markdown_text(fact)}" for fact in self.facts)]
        lines += [*self.links, "", *map(layout.markdown, self.tables)]
        if pictures and self.figures:
            lines += [f"## {self.figures}", ""]
        for file, shows in pictures.items():
            lines += [f"![{markdown_text(shows)}]({file})", ""]
        run, version = (markdown_text(str(value or "unknown")) for value in (self.run_id, self.version))
        return "\n".join([*lines, *self.after, f"Run {run}, llm-dissect {version}."]) + "\n"

    def write(self, directory: Path) -> None:
        """Writes all of it into the directory, replacing earlier ones; the figures when the numbers are safe. Raises
        ReportError."""
        encoded = msgspec.json.format(msgspec.json.encode(self.report), indent=2) + b"\n"
        texts = {**self.files, "tables.tex": layout.latex_file(self.tables), "report.md": self.markdown({})}
        try:
            (directory / "report.json").write_bytes(encoded)
            for name, text in texts.items():
                (directory / name).write_text(text, encoding="utf-8")
            (directory / "report.md").write_text(self.markdown(self.draw(directory)), encoding="utf-8")
        except OSError as error:
            raise ReportError(f"cannot write the report to {directory}: {error.strerror or error}.") from None
