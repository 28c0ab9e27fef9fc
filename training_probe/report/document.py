"""What a sweep, a breakdown or a micro-benchmark has to tell, as its readers get it: text for a terminal, and
report.json, report.md, report.html, tables.tex and figures in a directory."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from loadgen import summary
from loadgen.document import content, files
from loadgen.document.content import Section, Table, Tone
from training_probe.report import layout

PERFETTO = "https://ui.perfetto.dev"


@dataclass(frozen=True, kw_only=True)
class TrainingReport:
    """report: what report.json holds. run_id, version, argv: of what measured, as a manifest has them. verdict: one
    line of what came of it. findings: what to keep in mind of the numbers. facts: how they came about. All three are
    plain text that is not escaped, a sentence or two each. measured: what was measured, and on what, by name. traces:
    files of cells, by the cell's name. charts: what a page has below the tables; the argument is the directory.
    after: tables that only a page and report.md have, below charts and figures. files: further ones, by name."""

    report: msgspec.Struct
    run_id: object
    version: object
    argv: object

    title: str
    verdict: str
    tone: Tone
    invalid: bool = False  # numbers of it are no measurement: exit code 4
    findings: Sequence[str] = ()
    facts: Sequence[str] = ()
    measured: Mapping[str, str]
    traces: Mapping[str, str] = field(default_factory=dict)
    tables: Sequence[Table]
    charts: Callable[[Path], Iterable[Section]]
    after: Sequence[Table] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        """What made the numbers."""
        run, version = (str(value or "unknown") for value in (self.run_id, self.version))
        return f"Run {run}, llm-dissect {version}."

    def page(self, directory: Path) -> content.Document:
        """What pages and texts show. directory: where the measurement lies."""
        findings = [content.Text(text=finding, tone="warning") for finding in self.findings]
        rows = [(name, text) for name, text in self.measured.items() if text]
        measured = content.Table(("what", "as measured"), rows, numeric=False)
        sections = [
            Section("findings", "Findings", findings),
            Section("facts", "How it was measured", [content.Text(fact) for fact in self.facts]),
            Section("tables", "Tables", self.tables),
            *self.charts(directory),
            Section("traces", "Traces", [self._traces(directory)] if self.traces else [], detail=True),
            *(Section(table.id, table.caption, [table], detail=True) for table in self.after),
            Section("measured", "What was measured, on what", [measured], detail=True),
            Section("repeat", "Command, and how to repeat it", [*repeated(self.argv)], detail=True),
        ]  # fmt: skip
        return content.Document(
            title=self.title,
            verdict=self.verdict,
            tone=self.tone,
            stamp="INVALID: no measurement" if self.invalid else "",
            sections=[section for section in sections if section.blocks],
            footer=self.origin,
        )

    def _traces(self, directory: Path) -> content.Table:
        rows = [
            (name, content.Link(file, f"./{file}") if (directory / file).is_file() else file)
            for name, file in self.traces.items()
        ]
        return content.Table(("cell", f"trace, which {PERFETTO} opens"), rows, numeric=False)

    def publish(self, directory: Path) -> None:
        """Prints all of it and writes it into the directory, replacing earlier files, figures after the numbers."""
        page = self.page(directory)

        def write() -> None:
            report = files.json_text(self.report)
            files.save(directory, {"report.json": report, **self.files, "tables.tex": layout.latex_file(self.tables)})
            files.write(directory / "report.html", page, "report.md", figures=True)

        shown = "\n" + summary.rendered(page)
        summary.publish(directory, shown, write, files.json_line(self.report), "training_probe", unasked="")


def repeated(argv: object) -> list[content.Block]:
    """The command of a measurement, and the same into another directory. argv: its words, or anything else, which is no
    command."""
    if not isinstance(argv, list | tuple) or not argv or not all(isinstance(word, str) for word in argv):
        return []
    words = [str(word) for word in argv]
    if words[0] == "sweep" and "--resume" in words:
        return [command(words)]
    elsewhere = [word for at, word in enumerate(words) if word != "--out" and (not at or words[at - 1] != "--out")]
    elsewhere = [word for word in elsewhere if not word.startswith("--out=")]
    return [
        command(words),
        content.Text(text="The same again, and what differs; DIR is the directory of this page:"),
        command([*elsewhere, "--out", "again"]),
        command(["compare", "DIR", "again", "--html", "differences.html"]),
        content.Text(text="This page anew from the results beside it:"),
        command(["report", "DIR"]),
    ]


def command(words: Sequence[str]) -> content.Code:
    return content.Code(text=shlex.join(["training_probe", *words]))
