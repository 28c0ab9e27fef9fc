"""What a process uses besides time: its device, memory of that, energy of its GPU."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def own_device(kind: str) -> torch.device:
    """This rank's GPU; or the CPU, of which each rank has its share (training_probe.launch.torchrun)."""
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def nccl_version(device: torch.device) -> dict[str, str]:
    """By its name, where torch has it on this device."""
    if device.type != "cuda" or not torch.cuda.nccl.is_available([torch.empty(1, device=device)]):
        return {}
    return {"NCCL": ".".join(map(str, torch.cuda.nccl.version()))}


class Memory:
    """Peaks from now on: of torch's allocator on a GPU; on the CPU, which has no such counters, of the process's
    resident memory, and of what that has grown by since `base_bytes`."""

    def __init__(self, device: torch.device, base_bytes: int = 0) -> None:
        self._cuda, self._base = device.type == "cuda", base_bytes
        if self._cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.total_bytes: int | None = torch.cuda.get_device_properties(device).total_memory
            return
        self.total_bytes = None
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5")  # VmHWM begins anew

    def peaks(self) -> tuple[int | None, int | None]:
        """Bytes allocated and reserved."""
        if self._cuda:
            return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        resident = resident_bytes("VmHWM")
        return (None, None) if resident is None else (max(0, resident - self._base), resident)


def resident_bytes(field: str = "VmRSS") -> int | None:
    """This process's resident memory, or its peak (VmHWM); None where there is no /proc."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":")), None)


class Energy:
    """Joules of this rank's GPU by NVML's counter, which moves every few tens of milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self._handle: Any = None
        self._start_mj: int | None = None
        if device.type != "cuda":
            return
        with contextlib.suppress(Exception):  # no NVML, no counter: then there is no energy to tell
            import pynvml

            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")

    def start(self) -> None:
        self._start_mj = self._now_mj()

    def stop(self) -> float | None:
        end_mj = self._now_mj()
        return None if end_mj is None or self._start_mj is None else (end_mj - self._start_mj) / 1000

    def _now_mj(self) -> int | None:
        if self._handle is None:
            return None
        import pynvml

        with contextlib.suppress(pynvml.NVMLError):
            return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        return None
