"""The charts of a breakdown's page: stacked bars of passes, parts of the model and kinds of work. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from loadgen.document.content import Chart, Section, Series
from training_probe import paper
from training_probe.breakdown import tables
from training_probe.breakdown.attribution import FUSED_ATTENTION, PASSES, PassTimes
from training_probe.breakdown.run import Breakdown
from training_probe.report.charts import files
from training_probe.report.tables import SIZES

OF_A_PASS: dict[str, Callable[[PassTimes], float]] = {
    "computation": lambda window: window.compute_s,
    "communication, not hidden": lambda window: window.exposed_communication_s,
    "memcpy, not hidden": lambda window: window.exposed_memcpy_s,
    "idle": lambda window: window.idle_s,
}
# Parts of the model by what they do: as many as there are colours. All others are OUTSIDE.
OF_A_LAYER: dict[str, tuple[str, ...]] = {
    "QKV, Output": ("QKV", "Output"),
    "RoPE": ("RoPE",),
    "Bmm0, Softmax, Bmm1 or FlashAttention": ("Bmm0", "Softmax", "Bmm1", FUSED_ATTENTION, "Attention, rest"),
    "MLP": ("MLP",),
    "RMSNorm, Residual": ("RMSNorm", "Residual"),
}
OUTSIDE = tuple(part for part in tables.PARTS if not any(part in parts for parts in OF_A_LAYER.values()))
OVERLAP = "Sums over kernels, which may overlap."
MOST_COLOURS = 7  # that a chart tells apart; further ones are hatched
KINDS = (*tables.COMPUTE, "communication", "memcpy", "host")


def build(breakdowns: Sequence[Breakdown]) -> Iterator[Section]:
    """A section of charts; none where nothing was traced to its end."""
    traced = [each for each in breakdowns if each.attribution is not None]
    if traced:
        yield Section(id="charts", title="Where a step goes", blocks=[*_charts(traced)])
        title = f"Parts of the decoder layers, as Figure 5 of {paper.SOURCE}"
        yield Section("layers", title, [_layers(traced)], files("parts"))


def _charts(traced: Sequence[Breakdown]) -> Iterator[Chart]:
    cells = _names(traced)
    passes = [(each, phase) for each in traced for phase in PASSES]
    names = [f"{cell}: {phase}" for cell in cells for phase in PASSES]
    by_pass = {str(phase): [_window(each, phase).overall_s for each in traced] for phase in PASSES}
    yield _stack("Passes of a step", cells, by_pass, "A traced step; the profiler makes it longer than a bare one.")
    of_passes = {name: [part_of(_window(*each)) for each in passes] for name, part_of in OF_A_PASS.items()}
    yield _stack("What a pass is made of", names, of_passes, "The four sum to the pass on the clock.")
    parts = {
        name: [_of_parts(*each, of_name) for each in passes]
        for name, of_name in {**OF_A_LAYER, "outside the layers": OUTSIDE}.items()
    }
    parts["recomputed"] = [_of_parts(*each, tables.PARTS, recomputed=True) for each in passes]
    yield _stack("Parts of the model", names, parts, f"{OVERLAP} The optimizer has no parts.")
    kinds = {kind: [_of_kind(*each, kind) for each in passes] for kind in KINDS}
    yield _stack("Kinds of kernels", names, kinds, OVERLAP)


def _layers(traced: Sequence[Breakdown]) -> Chart:
    """Shares of the parts of a decoder layer, measured and printed."""
    bars: dict[str, dict[str, float]] = {}
    for phase in ("forward", "backward"):
        for each in traced:
            own = {part: tables.part_seconds(each, phase, part) for part in tables.LAYER}
            theirs = {part: tables.printed(each).get((phase, part, "ms"), 0.0) for part in own}
            beside = f"{tables.PAPER}, BS {each.cell.micro_batch}"
            for name, parts in ((tables.title(each), own), (beside, theirs)):
                if whole := sum(parts.values()):
                    bars[f"{phase}: {name}"] = {part: 100 * value / whole for part, value in parts.items()}
    shown = [part for part in tables.LAYER if any(bar[part] > 0 for bar in bars.values())]
    return Chart(
        title="Parts of the decoder layers", x_label="", y_label="share of the layers' time in that pass (%)",
        series=[
            Series(
                name=part, x=[*range(len(bars))], y=[bar[part] for bar in bars.values()], kind="bars", colour=colour,
                dashed=colour >= MOST_COLOURS,
            )
            for colour, part in enumerate(shown)
        ],
        categories=[*bars], stacked=True, note="Without what is recomputed.",
    )  # fmt: skip


def _names(traced: Sequence[Breakdown]) -> list[str]:
    """Cells among each other; model and engine where they are not all the same."""
    models = [f"{paper.model_name(each.cell.model)} {each.cell.engine} " for each in traced]
    same = len(set(models)) == 1
    return [
        f"{'' if same else model}{each.cell.method} {each.cell.gpus}x s{each.cell.seq_len} b{each.cell.micro_batch}"
        for model, each in zip(models, traced, strict=True)
    ]


def _of_parts(of: Breakdown, phase: str, parts: Sequence[str], *, recomputed: bool = False) -> float:
    if phase == "optimizer":
        return 0.0
    return sum(tables.part_seconds(of, phase, part, recomputed=recomputed) for part in parts)


def _window(of: Breakdown, phase: str) -> PassTimes:
    assert of.attribution is not None
    return next(window for window in of.attribution.windows if window.phase == phase)


def _of_kind(of: Breakdown, phase: str, kind: str) -> float:
    assert of.attribution is not None
    return of.attribution.seconds(phase=phase, kind=kind)


def _stack(title: str, names: Sequence[str], seconds: dict[str, list[float]], note: str) -> Chart:
    """Bars of milliseconds a step on each other; what takes no time anywhere is left out."""
    shown = {name: values for name, values in seconds.items() if any(values)}
    return Chart(
        title=title, x_label=SIZES, y_label="time of a step (ms)", categories=names, stacked=True, note=note,
        series=[
            Series(name=name, x=[*range(len(names))], y=[1000 * value for value in values], kind="bars", colour=colour)
            for colour, (name, values) in enumerate(shown.items())
        ],
    )  # fmt: skip
