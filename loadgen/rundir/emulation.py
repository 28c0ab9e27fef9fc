"""What was modelled where no real server ran: embedded server and predictions state it, manifests and reports keep it.

The JSON keys are those of `loadgen.manifest/1`; they only grow. Fields with a default are missing in older manifests.
"""

from __future__ import annotations

import msgspec


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """How far predictions were off on one real run that was not used for the fit. Ratios; signed for makespan and
    throughput; w1: Wasserstein-1 distance over the mean, of e2el, ttft and tpot. gpu: on which it was made;
    architecture: of its model; load: what `kind_of_load` says ("" each where an older profile does not say);
    quantization: of its weights, None for none."""

    run: str
    makespan: float
    throughput: float
    e2el_mape: float
    e2el_w1: float
    ttft_w1: float
    tpot_w1: float
    gpu: str = ""
    quantization: str | None = None
    architecture: str = ""
    load: str = ""


LONG_PROMPT_TOKENS = 2000  # in the mean: from here on a step holds the parts of a few prompts


def kind_of_load(arrival: str, prompt_tokens: float) -> str:
    """The kind of a load, by which errors of predictions differ. arrival: as manifests have it. prompt_tokens: of a
    prompt, in the mean."""
    kind = "closed loop" if arrival.startswith("concurrency:") else "burst" if arrival == "burst" else "open load"
    return f"{kind} of long prompts" if prompt_tokens >= LONG_PROMPT_TOKENS else kind


TIMETABLE_PATH = "/timetable"  # of the embedded server: its Timetable, whose counts begin anew with each request for it


class Timetable(msgspec.Struct, frozen=True, kw_only=True):
    """What is true of an emulated server's times, whatever was measured. ttft_ms, tpot_ms: on its timetable, each more
    or less by up to jitter_ratio; None where they are modelled. late_*: how long after they were due its tokens, of the
    warm-up too, were sent; None without any token."""

    ttft_ms: float | None
    tpot_ms: float | None
    jitter_ratio: float = 0.0
    tokens: int
    late_p50_ms: float | None
    late_p99_ms: float | None
    late_max_ms: float | None


class Emulation(msgspec.Struct, frozen=True, kw_only=True):
    """A server on modelled GPUs. gpus: how many share the model, as tensor_parallel. profile: what its software's times
    come from; profile_gpus: the GPUs they were measured on; profile_assumed: this GPU is none of those. architecture:
    the model's class. held_out: errors on real runs of that class on such a GPU, with weights in such a format;
    held_out_of: how many the profile has of all kinds. gpu_source, gpu_error: of the operators' times. speed: modelled
    seconds that pass in a real one. notes: a sentence each. prefix_caching: whether prompts were kept for later ones
    that begin alike. quantization: of the weights; None: as dtype."""

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
    gpu_source: str = ""
    gpu_error: str = ""
    profile_gpus: tuple[str, ...] = ()
    profile_assumed: bool = False
    held_out: tuple[HeldOut, ...] = ()
    speed: float = 1.0
    notes: tuple[str, ...] = ()
    prefix_caching: bool = False
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    architecture: str = ""
    held_out_of: int = 0

    @property
    def formats(self) -> str:
        """The number formats of weights and KV cache, as text."""
        weights = self.dtype if self.quantization is None else f"{self.dtype}, weights in {self.quantization}"
        return weights if self.kv_cache_dtype == "auto" else f"{weights}, KV cache in {self.kv_cache_dtype}"
