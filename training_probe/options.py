"""The options of `sweep`, `plan` and `memory`, each declared once, and the cells that they mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group

from loadgen.option_types import names, offers, option
from training_probe import grid
from training_probe.grid import Cell, Engine, GridError, Method, Model, Task
from training_probe.llama_shape import LlamaShape, NoShape, shape_of

if TYPE_CHECKING:  # a line of options is read in a moment; what it means may take longer
    from cyclopts import Token

    from backends.gpus import Inventory
    from loadgen.models import Model as NamedModel
    from training_probe.memory.text import Described
    from training_probe.sweep.manifests import Settings

TINY = LlamaShape(
    name="tiny", hf_id="tiny", hidden=256, layers=4, heads=8, kv_heads=4, intermediate=688, vocab_size=2048,
    max_position=2048,
)  # fmt: skip
PACKAGES = ("torch", "transformers")  # besides those of the engine and the method
PAPER_STEPS, LAPTOP_STEPS = (30, 100, 3), (2, 8, 1)  # warm-up, timed, runs
CPU_PARAMETERS = 1e9  # a model with more takes a CPU minutes a step and all memory of a laptop
MAX_NODES = 1024
BILLION = 1e9  # beyond it nothing is meant seriously


def whole(kind: Any, tokens: Sequence[Token]) -> Any:
    """Numbers as they are typed, one or several; no fraction is rounded in silence. Raises ValueError."""
    numbers = []
    for text in (token.value for token in tokens):
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdecimal() and len(digits) < 10):
            raise ValueError(f"'{text}' is not a whole number below a billion.")
        numbers.append(int(text))
    return numbers[0] if kind is int else tuple(numbers)


def check_above_0(flag: str, value: float | None) -> None:
    """Raises GridError."""
    if value is not None and not 0 < value < BILLION:
        raise GridError(f"{flag} is {value:g}; it must be above 0 and below a billion.")


CELLS = Group("Cells: every combination of what is named", sort_key=1)
MEASURED = Group("How they are measured", sort_key=2)
WHERE = Group("Where they run", sort_key=3)
OUTPUT = Group("The results", sort_key=4)

_cells, _measured, _where = partial(option, CELLS), partial(option, MEASURED), partial(option, WHERE)
_list = partial(_cells, consume_multiple=1, show_default=False)

Skip = Annotated[bool, _measured("Leave out cells that are certain to run out of memory.", negative=None)]
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
        tuple[str, ...], _list("7b, 13b, 70b, llama-3-8b, mixtral-8x7b, ..., tiny, or a directory with a config.json.")
    ] = ()
    task: Annotated[Task | None, _cells("By default finetune for methods with L, QL or PT, else pretrain.")] = None
    engine: Annotated[tuple[Engine, ...], _list("By default deepspeed.")] = ()
    method: Annotated[
        tuple[str, ...],
        _list(
            "Letters joined by +, as in F+R+Z3+O: Z1 Z2 Z3 O Q R RS F L QL PT; Naive has none (training_probe letters)."
        ),
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
    tp: Annotated[int, _cells("Tensor parallel (megatron).", converter=whole)] = 1
    pp: Annotated[int, _cells("Pipeline parallel (megatron).", converter=whole)] = 1
    cp: Annotated[int, _cells("Context parallel (megatron).", converter=whole)] = 1
    attention: Annotated[Literal["eager", "math"], _cells("What attention is without the letter F.")] = "eager"
    compile: Annotated[bool, _cells("torch.compile every layer (fsdp2, ddp).", show_default=False)] = False
    device: Annotated[Literal["cuda", "cpu"] | None, _cells("By default cuda where there is a GPU.")] = None

    def cells(self, device: grid.Device, here: int) -> list[Cell]:
        """What the options name on a machine with `here` GPUs of its own. Raises GridError."""
        if self.preset is not None:
            return self._of_preset(self.preset, device, here)
        if not self.method:
            raise GridError("name --method (Naive Z2 F+R+Z3+O ...) or a --preset.")
        default_gpus = (here,) if device == "cuda" and here else (1,)
        named: list[Cell] = []
        for method in self.method:
            task = self.task or Method.parse(method).task
            named += grid.grid(
                models=self.model or ("tiny" if device == "cpu" else "7b",),
                engines=self.engine or ("deepspeed",),
                methods=(method,),
                gpus=self.gpus or default_gpus,
                seq_lens=self.seq_len or (grid.PAPER_SEQ_LEN,),
                micro_batches=[_micro_batch(text) for text in self.micro_batch or ("1",)],
                task=task, grad_accum=self.grad_accum, tp=self.tp, pp=self.pp, cp=self.cp,
                attention=self.attention, compile=self.compile, device=device,
            )  # fmt: skip
        return list(dict.fromkeys(named))

    def _of_preset(self, preset: str, device: grid.Device, here: int) -> list[Cell]:
        if len(self.gpus) > 1:
            raise GridError(f"--preset {preset} takes one number of --gpus.")
        if self.gpus and self.gpus[0] < 1:
            raise GridError(f"--gpus is {self.gpus[0]}; it must be at least 1.")
        for name in ("task", "seq_len", "micro_batch", "grad_accum", "tp", "pp", "cp", "attention", "compile"):
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


@offers(*(name for name in names(Grid) if name not in ("tp", "pp", "cp", "compile")))
class TracedGrid(Grid):
    """Cells of which every kernel is tied to a part of the model."""


@offers(*(name for name in names(Grid) if name != "device"))
class PredictedGrid(Grid):
    """Cells on GPUs that need not be here."""


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """How the cells are measured. Steps: None stands for the paper's (30, 100, 3), or the laptop preset's (2, 8, 1)."""

    warmup_steps: Annotated[
        int | None, _measured("Steps before the clock starts; by default 30, laptop: 2.", converter=whole)
    ] = None
    steps: Annotated[int | None, _measured("Timed steps; by default 100, laptop: 8.", converter=whole)] = None
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
        from training_probe.sweep.manifests import Settings

        usual = LAPTOP_STEPS if preset == "laptop" else PAPER_STEPS
        given = (self.warmup_steps, self.steps, self.runs)
        warmup_steps, steps, runs = (own if value is None else value for value, own in zip(given, usual, strict=True))
        least = {"--warmup-steps": (warmup_steps, 0), "--steps": (steps, 1), "--runs": (runs, 1)}
        least["--max-micro-batch"] = (self.max_micro_batch, 1)
        for flag, (value, at_least) in least.items():
            if value < at_least:
                raise GridError(f"{flag} is {value}; it must be at least {at_least}.")
        check_above_0("--timeout", self.timeout)
        check_above_0("--limit", self.limit)
        check_above_0("--host-memory-gb", self.host_memory_gb)
        return Settings(
            platform=self.platform, preset=preset, models=known, gpu_ids=gpu_ids,
            warmup_steps=warmup_steps, steps=steps, runs=runs,
            timeline=self.timeline, timeout_s=self.timeout, limit_s=self.limit,
            max_micro_batch=self.max_micro_batch, no_skip=not self.skip,
            host_memory_bytes=None if self.host_memory_gb is None else int(self.host_memory_gb * (1 << 30)),
            on=where.on if where else None, nodes_per_cell=where.nodes_per_cell if where else 1,
            argv=tuple(argv),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """How the cells are traced."""

    warmup_steps: Annotated[int, _measured("Steps before anything is timed.", converter=whole)] = 3
    steps: Annotated[int, _measured("Steps that are timed bare, and as many that are traced.", converter=whole)] = 3
    timeout: Annotated[float, _measured("Seconds after which a cell is ended.")] = 600.0
    skip: Skip = True
    platform: Platform = ""

    def settings(
        self, preset: str | None, known: dict[str, Model], gpu_ids: tuple[int, ...], argv: Iterable[str]
    ) -> Settings:
        """Raises GridError for numbers that make no measurement."""
        from training_probe.sweep.manifests import Settings

        for flag, value in (("--warmup-steps", self.warmup_steps), ("--steps", self.steps)):
            if value < 1:
                raise GridError(f"{flag} is {value}; it must be at least 1.")
        check_above_0("--timeout", self.timeout)
        return Settings(
            platform=self.platform, preset=preset, models=known, gpu_ids=gpu_ids, warmup_steps=self.warmup_steps,
            steps=self.steps, runs=1, timeout_s=self.timeout, no_skip=not self.skip, argv=tuple(argv),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OnCluster:
    """Where the cells run."""

    on: Annotated[
        str | None,
        _where(
            "ray: on the nodes of the Ray cluster that this machine is part of, at most one cell on a node at a time; "
            "ray:HOST:PORT: of that one; slurm: print sbatch scripts, start nothing. By default on this machine."
        ),
    ] = None
    nodes_per_cell: Annotated[int, _where("Nodes that share each cell's processes.", converter=whole)] = 1

    def check(self) -> None:
        """Raises GridError and ConfigError."""
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


def _micro_batch(text: str) -> int | None:
    if text == "max":
        return None
    if not text.isdecimal() or len(text) > 6:
        raise GridError(f"--micro-batch is '{text}'; it must be a number from 1 to 999999, or max.")
    return int(text)


def known_models(cells: Sequence[Cell]) -> dict[str, Model]:
    """What the engines build for the cells' models. Raises GridError or ConfigError for one that they cannot."""
    return {name: _model(name) for name in dict.fromkeys(cell.model for cell in cells)}


