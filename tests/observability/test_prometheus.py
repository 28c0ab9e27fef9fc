"""A real Prometheus scrapes `loadgen export` while a run at the embedded server and a sweep go on. Then every query of
every dashboard and every rule must find something, and its quantiles must be those of the run's own report.

One sweep is training_probe's own progress, given steps that were not trained, with all that a GPU would give; beside
it a real one of a tiny model, where `make test-train` has installed the engines. Two targets stand for what this
machine may lack: the DCGM exporter, and (as a run's snapshot) the GPUs that loadgen samples.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from loadgen.report import metrics
from loadgen.rundir import MetricFamily, MetricSample, Snapshot, records, series, write_snapshot
from loadgen.rundir.records import RequestTable
from tests.observability import names
from tests.observability.names import Query
from tests.observability.scraped import SCRAPE_S, Prometheus, Series, prometheus
from tests.support.waiting import free_ports, until
from training_probe.conditions import Conditions
from training_probe.grid import Cell
from training_probe.protocol import Step
from training_probe.results import CellResult
from training_probe.sweep.progress import Progress

pytestmark = pytest.mark.prometheus

LOADGEN = Path(sys.executable).with_name("loadgen")
TRAINING_PROBE = Path(__file__).parents[2] / ".venv-train/bin/training_probe"
REQUESTS, RATE, OUTPUT_TOKENS = 240, 20, 16  # twelve seconds
GPU_RUN, SWEEP = "20260101-000000-gpus00", "20260101-000000-sweep0"
MEASURED = (0, 4)  # 4: invalid, on a machine too busy for fair numbers; they are still the same in both places
BUCKET_RATIO = 2**0.5
HISTOGRAMS = {
    "ttft_ms": "llm_dissect_time_to_first_token_seconds",
    "tpot_ms": "llm_dissect_time_per_output_token_seconds",
    "itl_ms": "llm_dissect_inter_token_latency_seconds",
    "e2el_ms": "llm_dissect_end_to_end_latency_seconds",
    "send_lag_ms": "llm_dissect_send_lag_seconds",
}
DCGM = "".join(
    f'# TYPE {name} gauge\n{name}{{gpu="0",UUID="GPU-0"}} {value}\n'
    for name, value in (("DCGM_FI_DEV_POWER_USAGE", 312), ("DCGM_FI_DEV_FB_USED", 70_000), ("DCGM_FI_DEV_GPU_UTIL", 97))
)


@dataclass(frozen=True)
class Watched:
    """What Prometheus saw: `during` was scraped as it ran, `before` was over when Prometheus started."""

    prometheus: Prometheus
    start: float
    end: float
    reports: dict[str, dict[str, Any]]
    measured: dict[str, RequestTable]
    before: str
    during: str
    trained: str | None  # the real sweep's run_id

    def series(self, query: Query) -> list[Series]:
        """The query with what Grafana would put in place of its variables: all runs, the whole time."""
        runs = "|".join([*self.reports, GPU_RUN, SWEEP])
        expr = query.expr.replace("$run_id", f"({runs})").replace("$__rate_interval", "8s")
        expr = expr.replace("$__range", f"{round(self.end - self.start)}s")
        if query.board == "comparison":  # of runs that are over
            return self.prometheus.now(expr, self.end)
        return self.prometheus.over(expr, self.start, self.end)


@contextmanager
def stand_in(text: str) -> Iterator[str]:
    """A target that always says the same."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([LOADGEN, *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


def write_gpus(runs: Path) -> None:
    values = {"memory_used_bytes": 7e10, "power_watts": 312.0, "utilization_ratio": 0.97}
    families = [
        MetricFamily("llm_dissect_gpu_" + name, "gauge", name, [MetricSample(v, {"gpu": "0"})])
        for name, v in values.items()
    ]
    families += [
        MetricFamily("llm_dissect_gpu_energy_joules", "counter", "Energy.", [MetricSample(9e5, {"gpu": "0"})]),
        MetricFamily(
            "llm_dissect_gpu_throttled_seconds",
            "counter",
            "Throttled.",
            [MetricSample(3, {"gpu": "0", "reason": "power"})],
        ),
    ]
    (runs / "gpus").mkdir()
    write_snapshot(runs / "gpus", Snapshot(run_id=GPU_RUN, program="loadgen", state="running", families=families))


