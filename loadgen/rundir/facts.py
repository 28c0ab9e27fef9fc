"""What a manifest says of the server: of one that was started for the run (`launch`), or of what was modelled in its
place (`emulation`). A field that may be UNSET is one that not every version or launcher writes.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class LaunchedGpu(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    name: str
    memory_bytes: int | None
    power_limit_w: float | UnsetType | None = UNSET


class P2p(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the GPUs may use P2P, why, and NVML's word for each pair: a row for the GPU that acts."""

    enabled: bool
    reason: str
    matrix: list[list[str]]


class LaunchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """launch: "docker" or "process". command: as a shell takes it, secrets by name only. ready_s: how long until it was
    ready. ended: why it was gone before the run was over."""

    launch: str
    command: str
    version: str | None
    image: str | None
    model: str
    tensor_parallel: int
    dtype: str
    max_model_len: int
    max_running: int
    memory_ratio: float
    gpus: list[LaunchedGpu]
    driver: str | None
    p2p: P2p
    environment: dict[str, str] | UnsetType = UNSET
    notes: list[str]
    pid: int | UnsetType = UNSET
    container_id: str | UnsetType = UNSET
    image_id: str | UnsetType = UNSET
    image_digest: str | UnsetType | None = UNSET
    engine_version: str | UnsetType = UNSET
    ready_s: float | UnsetType = UNSET
    kv_cache_tokens: int | UnsetType | None = UNSET
    log: str | UnsetType = UNSET
    ended: str | UnsetType = UNSET


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """How far predictions were off on one real run that was not used for the fit. Ratios; signed for makespan and
    throughput; w1: Wasserstein-1 distance over the mean, of e2el, ttft and tpot."""

    run: str
    makespan: float
    throughput: float
    e2el_mape: float
    e2el_w1: float
    ttft_w1: float
    tpot_w1: float


class EmulationFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Which scheduler was modelled on which GPUs. gpu_source, gpu_error: where the times of the GPU's operators are
    from, and how far off they are. profile_gpus: those on which the software's times were fitted or compared.
    profile_assumed: this GPU is none of them. speed: modelled seconds that passed in a real one."""

    scheduler: str
    gpu: str
    gpus: int
    topology: str
    tensor_parallel: int
    dtype: str
    kv_cache_tokens: int
    max_running: int
    memory_ratio: float
    profile: str
    gpu_source: str | UnsetType = UNSET
    gpu_error: str | UnsetType = UNSET
    profile_gpus: list[str] | UnsetType = UNSET
    profile_assumed: bool | UnsetType = UNSET
    held_out: list[HeldOut]
    speed: float | UnsetType = UNSET
    notes: list[str] | UnsetType = UNSET