def described_models(cells: Sequence[Cell]) -> dict[str, Described]:
    """What the cells' models are, whether or not the engines can build them. Raises GridError or ConfigError for one
    whose shape is not known."""
    return {name: _described(name) for name in dict.fromkeys(cell.model for cell in cells)}


def _model(name: str) -> Model:
    from backends import catalog

    if name == TINY.name:
        return Model(spec=TINY)
    named = _named(name)
    spec, unknown = None, named.unknown
    if named.spec is not None:
        try:
            spec = shape_of(named.spec)
        except NoShape as reason:
            unknown = str(reason)
    if spec is not None and catalog.find(name) is not None:
        return Model(spec=spec)
    if named.directory is None:
        raise GridError(
            f"{unknown}, which is not built of a name; give a directory that holds its config.json, or ask "
            "training_probe memory."
        )
    return Model(spec=spec, directory=str(named.directory), unknown=unknown)


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
        raise GridError(f"the shape of '{name}' is not known here; give a directory that holds its config.json.")
    return named


def visible_gpus(inventory: Inventory) -> tuple[int, ...]:
    """NVML indices of the GPUs that may be used. Raises GpuError."""
    from backends import gpus

    return gpus.choose(inventory, None)


def check_large(cells: Sequence[Cell], known: Mapping[str, Model]) -> None:
    """That no model of real size is trained on the CPU because nobody chose a device. Raises GridError."""
    for cell in cells:
        spec = known[cell.model].spec
        if cell.device == "cpu" and spec is not None and spec.parameters > CPU_PARAMETERS:
            raise GridError(
                f"{cell.model} is for GPUs and this machine has none that can be used; with --device cpu its "
                f"{spec.parameters / 1e9:.1f} billion parameters are trained all the same."
            )


