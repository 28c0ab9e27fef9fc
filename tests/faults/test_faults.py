"""The client against a server that misbehaves: the truth table, case by case, over both transports."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.faults import truth
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


@pytest.mark.parametrize("play", truth.PLAYS, ids=lambda play: f"{play[0].name}-{play[1].backend}-{play[2]}")
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
