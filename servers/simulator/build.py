"""A server on GPUs that one may not own: which scheduler, on what hardware, at what cost. Everything decided, no clock.

`Setup` is what a user chooses; `emulate` checks it and joins scheduler, step cost and front end. The server behind the
wire and the virtual run take the same `Emulated` and make the same `Engine` of it.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from backends.decoder import (
    Attention,
    LatentAttention,
    Layers,
    ModelSpec,
    Precision,
    PrecisionError,
    Quantization,
    Reserve,
)
from backends.exit_codes import UserError
from backends.untrusted import escaped, read_json
from loadgen.config import LEAST_KV_TOKENS
from loadgen.rundir.emulation import Emulation, HeldOut
from servers.schedulers import Rejected, Scheduler, Sequence, Step
from servers.schedulers.groups import BLOCK_TOKENS, LayerGroups
from servers.schedulers.lightllm import CachingLightLLMNow, LightLLM2310, LightLLMNow
from servers.schedulers.sglang import Sglang
from servers.schedulers.tgi import CachingTgi3, Tgi1, Tgi3
from servers.schedulers.vllm import CachingVllmV1, Vllm02, VllmV0, VllmV1, WindowedVllmV1
from servers.simulator import graphs, hardware
from servers.simulator.cost import Arithmetic, GpuSpec, Overheads, StepCost, arithmetic
from servers.simulator.engine import Engine, FrontEnd, Steady
from servers.simulator.experts import most_imbalance
from servers.simulator.formats import refused
from servers.simulator.hardware import HardwareError
from servers.simulator.reserve import ASSUMED_BYTES, SGLANG_BYTES, reserved_bytes

GIB = 1 << 30
HOST_GPUS = 8  # the most that one host has; beyond, nothing is measured
DOUBTED_ROWS, DOUBTED_CONTEXT = 64, 1000  # of the step whose range is told where operators were never measured


class EmulationError(UserError):
    """A server that cannot be emulated as asked. One sentence."""


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    low: float
    high: float


class ServerProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What a server's software costs, fitted to real runs. `scheduler`: of which server and version; `gpu`: on what the
    runs were made ("" if on none: then it is assumed)."""

    scheduler: str
    gpu: str = ""
    overheads: Overheads = Overheads()
    front: FrontEnd = FrontEnd()
    intervals: dict[str, Interval] = {}
    fitted_on: tuple[str, ...] = ()
    held_out: tuple[HeldOut, ...] = ()
    reductions: str = ""  # over which topology its reductions were fitted; elsewhere they cost what was measured alone
    source: str = ""

    def held_out_on(self, gpu: str, quantization: str | None, architecture: str) -> tuple[HeldOut, ...]:
        """Its held-out runs on that GPU, by any of its names, of models of that class with weights in that format."""
        card, asked = hardware.find(gpu), (quantization, architecture)
        runs = [run for run in self.held_out if (run.quantization, run.architecture) == asked]
        return tuple(run for run in runs if (name := _gpu_of(run)) is not None and _same(card, gpu, name))

    def overheads_over(self, topology: str) -> Overheads:
        if self.reductions in ("", topology):
            return self.overheads
        return msgspec.structs.replace(self.overheads, reduce_us=0.0, reduce_ratio=1.0)


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """gpus: how many may be used. tp: how many share the model; None: the least power of two of them that holds it; the
    others do nothing, as where loadgen starts a server. kv_tokens: the KV cache's capacity over all GPUs; None: what
    memory leaves. max_requests: how many the server may hold at once, running and waiting, before it refuses (servers
    that do). max_batched_tokens: that a step computes at most; None: the server's default. expert_imbalance: of a
    mixture, the load of its busiest expert over the mean. dummy_weights: they are random. prefix_caching: whether it
    keeps prompts for later ones that begin alike (servers that can). options: settings of the scheduler by their names
    there, beyond those above."""

    scheduler: str
    model: ModelSpec
    gpu: str
    gpus: int = 1
    tp: int | None = None
    topology: str | None = None
    p2p: bool = True
    dtype: str = "float16"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    kv_tokens: int | None = None
    max_running: int = 1024
    max_batched_tokens: int | None = None
    max_requests: int = 1024
    max_model_len: int = 4096
    memory_ratio: float = 0.9
    expert_imbalance: float = 1.0
    dummy_weights: bool = False
    profile: Path | None = None
    prefix_caching: bool = False
    options: tuple[tuple[str, int | float], ...] = ()

    def precision(self) -> Precision:
        """Raises EmulationError."""
        try:
            return self.model.precision(self.dtype, self.quantization, self.kv_cache_dtype)
        except PrecisionError as error:
            raise EmulationError(str(error)) from None


