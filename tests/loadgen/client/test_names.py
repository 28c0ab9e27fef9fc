"""What replies call themselves: ids that tell them apart or do not, and models that were not asked for."""

from __future__ import annotations

import random
import uuid

import pytest

from backends.protocol import ProtocolError, ReplyIdentity
from backends.untrusted import MASK, hide
from loadgen.client.exchange import OTHERS, Names


def taken(ids: list[str]) -> Names:
    names = Names("m")
    for id in ids:
        assert names.take(ReplyIdentity(id, "m")) == ""
    return names


@pytest.mark.parametrize(
    "ids",
    [
        [f"chatcmpl-{uuid.uuid5(uuid.NAMESPACE_DNS, str(number)).hex}" for number in range(9)],
        [f"cmpl-{number}" for number in (7, 5, 6, 9, 8)],
        [str(number) for number in range(20)],
        ["gen-1700000000-a8Fk2LpQ", "gen-1700000000-b8Fk2LpQ", "gen-1700000001-c8Fk2LpQ"],
    ],
)
def test_a_reply_with_the_id_of_an_earlier_one_is_none_of_ours(ids: list[str]) -> None:
    with pytest.raises(ProtocolError, match=f"the id of an earlier one, {ids[1]}"):
        taken(ids).take(ReplyIdentity(ids[1], "m"))


def test_replies_that_each_come_twice_are_told_from_the_second_on() -> None:
    names = taken(["cmpl-a8Fk2LpQ", "cmpl-a8Fk2LpQ", "cmpl-b8Fk2LpQ"])  # the first could be the server's only id
    with pytest.raises(ProtocolError, match="the id of an earlier one, cmpl-b8Fk2LpQ"):
        names.take(ReplyIdentity("cmpl-b8Fk2LpQ", "m"))


@pytest.mark.parametrize(
    "ids",
    [
        [""] * 9,
        ["chatcmpl-123"] * 9,  # one for all
        ["chatcmpl-default"] * 9,
        ["slot-0", "slot-0", "slot-1", "slot-1", "slot-0"],
        ["chatcmpl-1700000000"] * 2 + ["chatcmpl-1700000001"] * 3 + ["chatcmpl-1700000002"] * 3,  # the second
        ["chatcmpl-1700000000123", "chatcmpl-1700000000124", "chatcmpl-1700000000124"],
        [f"chatcmpl-{number}" for number in random.Random(1).choices(range(999), k=2000)],  # as Ollama draws them
    ],
)
def test_ids_that_tell_nothing_apart_are_no_errors(ids: list[str]) -> None:
    taken(ids)


def test_a_key_that_a_server_echoes_as_a_name_is_masked() -> None:
    hide(["sk-0123456789abcdef"])
    names = Names("m")
    assert names.take(ReplyIdentity("sk-0123456789abcdef-1", "sk-0123456789abcdef")) == MASK
    names.take(ReplyIdentity("sk-0123456789abcdef-2"))
    with pytest.raises(ProtocolError) as error:
        names.take(ReplyIdentity("sk-0123456789abcdef-2"))
    assert "0123456789" not in str(error.value)


def test_other_models_are_named_and_not_without_end() -> None:
    names = Names("m")
    assert [names.take(ReplyIdentity(model=name)) for name in ("m", "", "small", "a\nb", "small")] == [
        "",
        "",
        "small",
        "a b",
        "small",
    ]
    assert {names.take(ReplyIdentity(model=f"m{number}")) for number in range(100)} >= {"m0", OTHERS}
    assert len(names.take(ReplyIdentity(model="x" * 9999))) <= 100
    assert Names("tgi").take(ReplyIdentity(model="meta-llama/Llama-3.1-8B")) == ""  # for whatever it serves
