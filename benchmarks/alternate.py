"""Servers in turns on one host, each with the same loads: what differs then are not the hosts.

    python benchmarks/alternate.py predict DIR                                  # before; commit what it wrote
    python benchmarks/alternate.py play DIR/host1 vllm256 o256 poisson32 o512   # beside a GPU: one start of a server
    python benchmarks/alternate.py play DIR/host1 lightllm o64 o256             # likewise, and so on in turns
    python benchmarks/alternate.py tables DIR

vllm256 and vllm512 are vLLM with CUDA graphs up to that batch and the same KV cache. All have a Llama-2-7B of random
weights and nine tenths of the GPU's memory. The load "bench" is o256 as `vllm bench serve` sends it. VLLM_PATH and
LIGHTLLM_PATH may hold the PYTHONPATH of either server.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import frozen
import msgspec

LOADS = {
    "o64": "--output-tokens 64",
    "o256": "--output-tokens 256",
    "o512": "--output-tokens 512",
    "poisson32": "--output-tokens 128 --requests 900 --arrival poisson:32",
}
PREDICTED = {"vllm256": ("o256", "o512", "poisson32"), "vllm512": ("o256", "o512", "poisson32"),
             "lightllm": ("o64", "o256")}  # fmt: skip
KV_TOKENS = 230032  # what a vLLM with graphs up to 256 had: runs 7b_burst_o256 to 7b_poisson40_o128 in h200/serving
MAX_MODEL_LEN, MEMORY_RATIO = "2048", "0.9"
MODEL = "llama-2-7b-shape"
BENCHED = "bench"  # among the loads: o256 as `vllm bench serve` sends it
BENCH = [
    "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "vllm", "--dataset-name", "random",
    "--random-input-len", "512", "--random-output-len", "256", "--num-prompts", "1000", "--request-rate", "inf",
    "--ignore-eos", "--temperature", "0", "--num-warmups", "8", "--seed", "0", "--save-result", "--model", MODEL,
    "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,95,99",
]  # fmt: skip


def predict(out: Path) -> None:
    from servers.simulator.build import profiles

    with tempfile.TemporaryDirectory() as scratch:
        model = frozen.model_in(Path(scratch), MODEL)
        for server, names in PREDICTED.items():
            backend = server.rstrip("0123456789")
            options = ["--memory-ratio", MEMORY_RATIO]
            if backend == "vllm":
                built_in = profiles()["vllm@v1"]
                overheads = msgspec.structs.replace(built_in.overheads, graph_tokens=int(server[4:]))
                profile = Path(scratch) / f"{server}.json"
                profile.write_bytes(msgspec.json.encode(msgspec.structs.replace(built_in, overheads=overheads)))
                options = ["--kv-tokens", str(KV_TOKENS), "--profile", str(profile)]
            for name in names:
                frozen.loadgen(
                    "predict", "--backend", backend, "--model", str(model), "--gpu", "h200", "--dtype", "bfloat16",
                    "--max-model-len", MAX_MODEL_LEN, *options, *LOADS[name].split(), "--out",
                    os.path.relpath(out / "predicted" / f"{server}_{name}", frozen.ROOT),
                )  # fmt: skip


def play(out: Path, server: str, names: list[str], model: Path) -> None:
    """Starts a server and sends it the loads; their runs are numbered after those of earlier turns."""
    frozen.model_in(model.parent, model.name)
    lightllm = server == "lightllm"
    if lightllm and not (model / "model.safetensors").exists():
        write_weights(model)
    out.mkdir(parents=True, exist_ok=True)
    turn = sum(path.name.startswith(f"{server}.") for path in out.glob("*.log")) + 1
    log = out / f"{server}.{turn}.log"
    began = time.monotonic()
    with frozen.serving(*(lightllm_server(model, log) if lightllm else vllm_server(server, model, log))) as url:
        print(f"{server}, turn {turn}: ready after {time.monotonic() - began:.0f} s", flush=True)
        target = ["run", "--backend", "lightllm" if lightllm else "vllm", "--no-calibrate", "--vocab-size", "32000"]
        with tempfile.TemporaryDirectory() as unmeasured:  # kernels are compiled at their first use
            settling = ["--requests", "300", "--output-tokens", "32", "--seed", "9", "--no-server-metrics"]
            frozen.loadgen(*target, "--url", url, *settling, "--out", f"{unmeasured}/run")
        for name in names:
            at = time.monotonic()
            run = f"{server}_{name}.{turn}"
            if name == BENCHED:
                bench(url, model, out / run)
            else:
                frozen.loadgen(*target, "--url", url, *LOADS[name].split(), "--out", str(out / run))
            print(f"{run}: {time.monotonic() - at:.0f} s", flush=True)


def vllm_server(server: str, model: Path, log: Path) -> tuple[str, list[str], Path, str]:
    arguments = [
        "--model", str(model), "--served-model-name", model.name, "--load-format", "dummy", "--dtype", "bfloat16",
        "--max-model-len", MAX_MODEL_LEN, "--max-num-seqs", "1024", "--gpu-memory-utilization", MEMORY_RATIO,
        "--num-gpu-blocks-override", str(KV_TOKENS // 16), "--max-cudagraph-capture-size", server[4:],
        "--no-enable-prefix-caching", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    return "vllm.entrypoints.openai.api_server", arguments, log, "VLLM_PATH"


def lightllm_server(model: Path, log: Path) -> tuple[str, list[str], Path, str]:
    hypercorn = log.with_suffix(".toml")
    hypercorn.write_text("backlog = 4096\nkeep_alive_timeout = 3600\nkeep_alive_max_requests = 2147483647\n")
    arguments = [
        "--model_dir", str(model), "--model_name", model.name, "--tp", "1", "--data_type", "bfloat16",
        "--max_req_total_len", MAX_MODEL_LEN, "--running_max_req_size", "1024", "--graph_max_batch_size", "256",
        "--mem_fraction", MEMORY_RATIO, "--batch_max_tokens", "8192", "--llm_prefill_att_backend", "triton",
        "--llm_decode_att_backend", "triton", "--disable_dynamic_prompt_cache", "--hypercorn_config", str(hypercorn),
    ]  # fmt: skip
    return "lightllm.server.api_server", arguments, log, "LIGHTLLM_PATH"


def write_weights(model: Path) -> None:
    """Random weights: LightLLM has no dummy ones."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, ffn, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }  # fmt: skip
    for layer in (f"model.layers.{number}" for number in range(config["num_hidden_layers"])):
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (hidden, ffn)}
        shapes |= {f"{layer}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    drawn = {
        name: (0.02 * torch.randn(shape, device=device, dtype=torch.bfloat16)).cpu() for name, shape in shapes.items()
    }
    save_file(drawn, model / "model.safetensors", metadata={"format": "pt"})


