"""The page of several runs of one server, repeat.html: the runs beside each other, and the mean with its interval."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from loadgen import rundir
from loadgen.document.content import Block, Cell, Chart, Code, Document, Section, Series, Table, Text, cell, number
from loadgen.report import repeats
from loadgen.report.metrics import ITEMS, Distribution
from loadgen.report.pages import several
from loadgen.report.repeats import LESSER, Repeat, Repeated

FILE = "repeat.html"
CHARTS = {  # by title: the label of the y axis, and the metrics
    "Time to first token": ("ttft (ms)", ("ttft_p50", "ttft_p99")),
    "Time per output token": ("tpot (ms)", ("tpot_p50", "tpot_p99")),
    "End-to-end latency": ("e2el (ms)", ("e2el_p50", "e2el_p99")),
    "Output tokens": ("throughput (tokens/s)", ("output_tokens_per_s",)),
    "Items": ("throughput (items/s)", (ITEMS,)),
    "Requests": ("throughput (requests/s)", ("requests_per_s",)),
}
BY_RUN = (
    "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "e2el_p50", "e2el_p99", "requests_per_s", "output_tokens_per_s",
)  # fmt: skip


def of(directory: Path, repeated: Repeated) -> Document:
    """The page of repeat.json and its runs. Raises ReportError, RunError or RecordsError."""
    paths = [Path(run.directory) for run in repeated.runs]
    samples = {path.name: repeats.pooled([path]) for path in paths}
    return page(
        repeated, samples, [several.href(path, directory) for path in paths], several.origin(paths),
        rundir.read_manifest(paths[0]).argv,
    )  # fmt: skip


def page(
    repeated: Repeated, samples: Mapping[str, Mapping[str, Distribution]], hrefs: Sequence[str], origin: str,
    argv: Sequence[str],
) -> Document:  # fmt: skip
    """samples: the latencies of each run, by the name of its directory. hrefs: of the pages of the runs, empty where
    there is none. argv: the command that made them."""
    count = len(repeated.runs)
    return Document(
        title=f"{count} run{'' if count == 1 else 's'} of {repeated.backend} {repeated.model}",
        verdict=several.verdict(repeated.runs, repeated.planned),
        tone=several.tone(repeated.runs, repeated.planned),
        origin=origin,
        sections=[
            Section("findings", "Findings", _findings(repeated)),
            Section("numbers", "Mean over the runs", [_numbers(repeated)]),
            Section("runs", "The runs beside each other", _beside_each_other(repeated, hrefs, origin)),
            Section("cdf", "CDF of each run", several.cdfs(samples, dict.fromkeys(samples, origin))),
            Section("command", "The command", [Code(shlex.join(argv))], detail=True),
        ],
        footer=f"repeat.json has the same numbers; {repeated.schema}, llm-dissect {repeated.version}.",
    )


def _beside_each_other(repeated: Repeated, hrefs: Sequence[str], origin: str) -> list[Block]:
    in_ms = Text("Latencies are in milliseconds.")
    return [_runs(repeated, hrefs), in_ms, *_charts(repeated, hrefs, origin)]


def _findings(repeated: Repeated) -> list[Block]:
    counted = not any(run.finished for run in repeated.runs)
    return [*several.findings(repeated.runs, counted=counted), *map(Text, repeats.notes(repeated))]


def _counted(repeated: Repeated) -> list[int]:
    """The places of the runs that the metrics are of."""
    finished = [place for place, run in enumerate(repeated.runs) if run.finished]
    return finished or list(range(len(repeated.runs)))


def _runs(repeated: Repeated, hrefs: Sequence[str]) -> Table:
    """A row a run; one that did not finish has no numbers."""
    items = ITEMS in repeated.metrics
    names = [ITEMS if items and name == "output_tokens_per_s" else name for name in BY_RUN]
    values = dict(zip(_counted(repeated), zip(*(repeated.metrics[name].runs for name in names), strict=True),
                      strict=True))  # fmt: skip
    rows: list[list[Cell]] = []
    for place, (run, href) in enumerate(zip(repeated.runs, hrefs, strict=True)):
        numbers = [cell(value) for value in values.get(place, [None] * len(names))]
        name = several.linked(Path(run.directory).name, href)
        rows.append([name, several.state(run), several.codes(run), *numbers])
    return Table(["run", "verdict", "findings", *map(several.plain, names)], rows)


def _charts(repeated: Repeated, hrefs: Sequence[str], origin: str) -> list[Block]:
    counted = _counted(repeated)
    names = [Path(repeated.runs[place].directory).name for place in counted]
    return [
        Chart(
            title=title,
            x_label="run",
            y_label=y_label,
            series=[
                each
                for colour, name in enumerate(metrics)
                for each in _beside(name, repeated.metrics[name], names, [hrefs[place] for place in counted], colour)
            ],
            origin=origin,
            categories=names,
            note="A dot is a run and leads to its page; the line is the mean, the band its 95 % interval.",
        )
        for title, (y_label, metrics) in CHARTS.items()
        if any(name in repeated.metrics and repeated.metrics[name].mean is not None for name in metrics)
    ]


def _beside(name: str, over: Repeat, names: Sequence[str], hrefs: Sequence[str], colour: int) -> list[Series]:
    """A dot for each run, and the mean over all of them with its interval."""
    x, text = list(range(len(names))), several.plain(name)
    dots = Series(text, x, over.runs, kind="points", labels=names, hrefs=hrefs, group=text, colour=colour)
    if over.mean is None:
        return [dots]
    low, high = over.ci or (None, None)
    ends = [-0.4, len(names) - 0.6]
    mean = Series(
        text, ends, [over.mean] * 2, low=[low] * 2 if over.ci else None, high=[high] * 2 if over.ci else None,
        group=text, colour=colour, dashed=True,
    )  # fmt: skip
    return [mean, dots]


def _numbers(repeated: Repeated) -> Table:
    rows: list[list[Cell]] = []
    for name, over in repeated.metrics.items():
        if over.mean is not None and not name.startswith(LESSER):
            low, high = over.ci or (None, None)
            runs = " ".join(map(number, over.runs))
            rows.append([several.label(name), *map(cell, (over.mean, over.std, low, high)), runs])
    return Table(["metric", "mean", "std", "95 % from", "to", "runs"], rows)
