"""The command line of the training probe. The sweep itself is not built yet; this says so instead of pretending."""

from __future__ import annotations

import sys


def main() -> None:
    """Says what is coming, exit 2: nothing was measured."""
    sys.stderr.write(
        "training_probe: not built yet. `training_probe sweep` will measure pre-training and fine-tuning\n"
        "(DeepSpeed ZeRO, offload, recomputation, FlashAttention, quantization, LoRA/QLoRA, Megatron) and\n"
        "`training_probe micro` GEMM, memcpy and collectives. Today this project measures serving: `loadgen run`.\n"
    )
    sys.exit(2)
