"""A report of known results: what it says, and figures that can be read and are not blank."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib.image
import msgspec
import numpy as np
import pytest

from loadgen.document import markdown, terminal
from loadgen.document.files import ReportError
from tests.training_probe.measured import HOSTILE, result
from training_probe import cli
from training_probe.protocol import TIMELINE_FILE, Timeline
from training_probe.report import build, charts, layout, tables, timelines
from training_probe.results import CellResult, append, read

SVG = "{http://www.w3.org/2000/svg}"


def sweep() -> list[CellResult]:
    large = {"predicted_memory_gb": 33.0, "peak_memory_gb": 30.0, "device_memory_gb": 80.0}
    ran_out = {"predicted_memory_gb": 50.0, "device_memory_gb": 80.0}
    return [
        result("Naive", said=large),
        result("Z3", said={"predicted_memory_gb": 1.0, "peak_memory_gb": 2.0}),  # too small to judge by
        result("Z2", outcome="oom", reason="CUDA out of memory", said=ran_out),
        result("F+Z2", 700.0, said={"valid": False}),
        *(result("Q", 1000.0 * count**0.9, gpus=count, micro_batch=2) for count in (1, 2, 4)),
    ]


def test_what_is_missing_is_counted_and_a_torn_file_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for each in (*sweep(), result("Z1", 5.0)):
        append(tmp_path, each)
    (tmp_path / "manifest.json").write_text(json.dumps({"cells": [{}] * 9}))
    assert build.unread(tmp_path / "results.jsonl") == []
    whole = (tmp_path / "results.jsonl").read_bytes()
    (tmp_path / "results.jsonl").write_bytes(whole[:-20])
    assert cli.invoke(["report", str(tmp_path)]) == 4  # by an invalid cell
    out, err = capsys.readouterr()
    shown = " ".join(err.split())
    assert "7 of 9 cells, 2 missing: 6 ok (1 of them INVALID), 1 oom." in shown
    assert "The last line of results.jsonl is cut, because its writer was killed; what it held is missing." in shown
    assert "2 of 9 cells were not reached; `--resume` goes on with them." in shown
    counts = json.loads(out)["cells"]
    assert (counts["all"], counts["planned"], counts["missing"]) == (7, 9, 2)


def timeline(samples: int = 50) -> Timeline:
    each = [int(2**30 * (1 + at % 7)) for at in range(samples)]
    names = ["activations", "parameters", HOSTILE]
    return Timeline(
        categories=names, time_s=[0.1 * at for at in range(samples)], bytes=[each, each, each], steps_s=[0.0, 1.0, 2.5]
    )


def seen(path: Path) -> tuple[int, int]:
    """Pixels (width, height) of a PNG that shows something; its SVG parses."""
    pixels = np.asarray(matplotlib.image.imread(path.with_suffix(".png")))
    assert np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0).shape[0] > 20
    assert 0.005 < np.mean(pixels[..., :3].min(axis=-1) < 0.9) < 0.9  # neither blank nor a block
    root = ElementTree.parse(path.with_suffix(".svg")).getroot()
    assert root.tag == f"{SVG}svg"
    assert len(root.findall(f".//{SVG}path")) > 5
    return pixels.shape[1], pixels.shape[0]


def test_the_report_counts_and_judges(tmp_path: Path) -> None:
    made = build.build(sweep(), {"run_id": "r1", "preset": "mine"})
    assert made.schema == "training_probe.report/1"
    counts = {"all": 7, "by_outcome": {"ok": 6, "oom": 1}, "invalid": 1}
    assert msgspec.to_builtins(made.cells) == {**counts, "planned": None, "missing": 0}
    prediction = made.prediction
    assert prediction.cells == 1
    assert prediction.worst_ratio == pytest.approx(0.1)
    assert len(prediction.said_to_fit_but_ran_out) == 1
    assert made.profile.as_paper
    assert len(made.results) == 7
    text = terminal.render(build.document(sweep(), {}).page(tmp_path), 200)
    assert "7 cells: 6 ok (1 of them INVALID), 1 oom." in text
    assert "as in the paper" in text
    assert "Predicted to fit, but ran out of memory: 7b_pretrain_deepspeed_Z2" in text


def test_a_short_profile_is_said() -> None:
    short = result(said={"warmup_steps": 2, "steps": 5, "runs": 1})
    made = build.build([short], {})
    assert not made.profile.as_paper
    assert "2 warm-up and 5 timed steps in 1 run." in " ".join(build.facts(made))


def test_nothing_measured_is_a_report_all_the_same(tmp_path: Path) -> None:
    manifest = {"platform": "CPU", "warmup_steps": 2, "steps": 3, "runs": 1}
    made = build.build([], manifest)
    build.document([], manifest).publish(tmp_path)
    assert (made.platform, made.cells.all) == ("CPU", 0)
    assert msgspec.to_builtins(made.profile.each) == [{"warmup_steps": 2, "steps": 3, "runs": 1}]
    assert not list(tmp_path.glob("*.svg"))


def test_failures_stand_with_their_reasons_and_nothing_is_obeyed(tmp_path: Path) -> None:
    found = [result("Z3", outcome="crashed", reason=HOSTILE, said={"log": "a/b_log.txt"})]
    text = markdown.render(build.document(found, {"run_id": HOSTILE}).page(tmp_path))
    assert "## Cells without a valid number" in text
    assert "a/b\\_log.txt" in text
    assert "\x1b" not in text and "<b>" not in text
    assert "\x1b" not in terminal.render(build.document(found, {"preset": HOSTILE}).page(tmp_path), 100)
    assert "\x1b" not in layout.latex_file(tables.build(found))


@pytest.mark.processes
def test_redoing_a_directory_writes_all_of_it(tmp_path: Path) -> None:
    for each in sweep():
        append(tmp_path, each)
    cell = tmp_path / "trials" / "one" / "timeline"
    cell.mkdir(parents=True)
    (cell / TIMELINE_FILE).write_bytes(msgspec.json.encode(timeline()))
    (tmp_path / "manifest.json").write_text('{"run_id": "r1", "machine": {"cpu": "x"}, "unknown": [1]}')
    document = build.document(read(tmp_path), build.read_manifest(tmp_path))
    document.publish(tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(msgspec.json.encode(document.report))
    written = {path.name for path in tmp_path.iterdir()}
    assert {"report.md", "tables.csv", "tables.tex"} <= written
    text = (tmp_path / "report.md").read_text()
    for name in ("throughput-table-III", "throughput", "memory", "scaling", "timeline-one"):
        assert f"]({name}.svg)" in text
        width, height = seen(tmp_path / f"{name}.svg")
        assert width >= 1000 and height >= 500
    assert "As Table III" in (tmp_path / "tables.tex").read_text()


@pytest.mark.parametrize(
    "wrong", ["", "[1]", "{", "\xff", pytest.param('{"argv": ' + "[" * 100_000, id="nested without end")]
)
def test_a_broken_manifest_is_one_sentence(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "manifest.json").write_bytes(wrong.encode("latin-1"))
    with pytest.raises(ReportError, match=r"is not a sweep's manifest"):
        build.read_manifest(tmp_path)
    (tmp_path / "manifest.json").unlink()
    assert build.read_manifest(tmp_path) == {}


def test_a_file_that_cannot_be_written_costs_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").mkdir()
    build.document([result()], {}).publish(tmp_path)
    shown = capsys.readouterr()
    assert "1 cell: 1 ok." in shown.err and json.loads(shown.out)["cells"]["all"] == 1
    assert f"\ntraining_probe: cannot write the report to {tmp_path}: Is a directory.\n" in shown.err


@pytest.mark.parametrize(
    "broken", [b"{", b"{}", b"\xff", msgspec.json.encode(msgspec.structs.replace(timeline(), bytes=[[1]]))]
)
def test_a_broken_timeline_costs_no_report(tmp_path: Path, broken: bytes) -> None:
    cell = tmp_path / "trials" / "one" / "timeline"
    cell.mkdir(parents=True)
    (cell / TIMELINE_FILE).write_bytes(broken)
    build.document([result()], {}).publish(tmp_path)
    assert not list(tmp_path.glob("timeline-*"))


def test_a_long_timeline_keeps_its_highest_and_lowest_sample() -> None:
    total = np.full(200_000, 5.0)
    total[123_457], total[99_999] = 9.0, 1.0
    drawn = timelines.extremes(total, charts.MOST_SAMPLES)
    assert len(drawn) <= 2 * charts.MOST_SAMPLES + 2
    assert {0, 123_457, 99_999, len(total) - 1} <= set(drawn.tolist())


@pytest.mark.parametrize(
    ("method", "four", "told"), [("Q", 4.5, True), ("Q", 4.0, False), ("Q", 3.0, False), ("Z3", 4.5, False)]
)
def test_more_than_linear_scaling_is_told(method: str, four: float, told: bool) -> None:
    """ZeRO may: more GPUs have less of the optimizer each."""
    found = [result(method, 1000.0, gpus=1), result(method, 1900.0, gpus=2), result(method, 1000 * four, gpus=4)]
    lines = [line for line in build.findings(build.build(found, {})) if "run it again" in line]
    assert len(lines) == told
    if told:
        assert f"{found[2].cell} has 112 % of the tokens/s a GPU of {found[0].cell}" in lines[0]
