"""Why a cell cannot be run, a clause with what can: by its engine and letters, by its options, by its model. Pure.

Asked before anything starts, by what predicts and by what runs alike.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from backends.decoder import Attention, LatentAttention, ModelSpec, Recurrent
from training_probe.grid import (
    EXPERTS_ADAPTED,
    GATE_WITH_UP,
    LORA_TARGETS,
    OF_EXPERTS,
    PROMPT_TOKENS,
    QKV_TOGETHER,
    Cell,
    Method,
)
from training_probe.packing import MOST_ROWS

MOST_8BIT = 2**31 - 1  # elements of a tensor whose 8-bit moments bitsandbytes updates (its issue 1785)
CAPPED_LOGITS = ("gemma2",)  # model types that do more to their logits than the head does
THREE_POSITIONS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe")  # a token, for images
EXPERTS_EXCHANGED = ("mixtral", "qwen3_moe", "llama")  # whose experts --ep divides; llama: Mixtral's, of numbers alone


def impossible(cell: Cell, spec: ModelSpec | None, unbuilt: str = "") -> str | None:
    """Why the cell cannot be run anywhere, a clause; None when it can, as far as its model shows. unbuilt: why the
    engines cannot build the model of numbers alone."""
    return next(_objections(cell, spec, unbuilt), None)


def _objections(cell: Cell, spec: ModelSpec | None, unbuilt: str) -> Iterator[str]:
    method, model_parallel = cell.letters, cell.tp * cell.pp * cell.cp
    yield from _of_engine(cell, method)
    yield from _of_lengths(cell, method)
    if cell.has_reference:
        yield from _of_preference(cell, method)
    if cell.gpus % model_parallel:
        yield f"{cell.gpus} GPUs cannot be divided into groups of TP x PP x CP = {model_parallel}"
    if cell.task == "pretrain" and method.adapter:
        yield f"{method.adapter} is a way of fine-tuning (--task finetune)"
    if cell.engine == "megatron" and unbuilt:
        yield f"Megatron's models are built like Llama here, and {unbuilt}"
    if cell.engine == "fsdp2" and cell.tp > 1 and unbuilt:  # norms of heads, say: each rank would train its own
        yield f"TP divides layers like Llama's here, and {unbuilt}"
    if spec is None:
        return
    attention = spec.kinds[0].attention
    if cell.engine == "megatron" and attention.biased:
        yield f"Megatron's models are built without biases here, and {spec.name} has them (attention_bias)"
    if cell.engine == "megatron" and attention.window is not None:
        yield f"Megatron's models are built without windows here, and {spec.name} has them (sliding_window)"
    if cell.seq_len > spec.max_position:
        yield f"{spec.name} ends at {spec.max_position} positions"
    if attention.undivided(cell.tp) is not None:
        yield f"the {attention.heads} heads of {spec.name} cannot be divided by TP {cell.tp}"
    if cell.engine == "fsdp2" and isinstance(attention, Attention) and attention.kv_heads % cell.tp:
        yield f"the {attention.kv_heads} KV heads of {spec.name} cannot be divided by TP {cell.tp}"
    if spec.layers % cell.pp:
        yield f"the {spec.layers} layers of {spec.name} cannot be divided by PP {cell.pp}"
    if cell.loss != "plain" and spec.model_type.removesuffix("_text") in CAPPED_LOGITS:
        yield f"{spec.name} caps its logits, which --loss {cell.loss} never has all of"
    if isinstance(attention, Attention) and attention.head_dim % 2:
        yield f"heads of {attention.head_dim} values cannot be rotated (RoPE takes pairs); name an even head_dim"
    yield from _of_targets(cell, spec)
    yield from _of_packing(cell, spec)
    yield from _of_attention(cell, spec)
    if cell.cp > 1:
        yield from _of_ring(cell, spec)
    if cell.ep > 1:
        yield from _of_experts(cell, spec)
    mixture = any(kind.mlp.experts > 1 for kind in spec.kinds)
    if mixture and (method.four_bit or cell.engine == "megatron"):
        yield "experts are neither quantized to 4 bits nor built for Megatron here"
    if mixture and (cell.fp8 or cell.tp > 1):
        yield "experts are neither computed in fp8 nor divided by TP here"
    if cell.fp8 and cell.device == "cuda":
        yield from _of_fp8_products(cell, spec)
    if mixture and cell.optim == "muon" and not method.adapter:
        yield "Muon updates matrices, and experts are tensors of three dimensions; use --optimizer adamw or adamw-8bit"
    if cell.eight_bit and cell.engine == "deepspeed" and cell.device == "cuda":
        yield from _of_8bit_updates(cell, spec)


def _of_8bit_updates(cell: Cell, spec: ModelSpec) -> Iterator[str]:
    """DeepSpeed keeps all that a rank updates in one tensor, with Z3 in several of a billion elements."""
    method, updated = cell.letters, -(-spec.parameters // cell.gpus)
    if method.zero < 3 and not method.adapter and not method.four_bit and updated > MOST_8BIT:
        yield (
            f"a rank updates {updated / 1e9:.1f} billion parameters in one tensor, and bitsandbytes takes at most "
            f"{MOST_8BIT / 1e9:.1f}; use Z3 or more GPUs"
        )


def _of_fp8_products(cell: Cell, spec: ModelSpec) -> Iterator[str]:
    """torch._scaled_mm takes multiples of 16 alone; each size is the inner one of a product of the three passes."""
    kind = spec.kinds[0]
    widths = {"hidden_size": spec.hidden, "width of all heads": kind.attention.query_width, "MLP": kind.mlp.width}
    for name, width in widths.items():
        if width // (1 if name == "hidden_size" else cell.tp) % 16:
            yield f"fp8 products take multiples of 16, and {spec.name} has a {name} of {width}"
    tokens = cell.longest * (cell.micro_batch or 1)
    if tokens % 16:
        yield f"fp8 products take multiples of 16 tokens, and a micro batch has {tokens}"


def _of_targets(cell: Cell, spec: ModelSpec) -> Iterator[str]:
    """Layers that LoRA should adapt and the model has under another name."""
    if not cell.letters.has_lora:
        return
    mixture = spec.model_type in EXPERTS_ADAPTED and any(kind.mlp.experts > 1 for kind in spec.kinds)
    if cell.dora and mixture and not OF_EXPERTS.isdisjoint(cell.adapts):
        yield f"PEFT has no DoRA on the experts of {spec.name}; name --lora-targets q_proj k_proj v_proj o_proj"
    if cell.lora_targets == LORA_TARGETS:
        return
    for fused, types, separate in (
        ("qkv_proj", QKV_TOGETHER, ("q_proj", "k_proj", "v_proj")),
        ("gate_up_proj", GATE_WITH_UP, ("gate_proj", "up_proj")),
    ):
        has, lacks = ((fused,), separate) if spec.model_type in types else (separate, (fused,))
        for target in lacks:
            if target in cell.lora_targets:
                yield f"{spec.name} has no {target} that LoRA could adapt; it has {' and '.join(has)}"
    if (
        len(OF_EXPERTS.intersection(cell.lora_targets, ("gate_proj", "up_proj"))) == 1
        and spec.model_type in EXPERTS_ADAPTED
    ):
        yield f"PEFT adapts gate and up of {spec.name}'s experts as one; name both gate_proj and up_proj, or neither"
    if (
        all(kind.mlp.experts > 1 and not kind.mlp.shared for kind in spec.kinds)
        and spec.model_type not in EXPERTS_ADAPTED
    ):
        for target in OF_EXPERTS.intersection(cell.lora_targets):
            yield f"PEFT adapts no experts of {spec.name} by the name {target}; name q_proj k_proj v_proj o_proj"


def _of_attention(cell: Cell, spec: ModelSpec) -> Iterator[str]:
    """What the kernels of torch's scaled_dot_product_attention do not compute."""
    if cell.attention == "eager":
        return
    asked = "the letter F" if cell.attention == "flash" else "--attention math"
    length = cell.seq_len + (PROMPT_TOKENS if cell.letters.adapter == "PT" else 0)
    for kind in spec.kinds:
        attention = kind.attention
        if isinstance(attention, Attention) and attention.sinks:
            yield f"only eager attention has the attention sinks of {spec.name}; leave {asked} out"
        if isinstance(attention, Attention) and attention.capped:
            yield f"only eager attention caps the scores of {spec.name} (attn_logit_softcapping); leave {asked} out"
        if cell.attention != "flash":
            continue
        if isinstance(attention, LatentAttention) and attention.value != attention.nope + attention.rope:
            yield f"torch's FlashAttention takes values as wide as queries (v_head_dim of {spec.name}); leave F out"
        if cell.device == "cuda" and attention.window is not None and attention.window.tokens <= length:
            field = "attention_chunk_size" if attention.window.chunked else "sliding_window"
            yield (
                f"torch's FlashAttention takes no mask on GPUs, and {spec.name} has windows of "
                f"{attention.window.tokens} tokens ({field}); name a shorter --seq-len, or leave F out"
            )


