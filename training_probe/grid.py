"""Cells of the training grid, and which of them make sense. Pure: nothing is imported, read or started here.

A cell is one training configuration: a model, an engine, the paper's method letters, sizes. Letters that contradict
each other make no cell (GridError); a cell that is well formed but cannot be run has a reason (`impossible`), and
becomes a row of the results with that reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any, Literal, Protocol, get_args

import msgspec

from backends import catalog
from backends.decoder import Attention, LatentAttention, ModelSpec, Recurrent
from backends.exit_codes import UserError, check_least
from loadgen.load import lengths as laws
from training_probe.llama_shape import LlamaShape
from training_probe.packing import MOST_ROWS, StepBatch, draw

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
EXPERTS_EXCHANGED = ("mixtral", "qwen3_moe", "llama")  # whose experts --ep divides; llama: Mixtral's, of numbers alone
PROMPT_TOKENS = 8
PAPER_MAX_MICRO_BATCH = 64
LOSS_CHUNKS = 8  # of the tokens of a micro batch, with --loss chunked; torchtune's number
MOST_8BIT = 2**31 - 1  # elements of a tensor whose 8-bit moments bitsandbytes updates (its issue 1785)
CAPPED_LOGITS = ("gemma2",)  # model types that do more to their logits than the head does
THREE_POSITIONS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe")  # a token, for images

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


def impossible(cell: Cell, spec: ModelSpec | None, unbuilt: str = "") -> str | None:
    """Why the cell cannot be run anywhere, a clause; None when it can, as far as its model shows. unbuilt: why the
    engines cannot build the model of numbers alone."""
    return next(_objections(cell, spec, unbuilt), None)


def _objections(cell: Cell, spec: ModelSpec | None, unbuilt: str) -> Iterator[str]:
    method, model_parallel = cell.letters, cell.tp * cell.pp * cell.cp
    yield from _of_engine(cell, method)
    yield from _of_lengths(cell, method)
    if cell.has_reference:
        yield from _of_preference(cell, method)
    if cell.gpus % model_parallel:
        yield f"{cell.gpus} GPUs cannot be divided into groups of TP x PP x CP = {model_parallel}"
    if cell.task == "pretrain" and method.adapter:
        yield f"{method.adapter} is a way of fine-tuning (--task finetune)"
    if cell.engine == "megatron" and unbuilt:
        yield f"Megatron's models are built like Llama here, and {unbuilt}"
    if cell.engine == "fsdp2" and cell.tp > 1 and unbuilt:  # norms of heads, say: each rank would train its own
        yield f"TP divides layers like Llama's here, and {unbuilt}"
    if spec is None:
        return
    attention = spec.kinds[0].attention
    if cell.engine == "megatron" and attention.biased:
        yield f"Megatron's models are built without biases here, and {spec.name} has them (attention_bias)"
    if cell.engine == "megatron" and attention.window is not None:
        yield f"Megatron's models are built without windows here, and {spec.name} has them (sliding_window)"
    if cell.seq_len > spec.max_position:
        yield f"{spec.name} ends at {spec.max_position} positions"
    if attention.undivided(cell.tp) is not None:
        yield f"the {attention.heads} heads of {spec.name} cannot be divided by TP {cell.tp}"
    if cell.engine == "fsdp2" and isinstance(attention, Attention) and attention.kv_heads % cell.tp:
        yield f"the {attention.kv_heads} KV heads of {spec.name} cannot be divided by TP {cell.tp}"
    if spec.layers % cell.pp:
        yield f"the {spec.layers} layers of {spec.name} cannot be divided by PP {cell.pp}"
    if cell.loss != "plain" and spec.model_type.removesuffix("_text") in CAPPED_LOGITS:
        yield f"{spec.name} caps its logits, which --loss {cell.loss} never has all of"
    if isinstance(attention, Attention) and attention.head_dim % 2:
        yield f"heads of {attention.head_dim} values cannot be rotated (RoPE takes pairs); name an even head_dim"
    yield from _of_targets(cell, spec)
    yield from _of_packing(cell, spec)
    yield from _of_attention(cell, spec)
    if cell.cp > 1:
        yield from _of_ring(cell, spec)
    if cell.ep > 1:
        yield from _of_experts(cell, spec)
    mixture = any(kind.mlp.experts > 1 for kind in spec.kinds)
    if mixture and (method.four_bit or cell.engine == "megatron"):
        yield "experts are neither quantized to 4 bits nor built for Megatron here"
    if mixture and (cell.fp8 or cell.tp > 1):
        yield "experts are neither computed in fp8 nor divided by TP here"
    if cell.fp8 and cell.device == "cuda":
        yield from _of_fp8_products(cell, spec)
    if mixture and cell.optim == "muon" and not method.adapter:
        yield "Muon updates matrices, and experts are tensors of three dimensions; use --optimizer adamw or adamw-8bit"
    if cell.eight_bit and cell.engine == "deepspeed" and cell.device == "cuda":
        yield from _of_8bit_updates(cell, spec)


def _of_8bit_updates(cell: Cell, spec: ModelSpec) -> Iterator[str]:
    """DeepSpeed keeps all that a rank updates in one tensor, with Z3 in several of a billion elements."""
    method, updated = cell.letters, -(-spec.parameters // cell.gpus)
    if method.zero < 3 and not method.adapter and not method.four_bit and updated > MOST_8BIT:
        yield (
            f"a rank updates {updated / 1e9:.1f} billion parameters in one tensor, and bitsandbytes takes at most "
            f"{MOST_8BIT / 1e9:.1f}; use Z3 or more GPUs"
        )


def _of_fp8_products(cell: Cell, spec: ModelSpec) -> Iterator[str]:
    """torch._scaled_mm takes multiples of 16 alone; each size is the inner one of a product of the three passes."""
    kind = spec.kinds[0]
    widths = {"hidden_size": spec.hidden, "width of all heads": kind.attention.query_width, "MLP": kind.mlp.width}
    for name, width in widths.items():
        if width // (1 if name == "hidden_size" else cell.tp) % 16:
            yield f"fp8 products take multiples of 16, and {spec.name} has a {name} of {width}"
    tokens = cell.longest * (cell.micro_batch or 1)
    if tokens % 16:
        yield f"fp8 products take multiples of 16 tokens, and a micro batch has {tokens}"


def _of_targets(cell: Cell, spec: ModelSpec) -> Iterator[str]:
    """Layers that LoRA should adapt and the model has under another name."""
    if not cell.letters.has_lora:
        return
    mixture = spec.model_type in EXPERTS_ADAPTED and any(kind.mlp.experts > 1 for kind in spec.kinds)
    if cell.dora and mixture and not OF_EXPERTS.isdisjoint(cell.adapts):
        yield f"PEFT has no DoRA on the experts of {spec.name}; name --lora-targets q_proj k_proj v_proj o_proj"
    if cell.lora_targets == LORA_TARGETS:
        return
    for fused, types, separate in (
        ("qkv_proj", QKV_TOGETHER, ("q_proj", "k_proj", "v_proj")),
        ("gate_up_proj", GATE_WITH_UP, ("gate_proj", "up_proj")),
    ):
        has, lacks = ((fused,), separate) if spec.model_type in types else (separate, (fused,))
        for target in lacks:
            if target in cell.lora_targets:
                yield f"{spec.name} has no {target} that LoRA could adapt; it has {' and '.join(has)}"
    if (
        len(OF_EXPERTS.intersection(cell.lora_targets, ("gate_proj", "up_proj"))) == 1
        and spec.model_type in EXPERTS_ADAPTED
    ):
        yield f"PEFT adapts gate and up of {spec.name}'s experts as one; name both gate_proj and up_proj, or neither"
    if (
        all(kind.mlp.experts > 1 and not kind.mlp.shared for kind in spec.kinds)
        and spec.model_type not in EXPERTS_ADAPTED
    ):
        for target in OF_EXPERTS.intersection(cell.lora_targets):
            yield f"PEFT adapts no experts of {spec.name} by the name {target}; name q_proj k_proj v_proj o_proj"


def _of_attention(cell: Cell, spec: ModelSpec) -> Iterator[str]:
    """What the kernels of torch's scaled_dot_product_attention do not compute."""
    if cell.attention == "eager":
        return
    asked = "the letter F" if cell.attention == "flash" else "--attention math"
    length = cell.seq_len + (PROMPT_TOKENS if cell.letters.adapter == "PT" else 0)
    for kind in spec.kinds:
        attention = kind.attention
        if isinstance(attention, Attention) and attention.sinks:
            yield f"only eager attention has the attention sinks of {spec.name}; leave {asked} out"
        if isinstance(attention, Attention) and attention.capped:
            yield f"only eager attention caps the scores of {spec.name} (attn_logit_softcapping); leave {asked} out"
        if cell.attention != "flash":
            continue
        if isinstance(attention, LatentAttention) and attention.value != attention.nope + attention.rope:
            yield f"torch's FlashAttention takes values as wide as queries (v_head_dim of {spec.name}); leave F out"
        if cell.device == "cuda" and attention.window is not None and attention.window.tokens <= length:
            field = "attention_chunk_size" if attention.window.chunked else "sliding_window"
            yield (
                f"torch's FlashAttention takes no mask on GPUs, and {spec.name} has windows of "
                f"{attention.window.tokens} tokens ({field}); name a shorter --seq-len, or leave F out"
            )


