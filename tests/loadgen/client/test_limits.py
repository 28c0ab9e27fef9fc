"""What a machine can hold."""

from __future__ import annotations

import re
import resource
from typing import Any

import pytest

import backends
from backends.protocol import ServerInfo
from loadgen import rundir
from loadgen.client import limits
from loadgen.config import Config, ConfigError
from loadgen.plan import ClientPlan, plan_run
from loadgen.rundir import Ceiling
from loadgen.target import Target
from tests.loadgen.load.loads import load


@pytest.mark.parametrize(
    ("cpus", "memory_bytes", "files", "most"),
    [(2, 64 << 30, 1 << 20, 8), (1, 64 << 30, 1 << 20, 4), (64, 1 << 30, 1 << 20, 10), (64, None, 128, 16)],
)
def test_workers_are_bounded_by_what_is_scarcest(
    cpus: int, memory_bytes: int | None, files: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rundir, "usable_cpus", lambda: set(range(cpus)))
    monkeypatch.setattr(limits, "memory_bytes", lambda: memory_bytes)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    limits.check_workers(most)
    with pytest.raises(ConfigError, match=f"--workers is {most + 1} and this machine holds at most {most} "):
        limits.check_workers(most + 1)


@pytest.mark.parametrize(
    ("options", "pace_ms", "events_per_s"),
    [
        ({"requests": 1000, "output_tokens": "128"}, 20.0, 50_000),
        ({"requests": 1000, "output_tokens": "8"}, 20.0, 8000),  # there are no more
        ({"requests": 1000, "output_tokens": "128"}, None, 25_000),
        ({"requests": 1000, "output_tokens": "128", "concurrency": "50"}, 10.0, 5000),
        ({"requests": 3000, "output_tokens": "100", "arrival": "constant:10"}, 20.0, 1000),  # lives of 2 s
        ({"requests": 100, "output_tokens": "100", "arrival": "constant:1000"}, 10.0, 10_000),  # 100 together
        ({"duration": 60.0, "output_tokens": "10", "arrival": "constant:100"}, 5.0, 1000),
        ({"sessions": 5, "turns": "4", "output_tokens": "50"}, 10.0, 500),
    ],
)
def test_the_events_that_a_load_brings(options: dict[str, Any], pace_ms: float | None, events_per_s: float) -> None:
    assert load(**options).events_per_s(pace_ms) == pytest.approx(events_per_s, rel=0.02)


def burst(requests: int, stream: bool = True, **options: Any) -> ClientPlan:
    config = Config(backend="openai", url="http://a", requests=requests, output_tokens="128", stream=stream, **options)
    return plan_run(config, backends.get("openai"), Target(""), ServerInfo("m"), "run")


@pytest.mark.parametrize(
    ("requests", "cpus", "here", "processes", "said"),
    [
        (1000, 2, True, 1, ""),
        (2000, 8, True, 1, ""),
        (
            2001,
            8,
            True,
            2,
            "2 client processes send: the load brings up to 100,050 events/s, and one has room for 100,000",
        ),
        (
            2001,
            2,
            True,
            1,
            "1 client process sends: .*; 2 would do, and this machine has 2 cores, which the server shares",
        ),
        (2001, 2, False, 2, "2 client processes send"),
        (20_000, 4, False, 4, "4 client processes send: .*; 10 would do, and this machine has 4 cores"),
        (2001, 1, True, 1, "2 would do, and this machine has 1 core, which the server shares"),
    ],
)
def test_the_load_and_the_cores_decide_how_many_send(
    requests: int, cpus: int, here: bool, processes: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rundir, "usable_cpus", lambda: set(range(cpus)))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    ceiling = Ceiling(events_per_s_per_core=200_000.0, cpu_us_per_event=5.0, requests=1, output_tokens=1)
    found = limits.sized(burst(requests), ceiling, 20.0, server_is_here=here)
    assert found.processes == processes and bool(found.note) == bool(said) and re.search(said, found.note)
    assert limits.sized(burst(requests, stream=False), ceiling, 20.0, server_is_here=here) == (1, "")
    assert limits.sized(burst(requests, concurrency="1"), ceiling, 0.001, server_is_here=here).processes == 1


def test_a_load_that_nobody_measured_is_taken_for_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """1000 streams a process, each with 25 tokens a second; and where open files are few, as many as it takes."""
    monkeypatch.setattr(rundir, "usable_cpus", lambda: set(range(16)))
    assert [limits.sized(burst(n), None, None, server_is_here=False).processes for n in (10, 1000, 1001)] == [1, 1, 2]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (164, 164))
    assert limits.sized(burst(1000), None, None, server_is_here=False).processes == 10


def test_this_machine_tells_its_memory() -> None:
    memory_bytes = limits.memory_bytes()
    assert memory_bytes is None or memory_bytes > 1 << 20
