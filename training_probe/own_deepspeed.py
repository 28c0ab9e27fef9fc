"""A DeepSpeed configuration of the user's own, merged over what a cell gives: what it may change, and what would make
another cell of it.

A cell says how large its batches are, which ZeRO stage it has, what is offloaded, in which precision and with which
optimizer; every engine has the same of the latter. A file that says otherwise is a conflict. "auto", as in the files of
Hugging Face's Trainer, stands for what the cell gives.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from backends.foreign_files import read_named
from backends.untrusted import UNDECODABLE, printable, reason
from training_probe.grid import Cell, GridError
from training_probe.protocol import BETAS, CLIP_NORM, WEIGHT_DECAY, deepspeed_config, learning_rate

FLAG, AUTO = "--deepspeed", "auto"
MOST_DEPTH = 8
# What a cell gives and a file may change all the same.
FREE = {
    "steps_per_print", "zero_optimization.overlap_comm", "zero_optimization.contiguous_gradients",
    "zero_optimization.offload_optimizer.pin_memory", "zero_optimization.offload_param.pin_memory",
    "zero_allow_untested_optimizer",
}  # fmt: skip
# What changes no memory of a GPU.
LIGHT = {
    "steps_per_print", "wall_clock_breakdown", "dump_state", "zero_allow_untested_optimizer",
    "zero_optimization.offload_optimizer.pin_memory", "zero_optimization.offload_param.pin_memory",
    "zero_optimization.allgather_bucket_size",
}  # fmt: skip
# What changes it as `ZeroSizes` says, by its field.
COUNTED = {
    "zero_optimization.reduce_bucket_size": "reduce_bucket", "zero_optimization.sub_group_size": "sub_group",
    "zero_optimization.max_live_parameters": "max_live", "zero_optimization.stage3_max_live_parameters": "max_live",
}  # fmt: skip
# The fields of DeepSpeed 0.19's configuration: those that its engine carries out by itself, and those that need
# something of the training loop, the model or the launcher that is not there.
CARRIED_OUT = {
    "aio", "amp", "bf16", "comet", "comms_logger", "communication_data_type", "compile", "csv_monitor", "data_types",
    "disable_allgather", "disable_python_gc", "dump_state", "flops_profiler", "fp16", "gradient_accumulation_steps",
    "gradient_allreduce_op", "gradient_clipping", "gradient_predivide_factor", "log_level", "memory_breakdown",
    "optimizer", "prescale_gradients", "scheduler", "sparse_gradients", "steps_per_print", "tensorboard", "timers",
    "torch_autocast", "train_batch_size", "train_micro_batch_size_per_gpu", "wall_clock_breakdown", "wandb",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization",
}  # fmt: skip
NOT_CARRIED_OUT = {
    "activation_checkpointing", "autotuning", "checkpoint", "compression_training", "curriculum_learning",
    "data_efficiency", "dataloader_drop_last", "datastates_ckpt", "eigenvalue", "elasticity", "expert_parallel",
    "fp8", "hybrid_engine", "managed_gradient_accumulation", "pipeline", "progressive_layer_drop", "quantize_training",
    "seq_parallel_communication_data_type", "sequence_parallel_size", "sparse_attention", "tensor_parallel",
    "use_data_before_expert_parallelism", "weight_quantization", "zenflow",
}  # fmt: skip
INSTEAD = {
    "activation_checkpointing": "name a method with R, which recomputes",
    "pipeline": "--engine megatron has --pp",
    "tensor_parallel": "--engine fsdp2 and megatron have --tp",
}
OF_ZERO = {
    "allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "elastic_checkpoint",
    "gather_16bit_weights_on_model_save", "ignore_unused_parameters", "legacy_stage1", "load_from_fp32_weights",
    "log_trace_cache_warnings", "max_live_parameters", "max_reuse_distance", "memory_efficient_linear",
    "model_persistence_threshold", "offload_optimizer", "offload_param", "overlap_comm", "param_persistence_threshold",
    "prefetch_bucket_size", "reduce_bucket_size", "reduce_scatter", "round_robin_gradients",
    "stage", "stage3_allgather_sequential", "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold", "stage3_module_granularity_threshold", "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size", "stage3_use_all_reduce_for_fetch_params", "sub_group_size",
    "use_multi_rank_bucket_allreduce", "zero_hpz_partition_size", "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights", "zero_quantized_weights",
}  # fmt: skip


class ZeroSizes(NamedTuple):
    """How much ZeRO handles at once, elements; DeepSpeed's own defaults. reduce_bucket: of gradients to be reduced;
    sub_group: of a rank's part of a step, max_live: of gathered parameters, both with ZeRO 3."""

    reduce_bucket: int = 500_000_000
    sub_group: int = 1_000_000_000
    max_live: int = 1_000_000_000


DEFAULT_SIZES = ZeroSizes()


_DEVICES = ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device")


def read(path: Path) -> dict[str, Any]:
    """What the file holds. Raises GridError."""
    try:
        held = msgspec.json.decode(read_named(path))
    except OSError as error:
        raise GridError(f"{FLAG} {path} cannot be read ({error.strerror or error}); name a JSON file.") from None
    except UNDECODABLE as error:
        raise GridError(f"{FLAG} {path} is no JSON ({printable(reason(error), 100)}); mend it.") from None
    if not isinstance(held, dict):
        raise GridError(f"{FLAG} {path} holds no object; it must have the fields of DeepSpeed's configuration.")
    if any(path.count(".") >= MOST_DEPTH for path, _ in _leaves(held)):
        raise GridError(f"{FLAG} {path} is nested deeper than DeepSpeed's configuration is; mend it.")
    return held


