"""One screen for a person: the verdict first, every number whole, and no more lines than a screen has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.text import Text

from loadgen import summary
from loadgen.document.content import Table, number
from loadgen.report import repeats, sweeps
from loadgen.report.finding import Finding
from loadgen.report.schema import ErrorCount, Report, Verdict
from loadgen.search import command
from loadgen.summary import FILES_LINES, SCREEN_LINES
from tests.loadgen.report.test_build import HOSTILE, hand_report
from tests.loadgen.report.test_sweeps import swept_directory

WIDTHS = [40, 60, 80, 160]
LONG = Finding(
    code="CLIENT_LATE", severity="invalid",
    message="The client's event loop was 12.5 ms late at p99, more than 5 % of the median tpot of 20.0 ms. " * 3,
    advice="Give the client more cores, or use --workers auto, and leave this machine to it alone while it runs. " * 2,
)  # fmt: skip


def text_of(lines: list[Text]) -> str:
    return "\n".join(line.plain for line in lines)


def judged(count: int, **changes: Any) -> Report:
    """A report with so many findings, each too long for a line."""
    findings = [msgspec.structs.replace(LONG, code=f"CODE_{at}") for at in range(count)]
    verdict = Verdict(valid=not count, findings=findings)
    return msgspec.structs.replace(hand_report(slos={"ttft": 200}), verdict=verdict, **changes)


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("count", [0, 1, 2, 5, 30])
def test_a_run_has_one_screen(columns: int, count: int) -> None:
    report = judged(count, emulated=True, errors=[ErrorCount(3, "http_error", HOSTILE)])
    lines = summary.of_run(report, columns)
    assert max(line.cell_len for line in lines) <= columns
    assert columns < 160 or len(lines) <= SCREEN_LINES - FILES_LINES
    text = text_of(lines)
    assert lines[0].plain == ("VALID" if not count else "INVALID: do not quote these numbers")
    assert "EMULATED" in text and "\x1b" not in text and "\u202e" not in text
    assert not count or "invalid CODE_0" in text
    shown = len(re.findall(r"invalid CODE_\d", text))
    assert shown == count or f"and {count - shown} more, in report.md: CODE_{shown}" in " ".join(text.split())
    whole = " ".join(text.split())
    assert whole.count(" ".join(LONG.message.split())) == whole.count(" ".join(LONG.advice.split())) == shown


def test_few_findings_are_whole() -> None:
    text = " ".join(text_of(summary.of_run(judged(1), 160)).split())
    assert " ".join(LONG.message.split()) in text and " ".join(LONG.advice.split()) in text and "…" not in text


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_its_numbers_are_those_of_the_report(columns: int) -> None:
    report = judged(0)
    text = text_of(summary.of_run(report, columns))
    for name in summary.LATENCIES:
        cells = [number(getattr(report.metrics[name], statistic)) for statistic in summary.STATISTICS]
        assert re.search(rf"^{name.removesuffix('_ms')} +" + " +".join(map(re.escape, cells)) + "$", text, re.MULTILINE)
    assert f"{number(report.throughput.requests_per_s)} requests/s" in text
    assert "3 requests ok, 1 failed" in text and "of 4, in" in text
    assert "goodput" in text and "EMULATED" not in text


def test_the_files_are_named_with_the_report_first(tmp_path: Path) -> None:
    for name in ("cdf.png", "report.md", "report.html", "requests.jsonl", "a\x1b[2Jb"):
        (tmp_path / name).touch()
    lines = summary.files(tmp_path, 500)
    assert text_of(lines).endswith("/: report.html, report.md, a\\x1b[2Jb, cdf.png, requests.jsonl")
    few = summary.files(tmp_path, 20)
    assert len(few) == FILES_LINES and few[-1].plain.endswith("…") and max(line.cell_len for line in few) <= 20


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_sweep_has_one_screen(columns: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = swept_directory(tmp_path / "s", repeat=2, gpus=True)
    swept = sweeps.read(directory)
    lines = summary.of_sweep(swept, columns)
    text = text_of(lines)
    assert len(lines) <= SCREEN_LINES - FILES_LINES or columns < 80
    assert max(line.cell_len for line in lines) <= columns
    assert lines[0].plain == "VALID" and "EMULATED" in text and "6 of 6 runs finished" in text.replace("\n", " ")
    rows = [line.plain.split() for line in lines if line.plain.endswith("VALID") and line is not lines[0]]
    assert [row[0] for row in rows] == ["1", "2", "4"]
    assert columns < 160 or all(value in rows[2] for value in ("25.00", "100.5"))  # tpot and ttft, by hand
    assert command.report_sweep(directory, brief=True) == 0
    assert capsys.readouterr().err.startswith(("VALID", "\x1b")) is True


def test_many_points_leave_room_for_the_last(tmp_path: Path) -> None:
    rows = Table(["rate", "requests/s", "verdict"], [[str(at), "1.0", "VALID"] for at in range(100)])
    text = text_of(lines := summary.of_table([Text("VALID")], rows, ["A remark."], 80))
    assert len(lines) == SCREEN_LINES - FILES_LINES
    assert re.search(r"^99 +1.0 +VALID$", text, re.MULTILINE) and re.search(r"(\d+) more are in the files", text)
    hidden = int(re.findall(r"(\d+) more are", text)[0])
    assert hidden + sum(line.plain.endswith("VALID") for line in lines[1:]) == 100


def test_repeats_have_one_screen(tmp_path: Path) -> None:
    report = judged(0)
    repeated = repeats.of_reports([Path("1"), Path("2")], [report, judged(1)], planned=3)
    for columns in WIDTHS:
        lines = summary.of_repeats(repeated, columns)
        assert max(line.cell_len for line in lines) <= columns
        assert columns < 80 or len(lines) <= SCREEN_LINES - FILES_LINES
        assert lines[0].plain.startswith("INVALID: 1 of 2 runs")
    text = text_of(lines)
    assert "2 of 3 runs of" in text and "2: CODE_0: The client's event loop" in text
    value = number(report.metrics["ttft_ms"].p50)
    assert re.search(rf"^ttft_p50 +{value} +{value} {value} +\S+ to \S+$", text, re.MULTILINE)
    many = repeats.of_reports([Path(str(at)) for at in range(40)], [report] * 40, planned=40)
    assert re.search(rf"^ttft_p50 +{value} +\S+ to \S+$", text_of(summary.of_repeats(many, 80)), re.MULTILINE)


def test_quick_acks_are_said() -> None:
    quick = msgspec.structs.replace(judged(0), quick_acks=True)
    for report, said in ((judged(0), False), (quick, True)):
        repeated = repeats.of_reports([Path("1")], [report], planned=1)
        for lines in (summary.of_run(report, 80), summary.of_repeats(repeated, 80)):
            assert ("--quick-acks" in text_of(lines)) == said


def test_a_run_among_others_is_one_line() -> None:
    line = summary.line("rate-5", judged(1))
    assert line.startswith("rate-5: INVALID, finished: ") and "ttft p50" in line and "\n" not in line
    assert "EMULATED" not in line
