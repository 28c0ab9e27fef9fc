"""Published measurements in virtual time: every row is there, and played as its source says."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks import published
from benchmarks.published import Result
from benchmarks.published import runs as published_runs
from benchmarks.published.__main__ import main, section
from benchmarks.published.runs import Conditions, Means, Row, Server, play, prompts_of
from servers.calibrate.command import with_values
from servers.simulator.build import Emulated, Setup, emulate
from tests.data import unpacked

ROOT = Path(__file__).parents[2]
SOURCES = {source.name: source for source in published.sources()}
ROW = Row(
    run="h100", model="llama-3.1-8b", gpu="h100", tp=1, quantization=None, load="closed:4", input_tokens=512,
    output_tokens=64,
)  # fmt: skip


def test_sources_state_where_they_come_from() -> None:
    assert {name: len(source.rows()) for name, source in SOURCES.items()} == {
        "aiconfigurator": 60, "inferencemax_h100": 45, "inferencemax_b200": 120, "inference_sim": 12, "mlperf": 4,
    }  # fmt: skip
    for source in SOURCES.values():
        facts = source.facts()
        assert set(facts) == {"source", "licence", "commit", "read", "what"}
        assert facts["source"].startswith("https://") and facts["commit"][:7] in facts["source"]
        assert source.assumptions


def test_every_row_is_expressed_and_has_something_to_compare() -> None:
    """No row needs a server that cannot be modelled."""
    for source in SOURCES.values():
        rows = source.rows()
        assert len({row.run for row in rows}) == len(rows)
        for row in rows:
            emulated = emulate(row.setup(source.servers))
            assert emulated.tp == row.tp
            assert not all(map(math.isnan, published.measured(row, source.conditions()))), row.run


def test_a_rows_own_settings_come_before_those_of_its_source() -> None:
    rows = {row.run: row.setup(SOURCES["mlperf"].servers) for row in SOURCES["mlperf"].rows()}
    assert (rows["h100-server"].max_batched_tokens, rows["l40s-offline"].max_batched_tokens) == (1024, 16384)
    assert (rows["h100-offline"].kv_cache_dtype, rows["h100-server"].kv_cache_dtype) == ("fp8", "auto")


def test_the_engine_that_a_gpu_had() -> None:
    source = SOURCES["mlperf"]
    row = next(row for row in source.rows() if row.run == "l40s-offline")
    old, new = (row.setup(server) for server in (source.servers, source.under(source.alternatives[0])[0]))
    assert (old.scheduler, dict(old.options)) == ("vllm@v0", {"max_num_seqs": 512})
    assert (new.scheduler, dict(new.options)["long_prefill_token_threshold"]) == ("vllm@v1", 256)


def test_a_prefix_cache_is_v1s() -> None:
    source = SOURCES["mlperf"]
    cached = {row.run: row.setup(source.servers).prefix_caching for row in source.rows()}
    assert cached == {"h100-offline": True, "h100-server": True, "l40s-offline": False, "l40s-server": False}


def test_a_data_set_is_sent_whole_in_another_order_each_time() -> None:
    """Three prompts of 40 tokens and one of 50, of which all begin with the same 16."""
    conditions = Conditions(prompt_lengths=((3, 40), (1, 50)), template_tokens=16)
    sent = list(itertools.islice(prompts_of(conditions, ROW, np.random.default_rng(0)), 400))
    passes = [sent[at : at + 4] for at in range(0, 400, 4)]
    assert all(sorted(each) == sorted(passes[0]) for each in passes)
    assert len({tuple(each) for each in passes}) > 10
    assert {segments[0] for _, segments in sent} == {(0, 16)}
    assert {(tokens, sum(own for _, own in segments)) for tokens, segments in sent} == {(40, 40), (50, 50)}
    assert len({segments[1][0] for _, segments in sent}) == 4


def test_what_a_step_computes_may_follow_from_the_load() -> None:
    row = msgspec.structs.replace(ROW, load="closed:8", input_tokens=1024)
    assert row.setup(Server(spare_tokens=1500)).max_batched_tokens == 1024 + 8 + 1500
    assert row.setup(Server()).max_batched_tokens is None


def test_without_asynchronous_scheduling_a_token_takes_longer() -> None:
    """Putting a step together is no longer hidden behind the one before."""
    tpot_ms = {
        on: play(ROW, Server(async_scheduling=on), Conditions(rounds=3), 0).tpot_ms for on in (True, False)
    }  # fmt: skip
    assert tpot_ms[True] + 1 < tpot_ms[False] < tpot_ms[True] + 4


def test_in_line_each_row_is_scheduled_while_the_gpu_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 rows, 20 us each are 0.64 ms a step; they hide behind the step before where scheduling is asynchronous.
    Each launch takes the mean here: where launches differ, streams fall out of step in another way with each time."""

    def evenly_launched(setup: Setup) -> Emulated:
        world = emulate(setup)
        return world.with_profile(with_values(world.profile, {"launch_spread": 0.0}))

    monkeypatch.setattr(published_runs, "emulate", evenly_launched)
    row = msgspec.structs.replace(ROW, load="closed:32")
    for on, more_ms in ((False, 0.64), (True, 0.0)):
        free, own = (play(row, Server(async_scheduling=on), Conditions(launch_row_us=us), 0) for us in (0.0, 20.0))
        assert own.tpot_ms - free.tpot_ms == pytest.approx(more_ms, abs=0.02)


