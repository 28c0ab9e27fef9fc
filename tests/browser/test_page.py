"""A page with every kind of block, in a real browser."""

from __future__ import annotations

import math
import re
from pathlib import Path
from random import Random

import pytest
from selenium.webdriver.common.keys import Keys

from backends.untrusted import escaped
from loadgen.document.content import Block, Chart, Document, Section, Series, Table
from loadgen.document.html import DATA, render
from tests.browser import pages
from tests.browser.chromium import SCHEMES, WIDTHS, Chromium
from tests.support.waiting import until

pytestmark = pytest.mark.browser


def values(readout: str) -> list[float]:
    return [float(text.replace(",", "")) for text in re.findall(r"= ([\d,.]+)", readout)]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wrong(chromium: Chromium, everything: Path, width: int, scheme: str) -> None:
    chromium.open(everything, width, scheme)
    chromium.draw_all()
    chromium.unfold()
    assert chromium.errors() == []
    assert chromium.requests() == [everything.as_uri()]
    assert chromium.overflow_px() <= 0
    assert chromium.axe() == []


def test_faults_are_seen(chromium: Chromium, everything: Path) -> None:
    """The four checks above can fail."""
    chromium.open(everything, 360)
    chromium.script("""
        const wide = document.createElement("div");
        wide.style.width = "2000px";
        wide.textContent = "wide";
        const button = document.createElement("button");
        const image = document.createElement("img");
        image.src = "https://example.invalid/a.png";
        document.body.append(wide, button, image);
        fetch("https://example.invalid/b").catch(() => 0);
    """)
    assert chromium.overflow_px() > 1000
    assert any(fault.startswith("button-name") for fault in chromium.axe())
    assert sum("Content Security Policy" in message for message in chromium.errors()) >= 2


def test_nothing_runs_but_the_scripts_of_the_page(chromium: Chromium, everything: Path) -> None:
    chromium.open(everything)
    chromium.script("""
        for (const act of [
            () => { document.body.innerHTML += "<img src=x onerror='window.ran = 1'>"; },
            () => { const script = document.createElement("script"); script.text = "window.ran = 1";
                    document.body.append(script); },
            () => { document.body.setAttribute("onclick", "window.ran = 1"); document.body.click(); },
        ]) try { act(); } catch {}
    """)
    assert chromium.script("return window.ran") is None
    assert chromium.errors()


@pytest.mark.always
def test_strings_are_no_markup(chromium: Chromium, everything: Path) -> None:
    chromium.open(everything)
    chromium.draw_all()
    assert chromium.all("img") == []
    assert pages.NASTY not in chromium.driver.title and escaped(pages.NASTY) in chromium.driver.title
    assert escaped(pages.NASTY) in chromium.chart("Tokens per second and GPU").press(Keys.END)
    schemes = {link.get_attribute("href").split(":")[0] for link in chromium.all("a")}
    assert schemes == {"file"}


@pytest.mark.always
def test_numbers_are_exact(chromium: Chromium, everything: Path) -> None:
    chromium.open(everything)
    assert chromium.numbers("#numbers td[data-value]") == [69.31471805599453]


@pytest.mark.parametrize("up", [0.1, 0.25, 0.5, 0.9, 0.95, 0.99])
def test_hover_reads_the_quantile(chromium: Chromium, everything: Path, up: float) -> None:
    chart = chromium.open(everything).chart("Time to first token")
    readout = chart.hover(0.4, up)
    found = re.match(r"p([\d.]+): run A = ([\d.,]+) ms\s+run B = ([\d.,]+) ms$", readout)
    assert found, readout
    q = float(found[1]) / 100
    assert q == pytest.approx(up, abs=0.0101)
    assert values(readout) == [pytest.approx(-scale * math.log(1 - q), rel=0.01) for scale in (100, 250)]


def opened(chromium: Chromium, folder: Path, *blocks: Block) -> Chromium:
    page = Document(title="A page", verdict="", sections=[Section(id="all", title="All", blocks=blocks)])
    path = folder / "page.html"
    path.write_text(render(page), encoding="utf-8")
    return chromium.open(path)


