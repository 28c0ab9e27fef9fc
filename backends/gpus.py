"""The GPUs of this machine, through NVML: which there are, which pairs may read each other's memory (P2P), what each is
using now, what holds its clocks back, which processes are on it; and whether a server's GPUs are to use P2P.

An index is NVML's: the order of the PCI bus, that of `nvidia-smi` and `docker --gpus`. Where NVML gives no answer the
value is None (for words: "unknown"); no question to it raises. `pynvml` is imported only when it is asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from backends.exit_codes import UserError, lacking

P2pMode = Literal["auto", "on", "off"]

_OK = "ok"
UNKNOWN = "unknown"

# RTX 40 cards have no P2P, but drivers before this one said that they had: copies hung, or moved nothing.
_RTX_40 = re.compile(r"RTX 40[5-9]0")  # not the Quadro RTX 4000
_RTX_40_TRUTHFUL_DRIVER = "550.40.07"

# nvmlGpuP2PCapsIndex. Literals, because pynvml's own NVML_P2P_CAPS_INDEX_READ is a tuple by mistake.
_READ, _WRITE, _NVLINK = 0, 1, 2
_P2P_STATUS = (
    _OK,
    "chipset not supported",
    "GPU not supported",
    "topology not supported",
    "disabled by registry key",
    "not supported",
    UNKNOWN,
)

_INIT_PROBLEMS = {
    9: "the NVIDIA driver is not loaded",
    12: "no NVIDIA driver",  # its library, libnvidia-ml, is not installed
    18: "the NVIDIA driver was updated since it was loaded, which takes a reboot",
}


# NVML_PERF_POLICY_..., NVML_CLOCK_SM, and the bits of nvmlClocksEventReason...
_POWER, _THERMAL, _SM = 0, 1, 1
CLOCK_REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
SLOWDOWNS = ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")


def has_driver() -> bool:
    """Whether this machine seems to have an NVIDIA driver, as far as that shows without NVML."""
    return Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None


def _has_library() -> bool:
    """Whether NVML itself can be loaded, as pynvml would load it on Linux."""
    if sys.platform != "linux":
        return True
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


class GpuError(UserError, ValueError):
    """GPUs were asked for that cannot be had. One sentence."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One card. used_bytes: by anyone, when it was read; a part of it is the driver's own. power_limit_w: what it is
    held to now."""

    index: int
    name: str
    uuid: str
    memory_bytes: int | None
    used_bytes: int | None
    power_limit_w: float | None = None


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """What NVML says of this machine.

    driver, cuda: the driver's version and the CUDA version that it supports ("13.0"). p2p, nvlink: a row for the GPU
    that acts and a column for its peer, in the order of `gpus`; p2p is "ok" when it may read and write, else NVML's
    reason, and "self" on the diagonal. problem: why there are no GPUs, or which one is missing; a clause.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    p2p: tuple[tuple[str, ...], ...] = ()
    nvlink: tuple[tuple[bool, ...], ...] = ()
    problem: str | None = None


class P2pDecision(msgspec.Struct, frozen=True):
    """Whether GPUs are to use P2P, and why; the reason is a clause."""

    enabled: bool
    reason: str


class GpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU at one moment; None where it cannot tell.

    utilization_ratio: part of the last moments in which any kernel ran, 0..1. power_w: the board's, on most cards the
    mean of a second. energy_mj: a counter since the driver was loaded. thermal_ns, power_ns, clock_reasons: as of
    `Clocks`. processes: that compute on it, by their numbers.
    """

    index: int
    memory_used_bytes: int | None
    power_w: float | None
    utilization_ratio: float | None
    energy_mj: int | None
    thermal_ns: int | None = None
    power_ns: int | None = None
    clock_reasons: int = 0
    processes: list[int] | None = None


class Clocks(NamedTuple):
    """What holds a GPU's clocks back. thermal_ns, power_ns: how long heat, and the power limit, have since its driver
    was loaded, which not every driver counts. reasons: NVML's bits, of this moment; sm_ratio: of its highest clock,
    likewise."""

    thermal_ns: int | None = None
    power_ns: int | None = None
    reasons: int = 0
    sm_ratio: float | None = None


def clocks(handle: Any) -> Clocks:
    """Of a GPU by its handle, where NVML is open. Never raises."""
    import pynvml

    def asked(what: str, *arguments: Any) -> Any:
        with contextlib.suppress(pynvml.NVMLError, AttributeError):
            return getattr(pynvml, "nvmlDevice" + what)(handle, *arguments)
        return None

    # Drivers before 535 know the reasons by an older name. They come first: they are those of this moment.
    reasons = asked("GetCurrentClocksEventReasons")
    if reasons is None:
        reasons = asked("GetCurrentClocksThrottleReasons")
    now, most = asked("GetClockInfo", _SM), asked("GetMaxClockInfo", _SM)
    thermal, power = (asked("GetViolationStatus", policy) for policy in (_THERMAL, _POWER))
    return Clocks(
        thermal_ns=None if thermal is None else int(thermal.violationTime),
        power_ns=None if power is None else int(power.violationTime),
        reasons=int(reasons or 0),
        sm_ratio=float(now / most) if now is not None and most else None,
    )


def reason_names(reasons: int) -> tuple[str, ...]:
    """NVML's names of the bits that are set."""
    return tuple(name for bit, name in CLOCK_REASONS.items() if reasons & bit)


def read() -> Inventory:
    """The GPUs that are here now; without any, `problem` says why. Never raises."""
    try:
        nvml = _Nvml()
    except _NoNvmlError as absent:
        return Inventory(problem=str(absent))
    try:
        return _read(nvml)
    finally:
        nvml.close()


def choose(
    inventory: Inventory, ids: Sequence[str] | None, *, environ: Mapping[str, str] = os.environ
) -> tuple[int, ...]:
    """Indices of the GPUs that `ids` names, in that order: an index ("0"), a UUID ("GPU-..."), or its unique beginning.

    None means all of them, or those in CUDA_VISIBLE_DEVICES where that is set, because CUDA sees no others, though NVML
    does. Its numbers are taken in NVML's order (CUDA_DEVICE_ORDER=PCI_BUS_ID); as for CUDA, -1 ends the list. Ids that
    are given outweigh it. Raises GpuError.
    """
    if ids is not None:
        return _find(inventory, ids)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not inventory.gpus:
        return tuple(gpu.index for gpu in inventory.gpus)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if "-1" in names:
        names = names[: names.index("-1")]
    try:
        return _find(inventory, names)
    except GpuError as error:
        raise GpuError(f"CUDA_VISIBLE_DEVICES is {visible!r}, but {error}") from None


def decide_p2p(mode: P2pMode, inventory: Inventory, chosen: Sequence[int]) -> P2pDecision:
    """Whether the `chosen` GPUs (indices) are to use P2P. `auto`: when NVML says that each may read and write each
    other's memory, and the driver can be believed. Asked for, it is on even against that, and the reason says so."""
    if mode == "off":
        return P2pDecision(False, "asked for with --p2p off")
    doubt = _doubt(inventory, chosen) if len(chosen) > 1 else None
    if mode == "on":
        return P2pDecision(True, "asked for with --p2p on" + (f", although {doubt}" if doubt else ""))
    if len(chosen) < 2:
        return P2pDecision(True, "one GPU: nothing to decide" if chosen else "no GPU here to ask")
    if doubt:
        return P2pDecision(False, doubt)
    place = _places(inventory)
    linked = all(inventory.nvlink[place[a]][place[b]] for a, b in permutations(chosen, 2))
    return P2pDecision(True, "every pair reports P2P" + (" over NVLink" if linked else ""))


