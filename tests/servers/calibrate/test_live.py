"""The series that `loadgen calibrate --live` sends to a server, and what it is for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from loadgen import rundir
from loadgen.rundir import records
from loadgen.rundir.emulation import HeldOut
from servers.calibrate import live
from servers.calibrate.command import EAGER, better, with_values
from servers.simulator.build import profiles

pytestmark = pytest.mark.processes


@pytest.fixture
def url() -> Iterator[str]:
    command = [sys.executable, "-c", "from loadgen.cli import main; main()", "serve", "--port", "0", "--gpu", "h200"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.kill()
        process.wait()


def series(server: dict[str, str], directory: Path) -> list[Path]:
    """Here each load is short."""
    short = {"rest": {"duration": 2.0}, "burst": {"requests": 30}, "loop": {"duration": 2.0, "concurrency": 8}}
    loads = {name: {**load, **short[name]} for name, load in live.SERIES.items()}
    return live.series({"backend": "vllm", **server}, directory, lambda line: None, loads)


def test_the_series_is_one_request_at_rest_a_burst_and_a_loop(url: str, tmp_path: Path) -> None:
    """The three lengths at rest come in turn."""
    runs = series({"url": url}, tmp_path / "p.runs")
    assert [run.name for run in runs] == ["rest", "burst", "loop"]
    tables = {run.name: records.read(run)[0].measured() for run in runs}
    assert set(Counter(tables["rest"].asked_prompt_tokens.tolist())) == {prompt for prompt, _ in live.AT_REST}
    assert len(tables["burst"]) == 30 and rundir.read_manifest(runs[2]).arrival == "concurrency:8"
    assert all(table.ok.all() for table in tables.values())


def test_a_server_is_started_once_for_the_series(tmp_path: Path) -> None:
    runs = series({"launch": "embedded", "gpu": "h200", "model": "7b"}, tmp_path / "p.runs")
    addresses = {rundir.read_manifest(run).url for run in runs}
    assert len(runs) == 3 and len(addresses) == 1


def test_two_minutes_are_enough() -> None:
    assert sum(load.get("duration", 0.0) for load in live.SERIES.values()) + live.BURST_S <= 120


def test_the_pace_of_a_host_is_one() -> None:
    """Half the time for a layer's launches is half of every launch, and of a token's way through the front end."""
    profile = profiles()["vllm@v1"]
    faster = with_values(profile, {EAGER: profile.overheads.launch_eager_layer_us / 2})
    assert faster.overheads.launch_row_us == pytest.approx(profile.overheads.launch_row_us / 2)
    assert faster.overheads.launch_us == pytest.approx(profile.overheads.launch_us / 2)
    assert faster.front.token_us == pytest.approx(profile.front.token_us / 2)
    assert faster.overheads.step_us == profile.overheads.step_us


@pytest.mark.parametrize(("off", "fits"), [((0.03, 0.02), True), ((0.05, 0.04), False), ((), False)])
def test_a_fit_counts_where_it_predicts_what_it_was_not_fitted_to(off: tuple[float, ...], fits: bool) -> None:
    """By end-to-end times of the series, each run by a fit to the others; beside 6 and 2 % of the profile before."""

    def judged(*errors: float) -> tuple[HeldOut, ...]:
        return tuple(
            HeldOut(
                run=str(place), makespan=0.0, throughput=0.0, e2el_mape=0.0, e2el_w1=error, ttft_w1=0.0, tpot_w1=0.0
            )
            for place, error in enumerate(errors)
        )

    shipped = profiles()["vllm@v1"]
    before = msgspec.structs.replace(shipped, held_out=judged(0.06, 0.02))
    fitted = msgspec.structs.replace(
        with_values(shipped, {EAGER: 100.0}), gpu="h200", fitted_on=("0", "1"), held_out=judged(*off)
    )
    kept = better(before, fitted)
    assert kept.gpu == "h200" and bool(kept.fitted_on) == fits
    assert kept.overheads == (fitted if fits else shipped).overheads
    assert kept.held_out == (fitted if fits else before).held_out
