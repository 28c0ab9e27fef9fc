"""Content becomes HTML: whatever strings hold, they are text, and the page runs nothing but its own scripts."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urljoin, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.untrusted import escaped
from loadgen.document.content import (
    Chart,
    Code,
    Document,
    DocumentPart,
    Items,
    Link,
    ListItem,
    Mark,
    Number,
    Section,
    Series,
    Shade,
    Table,
    Text,
)
from loadgen.document.html import DATA, render

MARKUP = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '" onload="',
    "<!--<script>",
    "&lt;b&gt;",
]
texts = st.text(max_size=12) | st.sampled_from([*MARKUP, "</title>", "\u2028\u202e\x00\ud800", "]]>", "'", "a\nb"])
tones = st.sampled_from(["plain", "good", "warning", "bad"])
series = st.builds(
    Series,
    name=texts,
    x=st.just([0, 1]),
    y=st.just([1, None]),
    kind=st.sampled_from(["line", "step", "points", "bars"]),
    labels=st.lists(texts, min_size=2, max_size=2),
    group=texts,
)
charts = st.builds(
    Chart,
    title=texts,
    x_label=texts,
    y_label=texts,
    series=st.lists(series, max_size=2),
    origin=texts,
    shades=st.lists(st.builds(Shade, start=st.just(0), end=st.just(1), label=texts), max_size=1),
    marks=st.lists(st.builds(Mark, axis=st.just("x"), value=st.just(1), label=texts), max_size=1),
    categories=st.lists(texts, max_size=2),
    sync=texts,
    note=texts,
)
cells = texts | st.builds(Number, text=texts, value=st.none() | st.floats())
blocks = st.one_of(
    st.builds(Text, text=texts, tone=tones),
    st.builds(Items, items=st.lists(st.builds(ListItem, head=texts, text=texts, advice=texts, tone=tones), max_size=2)),
    st.builds(Code, text=texts),
    st.builds(
        Table,
        headers=st.lists(texts, max_size=2),
        rows=st.lists(st.lists(cells, max_size=2), max_size=2),
        caption=texts,
        folded=st.booleans(),
    ),
    charts,
)
sections = st.builds(Section, id=texts, title=texts, blocks=st.lists(blocks, max_size=3))
pages = st.builds(
    Document, title=texts, verdict=texts, sections=st.lists(sections, max_size=3), origin=texts, footer=texts
)


class Parsed(HTMLParser):
    """The tags of a file with the names of their attributes, its text outside of scripts and styles, and those."""

    def __init__(self, file: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, ...]] = []
        self.attributes: list[dict[str, str | None]] = []
        self.text = ""
        self.raw: list[tuple[str, str]] = []
        self.feed(file)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, *(name for name, _ in attributes)))
        self.attributes.append({"": tag, **dict(attributes)})
        if tag in ("script", "style"):
            self.raw.append((tag, ""))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style") and self.cdata_elem:
            self.raw[-1] = (self.raw[-1][0], self.raw[-1][1] + data)
        else:
            self.text += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [found for found in self.attributes if found[""] == tag]

    @property
    def charts(self) -> list[dict[str, Any]]:
        return json.loads(self.raw[1][1])


def of(*content: Any) -> Parsed:
    return Parsed(render(Document(title="t", verdict="v", sections=[Section(id="s", title="s", blocks=content)])))


def replaced(value: Any) -> Any:
    """The content with a harmless string for each that is not empty."""
    if isinstance(value, str):
        return "x" if value else ""
    if isinstance(value, list):
        return [replaced(item) for item in value]
    if not isinstance(value, DocumentPart):
        return value
    kept = ("tone", "kind", "axis")
    fields = {name: getattr(value, name) for name in value.__struct_fields__}
    return type(value)(**{name: item if name in kept else replaced(item) for name, item in fields.items()})


def visible(value: Any) -> list[str]:
    """The strings of the content that stand in the text of the file."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for item in value for text in visible(item)]
    if not isinstance(value, DocumentPart):
        return []
    hidden = ("id", "tone", "series", "shades", "marks", "categories", "sync")
    return [text for name in value.__struct_fields__ if name not in hidden for text in visible(getattr(value, name))]


def strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.values() for text in strings(item)]
    return [text for item in value for text in strings(item)] if isinstance(value, list) else []


@settings(max_examples=150, deadline=None)
@given(pages)
def test_strings_are_text_and_never_markup(page: Document) -> None:
    parsed, harmless = Parsed(render(page)), Parsed(render(replaced(page)))
    assert parsed.tags == harmless.tags
    assert [tag for tag, _ in parsed.raw] == ["style", "script", "script", "script"]
    assert [block for k, block in enumerate(parsed.raw) if k != 1] == [b for k, b in enumerate(harmless.raw) if k != 1]
    shown = "".join(parsed.text.split())
    for text in visible(page):
        assert "".join("\n".join(map(escaped, text.split("\n"))).split()) in shown
    assert all(text.isprintable() for text in strings(parsed.charts))
    assert all(char.isprintable() or char == "\n" for char in parsed.text)


@settings(max_examples=100, deadline=None)
@given(texts)
def test_text_is_shown_as_it_is(text: str) -> None:
    parsed = of(Code(text=f"<{text}>"), Table(headers=["h"], rows=[[f"[{text}]"]], caption="c"))
    lines = "\n".join(map(escaped, text.split("\n")))
    assert f"<{lines}>" in parsed.text and f"[{lines}]" in parsed.text
    chart = of(Chart(title=f"[{text}]", x_label="x", y_label="y", series=[Series(name=text, x=[0], y=[0])])).charts[0]
    assert (chart["title"], chart["series"][0]["name"]) == (f"[{escaped(text)}]", escaped(text))


