"""Pages of training in a real browser: sweeps, micro-benchmarks, breakdowns and comparisons, from kept measurements."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.browser.chromium import Chromium
from tests.data import unpacked
from tests.training_probe.measured import HOSTILE, result
from training_probe.cli import invoke
from training_probe.protocol import TIMELINE_FILE, Timeline
from training_probe.results import append

pytestmark = pytest.mark.browser

MEASURED = {
    "sweep": unpacked("h200/training/pretrain-7b"),
    "micro": unpacked("h200/micro/collectives"),
    "products": unpacked("h200/micro/fig11"),
    "breakdown": unpacked("h200/breakdown/train-2gpu"),
}
PAGES = (*MEASURED, "hostile", "comparison")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By the names of PAGES."""
    root = tmp_path_factory.mktemp("pages")
    made = {name: root / name / "report.html" for name in PAGES}
    for name, kept in MEASURED.items():
        shutil.copytree(kept, root / name)
    hostile = root / "hostile"
    append_hostile(hostile)
    for name in (*MEASURED, "hostile"):
        assert invoke(["report", str(root / name)]) == (3 if name == "hostile" else 0)
    (root / "comparison").mkdir()
    for side, factor in (("a", 1.0), ("b", 1.1)):
        for at, method in enumerate(("Z2", "Z3", "F+Z3")):
            runs = [factor**at * (1000.0 + 10 * run) for run in range(3)]
            (root / side).mkdir(exist_ok=True)
            append(root / side, result(method, runs[1], runs=runs))
    assert invoke(["compare", str(root / "a"), str(root / "b"), "--html", str(made["comparison"])]) == 0
    return made


def append_hostile(directory: Path) -> None:
    """Names that try to be markup; every outcome; and a timeline of the first steps."""
    timeline = directory / "trials" / "<b>" / "timeline"
    timeline.mkdir(parents=True)
    nasty = f"</script><img src=x onerror=alert(1)>{HOSTILE}"
    each = [1 << 30, 5 << 30, 2 << 30]
    recorded = Timeline(categories=[nasty, "weights"], time_s=[0.0, 0.5, 1.0], bytes=[each, each], steps_s=[0.0, 0.6])
    (timeline / TIMELINE_FILE).write_bytes(msgspec.json.encode(recorded))
    speeds = {"tokens_per_s_std": 20.0, "step_ms": 12.0, "step_ms_std": 1.5}
    append(directory, result("Z3", platform=nasty, said=speeds, runs=[980.0, 1000.0, 1020.0]))
    append(directory, result("Z2", model=nasty, platform=nasty, outcome="crashed", reason=nasty))
    append(directory, result("Q", platform=nasty, outcome="oom", reason=nasty))


def report(page: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((page.parent / "report.json").read_bytes())
    return loaded


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_quiet_fits_every_window_and_is_accessible(
    chromium: Chromium, pages: dict[str, Path], name: str, scheme: str
) -> None:
    for width in (360, 1920):
        chromium.open(pages[name], width=width, scheme=scheme).draw_all()
        assert chromium.overflow_px() <= 0
    assert chromium.axe() == []
    assert chromium.errors() == []
    assert chromium.requests() == [pages[name].as_uri()]
    assert pages[name].stat().st_size < 400_000


@pytest.mark.always
def test_numbers_of_a_sweep_are_the_reports(chromium: Chromium, pages: dict[str, Path]) -> None:
    shown = set(chromium.open(pages["sweep"]).numbers())
    for each in report(pages["sweep"])["results"]:
        fields = ("tokens_per_s", "step_ms", "forward_ms", "peak_memory_gb", "peak_reserved_gb", "predicted_memory_gb")
        assert {each[field] for field in fields} | {each["tokens_per_s"] / each["gpus"]} <= shown
    assert chromium.text(".verdict") == "14 cells: 14 ok."


@pytest.mark.always
def test_numbers_of_products_are_the_reports(chromium: Chromium, pages: dict[str, Path]) -> None:
    shown = set(chromium.open(pages["products"]).numbers())
    results = report(pages["products"])["results"]
    assert {each["flops_per_s"] / 1e12 for each in results} | {1e3 * each["p90_s"] for each in results} <= shown


@pytest.mark.always
def test_numbers_of_a_breakdown_are_the_reports(chromium: Chromium, pages: dict[str, Path]) -> None:
    shown = set(chromium.open(pages["breakdown"]).numbers())
    for each in report(pages["breakdown"])["results"]:
        assert {1e3 * window["overall_s"] for window in each["attribution"]["windows"]} <= shown


def test_hover_reads_the_bar_and_says_its_sizes(chromium: Chromium, pages: dict[str, Path]) -> None:
    chart = chromium.open(pages["sweep"]).chart("Tokens/s of a GPU: 7b, pretrain")
    first, *_, last = report(pages["sweep"])["results"]
    for across, each in ((0.02, first), (0.98, last)):
        read = chart.hover(across, 0.1)
        assert f"{each['method']} 4x s350 b1" in read
        assert f": {each['tokens_per_s'] / each['gpus']:.4g} tokens/s" in read


def test_a_comparison_says_what_is_better_with_its_interval(chromium: Chromium, pages: dict[str, Path]) -> None:
    chromium.open(pages["comparison"])
    assert chromium.text(".verdict") == "tokens/s of 3 in both: 2 better, 1 no difference shown."
    assert {1010.0, 1010.0 * 1.1, 1010.0 * 1.1**2} <= set(chromium.numbers())
    read = chromium.chart("tokens/s").hover(0.5, 0.5)
    assert read.startswith("7b_pretrain_deepspeed_Z3_8x_s350_b1: B is better = 10 [7.5")


def test_hostile_names_are_shown_and_not_obeyed(chromium: Chromium, pages: dict[str, Path]) -> None:
    chromium.open(pages["hostile"]).draw_all()
    assert not chromium.all("img, b, main a[href^='m']")
    body = chromium.text("body")
    assert "</script><img src=x onerror=alert(1)>" in body
    assert "3 cells: 1 ok, 1 oom, 1 crashed." in body
    assert "Memory of the first steps: <b>" in body
