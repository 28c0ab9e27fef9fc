"""The options of modelled hardware as a command line gives them, and the server that they describe."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal

from backends.exit_codes import check_least
from loadgen import models
from loadgen.config import (
    LEAST_KV_TOKENS,
    MODELLED,
    SETTINGS,
    ConfigError,
    DtypeOption,
    KvCacheDtypeOption,
    MaxRunningOption,
    MemoryRatioOption,
    ModelledOptions,
    QuantizationOption,
)
from loadgen.option_types import Whole, option
from servers.simulator import hardware
from servers.simulator.build import SCHEDULERS, EmulationError, Setup, newest

MOST_DIGITS = 9  # of a scheduler's setting


@dataclass(frozen=True, kw_only=True)
class Hardware(ModelledOptions):
    """The hardware that the embedded server models: flags as in `run`, or simpler where no server can be started."""

    gpus: Annotated[
        Whole | None, option(MODELLED, "How many of them may be used (default: as many as --tp, else 1).")
    ] = None
    tp: Annotated[
        Whole | None,
        option(MODELLED, "How many share the model (default: the least power of two of --gpus that holds it)."),
    ] = None
    p2p: Annotated[
        bool | None,
        option(
            MODELLED,
            "Directly between GPUs, or all through host memory (default: as usual for this GPU).",
            negative=None,
        ),
    ] = None
    dtype: DtypeOption = "float16"
    quantization: QuantizationOption = None
    kv_cache_dtype: KvCacheDtypeOption = "auto"
    max_running: MaxRunningOption = 1024
    max_batched_tokens: Annotated[
        Whole | None, option(SETTINGS, "Most tokens that a step computes, of prompts at least.")
    ] = None
    max_requests: Annotated[
        Whole, option(SETTINGS, "Most requests that it holds, running or waiting, before it refuses more (tgi).")
    ] = 1024
    memory_ratio: MemoryRatioOption = 0.9
    prefix_caching: Annotated[
        Literal["on", "off"], option(SETTINGS, "Whether it keeps the KV of prompts for later ones that begin alike.")
    ] = "off"

    dummy_weights: Annotated[
        bool,
        option(
            SETTINGS,
            "Weights are random, which makes some routers choose the same experts always.",
            negative="--no-dummy-weights",
        ),
    ] = False

    def setup(self, backend: str, model: str, max_model_len: int) -> Setup:
        """What to emulate. Raises EmulationError for what cannot be."""
        scheduler = self.scheduler or newest(backend)
        if scheduler is None:
            kinds = ", ".join(dict.fromkeys(name.partition("@")[0] for name in SCHEDULERS))
            raise EmulationError(f"a server of kind '{backend}' is not modelled; modelled are {kinds}.")
        if scheduler.partition("@")[0] != backend:
            own = [name for name in SCHEDULERS if name.partition("@")[0] == backend]
            raise EmulationError(
                f"--scheduler {scheduler} is no server of kind '{backend}'; there are {', '.join(own or SCHEDULERS)}."
            )
        try:
            spec = models.find(model).described()
        except ConfigError as error:
            raise EmulationError(str(error)) from None
        self._check()
        if self.gpu is None:
            raise EmulationError(f"name the GPU to model with --gpu; known are {', '.join(hardware.known())}.")
        return Setup(
            scheduler=scheduler, model=spec, gpu=self.gpu, gpus=self.gpus or self.tp or 1, tp=self.tp,
            topology=self._topology(), p2p=self.p2p is not False, dtype=self.dtype, quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype, kv_tokens=self.kv_tokens, max_running=self.max_running,
            max_batched_tokens=self.max_batched_tokens, max_requests=self.max_requests, max_model_len=max_model_len,
            memory_ratio=self.memory_ratio, expert_imbalance=self.expert_imbalance,
            dummy_weights=self.dummy_weights, profile=self.profile,
            prefix_caching=self.prefix_caching == "on",
            options=tuple(_option(text) for text in self.scheduler_arg),
        )  # fmt: skip

    def given(self) -> list[str]:
        """The names of the options that are not at their defaults."""
        fields = dataclasses.fields(self)
        return [field.name.replace("_", "-") for field in fields if getattr(self, field.name) != field.default]

    def _check(self) -> None:
        names = ("tp", "gpus", "max_running", "max_requests", "max_batched_tokens")
        check_least(EmulationError, 1, **{name: getattr(self, name) for name in names})
        check_least(EmulationError, LEAST_KV_TOKENS, kv_tokens=self.kv_tokens)
        if not 0 < self.speed < math.inf:
            raise EmulationError(f"--speed is {self.speed:g}; it must be a number above 0.")
        if not 0 < self.memory_ratio <= 1:
            raise EmulationError(f"--memory-ratio is {self.memory_ratio:g}; it must be above 0 and at most 1.")

    def _topology(self) -> str | None:
        if self.topology is None:
            return hardware.DIRECT if self.p2p else None
        if self.p2p is not None and self.p2p == (self.topology == "host"):
            state = "on" if self.p2p else "off"
            raise EmulationError(f"P2P is {state} and --topology is '{self.topology}', which do not agree; drop one.")
        return self.topology


def _option(text: str) -> tuple[str, int | float]:
    name, _, value = text.partition("=")
    if not name or not re.fullmatch(r"[0-9]+(\.[0-9]+)?", value):
        raise EmulationError(f"--scheduler-arg '{text}' must be NAME=NUMBER, such as max_concurrent_requests=128.")
    whole, point, _ = value.partition(".")
    digits = len(value) - len(point)
    if digits > MOST_DIGITS:
        raise EmulationError(f"--scheduler-arg {name} has {digits} digits; a number may have {MOST_DIGITS}.")
    return name, float(value) if point else int(whole)