class GpuProbe:
    """Reads memory, power, utilization and energy of some GPUs (indices), again and again. Never raises: without NVML,
    or for a GPU that is not there or has been lost, every value is None."""

    def __init__(self, indices: Sequence[int]) -> None:
        self._nvml: _Nvml | None = None
        with contextlib.suppress(_NoNvmlError):
            self._nvml = _Nvml()
        self._handles = [(index, self._query("DeviceGetHandleByIndex", index)) for index in indices]

    def sample(self) -> list[GpuSample]:
        """One GpuSample per GPU, in the order of the indices."""
        return [self._sample(index, handle) for index, handle in self._handles]

    def close(self) -> None:
        """Lets go of NVML; what is sampled afterwards is all None. May be called again."""
        if self._nvml is not None:
            self._nvml.close()
            self._nvml = None

    def _sample(self, index: int, handle: Any) -> GpuSample:
        memory = self._query("DeviceGetMemoryInfo", handle)
        power_mw = self._query("DeviceGetPowerUsage", handle)
        utilization = self._query("DeviceGetUtilizationRates", handle)
        held = Clocks() if self._nvml is None or handle is None else clocks(handle)
        processes = self._query("DeviceGetComputeRunningProcesses", handle)
        return GpuSample(
            index=index,
            memory_used_bytes=None if memory is None else memory.used,
            power_w=None if power_mw is None else power_mw / 1000,
            utilization_ratio=None if utilization is None else utilization.gpu / 100,
            energy_mj=self._query("DeviceGetTotalEnergyConsumption", handle),
            thermal_ns=held.thermal_ns,
            power_ns=held.power_ns,
            clock_reasons=held.reasons,
            processes=None if processes is None else sorted(each.pid for each in processes),
        )

    def _query(self, what: str, argument: Any) -> Any:
        if self._nvml is None or argument is None:
            return None
        return self._nvml.query(what, argument)


class _NoNvmlError(Exception):
    """NVML cannot be used; the message is a clause that says why."""


class _Nvml:
    """NVML, opened until `close`. NVML counts who has it open, so several may at once. Raises _NoNvmlError."""

    def __init__(self) -> None:
        if (why := lacking("pynvml")) is not None:
            raise _NoNvmlError(why if has_driver() else _INIT_PROBLEMS[12])
        if "pynvml" not in sys.modules and not _has_library():  # the import takes 70 ms of CPU
            raise _NoNvmlError(_INIT_PROBLEMS[12])
        import pynvml

        self.module = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise _NoNvmlError(_INIT_PROBLEMS.get(error.value, f"NVML did not start: {error}")) from None

    def query(self, what: str, *arguments: Any) -> Any:
        """What the NVML function `nvml<what>` returns; None for any error, because no one value is worth a run."""
        try:
            return getattr(self.module, "nvml" + what)(*arguments)
        except (self.module.NVMLError, AttributeError):  # an old pynvml has fewer functions
            return None

    def words(self, what: str, *arguments: Any) -> str | None:
        """As `query`, for text, which old versions of pynvml give as bytes."""
        value = self.query(what, *arguments)
        if isinstance(value, bytes):
            return value.decode(errors="replace")
        return None if value is None else str(value)

    def close(self) -> None:
        self.query("Shutdown")


def _read(nvml: _Nvml) -> Inventory:
    handles: dict[int, Any] = {}
    problem = None
    for index in range(nvml.query("DeviceGetCount") or 0):
        try:
            handles[index] = nvml.module.nvmlDeviceGetHandleByIndex(index)
        except nvml.module.NVMLError as error:  # fallen off the bus, or not ours to use
            problem = problem or f"GPU {index} cannot be used: {error}"
    if not handles:
        problem = problem or "the NVIDIA driver finds no GPU"
    cuda = nvml.query("SystemGetCudaDriverVersion")
    return Inventory(
        gpus=tuple(_gpu(nvml, index, handle) for index, handle in handles.items()),
        driver=nvml.words("SystemGetDriverVersion"),
        cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        p2p=tuple(tuple(_p2p(nvml, a, b) for b in handles.values()) for a in handles.values()),
        nvlink=tuple(
            tuple(a is not b and nvml.query("DeviceGetP2PStatus", a, b, _NVLINK) == 0 for b in handles.values())
            for a in handles.values()
        ),
        problem=problem,
    )


