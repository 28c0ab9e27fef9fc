"""Where the time of a decode step goes, whether it was measured or modelled: the paper's Tables X and XI.

Both tables add up to the step. Table X gives each instant to one kind of work: to computing where anything computes, to
communication where nothing does, else to nobody (the paper's "Other"). Table XI cuts the step into stretches of
time, what is idle in them included. What cannot be told is a row of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import msgspec

from backends.untrusted import read_json
from loadgen.config import Config, ConfigError
from loadgen.document import files
from loadgen.rundir import RunError

SCHEMA = "loadgen.breakdown/1"
FILE = "breakdown.json"
DEFAULT_BATCH = 64

COMPUTING = ("Element-Wise", "RoPE", "Attention", "GEMM", "RMSNorm", "Other", "Unrecognised")
COMMUNICATION = ("AllReduce", "AllGather", "Other communication")
IDLE = "Idle"
KINDS = (*COMPUTING, *COMMUNICATION, IDLE)

BEFORE, ATTENTION, FFN, AFTER = (
    "Before the transformer", "Attention blocks", "FFN blocks", "After the transformer",
)  # fmt: skip
BETWEEN, UNASSIGNED = "Between steps", "Not assigned"
PARTS = (BEFORE, ATTENTION, FFN, AFTER, BETWEEN, UNASSIGNED)

_HEADINGS = {
    "Attention": "Attention (the paper's Triton)",
    "Other communication": "Other",
    IDLE: "Idle (the paper's Other)",
}


class PaperStep(msgspec.Struct, frozen=True):
    """What the paper printed. Milliseconds by the names of KINDS and PARTS."""

    source: str
    batch: int
    input_tokens: int
    output_tokens: int
    step_ms: float
    kinds: dict[str, float]
    parts: dict[str, float]


class Kernel(msgspec.Struct, frozen=True):
    """What one name took of an average step, all its runs together, and as what it was counted."""

    name: str
    kind: str
    ms: float
    count: float


class StepBreakdown(msgspec.Struct, kw_only=True):
    """One average decode step. kinds, parts: milliseconds by the names of KINDS and PARTS, each adding up to step_ms.

    hidden_ms: communication while something computed, which no row holds. layers: how many attention blocks were seen;
    None where parts cannot be told. client_ms: between two events of a stream at the client while the profiler ran, and
    client_before_ms before it did: the step, where each event is a token. None where nothing was measured.
    """

    schema: str = SCHEMA
    emulated: bool
    backend: str
    model: str
    hardware: str
    batch: int
    prompt_tokens: int
    context_tokens: float
    step_ms: float
    kinds: dict[str, float]
    parts: dict[str, float]
    hidden_ms: float = 0.0
    layers: int | None
    steps: int
    steps_left_out: int = 0
    delimited_by: str
    form: str
    client_ms: float | None = None
    client_before_ms: float | None = None
    trace: str | None = None
    kernels: tuple[Kernel, ...] = ()
    paper: PaperStep | None = None
    notes: tuple[str, ...] = ()

    @property
    def attributed_ratio(self) -> float:
        """The share of the time in which anything ran that the rows of Table X name."""
        busy = self.step_ms - self.kinds.get(IDLE, 0.0)
        return 1.0 - self.kinds.get("Unrecognised", 0.0) / busy if busy > 0 else 0.0

    @property
    def assigned_ratio(self) -> float:
        """The share of the step that the rows of Table XI name."""
        return 1.0 - self.parts.get(UNASSIGNED, 0.0) / self.step_ms


def batch_of(config: Config) -> int:
    """How many requests are to be in decode. Raises ConfigError where the options ask for anything but one batch."""
    if config.url is not None:
        raise ConfigError("a breakdown starts the server itself, with its profiler; give --launch instead of --url.")
    if (
        config.arrival is not None
        or config.duration is not None
        or config.requests is not None
        or config.warmup_load
        or config.repeat > 1
    ):
        raise ConfigError("a breakdown keeps one batch in decode; --concurrency says how large, nothing else.")
    one_length = config.load.is_plain and config.load.output_tokens.kind == "fixed"
    if config.dataset is not None or not one_length or not config.stream:
        raise ConfigError(
            "a breakdown needs unrelated prompts of one length and streams; leave --dataset, --trace, --prefix, laws "
            "of lengths and --no-stream out."
        )
    if config.load.phases():
        raise ConfigError("a breakdown keeps one batch in decode; give --concurrency one number.")
    batch = DEFAULT_BATCH if config.load.streams is None else config.load.streams.most
    if batch > config.max_running:
        raise ConfigError(f"--concurrency {batch} is more than --max-running {config.max_running}; raise that.")
    if config.workers not in ("auto", "1"):
        raise ConfigError("a breakdown is driven by one client process; leave --workers out.")
    if config.metrics_port is not None:
        raise ConfigError("a breakdown has no metrics of a run; leave --metrics-port out.")
    return batch


def paper() -> PaperStep:
    path = Path(__file__).parents[1] / "data/paper_serving_breakdown.json"
    return msgspec.json.decode(path.read_bytes(), type=PaperStep)


def beside_paper(breakdown: StepBreakdown) -> StepBreakdown:
    return msgspec.structs.replace(breakdown, paper=paper())


def to_json(breakdown: StepBreakdown, indent: int | None = None) -> str:
    """What breakdown.json holds: the breakdown and what share of it its tables name. ASCII."""
    ratios = {"attributed_ratio": breakdown.attributed_ratio, "assigned_ratio": breakdown.assigned_ratio}
    return json.dumps(msgspec.to_builtins(breakdown) | ratios, indent=indent)


def write(directory: Path, breakdown: StepBreakdown) -> None:
    """Writes breakdown.json in the run's directory. Raises ReportError."""
    files.save(directory, {FILE: to_json(breakdown, indent=2) + "\n"})