def bench(url: str, model: Path, result: Path) -> None:
    environment = os.environ | ({"PYTHONPATH": os.environ["VLLM_PATH"]} if "VLLM_PATH" in os.environ else {})
    command = [*BENCH, "--base-url", url, "--tokenizer", str(model)]
    saved = ["--result-dir", str(result.parent), "--result-filename", f"{result.name}.json"]
    subprocess.run([sys.executable, *command, *saved], env=environment, stdout=subprocess.DEVNULL)


def tables(out: Path) -> None:
    table_of_runs(out)
    table_of_clients(out)
    table_of_predictions(out)


def table_of_runs(out: Path) -> None:
    print("| run | makespan s | output tok/s | ttft p50 s | tpot p50 ms | e2el p50 s | e2el p99 s | preempted | W |")
    print("|---|" + "---:|" * 8)
    for path in sorted(out.glob("host*/*/report.json")):
        report = json.loads(path.read_text())
        of, throughput = report["metrics"], report["throughput"]["output_tokens_per_s"]
        seconds = [of[key][at] / 1e3 for key, at in (("ttft_ms", "p50"), ("e2el_ms", "p50"), ("e2el_ms", "p99"))]
        preempted = report["server"]["preemptions"]
        print(
            f"| {path.parent.relative_to(out)} | {report['duration_s']:.2f} | {throughput:.0f} | {seconds[0]:.3f} "
            f"| {of['tpot_ms']['p50']:.1f} | {seconds[1]:.2f} | {seconds[2]:.2f} "
            f"| {'' if preempted is None else preempted} | {report['gpus']['power_mean_w']:.0f} |"
        )
    for path in sorted(out.glob(f"host*/*_{BENCHED}.*.json")):
        of = json.loads(path.read_text())
        seconds = [of[key] / 1e3 for key in ("p50_ttft_ms", "p50_e2el_ms", "p99_e2el_ms")]
        print(
            f"| {path.relative_to(out).with_suffix('')} | {of['duration']:.2f} | {of['output_throughput']:.0f} "
            f"| {seconds[0]:.3f} | {of['p50_tpot_ms']:.1f} | {seconds[1]:.2f} | {seconds[2]:.2f} | | |"
        )