def test_a_step_is_read_as_the_first_x_with_as_much(chromium: Chromium, tmp_path: Path) -> None:
    steps = Series(name="all", x=[1, 2, 3, 4], y=[0.25, 0.5, 0.75, 1], kind="step")
    chart = Chart(title="cdf", x_label="itl (ms)", y_label="fraction", series=[steps], quantile=True)
    drawn = opened(chromium, tmp_path, chart).chart("cdf")
    assert drawn.press(Keys.ARROW_UP) == "p50 = 2 ms"
    assert drawn.press(Keys.ARROW_UP) == "p51 = 3 ms"
    assert drawn.press(Keys.HOME) == "p0 = 1 ms"
    assert drawn.press(Keys.END) == "p100 = 4 ms"


def test_points_between_gaps_are_drawn(chromium: Chromium, tmp_path: Path) -> None:
    """A line has no length there; each has a mark."""
    xs = list(range(40))
    ys: list[float | None] = [5.0 if x == 20 else None for x in xs]
    full: list[float | None] = [None if x == 20 else 1.0 for x in xs]
    series = [Series(name="some", x=xs, y=ys), Series(name="others", x=xs, y=full, colour=1)]
    chart = opened(chromium, tmp_path, Chart(title="c", x_label="s", y_label="W", series=series)).chart("c")
    blue = """const canvas = arguments[0].querySelector("canvas");
        const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        let blue = 0;
        for (let i = 0; i < data.length; i += 4) blue += data[i] < 40 && data[i + 2] > 150 && data[i + 3] > 200;
        return blue"""
    assert chromium.script(blue, chart.figure) > 5
    chart.button("some").click()
    assert chromium.script(blue, chart.figure) == 0


def test_any_string_is_the_same_string_in_a_browser(chromium: Chromium, tmp_path: Path) -> None:
    """What a parser of HTML in the tests might overlook."""
    random = Random(25)
    parts = [
        "<",
        ">",
        "&",
        '"',
        "'",
        "</script>",
        "<!--",
        "-->",
        "]]>",
        "<svg onload=alert(1)>",
        "&lt",
        "&#60;",
        "`",
        "\\",
    ]
    parts += [
        "</td>",
        "</table>",
        "</title>",
        "<a href=",
        "\x00",
        "\x1b[2J",
        "\u202e",
        "\u2028",
        "\r",
        "\t",
        "é日😀",
        "${1}",
    ]
    texts = ["".join(random.choices(parts, k=5)) for _ in range(300)]
    series = [Series(name=text, x=[0], y=[number], labels=[text]) for number, text in enumerate(texts[:40])]
    blocks = [
        Table(headers=["text"], rows=[[f"[{text}]"] for text in texts]),
        Chart(title="names", x_label="x", y_label="y", series=series),
    ]
    opened(chromium, tmp_path, *blocks)
    cells = chromium.script("return [...document.querySelectorAll('#all > .scroll td')].map(cell => cell.textContent)")
    assert cells == [f"[{escaped(text)}]" for text in texts]
    chromium.chart("names")
    keys = chromium.script("return [...document.querySelectorAll('.key')].map(key => key.textContent)")
    assert keys == [escaped(text) for text in texts[:40]]
    assert chromium.errors() == [] and chromium.overflow_px() <= 0


def test_keys_walk_over_quantiles(chromium: Chromium, everything: Path) -> None:
    chart = chromium.open(everything).chart("Time to first token")
    plot = chart.find(".plot")
    assert plot.get_attribute("role") == "slider" and "Time to first token" in plot.get_attribute("aria-label")
    assert chart.press(Keys.ARROW_RIGHT).startswith("p50: run A = 69.31 ms")
    assert chart.press(*[Keys.ARROW_UP] * 49).startswith("p99: run A = 460.")
    assert chart.press(Keys.ARROW_LEFT).startswith("p98:")
    assert plot.get_attribute("aria-valuetext").startswith("p98:")
    assert chart.press(Keys.HOME).startswith("p0:")
    assert chart.press(Keys.END).startswith("p100")
    outline = chromium.script("return getComputedStyle(arguments[0]).outlineStyle", plot)
    assert outline == "solid"


