"""DeepSpeed's configuration for a cell. Pure: `--dry-run` prints what a trial would be given.

Every option that is not named here is DeepSpeed's own default, so that what is measured is what its users get.
"""

from __future__ import annotations

from typing import Any

from training_probe.grid import Cell, Method

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0


def learning_rate(method: Method) -> float:
    """Large enough that the loss of a fixed batch falls within a few steps: what is trained is thrown away. Few
    parameters need large steps; a prompt of a few vectors the largest."""
    return {None: 1e-4, "L": 1e-3, "QL": 1e-3, "PT": 3e-2}[method.adapter]


def deepspeed_config(cell: Cell) -> dict[str, Any]:
    """What `deepspeed.initialize` gets.

    With ZeRO: bf16 weights and gradients, fp32 master weights and Adam moments. Without: a plain bf16 model and Adam
    moments in bf16, the paper's Naive. On the CPU the optimizer is torch's, given by the trial, because DeepSpeed's own
    is compiled at its first use (about a minute).
    """
    method = cell.letters
    cuda = cell.device == "cuda"
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": cell.micro_batch,
        "gradient_accumulation_steps": cell.grad_accum,
        "gradient_clipping": CLIP_NORM,
        "steps_per_print": 1_000_000_000,
        "zero_optimization": {"stage": method.zero},
        "zero_allow_untested_optimizer": True,
    }
    if cuda:
        adam = {"lr": learning_rate(method), "betas": list(BETAS), "weight_decay": WEIGHT_DECAY}
        config["optimizer"] = {"type": "AdamW", "params": adam}
    if method.zero:
        config["bf16"] = {"enabled": True}
        config["zero_optimization"] |= {"overlap_comm": True, "contiguous_gradients": True}
    if method.offload:
        there = {"device": "cpu", "pin_memory": cuda}
        config["zero_optimization"]["offload_optimizer"] = there
        if method.zero == 3:
            config["zero_optimization"]["offload_param"] = there
        if not cuda:
            config["zero_force_ds_cpu_optimizer"] = False
    return config
