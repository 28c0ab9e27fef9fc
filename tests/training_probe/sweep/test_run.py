"""Sweeps over stand-in processes: one line of results a cell, whatever happens, and nothing lost when a sweep is."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import gpus
from backends.decoder import ModelSpec
from loadgen.rundir import RunError, Snapshot
from loadgen.rundir.series import MeasurementSeries
from tests.loadgen.screen import Terminal
from tests.support.waiting import until
from tests.training_probe import stand_in
from tests.training_probe.stand_in import GIB, STEP_S
from training_probe import flops, llama_shape, protocol, results
from training_probe.grid import Cell, Model
from training_probe.launch import runner
from training_probe.launch.runner import MemoryReturn
from training_probe.memory import Prediction
from training_probe.memory.process import Fit
from training_probe.memory.rank import Moment, Term
from training_probe.own_deepspeed import ZeroSizes
from training_probe.protocol import Step
from training_probe.results import Attempt, CellResult
from training_probe.sweep import cell as sweep_cell
from training_probe.sweep import progress
from training_probe.sweep.cell import APART, Dependencies, Settings, floor_power_of_two, largest, next_smaller
from training_probe.sweep.progress import Progress, lines
from training_probe.sweep.run import begun, dry_run, resume, sweep

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are started on Linux only"),
]

LONG_S = 30.0
ROOT = str(Path(sweep_cell.__file__).parents[2])
SPEC = llama_shape.known("7b")
assert SPEC is not None
CARD = "NVIDIA H100 80GB HBM3"


def cell(does: str, **fields: Any) -> Cell:
    return Cell(model=does, **{"seq_len": 10, "device": "cpu", **fields})


def settings(**fields: Any) -> Settings:
    return Settings(**{"warmup_steps": 2, "steps": 4, "runs": 2, "timeout_s": LONG_S, **fields})


def snapshot(directory: Path) -> dict[str, dict[str, float]]:
    """Family -> cell, outcome or nothing -> value."""
    read = msgspec.json.decode((directory / "snapshot.json").read_bytes(), type=Snapshot)
    assert read.schema == "llm_dissect.snapshot/1" and read.program == "training_probe"
    return {
        family.name.removeprefix("llm_dissect_training_"): {
            sample.labels.get("cell", sample.labels.get("outcome", "")): sample.value for sample in family.samples
        }
        for family in read.families
    } | {"state": {read.state: 1.0}}


class GibASequence:
    """A predictor of a world in which every sequence takes 1 GiB, and nothing else anything."""

    def predict(self, cell: Cell, spec: ModelSpec, zero: ZeroSizes) -> Prediction:
        assert cell.micro_batch is not None
        taken = Term("activations", cell.micro_batch * GIB, "")
        return Prediction(moments=(Moment("backward", (taken,)),))

    def fits(self, prediction: Prediction, device_memory_bytes: int) -> Fit:
        needed, there = prediction.peak_bytes // GIB, device_memory_bytes // GIB
        return Fit("fits" if needed <= there else "does not fit", f"{needed} GiB > {there} GiB")

    def largest_micro_batch(
        self, cell: Cell, spec: ModelSpec, device_memory_bytes: int, at_most: int, zero: ZeroSizes
    ) -> int:
        return min(at_most, device_memory_bytes // GIB)


AROUND = Dependencies(command=stand_in.command, inventory=gpus.Inventory, predictor=GibASequence())


def with_gpus(*memory_gib: int, card: str = CARD) -> Dependencies:
    here = tuple(
        gpus.Gpu(index=index, name=card, uuid=f"GPU-{index}", memory_bytes=gib * GIB, used_bytes=0)
        for index, gib in enumerate(memory_gib)
    )
    return replace(
        AROUND,
        inventory=lambda: gpus.Inventory(gpus=here, driver="570.1"),
    )


def swept(tmp_path: Path, cells: Sequence[Cell], around: Dependencies = AROUND, **fields: Any) -> list[CellResult]:
    directory = tmp_path / "sweep"
    assert sweep(cells, settings(**fields), directory, lambda _: None, around) == 0
    return results.read(directory)


def test_a_cell_is_the_mean_of_its_runs(tmp_path: Path) -> None:
    said: list[str] = []
    directory = tmp_path / "sweep"
    assert sweep([cell("ok", gpus=2, micro_batch=3)], settings(runs=3), directory, said.append, AROUND) == 0
    (got,) = results.read(directory)
    assert (got.outcome, got.reason, got.valid) == ("ok", "", True)
    speed = 2 * 3 * 10 / (2 * STEP_S)
    assert got.tokens_per_s == pytest.approx(speed) and got.tokens_per_s_std == pytest.approx(0)
    assert got.tokens_per_s_runs == pytest.approx([speed] * 3)
    assert (got.runs, got.warmup_steps, got.steps, got.batch_size) == (3, 2, 4, 3)
    (shown,) = [
        sample.labels
        for family in msgspec.json.decode((directory / "snapshot.json").read_bytes(), type=Snapshot).families
        if family.name.endswith("_tokens_per_second") for sample in family.samples
    ]  # fmt: skip
    assert (shown["cell"], shown["gpus"], shown["seq_len"], shown["micro_batch"]) == (got.cell, "2", "10", "3")
    assert got.step_ms == pytest.approx(20) and got.step_ms_std == pytest.approx(0)
    assert [got.forward_ms, got.backward_ms, got.optimizer_ms] == pytest.approx([6, 10, 3])
    assert got.peak_memory_gb_by_rank == [3, 4] and got.peak_memory_gb == 4
    assert got.peak_reserved_gb_by_rank == [4, 5] and got.peak_reserved_gb == 5
    assert got.device_memory_gb == 80
    assert got.energy_j_per_token == pytest.approx(70 / (2 * 3 * 10 * 4))
    assert (got.loss_first, got.loss_last) == (7.0, 6.5)
    assert (got.device_name, got.optimizer, got.versions) == ("stand-in", "AdamW", {"torch": "0"})
    assert got.wall_s > 0
    assert (directory / got.log).exists() and got.log.endswith("run-3/log.txt")
    seeds = [json.loads((directory / "trials" / got.cell / f"run-{k}" / "trial.json").read_bytes()) for k in (1, 2, 3)]
    assert [trial["seed"] for trial in seeds] == [0, 1, 2]
    assert len(said) == 1 and said[0].startswith(f"cell 1 of 1  {got.cell}: ok, 1,500 ± 0 tokens/s, peak 4.0 GiB")


def test_phases_that_are_not_told_apart_are_not_known(tmp_path: Path) -> None:
    (row,) = swept(tmp_path, [cell("ok", engine="megatron")])
    assert row.outcome == "ok" and row.forward_ms is None and row.optimizer_ms == pytest.approx(3)


def test_what_died_without_a_word_still_had_a_gpu_of_some_size(tmp_path: Path) -> None:
    (row,) = swept(tmp_path, [cell("exit_77", device="cuda")], with_gpus(24), gpu_ids=(0,))
    assert (row.outcome, row.peak_memory_gb, row.device_memory_gb) == ("oom", None, 24)


def test_no_cell_stops_the_others(tmp_path: Path) -> None:
    does = ["oom", "segv", "unsupported", "garbage", "second_run_fails", "rising", "infinite", "ok"]
    got = {result.model: result for result in swept(tmp_path, [cell(name) for name in does])}
    assert list(got) == does
    assert {name: got[name].outcome for name in does} == {
        "oom": "oom", "segv": "crashed", "unsupported": "unsupported", "garbage": "crashed",
        "second_run_fails": "crashed", "rising": "ok", "infinite": "ok", "ok": "ok",
    }  # fmt: skip
    assert got["oom"].peak_memory_gb == 79  # of the rank that told it
    failed = got["second_run_fails"]
    assert failed.runs == 1 and failed.tokens_per_s is not None and not failed.valid  # the good run is kept
    assert (got["rising"].valid, got["rising"].reason) == (False, "the loss did not fall: from 1.0000 to 2.0000")
    assert (got["infinite"].valid, got["infinite"].reason) == (False, "1 of 4 losses are not finite")
    seen = snapshot(tmp_path / "sweep")
    assert seen["cells"] == {"ok": 3, "oom": 1, "timeout": 0, "unsupported": 1, "crashed": 3, "skipped": 0}
    assert seen["cells_planned"] == {"": 8} and seen["state"] == {"finished": 1}
    assert seen["tokens_per_second"][got["ok"].cell] == got["ok"].tokens_per_s
    assert seen["step_seconds"][got["ok"].cell] == pytest.approx(STEP_S)
    steps = got["ok"].runs * (got["ok"].warmup_steps + got["ok"].steps)
    assert seen["steps"][got["ok"].cell] == steps and seen["steps"][got["infinite"].cell] > 0
    assert seen["tokens"][got["ok"].cell] == steps * 10 * (got["ok"].batch_size or 0)


def test_what_makes_no_sense_here_is_a_row_with_its_reason(tmp_path: Path) -> None:
    cells = [
        cell("ok", engine="ddp", method="Z3"),
        cell("ok", device="cuda", gpus=3),
        cell("7b", device="cuda", micro_batch=9),
        cell("7b", device="cuda", micro_batch=None, seq_len=11),
    ]
    rows = swept(tmp_path, cells, with_gpus(8, 8), gpu_ids=(0, 1))
    assert [(row.outcome, row.reason) for row in rows[:3]] == [
        ("unsupported", "ddp shards nothing; use deepspeed or fsdp2 for ZeRO"),
        ("unsupported", "it needs 3 GPUs, and the sweep has 2"),
        ("skipped", "9 GiB > 8 GiB"),
    ]
    assert rows[2].predicted_memory_gb == 9 and rows[2].predicted_terms_gb == {"activations": 9}
    assert rows[3].outcome == "crashed"  # even one sequence may fit, so it was tried; the stand-in knows no such model


class OffloadsGib(GibASequence):
    """Each sequence also takes 1 GiB of the host."""

    def predict(self, cell: Cell, spec: ModelSpec, zero: ZeroSizes) -> Prediction:
        there = super().predict(cell, spec, zero)
        return Prediction(moments=there.moments, host=there.peak.terms)


def test_what_a_machine_cannot_hold_of_what_is_offloaded_is_skipped(tmp_path: Path) -> None:
    around = replace(with_gpus(16), predictor=OffloadsGib(), node_bytes=lambda: 5 * GIB)
    cells = [cell("ok", device="cuda", micro_batch=sequences) for sequences in (4, 6)]
    fits, too_much = swept(tmp_path, cells, around, gpu_ids=(0,), models={"ok": Model(spec=SPEC)})
    assert fits.outcome == "ok"
    assert (too_much.outcome, too_much.reason) == (
        "skipped", "the host needs 6.0 GiB, which is more than its 5.0 GiB.",
    )  # fmt: skip


def test_no_skip_runs_what_is_predicted_not_to_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    models = {"ok": Model(spec=SPEC)}
    cells = [cell("ok", device="cuda", micro_batch=9, gpus=2)]
    (row,) = swept(tmp_path, cells, with_gpus(16, 8), gpu_ids=(0, 1), models=models, no_skip=True)
    assert (row.outcome, row.predicted_memory_gb, row.peak_memory_gb) == ("ok", 9, 10)
    assert row.tokens_per_s is not None and row.platform == CARD
    assert (row.mfu_ratio, row.hfu_ratio) == flops.utilization(cells[0], SPEC.decoder, row.tokens_per_s, CARD)
    assert row.mfu_ratio is not None
    said = sweep_cell.read_manifest(tmp_path / "sweep")
    assert (said.device_names, said.driver) == ([CARD, CARD], "570.1")
    assert said.device_memory_bytes == [16 * GIB, 8 * GIB]
    assert said.cells == cells and said.models == models
    assert said.environment["NCCL_NVLS_ENABLE"] == "0" and "HF_TOKEN" not in said.environment
    seen = snapshot(tmp_path / "sweep")
    assert seen["predicted_memory_bytes"][row.cell] == 9 * GIB and seen["peak_memory_bytes"][row.cell] == 10 * GIB


def attempts(row: CellResult) -> list[tuple[int, str]]:
    return [(tried.micro_batch, tried.outcome) for tried in row.search]


@pytest.mark.parametrize(
    ("does", "memory_gib", "at_most", "batch", "tried"),
    [
        ("fits_4", 2, 64, 4, [(2, "ok"), (4, "ok"), (8, "oom"), (6, "oom"), (5, "oom")]),
        ("fits_4", 23, 64, 4, [(16, "oom"), (8, "oom"), (4, "ok"), (6, "oom"), (5, "oom")]),
        ("fits_4", 2, 4, 4, [(2, "ok"), (4, "ok")]),
        ("fits_4", None, 3, 3, [(1, "ok"), (2, "ok"), (3, "ok")]),
        # it runs out in the measurement, and goes down
        ("fits_2_when_timed", 4, 64, 2, [(4, "ok"), (8, "oom"), (6, "oom"), (5, "oom"), (4, "oom")]),
    ],
)
def test_the_largest_micro_batch(
    tmp_path: Path, does: str, memory_gib: int | None, at_most: int, batch: int, tried: list[tuple[int, str]]
) -> None:
    around = AROUND if memory_gib is None else with_gpus(memory_gib)
    searched = cell(does, device="cpu" if memory_gib is None else "cuda", micro_batch=None)
    options = {"gpu_ids": () if memory_gib is None else (0,), "models": {does: Model(spec=SPEC)}}
    (row,) = swept(tmp_path, [searched], around, max_micro_batch=at_most, warmup_steps=3, **options)
    assert (row.outcome, row.batch_size, attempts(row)) == ("ok", batch, tried)
    assert row.cell == searched.name and row.runs == 2
    assert row.tokens_per_s == pytest.approx(batch * 10 / STEP_S)
    assert row.predicted_memory_gb == (None if memory_gib is None else batch)  # of a GPU alone
    names = {path.name for path in (tmp_path / "sweep" / "trials" / row.cell).iterdir()}
    assert names == {"run-1", "run-2", *(f"search-{size}" for size, _ in tried)}


def test_a_search_in_which_nothing_fits(tmp_path: Path) -> None:
    (row,) = swept(tmp_path, [cell("oom", micro_batch=None)])
    assert (row.outcome, row.batch_size, attempts(row)) == ("oom", None, [(1, "oom")])
    assert row.reason.startswith("with micro batch 1: rank 0: OutOfMemoryError")
    (other,) = swept(tmp_path / "other", [cell("segv", micro_batch=None)])
    assert (other.outcome, attempts(other)) == ("crashed", [(1, "crashed")])


@given(st.integers(0, 200), st.integers(1, 100), st.integers(1, 100))
def test_a_search_ends_within_an_eighth_of_the_largest_that_fits(fits: int, start: int, at_most: int) -> None:
    asked: list[int] = []

    def attempt(size: int) -> Attempt:
        asked.append(size)
        return Attempt(micro_batch=size, outcome="ok" if size <= fits else "oom")

    fitting = [made.micro_batch for made in largest(attempt, start=start, at_most=at_most) if made.outcome == "ok"]
    best, truth = max(fitting, default=0), min(fits, at_most)
    assert best <= truth and truth - best <= best / APART
    assert len(set(asked)) == len(asked) <= 13 and asked[0] == floor_power_of_two(min(start, at_most))
    assert all(1 <= size <= at_most for size in asked)


def test_what_runs_out_later_gives_way_to_the_next_smaller_that_fitted() -> None:
    tried = [Attempt(micro_batch=size, outcome="oom" if size == 64 else "ok") for size in (32, 64, 48)]
    assert [next_smaller(tried, 48), next_smaller(tried, 32)] == [32, 16]


def test_a_cell_beyond_its_limit(tmp_path: Path) -> None:
    (row,) = swept(tmp_path, [cell("crawls")], limit_s=0.3)
    assert row.outcome == "timeout"
    assert row.reason.startswith("beyond its limit of ")


def test_cells_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="two different cells are called ok_"):
        swept(tmp_path, [cell("a/ok"), cell("b/ok")])
    assert not (tmp_path / "sweep").exists()
    assert len(swept(tmp_path, [cell("ok"), cell("ok")])) == 1


def test_a_directory_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "mine").touch()
    with pytest.raises(RunError, match="not empty"):
        swept(tmp_path, [cell("ok")])


# -- stopping and going on ---------------------------------------------------------------------------------------------

SWEEP = """
import sys
from pathlib import Path
from tests.training_probe.sweep.test_run import AROUND, cell, settings
from training_probe.sweep.run import sweep
cells = [cell(name) for name in ("ok", "oom", "waits", "rising")]
if sys.argv[2] == "searched":
    cells = [cell("fits_2_and_waits", micro_batch=None)]