def _gpu(nvml: _Nvml, index: int, handle: Any) -> Gpu:
    memory, limit_mw = nvml.query("DeviceGetMemoryInfo", handle), nvml.query("DeviceGetEnforcedPowerLimit", handle)
    return Gpu(
        index=index,
        name=nvml.words("DeviceGetName", handle) or UNKNOWN,
        uuid=nvml.words("DeviceGetUUID", handle) or UNKNOWN,
        memory_bytes=None if memory is None else memory.total,
        used_bytes=None if memory is None else memory.used,
        power_limit_w=None if limit_mw is None else limit_mw / 1000,
    )


def _p2p(nvml: _Nvml, a: Any, b: Any) -> str:
    if a is b:
        return "self"
    for direction in (_READ, _WRITE):
        status = nvml.query("DeviceGetP2PStatus", a, b, direction)
        if status is None or not 0 <= status < len(_P2P_STATUS):
            return UNKNOWN
        if _P2P_STATUS[status] != _OK:
            return _P2P_STATUS[status]
    return _OK


def _doubt(inventory: Inventory, chosen: Sequence[int]) -> str | None:
    """Why several GPUs should not use P2P, a clause; None when they may."""
    place = _places(inventory)
    for index in chosen:
        if index not in place:
            return f"NVML does not know GPU {index}" + (f" ({inventory.problem})" if inventory.problem else "")
    for index in chosen:
        name = inventory.gpus[place[index]].name
        if _RTX_40.search(name) and _numbers(inventory.driver) < _numbers(_RTX_40_TRUTHFUL_DRIVER):
            return (
                f"drivers before {_RTX_40_TRUTHFUL_DRIVER} misreport P2P on RTX 40 cards; "
                f"GPU {index} is an {name}, the driver {inventory.driver or UNKNOWN}"
            )
    for a, b in permutations(chosen, 2):
        status = inventory.p2p[place[a]][place[b]]
        if status != _OK:
            return f"NVML says of P2P from GPU {a} to GPU {b}: {status}"
    return None


def _places(inventory: Inventory) -> dict[int, int]:
    """Where each index is in the tuples of the inventory; not the same when a GPU is missing."""
    return {gpu.index: place for place, gpu in enumerate(inventory.gpus)}


def _numbers(version: str | None) -> tuple[int, ...]:
    """A version as numbers to compare, 550.9 before 550.40; () when unknown, which is before all."""
    leading = re.match(r"\d+(\.\d+)*", version or "")
    return tuple(int(number) for number in leading.group().split(".")) if leading else ()


def _find(inventory: Inventory, ids: Sequence[str]) -> tuple[int, ...]:
    chosen: list[int] = []
    for name in map(str.strip, ids):
        if name.isdecimal():
            matches = [gpu.index for gpu in inventory.gpus if gpu.index == int(name)]
        elif name.upper().startswith("GPU-"):
            matches = [gpu.index for gpu in inventory.gpus if gpu.uuid.lower().startswith(name.lower())]
        else:
            matches = []
        if not matches:
            raise GpuError(f"there is no GPU {name or repr(name)} here; {_here(inventory)}.")
        if len(matches) > 1:
            raise GpuError(f"{name} is the beginning of several GPUs' UUIDs; give all of it.")
        if matches[0] in chosen:
            raise GpuError(f"GPU {matches[0]} is named twice; name each GPU once.")
        chosen += matches
    return tuple(chosen)


def _here(inventory: Inventory) -> str:
    indices = [gpu.index for gpu in inventory.gpus]
    missing = f" ({inventory.problem})" if inventory.problem else ""
    if not indices:
        return f"there is none at all{missing}"
    if len(indices) == 1:
        return f"there is only GPU {indices[0]}{missing}"
    if len(indices) > 2 and indices[-1] - indices[0] == len(indices) - 1:
        return f"there are {indices[0]} to {indices[-1]}{missing}"
    return f"there are {', '.join(map(str, indices[:-1]))} and {indices[-1]}{missing}"
