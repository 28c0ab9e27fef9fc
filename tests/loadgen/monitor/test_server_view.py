"""What is read off `server.jsonl`, with known answers: the server's counts, the GPUs' energy, damaged files."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.gpus import GpuSample
from loadgen.monitor.server_view import SamplesHeader, ServerSample, ServerStats, ServerView, read, samples

SECONDS = 1_000_000_000
RUN = "20261121-120000-abc123"
GIB = 2**30


def write(directory: Path, samples: list[ServerSample], **header: Any) -> None:
    values: dict[str, Any] = {"run_id": RUN, "series": ["running"], "gpus": [], **header}
    lines = [msgspec.json.encode(SamplesHeader(**values)), *map(msgspec.json.encode, samples)]
    (directory / "server.jsonl").write_bytes(b"\n".join(lines) + b"\n")


def at(at_s: float, took_ms: float = 5.0, error: str | None = None, gpus: Any = (), **metrics: float) -> ServerSample:
    return ServerSample(at_ns=round(at_s * SECONDS), took_ms=took_ms, metrics=metrics, error=error, gpus=list(gpus))


def seen(directory: Path, t0_s: float = 10.0, end_s: float = 12.5) -> ServerStats:
    view = read(directory, RUN, round(t0_s * SECONDS), round(end_s * SECONDS))
    assert view is not None and view.server is not None
    return view.server


def test_known_samples(tmp_path: Path) -> None:
    reserved = {"paused": 2, "kv_reserved_tokens": 900}
    counters = {"prefix_cache_queries": 0.0, "preemptions": 1.0, "ttft_seconds_sum": 7.0, "ttft_seconds_count": 70.0}
    grown = {"prefix_cache_queries": 512.0, "preemptions": 4.0, "ttft_seconds_sum": 9.0, "ttft_seconds_count": 75.0}
    grown["prefix_cache_hits"] = 16.0
    write(
        tmp_path,
        [
            at(8.6, running=99, prompt_tokens=0),  # long before
            at(9.6, running=1, waiting=0, kv_cache_usage_ratio=0.1, prompt_tokens=100, **counters),
            at(10.6, running=8, waiting=3, kv_cache_usage_ratio=0.9, prompt_tokens=300, **reserved, **counters),
            at(11.6, running=5, waiting=9, kv_cache_usage_ratio=0.4, prompt_tokens=400, **counters),
            at(12.6, running=0, waiting=0, kv_cache_usage_ratio=0.0, prompt_tokens=612, generation_tokens=40, **grown),
            at(13.6, running=50, prompt_tokens=10_000),  # long after
        ],
    )  # fmt: skip
    assert seen(tmp_path) == ServerStats(
        samples=4,
        covered=True,
        running_max=8,
        waiting_max=9,
        paused_max=2,
        kv_cache_usage_max_ratio=0.9,
        kv_reserved_max_tokens=900,
        preemptions=3,
        prefix_cache_hits=16,  # not shown before: it had counted nothing
        prefix_cache_queries=512,
        prompt_tokens=512,
        generation_tokens=40,
        ttft_mean_ms=400.0,
    )


def test_a_sample_counts_as_before_when_it_was_there_before(tmp_path: Path) -> None:
    """The server may have answered at any time while it was asked."""
    late = at(9.9, took_ms=200, prompt_tokens=2), at(12.4, took_ms=200, prompt_tokens=3)
    write(tmp_path, [at(8.5, prompt_tokens=1), *late, at(13.0, prompt_tokens=4)])
    assert (seen(tmp_path).prompt_tokens, seen(tmp_path).samples) == (3, 4)


def test_counts_go_from_good_sample_to_good_sample(tmp_path: Path) -> None:
    rows = [
        at(8, prompt_tokens=5),
        at(9, error="busy"),
        at(10.5, prompt_tokens=7),
        at(11, error="gone"),
        at(12, error="busy"),
    ]
    write(tmp_path, [*rows, at(13, error="busy"), at(14, prompt_tokens=25)])
    stats = seen(tmp_path)
    assert (stats.prompt_tokens, stats.samples, stats.failed, stats.failure) == (20, 7, 4, "busy")
    assert stats.covered and stats.problem is None
    write(tmp_path, rows)  # it died
    stats = seen(tmp_path)
    assert (stats.prompt_tokens, stats.samples, stats.failed, stats.covered) == (2, 5, 3, False)
    write(tmp_path, [at(10.5, prompt_tokens=7), at(13, prompt_tokens=8)])  # it began late
    assert (seen(tmp_path).prompt_tokens, seen(tmp_path).covered) == (1, False)


def test_a_server_that_began_anew_gives_no_counts(tmp_path: Path) -> None:
    write(tmp_path, [at(9, running=1, prompt_tokens=5), at(11, running=4, prompt_tokens=1), at(13, prompt_tokens=50)])
    assert (seen(tmp_path).prompt_tokens, seen(tmp_path).running_max) == (None, 4)


def test_a_mean_of_nothing_is_nothing(tmp_path: Path) -> None:
    write(tmp_path, [at(9, itl_seconds_sum=1.0, itl_seconds_count=3), at(13, itl_seconds_sum=1.0, itl_seconds_count=3)])
    assert seen(tmp_path).itl_mean_ms is None


def test_metrics_that_hold_nothing_of_ours(tmp_path: Path) -> None:
    write(tmp_path, [at(9), at(13)])
    assert seen(tmp_path).problem == "GET /metrics shows none of the series that this kind of server has"


def test_a_packed_file_is_read_where_there_is_no_plain_one(tmp_path: Path) -> None:
    write(tmp_path, [at(9, prompt_tokens=5), at(13, prompt_tokens=9)])
    plain = tmp_path / "server.jsonl"
    packed = gzip.compress(plain.read_bytes())
    plain.unlink()
    for damaged in (packed[:-9], b"no gzip at all"):
        (tmp_path / "server.jsonl.gz").write_bytes(damaged)
        assert (seen(tmp_path).problem or "").startswith("server.jsonl cannot be read: ")
        assert samples(tmp_path, RUN) == []
    (tmp_path / "server.jsonl.gz").write_bytes(packed)
    assert seen(tmp_path).prompt_tokens == 4 and len(samples(tmp_path, RUN)) == 2


def test_no_file_and_files_that_are_damaged(tmp_path: Path) -> None:
    assert read(tmp_path, RUN, 0, 0) is None
    path = tmp_path / "server.jsonl"
    write(tmp_path, [at(9, prompt_tokens=5), at(13, prompt_tokens=9)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])  # killed while it wrote
    assert (seen(tmp_path).samples, seen(tmp_path).covered, seen(tmp_path).problem) == (1, False, None)
    lines = whole.splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1] + b'{"at_ns": "\xff"}\n' + lines[2])
    assert (seen(tmp_path).samples, seen(tmp_path).problem) == (1, "server.jsonl line 3 is not a sample")
    for text, problem in (
        (b"", "server.jsonl does not begin with a loadgen.server/1 header"),
        (b"\xff\n", "server.jsonl does not begin with a loadgen.server/1 header"),
        (whole.replace(b"server/1", b"server/2"), "server.jsonl has another schema than loadgen.server/1"),
        (whole.replace(RUN.encode(), b"other"), "server.jsonl is of another run"),
    ):
        path.write_bytes(text)
        assert seen(tmp_path) == ServerStats(problem=problem)
    path.unlink()
    path.mkdir()
    assert seen(tmp_path) == ServerStats(problem="server.jsonl cannot be read: Is a directory")


def test_gpus_alone_say_nothing_of_the_server(tmp_path: Path) -> None:
    write(tmp_path, [at(9, gpus=[gpu(0)]), at(13, gpus=[gpu(0)])], series=[], gpus=["H"])
    view = read(tmp_path, RUN, 10 * SECONDS, 12 * SECONDS)
    assert view is not None and view.server is None and view.gpus is not None
    write(tmp_path, [], series=[])
    assert read(tmp_path, RUN, 0, 0) == ServerView()


def gpu(index: int, used: float | None = 1, w: float | None = 100, mj: int | None = None) -> GpuSample:
    used_bytes = None if used is None else round(used * GIB)
    return GpuSample(index=index, memory_used_bytes=used_bytes, power_w=w, utilization_ratio=None, energy_mj=mj)


def gpus_of(directory: Path, *samples: ServerSample) -> dict[str, Any]:
    write(directory, list(samples), series=[], gpus=["H200", "B200"])
    view = read(directory, RUN, 10 * SECONDS, 12 * SECONDS)
    assert view is not None and view.gpus is not None
    built: dict[str, Any] = msgspec.to_builtins(view.gpus)
    return built


def test_a_gpu_that_was_held_back_and_shared(tmp_path: Path) -> None:
    """Over three seconds heat holds it back for 0.6 s, the power limit for 1.5; another process comes and goes."""

    def held(thermal_s: float, power_s: float, *processes: int, reasons: int = 0) -> list[GpuSample]:
        ns = (round(each * SECONDS) for each in (thermal_s, power_s))
        clocks = dict(zip(("thermal_ns", "power_ns"), ns, strict=True))
        return [msgspec.structs.replace(gpu(3), **clocks, clock_reasons=reasons, processes=list(processes))]

    rows = [
        at(9, gpus=held(50, 70, 812)),
        at(11, gpus=held(50.5, 71, 812, 77, reasons=0x4 | 0x40)),
        at(12, gpus=held(50.6, 71.5, 812)),
    ]
    assert gpus_of(tmp_path, *rows)["each"] == [
        {
            "index": 3, "name": "H200", "memory_peak_bytes": GIB, "thermal_ratio": pytest.approx(0.2),
            "power_ratio": pytest.approx(0.5), "slowdowns": ["hw_thermal_slowdown"], "processes": 2, "others": 1,
        }
    ]  # fmt: skip


def test_known_gpus(tmp_path: Path) -> None:
    rows = [
        at(9, gpus=[gpu(3, 10, 100, 5_000), gpu(1, 40, 300, 70_000)]),
        at(11, gpus=[gpu(3, 30, 200, 305_000), gpu(1, 20, 300, 670_000)]),
        at(12, gpus=[gpu(3, 20, 400, 605_000), gpu(1, 31, 300, 970_000)]),
        at(20, gpus=[gpu(3, 99, 999, 999_000), gpu(1, 99, 999, 999_000)]),  # after the run
    ]
    assert gpus_of(tmp_path, *rows) == {
        "each": [
            {"index": 3, "name": "H200", "memory_peak_bytes": 30 * GIB},
            {"index": 1, "name": "B200", "memory_peak_bytes": 40 * GIB},
        ],
        "memory_peak_bytes": 51 * GIB,  # at once, not the sum of the peaks
        "power_mean_w": 250 + 300,  # from 10 to 12 s
        "energy_j": (600 - 100) + (900 - 300),  # what was used from 9 to 10 s is none of the run's
        "energy_from": "counter",
    }


def test_energy_without_counters_is_the_area_under_the_power(tmp_path: Path) -> None:
    rows = [at(9, gpus=[gpu(0, w=100, mj=1), gpu(1, w=50)]), at(11, gpus=[gpu(0, w=200, mj=2), gpu(1, w=50)]),
            at(12, gpus=[gpu(0, w=400, mj=3), gpu(1, w=50)])]  # fmt: skip
    stats = gpus_of(tmp_path, *rows)  # one of the two has no counter
    assert (stats["energy_j"], stats["energy_from"]) == (200 + 300 + 100, "power")
    rows[0].gpus[1] = gpu(1, w=50, mj=9)  # a counter that fell: the driver was loaded anew
    rows[2].gpus[1] = gpu(1, w=50, mj=2)
    assert gpus_of(tmp_path, *rows)["energy_from"] == "power"


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("first_s", [9.05, 9.4, 9.75])
def test_energy_is_of_the_load_alone(tmp_path: Path, first_s: float, counted: bool) -> None:
    """A second of load at 700 W between idling at 60 W, sampled once a second, wherever the samples fall."""

    def row(at_s: float) -> ServerSample:
        busy_s = min(max(at_s - 10, 0), 1)
        idle_s = at_s - 9 - busy_s
        watts = 700 if 10 <= at_s <= 11 else 60
        return at(at_s, gpus=[gpu(0, 1, watts, round(1000 * (700 * busy_s + 60 * idle_s)) if counted else None)])

    write(tmp_path, [row(first_s + second) for second in range(4)], series=[], gpus=["H200"])
    view = read(tmp_path, RUN, 10 * SECONDS, 11 * SECONDS)
    assert view is not None and view.gpus is not None
    assert view.gpus.energy_j == pytest.approx(700) and view.gpus.power_mean_w == pytest.approx(700)
    assert view.gpus.energy_from == ("counter" if counted else "power")


def test_energy_of_a_run_between_two_samples(tmp_path: Path) -> None:
    """The counter knows what the power samples missed."""
    write(tmp_path, [at(9.8, gpus=[gpu(0, 1, 60, 0)]), at(10.8, gpus=[gpu(0, 1, 60, 380_000)])], series=[], gpus=["H"])
    view = read(tmp_path, RUN, 10 * SECONDS, round(10.5 * SECONDS))
    assert view is not None and view.gpus is not None
    assert view.gpus.energy_j == pytest.approx(380 - 60 * 0.5)


def test_mean_power_is_the_counted_energy_over_its_time(tmp_path: Path) -> None:
    """Power samples are means of a second, or of a moment; and where they end before the run, so does the counting."""
    spent = gpus_of(tmp_path, at(10, gpus=[gpu(0, 1, 60, 0)]), at(11, gpus=[gpu(0, 1, 700, 300_000)]),
                    at(12, gpus=[gpu(0, 1, 60, 800_000)]))  # fmt: skip
    assert (spent["energy_j"], spent["power_mean_w"]) == (800, 400)
    part = gpus_of(tmp_path, at(10, gpus=[gpu(0, 1, 600, 0)]), at(11, gpus=[gpu(0, 1, 600, 600_000)]))
    assert (part["energy_j"], part["power_mean_w"]) == (600, 600)
    blind = gpus_of(tmp_path, at(9, gpus=[gpu(0, 1, None, 0)]), at(13, gpus=[gpu(0, 1, None, 2_000_000)]))
    assert (blind["energy_j"], blind["power_mean_w"]) == (2000, 500)


def test_what_gpus_do_not_tell_is_none(tmp_path: Path) -> None:
    stats = gpus_of(tmp_path, at(9, gpus=[gpu(0, None, None)]), at(13, gpus=[gpu(0, None, None)]))
    assert stats == {
        "each": [{"index": 0, "name": "H200", "memory_peak_bytes": None}],
        "memory_peak_bytes": None, "power_mean_w": None, "energy_j": None, "energy_from": None,
    }  # fmt: skip
    lost = gpus_of(tmp_path, at(9, gpus=[gpu(0), gpu(1)]), at(11, gpus=[gpu(0), gpu(1)]),
                   at(13, gpus=[gpu(0), gpu(1, None, None)]))  # fmt: skip
    assert lost["energy_j"] is None and lost["memory_peak_bytes"] == 2 * GIB
    assert gpus_of(tmp_path, at(9, gpus=[gpu(0, 1, 70)]))["power_mean_w"] == 70
