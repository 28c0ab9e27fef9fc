"""Known results become known tables, and text from elsewhere is shown, never obeyed."""

from __future__ import annotations

import csv
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.document import markdown, terminal
from loadgen.document.content import Column, Table
from tests.training_probe.measured import HOSTILE, result
from training_probe import paper
from training_probe.report import layout, tables
from training_probe.results import Attempt, CellResult


def shown(table: Table, row: int = 0) -> dict[str, str]:
    """One row by `group: head`."""
    heads = [f"{column.group}: {column.head}" if column.group else column.head for column in table.columns]
    assert len(set(heads)) == len(heads)
    return dict(zip(heads, table.texts()[row], strict=True))


def only(results: list[CellResult], key: str) -> Table:
    found = [table for table in tables.build(results) if table.id == key]
    assert len(found) == 1
    return found[0]


def test_table_3_has_this_machine_beside_the_papers() -> None:
    row = shown(only([result("F+Z3", 8000.0)], "table-III"))
    assert (row["Model"], row["Method"]) == ("7B", "F+Z3")
    assert (row["A800: Tokens/s (std)"], row["A800: M"]) == ("5,590.1 (0.05)", "29.2")
    assert row["RTX3090 w/o NVLink: Tokens/s (std)"] == "82.6 (0.01)"
    ours = "NVIDIA H200, 8 GPUs: "
    assert row[f"{ours}Tokens/s (std)"] == "8,000 (12.50)"
    assert (row[f"{ours}M alloc."], row[f"{ours}M res."]) == ("31.50", "40.25")
    assert float(row[f"{ours}/ A800"]) == pytest.approx(8000 / 5590.1, rel=1e-2)
    assert f"{ours}per GPU" not in row


def test_other_numbers_of_gpus_are_compared_per_gpu_and_the_caption_says_so() -> None:
    table = only([result("Z3", 8000.0, gpus=2), result("Z3", 3000.0, gpus=1)], "table-III")
    row = shown(table)
    assert row["NVIDIA H200, 2 GPUs: per GPU"] == "4,000"
    assert float(row["NVIDIA H200, 2 GPUs: / A800"]) == pytest.approx((8000 / 2) / (5491.4 / 8), rel=1e-2)
    assert row["NVIDIA H200, 1 GPU: per GPU"] == "3,000"
    assert any("have 8 GPUs, this machine 1 (NVIDIA H200) and 2 (NVIDIA H200)" in each for each in table.below)
    assert not any("this machine" in each for each in only([result()], "table-III").below)


def test_out_of_memory_is_a_dash_and_other_ends_are_words_with_reasons() -> None:
    found = [
        result("Naive", outcome="oom", reason="no room"),
        result("Z2", outcome="timeout", reason="nothing for 600 s"),
        result("Z3", outcome="crashed", reason="signal 11"),
        result("Q", outcome="crashed", reason="signal 11"),
        result("R", 500.0, said={"valid": False}),
    ]
    table = only(found, "table-III")
    ours = "NVIDIA H200, 8 GPUs: Tokens/s (std)"
    assert [shown(table, row)[ours] for row in range(5)] == [
        "-", "timeout [1]", "crashed [2]", "crashed [2]", "500.0 (12.50) INVALID [3]",
    ]  # fmt: skip
    assert tuple(table.notes) == ("nothing for 600 s", "signal 11", tables.UNSOUND)
    assert shown(table, 4)["NVIDIA H200, 8 GPUs: / A800"] == ""
    assert shown(table)["RTX4090: Tokens/s (std)"] == "-"
    everything = only(found, "cells")
    assert shown(everything)["Tokens/s (std)"] == "OOM [1]"
    assert everything.notes[0] == "no room"


