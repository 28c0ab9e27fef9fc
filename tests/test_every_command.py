"""On any Python: every module can be imported, and every command of both programs runs once, with what the embedded
server, a model or a file gives it. `make test-python` runs this on a second Python."""

from __future__ import annotations

import importlib
import json
import pkgutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import backends
import loadgen
import servers
import training_probe
from loadgen import cli as loadgen_cli
from training_probe import cli as training_probe_cli

PROGRAMS = {"loadgen": loadgen_cli, "training_probe": training_probe_cli}
# import torch and its engines
TORCH = ("training_probe.worker.", "training_probe.callback", "training_probe.recorder", "training_probe.torchtitan")
MODULES = [
    found.name
    for package in (backends, loadgen, servers, training_probe)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not found.name.startswith(TORCH) and not found.name.endswith(".__main__")
]
# In order: the later ones read what the earlier ones wrote. The first word is the exit code, where it is not 0.
COMMANDS = """
loadgen backends
loadgen doctor
loadgen run --requests 20 --output-tokens 4 --no-calibrate --out run
loadgen report run
loadgen compare run run
2 loadgen import trained/results.jsonl
loadgen list .
loadgen show run
loadgen completion bash
loadgen sweep --rates 40 80 --requests 20 --output-tokens 4 --no-calibrate --out sweep
loadgen search --slo ttft_ms=500 --output-tokens 4 --budget-minutes 0.1 --no-calibrate --out search
loadgen predict --gpu h200 --model 7b --requests 20 --output-tokens 4 --out predicted
loadgen plan --gpu h200 --model 7b --slo ttft_ms=500,tpot_ms=50 --rate 2
loadgen breakdown --gpu h200 --model 7b --out breakdown
loadgen compose --backend vllm --model 7b
loadgen clean
2 loadgen collect run
2 loadgen calibrate run --out profile.json
training_probe letters
training_probe memory --model 7b --method F --gpus 1
training_probe plan
training_probe sweep --dry-run
training_probe report trained
training_probe compare trained trained
training_probe breakdown --help
training_probe micro gemm --help
""".strip().splitlines()
SERVING = ("loadgen serve", "loadgen export")  # until they are stopped
RESULT = {
    "cell": "tiny_F", "model": "tiny", "task": "pretrain", "engine": "ddp", "method": "F", "platform": "CPU", "gpus": 1,
    "seq_len": 64, "batch_size": 1, "outcome": "ok", "tokens_per_s": 5.0, "valid": True,
}  # fmt: skip


def test_every_module_can_be_imported() -> None:
    for name in MODULES:
        importlib.import_module(name)


def test_the_commands_are_all_of_them() -> None:
    named = {" ".join(line.removeprefix("2 ").split()[:2]) for line in COMMANDS}
    there = {
        f"{program} {name}" for program, cli in PROGRAMS.items() for name in cli.build_app() if not name.startswith("-")
    }
    assert named | set(SERVING) == there


def test_every_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained/results.jsonl").write_text(json.dumps(RESULT) + "\n")
    for line in COMMANDS:
        first, _, others = line.partition(" ")
        code, words = (int(first), others.split()) if first.isdecimal() else (0, line.split())
        try:
            ended = PROGRAMS[words[0]].invoke(words[1:])
        except SystemExit as end:  # --help
            ended = int(end.code or 0)
        said = capsys.readouterr()
        # A run on a busy machine may be judged invalid, and a machine may have no Docker engine to clean.
        other = {"run": 4, "report": 4, "sweep": 4, "search": 4, "clean": 3}.get(words[1], code)
        assert ended in (code, other), f"{line}: {said.err}"
        assert said.out or said.err
    assert (tmp_path / "run/report.html").exists() and (tmp_path / "trained/report.html").exists()


@pytest.mark.parametrize("command", ["serve --port 0", "export --runs . --port 0"])
def test_what_serves_runs_as_a_module_until_it_is_stopped(command: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "loadgen", *command.split()]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        assert "http://127.0.0.1:" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in process.stdout.read()
    assert process.returncode == 0


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_module_is_the_command(program: str) -> None:
    asked = [sys.executable, "-m", program, "no-such-command"]
    ended = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1) and ended.stderr.startswith(f"{program}: ")