sys.exit(sweep(cells, settings(runs=int(sys.argv[3])), Path(sys.argv[1]), print, AROUND))
"""


def at_work(directory: Path, cells: str, runs: int, at: str) -> subprocess.Popen[bytes]:
    """A sweep in a process of its own, at work on what waits."""
    env = {**os.environ, "PYTHONPATH": ROOT}
    argv = [sys.executable, "-c", SWEEP, str(directory), cells, str(runs)]
    running = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL)
    until(lambda: list(directory.glob(f"trials/{at}/steps.jsonl")))
    return running


def in_third_cell(directory: Path) -> subprocess.Popen[bytes]:
    return at_work(directory, "several", 1, "waits*/run-1")


def left_over(directory: Path) -> list[str]:
    pids = [path.read_text() for path in directory.glob("trials/*/*/pid0")]
    assert pids
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_killed_sweep_is_resumed(tmp_path: Path) -> None:
    directory = tmp_path / "sweep"
    running = in_third_cell(directory)
    until(lambda: sum(snapshot(directory)["cells"].values()) == 2)
    assert snapshot(directory)["state"] == {"running": 1}
    running.kill()
    running.wait()
    until(lambda: not left_over(directory))
    before = results.read(directory)
    assert [row.model for row in before] == ["ok", "oom"]
    with (directory / "results.jsonl").open("ab") as file:  # the kill may have come in the middle of a line
        file.write(msgspec.json.encode(before[0])[:100])
    stray = directory / "trials" / cell("waits").name / "run-1" / "stray"
    stray.touch()
    (directory / "go").touch()
    said: list[str] = []
    assert resume(directory, said.append, AROUND) == 0
    after = results.read(directory)
    assert [(row.model, row.outcome) for row in after] == [
        ("ok", "ok"), ("oom", "oom"), ("waits", "ok"), ("rising", "ok"),
    ]  # fmt: skip
    assert after[:2] == before  # not measured again
    assert not stray.exists()
    assert said[0] == "2 of 4 cells are done; going on with the rest"
    assert [line.split()[1] for line in said[1:]] == ["3", "4"]
    assert sum(snapshot(directory)["cells"].values()) == 4
    content = (directory / "results.jsonl").read_bytes()
    assert resume(directory, said.append, AROUND) == 0  # nothing left to do
    assert (directory / "results.jsonl").read_bytes() == content


def test_launches_of_the_cell_that_was_stopped_are_kept(tmp_path: Path) -> None:
    directory = tmp_path / "sweep"
    running = at_work(directory, "searched", 3, "*/run-2")
    running.kill()
    running.wait()
    until(lambda: not left_over(directory))
    (within,) = (directory / "trials").iterdir()
    launched = {path.name: (path / "pid0").read_text() for path in within.iterdir()}
    assert launched.keys() == {"search-1", "search-2", "search-4", "search-3", "run-1", "run-2"}
    (within / "search-4" / "rank0.json").write_text("{")  # somebody has touched it
    (directory / "go").touch()
    assert resume(directory, lambda _: None, AROUND) == 0
    (row,) = results.read(directory)
    assert (row.outcome, row.batch_size, row.runs) == ("ok", 2, 3)
    assert attempts(row) == [(1, "ok"), (2, "ok"), (4, "oom"), (3, "oom")]
    assert row.tokens_per_s_runs == pytest.approx([20 / STEP_S] * 3)
    again = {name for name, pid in launched.items() if (within / name / "pid0").read_text() != pid}
    assert again == {"search-4", "run-2"}


def test_a_sweep_does_not_go_on_on_other_gpus(tmp_path: Path) -> None:
    directory, other = tmp_path / "sweep", with_gpus(80, card="NVIDIA H200")
    with begun([cell("ok"), cell("rising")], settings(gpu_ids=(0,)), directory, with_gpus(80)):
        pass
    with pytest.raises(RunError, match=f"was on {CARD}, and here is NVIDIA H200; go on where it was, or"):
        resume(directory, lambda _: None, other)
    assert resume(directory, lambda _: None, with_gpus(80)) == 0
    assert [row.outcome for row in results.read(directory)] == ["ok", "ok"]
    assert resume(directory, lambda _: None, other) == 0  # nothing is left to measure


def test_a_sweep_that_goes_on_on_another_machine_says_so(tmp_path: Path) -> None:
    with begun([cell("ok")], settings(), tmp_path / "sweep", AROUND) as manifest:
        pass
    machine = msgspec.structs.replace(manifest.machine, hostname="another")
    elsewhere = msgspec.structs.replace(manifest, machine=machine)
    protocol.write_atomically(tmp_path / "sweep" / "manifest.json", elsewhere)
    lines: list[str] = []
    assert resume(tmp_path / "sweep", lines.append, AROUND) == 0
    host = manifest.machine.hostname
    assert lines[1] == f"this sweep began on another and goes on on {host}; two machines differ in speed."


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_sweep_keeps_what_is_done(tmp_path: Path, number: signal.Signals) -> None:
    directory = tmp_path / "sweep"
    running = in_third_cell(directory)
    running.send_signal(number)
    assert running.wait(LONG_S) == 128 + number
    assert not left_over(directory)
    assert [row.model for row in results.read(directory)] == ["ok", "oom"]
    assert snapshot(directory)["state"] == {"stopped": 1}


def test_a_sweep_that_goes_on_is_not_resumed_beside_itself(tmp_path: Path) -> None:
    """A second one would cut the results, and empty the directories of the first one's runs."""
    directory = tmp_path / "run"
    said: list[str] = []

    def say(text: str) -> None:
        with pytest.raises(RunError, match="is still being measured by another process"):
            resume(directory, lambda _: None, AROUND)
        said.append(text)

    assert sweep([cell("ok")], settings(), directory, say, AROUND) == 0
    assert len(said) == 1