def read(directory: Path) -> StepBreakdown:
    """What `write` left in a run's directory. Raises RunError."""
    path = directory / FILE
    breakdown = read_json(path, StepBreakdown, RunError, "is not a breakdown of this version", directory=directory)
    known = breakdown.kinds.keys() <= set(KINDS) and breakdown.parts.keys() <= set(PARTS)
    if breakdown.schema != SCHEMA or not breakdown.step_ms > 0 or not known:
        raise RunError(f"{path} is not a breakdown of this version.")
    return breakdown


class Row(NamedTuple):
    """A row of a table, in milliseconds: the breakdown's and the paper's. total: it is a sum of other rows."""

    name: str
    ms: float
    paper_ms: float | None
    total: bool = False


def kind_rows(breakdown: StepBreakdown) -> list[Row]:
    kinds, theirs = breakdown.kinds, breakdown.paper.kinds if breakdown.paper else {}
    rows: list[Row] = []
    for heading, names in (("Comp.", COMPUTING), ("Comm.", COMMUNICATION)):
        printed = sum(theirs.get(name, 0.0) for name in names) if theirs else None
        rows.append(Row(heading, sum(kinds.get(name, 0.0) for name in names), printed, total=True))
        rows += [
            Row(f"{heading} {_HEADINGS.get(name, name)}", kinds.get(name, 0.0), theirs.get(name))
            for name in names
            if name != "Unrecognised" or kinds.get(name)
        ]
    return [*rows, Row(_HEADINGS[IDLE], kinds.get(IDLE, 0.0), theirs.get(IDLE), total=True), _step_row(breakdown)]


def part_rows(breakdown: StepBreakdown) -> list[Row]:
    parts, theirs = breakdown.parts, breakdown.paper.parts if breakdown.paper else {}
    layers = f"{breakdown.layers} x " if breakdown.layers else ""
    rows = [
        Row(f"{layers}{name}" if name in (ATTENTION, FFN) else name, parts.get(name, 0.0), theirs.get(name))
        for name in PARTS
        if name != UNASSIGNED or parts.get(name)
    ]
    return [*rows, _step_row(breakdown)]


def _step_row(breakdown: StepBreakdown) -> Row:
    return Row("Step", breakdown.step_ms, breakdown.paper.step_ms if breakdown.paper else None, total=True)


def title(breakdown: StepBreakdown) -> str:
    emulated = "emulated " if breakdown.emulated else ""
    return (
        f"A decode step of {emulated}{breakdown.backend}, {breakdown.model} on {breakdown.hardware}, "
        f"batch {breakdown.batch}"
    )


def facts(breakdown: StepBreakdown) -> list[str]:
    lines = []
    if breakdown.emulated:
        lines.append("emulated: nothing was measured; these are the terms of the cost model that the server runs on")
    else:
        steps = "the only step" if breakdown.steps == 1 else f"mean of {breakdown.steps} steps"
        lines.append(f"{steps}, told apart by {breakdown.delimited_by}; {breakdown.steps_left_out} left out")
    lines.append(
        f"prompts of {breakdown.prompt_tokens} tokens; {breakdown.context_tokens:.0f} tokens of context on average"
    )
    named = f"the rows name {breakdown.attributed_ratio:.1%} of the time in which anything ran (X)"
    lines.append(f"{named} and {breakdown.assigned_ratio:.1%} of the step (XI)")
    if breakdown.hidden_ms:
        lines.append(f"{breakdown.hidden_ms:.3f} ms of communication were hidden behind computing, in no row")
    if breakdown.client_ms is not None:
        before = ""
        if breakdown.client_before_ms is not None:
            before = f", and {breakdown.client_before_ms:.3f} ms before the profiler ran"
        lines.append(f"the client's streams had an event every {breakdown.client_ms:.3f} ms meanwhile{before}")
    if breakdown.paper is not None:
        lines.append(f"the paper: {breakdown.paper.source}")
    return lines
