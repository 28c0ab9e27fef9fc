"""Cells of the training grid. Pure: nothing is imported, read or started here.

A cell is one training configuration: a model, an engine, the paper's method letters, sizes. Letters that contradict
each other make no cell (GridError); a cell that is well formed but cannot be run has a reason
(`refusals`), and becomes a row of the results with that reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, Literal, Protocol, get_args

import msgspec

from backends import catalog
from backends.decoder import ModelSpec
from backends.exit_codes import UserError, check_least
from loadgen.load import lengths as laws
from training_probe.llama_shape import LlamaShape
from training_probe.packing import StepBatch, draw

Task = Literal["pretrain", "finetune", "dpo", "grpo"]
Engine = str  # one of ENGINES, or a trial of the user's own (training_probe.trials)
AttentionKernel = Literal["eager", "math", "flash"]
Recompute = Literal["none", "full", "selective"]
Adapter = Literal["L", "QL", "PT"]
AdapterDtype = Literal["bf16", "fp32"]
Device = Literal["cuda", "cpu"]
Loss = Literal["plain", "chunked", "liger"]
Optim = Literal["adamw", "adamw-8bit", "paged-adamw-8bit", "muon"]
States = Literal["fp32", "bf16-stochastic", "bf16-kahan"]

ENGINES: tuple[Engine, ...] = ("deepspeed", "megatron", "fsdp2", "ddp")
PAPER_SEQ_LEN = 350
LORA_RANK, LORA_ALPHA = 64, 16
# What LoRA adapts, by the names that transformers has for linear layers.
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Where q, k and v, or gate and up, are one linear layer; adapted by default like the others.
FUSED_TARGETS = ("qkv_proj", "gate_up_proj")
QKV_TOGETHER, GATE_WITH_UP = ("phi3",), ("glm", "glm4", "phi3")
# Where PEFT 0.21 adapts all experts of a layer as two tensors under these names, and no other MLP.
EXPERTS_ADAPTED, OF_EXPERTS = (
    ("qwen3_moe", "glm4_moe", "deepseek_v2", "deepseek_v3", "kimi_k2"), {"gate_proj", "up_proj", "down_proj"}
)  # fmt: skip
PROMPT_TOKENS = 8
PAPER_MAX_MICRO_BATCH = 64
LOSS_CHUNKS = 8  # of the tokens of a micro batch, with --loss chunked; torchtune's number

LETTERS = {
    "Z1": "ZeRO 1: optimizer states sharded",
    "Z2": "ZeRO 2: gradients too",
    "Z3": "ZeRO 3: parameters too",
    "O": "offload to the CPU: optimizer with Z1 and Z2, optimizer and parameters with Z3",
    "OO": "offload of the optimizer alone, with Z3",
    "Q": "4-bit weights, frozen; embeddings, norms and the head train",
    "R": "recompute: activations of a layer are computed again in the backward pass",
    "RS": "selective recompute: only attention is computed again",
    "F": "FlashAttention",
    "L": f"LoRA, of rank {LORA_RANK} where --lora-rank names no other",
    "QL": "QLoRA: LoRA over 4-bit weights",
    "PT": f"prompt tuning with {PROMPT_TOKENS} virtual tokens",
}
NAIVE = "Naive"
# What people type who do not know the letters, without case, spaces and dashes.
WORDS = {
    "LORA": "L", "QLORA": "QL", "PROMPTTUNING": "PT", "ZERO1": "Z1", "ZERO2": "Z2", "ZERO3": "Z3", "OFFLOAD": "O",
    "OFFLOADOPTIMIZER": "OO",
    "FLASH": "F", "FLASHATTENTION": "F", "FA": "F", "FA2": "F", "CHECKPOINTING": "R", "GRADIENTCHECKPOINTING": "R",
    "RECOMPUTE": "R", "RECOMPUTATION": "R", "SELECTIVE": "RS", "QUANTIZATION": "Q", "INT4": "Q", "NF4": "Q",
    "4BIT": "Q", "FULL": NAIVE, "DDP": f"{NAIVE} with --engine ddp", "FSDP": "Z3 with --engine fsdp2",
    "FSDP2": "Z3 with --engine fsdp2", "DEEPSPEED": "Z1, Z2 or Z3", "MEGATRON": f"{NAIVE} with --engine megatron",
}  # fmt: skip


class GridError(UserError, ValueError):
    """Options that make no cell. One sentence: what is wrong and what to do."""


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """The paper's letters, taken apart. `zero`: stage, 0 for none. `optimizer_alone`: of
    what is offloaded. `quantized`: Q, without an adapter."""

    zero: int = 0
    offload: bool = False
    optimizer_alone: bool = False
    quantized: bool = False
    recompute: Recompute = "none"
    flash: bool = False
    adapter: Adapter | None = None

    @classmethod
    def parse(cls, text: str) -> Method:
        """The method of letters joined by `+`, in any order and case; `Naive` has none. Raises GridError."""
        letters = [] if text.strip().lower() == NAIVE.lower() else [part.strip().upper() for part in text.split("+")]
        for letter in letters:
            if letter not in LETTERS:
                meant = WORDS.get(re.sub(r"[^A-Z0-9]", "", letter))
                raise GridError(
                    f"unknown letter '{letter}' in method '{text}'; "
                    + (f"say {meant}." if meant else f"known are {NAIVE}, {', '.join(LETTERS)}.")
                )
            if letters.count(letter) > 1:
                raise GridError(f"method '{text}' names {letter} twice; name it once.")
        for rivals in (
            ("Z1", "Z2", "Z3"),
            ("L", "QL", "PT"),
            ("R", "RS"),
            ("O", "OO"),
            ("Q", "QL"),
            ("Q", "L"),
            ("Q", "PT"),
        ):
            both = [letter for letter in rivals if letter in letters]
            if len(both) > 1:
                raise GridError(f"method '{text}' is a contradiction: {both[0]} and {both[1]} exclude each other.")
        zero = next((int(letter[1]) for letter in letters if letter[0] == "Z"), 0)
        if "O" in letters and not zero:
            raise GridError(f"method '{text}' offloads without ZeRO; add Z1, Z2 or Z3 to O.")
        if "OO" in letters and zero != 3:
            raise GridError(f"method '{text}' has OO without Z3; with Z1 and Z2 the optimizer alone is offloaded by O.")
        return cls(
            zero=zero,
            offload="O" in letters or "OO" in letters,
            optimizer_alone="OO" in letters,
            quantized="Q" in letters,
            recompute="full" if "R" in letters else "selective" if "RS" in letters else "none",
            flash="F" in letters,
            adapter=next((letter for letter in get_args(Adapter) if letter in letters), None),
        )

    @property
    def offloads_parameters(self) -> bool:
        """As DeepSpeed has it; FSDP2 offloads both or none."""
        return self.zero == 3 and self.offload and not self.optimizer_alone

    @property
    def four_bit(self) -> bool:
        """Whether the linear layers of the decoder are stored in 4 bits."""
        return self.quantized or self.adapter == "QL"

    @property
    def has_lora(self) -> bool:
        return self.adapter in ("L", "QL")

    @property
    def task(self) -> Task:
        """What it is for, where --task is not given."""
        return "finetune" if self.adapter else "pretrain"

    def __str__(self) -> str:
        letters = (
            self.adapter,
            "Q" if self.quantized else None,
            "F" if self.flash else None,
            {"none": None, "full": "R", "selective": "RS"}[self.recompute],
            f"Z{self.zero}" if self.zero else None,
            "OO" if self.optimizer_alone else "O" if self.offload else None,
        )
        return "+".join(letter for letter in letters if letter) or NAIVE


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One training configuration. Sizes are per process where they say so.

    gpus: processes, one a GPU (on the CPU: one process each). micro_batch: sequences a process takes at once, None: the
    largest that fits is searched; in dpo it counts pairs. tp, pp, cp, ep: how many GPUs share a layer (Megatron,
    FSDP2), the layers (Megatron), a sequence (FSDP2), a layer's experts (FSDP2; each has sequences of its own).
    attention: `flash` with the letter F, else `eager` as in the paper, or SDPA's `math`.

    Methods that came after the paper are options. lora_rank, lora_alpha, lora_targets, adapter_dtype, dora: of L, QL.
    double_quant: whether the scales of 4-bit weights are quantized as well. checkpoint: activation checkpointing in
    torchtitan's sense, `op` or the number of layers of which one is recomputed; empty: as the letters R and RS have it.
    dp_replicate: how many groups of GPUs each hold a whole sharded replica (HSDP). fp8: products of layers, torchao.
    lengths: a law of the sequences' lengths, each cut at seq_len; empty: all are seq_len. packing: those sequences are
    put into rows of seq_len, and a micro batch is so many rows; else each is padded to the longest of its micro batch.
    optim: what updates; adamw_8bit says so of one of them, as files of before have it. states: of fsdp2, what its
    weights and moments are kept in, and in bf16 how a step too small for it is not lost.
    rollout_gb: GiB that grpo's engine of rollouts takes of each GPU; None: its weights and the keys of a micro batch.
    """

    model: str
    task: Task = "pretrain"
    engine: Engine = "deepspeed"
    method: str = NAIVE  # canonical: str(Method)
    gpus: int = 1
    seq_len: int = PAPER_SEQ_LEN
    micro_batch: int | None = 1
    grad_accum: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    attention: AttentionKernel = "eager"
    compile: bool = False
    device: Device = "cuda"
    lora_rank: int = LORA_RANK
    lora_alpha: int = LORA_ALPHA
    lora_targets: tuple[str, ...] = LORA_TARGETS
    adapter_dtype: AdapterDtype = "bf16"
    double_quant: bool = True
    adamw_8bit: bool = False
    checkpoint: str = ""
    loss: Loss = "plain"
    dp_replicate: int = 1
    fp8: bool = False
    lengths: str = ""
    packing: bool = False
    optim: Optim = "adamw"
    states: States = "fp32"
    dora: bool = False
    rollout_gb: float | None = None
    offload_activations: bool = False

    def __post_init__(self) -> None:
        agree(self)

    @property
    def letters(self) -> Method:
        return Method.parse(self.method)

    @property
    def own(self) -> bool:
        """Whether a training script of the user's own runs it, of which nothing is known."""
        return self.engine not in ENGINES

    @property
    def data_parallel(self) -> int:
        """How many replicas, or shards of one, take different sequences."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def shards(self) -> int:
        """Among how many GPUs ZeRO divides: with HSDP those of one replica, with CP also those that share sequences."""
        return self.data_parallel * self.cp // self.dp_replicate

    @property
    def recomputed_every(self) -> int | None:
        """One of how many layers is recomputed whole; None where --checkpoint names no number."""
        return int(self.checkpoint) if self.checkpoint.isdecimal() else None

    @property
    def adapts(self) -> tuple[str, ...]:
        """The linear layers that LoRA adapts where the model has them."""
        return self.lora_targets + FUSED_TARGETS if self.lora_targets == LORA_TARGETS else self.lora_targets

    @property
    def eight_bit(self) -> bool:
        """Whether the moments have 8 bits."""
        return self.optim in ("adamw-8bit", "paged-adamw-8bit")

    @property
    def wide_adapters(self) -> bool:
        """Whether LoRA trains in fp32: its weights, their gradients and moments."""
        return self.letters.has_lora and self.adapter_dtype == "fp32"

    @property
    def wide_inputs(self) -> bool:
        """Whether LoRA computes in fp32 too, and keeps its inputs so; FSDP2 gathers it in bf16."""
        return self.wide_adapters and self.engine != "fsdp2"

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass computes anything again, by letters or --checkpoint."""
        return bool(self.checkpoint) or self.letters.recompute != "none"

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step trains on, over all processes; padding is none."""
        if (drawn := self.drawn) is not None:
            return drawn.tokens
        if self.micro_batch is None:
            raise ValueError("the micro batch of this cell is still to be searched")
        return self.data_parallel * self.sequences * self.grad_accum * self.seq_len

    @property
    def sequences(self) -> int:
        """How many a micro batch has, or its rows: of dpo a chosen and a rejected one for each pair."""
        return (self.micro_batch or 1) * (2 if self.task == "dpo" else 1)

    @property
    def has_reference(self) -> bool:
        """Whether a frozen model judges what the policy does."""
        return self.task in ("dpo", "grpo")

    @property
    def own_reference(self) -> bool:
        """Whether that is a model of its own: an adapted policy without its adapters is one."""
        return self.has_reference and self.letters.adapter is None

    @property
    def drawn(self) -> StepBatch | None:
        """The sequences of a step, where they have lengths of their own and the micro batch is known. Raises
        WorkloadError."""
        if not self.lengths or self.micro_batch is None:
            return None
        sizes = (self.data_parallel, self.grad_accum, self.micro_batch)
        return draw(self.lengths, self.seq_len, self.packing, *sizes)

    @property
    def longest(self) -> int:
        """Tokens that one GPU has of the longest row of a micro batch, padding included."""
        return self.seq_len // self.cp if (drawn := self.drawn) is None else drawn.longest

    @property
    def padding_ratio(self) -> float | None:
        """The share of the positions that hold no token; None where no lengths are drawn."""
        return None if (drawn := self.drawn) is None else 1 - drawn.tokens / drawn.positions

    @property
    def name(self) -> str:
        """Unique within a sweep, and fit for a file's name."""
        sizes = [f"{self.gpus}x", f"s{self.seq_len}", f"b{self.micro_batch or 'max'}"]
        extras = [
            f"{label}{value}"
            for label, value in (
                ("ga", self.grad_accum),
                ("tp", self.tp),
                ("pp", self.pp),
                ("cp", self.cp),
                ("ep", self.ep),
            )
            if value > 1
        ]
        extras += ["math"] if self.attention == "math" else []
        extras += ["compile"] if self.compile else []
        extras += beyond_letters(self)
        extras += [] if self.rollout_gb is None else [f"rollout{self.rollout_gb:g}"]
        model = re.sub(
            r"[^\w.+-]", "_", self.model.rstrip("/").rpartition("/")[2]
        )  # a directory may be called anything
        return "_".join([model, self.task, self.engine, self.method, *sizes, *extras])


