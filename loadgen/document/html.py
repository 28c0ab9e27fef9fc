"""From a page's content to one HTML file that asks no network for anything.

Text and tables are static HTML, so the page reads without JavaScript; `data/page.js` draws the charts with uPlot from a
block of JSON. Everything in the content is data: it is escaped wherever it stands, and what does not print becomes an
escape such as \\x1b. A Content-Security-Policy lets nothing run and nothing style but the blocks written here, by their
hashes. Numbers of charts have 7 significant digits; those of tables are exact in `data-value`.

This module must never write a string of the content unescaped, nor a link to anything but a file by its relative path.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import assert_never
from urllib.parse import quote

import msgspec

from backends.untrusted import escaped
from loadgen.document.content import (
    Block,
    Cell,
    Chart,
    Code,
    Document,
    DocumentPart,
    Items,
    Link,
    ListItem,
    Number,
    Section,
    Series,
    Table,
    Text,
    Tile,
    cell_text,
)

DATA = Path(__file__).parent / "data"
SCHEME = re.compile(r"[^/#]*:")  # of a URL; a path with a colon in its first folder begins with ./
Shown = Sequence[tuple[Series, Sequence[tuple[float, float]]]]  # the curves of a chart that have points, with those
IN_SCRIPT = {char: f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


def render(page: Document) -> str:
    """The file's text."""
    style, *scripts = _inline()
    charts = [block for section in page.sections for block in section.blocks if isinstance(block, Chart)]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy(style, scripts)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{_text(page.title)}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{_text(page.title)}{_origin(page.origin)}</h1>
{_toned("p", page.tone, _text(page.verdict) + _doubt(page.doubt), "verdict")}
{_tiles(page.tiles)}
{_navigation(page.sections)}
</header>
<main>
{"".join(map(_section, page.sections))}</main>
<footer>{_text(page.footer)}</footer>
<script type="application/json">{_json(charts)}</script>
{"".join(f"<script>{script}</script>" for script in scripts)}
</body>
</html>
"""


@functools.cache
def _inline() -> tuple[str, ...]:
    """The style of the page, then its scripts: uPlot with its licence, and ours."""
    read = {path.name: path.read_text(encoding="utf-8") for path in DATA.iterdir()}
    licensed = f"/*! uPlot\n\n{read['uPlot.LICENSE'].strip()}\n*/\n"
    return read["uPlot.min.css"] + read["page.css"], licensed + read["uPlot.iife.min.js"], read["page.js"]


def _policy(style: str, scripts: Iterable[str]) -> str:
    scripts = " ".join(map(_hash, scripts))
    return (
        f"default-src 'none'; script-src {scripts}; style-src {_hash(style)}; img-src 'none'; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _hash(block: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()}'"


def _text(text: str) -> str:
    """Text as HTML, also in an attribute; line breaks stay."""
    return html.escape("\n".join(map(escaped, text.split("\n"))))


def _href(href: str) -> str | None:
    """A relative path or `#ID` as a URL; None for everything else."""
    if not href or SCHEME.match(href) or href.startswith("/") or "\\" in href or not href.isprintable():
        return None
    fragment = href.startswith("#")
    return "#" * fragment + quote(href[fragment:], safe="/")


def _origin(origin: str) -> str:
    return f' <span class="origin">{_text(origin)}</span>' if origin else ""


def _toned(tag: str, tone: str, inner: str, name: str = "") -> str:
    names = f"{name} {_text(tone)}".strip()
    return f'<{tag} class="{names}">{inner}</{tag}>' if inner else ""


def _anchor(identity: str) -> str:
    return quote(identity, errors="backslashreplace")


def _navigation(sections: Sequence[Section]) -> str:
    items = "".join(f'<li><a href="#{_anchor(s.id)}">{_text(s.title)}</a></li>' for s in sections)
    return f'<nav aria-label="Sections"><ul>{items}</ul></nav>' if len(sections) > 1 else ""


def _doubt(doubt: str) -> str:
    return f'<span class="warning">, {_text(doubt)}</span>' if doubt else ""


def _tiles(tiles: Sequence[Tile]) -> str:
    shown = "".join(f'<li class="tile">{_tile(tile)}</li>' for tile in tiles)
    return f'<ul class="tiles" aria-label="The main numbers">{shown}</ul>' if tiles else ""


def _tile(tile: Tile) -> str:
    values = "".join(
        f"<span><b>{_text(number.text)}</b>{f' {_text(name)}' if name else ''}</span>" for name, number in tile.values
    )
    return f'{_link(Link(tile.label, tile.href))}<span class="values">{values}</span>'


def _section(section: Section) -> str:
    return f"""<section id="{_anchor(section.id)}">