def cell(method: str) -> Cell:
    return Cell(model="tiny", method=method, micro_batch=2, seq_len=64)


def result(method: str, peak_gb: float | None) -> CellResult:
    ok = peak_gb is not None
    return CellResult(
        model="tiny", task="pretrain", engine="deepspeed", method=method, platform="here", gpus=1, seq_len=64,
        batch_size=2, cell=cell(method).name, outcome="ok" if ok else "oom", tokens_per_s=1000.0 if ok else None,
        step_ms=128.0 if ok else None, mfu_ratio=0.41 if ok else None, loss_last=2.5 if ok else None,
        peak_memory_gb=peak_gb, predicted_memory_gb=10.0, energy_j_per_token=0.5,
        conditions=Conditions(seconds=9.0, cores=2, thermal_ratio=0.0, power_ratio=0.25),
    )  # fmt: skip


def sweep(runs: Path) -> Progress:
    (runs / "sweep").mkdir()
    done = [result("Naive", 9.5), result("F", None)]
    return Progress(
        runs / "sweep",
        SWEEP,
        {"platform": "here"},
        series.MeasurementSeries(
            "cell", [done[0].cell, done[1].cell, cell("F+Z2").name, "last"], [done[0].cell, done[1].cell]
        ),
        done,
        lambda line: None,
        lambda cell, speed: (speed / 10_000, None),
    )