_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Cell)}


def agree(of: Any) -> None:
    """`adamw_8bit` of a cell or a result, which files of before have, says the same as its `optim`."""
    if of.adamw_8bit and of.optim == "adamw":
        msgspec.structs.force_setattr(of, "optim", "adamw-8bit")
    msgspec.structs.force_setattr(of, "adamw_8bit", of.optim == "adamw-8bit")


class Options(Protocol):
    """What a cell has beside its letters, and what is measured of it as well."""

    @property
    def engine(self) -> Engine: ...
    @property
    def method(self) -> str: ...
    @property
    def lora_rank(self) -> int: ...
    @property
    def lora_alpha(self) -> int: ...
    @property
    def lora_targets(self) -> tuple[str, ...]: ...
    @property
    def adapter_dtype(self) -> str: ...
    @property
    def double_quant(self) -> bool: ...
    @property
    def optim(self) -> str: ...
    @property
    def states(self) -> str: ...
    @property
    def dora(self) -> bool: ...
    @property
    def offload_activations(self) -> bool: ...
    @property
    def checkpoint(self) -> str: ...
    @property
    def loss(self) -> str: ...
    @property
    def dp_replicate(self) -> int: ...
    @property
    def fp8(self) -> bool: ...
    @property
    def lengths(self) -> str: ...
    @property
    def packing(self) -> bool: ...


