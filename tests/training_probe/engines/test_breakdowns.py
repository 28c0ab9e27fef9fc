"""Real steps, traced on the CPU: the parts add up to the step that the process's own clock measured, and each kind of
work is found in the part that does it."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training_probe.engines import tiny
from training_probe.breakdown import run
from training_probe.breakdown.attribution import FUSED_ATTENTION, PASSES
from training_probe.breakdown.run import Breakdown

pytestmark = [
    tiny.needs_engines,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are started on Linux only"),
]

COMMAND = str(Path(sys.executable).with_name("training_probe"))
WITHIN = 0.03
EXPLAINED = 0.9  # of steps of 50 ms: when a busy machine interrupts one between two ranges, that has no part


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Breakdown]:
    """By engine and method."""
    found = {}
    runs = (
        ("ddp", ("Naive", "F+R", "RS"), "1"),
        ("deepspeed", ("Z2", "L+Z3"), "2"),
        ("fsdp2", ("F+R+Z3",), "2"),
    )
    for engine, methods, gpus in runs:
        directory = tmp_path_factory.mktemp(engine) / "out"
        command = (
            COMMAND,
            "breakdown",
            "--device",
            "cpu",
            "--model",
            "tiny",
            "--engine",
            engine,
            "--method",
            *methods,
            "--gpus",
            gpus,
            "--seq-len",
            "64",
            "--steps",
            "2",
            "--warmup-steps",
            "1",
            "--out",
            str(directory),
        )
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=directory.parent)
        assert ended.returncode in tiny.MEASURED, ended.stderr[-3000:]
        assert json.loads(ended.stdout.splitlines()[-1])["cells"]["by_outcome"] == {"ok": len(methods)}
        for each in run.read(directory):
            found[engine, each.cell.method] = each
            events = json.loads(gzip.decompress((directory / each.trace).read_bytes()))["traceEvents"]
            assert any(event["name"] == "phase:forward" for event in events)
    return found


def test_the_parts_add_up_to_the_measured_step(traced: dict[tuple[str, str], Breakdown]) -> None:
    for name, each in traced.items():
        assert each.attribution is not None and each.traced_step_s is not None
        assert sum(share.seconds for share in each.attribution.shares) == pytest.approx(
            each.traced_step_s, rel=WITHIN
        ), name
        windows = sum(window.overall_s for window in each.attribution.windows)
        assert windows == pytest.approx(each.traced_step_s, rel=WITHIN), name
        assert [window.phase for window in each.attribution.windows] == list(PASSES)
        assert each.attribution.explained_ratio > EXPLAINED, name


def test_each_product_is_found_in_its_part(traced: dict[tuple[str, str], Breakdown]) -> None:
    naive = traced["ddp", "Naive"].attribution
    assert naive is not None
    for part in ("QKV", "Bmm0", "Bmm1", "Output", "MLP", "Linear"):
        for phase in ("forward", "backward"):
            assert naive.seconds(phase=phase, part=part, kind="GEMM") > 0, (phase, part)
    for part in ("Embedding", "RoPE", "Softmax", "RMSNorm", "Loss"):
        for phase in ("forward", "backward"):
            assert naive.seconds(phase=phase, part=part, kind="element-wise") > 0, (phase, part)
    assert naive.seconds(kind="attention") == 0
    assert naive.seconds(recomputed=True) == 0


def test_flash_attention_and_what_is_recomputed_are_seen(traced: dict[tuple[str, str], Breakdown]) -> None:
    for name in (("ddp", "F+R"), ("fsdp2", "F+R+Z3")):
        found = traced[name].attribution
        assert found is not None
        assert found.seconds(part="Bmm0") == found.seconds(part="Softmax") == 0
        for recomputed in (False, True):
            assert found.seconds(phase="backward", part=FUSED_ATTENTION, kind="attention", recomputed=recomputed) > 0
            assert found.seconds(phase="backward", part="MLP", kind="GEMM", recomputed=recomputed) > 0
    selective = traced["ddp", "RS"].attribution
    assert selective is not None
    assert selective.seconds(part="Softmax", recomputed=True) > 0
    assert selective.seconds(part="MLP", recomputed=True) == 0


def test_engines_communicate(traced: dict[tuple[str, str], Breakdown]) -> None:
    for name in (("deepspeed", "Z2"), ("fsdp2", "F+R+Z3")):
        found = traced[name].attribution
        assert found is not None and found.seconds(kind="communication") > 0
    assert sum(each.seconds for each in traced["ddp", "Naive"].attribution.shares if each.kind == "communication") == 0  # type: ignore[union-attr]
