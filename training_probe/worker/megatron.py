"""Megatron-core: a GPT of the cell's shape out of its local modules, its own data parallelism and optimizer.

Without Transformer Engine and apex, whose fused kernels are no part of the wheel: what is measured is megatron-core
alone, and slower than NVIDIA's own container. On the CPU, where its optimizer refuses tensors, torch's AdamW and DDP
stand in for its own, and `torch.cuda` is made to mean the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from training_probe.protocol import BETAS, CLIP_NORM, WEIGHT_DECAY, Trial, Unsupported, learning_rate
from training_probe.worker import model as models
from training_probe.worker.batches import Inputs


class Megatron:
    """With pipeline parallelism its schedule runs forward and backward passes of all micro batches interleaved."""

    def __init__(self, trial: Trial, device: torch.device) -> None:
        if device.type == "cpu":
            _cuda_means_cpu()
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        cell = trial.cell
        if trial.spec is None:
            raise Unsupported("Megatron is built from a shape that is known here; this model's is not")
        self._device, self._cell = device, cell
        parallel_state.initialize_model_parallel(cell.tp, cell.pp)
        if device.type == "cuda":
            tensor_parallel.model_parallel_cuda_manual_seed(trial.seed + 1)
        self._config = _transformer_config(trial, device)
        self.pipelined = cell.pp > 1
        self._first, self._last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        self._last_rank = parallel_state.get_pipeline_model_parallel_last_rank()
        self._pipeline = parallel_state.get_pipeline_model_parallel_group()
        model = self._model(trial)
        self.parameters = (trial.spec.parameters, trial.spec.parameters)
        if device.type == "cuda":
            ddp = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=cell.letters.zero == 1, overlap_grad_reduce=False
            )
            self._module: Any = DistributedDataParallel(self._config, ddp, model)
            options = OptimizerConfig(
                optimizer="adam", lr=learning_rate(cell.letters), weight_decay=WEIGHT_DECAY, adam_beta1=BETAS[0],
                adam_beta2=BETAS[1], bf16=True, params_dtype=torch.bfloat16, clip_grad=CLIP_NORM,
                use_distributed_optimizer=cell.letters.zero == 1,
            )  # fmt: skip
            self._optimizer: Any = get_megatron_optimizer(options, [self._module])
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate(cell.letters)
            inner = getattr(self._optimizer, "chained_optimizers", [self._optimizer])[0]
            self.optimizer = f"megatron-core {type(inner).__name__}"
        else:
            replicas = parallel_state.get_data_parallel_group()
            alone = dist.get_world_size(replicas) == 1
            self._module = model if alone else nn.parallel.DistributedDataParallel(model, process_group=replicas)
            self._optimizer = torch.optim.AdamW(
                model.parameters(), lr=learning_rate(cell.letters), betas=BETAS, weight_decay=WEIGHT_DECAY
            )
            self.optimizer = "torch AdamW"

    def _model(self, trial: Trial) -> nn.Module:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        spec = trial.spec
        assert spec is not None
        layer = get_gpt_layer_local_spec(normalization="RMSNorm")
        if trial.cell.attention != "eager":
            layer.submodules.self_attention.submodules.core_attention = _SdpaAttention
        model: nn.Module = GPTModel(
            config=self._config,
            transformer_layer_spec=layer,
            vocab_size=spec.vocab_size,
            max_sequence_length=spec.max_position,
            pre_process=self._first,
            post_process=self._last,
            share_embeddings_and_output_weights=spec.tied,
            position_embedding_type="rope",
        )
        model.to(self._device).to(torch.bfloat16)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                ours = f"{name}@{dist.get_rank() % self._cell.tp}"  # every tensor-parallel part is another
                parameter.copy_(models.draw(ours, parameter.shape, trial.seed, self._device))
        model.train()
        return model

    def forward(self, inputs: Inputs, last: bool) -> Tensor:
        if hasattr(self._module, "require_backward_grad_sync"):
            self._module.require_backward_grad_sync = last
        return self._losses(self._module, inputs).mean()

    def backward(self, loss: Tensor, last: bool) -> None:
        (loss / self._cell.grad_accum).backward()
        if last:
            self._reduce()

    def forward_backward(self, micro_batches: list[Inputs]) -> Tensor:
        """All micro batches through the pipeline; the mean loss, on every stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def loss_of(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            mean = losses.float().mean()
            return mean, {"loss": mean.detach().clone()}  # the schedule divides `mean` in place

        def forward_step(batches: Iterator[Inputs], module: nn.Module) -> tuple[Tensor, Any]:
            return self._losses(module, next(batches)), loss_of

        kept = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=self._module,
            num_microbatches=len(micro_batches),
            seq_length=self._cell.seq_len,
            micro_batch_size=self._cell.micro_batch,
            forward_only=False,
        )
        self._reduce()
        mean = torch.zeros((), device=self._device)
        if self._last:
            mean = torch.stack([each["loss"] for each in kept]).mean()
        dist.broadcast(mean, self._last_rank, group=self._pipeline)
        return mean

    def step(self) -> None:
        self._optimizer.step()
        if self._device.type == "cuda":
            self._module.zero_grad_buffer()
        self._optimizer.zero_grad()

    def _losses(self, module: nn.Module, inputs: Inputs) -> Tensor:
        """A loss a position on the last stage, (micro batch, sequence - 1); on the others what goes on to the next."""
        tokens = inputs["input_ids"]
        positions = torch.arange(tokens.shape[1], device=self._device).expand_as(tokens)
        labels = torch.cat((tokens[:, 1:], tokens[:, :1]), dim=1)
        mask = None
        if self._cell.attention == "eager":
            shape = (1, 1, tokens.shape[1], tokens.shape[1])
            mask = torch.ones(shape, dtype=torch.bool, device=self._device).triu(1)
        out: Tensor = module(tokens, positions, mask, labels=labels)
        return out[:, :-1] if self._last else out

    def _reduce(self) -> None:
        if self._device.type == "cuda":
            from megatron.core.distributed import finalize_model_grads

            finalize_model_grads([self._module])


