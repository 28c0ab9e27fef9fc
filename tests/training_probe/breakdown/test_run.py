"""Breakdowns as tables beside the paper's, and the mistakes that are told in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from loadgen.document.content import Table
from training_probe import paper
from training_probe.breakdown import report as breakdown_report
from training_probe.breakdown import tables
from training_probe.breakdown.attribution import Attribution, PassTimes, Share
from training_probe.breakdown.run import Breakdown
from training_probe.cli import invoke
from training_probe.grid import Cell, cell
from training_probe.results import BREAKDOWN_FILE


def traced(of: Cell, outcome: str = "ok") -> Breakdown:
    """Of a step of 100 ms: forward 30, backward 60, optimizer 10."""
    windows = [
        PassTimes(
            phase=phase, overall_s=overall_s, compute_s=0.8 * overall_s, exposed_communication_s=0.1 * overall_s,
            exposed_memcpy_s=0.0, idle_s=0.1 * overall_s, communication_s=0.2 * overall_s, memcpy_s=0.0,
        )
        for phase, overall_s in (("forward", 0.03), ("backward", 0.06), ("optimizer", 0.01))
    ]  # fmt: skip
    shares = [
        Share(phase="forward", part="QKV", kind="GEMM", seconds=0.012),
        Share(phase="forward", part="MLP", kind="GEMM", seconds=0.012),
        Share(phase="backward", part="QKV", kind="GEMM", seconds=0.02),
        Share(phase="backward", part="MLP", kind="element-wise", seconds=0.016),
        Share(phase="backward", part="MLP", kind="GEMM", recomputed=True, seconds=0.012),
        Share(phase="backward", part="Gradients", kind="communication", seconds=0.012),
        Share(phase="backward", part="", kind="element-wise", seconds=0.0005),
        Share(phase="optimizer", part="", kind="element-wise", seconds=0.008),
    ]
    attribution = Attribution(device="cuda", steps=3, step_s=0.1, windows=windows, shares=shares)
    return Breakdown(
        cell=of, platform="NVIDIA H200", layers=32, outcome=outcome, reason="" if outcome == "ok" else "because",  # type: ignore[arg-type]
        trace="t.json.gz", bare_step_s=0.09, traced_step_s=0.101, attribution=attribution if outcome == "ok" else None,
    )  # fmt: skip


NAIVE = cell("Naive", model="7b", gpus=4, micro_batch=2)


def column(table: Table, head: str, group: str = "") -> list[str]:
    at = next(at for at, each in enumerate(table.columns) if each.head == head and group in each.group)
    return [row[at] for row in table.texts()]


def test_the_papers_numbers_stand_beside_its_own_cell() -> None:
    passes, parts, kinds, attention, transfers = tables.build([traced(NAIVE)])
    assert column(passes, "overall") == ["30.00", "60.00", "10.00"]
    assert column(passes, "ms", "paper") == ["75", "250", "193.9"]  # Table V
    by_part = {row[0]: tuple(row) for row in parts.texts()}
    assert by_part["QKV"][1:] == ("12.00", "40.0", "20.00", "33.3", "", "9.92", "13.2", "36.26", "14.5")  # Table VI
    assert by_part["MLP"][1:6] == ("12.00", "40.0", "16.00", "26.7", "12.00")
    assert by_part["communication, not hidden"][1:] == ("3.00", "10.0", "6.00", "10.0", "", "", "", "38.76", "15.5")
    assert by_part["(no part known)"][1:] == ("", "", "0.500", "0.8", "", "", "", "", "")
    assert by_part["Bmm0"] == ("Bmm0", "", "", "", "", "", "4.32", "5.8", "5.63", "2.3")
    assert column(kinds, "GEMM")[:2] == ["80.0", "53.3"]
    assert column(kinds, "GEMM, %") == ["66.4", "62.5", ""]  # Table XIII
    assert (column(attention, "forward"), column(attention, "forward", "paper")) == (["0.375"], ["1.06"])  # Table VIII
    assert column(transfers, "ms a step", "communication") == ["12.00"]
    assert column(transfers, "%", "communication, paper") == ["45"]  # Table XV


def test_another_cell_has_nothing_of_the_papers_beside_it() -> None:
    other = msgspec.structs.replace(NAIVE, micro_batch=4)
    for table in tables.build([traced(other)]):
        assert not any("paper" in each.group for each in table.columns)


def test_every_cell_that_the_paper_traced_is_in_a_preset() -> None:
    names = [f"paper-{name}" for name in ("table5", "table7", "table8", "table13", "table14", "table15", "table16")]
    cells = {each for name in names for each in paper.presets()[name](8, "cuda")}
    assert all(tables.printed(traced(each)) for each in cells)
    assert {(each.model, each.method, each.micro_batch) for each in cells} == set(tables.printed_cells())


def test_a_report_is_made_from_what_is_there(tmp_path: Path) -> None:
    failed = traced(msgspec.structs.replace(NAIVE, method="F", attention="flash"), "oom")
    measured = ([traced(NAIVE), failed], {"platform": "`H200`", "run_id": "r"})
    breakdown_report.document(*measured).publish(tmp_path)
    report = breakdown_report.build(*measured)
    assert msgspec.to_builtins(report.cells) == {
        "all": 2,
        "by_outcome": {"ok": 1, "oom": 1},
        "planned": None,
        "missing": 0,
    }
    assert report.explained_ratio == {NAIVE.name: pytest.approx(1 - 0.5 / 92.5)}
    page = (tmp_path / "report.md").read_text()
    assert "oom: because" in page and "\\`H200\\`" in page and "parts.svg" in page
    assert (tmp_path / "parts.svg").exists()
    json.dumps(msgspec.to_builtins(report))


def test_what_only_names_told_is_said() -> None:
    each = traced(NAIVE)
    assert each.attribution is not None
    guessed = msgspec.structs.replace(each, attribution=msgspec.structs.replace(each.attribution, by_name_ratio=0.031))
    said = [" ".join(tables.build([of])[0].below) for of in (each, guessed)]
    assert "names alone" not in said[0] and "the kind of 3.1 % told by kernels' names alone" in said[1]


def test_cells_that_differ_are_told_apart() -> None:
    cells = [
        NAIVE,
        msgspec.structs.replace(NAIVE, seq_len=4096),
        msgspec.structs.replace(NAIVE, grad_accum=2),
        msgspec.structs.replace(NAIVE, attention="math"),
        msgspec.structs.replace(NAIVE, task="finetune"),
    ]
    titles = [tables.title(traced(each)) for each in cells]
    assert len(set(titles)) == len(cells)
    assert titles[1] == f"{titles[0]}, 4096 tokens"


def test_what_others_wrote_is_no_link(tmp_path: Path) -> None:
    hostile = msgspec.structs.replace(traced(NAIVE), trace="javascript:x) <img src=y>", platform="$\\frac{ <b>|")
    breakdown_report.document([hostile], {"platform": 3, "run_id": ["r"]}).publish(tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert "](javascript:" not in page and "<img" not in page and "<b>" not in page


def test_a_directory_in_which_nothing_ended_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / BREAKDOWN_FILE).write_bytes(msgspec.json.encode(traced(NAIVE))[:200])  # killed while it wrote
    assert invoke(["report", str(tmp_path)]) == 3
    shown = " ".join(capsys.readouterr().err.split())
    assert "No cell was traced to its end. Findings: The last line of breakdown.jsonl is cut" in shown
    assert "No cell was traced to its end." in (tmp_path / "report.md").read_text()


def test_a_directory_of_breakdowns_is_reported_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / BREAKDOWN_FILE).write_bytes(msgspec.json.encode(traced(NAIVE)) + b"\n")
    assert invoke(["report", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == breakdown_report.SCHEMA
    broken = msgspec.to_builtins(traced(NAIVE))
    del broken["attribution"]["windows"][1]
    (tmp_path / BREAKDOWN_FILE).write_bytes(msgspec.json.encode(broken) + b"\n")
    assert invoke(["report", str(tmp_path)]) == 2
    assert "windows must be forward, backward, optimizer" in capsys.readouterr().err
    (tmp_path / BREAKDOWN_FILE).write_bytes(b"{}\n")
    assert invoke(["report", str(tmp_path)]) == 2
    assert "not a breakdown of this version" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--method F --engine megatron", "Megatron's model has no named parts"),
        ("--method F+Z3 --engine fsdp2 --compile", "leave --compile out"),
        ("--method F --micro-batch max", "name the micro batch"),
        ("--method F --steps 0", "--steps is 0; it must be at least 1."),
        ("--method F --steps 1.5", "not a whole number"),
        ("--method W", "unknown letter 'W'"),
        ("--preset paper-table5 --model 70b", "has no cell of that"),
    ],
)
def test_a_mistake_is_one_sentence(options: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert invoke(["breakdown", "--device", "cpu", "--out", str(out), *options.split()]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not out.exists()
