"""What a GPU takes to draw a token of each row by top-k and top-p, as vLLM 0.12 does by default: it sorts all logits.

    python benchmarks/sampling.py  # seconds, on a GPU with torch

vLLM takes temperature, top-k and top-p from the model's generation_config.json where a request names none. In 0.12 its
FlashInfer sampler has to be switched on (VLLM_USE_FLASHINFER_SAMPLER); otherwise a row's logits are sorted, masked,
put back in order, and a token is drawn from them (vllm/v1/sample/ops/topk_topp_sampler.py). Greedy decoding beside it
takes the largest logit.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import torch

VOCABULARIES = {"Qwen3": 151_936, "Llama 3": 128_256, "Llama 2": 32_000}
ROWS = (1, 8, 16, 32, 64, 128, 256, 512)
TOP_K, TOP_P, TEMPERATURE = 20, 0.95, 0.6  # of Qwen3's generation_config.json
REPEATS = 30


def main() -> None:
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, medians of {REPEATS}")
    print("| vocabulary | rows | greedy us | top-k and top-p us | more, us a row | more, ns a logit |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, size in VOCABULARIES.items():
        for rows in ROWS:
            logits = torch.randn(rows, size, device="cuda", dtype=torch.bfloat16)
            greedy_us, drawn_us = (median_us(functools.partial(how, logits)) for how in (greedy, drawn))
            more_us = drawn_us - greedy_us
            print(
                f"| {name}, {size:,} | {rows} | {greedy_us:.0f} | {drawn_us:.0f} | {more_us / rows:.1f} | "
                f"{1e3 * more_us / rows / size:.3f} |"
            )


def greedy(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().argmax(dim=-1)


def drawn(logits: torch.Tensor) -> torch.Tensor:
    ordered, places = logits.float().div_(TEMPERATURE).sort(dim=-1)
    least = ordered[:, -TOP_K].unsqueeze(1)
    ordered.masked_fill_(ordered < least, -torch.inf)
    below = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - TOP_P
    below[:, -1] = False
    ordered.masked_fill_(below, -torch.inf)
    kept = ordered.scatter(dim=-1, index=places, src=ordered).softmax(dim=-1)
    return kept.div_(torch.empty_like(kept).exponential_()).argmax(dim=-1)


def median_us(work: Callable[[], torch.Tensor]) -> float:
    for _ in range(3):
        work()
    us: list[float] = []
    for _ in range(REPEATS):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        work()
        ended.record()
        ended.synchronize()
        us.append(1e3 * begun.elapsed_time(ended))
    return statistics.median(us)


if __name__ == "__main__":
    main()
