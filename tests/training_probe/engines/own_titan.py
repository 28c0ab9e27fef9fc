"""A config as torchtitan's users have it, of a tiny Llama; run as a program, training_probe.torchtitan on a CPU.

torchtitan 0.3 takes for granted a GPU and a torch after 2.13. So torch.cpu gets what it asks of torch.cuda, attention
is SDPA (flex attention has no backward pass on a CPU), Gloo sums gradients, and weights are as torch 2.13 shards them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SEQUENCES, LENGTH, STEPS, ACCUMULATED, DIGITS, WORDS = 2, 64, 6, 2, 10, 80
PARAMETERS = 2753792


def tiny() -> Any:
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.training.local_batch_size, config.training.seq_len, config.training.steps = SEQUENCES, LENGTH, STEPS
    config.training.global_batch_size = SEQUENCES * ACCUMULATED * int(os.environ["WORLD_SIZE"])
    config.checkpoint.enable, config.checkpoint.interval, config.dataloader.infinite = True, 4, False
    config.training.mixed_precision_param = "float32"
    config.parallelism.spmd_backend = "partial_dtensor"
    config.hf_assets_path, config.dataloader.dataset_path = "assets", "texts"
    return config


def write_data(directory: Path, texts: int = 200) -> None:
    """A tokenizer of digits, and texts of them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [str(digit) for digit in range(DIGITS)]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate([*words, "<s>", "?"])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (directory / "assets").mkdir()
    tokenizer.save(str(directory / "assets" / "tokenizer.json"))
    (directory / "assets" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<s>"}))
    (directory / "texts").mkdir()
    lines = (" ".join(words[(start + at) % DIGITS] for at in range(WORDS)) for start in range(texts))
    (directory / "texts" / "data.json").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


def on_the_cpu() -> None:
    import torch
    from torch.distributed.fsdp import FSDPModule

    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda device: "CPU"  # type: ignore[attr-defined]
    torch.cpu.get_device_properties = lambda device: SimpleNamespace(total_memory=2**34)  # type: ignore[attr-defined]
    torch.cpu.current_device = lambda: 0
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
    torch.cpu.memory_stats = lambda device: {}  # type: ignore[attr-defined]
    divide = FSDPModule.set_gradient_divide_factor

    def summed(module: Any, factor: float) -> None:
        module.set_force_sum_reduction_for_comms(True)
        divide(module, factor)

    FSDPModule.set_gradient_divide_factor = summed
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = lambda timeout, group=None: None


if __name__ == "__main__":
    on_the_cpu()
    from training_probe.torchtitan import main

    sys.exit(main(sys.argv[1:]))
