"""Prints the tables of the README about the serving runs in benchmarks/h200/serving, from the committed records alone:
runs, the comparison with `vllm bench serve`, and the errors of predictions.

    python benchmarks/h200/serving.py
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

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


def tokens_per_s(run: Observed) -> float:
    return float(run.output.sum() / (run.end_s.max() - run.send_s.min()))


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
    table_of_runs()
    table_of_clients()
    attached = {name: read(HERE / name, ATTACHED) for name in RUNS}
    table_of_predictions(attached | {name: read(HERE / name, RunFacts(gpu="h200")) for name in SPLIT})


if __name__ == "__main__":
    main()
