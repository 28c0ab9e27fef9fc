"""A document as text: nothing is lost but what is a detail, and nothing is obeyed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.document import html, markdown, terminal
from loadgen.document.content import (
    Chart,
    Code,
    Column,
    Document,
    Items,
    Link,
    ListItem,
    Number,
    Section,
    Series,
    Table,
    Text,
)

HOSTILE = "\x1b[2J\u202e<img src=x> | `$x$`"


def document(*blocks: Any, **changes: Any) -> Document:
    return Document(title="A result", verdict="It is so.", sections=[Section("s", "Numbers", blocks)], **changes)


def made_up(heights_m: dict[str, float]) -> Document:
    """A kind of result that nobody has: all that a new one takes is this function."""
    cells = [[name, Number(f"{height:.1f}", height)] for name, height in heights_m.items()]
    curve = Series("height", list(range(len(heights_m))), list(heights_m.values()), kind="bars")
    chart = Chart("Heights", "", "height (m)", [curve], categories=list(heights_m))
    return Document(
        title="Three towers",
        verdict="All of them stand.",
        tone="good",
        sections=[
            Section("heights", "Heights", [Table(["tower", "m"], cells), chart], ["heights.png"]),
            Section(
                "doubts", "Findings", [Items([ListItem("warning LEANS", "Pisa leans.", "Look again.", "warning")])]
            ),
        ],
    )


def test_a_made_up_kind_of_result_needs_no_renderer(tmp_path: Any) -> None:
    """Its page, its Markdown, its text and its figure come of one function."""
    from loadgen.document import files

    towers = made_up({"Pisa": 55.9, "Eiffel": 330.0, "Babel": 91.5})
    files.write(tmp_path / "towers.html", towers, "towers.md", figures=True)
    text = terminal.render(towers, 80)
    for shown in (text, (tmp_path / "towers.md").read_text(), (tmp_path / "towers.html").read_text()):
        for word in ("Three towers", "All of them stand.", "Pisa", "55.9", "330.0", "91.5", "LEANS", "Look again."):
            assert word in shown, word
    assert "![Heights](heights.png)" in (tmp_path / "towers.md").read_text()
    assert (tmp_path / "heights.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_is_aligned_under_its_groups() -> None:
    columns = [
        Column("cell", left=True),
        Column("A", "tokens/s"),
        Column("B", "tokens/s"),
        Column("x", "extra", optional=True),
    ]
    table = Table(columns, [["one", "1", "20", "9"], ["two", Number("300", 300.0), "4", "8"]], notes=["a note"])
    assert [*terminal.table(table, 80)][:5] == [
        "      tokens/s  extra", "cell    A    B      x", "one     1   20      9", "two   300    4      8", "",
    ]  # fmt: skip
    narrow = [*terminal.table(table, 16)]
    assert (
        "extra" not in narrow[0]
        and "Left out for want of" in " ".join(" ".join(narrow).split())
        and "9" not in narrow[2]
    )
    rows = [line for line in markdown.table(table) if line.startswith("|")]
    assert rows[0] == "| cell | tokens/s<br>A | tokens/s<br>B | extra<br>x |" and rows[1] == "|:---|---:|---:|---:|"
    page = html.render(document(table))
    assert "tokens/s\nA" in page and "[1] a note" in page and 'data-value="300.0"' in page


def test_columns_of_text_on_the_left_are_one_on_a_page() -> None:
    columns = [Column("cell", left=True), Column("pass", left=True), Column("ms")]
    page = html.render(document(Table(columns, [["one", "forward", Number("5", 5.0)]])))
    assert "<td>one, forward</td>" in page and 'scope="col">cell, pass<' in page


def test_empty_columns_and_sections_are_left_out() -> None:
    assert [column.head for column in Table(["a", "b", "c"], [["x", "", Number("1")]]).without_empty().columns] == [
        "a",
        "c",
    ]
    shown = document(Text("a fact"))
    for render in (markdown.render, lambda of: terminal.render(of, 80)):
        assert "Numbers" in render(shown) and "Numbers" not in render(document())
    detail = Document("t", "v", [Section("s", "Numbers", [Text("a fact")], detail=True)])
    assert "a fact" not in terminal.render(detail, 80)
    assert "a fact" in markdown.render(detail) and "a fact" in html.render(detail)


@pytest.mark.parametrize(("origin", "first"), [("emulated", "EMULATED"), ("predicted", "EMULATED (predicted)")])
def test_what_no_real_server_answered_says_so_first(origin: str, first: str) -> None:
    for text in (markdown.render(document(origin=origin)), terminal.render(document(origin=origin), 80)):
        assert f"{first}: emulated hardware, no real server" in text


texts = st.text() | st.just(HOSTILE)
cells = st.one_of(texts, st.builds(Number, texts), st.builds(Link, texts, texts))


@given(texts, st.lists(st.lists(cells, min_size=2, max_size=2), max_size=3), st.integers(20, 200))
def test_nothing_is_obeyed(text: str, rows: list[list[Any]], width: int) -> None:
    blocks = [
        Text(text),
        Code(text),
        Items([ListItem(text, text, text)]),
        Table([text, text], rows, text, below=[text]),
    ]
    shown = document(*blocks, footer=text)
    for lines in (terminal.render(shown, width), markdown.render(shown)):
        assert all(char == "\n" or char.isprintable() for char in lines)
    assert "<img" not in "".join(line for line in markdown.render(shown).split("\n") if not line.startswith("      "))
