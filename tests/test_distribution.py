"""The wheel and the sdist work outside the checkout: installed into an empty environment, run from an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = (
    ("loadgen", "run", "--requests", "20", "--output-tokens", "8", "--no-calibrate", "--out", "run"),
    ("loadgen", "predict", "--gpu", "h200", "--model", "7b", "--requests", "50", "--out", "predicted"),
    ("loadgen", "plan", "--model", "7b", "--slo", "ttft_ms=500,tpot_ms=50", "--rate", "2", "--gpu", "h200"),
    ("training_probe", "memory", "--model", "7b", "--method", "F+R+Z3", "--gpus", "8"),
)


def run(*argv: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run([str(word) for word in argv], capture_output=True, text=True, cwd=cwd, env=env, timeout=600)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    result = run(sys.executable, "-m", "build", "--outdir", out, ROOT, cwd=out)
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, built: Path) -> Path:
    """The programs of an environment that was empty before the wheel and what it needs were installed."""
    path = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", path], check=True)
    result = run(path / "bin" / "python", "-m", "pip", "install", "-q", *built.glob("*.whl"), cwd=path)
    assert result.returncode == 0, result.stderr
    return path / "bin"


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_it_works_outside_the_checkout(kind: str, programs: Path, built: Path, tmp_path: Path) -> None:
    (package,) = built.glob(kind)
    again = ("-m", "pip", "install", "-q", "--force-reinstall", "--no-deps")
    installed = run(programs / "python", *again, package, cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    for program, *arguments in COMMANDS:
        result = run(programs / program, *arguments, cwd=tmp_path)
        assert result.returncode in ((0, 4) if arguments[0] == "run" else (0,)), result.stderr
        assert "Traceback" not in result.stderr
    assert (tmp_path / "run" / "cdf.svg").exists() and (tmp_path / "predicted" / "report.md").exists()
    page = "from loadgen.page import content, html; print(html.render(content.Page(title='', verdict='', sections=[])))"
    assert "uPlot" in run(programs / "python", "-c", page, cwd=tmp_path).stdout
    where = run(programs / "python", "-c", "import loadgen; print(loadgen.__file__)", cwd=tmp_path).stdout
    assert where.startswith(str(programs.parent))