<h2>{_text(section.title)}</h2>
{"".join(_blocks(section.blocks))}</section>
"""


def _blocks(blocks: Iterable[Block]) -> Iterator[str]:
    """The blocks as HTML; charts in a row stand side by side where there is room."""
    for are_charts, group in itertools.groupby(blocks, lambda block: isinstance(block, Chart)):
        yield '<div class="charts">\n' if are_charts else ""
        yield from map(_block, group)
        yield "</div>\n" if are_charts else ""


def _block(block: Block) -> str:
    match block:
        case Text():
            return _toned("p", block.tone, _text(block.text)) + "\n"
        case Items():
            return f'<ul class="items">{"".join(map(_item, block.items))}</ul>\n'
        case Code():
            return f'<div class="code"><pre tabindex="0"><code>{_text(block.text)}</code></pre></div>\n'
        case Table():
            return _table(block)
        case Chart():
            return _figure(block)
        case _:
            assert_never(block)


def _item(item: ListItem) -> str:
    head = f"<strong>{_text(item.head)}</strong> " if item.head else ""
    finding = f"{head}{_text(item.text)}"
    if item.advice or (item.head and item.tone != "plain"):  # folded to a line; the whole of it is behind that
        advice = f'<p class="advice">{_text(item.advice)}</p>' if item.advice else ""
        finding = f'<details class="finding"><summary>{finding}</summary>{advice}</details>'
    return _toned("li", item.tone, finding)


def _table(table: Table) -> str:
    texts = next((at for at, column in enumerate(table.columns) if not column.left), 0)
    joined = max(texts, 1)  # columns of text on the left are one here
    heads = ["\n".join(filter(None, (column.group, column.head))) for column in table.columns]
    heads = [", ".join(heads[:joined]), *heads[joined:]]
    headers = "".join(f'<th scope="col">{_text(head)}</th>' for head in heads)
    rows = "".join(f"<tr>{''.join(map(_cell, _joined(row, joined)))}</tr>\n" for row in table.rows)
    names = "scroll numeric" if texts else "scroll"
    label = _text(table.caption or ", ".join(heads))
    caption = "" if table.folded else _toned("p", "", _text(table.caption), "caption")
    below = [*table.below, *(f"[{number}] {note}" for number, note in enumerate(table.notes, 1))]
    text = (
        f'{caption}<div class="{names}" role="group" aria-label="{label}" tabindex="0"><table>'
        f"<thead><tr>{headers}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n"
    ) + "".join(f"{_toned('p', 'plain', _text(sentence))}\n" for sentence in below)
    return _folded(_text(table.caption or "Table"), text) if table.folded else text


def _joined(row: Sequence[Cell], count: int) -> list[Cell]:
    """The first `count` cells as one."""
    first = row[0] if count == 1 and row else ", ".join(filter(None, map(cell_text, row[:count])))
    return [first, *row[count:]] if row else []


def _folded(summary: str, inner: str) -> str:
    return f"<details><summary>{summary}</summary>\n{inner}</details>\n"


def _cell(cell: Cell) -> str:
    match cell:
        case Link():
            return f"<td>{_link(cell)}</td>"
        case Number():
            value = ""
            if cell.value is not None and math.isfinite(cell.value):
                value = f' data-value="{float(cell.value)!r}"'  # the repr of numpy's floats is no number
            return f"<td{value}>{_text(cell.text)}</td>"
        case str():
            return f"<td>{_text(cell)}</td>"
        case _:
            assert_never(cell)


def _link(link: Link) -> str:
    href = _href(link.href)
    return _text(link.text) if href is None else f'<a href="{href}">{_text(link.text)}</a>'


def _figure(chart: Chart) -> str:
    """The frame in which the script draws, and the chart in numbers for those who do not see it."""
    shown = [(series, points) for series in chart.series if (points := list(_points(series)))]
    plot = f'<div class="plot" role="img" aria-label="{_summary(chart, shown)}"></div>\n'
    note = f'<p class="note">{_text(chart.note)}</p>\n' if chart.note else ""
    anchor = f' id="{_anchor(chart.id)}"' if chart.id else ""
    return f"""<figure{anchor}{' class="empty"' if not shown else ""}>
