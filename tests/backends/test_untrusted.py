"""Text from others as plain text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backends.untrusted import escaped


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
