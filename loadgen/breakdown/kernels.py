"""What the work of a serving step is, by the names of its operators and kernels: the rows of the paper's Table X.

An operator's name decides where it is known, since the model chose that operator. Under CUDA graphs only kernels
have names. torch.compile names a kernel after the operators that it fused: one that normalizes is RMSNorm whatever
else it does (the residual added, values cast, the embedding looked up); one that cuts halves, multiplies and joins them
again is RoPE, and so is one that multiplies between the product that makes queries and attention; any other is
element-wise. A reduction between GPUs with a norm fused to it is AllReduce.
"""

from __future__ import annotations

import re
from typing import Literal

from loadgen import trace

Kind = Literal[
    "Element-Wise", "RoPE", "Attention", "GEMM", "RMSNorm", "Other",
    "AllReduce", "AllGather", "Other communication", "Unrecognised",
]  # fmt: skip
COMMUNICATION: tuple[Kind, ...] = ("AllReduce", "AllGather", "Other communication")

# Ranges that torch.compile puts around others: nothing of their own.
TRANSPARENT = re.compile(r"^(Torch-Compiled Region|## |CompiledFunction|TorchDynamo|record_param_comms)")
_NORM = re.compile(r"rms_?norm|layer_?norm|rsqrt", re.IGNORECASE)
_ROPE = re.compile(r"rotary|rope(?![a-z])", re.IGNORECASE)
_FUSED_NORMS = (("mean", "pow"), ("red", "mean"), ("per", "mean"))  # all of one: the mean of the squares
_FUSED_ROPE = ("cat", "mul", "sub")  # all of them: x1 cos - x2 sin, joined with the other half
_SAMPLING = (
    r"arg_?max|gumbel|sort|top_?[kp](?![a-z])|soft_?max|sampl|multinomial|random|randint|exponential|logits|scan|cumsum"
    r"|^_(temperature|penalties|min_p|bincount)_kernel"
)
_BOOKKEEPING = (
    r"scheduler_metadata|prepare_|metadata|advance_step|slot_mapping|seq_lens|input_batch|block_table"
    r"|^_(apply_write|post_update|expand_idx_mapping)_"
)
_ELEMENTWISE = (
    r"elementwise|element_wise|vectorized|triton_|fused|index|gather|scatter|fill|copy|cat|arange|act_and_mul|silu|gelu"
    r"|swiglu|embedding|where|compare|reshape_and_cache|unrolled|memset|add|mul|split_with"
)


def _rules(*rules: tuple[str, Kind]) -> tuple[tuple[re.Pattern[str], Kind], ...]:
    return tuple((re.compile(pattern, re.IGNORECASE), kind) for pattern, kind in rules)


_COMMUNICATION = _rules(
    (r"all_?reduce|cross_device_reduce|one_?shot_?reduce|two_?shot_?reduce|multimem", "AllReduce"),
    (r"all_?gather", "AllGather"),
    (r"^nccl|^c10d::|^gloo|reduce_?scatter|all_?to_?all|ncclDevKernel|broadcast_oop", "Other communication"),
)
_CACHE_WRITE = r"reshape_and_cache|destindex_copy|store_kv|kv_cache_update|cache_kernel|set_kv"
_KERNELS = _rules(
    (_CACHE_WRITE, "Element-Wise"),
    (r"prepare_varlen|get_scheduler", "Other"),
    (
        r"flash|fmha|attention|attn|token_att|token_softmax|gqa_|mqa_|reduce_segments|pagedkv|paged_kv"
        r"|batchdecode|batchprefill|mergestates|merge_state|kernel_stage[12]",
        "Attention",
    ),
)
_REST = _rules(
    (_SAMPLING, "Other"), (_BOOKKEEPING, "Other"), (r"fused_moe|moe_gemm", "GEMM"), (_ELEMENTWISE, "Element-Wise")
)
_OPERATORS = _rules(
    (_CACHE_WRITE, "Element-Wise"),
    (_BOOKKEEPING, "Other"),
    (r"attention|attn|flash_decode", "Attention"),
    (r"onednn_mm|scaled_mm|_mm$|linear|gemm|matmul|einsum", "GEMM"),
    (r"silu|gelu|act_and_mul|mul_and_silu", "Element-Wise"),
    (r"embedding", "Element-Wise"),
    (_SAMPLING, "Other"),
)


def _first(rules: tuple[tuple[re.Pattern[str], Kind], ...], name: str) -> Kind | None:
    return next((kind for pattern, kind in rules if pattern.search(name)), None)


def is_fused(name: str) -> bool:
    """Whether torch.compile made the kernel: its name is then the operators that it does, up to ten of them."""
    return name.startswith("triton_") or "cpp_fused" in name


def is_norm(name: str) -> bool:
    """Whether a kernel or operator normalizes, whatever else it does: blocks of a layer begin with one."""
    words = name.split("_") if is_fused(name) else []
    return bool(_NORM.search(name)) or any(all(word in words for word in norm) for norm in _FUSED_NORMS)


def writes_cache(name: str) -> bool:
    """Whether a kernel puts keys and values into the cache, which some versions do inside their attention operator."""
    return bool(re.search(_CACHE_WRITE, name, re.IGNORECASE))


def of_kernel(name: str) -> Kind:
    """What a kernel is by its name."""
    kind = _first(_COMMUNICATION, name)
    if kind is not None:
        return kind
    if is_norm(name):
        return "RMSNorm"
    fused = is_fused(name)
    if _ROPE.search(name) or (fused and all(word in name.split("_") for word in _FUSED_ROPE)):
        return "RoPE"
    kind = None if fused else _first(_KERNELS, name)
    if kind is not None:
        return kind
    if not fused and trace.kind_of_kernel(name) == "GEMM":
        return "GEMM"
    return _first(_REST, name) or "Unrecognised"


def of_operator(name: str) -> Kind | None:
    """The kind of an operator whose name alone decides it; None where its parts or its kernels decide."""
    if TRANSPARENT.match(name):
        return None
    kind = _first(_COMMUNICATION, name)
    if kind is not None:
        return kind
    if is_fused(name):
        return of_kernel(name)
    if trace.kind_of_operator(name) == "GEMM":
        return "GEMM"
    if trace.kind_of_operator(name) == "attention":
        return "Attention"
    if name == "aten::rsqrt":  # one step of a norm: where the whole is written out, `steps` finds it
        return None
    if _NORM.search(name):
        return "RMSNorm"
    return "RoPE" if _ROPE.search(name) else _first(_OPERATORS, name)


def of_plain_operator(name: str) -> Kind:
    """What an operator is that nothing decides: one of PyTorch's own works element by element."""
    return "Element-Wise" if name.startswith("aten::") else "Unrecognised"
