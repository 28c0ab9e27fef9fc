"""The script of own_trainer.py as people fine-tune: TRL's SFTTrainer over tokens of its own, padded by its collator."""

from __future__ import annotations

import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from tests.training_probe.engines.own_trainer import ARGUMENTS, LENGTH, PADDED, SHAPE
from training_probe.callback import ProbeCallback

if __name__ == "__main__":
    out, probed = sys.argv[1:]
    torch.manual_seed(0)
    texts = Dataset.from_list([{"input_ids": [place % 7 + 1 for place in range(LENGTH)]} for _ in range(64)])
    words = Tokenizer(models.WordLevel({str(number): number for number in range(64)}, unk_token="0"))
    arguments = SFTConfig(
        output_dir=out, max_length=PADDED, pad_to_multiple_of=PADDED, dataset_kwargs={"skip_prepare_dataset": True},
        **ARGUMENTS,
    )  # fmt: skip
    SFTTrainer(
        model=LlamaForCausalLM(LlamaConfig(**SHAPE)), args=arguments, train_dataset=texts,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1"),
        callbacks=[ProbeCallback(probed)],
    ).train()  # fmt: skip
