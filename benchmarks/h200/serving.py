"""Figures and tables of the serving runs in benchmarks/h200/serving, from the committed records alone.

    python benchmarks/h200/serving.py

Writes cdf_bursts.png, cdf_poisson.png, cdf_servers.png and cdf_tp.png (as Figures 7 to 10 of arXiv 2311.03687 do,
latencies by server and load) and throughput.png (Figure 6), and prints the tables of the README: runs, the comparison
with `vllm bench serve`, and the errors of predictions.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from loadgen.report import figures
from loadgen.report.metrics import Sample
from servers.calibrate.command import judged
from servers.calibrate.runs import Observed, RunFacts, read
from servers.simulator.build import profiles, read_profile

Floats = npt.NDArray[np.float64]
HERE = Path(__file__).parent / "serving"
SCHEDULER = "vllm@v1"
ATTACHED = RunFacts(gpu="h200", kv_tokens=230032)  # of the server that the runs by --url were attached to
RUNS = (
    "7b_burst_o64", "7b_burst_o256", "7b_burst_o512", "7b_poisson16_o128", "7b_poisson32_o128", "7b_poisson40_o128",
    "13b_burst_o64", "13b_burst_o256", "13b_burst_o512",
)  # fmt: skip
SPLIT = (
    "7b_tp2_o64", "7b_tp2_p2poff_o64", "7b_tp4_o64", "7b_tp4_p2poff_o64", "70b_tp2_o64", "70b_tp2_p2poff_o64",
)  # fmt: skip
LIGHTLLM = ("7b_lightllm_o64", "7b_lightllm_o256")
FITTED = ("7b_burst_o64", "7b_burst_o512", "7b_poisson16_o128")
SAME_SERVER = ("7b_burst_o256", "7b_burst_o256_again", "7b_burst_o256_text")  # the bench ran after the first
BENCH = "vllm_bench_7b_burst_o256.json"


def latencies(run: Observed) -> dict[str, Floats]:
    """Milliseconds, as loadgen defines them."""
    tpot = (run.end_s - run.first_s) / (run.output - 1)
    return {"ttft": run.ttft_s * 1e3, "tpot": tpot * 1e3, "e2el": run.e2el_s * 1e3}


def curves(run: Observed, label: str) -> figures.Curves:
    samples = {f"{name}_ms": Sample(np.sort(values), 1.0) for name, values in latencies(run).items()}
    return figures.Curves(label, False, samples)


def labelled(burst: str) -> str:
    """7b_burst_o64: vLLM, 7B, 64 output tokens."""
    model, kind, *rest, output = burst.split("_")
    parts = ["LightLLM" if kind == "lightllm" else "vLLM", model.upper()]
    if kind.startswith("tp"):
        parts.append(f"TP {kind[2:]}{' without P2P' if rest else ''}")
    return ", ".join([*parts, f"{output[1:]} output tokens"])


def draw(name: str, title: str, runs: dict[str, Observed]) -> None:
    figures.draw([curves(run, label) for label, run in runs.items()], title, [HERE / name])


def tokens_per_s(run: Observed) -> float:
    return float(run.output.sum() / (run.end_s.max() - run.send_s.min()))


def throughput(bars: dict[str, Observed]) -> None:
    with matplotlib.rc_context(figures.STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        axis = figure.subplots()
        values = [tokens_per_s(run) for run in bars.values()]
        colours = [figures.COLOURS["LightLLM" in label] for label in bars]
        drawn = axis.barh(list(bars), values, color=colours, height=0.65)
        axis.bar_label(drawn, [f"{value:,.0f}" for value in values], padding=3)
        axis.invert_yaxis()
        axis.margins(x=0.1)
        axis.set_xlabel("output tokens/s")
        figure.suptitle("1000 prompts of 512 tokens at once, on one H200 (TP 2 and 4: on so many)", x=0.01, ha="left")
        figure.savefig(HERE / "throughput.png", dpi=110)


def table_of_runs() -> None:
    print("| run | requests | makespan s | output tok/s | ttft p50 s | tpot p50 ms | e2el p50 s | e2el p99 s "
          "| GPU memory GiB | W | J/output token | preempted |\n|---|" + "---:|" * 11)  # fmt: skip
    for name in (*RUNS, *SPLIT, *LIGHTLLM):
        report: dict[str, Any] = json.loads((HERE / name / "report.json").read_text())
        metrics, gpus = report["metrics"], report["gpus"]
        preempted = report["server"]["preemptions"]
        counted = "" if preempted is None else preempted  # LightLLM does not count them
        seconds = [metrics[key][at] / 1e3 for key, at in (("ttft_ms", "p50"), ("e2el_ms", "p50"), ("e2el_ms", "p99"))]
        print(
            f"| {name} | {report['requests']['ok']} | {report['duration_s']:.2f} "
            f"| {report['throughput']['output_tokens_per_s']:.0f} | {seconds[0]:.3f} | {metrics['tpot_ms']['p50']:.1f} "
            f"| {seconds[1]:.2f} | {seconds[2]:.2f} | {gpus['memory_peak_bytes'] / 2**30:.1f} "
            f"| {gpus['power_mean_w']:.0f} | {gpus['j_per_output_token']:.3f} | {counted} |"
        )


def table_of_clients() -> None:
    """The bench between two runs of ours: how far it is from their mean, beside how far those two are apart."""
    bench = json.loads((HERE / BENCH).read_text())
    ttft, e2el = (np.array(bench[key]) * 1e3 for key in ("ttfts", "e2els"))
    (length,) = bench["output_lens"]
    theirs = {"ttft": ttft, "tpot": (e2el - ttft) / (length - 1), "e2el": e2el}
    ours = [read(HERE / name, ATTACHED) for name in SAME_SERVER]
    rows = {"output tok/s": [*(tokens_per_s(run) for run in ours), bench["output_throughput"]]}
    for name, values in theirs.items():
        for percent in (math.nan, 50, 90, 95, 99):
            each = [*(latencies(run)[name] for run in ours), values]
            rows[f"{name} {'mean' if math.isnan(percent) else f'p{percent}'}, ms"] = [
                float(np.mean(one) if math.isnan(percent) else np.percentile(one, percent)) for one in each
            ]
    print("\n| | loadgen | `vllm bench serve` | loadgen again | bench to the mean of both | again to first "
          "| loadgen, text |\n|---|" + "---:|" * 6)  # fmt: skip
    for label, (first, again, text, bench_value) in rows.items():
        print(
            f"| {label} | {first:,.1f} | {bench_value:,.1f} | {again:,.1f} "
            f"| {bench_value / np.mean((first, again)) - 1:+.1%} | {again / first - 1:+.1%} | {text:,.1f} |"
        )


def table_of_predictions(runs: dict[str, Observed]) -> None:
    print("\n| run | profile | makespan | e2el, request by request | e2el W1 | ttft W1 | tpot W1 |\n|---|---|"
          + "---:|" * 5)  # fmt: skip
    aside = [run for name, run in runs.items() if name not in FITTED]
    fitted = judged(read_profile(HERE / "profile.json", SCHEDULER), aside)
    for profile, called in ((profiles()[SCHEDULER], "built-in"), (fitted, "three of these runs")):
        for one in judged(profile, list(runs.values()) if called == "built-in" else aside).held_out:
            errors = (one.e2el_mape, one.e2el_w1, one.ttft_w1, one.tpot_w1)
            print(f"| {one.run} | {called} | {one.makespan:+.1%} | " + " | ".join(f"{e:.1%}" for e in errors) + " |")


def main() -> None:
    runs = {name: read(HERE / name, ATTACHED) for name in RUNS}
    split = {name: read(HERE / name, RunFacts(gpu="h200")) for name in SPLIT}
    lightllm = {labelled(name): read(HERE / name, RunFacts(gpu="h200")) for name in LIGHTLLM}
    bursts = {labelled(name): run for name, run in runs.items() if "burst" in name}
    rates = {f"vLLM, 7B, Poisson {rate}/s": runs[f"7b_poisson{rate}_o128"] for rate in (16, 32, 40)}
    draw("cdf_bursts.png", "One H200, 1000 prompts of 512 tokens at once", bursts)
    draw("cdf_poisson.png", "One H200, 7B, 512 tokens in, 128 out", rates)
    servers = {labelled(name): runs[name] for name in ("7b_burst_o64", "7b_burst_o256")} | lightllm
    draw("cdf_servers.png", "One H200, 7B, 1000 prompts of 512 tokens at once", servers)
    parallel = {labelled(name): run for name, run in split.items()}
    draw("cdf_tp.png", "Two and four H200s over NVLink, 1000 prompts of 512 tokens at once, 64 out", parallel)
    throughput(bursts | parallel | lightllm)
    table_of_runs()
    table_of_clients()
    table_of_predictions(runs | split)


if __name__ == "__main__":
    main()