def _of_engine(cell: Cell, method: Method) -> Iterator[str]:
    yield from _of_sharding(cell, method)
    if cell.checkpoint and cell.engine == "megatron":
        yield "Megatron recomputes in its own ways (R and RS); --checkpoint is for deepspeed, fsdp2 and ddp"
    if cell.fp8 and cell.engine not in ("fsdp2", "ddp"):
        yield "fp8 is torchao's, which is built for fsdp2 and ddp only"
    if cell.fp8 and (method.adapter or method.four_bit):
        yield "torchao's fp8 products train whole weights; adapters and 4-bit weights have none"
    if cell.compile and cell.engine not in ("fsdp2", "ddp"):
        yield "compiled layers are built for fsdp2 and ddp only"
    if cell.engine == "megatron":
        if method.zero > 1 or method.offload or method.four_bit or method.adapter:
            yield "Megatron knows of these letters R, F and Z1 (its distributed optimizer) only"
        if method.zero and cell.device == "cpu":
            yield "Megatron's distributed optimizer takes tensors of a GPU only"
        if cell.loss != "plain" or cell.optim != "adamw":
            yield "Megatron has a loss and an optimizer of its own"
    yield from _of_optimizer(cell, method)
    yield from _of_offload(cell, method)
    if cell.dora and cell.engine == "deepspeed" and method.zero == 3:
        yield "PEFT makes DoRA's magnitudes of whole weights, which ZeRO 3 divides; use Z2, or --engine fsdp2 with Z3"
    if cell.dora and cell.checkpoint == "op":
        yield "--checkpoint op chooses among products by their order, and DoRA has others; use R or --checkpoint N"
    if cell.engine == "ddp" and method.zero:
        yield "ddp shards nothing; use deepspeed or fsdp2 for ZeRO"
    if cell.engine == "fsdp2":
        if method.optimizer_alone:
            yield "fsdp2 offloads weights and optimizer together; use O, or --engine deepspeed"
        if method.zero < 2:
            yield "fsdp2 always shards: use Z2 (parameters kept after the forward pass) or Z3"
        if method.quantized:
            yield "4-bit weights without LoRA are not built for fsdp2 here; use QL, or deepspeed or ddp"
        if method.four_bit and (method.offload or cell.compile or cell.dora):
            yield "4-bit weights of fsdp2 go without O, --compile and --dora here"