def _of_engine(cell: Cell, method: Method) -> Iterator[str]:
    yield from _of_sharding(cell, method)
    if cell.checkpoint and cell.engine == "megatron":
        yield "Megatron recomputes in its own ways (R and RS); --checkpoint is for deepspeed, fsdp2 and ddp"
    if cell.fp8 and cell.engine not in ("fsdp2", "ddp"):
        yield "fp8 is torchao's, which is built for fsdp2 and ddp only"
    if cell.fp8 and (method.adapter or method.four_bit):
        yield "torchao's fp8 products train whole weights; adapters and 4-bit weights have none"
    if cell.compile and cell.engine not in ("fsdp2", "ddp"):
        yield "compiled layers are built for fsdp2 and ddp only"
    if cell.engine == "megatron":
        if method.zero > 1 or method.offload or method.four_bit or method.adapter:
            yield "Megatron knows of these letters R, F and Z1 (its distributed optimizer) only"
        if method.zero and cell.device == "cpu":
            yield "Megatron's distributed optimizer takes tensors of a GPU only"
        if cell.loss != "plain" or cell.optim != "adamw":
            yield "Megatron has a loss and an optimizer of its own"
    yield from _of_optimizer(cell, method)
    yield from _of_offload(cell, method)
    if cell.dora and cell.engine == "deepspeed" and method.zero == 3:
        yield "PEFT makes DoRA's magnitudes of whole weights, which ZeRO 3 divides; use Z2, or --engine fsdp2 with Z3"
    if cell.dora and cell.checkpoint == "op":
        yield "--checkpoint op chooses among products by their order, and DoRA has others; use R or --checkpoint N"
    if cell.engine == "ddp" and method.zero:
        yield "ddp shards nothing; use deepspeed or fsdp2 for ZeRO"
    if cell.engine == "fsdp2":
        if method.optimizer_alone:
            yield "fsdp2 offloads weights and optimizer together; use O, or --engine deepspeed"
        if method.zero < 2:
            yield "fsdp2 always shards: use Z2 (parameters kept after the forward pass) or Z3"
        if method.quantized:
            yield "4-bit weights without LoRA are not built for fsdp2 here; use QL, or deepspeed or ddp"
        if method.four_bit and (method.offload or cell.compile or cell.dora):
            yield "4-bit weights of fsdp2 go without O, --compile and --dora here"


