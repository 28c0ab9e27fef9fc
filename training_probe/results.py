"""What a cell gave: one CellResult a line in `results.jsonl`, written when the cell is over. Pure but for that file."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Literal

import msgspec

from backends.untrusted import UNDECODABLE
from training_probe.grid import Cell

RESULTS_FILE, BREAKDOWN_FILE = "results.jsonl", "breakdown.jsonl"
SCHEMA = "training_probe.result/1"
GIB = 1 << 30

Outcome = Literal["ok", "oom", "timeout", "unsupported", "crashed", "skipped"]


class ResultsError(Exception):
    """A file of results that cannot be used. One sentence."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One try of a search for the largest micro batch."""

    micro_batch: int
    outcome: Outcome
    peak_allocated_bytes: int | None = None


class CellResult(msgspec.Struct, kw_only=True, omit_defaults=False):
    """One row. Memory is of the rank that had most; `_gb` are GiB (2**30 bytes), as the paper's "GB" are.

    tokens_per_s: all GPUs together, mean and standard deviation over `runs` (tokens_per_s_runs has each). batch_size:
    the micro batch; for a searched one, the largest that fitted, with every attempt in `search`. Times are means of a
    step, ms. mfu_ratio, hfu_ratio: None where the device's peak is not known. valid: the losses were finite and fell.
    outcome other than ok: `reason` says why, and what was measured of it is kept.
    """

    schema: str = SCHEMA
    model: str
    task: str
    engine: str
    method: str
    platform: str
    device_name: str = ""
    gpus: int
    seq_len: int
    batch_size: int | None
    grad_accum: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    attention: str = "eager"
    compile: bool = False
    device: str = "cuda"
    cell: str  # Cell.name: what resuming goes by
    outcome: Outcome
    reason: str = ""
    valid: bool = False
    tokens_per_s: float | None = None
    tokens_per_s_std: float | None = None
    tokens_per_s_runs: list[float] = []
    runs: int = 0
    warmup_steps: int = 0
    steps: int = 0
    step_ms: float | None = None
    step_ms_std: float | None = None  # over the steps of all runs
    forward_ms: float | None = None
    backward_ms: float | None = None
    optimizer_ms: float | None = None
    mfu_ratio: float | None = None
    hfu_ratio: float | None = None
    peak_memory_gb: float | None = None  # allocated
    peak_reserved_gb: float | None = None
    peak_memory_gb_by_rank: list[float] = []
    peak_reserved_gb_by_rank: list[float] = []
    device_memory_gb: float | None = None
    predicted_memory_gb: float | None = None  # to be allocated
    predicted_terms_gb: dict[str, float] = {}
    energy_j_per_token: float | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    parameters: int | None = None
    trainable_parameters: int | None = None
    optimizer: str = ""
    versions: dict[str, str] = {}
    search: list[Attempt] = []
    started_unix_s: float = 0.0
    wall_s: float = 0.0  # of the whole cell, its start and its search included
    log: str = ""  # of the last run, relative to the sweep's directory

    @property
    def search_was_limited(self) -> bool:
        """Whether every micro batch that was tried fitted: a larger one may, too."""
        return bool(self.search) and all(attempt.outcome == "ok" for attempt in self.search)


def of_cell(cell: Cell, *, platform: str, outcome: Outcome, reason: str = "", **more: Any) -> CellResult:
    """A result that says which cell it is of."""
    same = (
        "model", "task", "engine", "method", "gpus", "seq_len", "grad_accum", "tp", "pp", "cp", "attention", "compile",
        "device",
    )  # fmt: skip
    said = {name: getattr(cell, name) for name in same}
    return CellResult(
        **said, **{"batch_size": cell.micro_batch, **more},
        cell=cell.name, platform=platform, outcome=outcome, reason=reason,
    )  # fmt: skip


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
    path = path / RESULTS_FILE if path.is_dir() else path
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror or error}; name the directory of a sweep.") from None
    found: dict[str, CellResult] = {}
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            result = msgspec.json.decode(line, type=CellResult)
        except UNDECODABLE as error:
            if number == len(lines):  # no newline after it: the sweep was killed while it wrote
                break
            raise ResultsError(f"line {number} of {path} is not a result of this version: {error}.") from None
        found[result.cell] = result
    return list(found.values())