def test_table_4_takes_searched_cells_and_no_others() -> None:
    tried = [Attempt(micro_batch=16, outcome="ok"), Attempt(micro_batch=32, outcome="oom")]
    searched = result("R+Z2+O", 6400.0, model="13b", micro_batch=None, said={"batch_size": 16, "search": tried})
    none_fits = result("Z2", outcome="oom", model="13b", micro_batch=None, reason="1 does not fit")
    table = only([searched, none_fits, result("Z2", model="13b")], "table-IV")
    assert [row[:2] for row in table.rows] == [("13B", "Z2"), ("13B", "R+Z2+O")]
    row = shown(table, 1)
    assert (row["A800: BS"], row["NVIDIA H200, 8 GPUs: BS"]) == ("64", "16")
    assert row["A800: Tokens/s (std)"] == "640,435 (0.13) [1]"
    assert "6404.35" in table.notes[0]
    assert float(row["NVIDIA H200, 8 GPUs: / A800"]) == pytest.approx(6400 / 6404.35, rel=1e-2)
    assert [row[1] for row in only([searched, result("Z2", model="13b")], "table-III").rows] == ["Z2"]


def test_a_search_that_met_no_limit_but_its_own_is_marked() -> None:
    tried = [Attempt(micro_batch=size, outcome="ok") for size in (32, 64)]
    limited = result("R", 7814.0, micro_batch=None, said={"batch_size": 64, "search": tried})
    for table, column in (("table-IV", "NVIDIA H200, 8 GPUs: BS"), ("cells", "BS")):
        made = only([limited], table)
        mark = shown(made)[column].removeprefix("64 ")
        assert mark in ("[1]", "[2]") and "more may fit" in made.notes[int(mark[1]) - 1]


def test_a_cell_of_two_tables_is_in_both() -> None:
    found = [result("Naive"), result("Z1", engine="megatron", micro_batch=4)]
    made = {table.id: table for table in tables.build(found)}
    assert list(made) == ["table-II", "table-III", "cells"]
    assert [row[1] for row in made["table-II"].rows] == ["Megatron", "DeepSpeed"]
    assert shown(made["table-II"])["A800: BS"] == "32 global"
    assert len(made["cells"].rows) == 2


@pytest.mark.parametrize(
    "other",
    [
        {"seq_len": 512}, {"grad_accum": 2}, {"attention": "math"}, {"engine": "fsdp2"}, {"micro_batch": 2},
        {"task": "finetune"}, {"model": "llama-3-8b"}, {"compile": True},
    ],
)  # fmt: skip
def test_what_the_paper_did_not_run_is_not_set_beside_it(other: dict[str, object]) -> None:
    assert [table.id for table in tables.build([result("Z3", **other)])] == ["cells"]


def test_every_preset_cell_finds_its_row() -> None:
    for name, table in (
        ("paper-table2", "II"),
        ("paper-table3", "III"),
        ("paper-table4", "IV"),
        ("paper-table9", "IX"),
    ):
        cells = paper.presets()[name](8, "cuda")
        found = [
            result(each.method, outcome="skipped", **{field: getattr(each, field) for field in (
                "model", "task", "engine", "micro_batch",
            )})
            for each in cells
        ]  # fmt: skip
        assert len(only(found, f"table-{table}").rows) == len(cells)


def test_columns_without_a_number_are_left_out_of_the_table_of_all_cells() -> None:
    bare = only([result(seq_len=64)], "cells")
    assert not {"MFU", "HFU", "J/token", "forward"} & {column.head for column in bare.columns}
    told = result(seq_len=64, said={"mfu_ratio": 0.315, "energy_j_per_token": 0.25, "predicted_memory_gb": 30.0})
    row = shown(only([told], "cells"))
    assert (row["% of peak: MFU"], row["Energy: J/token"], row["GiB: predicted"]) == ("31.50", "0.250", "30.00")


def test_padding_has_a_column_where_lengths_are_drawn() -> None:
    drawn = result("F", lengths="uniform:8:64", packing=True, engine="ddp", said={"padding_ratio": 0.125})
    table = only([drawn], "cells")
    row = shown(table)
    assert row["% of positions: padding"] == "12.50" and row["Tokens/s (std)"].startswith("1,000")

    assert "padding" not in {column.head for column in only([result("F")], "cells").columns}


def test_no_results_no_tables() -> None:
    assert tables.build([]) == []


def hostile() -> Table:
    said = result("Z3", outcome="crashed", reason=HOSTILE, platform=HOSTILE)
    return only([said], "table-III")