def _of_offload(cell: Cell, method: Method) -> Iterator[str]:
    """What does not go with activations on the host."""
    if not cell.offload_activations:
        return
    if cell.engine == "megatron" or cell.tp * cell.cp > 1:
        yield "--offload-activations is built for ddp, fsdp2 and deepspeed without TP and CP"
    if cell.engine == "deepspeed" and method.zero == 3:
        yield "ZeRO 3 takes back weights that --offload-activations must know; use Z2, or --engine fsdp2 with Z3"
    if cell.compile or cell.checkpoint == "op":
        yield "--offload-activations does not see what --compile and --checkpoint op keep; use R or --checkpoint N"
    if cell.dora:
        yield "DoRA's unit matrices would go to the host as well; leave --dora or --offload-activations out"


def _of_optimizer(cell: Cell, method: Method) -> Iterator[str]:
    if cell.tp > 1 and (cell.loss != "plain" or cell.optim != "adamw"):
        yield "with TP the loss is plain and the optimizer is AdamW with 32 bits here"
    if cell.optim != "adamw" and method.offload:
        yield f"what is offloaded is updated by AdamW with 32-bit states; leave O or --optimizer {cell.optim} out"
    if cell.optim == "paged-adamw-8bit" and cell.device == "cpu":
        yield "moments are paged between a GPU and its host, and the CPU has them anyway; use --optimizer adamw-8bit"
    if cell.optim == "paged-adamw-8bit" and cell.engine == "fsdp2":
        yield (
            "bitsandbytes pages no moments of fsdp2's sharded tensors; use ddp or deepspeed, or --optimizer "
            "adamw-8bit, which is torchao's there"
        )

    if cell.states == "fp32":
        return
    if cell.engine != "fsdp2":
        yield f"--states {cell.states} is built for fsdp2; ddp keeps all in plain bf16, ZeRO has fp32 masters"
    if method.offload or cell.tp > 1:
        yield f"--states {cell.states} is built for weights on the GPU that TP does not divide; leave O and --tp out"
    if cell.states == "bf16-stochastic" and cell.dp_replicate > 1:
        yield "replicas of HSDP would each round in a way of their own; use --states bf16-kahan"
    if cell.optim not in ("adamw", "adamw-8bit" if cell.states == "bf16-stochastic" else "adamw"):
        yield f"--states {cell.states} is AdamW's; leave --optimizer {cell.optim} out"