def _of_offload(cell: Cell, method: Method) -> Iterator[str]:
    """What does not go with activations on the host."""
    if not cell.offload_activations:
        return
    if cell.engine == "megatron" or cell.tp * cell.cp > 1:
        yield "--offload-activations is built for ddp, fsdp2 and deepspeed without TP and CP"
    if cell.engine == "deepspeed" and method.zero == 3:
        yield "ZeRO 3 takes back weights that --offload-activations must know; use Z2, or --engine fsdp2 with Z3"
    if cell.compile or cell.checkpoint == "op":
        yield "--offload-activations does not see what --compile and --checkpoint op keep; use R or --checkpoint N"
    if cell.dora:
        yield "DoRA's unit matrices would go to the host as well; leave --dora or --offload-activations out"


def _of_optimizer(cell: Cell, method: Method) -> Iterator[str]:
    if cell.tp > 1 and (cell.loss != "plain" or cell.optim != "adamw"):
        yield "with TP the loss is plain and the optimizer is AdamW with 32 bits here"
    if cell.optim != "adamw" and method.offload:
        yield f"what is offloaded is updated by AdamW with 32-bit states; leave O or --optimizer {cell.optim} out"
    if cell.optim == "paged-adamw-8bit" and cell.device == "cpu":
        yield "moments are paged between a GPU and its host, and the CPU has them anyway; use --optimizer adamw-8bit"
    if cell.optim == "paged-adamw-8bit" and cell.engine == "fsdp2":
        yield (
            "bitsandbytes pages no moments of fsdp2's sharded tensors; use ddp or deepspeed, or --optimizer "
            "adamw-8bit, which is torchao's there"
        )

    if cell.states == "fp32":
        return
    if cell.engine != "fsdp2":
        yield f"--states {cell.states} is built for fsdp2; ddp keeps all in plain bf16, ZeRO has fp32 masters"
    if method.offload or cell.tp > 1:
        yield f"--states {cell.states} is built for weights on the GPU that TP does not divide; leave O and --tp out"
    if cell.states == "bf16-stochastic" and cell.dp_replicate > 1:
        yield "replicas of HSDP would each round in a way of their own; use --states bf16-kahan"
    if cell.optim not in ("adamw", "adamw-8bit" if cell.states == "bf16-stochastic" else "adamw"):
        yield f"--states {cell.states} is AdamW's; leave --optimizer {cell.optim} out"


