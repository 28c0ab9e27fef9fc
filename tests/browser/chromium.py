"""Debian's Chromium, headless: opens a page of this project and says what it did wrong.

Every test of a page stands on it: `Chromium.open(path)`, then `errors()`, `requests()`, `overflow_px()`, `axe()`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tests.support.waiting import until

AXE = Path(__file__).parents[2] / "build" / "axe" / "axe.min.js"
WIDTHS = (360, 768, 1280, 1920)
SCHEMES = ("light", "dark")


class Chromium:
    """One browser process; a page at a time."""

    def __init__(self) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or "chromium"
        for argument in (
            "--headless=new",
            "--disable-dev-shm-usage",
            "--force-device-scale-factor=1",
            "--hide-scrollbars",
        ):
            options.add_argument(argument)
        if os.geteuid() == 0:  # Chromium's sandbox does not run as root
            options.add_argument("--no-sandbox")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        service = webdriver.ChromeService(shutil.which("chromedriver"), env={**os.environ, "TMPDIR": self._folder.name})
        self.driver = webdriver.Chrome(options, service)
        self.driver.execute_cdp_cmd("Network.enable", {})

    def close(self) -> None:
        self.driver.quit()
        self._folder.cleanup()

    def open(self, path: Path, width: int = 1280, scheme: str = "light", height: int = 900) -> Chromium:
        """The page in a window of this width, in this scheme, without what the page before left in the logs."""
        self.resize(width, height)
        self.scheme(scheme)
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(path.resolve().as_uri())
        return self

    def resize(self, width: int, height: int = 900) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def scheme(self, scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    # what it did wrong

    def errors(self) -> list[str]:
        """Messages of the console since the page was opened: errors, warnings, violations of the policy."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """What the page asked for since it was opened; its own file is the first."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    def overflow_px(self) -> int:
        """By how much the page is wider than the window."""
        return int(self.script("return document.scrollingElement.scrollWidth - innerWidth"))

    def axe(self) -> list[str]:
        """Accessibility faults of impact serious or critical: the rule and the first elements."""
        # The policy of the page binds what the page runs, not what the debugger evaluates.
        self.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": AXE.read_text(encoding="utf-8")})
        run = "axe.run(document, {resultTypes: ['violations']}).then(found => JSON.stringify(found.violations))"
        evaluate = {"expression": run, "awaitPromise": True, "returnByValue": True}
        found = self.driver.execute_cdp_cmd("Runtime.evaluate", evaluate)["result"]["value"]
        return [
            f"{fault['id']} ({fault['impact']}): {fault['help']}: {[node['html'] for node in fault['nodes'][:3]]}"
            for fault in json.loads(found)
            if fault["impact"] in ("serious", "critical")
        ]

    def faults(self, path: Path, width: int, scheme: str) -> list[str]:
        """All that is wrong with a page in this window, once every chart is drawn and everything is open."""
        self.open(path, width, scheme)
        self.draw_all()
        self.unfold()
        requests = [url for url in self.requests() if url != path.resolve().as_uri()]
        wider = [f"{self.overflow_px()} px wider than the window"] if self.overflow_px() > 0 else []
        return [*self.errors(), *requests, *wider, *self.axe()]

    # what is on it

    def rows(self, section: str, table: int = 0) -> list[list[float | str]]:
        """The rows of a table of a section, but for those of charts: of each cell the exact number, or its text."""
        code = """const tables = [...document.querySelectorAll(`#${arguments[0]} table`)];
            const table = tables.filter(each => !each.closest("figure"))[arguments[1]];
            return [...table.tBodies[0].rows].map(row => [...row.cells].map(
                cell => cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value)))"""
        found: list[list[float | str]] = self.script(code, section, table)
        return found

    def script(self, code: str, *arguments: object) -> Any:
        return self.driver.execute_script(code, *arguments)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return str(self.driver.find_element(By.CSS_SELECTOR, selector).text)

    def numbers(self, selector: str = "td[data-value]") -> list[float]:
        """The exact numbers behind cells of tables, also of folded ones."""
        return [float(cell.get_attribute("data-value")) for cell in self.all(selector)]

    def chart(self, title: str) -> ChartOnPage:
        """The drawn chart of a title, scrolled into view."""
        code = """return [...document.querySelectorAll("figure")].find(
            figure => figure.querySelector("figcaption").firstChild?.textContent.trim() === arguments[0])"""
        figure = self.script(code, title)
        assert figure, f"no chart {title!r} on {self.driver.current_url}"
        return ChartOnPage(self, figure)

    def draw_all(self) -> None:
        """Every chart is drawn, as if the reader had scrolled past it."""
        for figure in self.all("figure:not(.empty)"):
            ChartOnPage(self, figure)

    def unfold(self) -> None:
        """Everything that is folded is open."""
        self.script("for (const folded of document.querySelectorAll('details')) folded.open = true")

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG, with every chart."""
        self.draw_all()
        height = self.script("return document.documentElement.scrollHeight")
        width = self.script("return innerWidth")
        self.resize(width, height)
        time.sleep(0.3)
        self.driver.save_screenshot(str(path))


class ChartOnPage:
    """A chart of an open page: pointer, keys, legend."""

    def __init__(self, chromium: Chromium, figure: WebElement) -> None:
        self.chromium, self.figure = chromium, figure
        chromium.script("arguments[0].scrollIntoView({block: 'center'})", figure)
        if "empty" not in (figure.get_attribute("class") or ""):
            until(lambda: figure.find_elements(By.CSS_SELECTOR, ".u-over"))

    def find(self, selector: str) -> WebElement:
        return self.figure.find_element(By.CSS_SELECTOR, selector)

    def hover(self, across: float, up: float) -> str:
        """What the chart reads under the pointer, at parts of the area between the axes: (0, 0) is its lower left."""
        self._pointer(across, up).perform()
        return self.readout

    def click(self, across: float, up: float) -> None:
        self._pointer(across, up).click().perform()

    def drag(self, start: float, end: float) -> None:
        """Zooms: the pointer is dragged between two parts of the x axis."""
        self._pointer(start, 0.5).click_and_hold().perform()
        self._pointer(end, 0.5).release().perform()

    def _pointer(self, across: float, up: float) -> ActionChains:
        area = self.find(".u-over")
        width, height = area.size["width"], area.size["height"]
        x, y = round((across - 0.5) * width), round((0.5 - up) * height)
        return ActionChains(self.chromium.driver, duration=0).move_to_element_with_offset(area, x, y)

    @property
    def readout(self) -> str:
        return str(self.find(".readout").text)

    def press(self, *keys: str) -> str:
        """What the chart reads after keys, with its plot in focus; nothing where the keys led to another page."""
        self.chromium.script("arguments[0].focus()", self.find(".plot"))
        ActionChains(self.chromium.driver).send_keys(*keys).perform()
        try:
            return self.readout
        except StaleElementReferenceException:
            return ""

    def button(self, text: str) -> WebElement:
        return next(b for b in self.figure.find_elements(By.TAG_NAME, "button") if b.text == text)

    def pixels(self) -> str:
        """The picture of the canvas, to be compared with another."""
        return str(self.chromium.script("return arguments[0].querySelector('canvas')?.toDataURL()", self.figure))