def test_a_full_disk_costs_a_sweep_its_gauges_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(progress, "write_snapshot", full)
    one = cell("ok", micro_batch=2)
    told = Progress(
        tmp_path, "r", {}, MeasurementSeries("cell", [one.name]), [], lambda _: None, lambda cell, speed: (None, None)
    )
    told.begin(one, None)
    told.end("finished")


def test_results_are_never_written_through_a_link(tmp_path: Path) -> None:
    directory, outside = tmp_path / "run", tmp_path / "outside"
    assert sweep([cell("ok")], settings(), directory, print, AROUND) == 0
    (directory / results.RESULTS_FILE).unlink()
    (directory / results.RESULTS_FILE).symlink_to(outside)
    with pytest.raises(results.ResultsError, match="leads out of its directory"):
        resume(directory, print, AROUND)
    assert not outside.exists()


def test_there_is_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"holds no manifest.json; name the directory of a sweep\.$"):
        resume(tmp_path, print, AROUND)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(RunError, match="is not a manifest of a sweep of this version"):
        resume(tmp_path, print, AROUND)


@pytest.mark.parametrize(
    ("fields", "named"), [({"python": "/tmp/evil"}, "/tmp/evil"), ({"on": "ray:evil.example:6379"}, "evil.example")]
)
def test_a_directory_names_no_program_and_no_cluster(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    """It may be another's: what it says is not started, and nothing is sent there."""
    with begun([cell("ok")], settings(**fields), tmp_path / "sweep", AROUND):
        pass
    with pytest.raises(RunError, match=named):
        resume(tmp_path / "sweep", print)


# -- GPUs, progress, dry run -------------------------------------------------------------------------------------------


class Card:
    """A GPU of which `used_bytes` is taken."""

    def __init__(self, used_bytes: list[int | None]) -> None:
        self.used_bytes = used_bytes

    def __call__(self, indices: Sequence[int]) -> Any:
        assert list(indices) == [4]
        return self

    def sample(self) -> list[gpus.GpuSample]:
        used = self.used_bytes.pop(0) if len(self.used_bytes) > 1 else self.used_bytes[0]
        return [gpus.GpuSample(index=4, memory_used_bytes=used, power_w=None, utilization_ratio=None, energy_mj=None)]

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("used", "said"),
    [
        ([GIB, GIB + (299 << 20)], None),
        ([GIB, 5 * GIB, 3 * GIB, GIB], None),  # after a while
        ([GIB, 5 * GIB], "GPU 4 had 4096 MiB more in use before a run than before the sweep"),
        ([None, 5 * GIB], None),
        ([GIB, None], None),
    ],
)
def test_memory_is_waited_for(monkeypatch: pytest.MonkeyPatch, used: list[int | None], said: str | None) -> None:
    monkeypatch.setattr(runner, "GPU_MEMORY_WAIT_S", 0.1)
    monkeypatch.setattr(runner, "GPU_MEMORY_POLL_S", 0.01)
    assert MemoryReturn(Card(used), [4]).wait(threading.Event()) == said


