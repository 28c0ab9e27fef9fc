"""The model of a trial: a transformers decoder of the cell's shape, its methods built in, its weights random.

Weights are drawn on the device they live on, parameter by parameter, from a seed and the parameter's name: nothing
passes through one process's memory, and every engine starts from the same weights. Normal with a standard deviation of
0.02, not constants: zeros make a GPU's matrix products measurably faster.
"""

from __future__ import annotations

import contextlib
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from training_probe.grid import EXPERTS_ADAPTED, LORA_TARGETS, OF_EXPERTS, PROMPT_TOKENS, Cell
from training_probe.protocol import Trial, Unsupported
from training_probe.worker import batches, experts, layers, loss, offload, ring

STD = 0.02
MAGNITUDE = ".lora_magnitude_vector.default."  # in the name of what DoRA multiplies with


def build(trial: Trial) -> nn.Module:
    """The model without parameters in memory (meta device), gradient checkpointing and attention set."""
    with torch.device("meta"):
        model = construct(trial)
    decoder(model)
    return model


def construct(trial: Trial) -> nn.Module:
    """The model on whatever device torch puts new tensors now, in bf16."""
    cell = trial.cell
    config = _config(trial)
    text = config.get_text_config()
    text.use_cache, text.pad_token_id = False, None  # ids are random, none of them is padding
    more = {} if cell.ep == 1 else {"experts_implementation": experts.NAME}
    model = of_text(config, dtype=torch.bfloat16, attn_implementation=_attention(trial), **more)
    model.train()
    if cell.loss != "plain":
        loss.join_head(model, cell)
    elif cell.cp > 1:
        model.loss_function = loss.of_following
    if cell.cp > 1:
        ring.check(config)
    if cell.letters.recompute == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if cell.fp8:
        layers.to_fp8(decoder(model).layers, cell)
    if cell.checkpoint:
        layers.checkpointed(model, decoder(model).layers, cell)
    return model


def of_text(config: Any, **settings: Any) -> Any:
    """The decoder of text that a configuration describes, with its head; some have one within the whole model alone."""
    text = config.get_text_config()
    if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM.from_config(text, **settings)
    for field in ("depth", "num_hidden_layers"):  # of what is built to be thrown away, as little as can be
        if hasattr(config.vision_config, field):
            setattr(config.vision_config, field, 1)
    whole = AutoModelForImageTextToText.from_config(config, **settings)
    for name, _ in [*whole.model.named_children()]:
        if name != "language_model":
            setattr(whole.model, name, None)
    return whole


def vocab_size(trial: Trial) -> int:
    """How many token ids there are."""
    if trial.spec is not None:
        return trial.spec.vocab_size
    return int(_config(trial).get_text_config().vocab_size)


def _config(trial: Trial) -> Any:
    if trial.config is not None:
        config = AutoConfig.for_model(**trial.config)
        for each in (config, config.get_text_config()):
            if hasattr(each, "quantization_config"):
                del each.quantization_config  # what is trained is bf16, however the weights were published
        return config
    spec = trial.spec
    assert spec is not None
    shape = {
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position,
        "tie_word_embeddings": spec.tied,
        "head_dim": spec.head_dim,
    }
    if spec.experts == 1:
        return Qwen2Config(**shape) if spec.biases == 3 else LlamaConfig(**shape, attention_bias=spec.biases == 4)
    return MixtralConfig(**shape, num_local_experts=spec.experts, num_experts_per_tok=spec.active_experts)


def _attention(trial: Trial) -> str:
    """The name that transformers knows the cell's attention by."""
    usual = "eager" if trial.cell.attention == "eager" else "sdpa" if trial.cell.cp == 1 else ring.NAME
    selective = trial.cell.letters.recompute == "selective"
    named = trial.profile and usual == "eager"
    packed = trial.cell.packing and trial.cell.attention == "flash"
    if not (selective or named or packed):
        return usual
    attention = batches.packed_flash if packed else _own_eager if usual == "eager" else ALL_ATTENTION_FUNCTIONS[usual]
    if named:
        from training_probe.worker import scopes

        attention = scopes.eager(attention)
    if selective:
        attention = _recomputed(attention)
    name = f"{'packed' if packed else 'own'}_{usual}"
    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    if not packed:  # without a mask of that name there is none
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[usual])
    return name