def test_the_policy_names_what_is_in_the_file() -> None:
    parsed = of()
    policy = next(meta["content"] for meta in parsed.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    directives = dict(part.strip().split(" ", 1) for part in (policy or "").split(";"))
    (_, style), (_, data), *scripts = parsed.raw
    digests = [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for _, text in scripts]
    assert directives["script-src"].split() == digests and data == "[]"
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert directives["style-src"] == f"'sha256-{digest}'"
    assert directives["default-src"] == directives["base-uri"] == directives["form-action"] == "'none'"
    assert "unsafe" not in (policy or "")
    assert not {"style", "onclick", "src"} & {name for tag in parsed.tags for name in tag[1:]}


def test_the_library_comes_with_its_licence() -> None:
    _, _, (_, uplot), (_, ours) = of().raw
    assert "Copyright (c) 2022 Leon Sorokin" in uplot and "(v1.6" in uplot
    assert "innerHTML" not in ours and "eval(" not in ours
    for path in DATA.iterdir():  # a browser ends a script at these
        assert not re.search(r"<!--|<script|</s", path.read_text(encoding="utf-8"), re.IGNORECASE)


@pytest.mark.parametrize("href", ["run-1/report.html", "../a/b c.html", "#numbers", "./a:b/c", "ü%41?.html", "a#b"])
def test_links_lead_to_files_beside_the_page(href: str) -> None:
    (link,) = of(Table(headers=["h"], rows=[[Link(text="t", href=href)]])).all("a")
    whole = urlsplit(urljoin("file:///base/page/report.html", link["href"] or ""))
    assert (whole.scheme, whole.netloc, whole.query) == ("file", "", "")
    assert bool(whole.fragment) == href.startswith("#")


@pytest.mark.parametrize(
    "href",
    [
        "javascript:alert(1)", "JavaScript:alert(1)", "java\tscript:alert(1)", " javascript:alert(1)",
        "data:text/html,x", "http://example.invalid", "//example.invalid/a",
        "/etc/passwd", "\\\\example.invalid\\a", "a\\b", "", "\udc80",
    ],
)  # fmt: skip
def test_other_links_are_text(href: str) -> None:
    content = (
        Table(headers=["h"], rows=[[Link(text="text of the link", href=href)]]),
        Chart(title="c", x_label="x", y_label="y", series=[Series(name="s", x=[0], y=[0], hrefs=[href])]),
    )
    parsed = of(*content)
    assert not parsed.all("a") and "text of the link" in parsed.text
    assert parsed.charts[0]["series"][0]["hrefs"] == [""]


@settings(deadline=None)
@given(
    st.text(max_size=20)
    | st.sampled_from(["javascript:", "http:", "//", "\\"]).flatmap(lambda p: st.text().map(p.__add__))
)
def test_no_link_leaves_the_folder_of_files(href: str) -> None:
    for link in of(Table(headers=["h"], rows=[[Link(text="t", href=href)]])).all("a"):
        url = link["href"] or ""
        assert re.fullmatch(r"[\w.~%/#-]*:?[\w.~%/#:-]*", url, re.ASCII)
        whole = urlsplit(urljoin("file:///base/page/report.html", url))
        assert (whole.scheme, whole.netloc) == ("file", "")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_of_tables_are_exact(value: float) -> None:
    (cell,) = of(Table(headers=["h"], rows=[[Number(text="about", value=value)]])).all("td")
    assert float(cell["data-value"] or "") == value


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_unknown_numbers_have_no_value(value: float | None) -> None:
    (cell,) = of(Table(headers=["h"], rows=[[Number(text="-", value=value)]])).all("td")
    assert "data-value" not in cell


@given(st.lists(st.none() | st.floats(), min_size=1, max_size=5))
def test_numbers_of_charts_have_seven_digits(values: list[float | None]) -> None:
    known = [value is not None and math.isfinite(value) for value in values]
    parsed = of(Chart(title="c", x_label="", y_label="", series=[Series(name="s", x=range(len(values)), y=values)]))
    assert len(parsed.charts) == any(known)
    assert ("no data" in parsed.text) is not any(known)
    for chart in parsed.charts:
        for here, there, finite in zip(values, chart["series"][0]["y"], known, strict=True):
            assert there == (pytest.approx(here, rel=1e-6) if finite else None)


def test_a_chart_carries_what_is_not_its_default() -> None:
    chart = Chart(
        title="c", x_label="x", y_label="y", series=[Series(name="s", x=[0], y=[1])], log=["x"], from_zero=False
    )
    plain = {"title": "c", "x_label": "x", "y_label": "y", "log": ["x"], "from_zero": False}
    assert of(chart).charts == [{**plain, "series": [{"name": "s", "x": [0], "y": [1]}]}]


def test_a_reader_who_sees_no_picture_has_the_numbers() -> None:
    series = [
        Series(name="run A", x=[1, 2, 30], y=[0.5, None, 1], hrefs=["a.html", "", "b.html"], labels=["a", "", "b"])
    ]
    parsed = of(Chart(title="ttft", x_label="ms", y_label="fraction", series=series, origin="emulated"))
    (plot,) = [found for found in parsed.all("div") if found.get("role") == "img"]
    assert plot["aria-label"] == "ttft (emulated): fraction over ms from 1 to 30; run A"
    assert [float(cell["data-value"] or "") for cell in parsed.all("td")[1:]] == [2, 1, 30, 0.5, 1]
    assert [link["href"] for link in parsed.all("a")] == ["a.html", "b.html"]


def test_an_empty_page_is_small() -> None:
    assert len(render(Document(title="", verdict="", sections=[])).encode()) < 120_000


def test_an_item_without_a_head_is_its_text_alone() -> None:
    text = render(Document(title="t", verdict="", sections=[Section("s", "S", [Items([ListItem("", "a fact")])])]))
    assert '<ul class="items"><li class="plain">a fact</li></ul>' in text