def beyond_letters(of: Options) -> list[str]:
    """Its options that are not the usual, as its name and tables have them."""
    words = {
        "lora_rank": f"r{of.lora_rank}",
        "lora_alpha": f"alpha{of.lora_alpha}",
        "lora_targets": "-".join(target.removesuffix("_proj") for target in of.lora_targets),
        "adapter_dtype": f"{of.adapter_dtype}-adapters",
        "double_quant": "single-quant",
        "optim": {"adamw-8bit": "adamw8bit", "paged-adamw-8bit": "paged-adamw8bit"}.get(of.optim, of.optim),
        "states": of.states,
        "dora": "dora",
        "offload_activations": "offload-act",
        "checkpoint": f"ac-{of.checkpoint}",
        "loss": f"{of.loss}-loss",
        "dp_replicate": f"hsdp{of.dp_replicate}",
        "fp8": "fp8",
        "lengths": re.sub(r"[^\w.+-]", "-", of.lengths.rpartition("/")[2].removeprefix("file:"))[:40],
        "packing": "packed",
    }
    return [word for name, word in words.items() if getattr(of, name) != _DEFAULTS[name]]


# Which options are of which letters alone.
_OF_LORA, _OF_FOUR_BIT = ("lora_rank", "lora_alpha", "lora_targets", "adapter_dtype", "dora"), ("double_quant",)
_FLAGS = {"double_quant": "--no-double-quant", "optim": "--optimizer"}


