"""A user's own script under the probe: one callback more, and the directory of a sweep of one cell."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from loadgen.monitor.exporter import Exporter
from loadgen.rundir import Snapshot
from tests.support.waiting import free_ports
from tests.training_probe.engines import tiny
from training_probe import cli, results

pytestmark = [
    tiny.needs_engines,
    pytest.mark.skipif(find_spec("trl") is None, reason="needs TRL and accelerate (make test-train)"),
]
SCRIPT, SFT = "tests.training_probe.engines.own_trainer", "tests.training_probe.engines.own_sft"
STEPS, WARMUP, SEQUENCES, PADDED, LENGTH = 6, 2, 2 * 2, 32, 24  # of the script


@pytest.mark.parametrize(("script", "ranks"), [(SCRIPT, 1), (SCRIPT, 2), (SFT, 1)])
def test_a_script_is_measured(script: str, ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    probed, out = tmp_path / "probed", tmp_path / "out"
    torchrun = ("torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_ports(1)[0]}", "-m")
    argv = (sys.executable, "-m", *(torchrun if ranks > 1 else ()), script, str(out), str(probed))
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"training_probe report {probed}" in done.stderr
    (result,) = results.read(probed)
    assert (result.engine, result.outcome, result.valid, result.gpus) == ("trainer", "ok", True, ranks)
    assert (result.seq_len, result.batch_size, result.grad_accum) == (PADDED, 2, 2)
    assert (result.steps, result.warmup_steps, result.runs) == (STEPS - WARMUP, WARMUP, 1)
    assert result.padding_ratio == pytest.approx(1 - LENGTH / PADDED)
    assert result.step_ms and result.tokens_per_s and result.data_wait_ms and result.first_step_ms
    # A step and the wait for its data are all that the speed counts, but for logging.
    counted_s = (result.steps * (result.step_ms + result.data_wait_ms)) / 1e3
    assert result.tokens_per_s <= 1.001 * ranks * SEQUENCES * LENGTH * result.steps / counted_s
    assert result.loss_first and result.loss_last and result.loss_last < result.loss_first
    assert result.checkpoint_bytes == sum(
        path.stat().st_size for path in (out / f"checkpoint-{STEPS}").rglob("*") if path.is_file()
    )
    assert len(result.peak_memory_gb_by_rank) == ranks and result.versions["transformers"]
    snapshot = msgspec.json.decode((probed / "snapshot.json").read_bytes(), type=Snapshot)
    values = {each.name: each.samples[0].value for each in snapshot.families if each.samples}
    assert snapshot.state == "finished" and values["llm_dissect_training_steps"] == STEPS
    assert values["llm_dissect_training_tokens"] == STEPS * ranks * SEQUENCES * PADDED
    assert b"llm_dissect_training_tokens_per_second" in Exporter(probed).page()[0]
    assert cli.invoke(["report", str(probed)]) in tiny.MEASURED
    assert "data wait" in (probed / "report.md").read_text()
    assert cli.invoke(["compare", str(probed), str(probed)]) == 0
    assert "1 no difference shown" in capsys.readouterr().out


def test_a_directory_that_is_taken_stops_the_script(tmp_path: Path) -> None:
    (tmp_path / "probed").mkdir()
    (tmp_path / "probed" / "mine").touch()
    argv = (sys.executable, "-m", SCRIPT, str(tmp_path / "out"), str(tmp_path / "probed"))
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1 and "exists and is not empty" in done.stderr.splitlines()[-1]
