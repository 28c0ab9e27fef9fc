"""A server on GPUs that one may not own: which scheduler, on what hardware, at what cost. Everything decided, no clock.

`Setup` is what a user says; `emulate` checks it and joins scheduler, step cost and front end. The wire server and the
virtual run take the same `Emulated` and make the same `Engine` of it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from backends import catalog
from backends.catalog import DTYPE_BYTES, ModelSpec
from servers import hardware
from servers.batching import Rejected, Scheduler, Sequence
from servers.batching.lightllm import LightLLM2310, LightLLMNow
from servers.batching.tgi import Tgi1, Tgi3
from servers.batching.vllm import Vllm02, VllmV1
from servers.cost import Gpu, Overheads, StepCost
from servers.engine import Engine, FrontEnd
from servers.hardware import HardwareError

GIB = 1 << 30
MOST_DIGITS = 9  # of a scheduler's setting
LEAST_KV_TOKENS = 256  # that a degraded server is left with
RESERVED_BYTES = GIB  # beside weights and KV on each GPU: context, activations, graphs; 1.0 to 1.3 GiB in real logs


class EmulationError(Exception):
    """A server that cannot be emulated as asked. One sentence."""


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    low: float
    high: float


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


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What a server's software costs, fitted to real runs. `scheduler`: of which server and version; `gpu`: on what the
    runs were made ("" if on none: then it is assumed). `memory_ratio`: part of a GPU's memory that it fills."""

    scheduler: str
    gpu: str = ""
    overheads: Overheads = Overheads()
    front: FrontEnd = FrontEnd()
    intervals: dict[str, Interval] = {}
    fitted_on: tuple[str, ...] = ()
    held_out: tuple[HeldOut, ...] = ()
    reductions: str = ""  # over which topology its reductions were fitted; elsewhere they cost what was measured alone
    source: str = ""

    def overheads_over(self, topology: str) -> Overheads:
        if self.reductions in ("", topology):
            return self.overheads
        return msgspec.structs.replace(self.overheads, reduce_us=0.0, reduce_ratio=1.0)


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """kv_tokens: the KV cache's capacity over all GPUs; None: what memory leaves. max_requests: how many the server may
    hold at once, running and waiting, before it refuses (servers that do). options: settings of the scheduler by the
    names that its class gives them, beyond those above."""

    scheduler: str
    model: ModelSpec
    gpu: str
    gpus: int = 1
    tp: int | None = None
    topology: str | None = None
    p2p: bool = True
    dtype: str = "float16"
    kv_tokens: int | None = None
    max_running: int = 1024
    max_requests: int = 1024
    max_model_len: int = 4096
    memory_ratio: float = 0.9
    profile: Path | None = None
    options: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The options of modelled hardware, for a command line: flags of one name everywhere.

    gpu: which GPU to model (h200, a800, rtx4090, ... or a JSON file). gpus: how many there are. tp: how many share the
    model (default: the least power of two that holds it). topology: nvlink, nvlink-pairs, pcie or host (default: as
    usual for the GPU). p2p: `--no-p2p` sends everything through host memory, `--p2p` nothing. scheduler: which server
    and version (default: the backend's newest). scheduler_arg: NAME=NUMBER, settings of it. speed: modelled seconds in
    a real one.
    """

    gpu: str | None = None
    gpus: int | None = None
    tp: int | None = None
    topology: str | None = None
    p2p: bool | None = None
    scheduler: str | None = None
    scheduler_arg: tuple[str, ...] = ()
    dtype: str = "float16"
    kv_tokens: int | None = None
    max_running: int = 1024
    max_requests: int = 1024
    memory_ratio: float = 0.9
    profile: Path | None = None
    speed: float = 1.0

    def setup(self, backend: str, model: str, max_model_len: int) -> Setup:
        """What to emulate. Raises EmulationError for what cannot be."""
        scheduler = self.scheduler or newest(backend)
        if scheduler is None:
            kinds = ", ".join(dict.fromkeys(name.partition("@")[0] for name in SCHEDULERS))
            raise EmulationError(f"a '{backend}' server is not modelled; modelled are {kinds}.")
        if scheduler.partition("@")[0] != backend:
            raise EmulationError(f"--scheduler {scheduler} is no {backend} server; there are {', '.join(SCHEDULERS)}.")
        spec = catalog.find(model)
        if spec is None:
            known = ", ".join(each.name for each in catalog.MODELS)
            raise EmulationError(f"the size of '{model}' is not known here; known are {known}.")
        self._check()
        if self.gpu is None:
            raise EmulationError(f"name the GPU to model with --gpu; known are {', '.join(hardware.known())}.")
        return Setup(
            scheduler=scheduler, model=spec, gpu=self.gpu, gpus=self.gpus or self.tp or 1, tp=self.tp,
            topology=self._topology(), p2p=self.p2p is not False, dtype=self.dtype, kv_tokens=self.kv_tokens,
            max_running=self.max_running, max_requests=self.max_requests, max_model_len=max_model_len,
            memory_ratio=self.memory_ratio, profile=self.profile,
            options=tuple(_option(text) for text in self.scheduler_arg),
        )  # fmt: skip

    def given(self) -> list[str]:
        """The names of the options that are not at their defaults."""
        fields = dataclasses.fields(self)
        return [field.name.replace("_", "-") for field in fields if getattr(self, field.name) != field.default]

    def _check(self) -> None:
        for name in ("tp", "gpus", "kv_tokens", "max_running", "max_requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise EmulationError(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")
        if not 0 < self.speed < math.inf:
            raise EmulationError(f"--speed is {self.speed:g}; it must be a number above 0.")
        if not 0 < self.memory_ratio <= 1:
            raise EmulationError(f"--memory-ratio is {self.memory_ratio:g}; it must be above 0 and at most 1.")
        if self.dtype not in DTYPE_BYTES:
            raise EmulationError(f"--dtype {self.dtype} is not known here; known are {', '.join(DTYPE_BYTES)}.")

    def _topology(self) -> str | None:
        if self.topology is None:
            return hardware.DIRECT if self.p2p else None
        if self.p2p is not None and self.p2p == (self.topology == "host"):
            state = "on" if self.p2p else "off"
            raise EmulationError(f"P2P is {state} and --topology is '{self.topology}', which do not agree; drop one.")
        return self.topology


class Emulated(msgspec.Struct, frozen=True, kw_only=True):
    """A server ready to be run. `facts` say what was decided, for manifests and headings."""

    setup: Setup
    tp: int
    kv_tokens: int
    cost: StepCost
    profile: Profile
    facts: dict[str, Any]
    settings: dict[str, int]  # of the scheduler: those of a server that loadgen starts, then those asked for
    slow_rank: float = 1.0  # how much longer than the others one GPU takes: all wait for it

    def engine(self, deliver: Callable[[list[Sequence], float, float], None]) -> Engine:
        cost, factor = self.cost, self.slow_rank
        step_s = cost if factor == 1.0 else lambda step: factor * cost(step)
        return Engine(_scheduler(self), step_s, deliver, self.profile.front)

    def degraded(self, kv_share: float, slow_rank: float) -> Emulated:
        """The same server with that share of its KV cache, and one of its GPUs slower. Raises EmulationError."""
        if slow_rank != 1.0 and self.tp == 1:
            raise EmulationError("a slow rank needs a model on several GPUs, such as --gpus 2 --tp 2.")
        kv_tokens = int(self.kv_tokens * kv_share)
        if kv_tokens < min(LEAST_KV_TOKENS, self.kv_tokens):
            raise EmulationError(f"{kv_share:.3%} of the KV cache is {kv_tokens} tokens; leave {LEAST_KV_TOKENS}.")
        facts = self.facts | {"kv_cache_tokens": kv_tokens}
        return msgspec.structs.replace(self, kv_tokens=kv_tokens, slow_rank=slow_rank, facts=facts)


def _scheduler(emulated: Emulated) -> Scheduler:
    return _SCHEDULERS[emulated.setup.scheduler][0](emulated.kv_tokens, **emulated.settings)


def _v1_budget_tokens(gpu: Gpu) -> int:
    """What vLLM's API server takes by default (get_batch_defaults in vllm/engine/arg_utils.py); no more than 2048 on an
    A100 of any size."""
    if gpu.memory_bytes >= 160 * GIB:
        return 16384
    return 8192 if gpu.memory_bytes >= 70 * GIB and "a100" not in gpu.name.lower() else 2048


_SCHEDULERS: dict[str, tuple[Callable[..., Scheduler], Callable[[Setup, Gpu], dict[str, int]]]] = {
    "vllm@v1": (VllmV1, lambda s, gpu: {"max_running": s.max_running, "budget_tokens": _v1_budget_tokens(gpu)}),
    "vllm@0.2": (Vllm02, lambda s, _: {"max_num_seqs": min(s.max_running, 256), "max_model_len": s.max_model_len}),
    "tgi@3": (Tgi3, lambda s, _: {"max_concurrent_requests": s.max_requests, "max_batch_size": s.max_running}),
    "tgi@1": (
        Tgi1,
        lambda s, _: {
            "max_concurrent_requests": s.max_requests,
            "max_input_length": s.max_model_len - 1,
            "max_total_tokens": s.max_model_len,
        },
    ),
    "lightllm@1.2": (LightLLMNow, lambda s, _: {"running_max_req_size": s.max_running}),
    "lightllm@2310": (LightLLM2310, lambda s, _: {"running_max_req_size": s.max_running}),
}
SCHEDULERS = tuple(_SCHEDULERS)
_NOT_SETTINGS = ("kv_tokens", "depth")  # parameters that are not the user's
_TRIAL_STEPS = 1000  # enough for one token of one request


def newest(backend: str) -> str | None:
    """The scheduler of a backend's newest server; None for a backend that is not emulated."""
    return next((name for name in SCHEDULERS if name.partition("@")[0] == backend), None)


@functools.cache
def profiles() -> dict[str, Profile]:
    """Those that come with this package, by scheduler."""
    return msgspec.json.decode((hardware.DATA / "profiles.json").read_bytes(), type=dict[str, Profile])


def read_profile(path: Path, scheduler: str) -> Profile:
    """A profile that `loadgen calibrate` wrote. Raises EmulationError."""
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise EmulationError(f"cannot read {path}: {error.strerror or error}.") from None
    except msgspec.DecodeError as error:
        raise EmulationError(f"{path} is no hardware profile: {error}; make one with `loadgen calibrate`.") from None
    for part in (profile.overheads, profile.front):
        for name, value in msgspec.structs.asdict(part).items():
            if not 0 <= value < math.inf:
                raise EmulationError(f"{path}: {name} is {value:g}; it must be a number of at least 0.")
    if profile.scheduler != scheduler:
        raise EmulationError(
            f"{path} was fitted to {profile.scheduler} and this is {scheduler}; calibrate on runs of that server, or "
            f"choose --scheduler {profile.scheduler}."
        )
    return profile


def emulate(setup: Setup) -> Emulated:
    """Raises EmulationError or HardwareError."""
    if setup.scheduler not in _SCHEDULERS:
        raise EmulationError(f"there is no scheduler '{setup.scheduler}'; there are {', '.join(SCHEDULERS)}.")
    _check_options(setup)
    gpu = hardware.find(setup.gpu)
    usable = gpu.memory_bytes * setup.memory_ratio
    tp = _tensor_parallel(setup, usable, gpu.name)
    topology, link = hardware.link(gpu, tp, setup.topology, setup.p2p)
    room = usable - _fixed_bytes(setup, tp)
    per_token = setup.model.kv_bytes_per_token(setup.dtype) / min(tp, setup.model.kv_heads)
    kv_tokens = int(room / per_token) if setup.kv_tokens is None else setup.kv_tokens
    profile = profiles()[setup.scheduler] if setup.profile is None else read_profile(setup.profile, setup.scheduler)
    emulated = Emulated(
        setup=setup,
        tp=tp,
        kv_tokens=kv_tokens,
        cost=StepCost(setup.model, gpu, tp, link, setup.dtype, profile.overheads_over(topology)),
        profile=profile,
        settings=_SCHEDULERS[setup.scheduler][1](setup, gpu) | dict(setup.options),
        facts={
            "scheduler": setup.scheduler,
            "gpu": gpu.name,
            "gpus": tp,
            "topology": topology,
            "tensor_parallel": tp,
            "dtype": setup.dtype,
            "kv_cache_tokens": kv_tokens,
            "max_running": setup.max_running,
            "memory_ratio": setup.memory_ratio,
            "profile": str(setup.profile) if setup.profile else f"built in ({profile.source})",
            "gpu_source": gpu.source,
            "gpu_error": gpu.error,
            "profile_gpus": (measured := _measured(profile)),
            "profile_assumed": bool(measured) and not any(_same(gpu, setup.gpu, name) for name in measured),
            "held_out": msgspec.to_builtins(profile.held_out),
            "speed": 1.0,
        },
    )
    _try_scheduler(emulated)
    return emulated


def _measured(profile: Profile) -> list[str]:
    """The GPUs of real runs that the profile was fitted to or compared with; a run's name begins with its GPU's."""
    names = [run.run.partition("_")[0] for run in profile.held_out]
    compared = [gpu for gpu in hardware.known() if any(name == gpu or name.startswith(f"{gpu}x") for name in names)]
    return list(dict.fromkeys([profile.gpu, *compared])) if profile.gpu else compared


def _same(gpu: Gpu, called: str, name: str) -> bool:
    try:
        return called == name or hardware.find(name) == gpu
    except HardwareError:  # a profile tells of a file that is not here
        return False


def _check_options(setup: Setup) -> None:
    """Raises EmulationError for a setting that the scheduler does not have, or a value that none can have."""
    parameters = inspect.signature(_SCHEDULERS[setup.scheduler][0]).parameters
    settings = {name: each.default for name, each in parameters.items() if name not in _NOT_SETTINGS}
    for name, value in setup.options:
        if name not in settings:
            raise EmulationError(f"{setup.scheduler} has no setting '{name}'; it has {', '.join(settings)}.")
        if isinstance(settings[name], bool):
            right, may_be = value in (0, 1), "0 or 1"
        elif isinstance(settings[name], float):
            right, may_be = 0 <= value < math.inf, "at least 0"
        else:
            right, may_be = value >= 1, "at least 1"
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
        return  # that is an answer, and what a small KV cache gives to everybody
    except (ArithmeticError, LookupError, TypeError, ValueError):
        sequence.done = False
    if not sequence.done:
        raise EmulationError(f"{emulated.setup.scheduler} cannot serve with these settings ({settings}); change them.")


def _option(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if not (name and value.isascii() and value.isdecimal()):
        raise EmulationError(f"--scheduler-arg '{text}' must be NAME=NUMBER, such as max_concurrent_requests=128.")
    if len(value) > MOST_DIGITS:
        raise EmulationError(f"--scheduler-arg {name} has {len(value)} digits; a number may have {MOST_DIGITS}.")
    return name, int(value)


def _fixed_bytes(setup: Setup, tp: int) -> float:
    """On each GPU, beside the KV cache."""
    return setup.model.parameters * DTYPE_BYTES[setup.dtype] / tp + RESERVED_BYTES


def _tensor_parallel(setup: Setup, usable: float, gpu: str) -> int:
    """How many GPUs share the model: as asked, or the least power of two that holds it and one long sequence."""
    model = setup.model
    least_kv = 0 if setup.kv_tokens is not None else min(setup.max_model_len, model.max_position)

    def missing(tp: int) -> float:
        kv = least_kv * model.kv_bytes_per_token(setup.dtype) / min(tp, model.kv_heads)
        return tp * (_fixed_bytes(setup, tp) + kv - usable)

    if setup.tp is not None:
        if setup.tp > setup.gpus:
            raise EmulationError(f"--tp {setup.tp} needs {setup.tp} GPUs and --gpus says {setup.gpus}.")
        if not model.tensor_parallel(setup.tp):
            raise EmulationError(
                f"{model.name} has {model.heads} attention heads, which --tp {setup.tp} does not divide."
            )
        sizes = [setup.tp]
    else:
        powers = (1 << power for power in range(setup.gpus.bit_length()))
        sizes = [tp for tp in powers if tp <= setup.gpus and model.tensor_parallel(tp)]
    for tp in sizes:
        if missing(tp) <= 0:
            return tp
    enough = next((1 << p for p in range(10) if model.tensor_parallel(1 << p) and missing(1 << p) <= 0), None)
    advice = f"--tp {enough} would fit" if enough else "it needs larger GPUs"
    raise EmulationError(
        f"{model.name} in {setup.dtype} does not fit: {missing(sizes[-1]) / 1e9:.1f} GB are missing on {sizes[-1]} x "
        f"{gpu} ({usable / GIB:.1f} GiB of each may be used); {advice}."
    )