class Emulated(msgspec.Struct, frozen=True, kw_only=True):
    """A server ready to be run. `facts` say what was decided, for manifests and headings."""

    setup: Setup
    tp: int
    kv_tokens: int
    cost: StepCost
    profile: ServerProfile
    facts: Emulation
    settings: dict[str, Any]  # of the scheduler: those of a server that loadgen starts, then `setup.options`
    slow_rank: float = 1.0  # how much longer than the others one GPU takes: all wait for it

    def engine(
        self,
        deliver: Callable[[list[Sequence], float, float], None],
        deliver_steady: Steady | None = None,
    ) -> Engine:
        clock = self.cost.clock(self.slow_rank)
        if not self.cost.by_sums:
            deliver_steady = None
        launch_s = _loading(self.settings, clock.launch_s)
        return Engine(_scheduler(self), (clock.step_s, launch_s), deliver, self.profile.front, deliver_steady)

    def with_profile(self, profile: ServerProfile) -> Emulated:
        """The same server with other software times."""
        cost = self.cost.with_overheads(_overheads(self.setup, self.settings, self.tp, self.facts.topology, profile))
        return msgspec.structs.replace(self, profile=profile, cost=cost)

    def degraded(self, kv_share: float, slow_rank: float) -> Emulated:
        """The same server with that share of its KV cache, and one of its GPUs slower. Raises EmulationError."""
        if slow_rank != 1.0 and self.tp == 1:
            raise EmulationError("a slow rank needs a model on several GPUs, such as --gpus 2 --tp 2.")
        kv_tokens = int(self.kv_tokens * kv_share)
        if kv_tokens < min(LEAST_KV_TOKENS, self.kv_tokens):
            raise EmulationError(f"{kv_share:.3%} of the KV cache is {kv_tokens} tokens; leave {LEAST_KV_TOKENS}.")
        facts = msgspec.structs.replace(self.facts, kv_cache_tokens=kv_tokens)
        return msgspec.structs.replace(self, kv_tokens=kv_tokens, slow_rank=slow_rank, facts=facts)


def _loading(
    settings: Mapping[str, Any], launch_s: Callable[[Step], tuple[float, float]]
) -> Callable[[Step], tuple[float, float]]:
    """What a step takes to launch, adapters loaded first."""
    if not settings.get("max_loras"):
        return launch_s
    load_s = settings.get("lora_load_ms", VllmV1.Settings().lora_load_ms) / 1e3

    def launch(step: Step) -> tuple[float, float]:
        launched_s, prepared_s = launch_s(step)
        return launched_s + step.loads * load_s, prepared_s + step.loads * load_s

    return launch


def _scheduler(emulated: Emulated) -> Scheduler:
    kind, setup = _SCHEDULERS[emulated.setup.scheduler], emulated.setup
    settings = kind.settings(**emulated.settings)
    groups = _groups(setup, emulated.settings, emulated.tp)
    if groups is not None and groups.uneven:
        assert isinstance(settings, VllmV1.Settings)
        return WindowedVllmV1(emulated.kv_tokens, settings, groups)
    make = kind.caching if setup.prefix_caching else kind.make
    assert make is not None
    return make(emulated.kv_tokens, settings)