def test_keys_walk_over_x(chromium: Chromium, everything: Path) -> None:
    chart = chromium.open(everything).chart("Rate")
    assert chart.press(Keys.HOME).startswith(
        "time since the start = 0 s, ramp: offered = 8 requests/s finished = 7.5 requests/s"
    )
    assert chart.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT).startswith("time since the start = 2 s")
    assert chart.press(Keys.END).startswith("time since the start = 120 s, drain:")
    assert chromium.chart("Power").readout.startswith("time since the start = 120 s, drain: power GPU 0 =")


def test_the_legend_switches_curves(chromium: Chromium, everything: Path) -> None:
    chart = chromium.open(everything).chart("Time to first token")
    before = chart.pixels()
    chart.button("run A").click()
    assert chart.button("run A").get_attribute("aria-pressed") == "false"
    assert chart.pixels() != before
    assert re.match(r"p50: run B = 173.\d ms$", chart.hover(0.5, 0.5))
    chart.button("run B").click()
    assert "run" not in chart.hover(0.5, 0.4)
    for name in ("run A", "run B"):
        chart.button(name).click()
    until(lambda: chart.pixels() == before)


def test_a_group_is_switched_together(chromium: Chromium, everything: Path) -> None:
    chart = chromium.open(everything).chart("Power")
    assert [key.text for key in chart.figure.find_elements("css selector", ".key")] == ["power", "model"]
    chart.button("power").click()
    readout = chart.hover(0.2, 0.5)
    assert "model = 450 [400, 500] W" in readout and "GPU" not in readout


def test_axes_become_logarithmic(chromium: Chromium, everything: Path) -> None:
    chart = chromium.open(everything).chart("Time to first token")
    linear = chart.pixels()
    button = chart.button("log x")
    assert button.get_attribute("aria-pressed") == "false"
    button.send_keys(Keys.ENTER)
    assert button.get_attribute("aria-pressed") == "true"
    until(lambda: chart.pixels() != linear)
    assert chart.hover(0.4, 0.5).startswith("p50: run A = 69.31 ms")
    button.send_keys(Keys.SPACE)
    until(lambda: button.get_attribute("aria-pressed") == "false")
    assert chromium.chart("Throughput against latency").button("log y").get_attribute("aria-pressed") == "true"


def test_zoom_and_cursor_are_shared(chromium: Chromium, everything: Path) -> None:
    chromium.open(everything)
    power = chromium.chart("Power")
    rate = chromium.chart("Rate")
    assert "offered = 9.979 requests/s" in rate.hover(0.6, 0.5)
    assert power.readout.startswith("time since the start = 72 s, steady, stall:")
    rate.drag(0.25, 0.5)
    seconds = values(power.hover(0.01, 0.5))[0], values(power.hover(0.99, 0.5))[0]
    assert seconds == (pytest.approx(30, abs=1), pytest.approx(60, abs=1))
    assert rate.button("reset zoom").is_displayed()
    power.button("reset zoom").click()
    assert values(rate.hover(0.6, 0.5))[0] == 72
    assert not any(button.is_displayed() for button in chromium.all(".reset"))


def test_points_lead_to_their_pages(chromium: Chromium, everything: Path) -> None:
    title = "Throughput against latency"
    chart = chromium.open(everything).chart(title)
    assert "rate 1" in chart.press(Keys.HOME)
    assert chart.find(".readout a").get_attribute("href") == (everything.parent / "other.html").as_uri()
    chart.press(Keys.ENTER)
    until(lambda: chromium.driver.current_url.endswith("/other.html"))
    chart = chromium.open(everything).chart(title)
    chart.press(Keys.HOME, Keys.ARROW_RIGHT, Keys.ENTER)
    until(lambda: chromium.driver.current_url.endswith("/rate%202/report.html"))
    chart = chromium.open(everything).chart(title)
    assert "rate 4" in chart.press(Keys.HOME, *[Keys.ARROW_RIGHT] * 2)
    assert chart.figure.find_elements("css selector", ".readout a") == []  # a script is nowhere to go
    place = chromium.script(
        """const dots = arguments[0].querySelectorAll(".dot"), over = arguments[0].querySelector(".u-over");
        const dot = [...dots].at(-1).getBoundingClientRect(), area = over.getBoundingClientRect();
        return [(dot.x + 4 - area.x) / area.width, (area.bottom - dot.y - 4) / area.height]""",
        chart.figure if chart.press(Keys.HOME) else None,
    )
    chart.click(*place)
    until(lambda: chromium.driver.current_url.endswith("/other.html"))