def table_of_clients(out: Path) -> None:
    """`vllm bench serve` beside loadgen's runs of the same load on the same starts: means of their numbers, and how far
    the second is from the first."""
    paths = sorted(out.glob(f"host*/*_{BENCHED}.*.json"))
    theirs = [json.loads(path.read_text()) for path in paths]
    runs = [path.with_name(path.stem.replace(f"_{BENCHED}.", "_o256.")) for path in paths]
    ours = [json.loads((run / "report.json").read_text()) for run in runs]
    rows = {"makespan, s": ([report["duration_s"] for report in ours], [bench["duration"] for bench in theirs])}
    for metric in ("ttft", "tpot", "e2el"):
        for at in ("mean", "p50", "p90", "p95", "p99"):
            rows[f"{metric} {at}, ms"] = (
                [report["metrics"][f"{metric}_ms"][at] for report in ours],
                [bench[f"{at}_{metric}_ms"] for bench in theirs],
            )
    print("\n| | loadgen | `vllm bench serve` | bench to loadgen | loadgen, second to first | bench, second to first |")
    print("|---|" + "---:|" * 5)
    for label, (mine, bench) in rows.items():
        means = [statistics.mean(each) for each in (mine, bench)]
        again = [100 * (each[1] / each[0] - 1) for each in (mine, bench)]
        print(
            f"| {label} | {means[0]:,.1f} | {means[1]:,.1f} | {100 * (means[1] / means[0] - 1):+.1f}% "
            f"| {again[0]:+.1f}% | {again[1]:+.1f}% |"
        )


def table_of_predictions(out: Path) -> None:
    """How far off the committed predictions were."""
    print("\n| run | makespan off % | ttft W1 % | tpot W1 % | e2el W1 % |\n|---|---:|---:|---:|---:|")
    errors: list[list[float]] = []
    for path in sorted(out.glob("host*/*.[0-9]")):
        predicted = frozen.distributions(out / "predicted" / path.stem)
        measured = frozen.distributions(path)
        if predicted is not None and measured is not None:
            makespan = 100 * (float(predicted["makespan_s"][0]) / float(measured["makespan_s"][0]) - 1)
            w1 = [frozen.off_percent(predicted[name], measured[name]) for name in frozen.METRICS]
            errors.append([abs(makespan), *w1])
            print(f"| {path.relative_to(out)} | {makespan:+.1f} | " + " | ".join(f"{value:.1f}" for value in w1) + " |")
    for label, of in (("median", statistics.median), ("worst", max)):
        print(f"| {label} | " + " | ".join(f"{of(column):.1f}" for column in zip(*errors, strict=True)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["predict", "play", "tables"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("server", nargs="?", choices=list(PREDICTED))
    parser.add_argument("loads", nargs="*", help=", ".join([*LOADS, BENCHED]))
    parser.add_argument("--models", type=Path, default=Path("models"), help="where the model is, or is to be made")
    options = parser.parse_args()
    if unknown := {*options.loads} - {*LOADS, BENCHED}:
        parser.error(f"unknown loads: {', '.join(sorted(unknown))}; there are {', '.join([*LOADS, BENCHED])}")
    if options.step == "play" and not options.loads:
        parser.error("play needs a server and its loads, as in: play DIR/host1 vllm256 o256 o512")
    out = options.directory.absolute()
    if options.step == "predict":
        predict(out)
    elif options.step == "play":
        play(out, options.server, options.loads, options.models.absolute() / MODEL)
    else:
        tables(out)


if __name__ == "__main__":
    main()
