"""How long sequences may be and which GPUs share the model: from options, the model and the GPUs that there are."""

from __future__ import annotations

from backends import gpus
from backends.launch import LaunchError
from loadgen.config import Config, ConfigError
from loadgen.models import ServedModel

ASSUMED_GPU_BYTES = 80 << 30  # a dry run where there is no GPU
USUAL_MODEL_LEN = 4096
GIB = 1 << 30


def model_length(config: Config, model: ServedModel, needed: int | None, notes: list[str]) -> int:
    """Tokens of the longest sequence that the server is to take. `needed`: what the run's longest prompt and reply have
    together; None: it is not known. Raises ConfigError."""
    limit, length = model.max_position, config.max_model_len
    if length is not None and limit is not None and length > limit:
        raise ConfigError(f"--max-model-len is {length} and {model.name} ends at {limit} tokens.")
    if length is None:
        # One more than needed where there is room: TGI counts a begin-of-sequence token.
        enough = USUAL_MODEL_LEN if needed is None else needed + 1
        length = enough if limit is None else min(limit, max(USUAL_MODEL_LEN, enough))
        if limit is None:
            notes.append(
                f"how long a sequence {model.name} takes is not known here: it is started for {length} tokens; name "
                "another length with --max-model-len."
            )
    if needed is not None and needed > length:
        those = config.lengths_text(needed)
        if config.dataset is not None:
            those = f"the {needed} tokens of a prompt in {config.dataset} and its reply"
        if config.max_model_len is None:
            raise ConfigError(f"{those} are more than {model.name} takes ({length}); lower them.")
        raise ConfigError(f"{those} are more than --max-model-len ({length}); raise it or lower them.")
    return length


def chosen(config: Config, inventory: gpus.Inventory) -> tuple[int, ...]:
    """Indices of the GPUs that --gpus names, by default all that CUDA may see. Raises GpuError."""
    return gpus.choose(inventory, config.gpu_names)


def gpu_pool(
    config: Config, inventory: gpus.Inventory, notes: list[str], *, needed: bool = True
) -> tuple[gpus.Gpu, ...]:
    """The GPUs that may be used; empty for a server without. A dry run assumes some where there are none: those
    that are named by number, or eight; unless the server runs on a CPU too (not `needed`). Raises ConfigError or
    LaunchError."""
    if config.gpus == "none" or (config.gpus is None and not needed and not inventory.gpus):
        return ()
    ids = config.gpu_names
    named = [int(name) for name in ids or () if name.isdecimal() and name.isascii()]
    assumed = config.dry_run and not inventory.gpus and len(named) == len(ids or ()) == len(set(named))
    if not assumed and (indices := chosen(config, inventory)):
        by_index = {gpu.index: gpu for gpu in inventory.gpus}
        return tuple(by_index[index] for index in indices)
    if not config.dry_run:
        raise LaunchError(
            f"there is no GPU for the server ({inventory.problem or 'none is visible'}); run this on a GPU machine, "
            "see what would run with --dry-run, or say --gpus none for a server that needs none."
        )
    if config.tp is None:
        notes.append("no GPU here: tensor parallelism is for 80 GiB cards; name another with --tp.")
    return tuple(
        gpus.Gpu(index=index, name="assumed", uuid="", memory_bytes=ASSUMED_GPU_BYTES, used_bytes=0)
        for index in named or range(8)
    )


def tensor_parallel(
    config: Config, model: ServedModel, length: int, pool: tuple[gpus.Gpu, ...], notes: list[str]
) -> int:
    """How many GPUs share the model. Raises ConfigError when they are too few or cannot hold it."""
    each = len(pool) // config.dp  # GPUs that a replica may have
    tp_named = None if config.tp is None else each if config.tp == "all" else int(config.tp)
    if not pool:
        return tp_named or 1
    if config.dp > 1 and each < (tp_named or 1):
        raise ConfigError(
            f"--dp {config.dp} needs {config.dp * (tp_named or 1)} GPUs, {tp_named or 1} for each replica, and there "
            f"are {len(pool)} to use; lower it."
        )
    if tp_named is not None and tp_named > len(pool):
        are = "is 1" if len(pool) == 1 else f"are {len(pool)}"
        raise ConfigError(f"--tp {tp_named} needs {tp_named} GPUs and there {are} to use; lower it.")
    spec = model.spec
    if spec is None:
        notes.append(f"the size of {model.name} is not known here: whether it fits will show when it starts.")
        return tp_named or 1
    memories = [gpu.memory_bytes for gpu in pool if gpu.memory_bytes is not None]
    if not memories:
        return tp_named or 1
    usable = min(memories) * config.memory_ratio
    precision = spec.precision(config.dtype, config.quantization, config.kv_cache_dtype)
    fits = spec.smallest_tp(precision, length, usable, at_most=each)
    tp = tp_named or fits
    if tp is not None and (undivided := spec.undivided(tp)) is not None:
        raise ConfigError(f"{model.name} {undivided}.")
    if tp is not None and spec.serving_bytes(precision, tp, length) <= usable:
        return tp
    tp = tp or max(size for power in range(7) if (size := 2**power) <= each and spec.tensor_parallel(size))
    missing = tp * (spec.serving_bytes(precision, tp, length) - usable)
    raise LaunchError(
        f"{model.name} in {precision} does not fit: {missing / 1e9:.1f} GB are missing on {tp} x "
        f"{pool[0].name} ({usable / GIB:.0f} GiB of each may be used); "
        f"{spec.what_fits(precision, length, usable, tp)}."
    )
