"""What other predictors say of the rows of `loadgen predict --preset published` and of this project's own closed loops.

    python -m venv aic && aic/bin/pip install aiconfigurator==0.12
    aic/bin/python benchmarks/others_predict.py benchmarks/published/aiconfigurator.csv

Run by aiconfigurator's own interpreter, with nothing of this project imported. It is asked as its own comparison with
the same file does (tools/accuracy_regression_testing): batch size = streams, nominal lengths, its default tables of
vLLM. It has no arrival rates, no prefix that several prompts share and no burst, so open loops and bursts stay empty.
Models are described by config.json files made of `backends/data/models.json`. Rows that the file has are kept.
"""

from __future__ import annotations

import contextlib
import csv
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "servers" / "data"
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "mixtral": "MixtralForCausalLM"}
KV = {"inferencemax_b200": "fp8"}  # as assumed of the whole source
OWN = (  # run, model, GPU, streams, mean prompt, reply: benchmarks/runs and benchmarks/frozen
    ("h200_7b_closed32_o128", "llama-2-7b", "h200", 32, 512, 128),
    ("frozen_closed32_mixed", "mistral-7b", "h200", 32, 640, 128),
)


def rows() -> Iterator[dict[str, Any]]:
    for source in ("aiconfigurator", "inferencemax_h100", "inferencemax_b200", "inference_sim", "mlperf"):
        lines = (DATA / f"published_{source}.csv").read_text().splitlines()
        for row in csv.DictReader(line for line in lines if not line.startswith("#")):
            yield {"source": source, **row}
    for run, model, gpu, streams, prompt, reply in OWN:
        yield {
            "source": "own", "run": run, "model": model, "gpu": gpu, "tp": 1, "quantization": "",
            "load": f"closed:{streams}", "input_tokens": prompt, "output_tokens": reply,
        }  # fmt: skip


def model_directory(model: str, directory: Path) -> str:
    """It knows no MistralForCausalLM; without a window that is a Llama of the same sizes."""
    models = json.loads((ROOT / "backends" / "data" / "models.json").read_text())
    config = dict(next(each["config"] for each in models if each["name"] == model))
    if config["model_type"] == "mistral":
        config["model_type"] = "llama"
        config.pop("sliding_window")
    architecture = ARCHITECTURES[config["model_type"]]
    path = directory / model
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config | {"architectures": [architecture], "torch_dtype": "bfloat16"}))
    return str(path)


def estimate(row: dict[str, Any], directory: Path) -> tuple[str, str, str]:
    """ttft and tpot in ms, or why there is none."""
    from aiconfigurator.cli.api import cli_estimate  # type: ignore[import-not-found]

    kind, _, streams = row["load"].partition(":")
    if kind != "closed":
        return "", "", f"{kind} is not a load that it has"
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = cli_estimate(
                model_directory(row["model"], directory), f"{row['gpu']}_sxm", mode="agg", backend_name="vllm",
                isl=int(row["input_tokens"]), osl=int(row["output_tokens"]), batch_size=int(streams),
                tp_size=int(row["tp"]), gemm_quant_mode=row["quantization"] or None,
                kvcache_quant_mode=KV.get(row["source"]),
            )  # fmt: skip
    except Exception as error:  # its own errors are of many types
        return "", "", " ".join(str(error).replace(f"{directory}/", "").split())[:160]
    return f"{found.ttft:.2f}", f"{found.tpot:.3f}", ""


def main(out: Path) -> None:
    kept = list(csv.reader(out.read_text().splitlines())) if out.exists() else []
    done = {(source, run) for source, run, *_ in kept}
    with tempfile.TemporaryDirectory() as directory, out.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not kept:
            writer.writerow(["source", "run", "ttft_ms", "tpot_ms", "reason"])
        for row in rows():
            if (row["source"], row["run"]) not in done:
                writer.writerow([row["source"], row["run"], *estimate(row, Path(directory))])
                file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
