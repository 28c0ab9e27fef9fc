"""Datasets of prompts: what each line gives, and mistakes by their lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from loadgen.load.dataset_files import holds_conversations
from loadgen.load.datasets import Dataset
from loadgen.load.lengths import WorkloadError
from tests.packers import PACKERS


def lines(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_dataset(tmp_path: Path) -> None:
    path = lines(tmp_path, {"prompt": "a b"}, {"prompt": [1, 2, 3], "output_tokens": 9}, "", {"prompt": "last"})
    data = Dataset(path, 5, "token_ids", warmup=1)
    assert len(data) == 2
    assert data.prompt("measured", 0).text == "a b"
    assert data.prompt("measured", 1).token_ids == [1, 2, 3]
    assert (data.shape(0).output_tokens, data.shape(1).output_tokens) == (5, 9)
    assert data.prompt("warmup", 0).text == "last"


@pytest.mark.parametrize("packed", [bytes, *PACKERS.values()])
@pytest.mark.parametrize("mark", ["utf-8", "utf-8-sig", "utf-16"])
def test_lists_marks_and_packed_files(tmp_path: Path, packed: Callable[[bytes], bytes], mark: str) -> None:
    rows = [{"prompt": "What is a café?", "max_tokens": 8}, {"text": "Name three rivers."}, "One more."]
    for text in (json.dumps(rows), json.dumps(rows, indent=2), "\n".join(map(json.dumps, rows))):
        path = tmp_path / "prompts"
        path.write_bytes(packed(text.encode(mark)))
        assert not holds_conversations(path)
        data = Dataset(path, 5, "text", warmup=0)
        assert [data.prompt("measured", number).text for number in range(3)] == [
            "What is a café?", "Name three rivers.", "One more.",
        ]  # fmt: skip
        assert [data.shape(number).output_tokens for number in range(3)] == [8, 5, 5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"prompt": "a"}, {"prompt": 7}]', "item 2 is not a prompt: prompt: expected"),
        ('{"data": [{"prompt": "a"}]}', "line 1 has no prompt; give one JSON object a line"),
        ('{\n "prompt": "a"\n}', "line 1 is not a prompt: .*; give one JSON object a line"),
        ('["a", "b"', "is no list of prompts: .*; mend it, or give one JSON object a line"),
        ("", "holds no prompts; give one JSON object a line"),
    ],
)
def test_the_right_form_is_shown(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        Dataset(lines(tmp_path, text), 5, "text", warmup=0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2 is not a prompt"),
        ({"promt": "a"}, r'line 2 has no prompt; give one JSON object a line, such as \{"prompt": "What'),
        ({"prompt": ""}, "line 2 has an empty"),
        ({"prompt": []}, "line 2 has an empty"),
        *(
            ({"prompt": "a", name: value}, rf"prompts\.jsonl line 2 is not a prompt: {name}: [^\n`]*; give one JSON")
            for name in ("prompt_tokens", "output_tokens")
            for value in (0, -5, 2.5, "7", True, 1 << 31, 10**30)
        ),
        ({"prompt": [1]}, "line 2 has token ids"),
        ('{"prompt": "\xff"}'.encode("latin-1"), "line 2 is not a prompt"),
    ],
)  # fmt: skip
def test_bad_dataset_line_is_named(tmp_path: Path, row: object, message: str) -> None:
    path = lines(tmp_path, {"prompt": "fine"})
    text = row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode()
    path.write_bytes(path.read_bytes() + b"\n" + text)
    with pytest.raises(WorkloadError, match=message):
        Dataset(path, 1, "text", 0)


@pytest.mark.parametrize("length", [1, (1 << 31) - 1, None])
def test_dataset_lengths_that_can_be_are_taken(tmp_path: Path, length: int | None) -> None:
    data = Dataset(lines(tmp_path, {"prompt": "a", "prompt_tokens": length, "output_tokens": length}), 5, "text", 0)
    assert (data.prompt("measured", 0).n_tokens, data.shape(0).output_tokens) == (length or 0, length or 5)


def test_dataset_too_short_or_missing(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="holds 1 prompt and --warmup 1 takes as many; add prompts, or send"):
        Dataset(lines(tmp_path, {"prompt": "a"}), 1, "text", 1)
    with pytest.raises(WorkloadError, match="cannot read"):
        Dataset(tmp_path / "none.jsonl", 1, "text", 0)


def test_a_dataset_is_repeated_when_asked(tmp_path: Path) -> None:
    path = lines(tmp_path, {"prompt": "a"}, {"prompt": "b", "output_tokens": 9})
    data = Dataset(path, 5, "text", 8, repeat=True)
    assert len(data) == 2
    assert [data.prompt("measured", number).text for number in range(5)] == ["a", "b", "a", "b", "a"]
    assert [data.shape(number).output_tokens for number in range(4)] == [5, 9, 5, 9]
    assert [data.prompt("warmup", number).text for number in range(3)] == ["b", "a", "b"]
    path.write_text("\n")
    with pytest.raises(WorkloadError, match="holds no prompts"):
        Dataset(path, 5, "text", 0, repeat=True)