def _of_preference(cell: Cell, method: Method) -> Iterator[str]:
    """What a policy beside a frozen reference goes with."""
    task = cell.task
    if cell.own or cell.engine == "megatron" or cell.tp * cell.cp > 1:
        yield f"{task} is built for deepspeed, fsdp2 and ddp, without TP and CP"
    if method.quantized or method.adapter == "PT":
        yield f"the reference of {task} is a whole model, or the policy without LoRA; use L or QL"
    if method.offload and cell.own_reference and (cell.engine == "fsdp2" or method.zero == 3):
        yield f"the reference of {task} is not offloaded here; leave O out, or use L, which needs no second model"
    if cell.loss != "plain" or cell.lengths or cell.compile or cell.fp8:
        yield f"{task} takes whole logits of sequences of one length, plain layers and bf16 (--loss, --lengths, ...)"


def _of_lengths(cell: Cell, method: Method) -> Iterator[str]:
    """What sequences of different lengths go with. Raises WorkloadError for a file that holds none."""
    if not cell.lengths:
        return
    if cell.own or cell.engine == "megatron" or cell.tp * cell.cp > 1:
        yield "lengths of their own (--lengths) are built for deepspeed, fsdp2 and ddp, without TP and CP"
    if cell.compile or cell.fp8:
        yield "compiled layers and fp8 products take sequences of one length; leave --lengths out"
    if cell.packing and method.adapter == "PT":
        yield "prompt tuning puts its tokens before a row, not before each sequence in it; leave --packing out"
    if cell.packing and cell.checkpoint == "op" and method.flash:
        yield "--checkpoint op does not know FlashAttention over packed rows; use R, or leave --packing out"
    if (rows := cell.data_parallel * cell.grad_accum * (cell.micro_batch or 1)) > MOST_ROWS:
        yield f"a step has {rows} rows, and lengths of at most {MOST_ROWS} are drawn"
    else:
        msgspec.structs.replace(cell, micro_batch=cell.micro_batch or 1).drawn  # noqa: B018  a file is read


def _of_packing(cell: Cell, spec: ModelSpec) -> Iterator[str]:
    """Layers that would let a sequence see the one before it in its row."""
    if not cell.packing:
        return
    if spec.model_type.removesuffix("_text") in THREE_POSITIONS and not cell.letters.flash:
        yield f"transformers makes no mask of packed rows for {spec.name}; use F, or leave --packing out"
    for kind in spec.kinds:
        attention = kind.attention
        if not isinstance(attention, Attention | LatentAttention):
            yield f"the states of {spec.name}'s layers go from one packed sequence on to the next; leave --packing out"
        elif cell.letters.flash and (attention.window is not None or not isinstance(attention, Attention)):
            yield (
                f"FlashAttention over packed rows is for grouped-query attention without windows, and {spec.name} has "
                "another; leave F or --packing out"
            )


