"""The pictures of pages in docs/pages, made anew from what results/ keeps (`make figures`):

python -m tests.browser.pictures

They are for documents; no test compares pixels.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from benchmarks import kept
from tests.browser.chromium import Chromium

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pages"
WIDTH, HEIGHT = 1280, 860
COLOURS = 64
LOADGEN = (sys.executable, "-c", "from loadgen.cli import main; main()")
TRAINING_PROBE = (sys.executable, "-c", "from training_probe.cli import main; main()")


def unpacked(name: str, place: Path) -> Path:
    (kept_one,) = kept.under(kept.packed_files(), name)
    copy = place / name.rpartition("/")[2]
    kept.unpack(kept_one, copy)
    return copy


def report(place: Path, program: tuple[str, ...], *arguments: str) -> None:
    """Codes 0 and 4 are of reports that were made."""
    done = subprocess.run([*program, *arguments], cwd=place, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 4):
        raise SystemExit(done.stderr)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    browser = Chromium()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        run = unpacked("frozen/measured/lognormal_poisson18", place)
        report(place, LOADGEN, "report", run.name)
        before = unpacked("frozen/measured/lognormal_poisson12_b", place)
        report(place, LOADGEN, "report", before.name)
        report(place, LOADGEN, "compare", before.name, run.name, "--html", "compare.html")
        sweep = unpacked("h200/training/pretrain-7b-1gpu", place)
        report(place, TRAINING_PROBE, "report", sweep.name)
        for page, section, picture in (
            (run / "report.html", None, "run.png"),
            (run / "report.html", "latency", "run-latency.png"),
            (run / "report.html", "time", "run-over-time.png"),
            (place / "compare.html", None, "compare.png"),
            (sweep / "report.html", "throughput", "training.png"),
        ):
            browser.open(page, WIDTH, height=HEIGHT)
            browser.draw_all()
            if section is not None:
                browser.script(f"document.getElementById({section!r}).scrollIntoView()")
            else:
                browser.script("scrollTo(0, 0)")
            browser.driver.save_screenshot(str(PICTURES / picture))
            fewer = Image.open(PICTURES / picture).convert("RGB").quantize(COLOURS)
            fewer.save(PICTURES / picture, optimize=True)
            print(PICTURES / picture)
    browser.close()


if __name__ == "__main__":
    main()