def _transformer_config(trial: Trial, device: torch.device) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    cell, spec = trial.cell, trial.spec
    assert spec is not None
    recompute: dict[str, dict[str, Any]] = {
        "none": {},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        "selective": {"recompute_granularity": "selective"},
    }
    return TransformerConfig(
        num_layers=spec.layers, hidden_size=spec.hidden, num_attention_heads=spec.heads, num_query_groups=spec.kv_heads,
        kv_channels=spec.head_dim, ffn_hidden_size=spec.intermediate, gated_linear_unit=True,
        activation_func=functional.silu,
        normalization="RMSNorm", add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=cell.tp, pipeline_model_parallel_size=cell.pp,
        attention_softmax_in_fp32=True,
        use_cpu_initialization=device.type == "cpu", perform_initialization=False,
        # these need apex or Transformer Engine
        bias_dropout_fusion=False, bias_activation_fusion=False, gradient_accumulation_fusion=False,
        masked_softmax_fusion=False, apply_rope_fusion=False, persist_layer_norm=False,
        **recompute[cell.letters.recompute],
    )  # fmt: skip


class _SdpaAttention(nn.Module):
    """Causal attention through torch's SDPA, in the place of Megatron's unfused one."""

    def __init__(self, config: Any, *args: Any, **settings: Any) -> None:
        super().__init__()
        self._hidden = config.kv_channels * config.num_attention_heads // config.tensor_model_parallel_size

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **settings: Any) -> Tensor:
        """(sequence, batch, heads, head size) each -> (sequence, batch, heads x head size)."""
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], self._hidden)


# -- on the CPU --------------------------------------------------------------------------------------------------------


class _OnCpu(TorchFunctionMode):
    """Tensors that are requested on "cuda" are made on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        return function(*args, **kwargs)


class _NoTracker:
    """Random states of a GPU, where there is none."""

    @contextlib.contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        yield

    def get_states(self) -> dict[str, Any]:
        return {}

    def set_states(self, states: dict[str, Any]) -> None: ...

    def is_initialized(self) -> bool:
        return True


def _cuda_means_cpu() -> None:
    """For the rest of this process, which trains this one cell."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda *_: None
    from megatron.core.tensor_parallel import random

    for name in ("_set_cuda_rng_state", "_get_cuda_rng_state"):
        if hasattr(random, name):
            setattr(random, name, partial(_no_state, name))
    random._CUDA_RNG_STATE_TRACKER = _NoTracker()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    _OnCpu().__enter__()


def _no_state(name: str, *args: Any, **settings: Any) -> Any:
    return torch.get_rng_state() if name.startswith("_get") else None