def test_memory_that_does_not_come_back_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "GPU_MEMORY_WAIT_S", 0.0)
    around = replace(with_gpus(1, 1, 1, 1, 1), probe=Card([GIB, GIB, 5 * GIB]))
    rows = swept(tmp_path, [cell("ok"), cell("rising")], around, gpu_ids=(4,), runs=1)
    assert rows[0].reason == ""
    assert rows[1].reason.endswith("; GPU 4 had 4096 MiB more in use before a run than before the sweep")


def step(number: int, step_s: float) -> Step:
    return Step(step=number, phase="timed", step_s=step_s, forward_s=0, backward_s=0, optimizer_s=0, loss=2.5)


def test_what_is_shown_of_a_sweep_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    said: list[str] = []
    one, other = cell("ok", micro_batch=2), cell("other")
    series = MeasurementSeries("cell", [one.name, other.name, "third", "fourth"])
    told = Progress(tmp_path, "r", {}, series, [], said.append, lambda cell, speed: (speed / 10_000, None))
    running = told.begin(one, 3.0)
    running.trial(one, "run 1/1", 0.0)
    now = 10.0
    running.step(step(0, 0.5), 1, 4, share=0.25)
    shown = [line.plain.rstrip() for line in lines(told.frame(running), 60)]
    assert shown[:3] == [
        f"cell 1 of 4  {one.name}",
        "━" * 2 + "─" * 23 + "    6 %  0:10 gone, about 2:30 left",
        "now       run 1/1 step 1/4",
    ]
    assert [line.split() for line in shown[3:]] == [["tokens/s", "40", "█"], ["memory", "3.0", "GiB", "predicted"]]
    seen = snapshot(tmp_path)
    assert seen["tokens_per_second"] == {one.name: pytest.approx(2 * 10 / 0.5)}
    assert seen["mfu_ratio"] == {one.name: pytest.approx(0.004)}
    assert seen["step_seconds"] == {one.name: 0.5} and seen["loss"] == {one.name: 2.5}
    assert seen["predicted_memory_bytes"] == {one.name: 3 * GIB}
    assert seen["steps"] == {one.name: 1} and seen["tokens"] == {one.name: 2 * 10}
    running.step(step(1, 0.5), 2, 4, share=0.5)  # within the same second: the file is not written again
    assert snapshot(tmp_path) == seen
    now = 20.0
    running.over(results.of_cell(one, platform="here", outcome="ok"))
    assert said == [f"cell 1 of 4  {one.name}: ok"]
    running = told.begin(other, None)
    frame = told.frame(running)
    assert (frame.left_s, frame.over, frame.predicted_gb) == (pytest.approx(20 + 2 * 20), {"ok": 1}, None)
    assert max(line.cell_len for line in lines(frame, 30)) <= 30 and len(lines(frame, 80, 2)) == 2


