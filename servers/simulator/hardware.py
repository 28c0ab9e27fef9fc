"""The GPUs that can be modelled: those of `servers/data/gpus.json`, or one that a file of the same form describes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from backends.exit_codes import UserError
from backends.untrusted import printable, read_json
from servers.simulator.cost import GpuLink, GpuSpec

DATA = Path(__file__).parents[1] / "data"
LEAST_SOFTNESS = 0.1  # of a roofline; below, a sum of two equal times is over a thousand times one
TOPOLOGIES = {
    "nvlink": "every GPU reaches every other over NVLink",
    "nvlink-pairs": "NVLink bridges join GPUs in pairs, the rest is PCIe",
    "pcie": "GPUs reach each other over PCIe (P2P)",
    "host": "GPUs reach each other through host memory (P2P off)",
}
LINKS = (*TOPOLOGIES, "nvlink-pair")  # the last: one bridge, so a part of nvlink-pairs where two are all
DIRECT = "direct"  # for `link`: the first that is not through host memory


class HardwareError(UserError):
    """A GPU or a way to join GPUs that is not known. One sentence."""


@functools.cache
def known() -> dict[str, GpuSpec]:
    return msgspec.json.decode((DATA / "gpus.json").read_bytes(), type=dict[str, GpuSpec])


def find(name: str) -> GpuSpec:
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
    examples = f"; {DATA / 'gpus.json'} holds examples"
    gpu = read_json(name, GpuSpec, HardwareError, "does not describe a GPU", examples)
    wrong = next(_wrong(gpu), None)
    if wrong:
        raise HardwareError(f"{name} does not describe a GPU: {wrong}{examples}.")
    return gpu


def _wrong(gpu: GpuSpec) -> Iterator[str]:
    """What no GPU can be like."""
    if not gpu.name.isprintable():
        yield f"name is '{printable(gpu.name)}' and must be of characters that print"
    yield from _not_positive("", gpu, ("flops", "memory_bytes_per_s", "memory_bytes"))
    gemms = {"gemm": gpu.gemm} | {f"gemms.{dtype}": fit for dtype, fit in gpu.gemms.items()}
    attentions = {"attention": gpu.attention} | {f"attentions.{dtype}": fit for dtype, fit in gpu.attentions.items()}
    attentions |= {} if gpu.latent is None else {"latent": gpu.latent}
    rows = {f"{part}.{name}": getattr(fit, name) for part, fit in attentions.items() for name in ("decode", "mixed")}
    for part, fit in {**gemms, **attentions, **rows, "elementwise": gpu.elementwise}.items():
        names = [name for name, value in msgspec.structs.asdict(fit).items() if isinstance(value, float)]
        times = [name for name in names if name.endswith(("_us", "_ns"))]
        yield from _not_positive(f"{part}.", fit, [name for name in names if name not in times])
        yield from _not_positive(f"{part}.", fit, times, or_zero=True)
    for part, fit in gemms.items():
        if not all(0 < ratio < math.inf for _, ratio in fit.narrow):
            yield f"{part}.narrow has a ratio that is not above 0"
        if fit.waves is not None:
            yield from _not_positive(f"{part}.waves.", fit.waves, ["processors"])
            yield from _not_positive(f"{part}.waves.", fit.waves, ["idle"], or_zero=True)
        if fit.softness < LEAST_SOFTNESS:
            yield f"{part}.softness is {fit.softness:g} and must be at least {LEAST_SOFTNESS:g}"
    if gpu.boost is not None:
        yield from _not_positive("boost.", gpu.boost, ("ratio", "most_ms", "refill_ms"))
        if gpu.boost.ratio <= 1:
            yield f"boost.ratio is {gpu.boost.ratio:g} and must be above 1"
    for name, each in gpu.links.items():
        if name not in LINKS:
            yield f"there is no link '{printable(name)}', there are {', '.join(LINKS)}"
        yield from _wrong_link(f"links.{name}", each)


def _wrong_link(name: str, link: GpuLink) -> Iterator[str]:
    if link.pair is not None:
        yield from _wrong_link(f"{name}.pair", link.pair)
    if not (link.bytes or link.us):
        if not link.beta_bytes_per_s < math.inf:
            yield f"{name} has neither a table nor beta_bytes_per_s"
        yield from _not_positive(f"{name}.", link, ["beta_bytes_per_s"])
        yield from _not_positive(f"{name}.", link, ["alpha_us", "gamma_us"], or_zero=True)
        return
    if len(link.bytes) != len(link.us):
        yield f"{name} has {len(link.bytes)} bytes and {len(link.us)} us"
    if link.ranks < 2:
        yield f"{name}.ranks is {link.ranks} and must be at least 2, of which the table is"
    if any(a >= b for a, b in itertools.pairwise((0, *link.bytes))):
        yield f"{name}.bytes must be above 0 and rise"
    if not all(0 < us < math.inf for us in link.us):
        yield f"{name}.us must be above 0"


def _not_positive(where: str, part: msgspec.Struct, names: Iterable[str], or_zero: bool = False) -> Iterator[str]:
    for name in names:
        value = getattr(part, name)
        if not (0 < value < math.inf or (or_zero and value == 0)):
            yield f"{where}{name} is {value:g} and must be {'at least' if or_zero else 'above'} 0"


def link(gpu: GpuSpec, tp: int, topology: str | None, p2p: bool) -> tuple[str, GpuLink | None]:
    """How `tp` of them are joined, and what a reduction costs there; the first that its data names where `topology` is
    None: what such a machine usually has. Raises HardwareError."""
    if tp == 1:
        return "none", None
    links = _links(gpu, tp)
    if not links:
        raise HardwareError(f"it is not known how {gpu.name} are joined, so that --tp must be 1.")
    if not p2p:
        topology = "host"
    elif topology is None:
        topology = next(iter(links))
    elif topology == DIRECT:
        topology = next((name for name in links if name != "host"), None)
        if topology is None:
            raise HardwareError(f"{gpu.name} is not known to have P2P among {tp}; leave --p2p on out.")
    if topology not in links:
        has = ", ".join(name for name in TOPOLOGIES if name in links)
        raise HardwareError(f"{gpu.name} is not known to be joined by '{topology}'; known are {has}.")
    return topology, links[topology]


def _links(gpu: GpuSpec, tp: int) -> dict[str, GpuLink]:
    """By topology, in the data's order. Two GPUs may be a pair that one bridge joins."""
    links = {name: each for name, each in gpu.links.items() if name in TOPOLOGIES}
    if tp == 2 and "nvlink-pair" in gpu.links:
        links["nvlink-pairs"] = gpu.links["nvlink-pair"]
    return links
