"""How options are declared: what a command offers of those that it inherits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
from cyclopts import App, Group, Parameter

from loadgen.option_types import Whole, is_host, names, offers, option

COMMON, RARE = Group("Common", sort_key=1), Group("A rare group", sort_key=2)


@dataclass(frozen=True, kw_only=True)
class All:
    wanted: Annotated[Whole, option(COMMON, "The usual one.")] = 1
    switch: Annotated[bool, option(COMMON, "On or off.")] = False
    other: Annotated[Whole, option(RARE, "Of no use here.")] = 2


@offers("wanted", "switch")
class Some(All):
    pass


def app() -> App:
    app = App(result_action="return_value")

    @app.command
    def some(options: Annotated[Some | None, Parameter(name="*")] = None) -> Some:
        return options or Some()

    @app.command(name="all")
    def all_(options: Annotated[All | None, Parameter(name="*")] = None) -> All:
        return options or All()

    return app


def test_help_shows_what_is_offered_and_no_empty_group(capsys: pytest.CaptureFixture[str]) -> None:
    app()(["some", "--help"])
    page = capsys.readouterr().out
    assert "--wanted" in page and "--switch" in page and "--no-switch" not in page
    assert "--other" not in page and "A rare group" not in page
    app()(["all", "--help"])
    page = capsys.readouterr().out
    assert page.index("Common") < page.index("A rare group") < page.index("--other")


def test_the_others_are_understood() -> None:
    assert app()(["some", "--other", "1e3", "--wanted", "5"]) == Some(other=1000, wanted=5)
    assert isinstance(app()(["some"]), All)


def test_names_are_in_order() -> None:
    assert names(Some) == names(All) == ("wanted", "switch", "other")


LONGEST = ".".join(["a" * 49] * 5) + ".abc"  # 253 characters


@pytest.mark.parametrize(
    "text",
    ["localhost", "h", "gpu-0.example.", "vllm_server", "_x", "127.0.0.1", "xn--bcher-kva.example", "::1",
     "fe80::1%eth0", "a" * 63, LONGEST],
)  # fmt: skip
def test_hosts(text: str) -> None:
    assert is_host(text)


@pytest.mark.parametrize(
    "text",
    ["", ".", "-", "a..b", ".a", "a-", "-a.b", "a b", "a/b", "b\u00fccher", "\u0661.0.0.1", "a%20b", "[::1]", "::1::",
     "1:2", "$(id)", "a\n", "a" * 64, LONGEST + "d"],
)  # fmt: skip
def test_what_is_no_host(text: str) -> None:
    assert not is_host(text)
