"""Text from others as plain text."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.untrusted import escaped, nearest, read_json, reason


@given(st.text())
def test_text_is_shown_as_it_is_but_for_what_does_not_print(text: str) -> None:
    shown = escaped(text)
    assert shown.isprintable()
    if text.isprintable():
        assert shown == text


def test_invisible_signs_are_shown() -> None:
    hidden = "a \u061c\u00ad\U000e0041\u3000日本 😀"
    assert escaped(hidden) == "a \\u061c\\xad\\U000e0041\\u3000日本 😀"
    assert escaped("half a character: \udc80") == "half a character: \\udc80"


@pytest.mark.parametrize(
    ("typed", "known", "meant"),
    [
        ("reqests", ["requests", "request-rate"], "requests"), ("vlm", ["vllm", "tgi"], "vllm"),
        ("rnu", ["run"], "run"),
        ("nope", ["openai", "vllm"], None), ("nosuch", ["launch", "out"], None), ("", ["vllm"], None),
    ],
)  # fmt: skip
def test_only_a_near_name_is_suggested(typed: str, known: list[str], meant: str | None) -> None:
    assert nearest(typed, known) == meant


class Named(msgspec.Struct):
    name: str


def test_a_reason_names_the_key_and_no_path() -> None:
    def why(data: bytes, kind: object) -> str:
        with pytest.raises(msgspec.DecodeError) as raised:
            msgspec.json.decode(data, type=kind)
        return reason(raised.value)

    assert why(b'{"a": {"b": "x"}}', dict[str, dict[str, int]]) == "Expected int, got str"
    assert why(b'{"name": 7}', Named) == "name: expected str, got int"
    assert why(b'"x"', int) == "Expected int, got str"
    assert why(b"{", Named) == "Input data was truncated"


def test_a_file_of_json(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    with pytest.raises(LookupError) as absent:
        read_json(path, dict[str, int], LookupError, "is no list")
    assert str(absent.value) == f"cannot read {path}: No such file or directory."
    path.write_text('{"a": 1}')
    assert read_json(path, dict[str, int], LookupError, "is no list") == {"a": 1}
    path.write_text('{"a": "b"}')
    with pytest.raises(LookupError) as other:
        read_json(str(path), dict[str, int], LookupError, "is no list", "; copy another")
    assert str(other.value) == f"{path} is no list: Expected int, got str; copy another."


@pytest.mark.parametrize("content", [b"", b"{", b'"\xff"', b"[" * 100_000])
def test_whatever_a_file_holds_one_sentence_tells(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "any.json"
    path.write_bytes(content)
    with pytest.raises(LookupError) as refused:
        read_json(path, object, LookupError, "is no JSON")
    assert str(refused.value).startswith(f"{path} is no JSON: ") and "\n" not in str(refused.value)
