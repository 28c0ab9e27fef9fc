"""What autograd keeps of a real Hugging Face Llama, beside what `activations` says it keeps. Needs torch, no GPU."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from training_probe.grid import LORA_RANK, PROMPT_TOKENS, Cell, cell
from training_probe.llama_shape import LlamaShape
from training_probe.memory.rank import layer_bytes, outside_bytes

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")
peft: Any = pytest.importorskip("peft")

HIDDEN, INTERMEDIATE, HEADS, VOCABULARY, BATCH, LENGTH = 256, 704, 4, 128, 2, 64
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def build(each: Cell, layers: int, kv_heads: int, head_dim: int | None = None) -> Any:
    """A bf16 model that trains what the cell's method trains; linear layers that are frozen stand for 4-bit ones."""
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_attention_heads=HEADS, num_key_value_heads=kv_heads,
        num_hidden_layers=layers, vocab_size=VOCABULARY, use_cache=False, head_dim=head_dim,
        attn_implementation="eager" if each.attention == "eager" else "sdpa",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    if each.letters.adapter == "L":
        lora = peft.LoraConfig(r=LORA_RANK, lora_dropout=0.0, target_modules=LINEARS, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    elif each.letters.adapter == "PT":
        prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=PROMPT_TOKENS)
        model = peft.get_peft_model(model, prompt).to(torch.bfloat16)
    elif each.letters.quantized:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("_proj" not in name)
    if each.letters.recompute == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def kept_bytes(each: Cell, layers: int, kv_heads: int, head_dim: int | None = None) -> int:
    """Bytes of all storages that the graph of one forward pass holds, parameters left out."""
    model = build(each, layers, kv_heads, head_dim)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    backends = torch.nn.attention.SDPBackend
    backend = {"eager": None, "flash": backends.FLASH_ATTENTION, "math": backends.MATH}[each.attention]
    chosen = torch.nn.attention.sdpa_kernel([backend]) if backend is not None else contextlib.nullcontext()
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), chosen:
        loss = model(input_ids=ids, labels=ids).loss
    assert torch.isfinite(loss)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("kv_heads", [HEADS, HEADS // 2])
@pytest.mark.parametrize("attention", ["eager", "flash", "math"])
@pytest.mark.parametrize("method", ["Naive", "Q", "L", "PT", "R"])
def test_a_layer_keeps_what_is_predicted(method: str, attention: str, kv_heads: int) -> None:
    letters = f"F+{method}".removesuffix("+Naive") if attention == "flash" else method
    how = "math" if attention == "math" else "eager"
    each = cell(letters, model="small", task="finetune", seq_len=LENGTH, micro_batch=BATCH, attention=how)
    spec = LlamaShape(
        name="small", hf_id="small", hidden=HIDDEN, layers=2, heads=HEADS, kv_heads=kv_heads,
        intermediate=INTERMEDIATE, vocab_size=VOCABULARY, max_position=2048,
    )  # fmt: skip
    two, three = kept_bytes(each, 2, kv_heads), kept_bytes(each, 3, kv_heads)
    assert layer_bytes(each, spec, BATCH).kept == pytest.approx(three - two, rel=0.002)
    if method == "Naive":
        logits = 4 * BATCH * LENGTH * VOCABULARY
        beside = two - 2 * (three - two)
        assert outside_bytes(each, spec, BATCH) + logits == pytest.approx(beside, rel=0.1)  # cos, sin, masks, labels


@pytest.mark.parametrize("attention", ["eager", "flash"])
@pytest.mark.parametrize("method", ["Naive", "L"])
def test_heads_of_a_width_of_their_own(method: str, attention: str) -> None:
    """As Mistral-Nemo's, whose heads together are narrower than the hidden state, and Qwen3's, which are wider."""
    letters = f"F+{method}".removesuffix("+Naive") if attention == "flash" else method
    each = cell(letters, model="small", task="finetune", seq_len=LENGTH, micro_batch=BATCH)
    for head_dim in (32, 128):
        spec = LlamaShape(
            name="small", hf_id="small", hidden=HIDDEN, layers=2, heads=HEADS, kv_heads=2, head_width=head_dim,
            intermediate=INTERMEDIATE, vocab_size=VOCABULARY, max_position=2048,
        )  # fmt: skip
        two, three = kept_bytes(each, 2, 2, head_dim), kept_bytes(each, 3, 2, head_dim)
        assert layer_bytes(each, spec, BATCH).kept == pytest.approx(three - two, rel=0.002)
