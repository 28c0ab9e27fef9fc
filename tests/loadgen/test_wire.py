"""What the wire adds, measured on the embedded server over a wire that adds something, and over one that does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from backends.protocol import Sampling
from loadgen import cli
from loadgen.event_loop import run_loop
from loadgen.plan import ClientJob, ClientPlan, PromptSource, Timeouts
from loadgen.target import Target
from loadgen.wire import measure
from tests.loadgen.load.loads import load
from tests.servers.reader import running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone can acknowledge at once")


def plan(url: str, backend: str) -> ClientPlan:
    job = ClientJob(
        run_id="wire", version="0", model="m", sampling=Sampling(8), warmup=1, timeouts=Timeouts(5, 5, 5, 5),
        load=load(requests=4, concurrency=1, seed=1, input_tokens=8, output_tokens=8),
    )  # fmt: skip
    return ClientPlan(
        job=job, backend=backend, target=Target(url), transport="fast", fresh=False, kernel_timestamps=False,
        prompts=PromptSource(),
    )  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize(
    ("wire", "dialect"), [("nagle", "openai"), ("nagle", "vllm"), ("clean", "tgi"), ("whole", "openai")]
)
def test_what_a_wire_adds(tmp_path: Path, wire: str, dialect: str) -> None:
    with running(tmp_path, dialect, ttft_ms=5, itl_ms=15, wire=wire) as server:  # longer than an ACK is delayed
        facts, pace_ms = run_loop(measure(plan(server.server.url, dialect), print))
    assert facts is not None and (pace_ms is None or pace_ms > 1)
    assert facts.waits == (wire == "nagle")
    assert (facts.events_per_read > 1.5) == (wire != "clean")


def test_a_slow_server_is_left_out_and_that_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    with running(tmp_path, "openai", ttft_ms=400, itl_ms=100) as server:
        facts, pace_ms = run_loop(measure(plan(server.server.url, "openai"), said.append))
    assert facts is None and pace_ms is not None and pace_ms > 50  # it sends one every 100 ms, and may be late
    assert len(said) == 1 and "not measured: a reply of 4 tokens takes 0.7 s" in said[0]


def test_a_server_that_is_not_there_ends_no_run() -> None:
    assert run_loop(measure(plan("http://127.0.0.1:9", "openai"), print)) == (None, None)


@pytest.mark.processes
def test_doctor_asks_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(tmp_path, "tgi", ttft_ms=10, itl_ms=2, wire="nagle") as server:
        assert cli.doctor(cli.DoctorOptions(backend="tgi", url=server.server.url)) == 0
    assert "does not set TCP_NODELAY" in capsys.readouterr().out
    assert cli.doctor(cli.DoctorOptions(backend="tgi", url=server.server.url)) == 0
    assert "wire          cannot be checked: cannot reach" in capsys.readouterr().out
