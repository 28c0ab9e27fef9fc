"""MLPerf's H100 server run, and others of the same requests, on a real vLLM and predicted.

    python benchmarks/mlperf_server.py predict ENGINE              # what servers.predict makes of it, a minute
    python benchmarks/mlperf_server.py measure ENGINE OUT.jsonl    # on an H100 with vLLM, which must have that engine

ENGINE: `v1` (steps scheduled in line), `v1-async`, or `v0`, which vLLM had until 0.10. Llama-3.1-8B's shape in fp8 with
random weights, prompts of tokens whose lengths are drawn as MLPerf's (servers/data/published.json), replies of 128. V1
has the options of MLPerf's H100 server, V0 those of its L40S server but for the KV cache, which is in 16 bit. A burst,
then Poisson loads. The engine runs beside its client without HTTP, V0 in the same process, and without a prefix cache.
V1 of 0.10.0 does without a tokenizer only where the call of update_from_tokenizer is taken out of its
vllm/v1/engine/processor.py.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import raw
from scheduling_in_line import CONFIG, ROOT, prompt_tokens

REPLY = 128
BURST, SECONDS = 1200, 40  # requests of the burst; of each Poisson load
RATES = {"v1": (20.0, 30.0, 39.64), "v1-async": (20.0, 30.0, 39.64), "v0": (10.0, 20.0)}


def main() -> None:
    match sys.argv[1:]:
        case ["predict", engine]:
            predict(engine)
        case ["measure", engine, out]:
            os.environ["VLLM_USE_V1"] = "0" if engine == "v0" else "1"
            asyncio.run(measure(engine, Path(out)))
        case _:
            raise SystemExit(__doc__)


def loads(engine: str) -> Iterator[tuple[str, int]]:
    """Each load and its requests."""
    yield "burst", BURST
    for rate in RATES[engine]:
        yield f"rate:{rate:g}", round(rate * SECONDS)


def predict(engine: str) -> None:
    sys.path.insert(0, str(ROOT))
    from msgspec.structs import replace

    from servers.predict import published
    from servers.predict.published_runs import play

    source = next(each for each in published.sources() if each.name == "mlperf")
    conditions = replace(source.conditions(), template_tokens=0, text_token_us=0.0, launch_ratio=1.0)
    server = replace(
        source.servers,
        prefix_caching=False,
        async_scheduling=engine == "v1-async",
        v0_gpus=("h100",) if engine == "v0" else (),
    )
    run = "l40s-server" if engine == "v0" else "h100-server"
    row = replace(
        next(row for row in source.rows() if row.run == run), gpu="h100", kv_cache_dtype="auto", memory_ratio=0.9
    )
    for load, requests in loads(engine):
        means = play(replace(row, load=load, requests=requests), server, conditions, 0)
        result = {name: round(value, 2) for name, value in means._asdict().items() if not math.isnan(value)}
        print(json.dumps({"engine": engine, "load": load} | result))


async def measure(engine: str, out: Path) -> None:
    import torch
    import vllm

    with TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(CONFIG))
        llm, draw = started(engine, model), random.Random(1)
        await play(llm, "burst", 200, draw)  # kernels are compiled and caches fill
        facts = {"gpu": torch.cuda.get_device_name(), "vllm": vllm.__version__}
        for load, requests in loads(engine):
            result = {name: round(value, 2) for name, value in (await play(llm, load, requests, draw)).items()}
            values = {"engine": engine, "load": load} | result | facts
            print(json.dumps(values), flush=True)
            raw.append(out, values)


def started(engine: str, model: str) -> Any:
    from vllm.config import CompilationConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.async_llm_engine import AsyncLLMEngine

    options: dict[str, Any] = {"max_num_seqs": 256, "max_model_len": 2668}
    if engine != "v0":
        sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 1025, 16)]
        options = {
            "max_num_seqs": 512, "max_num_batched_tokens": 1024, "long_prefill_token_threshold": 256,
            "max_model_len": 131072, "async_scheduling": engine == "v1-async",
            "compilation_config": CompilationConfig(cudagraph_capture_sizes=sizes),
        }  # fmt: skip
    return AsyncLLMEngine.from_engine_args(
        AsyncEngineArgs(
            model=model, load_format="dummy", skip_tokenizer_init=True, quantization="fp8",
            enable_prefix_caching=False, gpu_memory_utilization=0.9, seed=0, **options,
        )
    )  # fmt: skip


async def play(llm: Any, load: str, requests: int, draw: random.Random) -> dict[str, float]:
    """Tokens/s of a burst; of other loads the means of all requests."""
    import vllm

    params = vllm.SamplingParams(temperature=0, max_tokens=REPLY, ignore_eos=True, detokenize=False)
    served: list[tuple[float, float, float]] = []  # sent, first token, last

    async def one(name: str, ids: list[int]) -> None:
        sent, first = time.perf_counter(), 0.0
        async for _ in llm.generate({"prompt_token_ids": ids}, params, name):
            first = first or time.perf_counter()
        served.append((sent, first, time.perf_counter()))

    prompts = [[draw.randrange(1000, 100_000) for _ in range(n)] for n in prompt_tokens(requests, draw)]
    kind, _, rate = load.partition(":")
    begun = at = time.perf_counter()
    tasks = []
    for index, ids in enumerate(prompts):
        tasks.append(asyncio.create_task(one(f"{load}-{index}", ids)))
        if kind == "rate":
            at += draw.expovariate(float(rate))
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
    await asyncio.gather(*tasks)
    if kind == "burst":
        return {"output_tokens_per_s": requests * REPLY / (max(last for _, _, last in served) - begun)}
    ttft_ms = 1e3 * sum(first - sent for sent, first, _ in served) / requests
    e2e_ms = 1e3 * sum(last - sent for sent, _, last in served) / requests
    return {"ttft_ms": ttft_ms, "tpot_ms": (e2e_ms - ttft_ms) / (REPLY - 1), "e2e_ms": e2e_ms}


if __name__ == "__main__":
    main()