def test_bars_are_read(chromium: Chromium, everything: Path) -> None:
    chromium.open(everything)
    grouped, stacked = chromium.chart("Tokens per second and GPU"), chromium.chart("Time of a step")
    text = "7b seq 512 batch 16: ours = 15,000 [14,500, 15,500] paper = 14,100"
    assert grouped.hover(0.1, 0.5) == text == grouped.press(Keys.HOME)
    assert "paper" not in grouped.hover(0.625, 0.5)  # it has no third
    assert (
        stacked.press(Keys.END) == "cell-number-11-of-a-long-name: forward = 21 ms backward = 42 ms optimizer = 63 ms"
    )


def test_a_chart_without_points_has_no_data(chromium: Chromium, everything: Path) -> None:
    chart = chromium.open(everything).chart("KV cache")
    assert chart.find(".no-data").text == "no data"
    assert chart.figure.find_elements("css selector", "canvas, button") == []


def test_where_numbers_come_from_stands_on_the_chart(chromium: Chromium, everything: Path) -> None:
    chromium.open(everything)
    assert chromium.chart("Rate").find("figcaption .origin").text == "emulated"
    assert chromium.chart("Throughput against latency").find("figcaption .origin").text == "predicted"
    assert not chromium.chart("Power").figure.find_elements("css selector", ".origin")


def test_the_browser_knows_every_declaration_of_the_style(chromium: Chromium, everything: Path) -> None:
    """It leaves out those that it does not know, without a word."""
    style = re.sub(r"/\*.*?\*/", "", (DATA / "page.css").read_text(encoding="utf-8"), flags=re.DOTALL)
    blocks = re.findall(r"{([^{}]*)}", style)
    declarations = [line.partition(":")[::2] for block in blocks for line in block.split(";") if line.strip()]
    assert len(declarations) > 200
    supports = "return arguments[0].filter(([name, value]) => !CSS.supports(name.trim(), value.trim()))"
    assert chromium.open(everything).script(supports, declarations) == []


def test_the_scheme_changes_under_an_open_page(chromium: Chromium, everything: Path) -> None:
    chart = chromium.open(everything).chart("Rate")
    light = chart.pixels()
    chromium.scheme("dark")
    until(lambda: chart.pixels() != light)
    background = "return getComputedStyle(document.body).backgroundColor"
    assert chromium.script(background) != "rgb(255, 255, 255)"
    chromium.scheme("light")
    until(lambda: chart.pixels() == light)
    assert chromium.script(background) == "rgb(255, 255, 255)"


def test_charts_follow_the_window(chromium: Chromium, everything: Path) -> None:
    chart = chromium.open(everything, 1280).chart("Rate")
    chromium.resize(360)
    width = "return arguments[0].querySelector('canvas').clientWidth"
    until(lambda: 0 < chromium.script(width, chart.figure) < 360)
    assert chromium.overflow_px() <= 0
    assert chart.hover(0.6, 0.5).startswith("time since the start = 72 s")


def test_charts_are_drawn_when_they_come_into_view(chromium: Chromium, everything: Path) -> None:
    chromium.open(everything, height=400)
    assert len(chromium.all("canvas")) < len(chromium.all(".plot"))
    chromium.draw_all()
    assert len(chromium.all("canvas")) == len(chromium.all(".plot"))


def test_commands_are_copied(chromium: Chromium, everything: Path) -> None:
    chromium.open(everything)
    button = chromium.all(".copy")[0]
    button.click()
    until(lambda: button.text in ("copied", "selected"))
    assert chromium.errors() == []


def test_the_page_reads_without_scripts(chromium: Chromium, everything: Path) -> None:
    disable = "Emulation.setScriptExecutionDisabled"
    chromium.driver.execute_cdp_cmd(disable, {"value": True})
    try:
        chromium.open(everything)
        assert "The numbers can be trusted." in chromium.text("header")
        assert chromium.text("#numbers td") == "ttft"
        assert "objective" not in chromium.text("#latencies") and "In numbers" in chromium.text("#latencies")
    finally:
        chromium.driver.execute_cdp_cmd(disable, {"value": False})