def settled(cell: Cell, layers: int | None = None) -> tuple[Cell, list[str]]:
    """The cell without the options that change nothing for it, and a clause for each of those. layers: of its model,
    where they are known."""
    idle: dict[str, str] = {}
    if not cell.letters.has_lora:
        idle |= dict.fromkeys(_OF_LORA, "it has no LoRA (L or QL)")
    elif _casts_adapters(cell.engine, cell.letters):
        idle["adapter_dtype"] = "DeepSpeed's ZeRO casts what it trains to bf16, and keeps fp32 masters of it"
    if not cell.letters.four_bit:
        idle |= dict.fromkeys(_OF_FOUR_BIT, "it has no 4-bit weights (Q or QL)")
    if cell.optim == "muon" and (cell.letters.quantized or cell.letters.adapter == "PT"):
        idle["optim"] = "of what it trains nothing is a matrix of a layer, and AdamW updates all of it"
    if cell.task != "grpo":
        idle["rollout_gb"] = "only grpo has an engine of rollouts"
    if not cell.lengths:
        idle["packing"] = "all of its sequences fill a row (--lengths names others)"
    if cell.letters.adapter and not cell.own:
        idle["states"] = "it trains adapters, and --adapter-dtype says in what"
    if layers is not None and (every := cell.recomputed_every) and every > layers:
        idle["checkpoint"] = f"its model has {layers} layers, and none is the {every}-th"
    idle = {name: why for name, why in idle.items() if getattr(cell, name) != _DEFAULTS[name]}
    plain = msgspec.structs.replace(cell, **{name: _DEFAULTS[name] for name in idle})
    flags = {name: _FLAGS.get(name, f"--{name.replace('_', '-')}") for name in idle}
    return plain, [f"{flags[name]} changes nothing for {plain.name}: {why}" for name, why in idle.items()]


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell's model name stands for: numbers, of which the engines build a Llama, or what its config.json holds,
    of which they build what that describes. name: in messages. directory: where the config.json is from. unknown: why
    there are no such numbers, a clause."""

    spec: LlamaShape | None = None
    name: str = ""
    config: dict[str, Any] | None = None
    directory: str | None = None
    unknown: str = ""

    @property
    def decoder(self) -> ModelSpec | None:
        """What the cell's parameters, FLOPs and memory follow from, where that is known."""
        if self.config is not None:
            return catalog.from_config(self.name, self.config)
        return None if self.spec is None else self.spec.decoder


