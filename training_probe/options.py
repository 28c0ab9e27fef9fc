"""The options of `sweep`, `plan` and `memory`, each declared once, and the cells that they mean."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from cyclopts import Group

from backends.exit_codes import check_least, install_command
from backends.untrusted import printable
from loadgen.option_types import is_host, names, offers, option, whole_number
from training_probe import grid, own_deepspeed, refusals, trials
from training_probe.grid import Cell, GridError, Method, Model, Task
from training_probe.llama_shape import LlamaShape, NoShape, shape_of

if TYPE_CHECKING:  # a line of options is read in a moment; what it means may take longer
    from cyclopts import Token

    from backends.decoder import ModelSpec
    from backends.gpus import Inventory
    from loadgen.models import ServedModel as NamedModel
    from training_probe.launch.rendezvous import Meeting
    from training_probe.memory.text import Described
    from training_probe.sweep.cell import Settings

TINY = LlamaShape(
    name="tiny", hf_id="tiny", hidden=256, layers=4, heads=8, kv_heads=4, intermediate=688, vocab_size=2048,
    max_position=2048,
)  # fmt: skip
PACKAGES = ("torch", "transformers")  # besides those of the engine and the method
LAPTOP_PROCESSES = 2
CHECKPOINT_BYTES = 16  # of a parameter that trains, at the most: weights, masters, moments
PAPER_STEPS, LAPTOP_STEPS = (30, 100, 3), (2, 100, 1)  # warm-up, timed, runs
CPU_INFO = Path("/proc/cpuinfo")
SLOW_LAPTOP_STEPS = (2, 20, 1)  # a CPU that emulates bf16 takes twenty times as long for a product
CPU_PARAMETERS = 1e9  # a model with more takes a CPU minutes a step and all memory of a laptop
MAX_NODES = 1024
TYPE_FILES = ("configuration_auto.py", "auto_mappings.py")  # where transformers 4 and 5 list what they build
BILLION = 1e9  # beyond it nothing is meant seriously


def whole(kind: Any, tokens: Sequence[Token]) -> Any:
    """Numbers as they are typed, one or several; no fraction is rounded in silence. Raises ValueError."""
    numbers = tuple(whole_number(token.value) for token in tokens)
    if any(abs(number) >= BILLION for number in numbers):
        raise ValueError("it must be below a billion.")
    return numbers[0] if kind is int else numbers


def check_above_0(flag: str, value: float | None) -> None:
    """Raises GridError."""
    if value is not None and not 0 < value < BILLION:
        raise GridError(f"{flag} is {value:g}; it must be above 0 and below a billion.")


CELLS = Group("Cells: every combination of what is named", sort_key=1)
OF_METHODS = Group("Methods beyond the letters", sort_key=2)
MEASURED = Group("How they are measured", sort_key=3)
WHERE = Group("Where they run", sort_key=4)
OUTPUT = Group("The results", sort_key=5)
UNTRACED_METHODS = ("checkpoint", "loss", "dp_replicate", "fp8", "lengths", "packing")
METHODS = ("lora_rank", "lora_alpha", "lora_targets", "adapter_dtype", "dora", "double_quant", "adamw_8bit",
           "optimizer", "states", "offload_activations", *UNTRACED_METHODS)  # fmt: skip

_cells, _measured, _where = partial(option, CELLS), partial(option, MEASURED), partial(option, WHERE)
_methods = partial(option, OF_METHODS)
_list = partial(_cells, consume_multiple=1, show_default=False)

Skip = Annotated[bool, _measured("Leave out cells that are certain to run out of memory.", negative=None)]
OwnDeepSpeed = Annotated[
    Path | None,
    _measured("A JSON file that is merged over the DeepSpeed configurations of the cells.", show_default=False),
]
Platform = Annotated[str, _measured("This machine's name in tables; by default its GPUs' name.", show_default=False)]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Which cells. What takes several values is an axis of the grid."""

    preset: Annotated[
        Literal[
            "laptop",
            "paper-table2",
            "paper-table3",
            "paper-table4",
            "paper-table5",
            "paper-table7",
            "paper-table8",
            "paper-table9",
            "paper-table13",
            "paper-table14",
            "paper-table15",
            "paper-table16",
            "paper-fig4",
            "paper-fig5",
        ]
        | None,
        _cells("Ready cells; --model, --engine and --method then choose among them."),
    ] = None
    model: Annotated[
        tuple[str, ...],
        _list(
            "7b, 13b, 70b, llama-3-8b, qwen3-8b, mixtral-8x7b, ..., tiny; a directory with a config.json; or the "
            "Hugging Face id of a model whose config.json is in the local cache."
        ),
    ] = ()
    task: Annotated[
        Task | None,
        _cells(
            "By default finetune for methods with L, QL or PT, else pretrain. dpo trains on pairs, beside a frozen "
            "reference; grpo is predicted (memory, plan) and not run."
        ),
    ] = None
    engine: Annotated[
        tuple[str, ...],
        _list(
            f"{', '.join(grid.ENGINES)}, or a training script of your own, by its name in the entry points "
            "llm_dissect.trials; by default deepspeed."
        ),
    ] = ()
    method: Annotated[
        tuple[str, ...],
        _list("Letters joined by +, as in F+R+Z3+O: Z1 Z2 Z3 O OO Q R RS F L QL PT; Naive has none (see letters)."),
    ] = ()
    gpus: Annotated[
        tuple[int, ...], _list("Processes, one a GPU; by default all GPUs here, without any 1.", converter=whole)
    ] = ()
    seq_len: Annotated[
        tuple[int, ...], _list(f"Tokens of a sequence; by default {grid.PAPER_SEQ_LEN}.", converter=whole)
    ] = ()
    micro_batch: Annotated[
        tuple[str, ...],
        _list("Sequences a process takes at once, or max: the largest that fits is searched; by default 1."),
    ] = ()
    grad_accum: Annotated[int, _cells("Micro batches to an optimizer step.", converter=whole)] = 1
    tp: Annotated[int, _cells("Tensor parallel (megatron, fsdp2).", converter=whole)] = 1
    pp: Annotated[int, _cells("Pipeline parallel (megatron).", converter=whole)] = 1
    cp: Annotated[int, _cells("Context parallel, by torch's ring attention (fsdp2, with F).", converter=whole)] = 1
    ep: Annotated[int, _cells("Expert parallel: GPUs that share a layer's experts (fsdp2).", converter=whole)] = 1
    attention: Annotated[Literal["eager", "math"], _cells("What attention is without the letter F.")] = "eager"
    compile: Annotated[bool, _cells("torch.compile every layer (fsdp2, ddp).", show_default=False)] = False
    device: Annotated[Literal["cuda", "cpu"] | None, _cells("By default cuda where there is a GPU.")] = None
    lora_rank: Annotated[int, _methods("Rank of L and QL.", converter=whole)] = grid.LORA_RANK
    lora_alpha: Annotated[int, _methods("Alpha of L and QL.", converter=whole)] = grid.LORA_ALPHA
    lora_targets: Annotated[
        tuple[str, ...],
        _methods(
            f"Linear layers that L and QL adapt; by default {' '.join(grid.LORA_TARGETS)}.",
            consume_multiple=1,
            show_default=False,
        ),
    ] = grid.LORA_TARGETS
    adapter_dtype: Annotated[
        grid.AdapterDtype | None,
        _methods("What LoRA (L, QL) trains in; by default fp32 as PEFT does, with ZeRO DeepSpeed's bf16."),
    ] = None
    dora: Annotated[bool, _methods("DoRA: L and QL with a magnitude for each output (PEFT).", show_default=False)] = (
        False
    )
    double_quant: Annotated[
        bool, _methods("Quantize the scales of 4-bit weights too (Q, QL).", negative=("--no-double-quant",))
    ] = True
    adamw_8bit: Annotated[bool, _methods("The same as --optimizer adamw-8bit.", show_default=False)] = False
    optimizer: Annotated[
        grid.Optim,
        _methods(
            "adamw-8bit: moments in 8 bits (bitsandbytes, for fsdp2 torchao); paged-adamw-8bit: paged to the host "
            "where the GPU is full (bitsandbytes); muon: torch's or DeepSpeed's Muon for matrices of layers, AdamW for "
            "the rest."
        ),
    ] = "adamw"
    offload_activations: Annotated[
        bool, _methods("What layers keep for the backward pass goes to the host.", show_default=False)
    ] = False
    states: Annotated[
        grid.States,
        _methods("Weights and moments of fsdp2: fp32, or bf16 with stochastic rounding (torchao) or with Kahan's sum."),
    ] = "fp32"
    checkpoint: Annotated[
        str,
        _methods(
            "Activation checkpointing in torchtitan's sense: op keeps what is dear to compute (attention, every second "
            "product, collectives), a number N recomputes every N-th layer; R and RS are letters.",
            show_default=False,
        ),
    ] = ""
    loss: Annotated[
        grid.Loss, _methods("chunked: the logits in parts; liger: Liger's fused head and loss, without logits.")
    ] = "plain"
    dp_replicate: Annotated[
        int, _methods("Groups of GPUs that each hold a sharded replica: HSDP (fsdp2).", converter=whole)
    ] = 1
    fp8: Annotated[bool, _methods("Products of the layers in fp8, by torchao (fsdp2, ddp).", show_default=False)] = (
        False
    )
    lengths: Annotated[
        str,
        _methods(
            "Lengths of the sequences, each cut at --seq-len: uniform:MIN:MAX, normal:MEAN:SD[:MIN:MAX], "
            "lognormal:MEDIAN:SIGMA[:MIN:MAX] or file:PATH, with one length a line; by default all are --seq-len. A "
            "micro batch is padded to its longest.",
            show_default=False,
        ),
    ] = ""
    packing: Annotated[
        bool,
        _methods(
            "Put the sequences of --lengths into rows of --seq-len instead; attention stays within each, and "
            "--micro-batch counts rows.",
            show_default=False,
        ),
    ] = False

    def cells(self, device: grid.Device, here: int) -> list[Cell]:
        """What the options name on a machine with `here` GPUs of its own, without the options that change nothing.
        Raises GridError."""
        return list(dict.fromkeys(without_idle_options(cell)[0] for cell in self._named(device, here)))

    def idle(self, device: grid.Device, here: int) -> list[str]:
        """The options that change nothing for a cell, a clause each. Raises GridError."""
        return list(
            dict.fromkeys(clause for cell in self._named(device, here) for clause in without_idle_options(cell)[1])
        )

    def _named(self, device: grid.Device, here: int) -> list[Cell]:
        trials.check(self.engine)
        if self.preset is not None:
            return self._of_preset(self.preset, device, here)
        own = [name for name in self.engine if name not in grid.ENGINES]
        if not self.method and (not own or len(own) < len(self.engine)):
            raise GridError("name --method (Naive Z2 F+R+Z3+O ...) or a --preset.")
        usual = "own" if own and len(own) == len(self.engine) else "tiny" if device == "cpu" else "7b"
        default_gpus = (here,) if device == "cuda" and here else (1,)
        methods = {name: getattr(self, name) for name in METHODS}
        methods["optim"] = methods.pop("optimizer")
        if self.adamw_8bit and self.optimizer not in ("adamw", "adamw-8bit"):
            raise GridError(f"--adamw-8bit and --optimizer {self.optimizer} are two optimizers; name one.")
        named: list[Cell] = []
        for method in self.method or (grid.NAIVE,):
            task = self.task or Method.parse(method).task
            named += grid.grid(
                models=self.model or (usual,),
                engines=self.engine or ("deepspeed",),
                methods=(method,),
                gpus=self.gpus or default_gpus,
                seq_lens=self.seq_len or (grid.PAPER_SEQ_LEN,),
                micro_batches=[_micro_batch(text) for text in self.micro_batch or ("1",)],
                task=task, grad_accum=self.grad_accum, tp=self.tp, pp=self.pp, cp=self.cp, ep=self.ep,
                attention=self.attention, compile=self.compile, device=device,
                **methods,
            )  # fmt: skip
        return list(dict.fromkeys(named))

    def _of_preset(self, preset: str, device: grid.Device, here: int) -> list[Cell]:
        if len(self.gpus) > 1:
            raise GridError(f"--preset {preset} takes one number of --gpus.")
        check_least(GridError, 1, gpus=next(iter(self.gpus), None))
        if preset == "laptop" and self.gpus and self.gpus[0] > LAPTOP_PROCESSES:
            raise GridError(f"--preset laptop has cells of 1 and 2 processes; --gpus {self.gpus[0]} is more.")
        sizes = ("task", "seq_len", "micro_batch", "grad_accum", "tp", "pp", "cp", "ep", "attention", "compile")
        for name in (*sizes, *METHODS):
            if getattr(self, name) != getattr(Grid, name, None):
                raise GridError(f"--preset {preset} has a --{name.replace('_', '-')} of its own; leave that out.")
        from training_probe import paper

        cells = paper.presets()[preset](self.gpus[0] if self.gpus else here, device)
        methods = {str(Method.parse(text)) for text in self.method}
        chosen = [
            cell for cell in cells
            if (not self.model or cell.model in map(paper.model_name, self.model))
            and (not self.engine or cell.engine in self.engine)
            and (not methods or cell.method in methods)
        ]  # fmt: skip
        if not chosen:
            raise GridError(f"--preset {preset} has no cell of that --model, --engine and --method.")
        return chosen