def check_divisible(cells: Sequence[Cell], nodes: int) -> None:
    """That each cell has as many processes on each of its nodes. Raises GridError."""
    for cell in cells:
        if cell.gpus % nodes:
            what = f"{cell.gpus} process{'' if cell.gpus == 1 else 'es'}"
            raise GridError(f"{nodes} nodes cannot share {what} evenly; name --gpus as a multiple of {nodes}.")


def check_machine(cells: Sequence[Cell], here: int) -> None:
    """That the cells can be started on this machine at all. Raises GridError."""
    from training_probe.launch.node import installed

    most = max(cells, key=lambda cell: cell.gpus)
    if most.device == "cuda" and most.gpus > here:
        have = f"has {here}" if here else "has none that can be used; --device cpu needs none"
        raise GridError(f"{most.gpus} GPU{'' if most.gpus == 1 else 's'} would be needed and this machine {have}.")
    lacking = [name for name in needed(cells) if not installed(name)]
    if lacking:
        extra = "train,megatron" if "megatron.core" in lacking else "train"
        names = ", ".join(name.partition(".")[0] for name in lacking)
        raise GridError(
            f"{names} {'is' if len(lacking) == 1 else 'are'} not installed; pip install 'llm-dissect[{extra}]'."
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
        if method.four_bit:
            names["bitsandbytes"] = None
    return list(names)
