"""What a step of vLLM takes with and without asynchronous scheduling, by the rows that decode.

    python benchmarks/scheduling_in_line.py predict [--launch-row-us US] [MODE ...]  # by servers.simulator, seconds
    python benchmarks/scheduling_in_line.py measure OUT.jsonl [MODE ...]             # on a GPU, with vLLM: some minutes

MODE: `in line`, `asynchronous`, or `V0`, the engine that vLLM had until 0.10, whose KV cache is in 16 bit here. Without
one, all are predicted and the first two measured. One server after the other, each of Llama-3.1-8B's shape in fp8 with
random weights, without HTTP. A step of N rows is what N requests of 160 tokens take more than N of 32, over 128.
`burst`: 1500 prompts whose lengths are drawn from MLPerf's (servers/data/published.json), 128 tokens each, 1024 at
once, 4096 tokens a step, as in its run on an H100.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import raw

ROOT = Path(__file__).resolve().parent.parent
ROWS = (1, 16, 64, 128, 256, 512, 1024)
PROMPT_TOKENS, SHORT, LONG = 64, 32, 160
BURST, REPLY = 1500, 128
MODES = ("in line", "asynchronous", "V0")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip


def main() -> None:
    match sys.argv[1:]:
        case ["predict", "--launch-row-us", us, *modes]:
            for mode in modes or MODES:
                predict(mode, float(us))
        case ["predict", *modes]:
            for mode in modes or MODES:
                predict(mode)
        case ["measure", out, mode]:
            measure(Path(out), mode)
        case ["measure", out, *modes]:
            for mode in modes or MODES[:2]:
                subprocess.run([sys.executable, __file__, "measure", out, mode], check=True)
        case _:
            raise SystemExit(__doc__)


def prompt_tokens(prompts: int, draw: random.Random) -> list[int]:
    """Lengths as MLPerf's."""
    sources = json.loads((ROOT / "servers/data/published.json").read_text())
    counts, lengths = zip(*next(each["prompt_lengths"] for each in sources if each["name"] == "mlperf"), strict=True)
    return draw.choices(lengths, counts, k=prompts)


def burst() -> list[int]:
    """Tokens of its prompts."""
    return prompt_tokens(BURST, random.Random(0))


def predict(mode: str, launch_row_us: float | None = None) -> None:
    """launch_row_us: in place of the profile's."""
    import msgspec

    sys.path.insert(0, str(ROOT))
    from backends import catalog
    from servers.schedulers import Sequence
    from servers.simulator.build import Profile, Setup, emulate
    from servers.simulator.engine import FrontEnd

    model = catalog.find("llama-3.1-8b")
    assert model is not None
    setup = Setup(
        scheduler="vllm@v1", model=model, gpu="h100", dtype="bfloat16", quantization="fp8", kv_cache_dtype="fp8",
        max_batched_tokens=4096, options=(("async_scheduling", int(mode == "asynchronous")),),
    )  # fmt: skip
    if mode == "V0":
        options = (("max_num_seqs", 1024),)
        setup = msgspec.structs.replace(setup, scheduler="vllm@v0", kv_cache_dtype="auto", options=options)
    server = emulate(setup)
    overheads = server.profile.overheads
    if launch_row_us is not None:
        overheads = msgspec.structs.replace(overheads, launch_row_us=launch_row_us)
    server = server.with_profile(Profile(scheduler=server.profile.scheduler, overheads=overheads, front=FrontEnd()))

    def takes_s(prompts: list[int], output: int) -> float:
        ended_s = 0.0

        def deliver(emits: list[Sequence], first_s: float, gap_s: float) -> None:
            nonlocal ended_s
            ended_s = max(ended_s, first_s + gap_s * (len(emits) - 1))

        engine = server.engine(deliver)
        for index, tokens in enumerate(prompts):
            engine.submit(Sequence(index, tokens, output), 0.0)
        engine.advance(math.inf)
        return ended_s

    for rows in ROWS:
        step_s = (takes_s([PROMPT_TOKENS] * rows, LONG) - takes_s([PROMPT_TOKENS] * rows, SHORT)) / (LONG - SHORT)
        print(json.dumps({"mode": mode, "rows": rows, "step_ms": round(1e3 * step_s, 3)}))
    prompts = burst()
    tokens_per_s = BURST * REPLY / takes_s(prompts, REPLY)
    print(
        json.dumps(
            {"mode": mode, "burst": BURST, "prompt_tokens": sum(prompts), "output_tokens_per_s": round(tokens_per_s, 1)}
        )
    )


def measure(out: Path, mode: str) -> None:
    os.environ["VLLM_USE_V1"] = "0" if mode == "V0" else "1"
    import torch
    import vllm

    with TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(CONFIG))
        llm = vllm.LLM(
            model=model, load_format="dummy", skip_tokenizer_init=True, quantization="fp8",
            kv_cache_dtype="auto" if mode == "V0" else "fp8", max_model_len=4096, max_num_seqs=1024,
            max_num_batched_tokens=4096, enable_prefix_caching=False, async_scheduling=mode == "asynchronous", seed=0,
        )  # fmt: skip

        def takes_s(prompts: list[int], output: int) -> float:
            draw = random.Random(len(prompts))
            ids = [[draw.randrange(1000, 100_000) for _ in range(tokens)] for tokens in prompts]
            inputs = [{"prompt_token_ids": each} for each in ids]
            params = vllm.SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
            begun = time.perf_counter()
            llm.generate(inputs, params, use_tqdm=False)
            return time.perf_counter() - begun

        def keep(result: dict[str, object]) -> None:
            values = {"mode": mode} | result | facts
            print(json.dumps(values), flush=True)
            raw.append(out, values)

        facts = {"gpu": torch.cuda.get_device_name(), "vllm": vllm.__version__}
        takes_s([PROMPT_TOKENS] * 1024, SHORT)
        for rows in ROWS:
            pairs = [[takes_s([PROMPT_TOKENS] * rows, tokens) for tokens in (SHORT, LONG)] for _ in range(3)]
            step_ms = sorted(1e3 * (long - short) / (LONG - SHORT) for short, long in pairs)
            keep({"rows": rows, "step_ms": [round(ms, 3) for ms in step_ms]})
        prompts = burst()
        seconds = takes_s(prompts, REPLY)
        tokens_per_s = round(BURST * REPLY / seconds, 1)
        keep({"burst": BURST, "prompt_tokens": sum(prompts), "output_tokens_per_s": tokens_per_s})


if __name__ == "__main__":
    main()