def _groups(setup: Setup, settings: dict[str, Any], tp: int) -> LayerGroups | None:
    """How the server divides its KV cache among layers that keep differently; None: every layer keeps every token."""
    keeping = setup.model.keeping
    widths = {kind.attention.kv_values for kind in keeping}
    if setup.scheduler != "vllm@v1" or setup.prefix_caching or len(widths) > 1:
        return None
    steps = 2 if settings.get("async_scheduling", True) else 1  # under way at once
    kept = ((kind.count, kind.attention.window) for kind in keeping)
    groups = LayerGroups.of(kept, setup.max_model_len, steps * settings["budget_tokens"])
    state = setup.model.state_bytes(setup.precision()) / tp
    return replace(groups, state_blocks=math.ceil(state / _block_bytes(setup, tp, groups.layers)))


def _block_bytes(setup: Setup, tp: int, layers: int) -> float:
    """What a block of that many layers takes on one GPU."""
    attention, precision = setup.model.keeping[0].attention, setup.precision()
    return BLOCK_TOKENS * layers * attention.token_bytes(precision) / attention.shares(tp)


def _v1_budget_tokens(gpu: GpuSpec) -> int:
    """What vLLM's API server takes by default (get_batch_defaults in vllm/engine/arg_utils.py); no more than 2048 on an
    A100 of any size."""
    if gpu.memory_bytes >= 160 * GIB:
        return 16384
    return 8192 if gpu.memory_bytes >= 70 * GIB and "a100" not in gpu.name.lower() else 2048


def _is_newer(scheduler: str) -> bool:
    return scheduler == "sglang@0.5.23"


def _sglang(setup: Setup, gpu: GpuSpec) -> dict[str, int]:
    newer = _is_newer(setup.scheduler)
    return {
        "chunked_prefill_size": graphs.chunk_tokens(gpu.memory_bytes, newer),
        "max_running_requests": setup.max_running,
        "context_length": setup.max_model_len,
        "newer": newer,
    }


def _overheads(setup: Setup, settings: dict[str, Any], tp: int, topology: str, profile: ServerProfile) -> Overheads:
    own = profile.overheads_over(topology)
    if not setup.scheduler.startswith("sglang@"):
        return own
    memory_bytes, newer = hardware.find(setup.gpu).memory_bytes, _is_newer(setup.scheduler)
    return msgspec.structs.replace(
        own,
        decode_graphs=graphs.decode_graphs(memory_bytes, tp, setup.max_running, newer),
        prefill_graphs=graphs.prefill_graphs(settings["chunked_prefill_size"]),
    )


def _first_vllm(setup: Setup, _: GpuSpec) -> dict[str, int]:
    return {"max_num_seqs": min(setup.max_running, 256), "max_model_len": setup.max_model_len}


@dataclass(frozen=True)
class _Kind:
    """How a scheduler is made: `make` from KV tokens and `settings`, which `chosen` takes from a setup where the user
    gives none. batched: which of them is Setup.max_batched_tokens. `caching`: the same with its prefix cache; None: it
    has none, or not here."""

    make: Callable[..., Scheduler]
    settings: type[msgspec.Struct]
    chosen: Callable[[Setup, GpuSpec], dict[str, int]]
    batched: str
    caching: Callable[..., Scheduler] | None = None


