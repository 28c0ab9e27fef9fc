"""The client against a server that misbehaves: the truth table, case by case, over both transports."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.faults import table, truth
from tests.faults.case import Case
from tests.faults.play import Key, Seen, play_all
from tests.faults.protocols import Protocol

Played = dict[Key, Seen | BaseException]


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """The cases that were chosen, played side by side."""
    chosen = [item.callspec.params["play"] for item in request.session.items if _is_case(item)]
    return play_all(chosen, tmp_path_factory.mktemp("faults"))


def _is_case(item: pytest.Item) -> bool:
    return getattr(item, "originalname", "") == test_faults.__name__ and item.path.samefile(__file__)


@pytest.mark.processes
@pytest.mark.parametrize(
    "play", [pytest.param(play, marks=[pytest.mark.always] * (play[2] == "fast")) for play in truth.PLAYS],
    ids=[f"{case.name}-{protocol.backend}-{transport}" for case, protocol, transport in truth.PLAYS],
)  # fmt: skip
def test_faults(play: tuple[Case, Protocol, str], played: Played) -> None:
    case, protocol, transport = play
    seen = played[case.name, protocol.backend, transport]
    if isinstance(seen, BaseException):
        raise seen
    assert not truth.differences(case, transport, seen)


def test_the_table_is_large_and_has_each_case_once() -> None:
    names = Counter((case.name, protocol.backend) for case in truth.CASES for protocol in case.protocols)
    assert max(names.values()) == 1
    assert len(names) >= 150


def test_the_table_in_the_documents_is_up_to_date() -> None:
    """Write it anew with `python -m tests.faults.table`."""
    for document in table.DOCUMENTS:
        assert document.read_text(encoding="utf-8") == table.written(document)


def test_each_case_has_a_place_in_the_table() -> None:
    assert [case for group in table.GROUPS.values() for case in group] == list(truth.CASES)


def test_the_server_is_independent() -> None:
    """Of the client, its codecs and the embedded server: what it imports is the standard library and itself."""
    for name in ("protocols.py", "server.py"):
        tree = ast.parse((Path(__file__).parent / name).read_text(encoding="utf-8"))
        roots = {
            alias.name.partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        froms = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert roots | {each.partition(".")[0] for each in froms} <= sys.stdlib_module_names | {"tests"}
        assert {each for each in froms if each.startswith("tests")} <= {"tests.faults.protocols"}