@offers(*(name for name in names(Grid) if name not in ("tp", "pp", "cp", "ep", "compile", *UNTRACED_METHODS)))
class TracedGrid(Grid):
    """Cells of which every kernel is tied to a part of the model."""


@dataclass(frozen=True, kw_only=True)
class _WithRollouts(Grid):
    """Cells of which some need not be run."""

    rollout_gb: Annotated[
        float | None,
        _methods(
            "GiB that the engine of rollouts takes of each GPU (grpo); by default bf16 weights and the KV cache of a "
            "micro batch. 0: it sleeps meanwhile, or runs elsewhere."
        ),
    ] = None

    def _named(self, device: grid.Device, here: int) -> list[Cell]:
        if self.rollout_gb is not None and not 0 <= self.rollout_gb < BILLION:
            raise GridError(f"--rollout-gb is {self.rollout_gb:g}; it must be from 0 to below a billion.")
        return [msgspec.structs.replace(cell, rollout_gb=self.rollout_gb) for cell in super()._named(device, here)]


@offers(*(name for name in names(_WithRollouts) if name != "device"))
class PredictedGrid(_WithRollouts):
    """Cells on GPUs that need not be here."""


def multiplies_bf16(cpu_info: Path) -> bool:
    """Whether the CPU has instructions for bf16, as Linux says; one that does not say is taken to have them."""
    try:
        words = set(cpu_info.read_text().split())
    except OSError:
        return True
    return not words.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """How the cells are measured. Steps: None stands for the paper's (30, 100, 3), or for (2, 100, 1) of the laptop,
    (2, 20, 1) on a CPU without bf16."""

    warmup_steps: Annotated[
        int | None, _measured("Steps before the clock starts; by default 30, laptop: 2.", converter=whole)
    ] = None
    steps: Annotated[
        int | None, _measured("Timed steps; by default 100, laptop without bf16: 20.", converter=whole)
    ] = None
    runs: Annotated[
        int | None,
        _measured("Launches of each cell, in processes of their own; by default 3, laptop: 1.", converter=whole),
    ] = None
    timeline: Annotated[
        bool,
        _measured(
            "Also record, in a launch that is not timed, what memory the first four steps hold: a figure.",
            show_default=False,
        ),
    ] = False
    checkpoint_io: Annotated[
        bool,
        _measured(
            "Also save and load a checkpoint once, after the first run's timed steps, in the results' directory.",
            show_default=False,
        ),
    ] = False
    deepspeed: OwnDeepSpeed = None
    timeout: Annotated[float, _measured("Seconds without a new step after which a cell is ended.")] = 600.0
    limit: Annotated[float | None, _measured("Seconds that a whole cell may take.")] = None
    max_micro_batch: Annotated[int, _measured("Where a search for max ends.", converter=whole)] = (
        grid.PAPER_MAX_MICRO_BATCH
    )
    skip: Skip = True
    host_memory_gb: Annotated[float | None, _measured("Limit of each process's own memory, GiB.")] = None
    platform: Platform = ""

    def settings(
        self,
        preset: str | None,
        known: dict[str, Model],
        gpu_ids: tuple[int, ...],
        argv: Iterable[str],
        where: OnCluster | None = None,
    ) -> Settings:
        """Raises GridError for numbers that make no measurement."""
        from training_probe.results import LEAST_LOSSES
        from training_probe.sweep.cell import Settings

        laptop = LAPTOP_STEPS if gpu_ids or multiplies_bf16(CPU_INFO) else SLOW_LAPTOP_STEPS
        usual = laptop if preset == "laptop" else PAPER_STEPS
        given = (self.warmup_steps, self.steps, self.runs)
        warmup_steps, steps, runs = (own if value is None else value for value, own in zip(given, usual, strict=True))
        check_least(GridError, 0, warmup_steps=warmup_steps)
        check_least(GridError, 1, steps=steps, runs=runs, max_micro_batch=self.max_micro_batch)
        if warmup_steps + steps < LEAST_LOSSES:
            raise GridError(
                f"--warmup-steps {warmup_steps} and --steps {steps} are too few to see whether the loss falls; "
                f"name at least {LEAST_LOSSES} together."
            )
        check_above_0("--timeout", self.timeout)
        check_above_0("--limit", self.limit)
        check_above_0("--host-memory-gb", self.host_memory_gb)
        if self.checkpoint_io and where is not None:
            raise GridError("--checkpoint-io measures the disk of one machine; leave it out with several nodes.")
        return Settings(
            platform=self.platform, preset=preset, models=known, gpu_ids=gpu_ids,
            warmup_steps=warmup_steps, steps=steps, runs=runs,
            timeline=self.timeline, checkpoint_io=self.checkpoint_io, timeout_s=self.timeout, limit_s=self.limit,
            max_micro_batch=self.max_micro_batch, no_skip=not self.skip,
            host_memory_bytes=None if self.host_memory_gb is None else int(self.host_memory_gb * (1 << 30)),
            deepspeed=None if self.deepspeed is None else own_deepspeed.read(self.deepspeed),
            on=where.on if where else None, nodes_per_cell=max(where.nodes_per_cell, where.nnodes) if where else 1,
            argv=tuple(argv),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """How the cells are traced."""

    warmup_steps: Annotated[int, _measured("Steps before anything is timed.", converter=whole)] = 3
    steps: Annotated[int, _measured("Steps that are timed bare, and as many that are traced.", converter=whole)] = 3
    deepspeed: OwnDeepSpeed = None
    timeout: Annotated[float, _measured("Seconds after which a cell is ended.")] = 600.0
    skip: Skip = True
    platform: Platform = ""

    def settings(
        self, preset: str | None, known: dict[str, Model], gpu_ids: tuple[int, ...], argv: Iterable[str]
    ) -> Settings:
        """Raises GridError for numbers that make no measurement."""
        from training_probe.sweep.cell import Settings

        check_least(GridError, 1, warmup_steps=self.warmup_steps, steps=self.steps)
        check_above_0("--timeout", self.timeout)
        return Settings(
            platform=self.platform, preset=preset, models=known, gpu_ids=gpu_ids, warmup_steps=self.warmup_steps,
            steps=self.steps, runs=1, timeout_s=self.timeout, no_skip=not self.skip, argv=tuple(argv),
            deepspeed=None if self.deepspeed is None else own_deepspeed.read(self.deepspeed),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SeveralNodes:
    """The same command on several nodes, as with torchrun."""

    nnodes: Annotated[
        int,
        _where(
            "Nodes that share each cell's processes, or the ranks: the same command is started on every one, with the "
            "same LLM_DISSECT_TOKEN in its environment. --gpus counts all of them together; by default all GPUs of all "
            "nodes, on the CPU one process a node.",
            converter=whole,
        ),
    ] = 1
    node_rank: Annotated[
        int | None,
        _where("Which of the nodes this one is, from 0. Node 0 keeps the results.", converter=whole),
    ] = None
    rdzv_endpoint: Annotated[
        str | None, _where("HOST:PORT, an address of node 0 that the others reach, and a port that is free there.")
    ] = None

    def check_nodes(self, on: str | None, gpus: Sequence[int], *, ranked: bool = True) -> None:
        """That nodes can meet. on: as in OnCluster; gpus: as they are named; ranked: whether this one's number must be
        named. Raises GridError."""
        if not 1 <= self.nnodes <= MAX_NODES:
            raise GridError(f"--nnodes is {self.nnodes}; it must be from 1 to {MAX_NODES}.")
        if self.nnodes == 1:
            if (self.node_rank or 0) != 0:
                raise GridError(f"--node-rank is {self.node_rank} of one node; name how many there are with --nnodes.")
            if self.rdzv_endpoint is not None and self.node_rank is None:
                raise GridError("--rdzv-endpoint is where several nodes meet; name how many with --nnodes.")
            return
        if on is not None:
            raise GridError(f"--on {on.partition(':')[0]} finds its nodes itself; leave --nnodes or --on out.")
        if self.rdzv_endpoint is None:
            raise GridError(f"{self.nnodes} nodes need a place to meet; name --rdzv-endpoint HOST:PORT, of node 0.")
        assert self.endpoint
        if ranked and self.node_rank is None:
            raise GridError(f"name which of the {self.nnodes} nodes this one is with --node-rank, from 0.")
        if self.node_rank is not None and not 0 <= self.node_rank < self.nnodes:
            raise GridError(f"--node-rank is {self.node_rank}; it must be from 0 to {self.nnodes - 1}.")
        for count in gpus:
            check_divisible(count, self.nnodes)

    @property
    def endpoint(self) -> tuple[str, int]:
        """Raises GridError."""
        text = self.rdzv_endpoint or ""
        host, _, port = text.rpartition(":")
        known = port.isascii() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 1 << 16
        if not known or ":" in host or not is_host(host):
            raise GridError(
                f"--rdzv-endpoint is '{printable(text, 80)}'; it must be HOST:PORT, a name or an IPv4 address of "
                "node 0 and a port from 1 to 65535."
            )
        return host, int(port)

    def meeting(self, asked: object) -> Meeting:
        """This node's part in it. asked: the options that must be equal on all nodes. Raises ConfigError."""
        from training_probe.launch import rendezvous

        return rendezvous.meeting(self.nnodes, self.node_rank or 0, self.endpoint, repr(asked))


@dataclass(frozen=True, kw_only=True)
class OnCluster(SeveralNodes):
    """Where the cells run."""

    on: Annotated[
        str | None,
        _where(
            "ray: on the nodes of the Ray cluster that this machine is part of, at most one cell on a node at a time; "
            "ray:HOST:PORT: of that one; slurm: print sbatch scripts, start nothing. By default on this machine."
        ),
    ] = None
    nodes_per_cell: Annotated[int, _where("Nodes that share each cell's processes.", converter=whole)] = 1

    def check(self, gpus: Sequence[int], *, ranked: bool) -> None:
        """gpus, ranked: as in check_nodes. Raises GridError and ConfigError."""
        self.check_nodes(self.on, gpus, ranked=ranked)
        if self.on is None:
            if self.nodes_per_cell != 1:
                raise GridError(
                    "--nodes-per-cell is for the nodes of a cluster; name it with --on ray, or leave it out."
                )
            return
        if self.on != "slurm":
            from loadgen.config import ray_address

            ray_address(self.on, "slurm, or ")
        if not 1 <= self.nodes_per_cell <= MAX_NODES:
            raise GridError(f"--nodes-per-cell is {self.nodes_per_cell}; it must be from 1 to {MAX_NODES}.")


def without_idle_options(cell: Cell) -> tuple[Cell, list[str]]:
    """Drops options that have no effect on this cell; returns the cell and a clause for each. Raises GridError or
    ConfigError."""
    spec = _described(cell.model).spec if cell.recomputed_every else None
    return grid.settled(cell, None if spec is None else spec.layers)


def _micro_batch(text: str) -> int | None:
    if text == "max":
        return None
    if not text.isdecimal() or len(text) > 6:
        raise GridError(f"--micro-batch is '{text}'; it must be a number from 1 to 999999, or max.")
    return int(text)


def known_models(cells: Sequence[Cell]) -> dict[str, Model]:
    """What the engines build for the cells' models. Raises GridError or ConfigError for one that they cannot."""
    return {name: _model(name) for name in dict.fromkeys(cell.model for cell in cells if not cell.own)}


def described_models(cells: Sequence[Cell]) -> dict[str, Described]:
    """What the cells' models are, whether or not the engines can build them. Raises GridError or ConfigError for one
    whose shape is not known."""
    return {name: _described(name) for name in dict.fromkeys(cell.model for cell in cells)}


def text_alone(cells: Sequence[Cell]) -> list[str]:
    """A sentence for each model that takes more than text: what of it is neither built nor counted."""
    named = [
        _named(name) for name in dict.fromkeys(cell.model for cell in cells if not cell.own and cell.model != TINY.name)
    ]
    return [
        f"{printable(each.name, 100)} is taken as its decoder of text: what encodes images or sound is neither built "
        "nor counted, and their tokens are part of --seq-len."
        for each in named
        if any(isinstance(each.config.get(field), dict) for field in ("vision_config", "audio_config"))
    ]


def _model(name: str) -> Model:
    from backends import catalog

    if name == TINY.name:
        return Model(spec=TINY)
    named = _named(name)
    if named.spec is None:
        raise GridError(f"'{printable(name, 100)}' cannot be trained: {named.unknown}.")
    spec, unknown, own = None, "", catalog.find(name) is None
    try:
        spec = shape_of(named.spec)
    except NoShape as reason:
        unknown = str(reason)
    if spec is not None and not own:
        return Model(spec=spec)
    _check_type(named.spec)
    return Model(
        spec=spec, name=named.name, config=dict(named.config) if own else catalog.config_of(named.spec),
        directory=str(named.directory) if named.directory else None, unknown=unknown,
    )  # fmt: skip


def _described(name: str) -> Described:
    from training_probe.memory.text import Described

    if name == TINY.name:
        return Described(TINY.decoder)
    named = _named(name)
    if named.spec is None:
        return Described(None, named.unknown, named.unknown)
    try:
        return Described(shape_of(named.spec).decoder)
    except NoShape as reason:
        return Described(named.spec, unbuilt=str(reason))


def _named(name: str) -> NamedModel:
    """What of that name is there. Raises GridError or ConfigError."""
    from loadgen import models

    named = models.find(name)
    if named.spec is None and named.directory is None:
        raise GridError(f"the shape of '{printable(name, 100)}' is not known: {named.unknown}.")
    if named.flaw:
        raise GridError(f"{named.directory}/config.json describes no model: {named.flaw}; mend it.")
    return named


def _check_type(spec: ModelSpec) -> None:
    """That the installed transformers knows the model_type, as far as its files show without being imported. Raises
    GridError."""
    from importlib.util import find_spec

    found = find_spec("transformers")
    if found is None:
        return
    types = ""
    for place in found.submodule_search_locations or ():
        for path in (Path(place) / "models" / "auto").glob("*.py"):
            if path.name in TYPE_FILES:
                types += path.read_text(encoding="utf-8")
    if '"llama"' in types and f'"{spec.model_type}"' not in types:
        raise GridError(
            f"{spec.name} has the model_type '{spec.model_type}', which the installed transformers does not know; "
            "install a version that does."
        )


def visible_gpus(inventory: Inventory) -> tuple[int, ...]:
    """NVML indices of the GPUs that may be used. Raises GpuError."""
    from backends import gpus

    return gpus.choose(inventory, None)


def check_large(cells: Sequence[Cell], known: Mapping[str, Model]) -> None:
    """That no model of real size is trained on the CPU because nobody chose a device. Raises GridError."""
    for cell in cells:
        spec = None if cell.own else known[cell.model].decoder
        if cell.device == "cpu" and spec is not None and spec.parameters > CPU_PARAMETERS:
            raise GridError(
                f"{cell.model} is for GPUs and this machine has none that can be used; with --device cpu its "
                f"{spec.parameters / 1e9:.1f} billion parameters are trained all the same."
            )


def check_divisible(count: int, nodes: int) -> None:
    """That nodes can have equally many of so many processes. Raises GridError."""
    if count % nodes:
        what = f"{count} process{'' if count == 1 else 'es'}"
        raise GridError(f"{nodes} nodes cannot share {what} evenly; name --gpus as a multiple of {nodes}.")


def check_possible(cells: Sequence[Cell], known: Mapping[str, Model]) -> None:
    """That any of the cells can be run anywhere. Raises GridError."""
    if any(cell.task == "grpo" for cell in cells):
        raise GridError(
            "grpo needs an engine of rollouts, which is not run here; memory and plan predict it, and of what is run "
            "dpo is the nearest (--task dpo)."
        )
    models = [Model() if cell.own else known[cell.model] for cell in cells]
    reasons = [
        refusals.impossible(cell, model.decoder, model.unknown) for cell, model in zip(cells, models, strict=True)
    ]
    if all(reasons):
        many = "" if len(cells) == 1 else f"none of the {len(cells)} cells can be run; "
        raise GridError(f"{many}{cells[0].name} cannot be run: {reasons[0]}.")


def check_processes(count: int) -> None:
    """That so many processes can share the CPU of this machine. Raises GridError."""
    from training_probe.launch.runner import PROCESSES_A_CORE, cores

    here = cores()
    if count > PROCESSES_A_CORE * here:
        raise GridError(
            f"--gpus asks for {count} processes on the CPU, and this machine's {here} core{'' if here == 1 else 's'} "
            f"can take {PROCESSES_A_CORE * here}; name fewer."
        )


def check_machine(cells: Sequence[Cell], here: int) -> None:
    """That the cells can be started on this machine at all. Raises GridError."""
    from training_probe.launch.node import installed

    most = max(cells, key=lambda cell: cell.gpus)
    if most.device == "cpu":
        check_processes(most.gpus)
    if most.device == "cuda" and most.gpus > here:
        have = f"has {here}" if here else "has none that can be used; --device cpu needs none"
        raise GridError(f"{most.gpus} GPU{'' if most.gpus == 1 else 's'} would be needed and this machine {have}.")
    lacking = [name for name in needed(cells) if not installed(name)]
    if lacking:
        extra = "train,megatron" if "megatron.core" in lacking else "train"
        names = ", ".join(name.partition(".")[0] for name in lacking)
        raise GridError(f"{names} {'is' if len(lacking) == 1 else 'are'} not installed; {install_command(extra)}.")


def check_checkpoints(cells: Sequence[Cell], settings: Settings, directory: Path) -> None:
    """That a checkpoint of each cell can be saved, and that the disk has room for it. Raises GridError."""
    import shutil

    from training_probe import flops
    from training_probe.sweep.cell import counted

    if other := next((cell.engine for cell in cells if cell.own or cell.engine == "megatron"), None):
        raise GridError(f"--checkpoint-io saves as ddp, fsdp2 and deepspeed do, not {other}; leave one of them out.")
    place = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    free_bytes = shutil.disk_usage(place).free
    for cell in cells:
        spec = counted(cell, settings)
        needed_bytes = 0 if spec is None else CHECKPOINT_BYTES * flops.weights(spec, cell).trainable
        if needed_bytes > free_bytes:
            raise GridError(
                f"a checkpoint of {cell.name} takes up to {needed_bytes / 1e9:.1f} GB and {place} has "
                f"{free_bytes / 1e9:.1f} GB left; name an --out with more room."
            )


def check_built(known: Mapping[str, Model]) -> None:
    """That the installed transformers builds what config.json files of the user's describe. Takes the seconds that its
    import takes. Raises GridError."""
    import subprocess

    configs = {name: model.config for name, model in known.items() if model.config is not None and model.directory}
    if not configs:
        return
    from training_probe.launch.runner import environment

    ended = subprocess.run(
        (sys.executable, "-m", "training_probe.worker.buildable"), input=msgspec.json.encode(configs),
        capture_output=True, env={**os.environ, **environment(os.environ, 1)}, check=False,
    )  # fmt: skip
    if ended.returncode != 0:
        last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise GridError(f"transformers cannot be asked whether it builds the model: {printable(last, 200)}; mend that.")
    for name, reason in msgspec.json.decode(ended.stdout, type=dict[str, str]).items():
        raise GridError(
            f"{printable(name, 100)}: transformers cannot build what its config.json describes "
            f"({printable(reason, 400)}); mend it."
        )


def needed(cells: Sequence[Cell]) -> list[str]:
    """The modules that the cells' processes import."""
    names = dict.fromkeys(PACKAGES)
    for cell in cells:
        method = cell.letters
        if cell.engine == "deepspeed":
            names["deepspeed"] = None
        if cell.engine == "megatron":
            names["megatron.core"] = None
        if method.adapter:
            names["peft"] = None
        if method.four_bit or (cell.eight_bit and cell.engine != "fsdp2"):
            names["bitsandbytes"] = None
        if cell.fp8 or cell.states == "bf16-stochastic" or (cell.eight_bit and cell.engine == "fsdp2"):
            names["torchao"] = None
        if cell.loss == "liger":
            names["liger_kernel"] = None
    return list(names)
