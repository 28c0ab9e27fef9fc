"""The GPUs that can be modelled: those of `servers/data/gpus.json`, or one that a file of the same form describes."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec

from servers.cost import Gpu, Link

DATA = Path(__file__).parent / "data"
TOPOLOGIES = {
    "nvlink": "every GPU reaches every other over NVLink",
    "nvlink-pairs": "NVLink bridges join GPUs in pairs, the rest is PCIe",
    "pcie": "GPUs reach each other over PCIe (P2P)",
    "host": "GPUs reach each other through host memory (P2P off)",
}


class HardwareError(Exception):
    """A GPU or a way to join GPUs that is not known. One sentence."""


@functools.cache
def known() -> dict[str, Gpu]:
    return msgspec.json.decode((DATA / "gpus.json").read_bytes(), type=dict[str, Gpu])


def find(name: str) -> Gpu:
    """The GPU of that name, or the one that the JSON file of that name describes. Raises HardwareError."""
    wanted = name.lower()
    for key, gpu in known().items():
        if wanted in (key, gpu.name.lower(), *gpu.aliases):
            return gpu
    if not name.endswith(".json"):
        raise HardwareError(
            f"there is no GPU '{name}' here; known are {', '.join(known())}. Describe another in a file NAME.json with "
            f"the keys of an entry of {DATA / 'gpus.json'}, and name that file."
        )
    try:
        return msgspec.json.decode(Path(name).read_bytes(), type=Gpu)
    except OSError as error:
        raise HardwareError(f"cannot read {name}: {error.strerror or error}.") from None
    except msgspec.DecodeError as error:
        raise HardwareError(f"{name} does not describe a GPU: {error}; {DATA / 'gpus.json'} holds examples.") from None


def link(gpu: Gpu, tp: int, topology: str | None, p2p: bool) -> tuple[str, Link | None]:
    """How `tp` of them are joined, and what a reduction costs there; the first that its data names when nothing is
    said: what such a machine usually has. Raises HardwareError."""
    if tp == 1:
        return "none", None
    if not p2p:
        topology = "host"
    elif topology is None:
        topology = next(name for name in gpu.links if name in TOPOLOGIES)
    if not _has(gpu, topology):
        has = ", ".join(name for name in TOPOLOGIES if _has(gpu, name))
        raise HardwareError(f"{gpu.name} is not known to be joined by '{topology}'; known are {has}.")
    if topology == "nvlink-pairs" and tp == 2:
        return topology, gpu.links["nvlink-pair"]
    return topology, gpu.links[topology]


def _has(gpu: Gpu, topology: str) -> bool:
    return topology in gpu.links
