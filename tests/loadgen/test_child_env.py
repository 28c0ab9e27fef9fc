"""Processes of our own code: what lies in the working directory is never imported by them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadgen import child_env

ROOT = Path(child_env.__file__).resolve().parents[1]
LOADGEN = [sys.executable, "-c", "import sys; sys.path.remove(''); from loadgen.cli import main; main()"]


@pytest.mark.processes
def test_modules_of_the_working_directory_are_not_run(tmp_path: Path) -> None:
    """Every process of a run is started: the embedded server, sampling, snapshots, workers and what they hang on."""
    for name in ("json", "socket", "pickle", "selectors", "loadgen", "servers", "multiprocessing"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write('{name} ')")
    argv = ["run", "--requests", "20", "--output-tokens", "2", "--workers", "2", "--no-calibrate", "--warmup", "0"]
    done = subprocess.run(
        [*LOADGEN, *argv, "--out", "run"], capture_output=True, text=True, timeout=120, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()
    assert done.returncode in (0, 4), done.stderr
    assert json.loads((tmp_path / "run" / "snapshot.json").read_text())["state"] == "finished"
    assert (tmp_path / "run" / "server.jsonl").read_text().count("\n") > 1


def test_this_copy_comes_first_and_the_users_path_stays() -> None:
    ours = {"PYTHONPATH": os.pathsep.join(["/a", str(ROOT), "", "/b"])}
    assert child_env.environment(ours)["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "/a", "/b"]
    assert child_env.environment({}) == {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("named", [None, "2"])
def test_numpy_starts_no_threads_that_nobody_asked_for(named: str | None) -> None:
    """And servers that are started have the environment of their user."""
    code = "import os; from loadgen import child_env; child_env.load_numpy(); import sys; "
    code += "print('numpy' in sys.modules, len(os.listdir('/proc/self/task')), os.environ.get('OPENBLAS_NUM_THREADS'))"
    env = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    env |= {} if named is None else {"OPENBLAS_NUM_THREADS": named}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    loaded, threads, kept = done.stdout.split()
    assert (loaded, kept) == ("True", str(named)) and (named is not None or threads == "1")


@pytest.mark.parametrize("before", [None, "", "1"])
def test_what_was_set_is_put_back(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if before is None:
        monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONSAFEPATH", before)
    with child_env.spawning():
        assert os.environ["PYTHONSAFEPATH"] == "1"
    assert os.environ.get("PYTHONSAFEPATH") == before