<figcaption>{_text(chart.title)}{_origin(chart.origin)}</figcaption>
<p class="label-y">{_text(chart.y_label)}</p>
{plot if shown else '<p class="no-data">no data</p>'}
<div class="below"><p class="readout"></p><p class="label-x">{_text(chart.x_label)}</p></div>
{note}{_in_numbers(shown) if shown else ""}</figure>
"""


def _summary(chart: Chart, shown: Shown) -> str:
    xs = [x for _, points in shown for x, _ in points]
    names = ", ".join(series.name for series, _ in shown if series.name)
    origin = f" ({chart.origin})" if chart.origin else ""
    across = f" from {min(xs):.4g} to {max(xs):.4g}" if xs and not chart.categories else ""
    return _text(
        f"{chart.title}{origin}: {chart.y_label} over {chart.x_label}{across}" + (f"; {names}" if names else "")
    )


def _in_numbers(shown: Shown) -> str:
    """The range of each curve, and the links of its points."""
    rows: list[list[Cell]] = []
    for series, points in shown:
        ranges = [(min(axis), max(axis)) for axis in zip(*points, strict=True)]
        numbers = [Number(text=f"{value:.4g}", value=value) for bounds in ranges for value in bounds]
        rows.append([series.name, Number(text=str(len(points)), value=len(points)), *numbers])
    headers = ["curve", "points", "least x", "greatest x", "least y", "greatest y"]
    links = [
        Link(text=text or href, href=href)
        for series, _ in shown
        for href, text in itertools.zip_longest(series.hrefs or (), series.labels or ())
        if href
    ]
    listed = f'<ul class="links">{"".join(f"<li>{_link(link)}</li>" for link in links)}</ul>\n' if links else ""
    return _folded("In numbers", _table(Table(headers=headers, rows=rows)) + listed)


def _points(series: Series) -> Iterator[tuple[float, float]]:
    """The points of a curve that are numbers on both axes."""
    for x, y in zip(series.x, series.y, strict=True):
        if x is not None and y is not None and math.isfinite(x) and math.isfinite(y):
            yield x, y


def _json(charts: Sequence[Chart]) -> str:
    """The charts that have points, as the script reads them: JSON without a character that ends a script."""
    plain = [_plain(chart) for chart in charts if any(any(True for _ in _points(series)) for series in chart.series)]
    text = msgspec.json.encode(plain).decode()
    return re.sub("[<>&\u2028\u2029]", lambda match: IN_SCRIPT[match[0]], text)


def _plain(value: object, key: str = "") -> object:
    """A part of a page as JSON has it: fields by name without those that have their default, no text that does not
    print, no number that is not finite."""
    match value:
        case DocumentPart():
            fields = msgspec.structs.fields(value)
            return {
                field.name: _plain(getattr(value, field.name), field.name)
                for field in fields
                if getattr(value, field.name) != field.default
            }
        case str():
            return (_href(value) or "") if key == "hrefs" else escaped(value)
        case bool() | None:
            return value
        case float() | int():
            return _short(value)
        case Sequence():
            return [_short(item) if type(item) is float else _plain(item, key) for item in value]
    raise TypeError(value)


def _short(value: float) -> float | None:
    return float(f"{value:.7g}") if math.isfinite(value) else None