def _of_sharding(cell: Cell, method: Method) -> Iterator[str]:
    """What TP and HSDP go with."""
    if cell.pp > 1 and cell.engine != "megatron":
        yield "PP is Megatron's (--engine megatron)"
    if cell.cp > 1:
        yield from _of_context(cell, method)
    if cell.ep > 1:
        yield from _of_exchange(cell, method)
    if cell.tp > 1 and cell.engine not in ("megatron", "fsdp2"):
        yield "TP is built for megatron and fsdp2 only"
    if cell.tp > 1 and cell.engine == "fsdp2" and (method.adapter or method.offload):
        yield "fsdp2 with TP is built for plain weights on the GPU, without adapters and O"
    if cell.tp > 1 and cell.engine == "fsdp2" and cell.compile:
        yield "compiled layers with TP give other gradients (seen with torch 2.13); leave --compile out"
    if cell.tp > 1 and cell.engine == "fsdp2" and cell.loss != "plain":
        yield "with TP each rank has a part of the vocabulary, and the loss of such parts is torch's (--loss plain)"
    if cell.dp_replicate > 1 and cell.engine != "fsdp2":
        yield "HSDP (--dp-replicate) is FSDP2's (--engine fsdp2)"
    if cell.dp_replicate > 1 and cell.gpus % (cell.tp * cell.dp_replicate):
        yield f"{cell.gpus} GPUs cannot be divided into {cell.dp_replicate} replicas with TP {cell.tp}"


def _of_context(cell: Cell, method: Method) -> Iterator[str]:
    """What context parallelism goes with: torch's ring attention over sequences that are divided."""
    if cell.engine == "megatron":
        yield "Megatron's context parallelism needs Transformer Engine, which this probe does not use; use fsdp2 for CP"
    elif cell.engine != "fsdp2":
        yield "CP is torch's ring attention, which is built for fsdp2 only"
    if cell.attention != "flash":
        yield "CP is a ring of FlashAttention; add the letter F"
    if method.adapter == "PT":
        yield "the virtual tokens of PT are in no part of a sequence that CP divides; use L"
    if cell.checkpoint == "op":
        yield "--checkpoint op would keep every step of CP's ring; use R, or --checkpoint with a number"
    if cell.compile:
        yield "compiled layers were not built for CP's ring; leave --compile out"
    if cell.seq_len % (2 * cell.cp):
        yield f"{cell.seq_len} tokens cannot be divided into two parts for each of the {cell.cp} GPUs of CP"


def _of_exchange(cell: Cell, method: Method) -> Iterator[str]:
    """What expert parallelism goes with: fsdp2's ranks, each with sequences of its own."""
    if cell.engine != "fsdp2":
        yield "EP (--ep) is built over torch's fully_shard alone; use --engine fsdp2 with Z2 or Z3"
    if cell.gpus % cell.ep:
        yield f"{cell.gpus} GPUs cannot be divided into groups of EP = {cell.ep}"
    if cell.tp * cell.cp * cell.dp_replicate > 1:
        yield "EP is built without --tp, --cp and --dp-replicate; leave them out, or --ep"
    if method.adapter:
        yield f"experts that EP divides are trained whole; leave --ep out, with which {method.adapter} goes on fsdp2"
    if cell.compile:
        yield "compiled layers were not built for EP's exchange of tokens; leave --compile out"
    if cell.checkpoint == "op":
        yield "--checkpoint op does not know the exchange of EP; use R, or --checkpoint with a number"
    if cell.optim != "adamw":
        yield f"experts that EP divides are updated by AdamW with 32-bit states; leave --optimizer {cell.optim} out"
    if cell.has_reference:
        yield f"the reference of {cell.task} has no experts divided by EP; leave --ep out"


def _of_experts(cell: Cell, spec: ModelSpec) -> Iterator[str]:
    """Experts that EP cannot divide."""
    counts = {kind.mlp.experts for kind in spec.kinds if kind.mlp.experts > 1}
    if not counts:
        yield f"{spec.name} is dense, and EP divides experts; leave --ep out, or use --tp"
    for experts in counts:
        if experts % cell.ep:
            yield f"the {experts} experts of {spec.name} cannot be divided by EP {cell.ep}"
    if spec.model_type not in EXPERTS_EXCHANGED:
        yield f"EP was tried with Qwen3-MoE and Mixtral, and {spec.name} has other experts ({spec.model_type})"


def _of_ring(cell: Cell, spec: ModelSpec) -> Iterator[str]:
    """What torch's ring attention does not compute, beside what its kernel does not."""
    for kind in spec.kinds:
        attention = kind.attention
        if isinstance(attention, Recurrent):
            yield f"linear attention, as {spec.name} has it, passes a state along a sequence, which CP divides"
        elif attention.window is not None and attention.window.tokens <= cell.seq_len:
            yield f"CP's ring has no windows, and {spec.name} has those of {attention.window.tokens} tokens"
