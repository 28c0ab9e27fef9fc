"""`loadgen run --launch process` with a real vLLM on the CPU: started, measured, ended, and stopped half-way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import serve
import tiny_model

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "vllm" not in request.config.option.markexpr:
        pytest.skip("needs a real vLLM; run `make test-vllm`")
    directory = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model.write(directory)
    return directory


def command(model: Path, out: Path, *more: str) -> list[str]:
    return [
        str(Path(sys.executable).parent / "loadgen"), "run", "--launch", "process", "--model", str(model),
        "--server-python", str(serve.PYTHON), "--gpus", "none", "--dtype", "bfloat16", "--dummy-weights",
        "--max-model-len", "1024", "--max-running", "256", "--server-arg=--enforce-eager",
        "--requests", "40", "--input-tokens", "128", "--output-tokens", "8", "--no-calibrate", "--out", str(out), *more,
    ]  # fmt: skip


ENVIRONMENT = {**os.environ, **serve.ENVIRONMENT}


def processes_with(text: str) -> list[str]:
    """Command lines of living processes that mention `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line and "vllm.entrypoints" in line:
            found.append(line)
    return found


def test_from_start_to_clean_up(model: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        command(model, tmp_path / "run"), env=ENVIRONMENT, capture_output=True, text=True, timeout=400
    )
    assert done.returncode in (0, 4), done.stderr[-3000:]  # 4: this machine made the client late
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["requests"]["ok"] == 40
    assert report["tokens"] == {"prompt": 40 * 128, "output": 40 * 8}
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    launch = manifest["launch"]
    assert manifest["kv_cache_tokens"] == launch["kv_cache_tokens"]  # by its metrics, and by its log
    assert manifest["server_version"] == launch["version"]
    assert int(manifest["server_settings"]["block_size"]) > 0
    assert launch["version"].startswith("0.") and launch["kv_cache_tokens"] > 1024
    assert "ended" not in launch
    assert "Application startup complete" in (tmp_path / "run/server.log").read_text()
    assert processes_with(str(model)) == []


def test_a_bad_flag_is_named(model: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        command(model, tmp_path / "run", "--server-arg=--frobnicate"),
        env=ENVIRONMENT, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 3
    last = done.stderr.splitlines()[-1]
    assert "exit code 2" in last and "--frobnicate" in last and "--server-arg" in last
    assert "Traceback" not in last


def test_stopped_while_it_starts(model: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(command(model, tmp_path / "run"), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not processes_with(str(model)) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "stopped before the load began" in said.splitlines()[-1]
    assert processes_with(str(model)) == []


def test_a_breakdown_adds_up_to_the_step(model: Path, tmp_path: Path) -> None:
    """The steps as the client's streams saw them are the other witness: they know nothing of the trace."""
    out = tmp_path / "run"
    words = [
        str(Path(sys.executable).parent / "loadgen"), "breakdown", "--launch", "process", "--model", str(model),
        "--server-python", str(serve.PYTHON), "--gpus", "none", "--dtype", "bfloat16", "--dummy-weights",
        "--max-model-len", "1024", "--max-running", "256", "--server-arg=--enforce-eager",
        "--input-tokens", "64", "--output-tokens", "800", "--concurrency", "16", "--steps", "60", "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print({name: found[name] for name in ("step_ms", "client_ms", "client_before_ms", "kinds", "parts", "steps")})
    assert (found["form"], found["layers"], found["batch"], found["emulated"]) == ("cpu", 4, 16, False)
    assert found["steps"] >= 58
    assert sum(found["kinds"].values()) == pytest.approx(found["step_ms"], rel=0.01)
    for sums in (found["kinds"], found["parts"]):  # the traced steps may meet another pace of the cores than the others
        assert sum(sums.values()) == pytest.approx(found["client_ms"], rel=0.08)
    for name in ("Element-Wise", "RoPE", "Attention", "GEMM", "RMSNorm"):
        assert found["kinds"][name] > 0
    assert found["attributed_ratio"] > 0.95 and found["assigned_ratio"] == 1.0
    assert (out / "trace.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert processes_with(str(model)) == []
