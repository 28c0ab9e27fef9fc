"""What a server keeps free on each GPU beside weights and KV cache.

vLLM 0.25 finds that out as it starts: it computes one step of as many tokens as it may, samples for as many requests as
it may hold, and takes the most that this needed at once. Not modelled: the workspace of latent attention, of up to
65,536 tokens, and the experts' workspaces of kernels other than Triton's (8 and 4 bits; 16 bits on Blackwell).
"""

from __future__ import annotations

from backends.decoder import Mlp, ModelSpec, Precision

ASSUMED_BYTES = 1 << 30  # of other servers, for context, activations and graphs, of whose size nothing is known here
_MIB = 1 << 20
SGLANG_BYTES = 645 * _MIB  # what two starts of SGLang 0.5.11 on an H200 left of their share (results:h200/sglang)
# Fitted to the KV cache that vLLM 0.25.1 printed at 13 starts: tests/servers/simulator/test_reserve.py
_OTHERS_BYTES = 400 * _MIB  # libraries, their workspaces
_REDUCTION_BYTES = 450 * _MIB  # buffers of the all-reduce over NVLink
_GRAPHS_BYTES = 600 * _MIB  # CUDA graphs, which the older model runner sets aside beforehand
# Of a logit, beside what the model gives. The newer runner widens logits to 32 bits; the start of Qwen3-8B, whose
# vocabulary is the only large one, needed 2 bytes more, whose place in the source was not found. The older runner
# holds probabilities and noise of 32 bits beside the widened logits.
_LOGIT_BYTES = 6
_OLDER_LOGIT_BYTES = 12
_NEWER_MIXTURES = ("deepseek_v2", "qwen2_moe")  # DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES, beside all that are dense


def reserved_bytes(model: ModelSpec, precision: Precision, tp: int, *, tokens: int, rows: int, nvlink: bool) -> int:
    """What vLLM reserves of each of `tp` GPUs. tokens: that a step computes at most. rows: requests at most."""
    value, mlps = precision.value_bytes, [kind.mlp for kind in model.kinds]
    older = any(mlp.experts > 1 for mlp in mlps) and model.model_type not in _NEWER_MIXTURES
    forward = tokens * value * (2 * model.hidden + max(_dense(mlp) for mlp in mlps) // tp)
    logits = min(rows, tokens) * model.vocab_size * (value + (_OLDER_LOGIT_BYTES if older else _LOGIT_BYTES))
    experts = tokens * value * max(_experts(mlp, model.hidden, tp) for mlp in mlps)
    others = _OTHERS_BYTES + _GRAPHS_BYTES * older + _REDUCTION_BYTES * (nvlink and tp > 1)
    return max(forward, logits) + experts + others


def _dense(mlp: Mlp) -> int:
    """Values of a token in the MLP that all tokens pass through: what goes into its activation, and what comes out."""
    return mlp.matrices * (mlp.shared if mlp.experts > 1 else mlp.width)


def _experts(mlp: Mlp, hidden: int, tp: int) -> int:
    """Values of a token in the two workspaces of the Triton experts, which stay (workspace_shapes in vLLM's
    triton_moe.py)."""
    if mlp.experts == 1:
        return 0
    width = mlp.width // tp
    return mlp.active * (max(width, hidden) + max((mlp.matrices - 1) * width, hidden))
