"""In which number formats a GPU multiplies, by its name, and what vLLM does with weights in a format that it lacks."""

from __future__ import annotations

from backends.decoder import QUANTIZATIONS

# Without tensor cores for 8-bit floats (before Ada), and those that have them for 4-bit ones: NVIDIA's white papers of
# Ampere (GA100, GA102), Ada, Hopper and Blackwell.
WITHOUT_FP8 = ("v100", "t4", "a100", "a800", "a30", "a40", "a10", "a16", "a2", "a6000", "3090", "3080", "3070", "3060")
WITH_FP4 = ("b100", "b200", "b300", "gb200", "gb300", "blackwell", "5090", "5080", "5070")

# What a GPU may be asked to serve a model of 16 bit in. awq stands for gptq too: both are modelled alike.
CHOICES = ("fp8", "int8", "awq", "nvfp4")


def computes(gpu: str, wanted: str | None) -> str | None:
    """The format of the products on a GPU of that name with weights that want this one; None: 16 bit, from weights that
    are widened first (vLLM's Marlin kernels). An unnamed GPU is taken to be of the generation of Ada or Hopper."""
    words = set(gpu.lower().replace("-", " ").replace("_", " ").split())
    if wanted == "fp8" and not words.isdisjoint(WITHOUT_FP8):
        return None
    if wanted == "nvfp4" and words.isdisjoint(WITH_FP4):
        return None
    return wanted


def refused(gpu: str, wanted: str | None) -> bool:
    """vLLM has no 8-bit integer products for Blackwell, and does not start."""
    return wanted == "int8" and computes(gpu, "nvfp4") is not None


def choices(gpu: str) -> list[str]:
    """Those formats that make sense on a GPU of that name: it multiplies in them, or none does (awq)."""
    wants = {name: QUANTIZATIONS[name].computes for name in CHOICES}
    return [name for name, wanted in wants.items() if computes(gpu, wanted) == wanted and not refused(gpu, wanted)]