def _casts_adapters(engine: Engine, letters: Method) -> bool:
    return engine == "deepspeed" and letters.zero > 0


def adapter_notes(several: Iterable[Options]) -> list[str]:
    """What LoRA of cells, or of their results, trains in; each sentence once."""
    return list(dict.fromkeys(filter(None, map(_adapter_note, several))))


def _adapter_note(of: Options) -> str:
    """Empty where it has no LoRA."""
    letters = Method.parse(of.method)
    if not letters.has_lora or of.engine not in ENGINES:
        return ""
    lora = f"LoRA of {of.engine}"
    if _casts_adapters(of.engine, letters):
        return f"{lora} with Z{letters.zero} has bf16 weights and fp32 masters, 16 bytes a trained parameter."
    if of.adapter_dtype == "bf16":
        return f"{lora} trains in bf16, 8 bytes a trained parameter; --adapter-dtype fp32 is PEFT's own."
    inputs = "computes in bf16" if of.engine == "fsdp2" else "keeps fp32 inputs"
    return f"{lora} trains in fp32, 16 bytes a trained parameter, and {inputs} (--adapter-dtype)."


def cell(
    method: str, *, attention: AttentionKernel = "eager", adapter_dtype: AdapterDtype | None = None, **more: object
) -> Cell:
    """A cell of a method however it is written. adapter_dtype: None for that of PEFT's own, fp32, where the engine
    leaves it. Raises GridError."""
    letters = Method.parse(method)
    if letters.flash:
        if attention == "math":
            raise GridError(f"method '{method}' asks for FlashAttention and --attention for math; name one.")
        attention = "flash"
    built = msgspec.convert({"method": str(letters), "attention": attention, **more}, Cell)
    fields = ("gpus", "seq_len", "grad_accum", "tp", "pp", "cp", "ep", "lora_rank", "lora_alpha", "dp_replicate")
    check_least(GridError, 1, **{field: getattr(built, field) for field in fields})
    if adapter_dtype is None:
        ours = letters.has_lora and not built.own  # what a user's own script trains in nobody knows
        adapter_dtype = "fp32" if ours and not _casts_adapters(built.engine, letters) else "bf16"
    built = msgspec.structs.replace(built, adapter_dtype=adapter_dtype)
    if built.micro_batch is not None and built.micro_batch < 1:
        raise GridError(f"--micro-batch is {built.micro_batch}; it must be at least 1, or max.")
    if built.checkpoint and letters.recompute != "none":
        letter = "R" if letters.recompute == "full" else "RS"
        raise GridError(f"method '{method}' recomputes with {letter} and --checkpoint in another way; name one.")
    if built.checkpoint not in ("", "op") and not re.fullmatch(r"[1-9]\d{0,5}", built.checkpoint):
        raise GridError(f"--checkpoint is '{built.checkpoint}'; it must be op, or N to recompute every N-th layer.")
    if built.lengths:
        laws.parse(built.lengths)
    for target in built.lora_targets:
        if target not in LORA_TARGETS + FUSED_TARGETS:
            raise GridError(f"--lora-targets names '{target}'; known are {', '.join(LORA_TARGETS + FUSED_TARGETS)}.")
    return built


def grid(
    *,
    models: Sequence[str],
    engines: Sequence[Engine],
    methods: Sequence[str],
    gpus: Sequence[int],
    seq_lens: Sequence[int],
    micro_batches: Sequence[int | None],
    **common: object,
) -> list[Cell]:
    """Every combination, in reading order: model, engine, method, then sizes. Raises GridError."""
    axes = product(models, engines, methods, gpus, seq_lens, micro_batches)
    cells = [
        cell(method, model=model, engine=engine, gpus=n, seq_len=seq_len, micro_batch=micro_batch, **common)  # type: ignore[arg-type]
        for model, engine, method, n, seq_len, micro_batch in axes
    ]
    return list(dict.fromkeys(cells))