def test_launches_take_a_part_of_the_profiles() -> None:
    """A prompt beyond the graphs' sizes waits for 32 layers of kernels, launched one by one (0.72 ms each), and for the
    step's own launch (1.9 ms); decodes wait for the GPU."""
    row = msgspec.structs.replace(ROW, load="closed:1", input_tokens=600)
    own, less = (play(row, Server(), Conditions(rounds=200, launch_ratio=ratio), 0) for ratio in (1.0, 0.9))
    assert own.ttft_ms - less.ttft_ms == pytest.approx(0.1 * (32 * 0.72 + 1.9), rel=0.15)
    assert own.tpot_ms == pytest.approx(less.tpot_ms, rel=0.01)


def test_one_stream_is_a_request_at_rest() -> None:
    """Its e2e is its ttft and 63 times its tpot."""
    means = play(msgspec.structs.replace(ROW, load="closed:1"), Server(), Conditions(rounds=3), 0)
    assert means.e2e_ms == pytest.approx(means.ttft_ms + 63 * means.tpot_ms)
    assert 5 < means.tpot_ms < 9  # 16 GB of weights at 3.35 TB/s are 4.8 ms


def test_a_prompt_of_text_comes_later_and_is_worked_on_alike() -> None:
    """512 tokens at 2 us later, in a closed loop and at a rate."""
    for load, requests in (("closed:1", 0), ("rate:0.1", 20)):
        row = msgspec.structs.replace(ROW, load=load, requests=requests)
        ids, text = (play(row, Server(), Conditions(text_token_us=us), seed=1) for us in (0.0, 2.0))
        assert text.ttft_ms - ids.ttft_ms == pytest.approx(512 * 0.002)
        assert text.tpot_ms == pytest.approx(ids.tpot_ms)
    assert Conditions(text_token_us=2.0, shortest_ratio=0.8).text_s(ROW) == pytest.approx(0.9 * 512 * 2e-6)


def test_sorting_takes_its_time_of_each_step_and_logit() -> None:
    """Of one row: 400 us and 0.15 ns of each of Llama 3's 128,256 logits."""
    row = msgspec.structs.replace(ROW, load="closed:1")
    greedy, sorting = (play(row, Server(), Conditions(sorting=of), 0) for of in ((0.0, 0.0), (400.0, 0.15)))
    assert sorting.tpot_ms - greedy.tpot_ms == pytest.approx(0.4 + 0.15e-6 * 128_256)


def test_prompts_are_drawn_from_the_data_set_by_length() -> None:
    """At rest, the ttft is the mean of that of the two lengths."""
    row = msgspec.structs.replace(ROW, load="rate:0.1", requests=400)
    short, long = (play(msgspec.structs.replace(row, input_tokens=n), Server(), Conditions(), 0) for n in (100, 2000))
    drawn = play(row, Server(), Conditions(prompt_lengths=((30, 100), (10, 2000))), 0)
    share = (drawn.ttft_ms - short.ttft_ms) / (long.ttft_ms - short.ttft_ms)
    assert share == pytest.approx(1 / 4, abs=0.08)
    burst = msgspec.structs.replace(row, load="burst")
    mixed, alike = (play(burst, Server(), Conditions(prompt_lengths=of), 0) for of in (((1, 100), (1, 924)), ()))
    assert mixed.output_tokens_per_s == pytest.approx(alike.output_tokens_per_s, rel=0.1)  # 512 in the mean of both


