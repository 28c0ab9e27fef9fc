"""The most that a step of a real model with PEFT's LoRA has allocated, beside what is predicted. Needs torch alone."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import pytest

from backends.catalog import from_config
from training_probe.grid import LORA_TARGETS, cell
from training_probe.memory import predict

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")
peft: Any = pytest.importorskip("peft")

LLAMA = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1000, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
MIXTURE = {
    **LLAMA, "model_type": "qwen3_moe", "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 2,
    "moe_intermediate_size": 384,
}  # fmt: skip


def live(already: Iterable[Any]) -> Any:
    """A mode that follows the bytes of all storages that live, and has their `peak`."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Live(TorchDispatchMode):
        now = peak = 0

        def __init__(self) -> None:
            super().__init__()
            self.sizes: dict[int, int] = {}
            for tensor in already:
                self.add(tensor)

        def add(self, tensor: Any) -> None:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.gone, storage._cdata)

        def gone(self, key: int) -> None:
            self.now -= self.sizes.pop(key)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor) and not hasattr(tensor, "elem"):  # not what waits for a collective
                    self.add(tensor)
            return out

    return Live()


@pytest.mark.parametrize("described", [LLAMA, MIXTURE], ids=["llama", "mixture"])
@pytest.mark.parametrize("adapter_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), LORA_TARGETS])
@pytest.mark.parametrize("method", ["L+F+R", "L+F", "L+R"])
@pytest.mark.parametrize("dora", [False, True])
def test_the_peak_of_a_step_with_lora(
    dora: bool, method: str, targets: tuple[str, ...], adapter_dtype: Any, described: dict[str, Any]
) -> None:
    if dora and described is MIXTURE and targets == LORA_TARGETS:
        pytest.skip("PEFT has no DoRA on experts")
    asked = cell(
        method, model="small", task="finetune", engine="ddp", seq_len=256, micro_batch=2, lora_rank=16,
        lora_targets=targets, adapter_dtype=adapter_dtype, device="cpu", dora=dora,
    )  # fmt: skip
    config = transformers.AutoConfig.for_model(**described, use_cache=False)
    attention = "sdpa" if asked.attention == "flash" else "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    if asked.recomputes:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lora = peft.LoraConfig(r=16, lora_dropout=0.0, target_modules=list(targets), task_type="CAUSAL_LM", use_dora=dora)
    model = peft.get_peft_model(model.train(), lora, autocast_adapter_dtype=asked.wide_adapters)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    ids = torch.randint(0, 1000, (2, 256))
    model(input_ids=ids, labels=ids).loss.backward()  # so that AdamW has its moments
    optimizer.step()
    optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for value in state.values()]
    with live([*model.parameters(), *states]) as mode:
        model(input_ids=ids, labels=ids).loss.backward()
    spec = from_config("small", described)
    assert predict(asked, spec).peak_bytes == pytest.approx(mode.peak, rel=0.06 if dora else 0.04)
