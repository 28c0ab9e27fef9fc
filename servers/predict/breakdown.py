"""The breakdown of a decode step on modelled GPUs: the cost model's own terms, in the form of a measured one.

What the model does not have is not there: no embedding, no all-gather of the logits, sampling only as a share of the
server's software, which counts as idle time of the GPU between steps.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from loadgen import models, rundir
from loadgen.breakdown.tables import (
    AFTER,
    ATTENTION,
    BETWEEN,
    FFN,
    IDLE,
    KINDS,
    PARTS,
    UNASSIGNED,
    StepBreakdown,
    batch_of,
    paper,
)
from loadgen.config import Config, ConfigError
from loadgen.server import embedded, placement
from servers.schedulers import Sequence, Step
from servers.simulator.build import Emulated, emulate
from servers.simulator.cost import Terms
from servers.simulator.options import Hardware
from servers.simulator.virtual import manifest


def modelled(config: Config, preset: str | None, directory: Path, run_id: str) -> StepBreakdown:
    """One decode step of the server and GPUs that the options of `loadgen run` name; writes the manifest. The paper's
    setting fills in what is left open with its preset. Raises ConfigError."""
    if preset is not None:
        config = _as_in_paper(config)
    if config.gpu is None:
        raise ConfigError(
            "name the GPU to model, such as --gpu a800, or start a server: --launch process or --launch docker."
        )
    batch = batch_of(config)
    prompt, reply = config.load.input_tokens.least, config.load.output_tokens.least
    hardware = Hardware(**embedded.modelled(config))
    model = models.find(config.model or "7b")
    length = placement.model_length(config, model, prompt + reply, [])
    emulated = emulate(hardware.setup(config.kind, embedded.model_place(config), length))
    if batch * (prompt + reply) > emulated.kv_tokens:
        raise ConfigError(
            f"{batch} requests of {prompt} + {reply} tokens do not fit into the KV cache of {emulated.kv_tokens} "
            f"tokens; lower --concurrency to {emulated.kv_tokens // (prompt + reply)}, or raise --tp."
        )
    rundir.write_manifest(directory, manifest(config, config.load, emulated, run_id, requests=0))
    return decode_step(emulated, batch, prompt, reply)


def _as_in_paper(config: Config) -> Config:
    """Batch, lengths, server and GPUs of the paper's Table X, where the options are at their defaults."""
    printed, default = paper(), Config()
    setting: dict[str, Any] = {"concurrency": printed.batch, "output_tokens": printed.output_tokens}
    if config.gpu is None:
        setting |= {"backend": "lightllm", "scheduler": "lightllm@2310", "gpu": "a800", "gpus": "8", "tp": "8"}
    open_ = {name: value for name, value in setting.items() if getattr(config, name) == getattr(default, name)}
    return dataclasses.replace(config, **open_)


def decode_step(emulated: Emulated, batch: int, prompt: int, reply: int) -> StepBreakdown:
    """A step in which `batch` requests decode, half of their replies written."""
    context = prompt + reply / 2
    sequences = [Sequence(index, prompt, reply) for index in range(batch)]
    step = Step(emits=sequences, decode_rows=batch, decode_context=round(batch * context))
    terms = emulated.cost.terms(step)
    facts = emulated.facts
    return StepBreakdown(
        emulated=True,
        backend=facts.scheduler,
        model=emulated.setup.model.name,
        hardware=f"{emulated.tp} x {facts.gpu}",
        batch=batch,
        prompt_tokens=prompt,
        context_tokens=context,
        step_ms=emulated.cost(step) * 1000,
        kinds=dict.fromkeys(KINDS, 0.0) | {name: seconds * 1000 for name, seconds in kinds(terms).items()},
        parts=dict.fromkeys(PARTS, 0.0) | {name: seconds * 1000 for name, seconds in parts(terms).items()},
        layers=emulated.setup.model.layers,
        steps=1,
        delimited_by="the cost model",
        form="model",
        notes=(
            *facts.notes,
            "the model has no embedding and no all-gather; sampling is in the server's software, between steps",
            f"where the GPU's numbers come from: {facts.gpu_source}",
            f"how far they are off: {facts.gpu_error}",
        ),
    )


def kinds(terms: Terms) -> dict[str, float]:
    """The terms as rows of Table X, in seconds."""
    return {
        "Element-Wise": terms.gate,
        "RoPE": terms.rope,
        "Attention": terms.attention,
        "GEMM": terms.attention_gemm + terms.mlp_gemm + terms.head,
        "RMSNorm": terms.norms,
        "AllReduce": terms.all_reduce,
        IDLE: terms.waiting + terms.software,
    }


def parts(terms: Terms) -> dict[str, float]:
    """The terms as rows of Table XI, in seconds. One of a layer's two norms and reductions belongs to each block; what
    the GPU waits in layers belongs to neither."""
    return {
        ATTENTION: terms.attention_gemm + terms.attention + terms.rope + (terms.norms + terms.all_reduce) / 2,
        FFN: terms.mlp_gemm + terms.gate + (terms.norms + terms.all_reduce) / 2,
        AFTER: terms.head,
        BETWEEN: terms.software,
        UNASSIGNED: terms.waiting,
    }
