"""Cells that are traced, one after another: each becomes one line of `breakdown.jsonl`, whatever happens to it.

DIR/manifest.json, breakdown.jsonl
DIR/trials/<cell>/profile/: trial.json, log.txt, rank<N>.json, profile.json, trace.json.gz (Perfetto opens it)
"""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from backends.untrusted import UNDECODABLE, read_json_lines
from loadgen import trace
from training_probe.breakdown.attribution import Attribution, attribute
from training_probe.conditions import Conditions, worst
from training_probe.grid import Cell, GridError
from training_probe.launch import runner
from training_probe.launch.runner import Limits, MemoryReturn
from training_probe.protocol import PROFILE_FILE, TRACE_FILE, Profile
from training_probe.results import BREAKDOWN_FILE, Amount, Outcome, ResultsError
from training_probe.sweep import run
from training_probe.sweep.cell import Dependencies, Settings, SweepManifest, device_memory_bytes
from training_probe.sweep.run import Say

SCHEMA = "training_probe.breakdown/1"


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """One traced cell. layers: decoder layers of the model, where they are known. trace: the trace's file within the
    directory. bare_step_s, traced_step_s: a step by the process's clock, without the profiler and with it."""

    schema: str = SCHEMA
    cell: Cell
    platform: str
    layers: int | None = None
    outcome: Outcome
    reason: str = ""
    log: str = ""
    trace: str = ""
    bare_step_s: Amount | None = None
    traced_step_s: Amount | None = None
    bare_step_std_s: Amount | None = None  # over its steps
    conditions: Conditions | None = None  # of the steps without it and of those with it, the worst
    attribution: Attribution | None = None


def check(cells: Sequence[Cell]) -> None:
    """That the cells can be traced. Raises GridError."""
    for cell in cells:
        if cell.engine == "megatron":
            raise GridError("Megatron's model has no named parts here; trace deepspeed, fsdp2 or ddp.")
        if cell.own:
            raise GridError(f"the model of {cell.engine} has no named parts here; trace deepspeed, fsdp2 or ddp.")
        if cell.compile:
            raise GridError("compiled layers have no parts that could be told apart; leave --compile out.")
        if cell.has_reference:
            raise GridError("passes of a policy and of its reference are not told apart; trace --task finetune.")
        if cell.micro_batch is None:
            raise GridError("--micro-batch max is for sweep; name the micro batch to be traced.")


def breakdown(
    cells: Sequence[Cell], settings: Settings, directory: Path, say: Say, around: Dependencies | None = None
) -> int:
    """Traces the cells into a new directory; the exit code. Raises RunError, RunnerError."""
    around = around or Dependencies()
    with run.begun(cells, settings, directory, around) as manifest:

        def trace_all(cancelled: threading.Event) -> None:
            with contextlib.closing(MemoryReturn(around.probe, manifest.gpu_ids)) as memory:
                for number, cell in enumerate(manifest.cells, 1):
                    say(f"tracing cell {number} of {len(manifest.cells)}: {cell.name}")
                    memory.wait(cancelled)
                    result = _traced(cell, manifest, directory, around, cancelled)
                    file.write(msgspec.json.encode(result) + b"\n")
                    if result.outcome != "ok":
                        say(f"{cell.name}: {result.outcome}: {result.reason}")

        with (directory / BREAKDOWN_FILE).open("ab", buffering=0) as file:
            return runner.until_stopped(directory, say, trace_all)


def read(directory: Path) -> list[Breakdown]:
    """What was traced into a directory; a last line that was cut by a kill is left out. Raises ResultsError."""
    path, wrong = directory / BREAKDOWN_FILE, "is not a breakdown of this version"
    return read_json_lines(path, Breakdown, ResultsError, wrong, doubt=_doubt)


def _doubt(each: Breakdown) -> str:
    return "it is ok and has no attribution" if each.outcome == "ok" and each.attribution is None else ""


def _traced(
    cell: Cell, manifest: SweepManifest, directory: Path, around: Dependencies, cancelled: threading.Event
) -> Breakdown:
    """Raises Stopped."""
    spec = manifest.model(cell).decoder
    layers = None if spec is None else spec.layers
    result = Breakdown(cell=cell, platform=manifest.platform, layers=layers, outcome="ok")
    refusal = around.refusal(cell, manifest, device_memory_bytes(cell, manifest))
    if refusal is not None:
        return replace(result, outcome=refusal[0], reason=refusal[1])
    within = directory / "trials" / cell.name / "profile"
    trial = replace(manifest.trial(cell), profile=True)
    limits = Limits(timeout_s=manifest.timeout_s, limit_s=manifest.limit_s)
    ended = runner.run_trial(trial, within, around.launching(cell, manifest), limits, cancelled=cancelled)
    result = replace(result, log=str(ended.log.relative_to(directory.absolute())))
    if ended.outcome != "ok":
        return replace(result, outcome=ended.outcome, reason=ended.reason)
    path = within / TRACE_FILE
    try:
        measured = msgspec.json.decode((within / PROFILE_FILE).read_bytes(), type=Profile)
        attribution = attribute(trace.read(path))
    except (trace.TraceError, OSError, *UNDECODABLE) as error:
        return replace(result, outcome="crashed", reason=" ".join(str(error).split()))
    return replace(
        result, trace=str(path.relative_to(directory)), bare_step_s=measured.bare_step_s,
        traced_step_s=measured.traced_step_s, attribution=attribution,
        bare_step_std_s=statistics.stdev(measured.bare_steps_s) if len(measured.bare_steps_s) > 1 else None,
        conditions=worst(ended.measured.conditions),
    )  # fmt: skip
