"""The allocator's history, replayed: histories whose peak is known."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import peak_allocations


def alloc(address: int, size: int, *calls: tuple[str, int, str]) -> dict[str, Any]:
    frames = [{"filename": file, "line": line, "name": name} for file, line, name in calls]
    return {"action": "alloc", "addr": address, "size": size, "frames": frames}


def free(address: int) -> list[dict[str, Any]]:
    return [
        {"action": action, "addr": address, "size": 0, "frames": []} for action in ("free_requested", "free_completed")
    ]


def test_the_peak_and_what_is_alive_there() -> None:
    events = [alloc(1, 100), alloc(2, 50), *free(1), alloc(3, 60), alloc(1, 30), *free(2), alloc(4, 40)]
    assert peak_allocations.peak(events, 0) == (1, 150)
    at, most = peak_allocations.peak(events, 2)
    assert (at, most) == (5, 140)  # before that the first step's 150
    assert sorted(events[index]["size"] for index in peak_allocations.alive(events, at)) == [30, 50, 60]


def test_what_was_there_before_the_history_is_not_freed_of_it() -> None:
    assert peak_allocations.peak([*free(9), alloc(1, 10)], 0) == (2, 10)


def test_a_place_is_named_by_its_innermost_calls() -> None:
    calls = [
        ("/x/torch/nn/modules/module.py", 1, "_call_impl"), ("/x/a.py", 2, "f"), ("/x/b.py", 3, "g"),
        ("/x/c.py", 4, "h"), ("/x/d.py", 5, "i"), ("/x/e.py", 6, "j"),
    ]  # fmt: skip
    assert peak_allocations.place(alloc(1, 1, *calls)["frames"]) == "a.py:2 f < b.py:3 g < c.py:4 h < d.py:5 i"
    assert peak_allocations.place([]) == "autograd"


def test_it_tells_by_place(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = ("/x/a.py", 2, "f"), ("/x/b.py", 3, "g")
    peak_allocations.tell("cell", [alloc(1, 1 << 30, one), alloc(2, 1 << 29, two), alloc(3, 1 << 30, one)], 0, 20)
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "cell: 2.5000 GiB, reached by a.py:2 f",
        "    2.0000 GiB in    2  a.py:2 f",
        "    0.5000 GiB in    1  b.py:3 g",
    ]