_SCHEDULERS = {
    "vllm@v1": _Kind(
        VllmV1,
        VllmV1.Settings,
        lambda s, gpu: {"max_running": s.max_running, "budget_tokens": _v1_budget_tokens(gpu)},
        "budget_tokens",
        CachingVllmV1,
    ),
    "vllm@v0": _Kind(VllmV0, VllmV0.Settings, _first_vllm, "max_num_batched_tokens"),
    "vllm@0.2": _Kind(Vllm02, Vllm02.Settings, _first_vllm, "max_num_batched_tokens"),
    "tgi@3": _Kind(
        Tgi3,
        Tgi3.Settings,
        lambda s, _: {
            "max_concurrent_requests": s.max_requests,
            "max_total_tokens": s.max_model_len,
            "max_batch_size": s.max_running,
        },
        "max_batch_prefill_tokens",
        CachingTgi3,
    ),
    "tgi@1": _Kind(
        Tgi1,
        Tgi1.Settings,
        lambda s, _: {
            "max_concurrent_requests": s.max_requests,
            "max_input_length": s.max_model_len - 1,
            "max_total_tokens": s.max_model_len,
        },
        "max_batch_prefill_tokens",
    ),
    "lightllm@1.2": _Kind(
        LightLLMNow,
        LightLLMNow.Settings,
        lambda s, _: {"running_max_req_size": s.max_running},
        "batch_max_tokens",
        CachingLightLLMNow,
    ),
    "sglang@0.5.11": _Kind(
        Sglang, Sglang.Settings, _sglang, "chunked_prefill_size", functools.partial(Sglang, caching=True)
    ),
    "sglang@0.5.23": _Kind(
        Sglang, Sglang.Settings, _sglang, "chunked_prefill_size", functools.partial(Sglang, caching=True)
    ),
    "lightllm@2310": _Kind(
        LightLLM2310,
        LightLLM2310.Settings,
        lambda s, _: {"running_max_req_size": s.max_running},
        "batch_max_tokens",
    ),
}
SCHEDULERS = tuple(_SCHEDULERS)
_TRIAL_STEPS = 1000  # enough for one token of one request


def newest(backend: str) -> str | None:
    """The scheduler of a backend's newest server; None for a backend that is not emulated."""
    return next((name for name in SCHEDULERS if name.partition("@")[0] == backend), None)


@functools.cache
def profiles() -> dict[str, ServerProfile]:
    """Those that come with this package, by scheduler."""
    return msgspec.json.decode((hardware.DATA / "profiles.json").read_bytes(), type=dict[str, ServerProfile])


def read_profile(path: Path, scheduler: str) -> ServerProfile:
    """A profile that `loadgen calibrate` wrote. Raises EmulationError."""
    advice = "; make one with `loadgen calibrate`"
    profile = read_json(path, ServerProfile, EmulationError, "is no hardware profile", advice)
    for part in (profile.overheads, profile.front):
        for name, value in msgspec.structs.asdict(part).items():
            for each in value if isinstance(value, tuple) else (value,):
                if not 0 <= each < math.inf:
                    raise EmulationError(f"{path}: {name} is {each:g}; it must be a number of at least 0.")
    if profile.scheduler != scheduler:
        fitted = escaped(profile.scheduler[:60])
        raise EmulationError(
            f"{path} was fitted to {fitted} and this is {scheduler}; calibrate on runs of that server, or "
            f"choose --scheduler {fitted}."
        )
    return profile


def emulate(setup: Setup) -> Emulated:
    """Raises EmulationError or HardwareError."""
    if setup.scheduler not in _SCHEDULERS:
        raise EmulationError(f"there is no scheduler '{setup.scheduler}'; there are {', '.join(SCHEDULERS)}.")
    if setup.prefix_caching and _SCHEDULERS[setup.scheduler].caching is None:
        able = ", ".join(name for name, kind in _SCHEDULERS.items() if kind.caching is not None)
        raise EmulationError(
            f"{setup.scheduler} has no prefix cache; give --prefix-caching off, or choose one of {able}."
        )
    _check_options(setup)
    gpu = hardware.find(setup.gpu)
    precision = setup.precision()
    if precision.quantization is not None and refused(gpu.name, precision.quantization.computes):
        raise EmulationError(
            f"vLLM has no products of {precision.quantization.name} for {gpu.name}; choose --quantization fp8."
        )
    usable = gpu.memory_bytes * setup.memory_ratio
    settings = _settings(setup, gpu)
    reserve = _reserve(setup, gpu, settings)
    tp = _tensor_parallel(setup, usable, gpu.name, reserve)
    topology, link = hardware.link(gpu, tp, setup.topology, setup.p2p)
    room = usable - setup.model.serving_bytes(precision, tp, 0, reserve(precision, tp))
    if slots := settings.get("max_loras"):
        room -= slots * lora_bytes(setup, settings) / tp
    kv_tokens = _kv_tokens(setup, tp, room, settings) if setup.kv_tokens is None else setup.kv_tokens
    profile = profiles()[setup.scheduler] if setup.profile is None else read_profile(setup.profile, setup.scheduler)
    overheads = _overheads(setup, settings, tp, topology, profile)
    cost = StepCost(
        routed(setup.model, setup.expert_imbalance, setup.dummy_weights), gpu, tp, link, precision, overheads
    )
    facts = _facts(setup, gpu, tp, topology, kv_tokens, profile)
    notes = (*facts.notes, *_unmeasured(cost, gpu))
    emulated = Emulated(
        setup=setup, tp=tp, kv_tokens=kv_tokens, cost=cost, profile=profile, settings=settings,
        facts=msgspec.structs.replace(facts, notes=notes),
    )  # fmt: skip
    _try_scheduler(emulated)
    return emulated


