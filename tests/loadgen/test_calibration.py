"""The client's ceiling: measured once for an hour, and kept where nobody else could have written it."""

from __future__ import annotations

import asyncio
import json
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import backends
from backends.protocol import ServerInfo
from loadgen import calibration
from loadgen.config import Config
from loadgen.plan import ClientPlan, plan_run
from loadgen.server import embedded
from loadgen.target import Target


def plan(requests: int = 40, backend: str = "openai") -> ClientPlan:
    config = Config(backend=backend, url="http://127.0.0.1:1", requests=requests, output_tokens="8")
    return plan_run(config, backends.get(backend), Target(""), ServerInfo("m"), "run")


def age(file: Path) -> None:
    kept = json.loads(file.read_text())
    for each in kept.values():
        each["measured_unix_s"] -= calibration.REUSED_S
    file.write_text(json.dumps(kept))


SPOILS: dict[str, Callable[[Path], object]] = {
    "too old": age,
    "others may write it": lambda file: file.chmod(0o666),
    "no JSON": lambda file: file.write_text("{"),
    "other fields": lambda file: file.write_text('{"a": {"requests": "many"}}'),
    "a directory": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.processes
def test_a_ceiling_serves_like_runs_until_it_may_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "cache/llm-dissect/ceilings.json"
    before_s = time.time()
    measured = asyncio.run(calibration.calibrate(plan()))
    assert measured is not None and measured.events_per_s_per_core > 1000
    assert before_s <= (measured.measured_unix_s or 0) <= time.time()
    assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(file.parent.stat().st_mode)) == (0o600, 0o700)
    assert "127.0.0.1" not in file.read_text()

    def started(*options: str) -> None:
        raise embedded.EmbeddedError("it is measured")

    monkeypatch.setattr(embedded, "serving", started)
    assert asyncio.run(calibration.calibrate(plan())) == measured
    for other in (plan(requests=80), plan(backend="openai-chat")):
        with pytest.raises(embedded.EmbeddedError):
            asyncio.run(calibration.calibrate(other))
    kept = file.read_bytes()
    for name, spoil in SPOILS.items():
        spoil(file)
        with pytest.raises(embedded.EmbeddedError):
            asyncio.run(calibration.calibrate(plan()))
            pytest.fail(f"{name}, and it is used")
        file.rmdir() if file.is_dir() else file.unlink()
        file.write_bytes(kept)
        file.chmod(0o600)
    assert asyncio.run(calibration.calibrate(plan())) == measured
