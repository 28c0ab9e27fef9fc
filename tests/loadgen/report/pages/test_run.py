"""The page of a run, as content: what stands in it is what report.json and the records say."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.document import html
from loadgen.document.content import Block, Chart, Code, Document, Items, Link, Number, Table
from loadgen.monitor.server_view import SamplesHeader, ServerSample
from loadgen.report import build, metrics
from loadgen.report.metrics import CONVENTIONS, METRICS
from loadgen.report.pages import charts, run, runs, series
from loadgen.report.schema import Stall
from loadgen.rundir import Manifest, Phase
from loadgen.rundir.emulation import Emulation
from loadgen.rundir.records import Record
from tests.data import unpacked
from tests.loadgen.report.test_build import HOSTILE
from tests.loadgen.tables import facts, failure, manifest, request, write_run

OURS = CONVENTIONS["loadgen"]
MODELLED = Emulation(
    scheduler="vllm@v1", gpu="NVIDIA H200", gpus=1, topology="none", tensor_parallel=1, dtype="float16",
    kv_cache_tokens=1000, max_running=256, memory_ratio=0.9, profile="built in",
)  # fmt: skip


def spread(n: int, gaps: int = 20) -> list[Record]:
    """Requests of different lengths, 10 ms apart, some of which fail."""
    random = np.random.default_rng(0)
    rows = []
    for at in range(n):
        first = 10 * at + 20 + float(random.lognormal(3, 1))
        between = tuple(random.integers(1, 40, random.integers(1, gaps)).tolist())
        tokens = int(random.integers(10, 500))
        rows.append(
            request(at, scheduled=10 * at, sent=10 * at + 1, first=first, gaps=between, asked_prompt_tokens=tokens)
            if at % 50 != 7
            else failure(at, scheduled_ns=at * 10_000_000, sent=10 * at + 1, done=10 * at + 9, error=f"number {at}")
        )
    return rows


def shown(directory: Path, rows: list[Record], made: Manifest | None = None, **changes: Any) -> charts.Shown:
    """A run as its page shows it."""
    path = write_run(directory, rows, made or manifest(), facts())
    built, table = build.from_directory(path)
    return build.shown_run(path, msgspec.structs.replace(built, **changes), table)


def blocks(page: Document) -> Iterator[Block]:
    for section in page.sections:
        yield from section.blocks


def tables(page: Document) -> dict[str, Table]:
    return {block.caption: block for block in blocks(page) if isinstance(block, Table)}


def drawn(page: Document) -> dict[str, Chart]:
    return {block.title: block for block in blocks(page) if isinstance(block, Chart)}


def values(table: Table) -> dict[tuple[str, str], float | None]:
    """Number cells by their row's name and their column's header."""
    return {
        (str(row[0]), header): cell.value
        for row in table.rows
        for header, cell in zip(table.headers, row, strict=True)
        if isinstance(cell, Number)
    }


def test_the_cells_hold_exactly_what_report_json_holds(tmp_path: Path) -> None:
    page = run.page(shown(tmp_path / "run", spread(300)))
    built, rows = build.from_directory(tmp_path / "run")
    build.write(tmp_path / "run", built, rows)
    report = json.loads((tmp_path / "run/report.json").read_bytes())
    latency, intervals = values(tables(page)["Latency"]), values(tables(page)["Latency with intervals"])
    for name in METRICS:
        short = name.removesuffix("_ms")
        for statistic in ("n", "mean", "p50", "p90", "p95", "p99", "p99_9", "max"):
            assert latency[short, statistic.replace("_", ".")] == report["metrics"][name][statistic]
        if name in charts.LATENCIES:
            for statistic in ("mean", "p50", "p99"):
                assert intervals[short, statistic] == report["metrics"][name][statistic]
    throughput = values(tables(page)["Throughput"])
    assert set(throughput.values()) == set(report["throughput"].values())
    outcomes = values(tables(page)["Requests by outcome"])
    assert {name: count for (name, _), count in outcomes.items()} == report["requests"]["by_outcome"]
    quarters = values(tables(page)["ttft by quarter of the prompts"])
    assert [value for (_, header), value in quarters.items() if header == "p50"] == [
        quarter["ttft_ms"]["p50"] for quarter in report["ttft_by_prompt"]
    ]


def test_the_order_of_the_page(tmp_path: Path) -> None:
    page = run.page(shown(tmp_path / "run", spread(100)))
    order = ["verdict", "numbers", "latency", "time", "prompts", "slowest", "errors", "setup", "repeat"]
    assert [section.id for section in page.sections] == order
    assert [chart.title for chart in page.sections[2].blocks if isinstance(chart, Chart)] == list(
        charts.LATENCIES.values()
    )


@pytest.mark.parametrize("n", [1, 3, 400, 2500])
def test_a_quantile_read_from_a_cdf_is_that_of_the_records(tmp_path: Path, n: int) -> None:
    of_run = shown(tmp_path / "run", spread(n))
    for metric, chart in zip(charts.LATENCIES, charts.latencies([of_run]), strict=True):
        sample = metrics.sample(of_run.measured, metric, OURS)
        x, share = (np.array(each, np.float64) for each in (chart.series[0].x, chart.series[0].y))
        assert chart.quantile and (np.diff(x) >= 0).all() and (np.diff(share) >= 0).all() and share[-1] == 1
        assert x[0] == pytest.approx(sample.values[0] * sample.unit_ms, rel=1e-4)
        assert x[-1] == pytest.approx(sample.values[-1] * sample.unit_ms, rel=1e-4)
        for thousandths in (1, 100, 500, 900, 990, 999):
            read = x[np.searchsorted(share, thousandths / 1000, side="left")]
            apart = 0.0 if len(sample.values) <= 2000 else 1000 / 2000
            low, high = (
                float(sample.values[round(k)]) * sample.unit_ms
                for k in (
                    max(0, np.ceil(len(sample.values) * (thousandths - apart) / 1000) - 1),
                    min(len(sample.values) - 1, np.ceil(len(sample.values) * (thousandths + apart) / 1000) - 1),
                )
            )
            assert low * (1 - 1e-4) <= read <= high * (1 + 1e-4)


def test_extremes_of_many_requests_are_drawn(tmp_path: Path) -> None:
    of_run = shown(tmp_path / "run", spread(9000, gaps=3))
    ttft_ms = of_run.report.metrics["ttft_ms"]
    page = drawn(run.page(of_run))
    for title in ("ttft of each request, at its due time", "ttft by prompt length"):
        chart = page[title]
        y = [value for value in chart.series[0].y if value is not None]
        assert (min(y), max(y)) == pytest.approx((ttft_ms.min, ttft_ms.max), rel=1e-4)
        assert 3000 < len(y) < 6000 and "lowest and the highest" in chart.note
        assert len(chart.series[0].labels or ()) == len(y)


def test_ten_thousand_requests_are_under_a_megabyte_and_a_half(tmp_path: Path) -> None:
    """With sessions, since those have the most curves, and with long replies."""
    rows = [
        msgspec.structs.replace(row, session=at // 4, turn=at % 4 + 1, itl_us=[25_000] * 199, events=200)
        if row.outcome == "ok"
        else msgspec.structs.replace(row, session=at // 4, turn=at % 4 + 1)
        for at, row in enumerate(spread(10_000, gaps=3))
    ]
    text = html.render(run.page(shown(tmp_path / "run", rows)))
    assert len(text.encode()) < 1_500_000


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=800))
@settings(deadline=None)
def test_the_longest_gaps_of_a_request_are_drawn(gaps_us: list[int]) -> None:
    at_s = np.cumsum([0, *gaps_us]) / 1e6
    kept = charts.thinned_events(at_s)
    assert len(kept) <= charts.MOST_EVENTS + 3 and kept[0] == 0 and kept[-1] == len(gaps_us)
    assert np.diff(at_s[kept]).max() >= max(gaps_us) / 1e6 - 1e-9
    longest = int(np.argmax(np.diff(at_s)))
    assert {longest, longest + 1} <= set(kept.tolist()) or gaps_us.count(max(gaps_us)) > charts.LONGEST_GAPS


def test_the_slowest_requests_and_how_their_tokens_came(tmp_path: Path) -> None:
    rows = [request(at, first=50 + at, gaps=(10, 5, 100 + at)) for at in range(30)]
    page = run.page(shown(tmp_path / "run", rows))
    table = tables(page)["The 20 requests of the longest e2el"]
    names = [str(row[0]) for row in table.rows]
    assert names == [f"{rank}. request {30 - rank}" for rank in range(1, 21)]
    cells = values(table)
    first = names[0]
    assert cells[first, "ttft, ms"] == 78 and cells[first, "e2el, ms"] == 222
    assert cells[first, "output tokens"] == 4
    assert cells[first, "longest gap, ms"] == 129
    chart = drawn(page)["Token timelines of the slowest requests"]
    of_first, of_later = chart.series
    assert [(x, y) for x, y in zip(of_first.x, of_first.y, strict=True) if y == 1] == [(0.078, 1)]
    assert [x for x, y in zip(of_later.x, of_later.y, strict=True) if y == 1] == [0.088, 0.093, 0.222]
    assert of_later.labels is not None and "request 29, event 4" in of_later.labels
    assert len(of_first.x) == 20 and len(of_later.x) == 60


def test_phases_and_stalls_are_shaded_on_every_chart_over_time(tmp_path: Path) -> None:
    phases = (Phase("first", 0.0, 0.5), Phase("second", 0.5, None))
    of_run = shown(tmp_path / "run", spread(100), manifest(phases=phases), stalls=[Stall(0.2, 0.4)])
    over_time, _ = charts.over_time([of_run])
    assert len(over_time) == 3
    for chart in over_time:
        assert [(shade.label, shade.tone) for shade in chart.shades] == [
            ("first", "plain"), ("second", "plain"), ("server stalled", "bad")
        ]  # fmt: skip
        assert (chart.shades[0].start, chart.shades[0].end, chart.shades[2].start) == (0.0, 0.5, 0.2)
        assert chart.sync == charts.TIME


def test_what_the_server_and_its_gpus_showed(tmp_path: Path) -> None:
    rows = [request(at, scheduled=100 * at, sent=100 * at, first=100 * at + 50) for at in range(30)]
    path = write_run(tmp_path / "run", rows, manifest(), facts())
    lines = [msgspec.json.encode(SamplesHeader(run_id=manifest().run_id, series=["running"], gpus=["H200"]))]
    for second, preempted in ((-0.5, 3), (0.5, 3), (1.5, 7), (2.5, 7), (99, 7)):
        seen = {"running": 2.0, "kv_cache_usage_ratio": 0.25, "preemptions": preempted}
        gpu = {"index": 1, "memory_used_bytes": 1, "power_w": 100.0 + second, "utilization_ratio": None}
        lines.append(
            json.dumps(
                {"at_ns": round(second * 1e9), "took_ms": 1, "metrics": seen, "gpus": [gpu | {"energy_mj": None}]}
            ).encode()
        )
    (path / "server.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    assert msgspec.json.decode(lines[1], type=ServerSample).gpus[0].index == 1
    page = drawn(run.page(build.shown_run(path, *build.from_directory(path))))
    assert [one.name for one in page["Server's requests"].series] == ["running"]
    assert page["KV cache"].series[0].y == [25.0, 25.0, 25.0]
    preemptions = page["Preemptions"].series[0]
    shown_s = series.end_s(build.from_directory(path)[1].measured())
    assert 2.5 < shown_s < 99
    assert list(zip(preemptions.x, preemptions.y, strict=True)) == [
        (0.0, 0.0), (0.5, 4.0), (1.5, 0.0), (2.5, 0.0), (pytest.approx(shown_s, rel=1e-4), 0.0)
    ]  # fmt: skip
    assert page["GPU power"].series[0].name == "GPU 1" and page["GPU power"].series[0].y == [100.5, 101.5, 102.5]


@pytest.mark.parametrize("emulated", ["", "emulated", "predicted"])
def test_emulated_and_predicted_runs_say_so_on_every_chart(tmp_path: Path, emulated: str) -> None:
    made = manifest(emulated=bool(emulated), emulation=MODELLED if emulated == "predicted" else None)
    page = run.page(shown(tmp_path / "run", spread(100), made))
    assert page.origin == emulated
    assert [chart.origin for chart in drawn(page).values()] == [emulated] * 9


def test_what_a_server_sent_stays_data(tmp_path: Path) -> None:
    rows = [*spread(60), failure(90, "stream_error", error=HOSTILE), failure(91, "stream_error", error=HOSTILE)]
    rows.append(failure(92, "stream_error", error="another"))
    made = manifest(model=HOSTILE, server_version=HOSTILE, argv=["loadgen", "run", "--model", HOSTILE])
    page = run.page(shown(tmp_path / "run", rows, made))
    assert HOSTILE in page.title
    errors = next(block for section in page.sections if section.id == "errors" for block in section.blocks)
    assert isinstance(errors, Table)
    of_stream = next(row for row in errors.rows if row[0] == "stream_error")
    assert [of_stream[1], of_stream[2], of_stream[4], of_stream[5]] == [
        Number("3", 3.0), Number("90", 90.0), HOSTILE, Number("2", 2.0)
    ]  # fmt: skip
    assert json.loads(msgspec.json.encode(page))["title"] == page.title


def test_the_command_is_quoted_and_the_servers_beside_it(tmp_path: Path) -> None:
    made = manifest(argv=["loadgen", "run", "--model", "a b; rm -rf /"])
    page = run.page(shown(tmp_path / "run", spread(10), made))
    assert [block.text for block in blocks(page) if isinstance(block, Code)] == ["loadgen run --model 'a b; rm -rf /'"]
    config = {"requests": 7, "arrival": "poisson:3", "url": None, "header": []}
    made = manifest(argv=["loadgen", "search"], config=config)
    page = run.page(shown(tmp_path / "probe", spread(10), made))
    assert [block.text for block in blocks(page) if isinstance(block, Code)] == [
        "loadgen search", 'requests = 7\narrival = "poisson:3"'
    ]  # fmt: skip


def test_one_of_several_runs_of_a_command_has_its_own_options(tmp_path: Path) -> None:
    """They are TOML, whatever their characters; a single run has its command alone."""
    argv, config = ["loadgen", "run", "--repeat", "2"], {"model": "\N{GRINNING FACE} \xe9", "seed": 1, "repeat": 2}
    page = run.page(shown(tmp_path / "2", spread(10), manifest(argv=argv, config=config)))
    command, options = (block.text for block in blocks(page) if isinstance(block, Code))
    assert command == "loadgen run --repeat 2"
    assert tomllib.loads(options) == {"model": config["model"], "seed": 1}
    page = run.page(shown(tmp_path / "1", spread(10), manifest(argv=argv[:2], config={**config, "repeat": 1})))
    assert [block.text for block in blocks(page) if isinstance(block, Code)] == ["loadgen run"]


def test_a_closed_loop_names_its_concurrency_once(tmp_path: Path) -> None:
    made = manifest(arrival="concurrency:16", config={"concurrency": "16", "seed": 3})
    setup = run.setup(shown(tmp_path / "run", spread(3), made))
    assert isinstance(setup[0], Table)
    assert dict(setup[0].rows)["load"] == "concurrency:16, seed 3"


@pytest.mark.parametrize("rows", [[], [failure(0)], [failure(0, "dropped", sent=None)], [request(0, gaps=())]])
def test_a_run_with_nothing_in_it_has_a_page(tmp_path: Path, rows: list[Record]) -> None:
    page = run.page(shown(tmp_path / "run", rows))
    assert json.loads(msgspec.json.encode(page))["sections"][0]["id"] == "verdict"
    good = bool(rows) and rows[0].outcome == "ok"
    assert (page.tone, bool(page.doubt)) == (("good", True) if good else ("bad", False))


@pytest.mark.parametrize("started", [1e308, -1e18, 1e12])
def test_a_time_that_is_none_is_left_out(tmp_path: Path, started: float) -> None:
    setup = run.setup(shown(tmp_path / "run", spread(3), manifest(started_unix_s=started)))
    assert isinstance(setup[0], Table)
    assert ("started at" in [row[0] for row in setup[0].rows]) is (started == 1e12)


@pytest.mark.parametrize("kept", ["frozen/measured/sessions", "frozen/predicted/fp8_burst", "h200/serving/7b_tp4_o64"])
def test_runs_that_were_kept_have_pages(kept: str) -> None:
    built, table = build.from_directory(unpacked(kept))
    page = run.page(build.shown_run(unpacked(kept), built, table))
    assert page.origin == ("predicted" if "predicted" in kept else "")
    assert all(chart.series for chart in drawn(page).values())
    assert len(msgspec.json.encode(page)) < 400_000


def test_several_runs_over_each_other(tmp_path: Path) -> None:
    a = shown(tmp_path / "a", spread(100), manifest(config={"requests": 100}))
    b = shown(tmp_path / "b", spread(200), manifest(emulated=True, config={"requests": 200}))
    several = [replace(a, name="a"), replace(b, name="b", place=1)]
    page = runs.page(several, ["a/report.html", ""])
    assert page.origin == "partly emulated" and page.tone == "bad"
    for chart in drawn(page).values():
        assert {one.group for one in chart.series} == {"a", "b"} and not chart.shades
        assert {(one.group, one.colour) for one in chart.series} == {("a", 0), ("b", 1)}
        assert chart.origin == "partly emulated"
    setup = tables(page)[""]
    assert [row[0] for row in setup.rows] == [Link("a", "a/report.html"), "b"]
    assert ["config.requests", "100", "200"] in [list(row) for row in tables(page)["What was set differently"].rows]
    latency = values(tables(page)["Latency with intervals"])
    assert latency["ttft: b", "p50"] == several[1].report.metrics["ttft_ms"].p50
    assert isinstance(page.sections[0].blocks[0], Items)


def test_the_main_numbers_are_seen_first(tmp_path: Path) -> None:
    page = run.page(shown(tmp_path / "run", spread(100)))
    report = shown(tmp_path / "again", spread(100)).report
    tiles = {tile.label: tile for tile in page.tiles}
    assert [number.value for _, number in tiles["ttft, ms"].values] == [
        report.metrics["ttft_ms"].p50, report.metrics["ttft_ms"].p99
    ]  # fmt: skip
    text = html.render(page)
    for tile in page.tiles:
        assert f'id="{tile.href.removeprefix("#")}"' in text, tile.label
