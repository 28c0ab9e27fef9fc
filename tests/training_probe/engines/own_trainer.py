"""A training script as people have them: a tiny Llama, padded texts, Hugging Face's Trainer, one callback."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from training_probe.callback import ProbeCallback

LENGTH, PADDED, STEPS, BATCH, ACCUMULATED = 24, 32, 6, 2, 2


class Texts(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(PADDED, dtype=torch.long)
        ids[:LENGTH] = torch.arange(LENGTH) % 7 + 1
        mask = (torch.arange(PADDED) < LENGTH).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


SHAPE = {
    "vocab_size": 64, "max_position_embeddings": 64, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
ARGUMENTS: dict[str, Any] = {
    "max_steps": STEPS, "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": ACCUMULATED,
    "learning_rate": 1e-2, "logging_steps": 1, "save_steps": 4, "use_cpu": True, "report_to": [], "disable_tqdm": True,
    "seed": 1,
}  # fmt: skip

if __name__ == "__main__":
    out, probed = sys.argv[1:]
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    arguments = TrainingArguments(output_dir=out, **ARGUMENTS)
    Trainer(model=model, args=arguments, train_dataset=Texts(), callbacks=[ProbeCallback(probed)]).train()
