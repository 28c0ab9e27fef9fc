"""Cells of the training grid, and which of them make sense. Pure: nothing is imported, read or started here.

A cell is one training configuration: a model, an engine, the paper's method letters, sizes. Letters that contradict
each other make no cell (GridError); a cell that is well formed but cannot be run has a reason (`impossible`), and
becomes a row of the results with that reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Literal, get_args

import msgspec

from backends.decoder import ModelSpec
from training_probe.llama_shape import LlamaShape

Task = Literal["pretrain", "finetune"]
Engine = Literal["deepspeed", "megatron", "fsdp2", "ddp"]
Attention = Literal["eager", "math", "flash"]
Recompute = Literal["none", "full", "selective"]
Adapter = Literal["L", "QL", "PT"]
Device = Literal["cuda", "cpu"]

ENGINES: tuple[Engine, ...] = get_args(Engine)
PAPER_SEQ_LEN = 350
LORA_RANK = 64
PROMPT_TOKENS = 8
PAPER_MAX_MICRO_BATCH = 64

LETTERS = {
    "Z1": "ZeRO 1: optimizer states sharded",
    "Z2": "ZeRO 2: gradients too",
    "Z3": "ZeRO 3: parameters too",
    "O": "offload to the CPU: optimizer with Z1 and Z2, optimizer and parameters with Z3",
    "Q": "4-bit weights, frozen; embeddings, norms and the head train",
    "R": "recompute: activations of a layer are computed again in the backward pass",
    "RS": "selective recompute: only attention is computed again",
    "F": "FlashAttention",
    "L": f"LoRA of rank {LORA_RANK}",
    "QL": "QLoRA: LoRA over 4-bit weights",
    "PT": f"prompt tuning with {PROMPT_TOKENS} virtual tokens",
}
NAIVE = "Naive"


class GridError(ValueError):
    """Options that make no cell. One sentence: what is wrong and what to do."""


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """The paper's letters, taken apart. `zero`: stage, 0 for none. `quantized`: Q, without an adapter."""

    zero: int = 0
    offload: bool = False
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
                raise GridError(
                    f"unknown letter '{letter}' in method '{text}'; known are {NAIVE}, {', '.join(LETTERS)}."
                )
            if letters.count(letter) > 1:
                raise GridError(f"method '{text}' names {letter} twice; name it once.")
        for rivals in (("Z1", "Z2", "Z3"), ("L", "QL", "PT"), ("R", "RS"), ("Q", "QL"), ("Q", "L"), ("Q", "PT")):
            both = [letter for letter in rivals if letter in letters]
            if len(both) > 1:
                raise GridError(f"method '{text}' is a contradiction: {both[0]} and {both[1]} exclude each other.")
        zero = next((int(letter[1]) for letter in letters if letter[0] == "Z"), 0)
        if "O" in letters and not zero:
            raise GridError(f"method '{text}' offloads without ZeRO; add Z1, Z2 or Z3 to O.")
        return cls(
            zero=zero,
            offload="O" in letters,
            quantized="Q" in letters,
            recompute="full" if "R" in letters else "selective" if "RS" in letters else "none",
            flash="F" in letters,
            adapter=next((letter for letter in get_args(Adapter) if letter in letters), None),
        )

    @property
    def four_bit(self) -> bool:
        """Whether the linear layers of the decoder are stored in 4 bits."""
        return self.quantized or self.adapter == "QL"

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
            "O" if self.offload else None,
        )
        return "+".join(letter for letter in letters if letter) or NAIVE


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One training configuration. Sizes are per process where they say so.

    gpus: processes, one a GPU (on the CPU: one process each). micro_batch: sequences a process takes at once, None: the
    largest that fits is searched. tp, pp, cp: how many GPUs share a layer, the layers, a sequence (Megatron).
    attention: `flash` with the letter F, else `eager` as in the paper, or SDPA's `math`.
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
    attention: Attention = "eager"
    compile: bool = False
    device: Device = "cuda"

    @property
    def letters(self) -> Method:
        return Method.parse(self.method)

    @property
    def data_parallel(self) -> int:
        """How many replicas, or shards of one, take different sequences."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step trains on, over all processes."""
        if self.micro_batch is None:
            raise ValueError("the micro batch of this cell is still to be searched")
        return self.data_parallel * self.micro_batch * self.grad_accum * self.seq_len

    @property
    def name(self) -> str:
        """Unique within a sweep, and fit for a file's name."""
        sizes = [f"{self.gpus}x", f"s{self.seq_len}", f"b{self.micro_batch or 'max'}"]
        extras = [
            f"{label}{value}"
            for label, value in (("ga", self.grad_accum), ("tp", self.tp), ("pp", self.pp), ("cp", self.cp))
            if value > 1
        ]
        extras += ["math"] if self.attention == "math" else []
        extras += ["compile"] if self.compile else []
        model = re.sub(
            r"[^\w.+-]", "_", self.model.rstrip("/").rpartition("/")[2]
        )  # a directory may be called anything
        return "_".join([model, self.task, self.engine, self.method, *sizes, *extras])


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell's model name stands for: its shape where it is known, or a directory with a config.json. unknown: why
    there is no shape, a clause."""

    spec: LlamaShape | None = None
    directory: str | None = None
    unknown: str = ""

    @property
    def decoder(self) -> ModelSpec | None:
        """What the cell's parameters, FLOPs and memory follow from, where its shape is known."""
        return None if self.spec is None else self.spec.decoder


