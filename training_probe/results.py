"""What a cell gave: from the reports of the ranks to the numbers of a run (RunResult), from its runs to one CellResult,
which is a line of `results.jsonl` when the cell is over. Pure but for that file.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, sqrt
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from backends.exit_codes import UserError
from backends.untrusted import read_json_lines
from training_probe.conditions import Conditions, worst
from training_probe.grid import LORA_ALPHA, LORA_RANK, LORA_TARGETS, Cell, agree
from training_probe.protocol import RankReport, Step

RESULTS_FILE, BREAKDOWN_FILE = "results.jsonl", "breakdown.jsonl"
SCHEMA = "training_probe.result/1"
GIB = 1 << 30
LEAST_LOSSES = 4
LEAST_STEPS = 4  # for percentiles

Amount = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Size = Annotated[int, msgspec.Meta(ge=1)]
Outcome = Literal["ok", "oom", "timeout", "unsupported", "crashed", "skipped"]


class ResultsError(UserError):
    """A file of results that cannot be used. One sentence."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One try of a search for the largest micro batch."""

    micro_batch: int
    outcome: Outcome
    peak_allocated_bytes: int | None = None


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of one run. tokens_per_s: all ranks together, None if it is not known of all of them. Peaks
    are bytes by rank, of the ranks that reported them; device_memory_bytes: the smallest. timed: the timed steps of
    rank 0. report: that of the first rank that has losses, else of the first that reported."""

    tokens_per_s: float | None = None
    steps: int = 0
    report: RankReport = msgspec.field(default_factory=lambda: RankReport(rank=0, outcome="ok"))
    timed: tuple[Step, ...] = ()
    allocated_bytes: tuple[int, ...] = ()
    reserved_bytes: tuple[int, ...] = ()
    device_memory_bytes: int | None = None
    energy_j_per_token: float | None = None
    conditions: tuple[Conditions, ...] = ()  # of the ranks that know theirs
    first_step_s: float | None = None  # of rank 0, with all that is compiled and set up in it


class CellResult(msgspec.Struct, kw_only=True, omit_defaults=False):
    """One row. Memory is of the rank that had most; `_gb` are GiB (2**30 bytes), as the paper's "GB" are.

    tokens_per_s: all GPUs together, without padding, mean and standard deviation over `runs` (tokens_per_s_runs has
    each). batch_size: the micro batch; for a searched one, the largest that fitted, with every attempt in `search`.
    Times are means of a step, ms. mfu_ratio, hfu_ratio: None where the device's peak is not known. valid: the losses
    were finite and fell. outcome other than ok: `reason` is why, and what was measured of it is kept.
    """

    schema: str = SCHEMA
    model: str
    task: str
    engine: str
    method: str
    platform: str
    device_name: str = ""
    gpus: Size
    seq_len: Size
    batch_size: Size | None
    grad_accum: Size = 1
    tp: Size = 1
    pp: Size = 1
    cp: Size = 1
    ep: Size = 1
    attention: str = "eager"
    compile: bool = False
    device: str = "cuda"
    lora_rank: Size = LORA_RANK
    lora_alpha: Size = LORA_ALPHA
    lora_targets: tuple[str, ...] = LORA_TARGETS
    adapter_dtype: str = "bf16"
    double_quant: bool = True
    adamw_8bit: bool = False
    checkpoint: str = ""
    loss: str = "plain"
    dp_replicate: Size = 1
    fp8: bool = False
    optim: str = "adamw"
    lengths: str = ""
    packing: bool = False
    padding_ratio: Amount | None = None  # the share of positions that hold no token, where lengths are drawn
    states: str = "fp32"
    dora: bool = False
    offload_activations: bool = False
    deepspeed: dict[str, Any] | None = None  # the user's own configuration, merged over what the cell gives
    cell: str  # Cell.name: what resuming goes by
    outcome: Outcome
    reason: str = ""
    valid: bool = False
    tokens_per_s: Amount | None = None
    tokens_per_s_std: Amount | None = None
    tokens_per_s_runs: list[Amount] = []
    runs: Count = 0
    warmup_steps: Count = 0
    steps: Count = 0
    step_ms: Amount | None = None
    step_ms_std: Amount | None = None  # over the steps of all runs
    step_ms_p10: Amount | None = None  # as the above, of at least 4 steps
    step_ms_p90: Amount | None = None
    forward_ms: Amount | None = None
    backward_ms: Amount | None = None
    optimizer_ms: Amount | None = None
    mfu_ratio: Amount | None = None
    hfu_ratio: Amount | None = None
    peak_memory_gb: Amount | None = None  # allocated
    peak_reserved_gb: Amount | None = None
    peak_memory_gb_by_rank: list[Amount] = []
    peak_reserved_gb_by_rank: list[Amount] = []
    device_memory_gb: Amount | None = None
    predicted_memory_gb: Amount | None = None  # to be allocated
    predicted_terms_gb: dict[str, Amount] = {}
    energy_j_per_token: Amount | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    parameters: Count | None = None
    trainable_parameters: Count | None = None
    optimizer: str = ""
    versions: dict[str, str] = {}
    search: list[Attempt] = []
    started_unix_s: Amount = 0.0
    wall_s: Amount = 0.0  # of the whole cell, its start and its search included
    log: str = ""  # of the last run, relative to the sweep's directory
    nodes: list[str] = []  # addresses of the nodes that it ran on, where that was a cluster
    conditions: Conditions | None = None  # the worst of the runs and ranks
    first_step_ms: Amount | None = None  # the mean over the runs
    data_wait_ms: Amount | None = None  # for a step's data, where a script loads them; a sweep's lie on the device
    checkpoint_bytes: Count | None = None  # with --checkpoint-io, in the first run
    checkpoint_save_s: Amount | None = None
    checkpoint_load_s: Amount | None = None

    def __post_init__(self) -> None:
        agree(self)

    @property
    def state(self) -> Outcome | Literal["invalid"]:
        """The outcome; of one that ran and whose losses mean nothing, `invalid`."""
        return "invalid" if self.outcome == "ok" and not self.valid else self.outcome

    @property
    def step_error_ratio(self) -> float | None:
        """The standard error of a step's mean time, to it. It takes steps to be independent of each other. Where slow
        phases last for many steps it is too small; how much runs differ from each other it does not know at all."""
        if not self.step_ms or self.step_ms_std is None or not self.steps:
            return None
        return self.step_ms_std / self.step_ms / sqrt(self.steps * max(1, self.runs))

    @property
    def search_was_limited(self) -> bool:
        """Whether every micro batch that was tried fitted: a larger one may, too."""
        return bool(self.search) and all(attempt.outcome == "ok" for attempt in self.search)

    def add_runs(self, runs: Sequence[RunResult]) -> None:
        """Sets what follows from the runs, if there are any; means over runs are of those that know the value."""
        if not runs:
            return
        first, report, timed = runs[0], runs[0].report, [step for run in runs for step in run.timed]
        speeds = [run.tokens_per_s for run in runs if run.tokens_per_s is not None]
        step_ms = [step.step_s * 1e3 for step in timed]
        self.valid = all(loss_doubt(run.report.losses) is None for run in runs)
        self.tokens_per_s, self.tokens_per_s_std, self.tokens_per_s_runs = _mean(speeds), _std(speeds), speeds
        self.runs, self.steps = len(speeds), first.steps
        self.step_ms, self.step_ms_std = _mean(step_ms), _std(step_ms)
        if len(step_ms) >= LEAST_STEPS:
            tenths = statistics.quantiles(step_ms, n=10, method="inclusive")
            self.step_ms_p10, self.step_ms_p90 = tenths[0], tenths[-1]
        self.first_step_ms = _mean_ms(run.first_step_s for run in runs)
        if (saved := report.checkpoint) is not None:
            self.checkpoint_bytes, self.checkpoint_save_s = saved.bytes, saved.save_s
            self.checkpoint_load_s = saved.load_s
        self.conditions = worst([span for run in runs for span in run.conditions])
        self.forward_ms = _mean_ms(step.forward_s for step in timed)
        self.backward_ms = _mean_ms(step.backward_s for step in timed)
        self.optimizer_ms = _mean_ms(step.optimizer_s for step in timed)
        self.peak_memory_gb_by_rank = _by_rank(run.allocated_bytes for run in runs)
        self.peak_reserved_gb_by_rank = _by_rank(run.reserved_bytes for run in runs)
        self.peak_memory_gb = max(self.peak_memory_gb_by_rank, default=None)
        self.peak_reserved_gb = max(self.peak_reserved_gb_by_rank, default=None)
        self.device_memory_gb = None if first.device_memory_bytes is None else first.device_memory_bytes / GIB
        self.energy_j_per_token = _mean([joules for run in runs if (joules := run.energy_j_per_token) is not None])
        self.loss_first, self.loss_last = (report.losses[0], report.losses[-1]) if report.losses else (None, None)
        self.parameters, self.trainable_parameters = report.parameters, report.trainable_parameters
        self.optimizer, self.versions, self.device_name = report.optimizer, report.versions, report.device_name


# What a result has of its cell by the same name: all but the micro batch, which it has as it was found.
SHARED = tuple(name for name in Cell.__struct_fields__ if name in CellResult.__struct_fields__)


def of_cell(cell: Cell, *, platform: str, outcome: Outcome, reason: str = "", **more: Any) -> CellResult:
    """A result of this cell. more: other fields of CellResult."""
    shared = {name: getattr(cell, name) for name in SHARED}
    return CellResult(
        **shared, **{"batch_size": cell.micro_batch, **more},
        cell=cell.name, platform=platform, outcome=outcome, reason=reason,
    )  # fmt: skip


def run_result(cell: Cell, reports: Mapping[int, RankReport], steps: Sequence[Step]) -> RunResult:
    """The numbers of the reports that there are; speed and energy only when every rank reports them."""
    ranks = [reports[rank] for rank in sorted(reports)]
    whole = len(ranks) == cell.gpus
    count = ranks[0].steps if ranks else 0
    tokens = cell.tokens_per_step * count
    seconds = [report.seconds for report in ranks if report.seconds]
    energies = [report.energy_j for report in ranks if report.energy_j is not None]
    memories = [report.device_memory_bytes for report in ranks if report.device_memory_bytes is not None]
    silent = ranks[0] if ranks else RankReport(rank=0, outcome="ok")
    return RunResult(
        tokens_per_s=tokens / max(seconds) if whole and tokens and len(seconds) == len(ranks) else None,
        steps=count,
        report=next((report for report in ranks if report.losses), silent),
        timed=tuple(step for step in steps if step.phase == "timed"),
        allocated_bytes=tuple(r.peak_allocated_bytes for r in ranks if r.peak_allocated_bytes is not None),
        reserved_bytes=tuple(r.peak_reserved_bytes for r in ranks if r.peak_reserved_bytes is not None),
        device_memory_bytes=min(memories, default=None),
        energy_j_per_token=sum(energies) / tokens if whole and tokens and len(energies) == len(ranks) else None,
        conditions=tuple(report.conditions for report in ranks if report.conditions is not None),
        first_step_s=next((step.step_s for step in steps if not step.step), None),
    )


def loss_doubt(losses: Sequence[float | None]) -> str | None:
    """Why these losses do not show that the model was trained, a clause; None when the last quarter of them is lower
    than the first on average."""
    if len(losses) < LEAST_LOSSES:
        return f"{len(losses)} losses are too few to see whether they fall"
    finite = [loss for loss in losses if loss is not None and isfinite(loss)]
    if len(finite) < len(losses):
        return f"{len(losses) - len(finite)} of {len(losses)} losses are not finite"
    quarter = len(finite) // 4
    before, after = statistics.fmean(finite[:quarter]), statistics.fmean(finite[-quarter:])
    return None if after < before else f"the loss did not fall: from {before:.4f} to {after:.4f}"


def _by_rank(runs: Iterable[Sequence[int]]) -> list[float]:
    """The highest of each rank over the runs, GiB; of those runs that know most ranks."""
    known = [list(run) for run in runs]
    ranks = max(map(len, known))
    return [max(peaks) / GIB for peaks in zip(*(run for run in known if len(run) == ranks), strict=True)]


def _mean_ms(seconds: Iterable[float | None]) -> float | None:
    return _mean([spent * 1e3 for spent in seconds if spent is not None])


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _std(values: Sequence[float]) -> float | None:
    """The standard deviation of a sample."""
    return statistics.stdev(values) if len(values) > 1 else None


# The file.


def append(directory: Path, result: CellResult) -> None:
    with (directory / RESULTS_FILE).open("ab") as file:
        file.write(msgspec.json.encode(result) + b"\n")
        file.flush()


def mend(directory: Path) -> None:
    """Cuts off a last line that a kill left unfinished, so that the next result begins a line of its own."""
    with contextlib.suppress(FileNotFoundError), (directory / RESULTS_FILE).open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def read(path: Path) -> list[CellResult]:
    """The results of a sweep's directory, or of a file: the last one of each cell, in the order of the first. A last
    line that was cut by a kill is left out. Raises ResultsError."""
    if path.is_dir():
        path = path / RESULTS_FILE
    elif path.exists():  # a link that the command line names is followed
        path = path.resolve()
    advice = "; name the directory of a sweep"
    wrong = "is not a result of this version"
    results = read_json_lines(path, CellResult, ResultsError, wrong, advice, _doubt)
    return list({result.cell: result for result in results}.values())


def _doubt(result: CellResult) -> str:
    return "it is ok and has no tokens_per_s" if result.state == "ok" and not result.tokens_per_s else ""