def _own_eager(module: nn.Module, *tensors: Any, **settings: Any) -> Any:
    """The eager attention of the module's own family: some cap their scores or have sinks."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *tensors, **settings)


def _recomputed(inner: Callable[..., Any]) -> Callable[..., Any]:
    def attention(module: nn.Module, *tensors: Any, **settings: Any) -> Any:
        return checkpoint(inner, module, *tensors, use_reentrant=False, **settings)

    return attention


@contextlib.contextmanager
def attention_kernel(cell: Cell) -> Iterator[None]:
    """Within it, SDPA is the kernel that the cell asks for, or fails; also in a recomputation."""
    if cell.attention == "eager":
        yield
        return
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION if cell.attention == "flash" else SDPBackend.MATH):
        yield


# -- weights -----------------------------------------------------------------------------------------------------------


def draw(name: str, shape: torch.Size, seed: int, device: torch.device | str) -> Tensor:
    """The bf16 weights of that parameter: ones for a norm's, zeros for a bias and the second matrix of a LoRA, else
    normal."""
    if name.endswith(".bias") or ".lora_B." in name:
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    bare = re.sub(r"^(base_model\.|model\.|language_model\.)+", "", name)
    own = re.sub(r"(\.base_layer)+\.", ".", bare)  # nested around experts
    generator = torch.Generator(device).manual_seed(seed ^ zlib.crc32(own.encode()))
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, STD, generator=generator)


def materialise(model: nn.Module, trial: Trial, device: torch.device) -> None:
    """Gives a model that was built on the meta device its weights, a module at a time; with Q and QL the linear layers
    of the decoder in NF4."""
    seed, four_bit = trial.seed, trial.cell.letters.four_bit
    restore_buffers(model, device)
    for path, module in list(model.named_modules()):
        if four_bit and isinstance(module, nn.Linear) and path.rpartition(".")[2] != "lm_head":
            parent = model.get_submodule(path.rpartition(".")[0])
            setattr(parent, path.rpartition(".")[2], _quantized(module, f"{path}.weight", trial, device))
            continue
        for key, parameter in list(module.named_parameters(recurse=False)):
            weights = draw(f"{path}.{key}", parameter.shape, seed, device)
            setattr(module, key, nn.Parameter(weights, requires_grad=parameter.requires_grad))
    model.tie_weights()
    if four_bit:
        model.is_loaded_in_4bit = True  # or PEFT takes the layers for plain ones


def restore_buffers(model: nn.Module, device: torch.device) -> None:
    """Makes anew what was lost on the meta device, as transformers initialises it: rotary frequencies, the scale of an
    embedding, the corrections of a router. Initialises the modules that have them, so weights are drawn after it."""
    owner = next(module for module in model.modules() if hasattr(module, "_init_weights"))
    with torch.no_grad():
        for module in model.modules():
            buffers = dict(module.named_buffers(recurse=False))
            for name, buffer in buffers.items():
                module._buffers[name] = torch.empty_like(buffer, device=device)
            if buffers:
                owner._init_weights(module)


def decoder(model: nn.Module) -> Any:
    """The part that has the layers and the rotary embedding, however deep engines and adapters have put it. Raises
    Unsupported."""
    body = next((module for module in model.modules() if hasattr(module, "rotary_emb")), None)
    if body is None:
        raise Unsupported(f"{type(model).__name__} has no rotary embedding; only decoders like Llama are built here")
    return body


def _quantized(linear: nn.Linear, name: str, trial: Trial, device: torch.device) -> nn.Module:
    import bitsandbytes as bnb

    double = trial.cell.double_quant
    # bf16 as storage lets ZeRO 3 and others move the packed bytes like any weights
    layer = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16,
        compress_statistics=double, quant_type="nf4", quant_storage=torch.bfloat16, device="meta",
    )  # fmt: skip
    weights = draw(name, linear.weight.shape, trial.seed, device)
    layer.weight = bnb.nn.Params4bit(
        weights,
        requires_grad=False,
        compress_statistics=double,
        quant_type="nf4",
        quant_storage=torch.bfloat16,
        module=layer,
    )
    if linear.bias is not None:
        layer.bias = nn.Parameter(draw(f"{name.removesuffix('weight')}bias", linear.bias.shape, trial.seed, device))
    return layer.to(device)


# -- adapters ----------------------------------------------------------------------------------------------------------


def adapt(model: nn.Module, trial: Trial) -> nn.Module:
    """What trains: everything; with Q all that is not quantized; else adapters over a frozen model (PEFT). In a run
    that is traced its parts have names."""
    adapted = _adapted(model, trial.cell, trial.seed)
    if trial.cell.offload_activations:
        adapted.offload = offload.Offload(decoder(adapted))
    if trial.profile:
        from training_probe.worker import scopes

        scopes.name_parts(adapted)
    return adapted


def _adapted(model: nn.Module, cell: Cell, seed: int) -> nn.Module:
    method = cell.letters
    if method.adapter is None:
        return model
    import peft

    if method.adapter == "PT":
        settings: Any = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=PROMPT_TOKENS)
    else:
        _check_targets(model, cell)
        settings = peft.LoraConfig(
            r=cell.lora_rank,
            lora_alpha=cell.lora_alpha,
            lora_dropout=0.0,
            bias="none",
            use_dora=cell.dora,
            target_modules=list(cell.adapts),
            task_type="CAUSAL_LM",
        )
    adapted = peft.get_peft_model(model, settings, autocast_adapter_dtype=False).to(torch.bfloat16)
    dtype = torch.float32 if cell.wide_adapters else torch.bfloat16
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            made = parameter.is_meta or MAGNITUDE in name  # which PEFT makes of the weights
            drawn = parameter if made else draw(name, parameter.shape, seed, parameter.device)
            parameter.data = drawn.data.to(dtype)
    return adapted


def _check_targets(model: nn.Module, cell: Cell) -> None:
    """That the model has each layer that the cell names, where it does not name all. Raises Unsupported."""
    names = {path.rpartition(".")[2] for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    if model.config.model_type in EXPERTS_ADAPTED:
        names |= OF_EXPERTS
    lacking = [target for target in cell.adapts if target not in names]
    if lacking and (cell.lora_targets != LORA_TARGETS or len(lacking) == len(cell.adapts)):
        raise Unsupported(f"the model has no linear layer {lacking[0]} that LoRA could adapt; it has {sorted(names)}")


def count(model: nn.Module) -> tuple[int, int]:
    """Parameters of the whole model, and those of them that train. ZeRO 3 keeps the whole size in ds_numel; a 4-bit
    weight counts what it stands for."""

    def size(parameter: Any) -> int:
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            return int(state.shape.numel())
        return int(getattr(parameter, "ds_numel", parameter.numel()))

    parameters = list(model.parameters())
    return sum(map(size, parameters)), sum(size(p) for p in parameters if p.requires_grad)
