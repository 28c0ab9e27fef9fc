"""What a manifest says of the server that was started for a run. It holds no secret; old manifests lack some fields."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class LaunchedGpu(msgspec.Struct, frozen=True):
    index: int
    name: str
    memory_bytes: int | None
    power_limit_w: float | UnsetType | None = UNSET


class LaunchedP2p(msgspec.Struct, frozen=True):
    """matrix[i][j]: the driver's word on traffic from GPU i to GPU j."""

    enabled: bool
    reason: str
    matrix: list[list[str]]


class LaunchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """launch: docker or process. pid is of a process; container_id to engine_version are of a container."""

    launch: str
    command: str
    version: str | UnsetType | None = UNSET
    image: str | None
    model: str
    tensor_parallel: int
    data_parallel: int | UnsetType = UNSET  # replicas in one server
    dtype: str
    max_model_len: int
    max_running: int
    memory_ratio: float
    prefix_caching: bool | UnsetType = UNSET
    gpus: list[LaunchedGpu]
    driver: str | None
    p2p: LaunchedP2p
    environment: dict[str, str] | UnsetType = UNSET
    notes: list[str]
    container_id: str | UnsetType = UNSET
    image_id: str | UnsetType = UNSET
    image_digest: str | UnsetType | None = UNSET
    engine_version: str | UnsetType = UNSET
    pid: int | UnsetType = UNSET
    ready_s: float | UnsetType = UNSET
    kv_cache_tokens: int | UnsetType | None = UNSET
    log: str | UnsetType = UNSET
    ended: str | UnsetType = UNSET
