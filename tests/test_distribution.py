"""The wheel and the sdist work outside the checkout: built in isolation, installed by pip, uv and pipx into a path
with a space and letters beyond ASCII, and run from an empty folder, also where little may be written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN = ("loadgen", "run", "--requests", "20", "--output-tokens", "8", "--no-calibrate", "--out", "run")
MEMORY = ("training_probe", "memory", "--model", "7b", "--method", "F+R+Z3", "--gpus", "8")
COMMANDS = (
    RUN,
    ("loadgen", "predict", "--gpu", "h200", "--model", "7b", "--requests", "50", "--out", "predicted"),
    ("loadgen", "plan", "--model", "7b", "--slo", "ttft_ms=500,tpot_ms=50", "--rate", "2", "--gpu", "h200"),
    MEMORY,
)
pytestmark = pytest.mark.processes


def run(
    *argv: str | Path, cwd: Path, umask: int = -1, without: tuple[str, ...] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    """A command in this environment, but for variables that it is `without`, with others besides."""
    left_out = {"PYTHONPATH", "VIRTUAL_ENV", *without}
    env = {name: value for name, value in os.environ.items() if name not in left_out} | env
    words = [str(word) for word in argv]
    return subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=env, timeout=600, umask=umask)


def check_commands(programs: Path, cwd: Path, *prefix: str, commands: tuple[tuple[str, ...], ...] = COMMANDS) -> None:
    """That they work. A run on a busy machine may be judged INVALID."""
    for program, *arguments in commands:
        result = run(*prefix, programs / program, *arguments, cwd=cwd)
        assert result.returncode in ((0, 4) if arguments[0] == "run" else (0,)), result.stderr
        assert "Traceback" not in result.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    result = run(sys.executable, "-m", "build", "--outdir", out, ROOT, cwd=out)
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """The programs of an environment that was empty before the wheel and what it needs were installed."""
    path = tmp_path_factory.mktemp("environment") / "a place for Zo\u00eb"
    subprocess.run([sys.executable, "-m", "venv", path], check=True)
    result = run(path / "bin" / "python", "-m", "pip", "install", "-q", wheel, cwd=path)
    assert result.returncode == 0, result.stderr
    return path / "bin"


@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_it_works_outside_the_checkout(kind: str, programs: Path, built: Path, tmp_path: Path) -> None:
    (package,) = built.glob(kind)
    again = ("-m", "pip", "install", "-q", "--force-reinstall", "--no-deps")
    installed = run(programs / "python", *again, package, cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    check_commands(programs, tmp_path)
    assert (tmp_path / "run" / "report.html").exists() and (tmp_path / "predicted" / "report.md").exists()
    page = "from loadgen.document.content import Document as D; from loadgen.document.html import render; "
    page += "print(render(D(title='', verdict='', sections=[])))"
    assert "uPlot" in run(programs / "python", "-c", page, cwd=tmp_path).stdout
    where = run(programs / "python", "-c", "import loadgen; print(loadgen.__file__)", cwd=tmp_path).stdout
    assert where.startswith(str(programs.parent))


@pytest.mark.parametrize(
    ("package", "extra", "command"),
    [
        ("docker", "docker", ("loadgen", "run", "--backend", "llamacpp", "--model", "m.gguf", "--launch", "docker")),
        ("pyyaml", "docker", ("loadgen", "compose", "--backend", "vllm", "--model", "7b", "--tp", "1")),
        ("zstandard", "zstd", ("loadgen", "run", "--dataset", "packed.jsonl.zst")),
        (
            "tokenizers",
            "tokenizer",
            ("loadgen", "run", "--backend", "tgi", "--url", "http://127.0.0.1:9", "--tokenizer", "x"),
        ),
        ("ray", "ray", ("loadgen", "run", "--url", "http://127.0.0.1:9", "--on", "ray")),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_lacking_is_named_with_the_command(
    package: str, extra: str, command: tuple[str, ...], programs: Path, tmp_path: Path
) -> None:
    (tmp_path / "packed.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    result = run(programs / command[0], *command[1:], cwd=tmp_path)
    assert result.returncode in (2, 3), result.stderr
    last = result.stderr.splitlines()[-1]
    assert f"the Python package {package} is not installed; pip install 'llm-dissect[{extra}]'" in last, last
    assert not (tmp_path / "runs").exists()


def test_a_home_and_packages_that_cannot_be_written(programs: Path, tmp_path: Path) -> None:
    """By a user, or by a root who may not write everywhere either."""
    prefix = ("setpriv", "--bounding-set=-all") if os.geteuid() == 0 else ()
    home = tmp_path / "home"
    home.mkdir(0o500)
    packages = [path for path in (programs.parent / "lib").rglob("*") if path.is_dir()]
    try:
        for path in packages:
            path.chmod(0o555)
        probe = (*prefix, "sh", "-c", 'touch "$0/written"')
        assert run(*probe, home, cwd=tmp_path).returncode and run(*probe, packages[-1], cwd=tmp_path).returncode
        check_commands(programs, tmp_path, *prefix, "env", f"HOME={home}")
    finally:
        for path in packages:
            path.chmod(0o755)
    assert (tmp_path / "run" / "report.html").exists() and not any(home.iterdir())


def test_no_home_and_a_private_umask(programs: Path, tmp_path: Path) -> None:
    result = run(programs / RUN[0], *RUN[1:], cwd=tmp_path, umask=0o077, without=("HOME", "USER", "LOGNAME"))
    assert result.returncode in (0, 4), result.stderr
    assert "Traceback" not in result.stderr
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert written and not any(path.stat().st_mode & 0o077 for path in written)


@pytest.mark.parametrize("tool", ["uv", "pipx"])
def test_tools_that_install_programs(tool: str, wheel: Path, tmp_path: Path) -> None:
    place, programs = tmp_path / "to ols", tmp_path / "bin"
    scripts = Path(sys.executable).parent
    installer = [shutil.which("uv", path=scripts) or "uv", "tool"] if tool == "uv" else [sys.executable, "-m", "pipx"]
    installed = run(
        *installer, "install", "--python", sys.executable, wheel, cwd=tmp_path,
        UV_TOOL_DIR=str(place), UV_TOOL_BIN_DIR=str(programs),
        PIPX_HOME=str(place), PIPX_BIN_DIR=str(programs), PIPX_MAN_DIR=str(tmp_path / "man"),
    )  # fmt: skip
    assert installed.returncode == 0, installed.stderr
    check_commands(programs, tmp_path, commands=(RUN, MEMORY))
