"""The pictures of pages in docs/pages, made anew from runs that are kept in benchmarks/:

python -m tests.browser.pictures

They are for documents; no test compares pixels.
"""

from __future__ import annotations

import gzip
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.browser.chromium import Chromium

ROOT = Path(__file__).parents[2]
RUNS, TRAINING = ROOT / "benchmarks/frozen/measured", ROOT / "benchmarks/h200/training"
PICTURES = ROOT / "docs" / "pages"
WIDTH, HEIGHT = 1280, 860
LOADGEN = (sys.executable, "-c", "from loadgen.cli import main; main()")
TRAINING_PROBE = (sys.executable, "-c", "from training_probe.cli import main; main()")


def unpacked(kept: Path, place: Path) -> Path:
    """A copy of a kept directory with its compressed files as a program writes them."""
    copy = Path(shutil.copytree(kept, place / kept.name))
    for packed in copy.rglob("*.gz"):
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
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
        run = unpacked(RUNS / "lognormal_poisson18", place)
        report(place, LOADGEN, "report", run.name)
        before = unpacked(RUNS / "lognormal_poisson12_b", place)
        report(place, LOADGEN, "report", before.name)
        report(place, LOADGEN, "compare", before.name, run.name, "--html", "compare.html")
        sweep = unpacked(TRAINING / "pretrain-7b-1gpu", place)
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
            print(PICTURES / picture)
    browser.close()


if __name__ == "__main__":
    main()