def _of_preference(cell: Cell, method: Method) -> Iterator[str]:
    """What a policy beside a frozen reference goes with."""
    task = cell.task
    if cell.own or cell.engine == "megatron" or cell.tp * cell.cp > 1:
        yield f"{task} is built for deepspeed, fsdp2 and ddp, without TP and CP"
    if method.quantized or method.adapter == "PT":
        yield f"the reference of {task} is a whole model, or the policy without LoRA; use L or QL"
    if method.offload and cell.own_reference and (cell.engine == "fsdp2" or method.zero == 3):
        yield f"the reference of {task} is not offloaded here; leave O out, or use L, which needs no second model"
    if cell.loss != "plain" or cell.lengths or cell.compile or cell.fp8:
        yield f"{task} takes whole logits of sequences of one length, plain layers and bf16 (--loss, --lengths, ...)"


def _of_lengths(cell: Cell, method: Method) -> Iterator[str]:
    """What sequences of different lengths go with. Raises WorkloadError for a file that holds none."""
    if not cell.lengths:
        return
    if cell.own or cell.engine == "megatron" or cell.tp * cell.cp > 1:
        yield "lengths of their own (--lengths) are built for deepspeed, fsdp2 and ddp, without TP and CP"
    if cell.compile or cell.fp8:
        yield "compiled layers and fp8 products take sequences of one length; leave --lengths out"
    if cell.packing and method.adapter == "PT":
        yield "prompt tuning puts its tokens before a row, not before each sequence in it; leave --packing out"
    if cell.packing and cell.checkpoint == "op" and method.flash:
        yield "--checkpoint op does not know FlashAttention over packed rows; use R, or leave --packing out"
    if (rows := cell.data_parallel * cell.grad_accum * (cell.micro_batch or 1)) > MOST_ROWS:
        yield f"a step has {rows} rows, and lengths of at most {MOST_ROWS} are drawn"
    else:
        msgspec.structs.replace(cell, micro_batch=cell.micro_batch or 1).drawn  # noqa: B018  a file is read


def _of_packing(cell: Cell, spec: ModelSpec) -> Iterator[str]:
    """Layers that would let a sequence see the one before it in its row."""
    if not cell.packing:
        return
    if spec.model_type.removesuffix("_text") in THREE_POSITIONS and not cell.letters.flash:
        yield f"transformers makes no mask of packed rows for {spec.name}; use F, or leave --packing out"
    for kind in spec.kinds:
        attention = kind.attention
        if not isinstance(attention, Attention | LatentAttention):
            yield f"the states of {spec.name}'s layers go from one packed sequence on to the next; leave --packing out"
        elif cell.letters.flash and (attention.window is not None or not isinstance(attention, Attention)):
            yield (
                f"FlashAttention over packed rows is for grouped-query attention without windows, and {spec.name} has "
                "another; leave F or --packing out"
            )