def test_a_sweep_on_a_terminal_has_a_view_that_goes_with_it(tmp_path: Path) -> None:
    directory = tmp_path / "sweep"
    terminal = Terminal((sys.executable, "-c", SWEEP, str(directory), "several", "1"), 200, Path(ROOT))
    third = cell("waits").name
    terminal.until(lambda text: f"cell 3 of 4  {third}\n" in text and "run 1/1 step" in text)
    assert [line for line in terminal.lines if "━" in line or "─" in line] != []
    (directory / "go").touch()
    assert terminal.ended() == 0
    left = [line for line in terminal.lines if line]
    assert [line.split("  ")[0] for line in left] == [f"cell {number} of 4" for number in (1, 2, 3, 4)]
    assert terminal.restored
    terminal.close()


def test_a_dry_run_starts_nothing(tmp_path: Path) -> None:
    cells = [
        Cell(model="7b", method="F+R+Z3+O", gpus=2, micro_batch=None),
        Cell(model="7b", engine="ddp", method="Z3"),
    ]
    asked = settings(gpu_ids=(1, 2), python="/opt/my python")
    text = dry_run(cells, asked, tmp_path / "out", AROUND)
    assert f"# {cells[0].name}\n" in text
    assert "CUDA_VISIBLE_DEVICES=1,2" in text
    assert f"{tmp_path}/out/trials/{cells[0].name}/run-1" in text
    assert "micro batch: searched, up to 64; what follows is for 1" in text
    assert '"stage": 3' in text
    assert "predicted memory: 1.00 GiB (activations 1.00)" in text
    assert text.rstrip().endswith(
        f"# {cells[1].name}\n# unsupported: ddp shards nothing; use deepspeed or fsdp2 for ZeRO"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_is_a_script_that_starts_the_run(tmp_path: Path) -> None:
    """Whose Python is whichever the environment has, and whose GPUs are hidden only where they are those of here."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(
        '#!/bin/bash\nprintf "%s|" "${CUDA_VISIBLE_DEVICES-unset}" "$@"\ncat "${@: -1}/trial.json"\n'
    )
    (tmp_path / "bin" / "python").chmod(0o755)
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    wanted = cell("7b", gpus=2, device="cuda", method="Z3", micro_batch=None)
    for gpu_ids, visible in (((), "unset"), ((4, 6), "4,6"), ((4,), "unset")):
        script = dry_run([wanted], settings(gpu_ids=gpu_ids, python="/no/such"), Path("runs/it's a sweep"))
        done = subprocess.run(["bash", "-euc", script], env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        seen, *argv, trial = done.stdout.split("|")
        assert seen == visible
        assert argv == [
            "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port",
            "29500", "-m", "training_probe.worker", f"runs/it's a sweep/trials/{wanted.name}/run-1",
        ]  # fmt: skip
        read = msgspec.json.decode(trial, type=protocol.Trial)
        assert read.cell == msgspec.structs.replace(wanted, micro_batch=1) and read.steps == 4


def test_results_survive_a_cut(tmp_path: Path) -> None:
    row = results.of_cell(cell("ok"), platform="here", outcome="ok")
    other = results.of_cell(cell("other"), platform="here", outcome="ok")
    results.append(tmp_path, row)
    whole = (tmp_path / "results.jsonl").read_bytes()
    for length in (0, 1, 100, len(whole) - 1, len(whole)):
        shutil.rmtree(tmp_path / "cut", ignore_errors=True)
        (tmp_path / "cut").mkdir()
        (tmp_path / "cut" / "results.jsonl").write_bytes(whole[:length])
        results.mend(tmp_path / "cut")
        results.append(tmp_path / "cut", other)
        expected = [row, other] if length == len(whole) else [other]
        assert results.read(tmp_path / "cut") == expected


def test_a_breakdown_is_not_resumed_as_a_sweep(tmp_path: Path) -> None:
    directory = tmp_path / "sweep"
    sweep([cell("ok")], settings(), directory, lambda _: None, AROUND)
    trial = next((directory / "trials").iterdir())
    (directory / results.RESULTS_FILE).unlink()
    (directory / results.BREAKDOWN_FILE).touch()
    with pytest.raises(RunError, match="holds a breakdown, which cannot be gone on with"):
        resume(directory, print, AROUND)
    assert trial.exists()  # its traces are not swept away
    assert not (directory / results.RESULTS_FILE).exists()