def lora_bytes(setup: Setup, settings: Mapping[str, Any]) -> int:
    """What a slot for an adapter takes of the memory of all GPUs: beside each projection of attention and MLP two
    matrices of 16-bit numbers, as vLLM allocates them whatever an adapter's own rank is. Raises EmulationError."""
    model, widths = setup.model, 0
    for kind in model.kinds:
        if not isinstance(kind.attention, Attention) or kind.mlp.experts > 1:
            raise EmulationError(
                f"adapters are modelled for dense decoders, and {model.name} is none; leave max_loras out."
            )
        attention, mlp = kind.attention, kind.mlp
        projections = (attention.query_width, *2 * (attention.kv_heads * attention.head_dim,), attention.query_width)
        each = sum(projections) + mlp.matrices * mlp.width + (4 + mlp.matrices) * model.hidden
        widths += kind.count * each
    rank: int = settings.get("lora_rank", VllmV1.Settings().lora_rank)
    return 2 * rank * widths


def routed(model: ModelSpec, imbalance: float, dummy_weights: bool = False) -> ModelSpec:
    """The model with the load of its busiest expert over the mean; of random weights some routers send every token to
    the same experts. Raises EmulationError."""
    if imbalance == 1:
        tied = (kind for kind in model.kinds if dummy_weights and _ties(kind))
        return _imbalanced(model, {id(kind): most_imbalance(kind.mlp.experts, kind.mlp.active) for kind in tied})
    mixtures = [kind.mlp for kind in model.kinds if kind.mlp.experts > 1]
    if not mixtures:
        raise EmulationError(f"{model.name} has no experts; leave --expert-imbalance out.")
    most = min(most_imbalance(mlp.experts, mlp.active) for mlp in mixtures)
    if not 1 <= imbalance < most:
        raise EmulationError(
            f"--expert-imbalance is {imbalance:g}; for {model.name} it must be at least 1 and below {most:g}, where "
            "every token would choose the same expert."
        )
    return _imbalanced(model, {id(kind): imbalance for kind in model.kinds if kind.mlp.experts > 1})


def _ties(kind: Layers) -> bool:
    """Whether a layer's router of random weights sends all tokens to the same experts: their scores are one in 16 bit,
    or differ by less than its random bias does."""
    return kind.mlp.experts > 1 and (kind.mlp.routed_plainly or kind.mlp.router_bias)


def _imbalanced(model: ModelSpec, imbalance: Mapping[int, float]) -> ModelSpec:
    """imbalance: by the identity of a kind of layers."""
    kinds = (replace(kind, mlp=replace(kind.mlp, imbalance=imbalance.get(id(kind), 1.0))) for kind in model.kinds)
    return replace(model, kinds=tuple(kinds))


