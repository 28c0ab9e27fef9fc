"""The pictures of pages in docs/pages, made anew from what results/ keeps (`make figures`):

python -m tests.browser.pictures

They are for documents; no test compares pixels.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from PIL import Image

from benchmarks import kept
from tests.browser.chromium import SCHEMES, Chromium

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pages"
WIDTH = 1280
SIZES = ((WIDTH, 860), (390, 844))
SECTIONS = {"run": ("latency", "time")}  # of the wide page, besides its top
COLOURS = 128
SWEEP = (
    "sweep", "--gpu", "h200", "--model", "7b", "--rates", "5", "10", "20", "40", "--requests", "200",
    "--no-calibrate", "--out", "sweep",
)  # fmt: skip
LOADGEN = (sys.executable, "-c", "from loadgen.cli import main; main()")
TRAINING_PROBE = (sys.executable, "-c", "from training_probe.cli import main; main()")


def unpacked(name: str, place: Path) -> Path:
    """The directory of that name, and those within it."""
    copy = place / name.rpartition("/")[2]
    for one in kept.under(kept.packed_files(), name):
        kept.unpack(one, copy / one["name"].removeprefix(name).lstrip("/"))
    return copy


def report(place: Path, program: tuple[str, ...], *arguments: str) -> None:
    """Codes 0 and 4 are of reports that were made."""
    done = subprocess.run([*program, *arguments], cwd=place, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 4):
        raise SystemExit(done.stderr)


def pages(place: Path) -> Iterator[tuple[str, Path]]:
    """A page of each kind, by its name. What results/ keeps, but for the sweep: that is of the modelled server."""
    run = unpacked("frozen/measured/lognormal_poisson18", place)
    report(place, LOADGEN, "report", run.name)
    yield "run", run / "report.html"
    before = unpacked("frozen/measured/lognormal_poisson12_b", place)
    report(place, LOADGEN, "report", before.name)
    report(place, LOADGEN, "compare", before.name, run.name, "--html", "compare.html")
    yield "compare", place / "compare.html"
    search = unpacked("h200/search/five_minutes", place)
    report(place, LOADGEN, "report", search.name)
    yield "search", search / "search.html"
    report(place, LOADGEN, *SWEEP)
    yield "sweep", place / "sweep" / "sweep.html"
    training = unpacked("h200/training/pretrain-7b-1gpu", place)
    report(place, TRAINING_PROBE, "report", training.name)
    yield "training", training / "report.html"


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    browser = Chromium()
    with tempfile.TemporaryDirectory() as name:
        for kind, page in pages(Path(name)):
            for (width, height), scheme in product(SIZES, SCHEMES):
                browser.open(page, width, scheme, height)
                browser.draw_all()
                look = ("" if width == WIDTH else f"-{width}") + ("" if scheme == "light" else f"-{scheme}")
                browser.script("scrollTo(0, 0)")
                shoot(browser, PICTURES / f"{kind}{look}.png")
                for section in () if look else SECTIONS.get(kind, ()):
                    browser.script(f"document.getElementById({section!r}).scrollIntoView()")
                    shoot(browser, PICTURES / f"{kind}-{section}.png")
    browser.close()


def shoot(browser: Chromium, picture: Path) -> None:
    browser.driver.save_screenshot(str(picture))
    Image.open(picture).convert("RGB").quantize(COLOURS).save(picture, optimize=True)
    print(picture)


if __name__ == "__main__":
    main()