def test_the_terminal_obeys_nothing() -> None:
    text = "\n".join(terminal.table(hostile(), 200))
    assert "\x1b" not in text and "\r" not in text and "\u202e" not in text
    assert "\\x1b[31mred\\r\\nrow" in text


def test_markdown_keeps_its_columns_whatever_stands_in_them() -> None:
    table = hostile()
    lines = [line for line in "\n".join(markdown.table(table)).splitlines() if line.startswith("|")]
    assert len(lines) == len(table.rows) + 2
    for line in lines:
        assert len(re.findall(r"(?<!\\)\|", line)) == len(table.columns) + 1
    text = "\n".join(markdown.table(table))
    assert "<b>" not in text and "](m)" not in text.replace("\\](m)", "")


def test_latex_escapes_what_it_would_obey() -> None:
    text = layout.latex(hostile())
    for sign in "$%&#_":
        assert f"\\{sign}" in text
    assert r"\textbackslash{}d" in text and r"\textasciitilde{}i" in text and r"\textasciicircum{}j" in text
    assert "\x1b" not in text
    body = text[text.index("\\midrule") : text.index("\\bottomrule")]
    rows = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert [len(re.findall(r"(?<!\\)&", row)) for row in rows] == [len(hostile().columns) - 1]


@given(st.text())
def test_no_text_opens_a_group_or_a_command_in_latex(text: str) -> None:
    escaped = layout.latex_text(text)
    for known in (r"\textbackslash{}", r"\textasciitilde{}", r"\textasciicircum{}", r"\textless{}", r"\textgreater{}",
                  r"\textbar{}", r"\textquotedbl{}", r"\textasciigrave{}", *(f"\\{sign}" for sign in "{}$&#%_"),
                  *(f"{{{sign}}}" for sign in "[]*")):  # fmt: skip
        escaped = escaped.replace(known, "")
    assert not set("\\{}$&#%_~^\n") & set(escaped)


def test_a_narrow_terminal_loses_the_papers_other_platforms_first_and_says_so() -> None:
    table = only([result("Z3")], "table-III")
    wide, narrow = ("\n".join(terminal.table(table, width)) for width in (300, 110))
    assert "RTX4090" in wide and "Left out" not in wide
    assert max(map(len, narrow.splitlines())) <= 110
    assert "A800 --" in narrow and "NVIDIA H200, 8 GPUs --" in narrow
    assert "Left out for want of width: RTX" in narrow.replace("\n    ", " ")
    header = next(line for line in wide.splitlines() if line.startswith("Model"))
    row = next(line for line in wide.splitlines() if line.startswith("7B"))
    assert row.index("5,491.4 (0.02)") + len("5,491.4 (0.02)") == header.index("Tokens/s (std)") + len("Tokens/s (std)")


def test_columns_are_as_wide_as_a_long_heading_over_them() -> None:
    table = Table((Column("a", left=True), Column("b", "a very long heading")), (("x", "1"),))
    lines = [*terminal.table(table, 80)]
    assert lines[0] == "   a very long heading"
    assert lines[2] == "x" + "1".rjust(2 + len("a very long heading"))


def test_csv_has_the_papers_numbers_and_ours_and_no_formulas() -> None:
    found = [
        result("Z3", 4000.0, gpus=4),
        result("Q", outcome="crashed", reason="=cmd()\nnext", seq_len=64),
        result("R+Z2+O", 6400.0, model="13b", micro_batch=None, gpus=4),
    ]
    rows = list(csv.DictReader(io.StringIO(tables.csv_text(found))))
    table_3 = [row for row in rows if row["table"] == "III"]
    assert [row["platform"] for row in table_3] == [*paper.PLATFORMS, "NVIDIA H200"]
    assert (table_3[0]["tokens_per_s"], table_3[0]["gpus"], table_3[1]["peak_memory_gb"]) == ("5491.4", "8", "22.6")
    assert float(table_3[4]["ratio_per_gpu"]) == pytest.approx(1000 / (5491.4 / 8))
    assert [row["note"] for row in rows if row["table"] == ""] == ["'=cmd()\\nnext"]
    assert [row["gpus"] for row in rows if row["platform"] == "NVIDIA H200" and row["table"] == "IV"] == ["4"]
