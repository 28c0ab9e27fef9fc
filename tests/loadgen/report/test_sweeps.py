"""The runs of a sweep together: known answers, states of runs, the Pareto front, and files that are no sweep."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadgen import cli
from loadgen.document import files, markdown, terminal
from loadgen.report import sweeps
from loadgen.report.pages import sweep as sweep_page
from loadgen.report.repeats import Repeat
from loadgen.report.sweeps import INTERACTIVITY, IdleWait, PlannedRun, SweepPlan, SweptPoint
from loadgen.rundir import RunError
from loadgen.rundir.emulation import Emulation
from tests.loadgen.tables import facts, manifest, request, write_run

GAP_MS = {"1": 10.0, "2": 20.0, "4": 25.0}  # between tokens, by value
EVERY_MS = {"1": 1000, "2": 500, "4": 250}  # from request to request
COUNT = 41
EMULATION = Emulation(
    scheduler="vllm@v1", gpu="h200", gpus=2, topology="nvlink", tensor_parallel=2, dtype="float16",
    kv_cache_tokens=9999, max_running=64, memory_ratio=0.9, profile="p",
)  # fmt: skip


def run(path: Path, value: str, *, state: str = "complete", gpus: bool = False, later_ms: float = 0) -> None:
    """Requests at a constant rate: 100 ms to the first of three tokens."""
    records = []
    for at in range(COUNT):
        sent = at * EVERY_MS[value] + 1
        gaps = (GAP_MS[value], GAP_MS[value])
        records.append(request(at, scheduled=sent - 1, sent=sent, first=sent + 100 + later_ms, gaps=gaps))
    about = manifest(
        run_id=path.name, config={"requests": COUNT}, requests_planned=COUNT, emulation=EMULATION if gpus else None,
        emulated=gpus,
    )  # fmt: skip
    write_run(path, records, about, facts(state=state))


def swept_directory(
    path: Path, repeat: int = 1, *, gpus: bool = False, values: tuple[str, ...] = ("4", "1", "2")
) -> Path:
    path.mkdir()
    order = [
        PlannedRun(f"rate-{value}-run{number}" if repeat > 1 else f"rate-{value}", value, 10 * int(value) + number)
        for number in range(1, repeat + 1)
        for value in values
    ]
    plan = SweepPlan(
        varies="rate", unit="requests/s", values=sorted(values), repeat=repeat, seed=3, order=order, options={}
    )  # fmt: skip
    sweep = sweeps.SweepHead(version="1", started_unix_s=0.0, argv=[], plan=plan, starts=1)
    (path / sweeps.FILE).write_bytes(msgspec.json.encode(sweep))
    for number, planned in enumerate(order):
        run(path / planned.directory, planned.value, gpus=gpus, later_ms=number // len(values))
    return path


def test_known_answers(tmp_path: Path) -> None:
    swept = sweeps.read(swept_directory(tmp_path / "s"))
    assert [point.value for point in swept.points] == ["1", "2", "4"]
    assert [run.directory for run in swept.runs] == ["rate-4", "rate-1", "rate-2"]
    assert swept.complete and swept.gpus is None and not swept.emulated
    for point in swept.points:
        value = point.value
        means = {name: each.mean for name, each in point.metrics.items()}
        assert means["ttft_p50"] == means["ttft_p99"] == pytest.approx(100)
        assert means["tpot_p50"] == pytest.approx(GAP_MS[value])
        assert means["e2el_p99"] == pytest.approx(100 + 2 * GAP_MS[value])
        assert means[INTERACTIVITY] == pytest.approx(1000 / GAP_MS[value])
        seconds = ((COUNT - 1) * EVERY_MS[value] + 100 + 2 * GAP_MS[value]) / 1000
        assert means["output_tokens_per_s"] == pytest.approx(3 * COUNT / seconds)
        assert means["total_tokens_per_s"] == pytest.approx(13 * COUNT / seconds)
        assert not any(name.endswith("per_gpu") for name in means)
        assert (point.requests_ok, point.requests_failed) == (COUNT, 0)
    assert swept.pareto == {name: ["1", "2", "4"] for name in sweeps.BY_TOKENS}


def test_throughput_a_gpu_of_a_modelled_server(tmp_path: Path) -> None:
    directory = swept_directory(tmp_path / "s", gpus=True)
    swept = sweeps.read(directory)
    assert swept.gpus == 2 and swept.emulated
    for point in swept.points:
        whole, share = (point.metrics[name].mean for name in ("output_tokens_per_s", "output_tokens_per_s_per_gpu"))
        assert whole is not None and share == pytest.approx(whole / 2)
    text = markdown.render(sweep_page.of(directory, swept))
    assert "output tokens/s a GPU" in text and "on 2 GPUs" in text and "![CDF of every point](cdf.png)" in text


def test_repeats_are_a_mean_with_an_interval_and_one_pooled_curve(tmp_path: Path) -> None:
    directory = swept_directory(tmp_path / "s", repeat=3)
    swept = sweeps.read(directory)
    (point, *_) = swept.points
    ttft = point.metrics["ttft_p50"]
    assert ttft.runs == pytest.approx([100, 101, 102]) and ttft.mean == pytest.approx(101)
    reach = 4.303 / 3**0.5  # Student's t, two degrees of freedom; the values differ by one
    assert ttft.ci == pytest.approx([101 - reach, 101 + reach], abs=1e-3)
    pooled = sweeps.samples(directory, swept)[point.value]["ttft_ms"]
    assert pooled.values * pooled.unit_ms == pytest.approx(np.repeat([100.0, 101, 102], COUNT))


def test_what_is_finished(tmp_path: Path) -> None:
    """One is stopped, one killed before its load, one has not begun: the numbers are of the others."""
    directory = swept_directory(tmp_path / "s")
    shutil.rmtree(directory / "rate-4")
    run(directory / "rate-4", "4", state="interrupted")
    (directory / "rate-1" / "requests.jsonl").unlink()
    swept = sweeps.read(directory)
    assert [(each.directory, each.state) for each in swept.runs] == [
        ("rate-4", "unfinished"), ("rate-1", "unfinished"), ("rate-2", "finished"),
    ]  # fmt: skip
    assert [point.runs for point in swept.points] == [[], ["rate-2"], []]
    assert swept.points[0].metrics == {} and not swept.complete
    for path in (directory / "rate-1").iterdir():
        path.unlink()
    assert sweeps.read(directory).runs[1].state == "waiting"
    page = sweep_page.of(directory, swept)
    assert "not finished, in no number: rate-4" in terminal.render(page, 200)
    files.write(directory / sweep_page.FILE, page, figures=True)
    assert {path.name for path in directory.glob("*.png")} == {"latency.png", "pareto.png", "cdf.png"}


@pytest.mark.processes
def test_report_makes_it_again_of_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = swept_directory(tmp_path / "s", gpus=True)
    assert cli.invoke(["report", str(directory)]) in (0, 4)
    captured = capsys.readouterr()
    printed = json.loads(captured.out.splitlines()[-1])
    assert printed == json.loads((directory / "sweep.json").read_text())
    assert printed["schema"] == "loadgen.sweep/1" and len(printed["points"]) == 3
    assert "EMULATED" in captured.err and "EMULATED" in (directory / "sweep.md").read_text()
    before = (directory / "sweep.json").read_bytes()
    assert cli.invoke(["report", str(directory)]) in (0, 4)
    assert (directory / "sweep.json").read_bytes() == before
    assert cli.invoke(["report", str(directory), "--convention", "vllm"]) == 2


def test_a_server_that_was_busy_is_named(tmp_path: Path) -> None:
    directory = swept_directory(tmp_path / "s")
    sweep = sweeps.read_sweep(directory)
    sweep.waits = {"rate-1": IdleWait(by="metrics", idle=False, waited_s=60.0, detail="3 running")}
    sweep.starts = 2
    (directory / sweeps.FILE).write_bytes(msgspec.json.encode(sweep))
    text = terminal.render(sweep_page.of(directory, sweeps.read(directory)), 200)
    assert "not seen idle before rate-1 (3 running)" in text and "2 starts" in text


def point(value: str, throughput: float, interactivity: float) -> SweptPoint:
    metrics = {
        name: Repeat(runs=[mean], mean=mean, std=None, ci=None)
        for name, mean in ((sweeps.BY_TOKENS[0], throughput), (INTERACTIVITY, interactivity))
    }
    return SweptPoint(value=value, runs=[value], valid=True, requests_ok=1, requests_failed=0, metrics=metrics)


def test_the_front_is_what_no_other_point_beats() -> None:
    points = [
        point("a", 1, 9),
        point("b", 5, 5),
        point("c", 5, 4),
        point("d", 9, 1),
        point("e", 4, 4),
        point("f", 5, 5),
    ]
    nothing = SweptPoint(value="g", runs=[], valid=True, requests_ok=0, requests_failed=0, metrics={})
    assert sweeps.front([*points, nothing], sweeps.BY_TOKENS[0]) == ["a", "b", "d", "f"]


def test_invalid_points_look_so_in_the_figure(tmp_path: Path) -> None:
    """One of a sweep's three, which would be on the front."""
    directory = swept_directory(tmp_path / "s")
    swept = sweeps.read(directory)
    points = [msgspec.structs.replace(each, valid=each.value != "4") for each in swept.points]
    fronts = {name: sweeps.front(points, name) for name in sweeps.BY_TOKENS}
    page = sweep_page.of(directory, msgspec.structs.replace(swept, points=points, pareto=fronts))
    for chart in next(section.charts for section in page.sections if section.id == "pareto"):
        of = {series.name: series for series in chart.series}
        ring = of["INVALID, not to be quoted"]
        assert len(ring.x) == 1 and ring.dashed
        assert len(of["no other point is better in both (Pareto)"].x) == 2


