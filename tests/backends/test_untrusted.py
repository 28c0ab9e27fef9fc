"""Text from others as plain text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.untrusted import escaped, read_json


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
    assert str(other.value) == f"{path} is no list: Expected `int`, got `str` - at `$[...]`; copy another."


@pytest.mark.parametrize("content", [b"", b"{", b'"\xff"', b"[" * 100_000])
def test_whatever_a_file_holds_one_sentence_tells(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "any.json"
    path.write_bytes(content)
    with pytest.raises(LookupError) as refused:
        read_json(path, object, LookupError, "is no JSON")
    assert str(refused.value).startswith(f"{path} is no JSON: ") and "\n" not in str(refused.value)