@contextmanager
def trained(runs: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A real sweep of one tiny cell, in processes of its own."""
    words = "--model tiny --engine ddp --method Naive --device cpu --seq-len 32 --warmup-steps 2 --steps 40 --runs 1"
    argv = [TRAINING_PROBE, "sweep", *words.split(), "--out", runs / "real-sweep"]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    place = tmp_path_factory.mktemp("watched")
    runs = place / "runs"
    runs.mkdir()
    with ExitStack() as stack:
        server = stack.enter_context(running("serve", "--dialect", "vllm", "--port", "0"))
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        load = ["run", "--backend", "vllm", "--url", url, "--output-tokens", str(OUTPUT_TOKENS)]
        over = subprocess.run([LOADGEN, *load, "--requests", "60", "--out", runs / "before"], capture_output=True)
        assert over.returncode in MEASURED, over.stderr
        write_gpus(runs)
        progress = sweep(runs)
        real = stack.enter_context(trained(runs)) if TRAINING_PROBE.exists() else None

        port = free_ports(1)[0]
        stack.enter_context(running("export", "--runs", str(runs), "--port", str(port)))
        targets = {"bench": f"127.0.0.1:{port}", "server": url.removeprefix("http://"),
                   "dcgm": stack.enter_context(stand_in(DCGM))}  # fmt: skip
        start = time.time()
        prom = stack.enter_context(prometheus(place / "prometheus", targets))
        until(lambda: len(prom.now("up == 1")) == len(targets), "the first scrapes")

        during = stack.enter_context(running(
            *load, "--arrival", f"constant:{RATE}", "--requests", str(REQUESTS), "--out", str(runs / "during")
        ))  # fmt: skip
        train(progress, during)
        assert during.wait() in MEASURED
        (runs / "broken").mkdir()
        (runs / "broken" / "snapshot.json").write_text('{"schema": ')
        reports, measured = {}, {}
        for name in ("before", "during"):
            report = json.loads((runs / name / "report.json").read_text())
            reports[report["run_id"]] = report
            measured[report["run_id"]] = records.read(runs / name)[0].measured()
        of_run = f'{{run_id="{list(reports)[1]}", state="finished"}}'
        seen = f"run_id_state:llm_dissect_run_state:seen_timestamp_seconds{of_run}"
        until(lambda: prom.now(seen), "the end of the run")
        until(lambda: prom.now('ALERTS{alertname="SnapshotsBroken", alertstate="firing"}'), "an alert")
        run_id = None
        if real is not None:
            assert real.wait() in MEASURED
            run_id = json.loads((runs / "real-sweep" / "manifest.json").read_text())["run_id"]
            until(
                lambda: prom.now(f'llm_dissect_run_state{{run_id="{run_id}", state="finished"}} == 1'),
                "the end of the sweep",
            )
        time.sleep(2 * SCRAPE_S)  # queries over time have no step at their very end
        yield Watched(prom, start, time.time(), reports, measured, *reports, run_id)


def train(progress: Progress, during: subprocess.Popen[str]) -> None:
    """Steps of a cell, for as long as the run lasts."""
    present = progress.begin(cell("F+Z2"), 11.0)
    present.trial(cell("F+Z2"), "run 1/1", 0.0)
    number = 1
    while during.poll() is None:
        step_s = 0.1 + number % 7 / 100
        present.step(
            Step(step=number, phase="timed", step_s=step_s, forward_s=0, backward_s=0, optimizer_s=0, loss=5 / number),
            number, 100, 0.5,
        )  # fmt: skip
        number += 1
        time.sleep(0.3)


@pytest.mark.parametrize("query", names.queries(), ids=lambda query: f"{query.board}-{query.panel}".replace(" ", "-"))
def test_every_panel_finds_something(watched: Watched, query: Query) -> None:
    found = watched.series(query)
    assert found, query
    shown = re.findall(r"\{\{(\w+)\}\}", query.legend)
    assert all(label in series.labels for series in found for label in shown if label != "run_id"), (query, found[0])
    if "llm_dissect_run" in query.expr and query.board != "training":
        assert watched.during in {series.labels.get("run_id") for series in found}


def test_every_choice_of_runs_finds_them(watched: Watched) -> None:
    for name, board in names.boards().items():
        match = re.fullmatch(r"label_values\((.*), run_id\)", board["templating"]["list"][0]["query"])
        assert match is not None
        found = watched.prometheus.get("label/run_id/values", **{"match[]": match[1]})
        sweeps = {SWEEP, watched.trained} - {None}
        assert set(found) == (sweeps if name == "training" else {GPU_RUN, *watched.reports})


def test_a_real_sweep_is_seen(watched: Watched) -> None:
    if watched.trained is None:
        pytest.skip("the training engines are not installed (make test-train)")
    for name in ("tokens_per_second", "step_seconds", "loss", "peak_memory_bytes"):
        (found,) = watched.prometheus.now(f'llm_dissect_training_{name}{{run_id="{watched.trained}"}}', watched.end)
        assert found.labels["cell"] == "tiny_pretrain_ddp_Naive_1x_s32_b1" and found.values[-1] > 0
    assert watched.prometheus.now(
        f'llm_dissect_training_cells{{run_id="{watched.trained}", outcome="ok"}} == 1', watched.end
    )


def test_every_rule_works_and_every_record_has_data(watched: Watched) -> None:
    rules = [rule for group in watched.prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == len(names.rules())
    assert [(rule["name"], rule["lastError"]) for rule in rules if rule["health"] != "ok"] == []
    for name in names.recorded():
        assert watched.prometheus.over(name, watched.start, watched.end), name


def test_of_the_alerts_only_what_is_wrong_fires(watched: Watched) -> None:
    """All but the broken snapshot is well; that an alert fires when it should is in rules_test.yml."""
    found = watched.prometheus.over('ALERTS{alertstate="firing"}', watched.start, watched.end)
    assert {series.labels["alertname"] for series in found} == {"SnapshotsBroken"}


def test_all_that_is_exported_is_known(watched: Watched) -> None:
    found = set(watched.prometheus.get("label/__name__/values", **{"match[]": '{__name__=~"llm_dissect_.*"}'}))
    assert found >= names.EXPORTED
    # When counters began, which OpenMetrics sends along.
    assert {name for name in found - names.EXPORTED if not name.endswith("_created")} == set()


@pytest.mark.parametrize("which", ["before", "during"])
def test_counts_are_those_of_the_report(watched: Watched, which: str) -> None:
    run_id = getattr(watched, which)
    report = watched.reports[run_id]
    one = watched.prometheus.one
    assert one(f'llm_dissect_requests_total{{run_id="{run_id}", outcome="ok"}}') == report["requests"]["ok"]
    assert (
        one(f'sum(llm_dissect_requests_total{{run_id="{run_id}", outcome!="ok"}})') == report["requests"]["failed"] == 0
    )
    assert one(f'llm_dissect_requests_planned{{run_id="{run_id}"}}') == report["requests"]["planned"]
    assert one(f'llm_dissect_requests_in_flight{{run_id="{run_id}"}}') == 0
    assert one(f'llm_dissect_prompt_tokens_total{{run_id="{run_id}"}}') == report["tokens"]["prompt"]
    assert one(f'llm_dissect_output_tokens_total{{run_id="{run_id}"}}') == report["tokens"]["output"]
    for metric, name in HISTOGRAMS.items():
        n, mean = report["metrics"][metric]["n"], report["metrics"][metric]["mean"]
        assert one(f'{name}_count{{run_id="{run_id}"}}') == n, name
        assert one(f'{name}_sum{{run_id="{run_id}"}} / {name}_count') * 1e3 == pytest.approx(mean, rel=1e-3), name


@pytest.mark.parametrize("which", ["before", "during"])
@pytest.mark.parametrize("metric", HISTOGRAMS)
@pytest.mark.parametrize("percent", [50, 90, 99])
def test_quantiles_are_those_of_the_report(watched: Watched, which: str, metric: str, percent: int) -> None:
    """Within a bucket's width, a factor of 1.41, of the two samples that the percentile lies between:
    Prometheus goes by one of them, the report by both."""
    run_id, name = getattr(watched, which), HISTOGRAMS[metric]
    values, unit_ms = metrics.sample(watched.measured[run_id], metric, metrics.CONVENTIONS["loadgen"])
    place = (len(values) - 1) * percent / 100
    low, high = (float(values[round(to(place))]) * unit_ms for to in (math.floor, math.ceil))
    reported_ms = watched.reports[run_id]["metrics"][metric][f"p{percent}"]
    assert low * (1 - 1e-9) <= reported_ms <= high * (1 + 1e-9)

    buckets = watched.prometheus.now(f'{name}_bucket{{run_id="{run_id}", le!="+Inf"}}')
    least_ms = 1e3 * min(float(series.labels["le"]) for series in buckets)  # it begins at zero: no ratio holds in it
    seen_ms = 1e3 * watched.prometheus.one(
        f'histogram_quantile({percent / 100}, sum by (le, run_id) ({name}_bucket{{run_id="{run_id}"}}))'
    )
    assert max(low, least_ms) / BUCKET_RATIO <= max(seen_ms, least_ms) <= max(high, least_ms) * BUCKET_RATIO


def test_the_rate_is_that_of_the_load(watched: Watched) -> None:
    """Half way through a run that sends evenly, Prometheus sees the rate that it was given."""
    found = watched.prometheus.over(
        f'sum(rate(llm_dissect_requests_total{{run_id="{watched.during}", outcome="ok"}}[8s]))',
        watched.start,
        watched.end,
    )
    assert max(found[0].values) == pytest.approx(RATE, rel=0.2)


def test_a_run_that_was_over_is_compared_but_has_no_rate(watched: Watched) -> None:
    for query in names.queries():
        if query.board == "comparison" and "rate30s" not in query.expr:
            ids = {series.labels["run_id"] for series in watched.series(query)}
            assert set(watched.reports) <= ids, query
    best = {series.labels["run_id"]: series.values for series in watched.series(
        next(query for query in names.queries() if "rate30s" in query.expr))}  # fmt: skip
    assert best[watched.before] == [0] and best[watched.during][0] > 0


def test_the_servers_own_metrics_name_their_server(watched: Watched) -> None:
    found = watched.prometheus.now('{job="server", __name__=~"vllm:.*"}')
    assert found and {series.labels["server"] for series in found} == {"vllm"}