def _of_sharding(cell: Cell, method: Method) -> Iterator[str]:
    """What TP and HSDP go with."""
    if cell.pp > 1 and cell.engine != "megatron":
        yield "PP is Megatron's (--engine megatron)"
    if cell.cp > 1:
        yield from _of_context(cell, method)
    if cell.ep > 1:
        yield from _of_exchange(cell, method)
    if cell.tp > 1 and cell.engine not in ("megatron", "fsdp2"):
        yield "TP is built for megatron and fsdp2 only"
    if cell.tp > 1 and cell.engine == "fsdp2" and (method.adapter or method.offload):
        yield "fsdp2 with TP is built for plain weights on the GPU, without adapters and O"
    if cell.tp > 1 and cell.engine == "fsdp2" and cell.compile:
        yield "compiled layers with TP give other gradients (seen with torch 2.13); leave --compile out"
    if cell.tp > 1 and cell.engine == "fsdp2" and cell.loss != "plain":
        yield "with TP each rank has a part of the vocabulary, and the loss of such parts is torch's (--loss plain)"
    if cell.dp_replicate > 1 and cell.engine != "fsdp2":
        yield "HSDP (--dp-replicate) is FSDP2's (--engine fsdp2)"
    if cell.dp_replicate > 1 and cell.gpus % (cell.tp * cell.dp_replicate):
        yield f"{cell.gpus} GPUs cannot be divided into {cell.dp_replicate} replicas with TP {cell.tp}"


def _of_context(cell: Cell, method: Method) -> Iterator[str]:
    """What context parallelism goes with: torch's ring attention over sequences that are divided."""
    if cell.engine == "megatron":
        yield "Megatron's context parallelism needs Transformer Engine, which this probe does not use; use fsdp2 for CP"
    elif cell.engine != "fsdp2":
        yield "CP is torch's ring attention, which is built for fsdp2 only"
    if cell.attention != "flash":
        yield "CP is a ring of FlashAttention; add the letter F"
    if method.adapter == "PT":
        yield "the virtual tokens of PT are in no part of a sequence that CP divides; use L"
    if cell.checkpoint == "op":
        yield "--checkpoint op would keep every step of CP's ring; use R, or --checkpoint with a number"
    if cell.compile:
        yield "compiled layers were not built for CP's ring; leave --compile out"
    if cell.seq_len % (2 * cell.cp):
        yield f"{cell.seq_len} tokens cannot be divided into two parts for each of the {cell.cp} GPUs of CP"


def _of_exchange(cell: Cell, method: Method) -> Iterator[str]:
    """What expert parallelism goes with: fsdp2's ranks, each with sequences of its own."""
    if cell.engine != "fsdp2":
        yield "EP (--ep) is built over torch's fully_shard alone; use --engine fsdp2 with Z2 or Z3"
    if cell.gpus % cell.ep:
        yield f"{cell.gpus} GPUs cannot be divided into groups of EP = {cell.ep}"
    if cell.tp * cell.cp * cell.dp_replicate > 1:
        yield "EP is built without --tp, --cp and --dp-replicate; leave them out, or --ep"
    if method.adapter:
        yield f"experts that EP divides are trained whole; leave --ep out, with which {method.adapter} goes on fsdp2"
    if cell.compile:
        yield "compiled layers were not built for EP's exchange of tokens; leave --compile out"
    if cell.checkpoint == "op":
        yield "--checkpoint op does not know the exchange of EP; use R, or --checkpoint with a number"
    if cell.optim != "adamw":
        yield f"experts that EP divides are updated by AdamW with 32-bit states; leave --optimizer {cell.optim} out"
    if cell.has_reference:
        yield f"the reference of {cell.task} has no experts divided by EP; leave --ep out"


def _of_experts(cell: Cell, spec: ModelSpec) -> Iterator[str]:
    """Experts that EP cannot divide."""
    counts = {kind.mlp.experts for kind in spec.kinds if kind.mlp.experts > 1}
    if not counts:
        yield f"{spec.name} is dense, and EP divides experts; leave --ep out, or use --tp"
    for experts in counts:
        if experts % cell.ep:
            yield f"the {experts} experts of {spec.name} cannot be divided by EP {cell.ep}"
    if spec.model_type not in EXPERTS_EXCHANGED:
        yield f"EP was tried with Qwen3-MoE and Mixtral, and {spec.name} has other experts ({spec.model_type})"


def _of_ring(cell: Cell, spec: ModelSpec) -> Iterator[str]:
    """What torch's ring attention does not compute, beside what its kernel does not."""
    for kind in spec.kinds:
        attention = kind.attention
        if isinstance(attention, Recurrent):
            yield f"linear attention, as {spec.name} has it, passes a state along a sequence, which CP divides"
        elif attention.window is not None and attention.window.tokens <= cell.seq_len:
            yield f"CP's ring has no windows, and {spec.name} has those of {attention.window.tokens} tokens"
