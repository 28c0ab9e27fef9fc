"""Secrets are masked in whatever writing a server sends them back."""

from __future__ import annotations

import base64
import html
import json
from urllib.parse import quote, quote_plus

import pytest

from backends.untrusted import MASK, hide, masked, printable, without_secrets
from loadgen.rundir import Phase
from loadgen.target import Target
from tests.loadgen import tables

KEY = "sk-Ab/9+x\"y\\z&=<q>' ü"
PAIR = "me:pass word/1"
PACKED = base64.b64encode(PAIR.encode()).decode()
WRITINGS = {
    "plain": KEY,
    "JSON": json.dumps(KEY),
    "JSON, all escapes": json.dumps(KEY).replace("/", "\\/"),
    "JSON as it is": json.dumps(KEY, ensure_ascii=False),
    "URL": quote(KEY),
    "URL, all escapes": quote(KEY, safe=""),
    "form": quote_plus(KEY),
    "URL in lower case": quote(KEY).replace("%2B", "%2b").replace("%3C", "%3c"),
    "lower case": KEY.lower(),
    "upper case": KEY.upper(),
    "HTML": html.escape(KEY),
    "base64": base64.b64encode(KEY.encode()).decode(),
    "base64 for URLs": base64.urlsafe_b64encode(KEY.encode()).decode(),
    "basic header": f"Basic {PACKED}",
    "basic credentials": PACKED,
    "user and password": PAIR,
    "password": "pass word/1",
}


@pytest.mark.parametrize("writing", WRITINGS.values(), ids=WRITINGS.keys())
def test_in_every_writing(writing: str) -> None:
    hide([KEY, f"Basic {PACKED}"])
    shown = masked(f"key {writing} refused")
    assert MASK in shown and shown.startswith("key ") and shown.endswith(" refused")
    assert not any(part in shown.lower() for part in ("ab", "pass", PACKED[:6].lower(), "c2st"))


def test_a_secret_that_a_cut_ends_within() -> None:
    hide(["abcdefghij"])
    assert masked("it is abcdefg") == masked("it is ABCDEFG") == f"it is {MASK}"
    assert masked("it is abcde") == "it is abcde"  # too little to tell
    assert printable("x" * 290 + " abcdefghij refused").endswith(f"{MASK} refu…")


def test_what_is_too_short_is_no_secret() -> None:
    hide(["EMPTY", ""])
    assert masked("EMPTY") == "EMPTY"


def test_of_two_the_longer_is_masked_whole() -> None:
    hide(["abcdef", "abcdefgh"])
    assert masked("abcdefgh abcdef") == f"{MASK} {MASK}"


def test_who_holds_a_target_masks_its_secrets() -> None:
    target = Target("http://host/a-key-in-a-path/v1", secrets=("a-key-in-a-path",))
    assert repr(target) == f"Target('http://host/{MASK}/v1')"
    assert printable("no a-key-in-a-path here") == f"no {MASK} here"


def test_values_of_plain_data() -> None:
    hide(["1234567"])
    value = {"1234567": [1234567, "x1234567y", None], "other": {"n": 1.5}}
    assert without_secrets(value) == {MASK: [1234567, f"x{MASK}y", None], "other": {"n": 1.5}}


def test_values_of_structures_whose_bounds_are_not_checked_again() -> None:
    hide(["1234567"])
    phases = tuple(Phase("x1234567", each / 1000, (each + 1) / 1000) for each in range(1001))
    manifest = without_secrets(tables.manifest(phases=phases))
    assert {phase.name for phase in manifest.phases} == {f"x{MASK}"} and len(manifest.phases) == 1001