def _settings(setup: Setup, gpu: GpuSpec) -> dict[str, Any]:
    """Of the scheduler: as loadgen starts such a server, as the setup says, and last its `options`."""
    kind = _SCHEDULERS[setup.scheduler]
    batched = {} if setup.max_batched_tokens is None else {kind.batched: setup.max_batched_tokens}
    return kind.chosen(setup, gpu) | batched | dict(setup.options)


def _reserve(setup: Setup, gpu: GpuSpec, settings: dict[str, Any]) -> Reserve:
    if setup.scheduler != "vllm@v1":
        reserve_bytes = SGLANG_BYTES if setup.scheduler.startswith("sglang@") else ASSUMED_BYTES
        return lambda precision, tp: reserve_bytes
    tokens, rows = settings["budget_tokens"], settings["max_running"]

    def of_vllm(precision: Precision, tp: int) -> int:
        try:
            topology, _ = hardware.link(gpu, tp, setup.topology, setup.p2p)
        except HardwareError:  # `emulate` raises this error again for the size that it settles on
            topology = ""
        nvlink = topology.startswith("nvlink")
        return reserved_bytes(setup.model, precision, tp, tokens=tokens, rows=rows, nvlink=nvlink)

    return of_vllm


def _kv_tokens(setup: Setup, tp: int, room: float, settings: dict[str, Any]) -> int:
    """Tokens in the KV cache where `room` bytes of each GPU are left, as the server counts them."""
    model = setup.model
    groups = _groups(setup, settings, tp)
    if groups is not None and groups.uneven:
        a_block = _block_bytes(setup, tp, groups.layers)
        return groups.tokens(max(0, room // a_block))
    per_token = model.kv_bytes_per_token(setup.precision()) / model.kv_shares(tp)
    return int(room / per_token)


def _facts(setup: Setup, gpu: GpuSpec, tp: int, topology: str, kv_tokens: int, profile: ServerProfile) -> Emulation:
    measured = _measured(profile)
    precision, architecture = setup.precision(), setup.model.architecture
    quantization = None if precision.quantization is None else precision.quantization.name
    return Emulation(
        scheduler=setup.scheduler,
        gpu=gpu.name,
        gpus=tp,
        topology=topology,
        tensor_parallel=tp,
        dtype=setup.dtype,
        quantization=quantization,
        kv_cache_dtype=setup.kv_cache_dtype,
        kv_cache_tokens=kv_tokens,
        max_running=setup.max_running,
        memory_ratio=setup.memory_ratio,
        profile=" ".join(filter(None, [str(setup.profile or "built in"), profile.source and f"({profile.source})"])),
        gpu_source=gpu.source,
        gpu_error=gpu.error,
        profile_gpus=measured,
        profile_assumed=bool(measured) and not any(_same(gpu, setup.gpu, name) for name in measured),
        held_out=profile.held_out_on(setup.gpu, quantization, architecture),
        held_out_of=len(profile.held_out),
        architecture=architecture,
        notes=(*_notes(setup, tp, kv_tokens), *_assumptions(setup, gpu)),
        prefix_caching=setup.prefix_caching,
    )


def _notes(setup: Setup, tp: int, kv_tokens: int) -> Iterator[str]:
    """What a user should know about it, one sentence each."""
    if tp < setup.gpus:
        all_of_them = f"; --tp {setup.gpus} uses all" if setup.model.tensor_parallel(setup.gpus) else ""
        hold = "holds" if tp == 1 else "hold"
        yield f"{tp} of the {setup.gpus} GPUs {hold} {setup.model.name} and the rest do nothing{all_of_them}."
    if tp > HOST_GPUS:
        yield f"--tp {tp} is modelled as one host, which has at most {HOST_GPUS} GPUs; the way between hosts is slower."
    if kv_tokens < setup.max_model_len:
        yield (
            f"the KV cache holds {kv_tokens} tokens and --max-model-len is {setup.max_model_len}: longer requests are "
            "refused."
        )


def _assumptions(setup: Setup, gpu: GpuSpec) -> Iterator[str]:
    """What nobody has measured here, one sentence each."""
    precision = setup.precision()
    if precision.quantization is not None:
        yield _quantized_note(precision.quantization, gpu, arithmetic(gpu, precision))
    if any(kind.mlp.experts > 1 for kind in setup.model.kinds):
        yield _routing_note(setup, arithmetic(gpu, precision))
    if precision.kv_cache_dtype not in ("auto", *gpu.attentions):
        yield f"a KV cache in {precision.kv_cache_dtype} is assumed to be read at the efficiency of 16 bit."
    grouped = _groups(setup, _settings(setup, gpu), 1) is not None
    if any(kind.attention.window is not None for kind in setup.model.kinds) and not grouped:
        yield "layers with a window are taken to keep every token in the KV cache here."
    if setup.model.state_bytes(precision) and not grouped:
        yield "the state that each request holds of its linear attention is not counted in the KV cache here."
    if any(isinstance(kind.attention, LatentAttention) and kind.attention.index_heads for kind in setup.model.kinds):
        yield "sparse attention is taken to read every token here."


def _unmeasured(cost: StepCost, gpu: GpuSpec) -> Iterator[str]:
    """What a step may take where it has operators that nobody measured, one sentence."""
    operators = cost.unmeasured_s(DOUBTED_ROWS, DOUBTED_CONTEXT)
    if operators:
        decoding = [Sequence(number, DOUBTED_CONTEXT, 1) for number in range(DOUBTED_ROWS)]
        step = Step(decoding, DOUBTED_ROWS, DOUBTED_ROWS * DOUBTED_CONTEXT)
        assumed_s, doubted_s = cost(step), sum(operators.values())
        low_ms, likely_ms, high_ms = (
            1e3 * each for each in (assumed_s - doubted_s / 2, assumed_s, assumed_s + doubted_s)
        )
        yield (
            f"never measured on {gpu.name}: {', '.join(operators)}; a step of {DOUBTED_ROWS} rows that decode at "
            f"{DOUBTED_CONTEXT} tokens takes {likely_ms:.1f} ms as assumed by bytes and FLOPs, and {low_ms:.1f} to "
            f"{high_ms:.1f} if that takes half or twice as long."
        )


def _routing_note(setup: Setup, how: Arithmetic) -> str:
    even = "tokens are taken to choose experts evenly and at random"
    if any(map(_ties, setup.model.kinds)):
        tied = "all tokens choose the same experts, since random weights give those nearly one score"
        even = tied if setup.dummy_weights else f"{even} (of random weights all would choose the same: --dummy-weights)"
    uneven = f"the busiest expert is taken to have {setup.expert_imbalance:g} times the mean load"
    fit = "" if how.experts else "; group products were not measured here: assumed as fast as one product of that size"
    return f"{even if setup.expert_imbalance == 1 else uneven}{fit}."


def _quantized_note(quantization: Quantization, gpu: GpuSpec, how: Arithmetic) -> str:
    name = quantization.name
    if how.fit is gpu.gemm:
        lacks = "" if quantization.computes is None else f"{gpu.name} does not compute in {name}: "
        return f"{lacks}weights in {name} are widened to 16 bit for every product (vLLM: Marlin), assumed at no cost."
    if not how.assumed:
        return f"weights are in {name}, and their products take what the table of {gpu.name} has for {name}."
    times = how.fit.compute_ratio / gpu.gemm.compute_ratio
    return (
        f"products in {name} were not measured on {gpu.name}: assumed at the efficiency of 16 bit, with {times:g} "
        "times its FLOP/s."
    )


def _measured(profile: ServerProfile) -> tuple[str, ...]:
    """The GPUs of real runs that the profile was fitted to or compared with."""
    return tuple(dict.fromkeys(filter(None, (profile.gpu, *map(_gpu_of, profile.held_out)))))


def _gpu_of(run: HeldOut) -> str | None:
    """The GPU of a real run; where an older profile does not say, its name does: a file's h200x4_70b_burst, or a
    directory's h200/serving/7b_burst."""
    name = run.gpu or re.sub(r"x\d+$", "", re.split("[_/]", run.run)[0])
    return name if run.gpu or name in hardware.known() else None


def _same(gpu: GpuSpec, called: str, name: str) -> bool:
    try:
        return called == name or hardware.find(name) == gpu
    except HardwareError:  # the profile names a file that is not here
        return False


def _check_options(setup: Setup) -> None:
    """Raises EmulationError for a setting that the scheduler does not have, or a value that none can have."""
    settings = {each.name: each.default for each in msgspec.structs.fields(_SCHEDULERS[setup.scheduler].settings)}
    for name, value in setup.options:
        if name not in settings:
            raise EmulationError(f"{setup.scheduler} has no setting '{name}'; it has {', '.join(settings)}.")
        if isinstance(settings[name], bool):
            right, may_be = value in (0, 1), "0 or 1"
        elif isinstance(settings[name], float) or settings[name] == 0:
            right, may_be = 0 <= value < math.inf, "at least 0"
        else:
            right, may_be = value >= 1, "at least 1"
        if isinstance(value, float) and not isinstance(settings[name], float):
            right, may_be = False, f"a whole number{'' if isinstance(settings[name], bool) else ', ' + may_be}"
        if not right:
            raise EmulationError(f"the scheduler's setting {name} is {value}; it must be {may_be}.")


def _try_scheduler(emulated: Emulated) -> None:
    """One token of one request, alone. Raises EmulationError where the scheduler's settings do not even allow that."""
    settings = ", ".join(f"{name}={value}" for name, value in emulated.settings.items())
    sequence = Sequence(0, 1, 1)
    try:
        scheduler = _scheduler(emulated)
        scheduler.admit(sequence)
        scheduler.add(sequence)
        for _ in range(_TRIAL_STEPS):
            if sequence.done or (step := scheduler.schedule()) is None:
                break
            scheduler.finish(step)
    except Rejected:
        return  # which is what a small KV cache gives to everybody
    except (ArithmeticError, LookupError, TypeError, ValueError):
        sequence.done = False
    if not sequence.done:
        raise EmulationError(f"{emulated.setup.scheduler} cannot serve with these settings ({settings}); change them.")


def _tensor_parallel(setup: Setup, usable: float, gpu: str, reserve: Reserve) -> int:
    """How many GPUs share the model: as asked, or the least power of two that holds it and one long sequence."""
    model, precision = setup.model, setup.precision()
    tokens = 0 if setup.kv_tokens is not None else min(setup.max_model_len, model.max_position)
    tp = setup.tp
    if tp is not None:
        if tp > setup.gpus:
            raise EmulationError(f"--tp {tp} needs {tp} GPUs and --gpus says {setup.gpus}.")
        if (undivided := model.undivided(tp)) is not None:
            raise EmulationError(f"{model.name} {undivided}.")
        fits = model.serving_bytes(precision, tp, tokens, reserve(precision, tp)) <= usable
    else:
        least = model.smallest_tp(precision, tokens, usable, setup.gpus, reserve)
        fits = least is not None
        tp = least or max(1 << p for p in range(setup.gpus.bit_length()) if model.tensor_parallel(1 << p))
    if fits:
        return tp
    set_aside = reserve(precision, tp)
    missing = tp * (model.serving_bytes(precision, tp, tokens, set_aside) - usable)
    ways = model.what_fits(precision, tokens, usable, tp, reserve)
    if model.serving_bytes(precision, tp, tokens, ASSUMED_BYTES) <= usable:
        ways = f"vLLM sets {set_aside / GIB:.1f} GiB aside for its steps; lower --max-batched-tokens or --max-running"
    raise EmulationError(
        f"{model.name} in {precision} does not fit: {missing / 1e9:.1f} GB are missing on {tp} x {gpu} "
        f"({usable / GIB:.1f} GiB of each may be used); {ways}."
    )
