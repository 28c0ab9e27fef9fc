"""The paper's tables as data, and the presets that are made from them."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from training_probe import paper
from training_probe.grid import Cell, Device, Method
from training_probe.paper import PaperRow
from training_probe.refusals import impossible


def printed(table: str, model: str, label: str, platform: str = paper.LEADING, batch: str = "") -> PaperRow:
    found = [
        row
        for row in paper.rows()
        if (row.table, row.model, row.label, row.platform) == (table, model, label, platform)
        and row.batch_label.startswith(batch)
    ]
    assert len(found) == 1
    return found[0]


def test_every_cell_of_the_four_tables_is_there() -> None:
    assert Counter(row.table for row in paper.rows()) == {"II": 4, "III": 152, "IV": 152, "IX": 164}
    filled = Counter(row.table for row in paper.rows() if not row.oom)
    assert filled == {"II": 4, "III": 92, "IV": 92, "IX": 128}
    for row in paper.rows():
        assert row.oom == (row.memory_gb is None)
        assert row.platform in paper.PLATFORMS
        assert row.method == str(Method.parse(row.method))
        assert row.seq_len == 350
        assert (row.task == "finetune") == (row.table == "IX")


def test_rows_read_as_they_were_printed() -> None:
    row = printed("III", "7b", "Naive")
    assert (row.tokens_per_s, row.std, row.memory_gb, row.batch_size) == (7488.3, 0.07, 66.7, 1)
    assert printed("III", "7b", "Naive", "RTX4090").oom
    row = printed("IV", "7b", "R+Z3+O", "RTX4090")
    assert (row.tokens_per_s, row.batch_size, row.memory_gb) == (3595.4, 64, 22.5)
    row = printed("IX", "70b", "L+F+R+Z3+O", "RTX3090 w/o NVLink")
    assert (row.tokens_per_s, row.memory_gb) == (10.1, 13.2)


def test_the_paper_writes_letters_in_its_own_order() -> None:
    row = printed("III", "7b", "R+F")
    assert (row.label, row.method) == ("R+F", "F+R")
    assert printed("III", "7b", "R+Q").method == "Q+R"


def test_table_2_names_engines_and_a_global_batch() -> None:
    row = printed("II", "7b", "Megatron", batch="32")
    assert (row.engine, row.batch_label, row.batch_size) == ("megatron", "32 global", 4)
    assert "global batch" in row.note
    assert printed("II", "7b", "DeepSpeed", batch="4").engine == "deepspeed"


def test_misprints_stay_as_printed_and_have_a_note() -> None:
    row = printed("IV", "13b", "R+Z2+O")
    assert (row.tokens_per_s, row.likely_tokens_per_s) == (640435, 6404.35)
    assert "decimal point" in row.note
    for label, memory in (("L+F+R+Z3", 10.8), ("L+F+R+Z3+O", 8.7)):  # under the 70B label in print
        row = printed("IX", "13b", label)
        assert row.memory_gb == memory
        assert "70B" in row.note
    assert len({row.label for row in paper.rows() if (row.table, row.model) == ("IX", "70b")}) == 5
    others = [row for row in paper.rows() if row.read_as is None]
    assert len(others) == len(paper.rows()) - 1
    assert all(row.likely_tokens_per_s == row.tokens_per_s for row in others)


@pytest.mark.parametrize(
    ("name", "cells"),
    [("paper-table2", 4), ("paper-table3", 38), ("paper-table4", 38), ("paper-table9", 41)],
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_presets_of_tables_are_their_rows_in_order(name: str, cells: int, device: Device) -> None:
    made = paper.presets()[name](4, device)
    table = {"2": "II", "3": "III", "4": "IV", "9": "IX"}[name[-1]]
    rows = [row for row in paper.rows() if row.table == table and row.platform == paper.LEADING]
    assert len(made) == len({each.name for each in made}) == cells == len(rows)
    for each, row in zip(made, rows, strict=True):
        assert (each.model, each.task, each.engine, each.method) == (row.model, row.task, row.engine, row.method)
        assert each.micro_batch == (None if table == "IV" else row.batch_size)
        assert (each.gpus, each.seq_len, each.device) == (4, 350, device)
        assert each.attention == ("flash" if "F" in each.method.split("+") else "eager")


def gpus(cells: list[Cell]) -> list[int]:
    return [each.gpus for each in cells]


def test_figure_4_doubles_up_to_all_gpus() -> None:
    figure_4 = paper.presets()["paper-fig4"]
    assert [gpus(figure_4(count, "cuda")) for count in (0, 1, 2, 6, 8)] == [
        [1], [1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8],
    ]  # fmt: skip
    assert {(each.model, each.method, each.micro_batch, each.seq_len) for each in figure_4(8, "cuda")} == {
        ("7b", "Q", 2, 350)
    }


def test_laptop_needs_no_gpu_and_every_cell_can_be_run() -> None:
    laptop = paper.presets()["laptop"]
    cells = laptop(0, "cpu")
    assert len(cells) >= 12
    assert {each.engine for each in cells} == {"deepspeed", "fsdp2", "ddp"}
    assert set(gpus(cells)) == {1, 2}
    assert [reason for each in cells if (reason := impossible(each, None))] == []
    assert {each.model for each in cells} == {"tiny"}
    assert all(64 <= each.seq_len <= 128 for each in cells)
    assert set(gpus(laptop(1, "cuda"))) == {1}
    assert max(gpus(laptop(8, "cuda"))) == 2
    assert set(gpus(laptop(1, "cpu"))) == {1} and set(gpus(laptop(4, "cpu"))) == {1, 2}


def test_models_have_the_papers_names() -> None:
    names = ("7b", "llama-2-13b", "meta-llama/Llama-2-70b-hf", "/models/mine/", "tiny")
    assert [paper.model_name(name) for name in names] == ["7b", "13b", "70b", "mine", "tiny"]


def test_the_file_names_its_source() -> None:
    text = (paper.DATA / "paper_tables.csv").read_text()
    assert re.match(r"# .*arXiv 2311\.03687", text)