def test_larger_cuda_graphs_spare_a_prefill_its_launches() -> None:
    row = msgspec.structs.replace(ROW, load="closed:1", input_tokens=520)
    own, larger = (play(msgspec.structs.replace(row, graph_tokens=n), Server(), Conditions(), 0) for n in (None, 2048))
    assert larger.ttft_ms < own.ttft_ms - 3
    assert larger.tpot_ms == pytest.approx(own.tpot_ms)


def test_streams_in_step_wait_for_each_others_prompts() -> None:
    row = msgspec.structs.replace(ROW, load="closed:8", input_tokens=1024)
    ttft_ms = {step: play(row, Server(), Conditions(rounds=3, in_step=step), 0).ttft_ms for step in (True, False)}
    assert ttft_ms[True] > 2 * ttft_ms[False]


def test_prompts_that_come_again_are_in_the_prefix_cache() -> None:
    row = msgspec.structs.replace(ROW, load="rate:8", requests=600, shared_tokens=100, stage=1)
    conditions = Conditions(prompts=(10, 10))
    cached, computed = (play(row, Server(prefix_caching=on), conditions, 0) for on in (True, False))
    assert cached.ttft_ms < 0.8 * computed.ttft_ms


def test_a_request_is_given_up_and_leaves_the_means() -> None:
    """A server of one request at a time and 1 s of patience, overloaded: only requests that ended within it count."""
    row = msgspec.structs.replace(ROW, load="rate:10", requests=50, failed=1, max_running=1)
    means = play(row, Server(), Conditions(timeout_s=1.0), 0)
    assert 0 < means.e2e_ms <= 1000
    assert play(row, Server(), Conditions(), 0).e2e_ms > 5000


def test_a_bursts_throughput_is_that_of_its_makespan() -> None:
    """A fuller server has more; the number of requests hardly matters."""
    row = msgspec.structs.replace(ROW, load="burst", requests=2000, max_running=64, output_tokens=16)
    narrow = play(row, Server(), Conditions(), 0)
    assert math.isnan(narrow.ttft_ms)
    wide = play(msgspec.structs.replace(row, max_running=1000), Server(), Conditions(), 0)
    assert 0.2 < narrow.output_tokens_per_s / wide.output_tokens_per_s < 1
    few = play(msgspec.structs.replace(row, requests=500), Server(), Conditions(), 0)
    assert narrow.output_tokens_per_s == pytest.approx(few.output_tokens_per_s, rel=0.05)


def made(predicted: float, measured: float, run: str = "r") -> Result:
    none = math.nan
    row = msgspec.structs.replace(ROW, run=run)
    return Result("aiconfigurator", row, Means(none, predicted, none, none), Means(none, measured, none, none))


def test_errors_with_known_answers() -> None:
    found = published.errors([made(9, 10, "a"), made(10, 10, "b"), made(13, 10, "c"), made(math.nan, 10, "d")])
    assert set(found) == {"tpot_ms"}
    tpot = found["tpot_ms"]
    assert (tpot.rows, tpot.worst_run) == (3, "c")
    assert (tpot.median, tpot.bias, tpot.worst) == pytest.approx((0.1, 0.0, 0.3))


def test_e2e_of_a_closed_loop_is_made_of_ttft_and_tpot() -> None:
    row = msgspec.structs.replace(ROW, output_tokens=100, ttft_ms=50.0, tpot_ms=10.0)
    assert published.measured(row, Conditions()).e2e_ms == pytest.approx(50 + 99 * 10)
    assert published.measured(row, Conditions(shortest_ratio=0.8)).e2e_ms == pytest.approx(50 + 89 * 10)
    assert published.measured(msgspec.structs.replace(row, e2e_ms=7.0), Conditions()).e2e_ms == 7


def test_alternatives_change_what_they_name() -> None:
    source = SOURCES["inference_sim"]
    off, ids, shared = source.alternatives
    server, conditions = source.under(off)
    assert (source.servers.prefix_caching, server.prefix_caching) == (True, False)
    assert conditions == source.conditions()
    assert server.max_running == source.servers.max_running == 128
    assert (source.conditions().text_token_us, source.under(ids)[1].text_token_us) == (2, 0)
    assert {each.conditions().launch_ratio for each in SOURCES.values()} == {0.65}  # of all sources alike
    assert source.under(shared)[1].launch_ratio == 1
    source = SOURCES["aiconfigurator"]
    others = {each.why: source.under(each) for each in source.alternatives}
    server, conditions = others["asynchronous scheduling"]
    assert (source.servers.async_scheduling, server.async_scheduling) == (False, True)
    assert conditions == source.conditions()
    server, conditions = others["8192 tokens a step, vLLM's default"]
    assert (server.async_scheduling, server.max_batched_tokens, server.spare_tokens) == (False, 8192, None)
    assert conditions == source.conditions()
    kept = (source.conditions().in_step, source.conditions().shortest_ratio)
    assert kept == (True, 1.0)
    for why, own in (("lengths from 80 to 100 %", (True, 0.8)), ("streams out of step at random", (False, 1.0))):
        server, conditions = others[why]
        assert server == source.servers and conditions.rounds == 10
        assert (conditions.in_step, conditions.shortest_ratio) == own
    assert (source.conditions().rounds, others["20 rounds"][1].rounds) == (10, 20)
    assert others["20 rounds, no sorting"][1].sorting == (0, 0) != source.conditions().sorting