def check(cells: Sequence[Cell], own: Mapping[str, Any] | None) -> list[str]:
    """A clause for each cell that the configuration changes nothing for. Raises GridError for the first conflict, and
    where there is no cell of DeepSpeed's."""
    if own is None:
        return []
    if all(cell.engine != "deepspeed" for cell in cells):
        raise GridError(f"{FLAG} is for --engine deepspeed, and no cell has it; leave it out.")
    _check_names(own)
    for cell in cells:
        if cell.engine == "deepspeed":
            merged(cell, own)
    others = dict.fromkeys(cell.engine for cell in cells if cell.engine != "deepspeed")
    return [f"{FLAG} changes nothing for the cells of {', '.join(others)}"] if others else []


def merged(cell: Cell, own: Mapping[str, Any] | None) -> dict[str, Any]:
    """What `deepspeed.initialize` gets for a cell. Raises GridError for a conflict."""
    config = deepspeed_config(cell)
    if own is None:
        return config
    given = _given(cell, config)
    for path, value in _leaves(own):
        if value == AUTO:
            continue
        if path in given and path not in FREE:
            if not _same(path, value, given[path]):
                raise GridError(_conflict(cell, path, value, given[path]))
        elif path.partition(".")[0] in ("optimizer", "scheduler") or path in _DEVICES:
            raise GridError(_conflict(cell, path, value, None))
        else:
            _put(config, path, value)
    return config


def _check_names(own: Mapping[str, Any]) -> None:
    for name, value in own.items():
        if name in NOT_CARRIED_OUT and value not in (None, AUTO):
            instead = f"; {INSTEAD[name]}" if name in INSTEAD else ""
            raise GridError(f"{FLAG} has {name}, which this probe does not carry out; leave it out{instead}.")
    zero = own.get("zero_optimization")
    names = [(name, "", CARRIED_OUT | NOT_CARRIED_OUT) for name in own]
    names += [(name, "zero_optimization.", OF_ZERO) for name in (zero if isinstance(zero, dict) else ())]
    for name, within, known in names:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            meant = f"did you mean {within}{near[0]}?" if near else "leave it out."
            raise GridError(f"{FLAG} has {within}{printable(name, 60)}, which DeepSpeed does not know; {meant}")


def uncounted(cell: Cell, own: Mapping[str, Any] | None) -> str | None:
    """The field with which the memory of the cell was not counted; None where there is none."""
    if own is None or cell.engine != "deepspeed":
        return None
    given = _given(cell, deepspeed_config(cell))
    heavy = ((path, value) for path, value in _leaves(own) if path not in LIGHT and not _sized(path, value))
    changed = (path for path, value in heavy if value != AUTO and not _same(path, value, given.get(path)))
    return next(changed, None)


def sizes(cell: Cell, own: Mapping[str, Any] | None) -> ZeroSizes:
    """What the configuration says of them, and DeepSpeed's defaults for the rest."""
    if own is None or cell.engine != "deepspeed":
        return DEFAULT_SIZES
    return ZeroSizes(**{COUNTED[path]: int(value) for path, value in _leaves(own) if _sized(path, value)})


def _sized(path: str, value: object) -> bool:
    return path in COUNTED and type(value) in (int, float) and value >= 1  # type: ignore[operator]


def _given(cell: Cell, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the cell says, by path, also where DeepSpeed need not be given it."""
    total = None if cell.micro_batch is None else cell.micro_batch * cell.grad_accum * cell.data_parallel
    return {
        "train_batch_size": total,
        "fp16.enabled": False,
        "bf16.enabled": False,
        "amp.enabled": False,
        "optimizer.type": "AdamW",
        "optimizer.params.lr": learning_rate(cell.letters),
        "optimizer.params.betas": list(BETAS),
        "optimizer.params.weight_decay": WEIGHT_DECAY,
        "gradient_clipping": CLIP_NORM,
        **dict.fromkeys(_DEVICES, "none"),
        **dict(_leaves(config)),
    }


def _same(path: str, value: object, given: object) -> bool:
    if path in _DEVICES:
        return (value or "none") == given
    return type(value) in (int, float) and value == given if type(given) in (int, float) else value == given


def _conflict(cell: Cell, path: str, value: object, given: object) -> str:
    searched = given is None and path.startswith("train_")
    has = "searches it" if searched else "has none" if given is None else f"has {_shown(given)}"
    return (
        f"{FLAG} has {printable(path, 100)} {_shown(value)}, and the cell {cell.name} {has}; name other cells, or "
        'leave the field out of the file or "auto".'
    )


def _shown(value: object) -> str:
    return printable(msgspec.json.encode(value).decode(), 60)


def _leaves(config: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Its values, by the path of their names. An object that is null, where one may be, says that it is off."""
    for name, value in config.items():
        path = f"{within}{name}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}.")
        elif value is None and f"{path}.device" in _DEVICES:
            yield f"{path}.device", "none"
        else:
            yield path, value


def _put(config: dict[str, Any], path: str, value: object) -> None:
    *within, name = path.split(".")
    for each in within:
        inner = config.setdefault(each, {})
        config = inner if isinstance(inner, dict) else {}
    config[name] = value