def cell(method: str, *, attention: Attention = "eager", **more: object) -> Cell:
    """A cell of a method however it is written. Raises GridError."""
    letters = Method.parse(method)
    if letters.flash:
        if attention == "math":
            raise GridError(f"method '{method}' asks for FlashAttention and --attention for math; name one.")
        attention = "flash"
    built = msgspec.convert({"method": str(letters), "attention": attention, **more}, Cell)
    for field in ("gpus", "seq_len", "grad_accum", "tp", "pp", "cp"):
        if getattr(built, field) < 1:
            raise GridError(f"--{field.replace('_', '-')} is {getattr(built, field)}; it must be at least 1.")
    if built.micro_batch is not None and built.micro_batch < 1:
        raise GridError(f"--micro-batch is {built.micro_batch}; it must be at least 1, or max.")
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
    if cell.gpus % model_parallel:
        yield f"{cell.gpus} GPUs cannot be divided into groups of TP x PP x CP = {model_parallel}"
    if cell.task == "pretrain" and method.adapter:
        yield f"{method.adapter} is a way of fine-tuning (--task finetune)"
    if cell.engine == "megatron" and unbuilt:
        yield f"Megatron's models are built like Llama here, and {unbuilt}"
    if spec is None:
        return
    attention = spec.kinds[0].attention
    if cell.engine == "megatron" and attention.biased:
        yield f"Megatron's models are built without biases here, and {spec.name} has them (attention_bias)"
    if cell.seq_len > spec.max_position:
        yield f"{spec.name} ends at {spec.max_position} positions"
    if attention.undivided(cell.tp) is not None:
        yield f"the {attention.heads} heads of {spec.name} cannot be divided by TP {cell.tp}"
    if spec.layers % cell.pp:
        yield f"the {spec.layers} layers of {spec.name} cannot be divided by PP {cell.pp}"
    mixture = any(kind.mlp.experts > 1 for kind in spec.kinds)
    if mixture and (method.four_bit or cell.engine == "megatron"):
        yield "experts are neither quantized to 4 bits nor built for Megatron here"


def _of_engine(cell: Cell, method: Method) -> Iterator[str]:
    if cell.engine != "megatron" and cell.tp * cell.pp * cell.cp > 1:
        yield "TP, PP and CP are Megatron's (--engine megatron)"
    if cell.compile and cell.engine not in ("fsdp2", "ddp"):
        yield "compiled layers are built for fsdp2 and ddp only"
    if cell.engine == "megatron":
        if cell.cp > 1:
            yield "Megatron's context parallelism needs Transformer Engine, which this probe does not use"
        if method.zero > 1 or method.offload or method.four_bit or method.adapter:
            yield "Megatron knows of these letters R, F and Z1 (its distributed optimizer) only"
        if method.zero and cell.device == "cpu":
            yield "Megatron's distributed optimizer takes tensors of a GPU only"
    if cell.engine == "ddp" and method.zero:
        yield "ddp shards nothing; use deepspeed or fsdp2 for ZeRO"
    if cell.engine == "fsdp2":
        if method.zero < 2:
            yield "fsdp2 always shards: use Z2 (parameters kept after the forward pass) or Z3"
        if method.four_bit:
            yield "4-bit weights are not built for fsdp2 here; use deepspeed or ddp"
