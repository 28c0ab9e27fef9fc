"""The targets in the unit stage: their corpus, which holds what the fuzzers ever found, and small budgets of draws that
are the same every time. `make fuzz` searches further."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import SEPARATOR, TARGETS

CORPUS = Path(__file__).parent / "corpus"
MOST_CORPUS_BYTES = 12_000  # of one target
SLOW = {"config": 4, "run_directory": 20, "profile": 20}  # draws of those that take longest
HOSTILE = (
    None, True, -1, 0, 1, 2**31, 2**63, -(2**63), 2**64, 10**30, 1e308, -1e-308, 0.5, "", "a", "\x1b[2J", "\u202e",
    "<b>", "nan", "\x00", "9" * 40, [], [[]], {}, {"a": None}, [None], ["a"], [-1],
)  # fmt: skip


def seeds(target: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]


@pytest.mark.parametrize("target", TARGETS)
def test_the_corpus(target: str) -> None:
    for seed in seeds(target):
        TARGETS[target](seed)


def test_the_corpus_is_small() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    assert all(sum(map(len, seeds(target))) <= MOST_CORPUS_BYTES for target in TARGETS)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values within a JSON document."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(place for key, value in items for place in places(value, (*path, key)))]


@st.composite
def another_value(draw: st.DrawFn, data: bytes) -> bytes:
    """The same lines of JSON with hostile values in places of some."""
    lines = data.split(b"\n")
    for _ in range(draw(st.integers(1, 3))):
        number = draw(st.integers(0, len(lines) - 1))
        try:
            tree = msgspec.json.decode(lines[number])
        except msgspec.DecodeError:
            continue
        path = draw(st.sampled_from(places(tree)))
        value = draw(st.sampled_from(HOSTILE))
        if not path:
            continue
        within = tree
        for key in path[:-1]:
            within = within[key]
        within[path[-1]] = value
        lines[number] = msgspec.json.encode(tree)
    return b"\n".join(lines)


@st.composite
def other_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """The same bytes but for some pieces that are cut out, doubled, or replaced."""
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(data)))
        end = min(len(data), begin + draw(st.integers(0, 20)))
        piece = draw(st.sampled_from((b"", data[begin:end] * 2)) | st.binary(max_size=6))
        data = data[:begin] + piece + data[end:]
    return data


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_drawn(target: str) -> None:
    drawn = st.sampled_from(seeds(target)).flatmap(lambda seed: another_value(seed) | other_bytes(seed))

    @settings(
        max_examples=SLOW.get(target, 150), deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(drawn | st.binary(max_size=200))
    def holds(data: bytes) -> None:
        TARGETS[target](data)

    holds()


def test_a_run_directory_is_three_files() -> None:
    assert any(seed.count(SEPARATOR) == 2 for seed in seeds("run_directory"))