def test_a_load_that_the_server_fell_behind_is_on_no_front() -> None:
    points = [point("1", 1.0, 9.0), msgspec.structs.replace(point("2", 5.0, 20.0), fell_behind=True)]
    assert sweeps.front(points, "output_tokens_per_s") == ["1"]


def test_a_load_that_the_server_fell_behind_takes_no_window_from_the_others(tmp_path: Path) -> None:
    """Ten requests/s, answered at once, and then five of them a second."""
    path = swept_directory(tmp_path / "s", values=("1", "2"))
    for value, each_ms in (("1", 100), ("2", 200)):
        shutil.rmtree(path / f"rate-{value}")
        rows = [request(at, scheduled=100 * at, sent=100 * at, first=50 + each_ms * at) for at in range(400)]
        about = manifest(run_id=f"rate-{value}", arrival="constant:10", config={}, requests_planned=400)
        write_run(path / f"rate-{value}", rows, about, facts())
    swept = sweeps.read(path)
    kept, behind = swept.points
    assert swept.steady and not kept.fell_behind and behind.fell_behind
    assert kept.metrics["requests_per_s"].mean == pytest.approx(10, rel=0.01)  # of the window
    assert behind.metrics["requests_per_s"].mean == pytest.approx(5, rel=0.01)  # of the whole run
    assert "Where the server fell behind there is none" in " ".join(sweeps.remarks(swept))
    assert all(front == ["1"] for front in swept.pareto.values())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 7}', '{"schema": "loadgen.sweep/1"}', "\ud800"])
def test_no_sweep(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(RunError):
        sweeps.read_sweep(tmp_path)
    for line in (["report", str(tmp_path)], ["sweep", "--resume", str(tmp_path)]):
        assert cli.invoke(line) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "is not a sweep of this version" in said


def test_a_run_lies_in_the_sweep_and_nowhere_else(tmp_path: Path) -> None:
    directory = swept_directory(tmp_path / "s")
    text = (directory / "sweep.json").read_text().replace('"rate-4"', '"../rate-4"')
    (directory / "sweep.json").write_text(text)
    with pytest.raises(RunError, match="is no run of it"):
        sweeps.read_sweep(directory)