def test_errors_of_an_alternative_are_of_its_own_lengths() -> None:
    """With replies of 80 to 100 % the mean e2e that ttft and tpot make is a tenth shorter, on both sides."""
    source = SOURCES["aiconfigurator"]
    shorter = next(each for each in source.alternatives if "shortest_ratio" in each.conditions)
    rows = source.rows()[:1]
    (result,), (plain,) = (published.predict_source(source, 0, each, rows) for each in (shorter, None))
    assert result.measured.e2e_ms == pytest.approx(0.9 * plain.measured.e2e_ms, rel=0.02)


def test_an_alternative_may_name_what_is_the_default_elsewhere_and_no_name_that_is_unknown() -> None:
    source = msgspec.structs.replace(SOURCES["aiconfigurator"], in_step=False, rounds=20)
    alternative = published.Alternative(why="", conditions={"in_step": True, "rounds": 10})
    _, conditions = source.under(alternative)
    assert (conditions.in_step, conditions.rounds) == (True, 10)
    with pytest.raises(msgspec.ValidationError, match="in_steps"):
        source.under(published.Alternative(why="", conditions={"in_steps": True}))


@pytest.fixture(scope="module")
def few() -> Iterator[None]:
    """The cheapest two rows of each source."""
    with pytest.MonkeyPatch.context() as patch:
        rows = published.Source.rows
        patch.setattr(published.Source, "rows", lambda self: sorted(rows(self), key=cost)[:2])
        yield


def cost(row: Row) -> float:
    return row.output_tokens * float(row.load.partition(":")[2] or math.inf) + 1e9 * row.failed


@pytest.mark.processes
def test_the_command_writes_table_and_figure_and_marks_them(
    few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "published"
    main(["--out", str(out), "--seed", "3"])
    printed = capsys.readouterr()
    names = {f"published.{suffix}" for suffix in ("csv", "md", "json", "png", "svg", "html")}
    assert {path.name for path in out.iterdir()} == names
    written = json.loads((out / "published.json").read_text())
    assert (written["emulated"], written["seed"], set(written["sources"])) == (True, 3, set(SOURCES))
    text = (out / "published.md").read_text()
    assert text in printed.out and "EMULATED" in text.splitlines()[0]
    for source in SOURCES.values():
        assert all(assumption in text for assumption in source.assumptions)
    with (out / "published.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10 and {row["emulated"] for row in rows} == {"yes"}
    offs = [abs(float(row["off_tpot_ms"])) for row in rows if row["source"] == "aiconfigurator"]
    stated = written["sources"]["aiconfigurator"]["errors"]["tpot"]["median"]
    assert stated == pytest.approx(float(np.median(offs)), abs=1e-3)
    assert "PREDICTED (emulated hardware, no real server)" in (out / "published.svg").read_text()
    page = (out / "published.html").read_text()
    assert all(f'data-value="{each["errors"]["tpot"]["median"]!r}"' in page for each in written["sources"].values())


@pytest.mark.processes
def test_the_document_says_what_the_command_computed(few: None) -> None:
    """The cheapest rows are computed again; the rest of the table is the kept output of the command."""
    with (unpacked("published") / "published.csv").open() as file:
        kept = {(row["source"], row["run"]): row for row in csv.DictReader(file)}
    assert len(kept) == 241
    for source in SOURCES.values():
        for result in published.predict_source(source, 0):
            row = kept[source.name, result.row.run]
            for metric in published.METRICS:
                value = getattr(result.predicted, metric)
                if math.isnan(value):
                    assert not row[f"predicted_{metric}"]
                else:
                    assert float(row[f"predicted_{metric}"]) == pytest.approx(value, abs=0.01), (source.name, metric)
    part = section(unpacked("published"))
    assert part in (ROOT / "docs" / "lab" / "accuracy.md").read_text()
