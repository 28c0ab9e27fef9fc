"""What a gate leaves for a CI job: a section of the comparison's document, JUnit XML, a Markdown summary, and the exit
code. Pure but for writing. Serves the comparisons of training_probe too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from backends import exit_codes
from backends.untrusted import escaped
from loadgen import rundir
from loadgen.config import ConfigError, check_file
from loadgen.document import markdown
from loadgen.document.content import Document, Section, Table, Text, Tone
from loadgen.report.limits import Check

TONES: dict[int, Tone] = {exit_codes.OK: "good", exit_codes.BEYOND_LIMIT: "bad", exit_codes.INVALID: "warning"}


def check_options(limits: Sequence[str], junit: Path | None, summary: Path | None) -> None:
    """Raises ConfigError: a file without a limit, or one that could not be written at the end."""
    for flag, path in (("--junit", junit), ("--summary", summary)):
        if path is None:
            continue
        if not limits:
            raise ConfigError(f"{flag} says what came of limits; name one with --fail-if, or leave it out.")
        check_file(flag, path)


def exit_code(checks: Sequence[Check]) -> int:
    """INVALID where a run cannot be trusted, then BEYOND_LIMIT, then INVALID where a limit could not be judged."""
    if any(check.group == "run" and check.state == "unknown" for check in checks):
        return exit_codes.INVALID
    if any(check.state == "beyond" for check in checks):
        return exit_codes.BEYOND_LIMIT
    return exit_codes.INVALID if any(check.state == "unknown" for check in checks) else exit_codes.OK


def headline(checks: Sequence[Check]) -> str:
    code = exit_code(checks)
    if code == exit_codes.OK:
        return "no limit is broken"
    if code == exit_codes.BEYOND_LIMIT:
        return "B is worse than A by more than a limit allows"
    return "nothing is shown: the limits cannot be judged on these measurements"


def section(checks: Sequence[Check], warnings: Sequence[str], conclusion: str) -> Section:
    """conclusion: what differs, as a sentence."""
    code = exit_code(checks)
    words = {"ok": "ok", "beyond": "BEYOND", "unknown": "UNKNOWN"}
    rows = [(words[check.state], check.name, check.detail) for check in checks]
    table = Table(["", "check", "what was seen"], rows, numeric=False)
    texts = [Text(f"Exit code {code}: {headline(checks)}. {conclusion}", TONES[code])]
    return Section("gate", "The gate", [*texts, table, *(Text(f"warning: {each}", "warning") for each in warnings)])


def junit(checks: Sequence[Check], program: str) -> bytes:
    """A suite with a test case for each check: `failure` where a limit is broken, `error` where nothing is known."""
    broken, unknown = (sum(check.state == state for check in checks) for state in ("beyond", "unknown"))
    counts = {"tests": str(len(checks)), "failures": str(broken), "errors": str(unknown), "time": "0"}
    suites = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": f"{program} compare", "skipped": "0", **counts})
    for check in checks:
        of = {"classname": f"{program}.compare.{check.group}", "name": escaped(check.name), "time": "0"}
        case = ElementTree.SubElement(suite, "testcase", of)
        detail = escaped(check.detail)
        if check.state == "ok":
            ElementTree.SubElement(case, "system-out").text = detail
        else:
            element = "failure" if check.state == "beyond" else "error"
            ElementTree.SubElement(case, element, {"message": detail, "type": check.state}).text = detail
    ElementTree.indent(suites)
    text: str = ElementTree.tostring(suites, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'.encode()


def finish(checks: Sequence[Check], gate: Section, program: str, junit_file: Path | None, summary: Path | None) -> int:
    """Writes what was asked for; the exit code. The summary is added at the end of its file, since the file of a CI
    job's summary may hold what came before. gate: their section. Raises OSError."""
    if junit_file is not None:
        rundir.replace(junit_file, junit(checks, program))
    if summary is not None:
        document = Document(title=f"{program} compare", verdict=f"Gate: {headline(checks)}.", sections=[gate])
        with summary.open("a", encoding="utf-8") as file:
            file.write(markdown.render(document) + "\n")
    return exit_code(checks)
