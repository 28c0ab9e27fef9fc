"""One client in one round as a row of numbers; many rows become a table and a JSON file."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from side_by_side.clients import CLIENTS, Shape

NAN = float("nan")


@dataclass(frozen=True)
class Row:
    """One client in one round. NaN: not measured or not reported. Microseconds are per streamed token.

    ttft_error: the reported TTFT minus the time between the server's receive and first-event stamps, per request where
    requests can be told apart, else between percentiles of the two distributions. first_late, lag: arrival as recorded
    minus the server's send stamp, of first events and of all. deviation: of receive times from the due times.
    """

    cpu_us: float
    life_cpu_us: float
    others_percent: float
    rss_mb: float
    life_rss_mb: float
    start_s: float
    makespan_s: float
    spread_ms: float
    ttft_error_p50_ms: float
    ttft_error_p99_ms: float
    gap_p99_ms: float
    true_gap_p99_ms: float
    short_gaps_percent: float
    true_short_gaps_percent: float
    server_pace: float
    first_late_p99_ms: float = NAN
    lag_p50_ms: float = NAN
    lag_p99_ms: float = NAN
    own_spread_ms: float = NAN
    own_send_lag_p99_ms: float = NAN
    own_send_lag_max_ms: float = NAN
    deviation_p50_ms: float = NAN
    deviation_p99_ms: float = NAN
    marginal_cpu_us: float = NAN


Rows = Mapping[str, Row | str]  # by client; a string says why there is no row
Column = tuple[str, Callable[[Row], str]]

TITLES = {client.name: client.title for client in CLIENTS}

PREAMBLE = """# What load-generating clients cost, and how true their numbers are

The embedded server streams one event a token on one core. It stamps each event right before it hands the event to the
kernel. The client has another core to itself and is watched from outside. Clients take turns within a round, because
the level of a shared machine drifts between rounds. Ratios are taken within a round, and every cell is the median of
the rounds. Each client has run once before, so that its bytecode is kept.

- *CPU, window*: CPU time of the client's process tree from the first request received to the last event sent, for each
  streamed token.
- *Per token more*: the client's whole life with this output length, minus its whole life with 8 output tokens, for each
  further token. Start-up and report cancel out; work that the client puts off until after the stream does not.
- *Whole life*: all CPU time, imports and report included, for each token.
- *Others on its core*: the part of the window in which anything but the client ran on its core, or the host gave the
  core away. Above a few percent, the machine causes delays as well as the client.
- *RSS*: resident memory of the process tree in MB, within the window and over its life.
- *Start*: from the process's start to the first measured request received. *Makespan*: as the client reports it.
- *Send spread*: from the first to the last request of the burst as the server reads them. In brackets: as the client
  stamps them before it writes, where it does.
- *TTFT error*: the TTFT that the client reports, minus the time between the server's receive stamp and its first-event
  stamp. It is taken request by request where requests have ids, and otherwise between percentiles of the two
  distributions. It contains the time that a request of a burst waits until the server reads it; the floor shows that
  time.
- *First event late*: arrival of the first event as the client recorded it, minus the server's send stamp: the client's
  own part of the error.
- *Event late*: the same over all events, for clients that keep every arrival. It contains the server's write and the
  kernel too.
- *Gap p99*: of all inter-token gaps that the client reports, and its ratio to the server's own gaps. *Gaps < 1 ms*:
  their share, the server's own in brackets.
"""


def _number(value: float, digits: int = 1, unit: str = "") -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}{unit}"


def _pair(first: float, second: float, digits: int = 1) -> str:
    return "-" if math.isnan(first) and math.isnan(second) else f"{_number(first, digits)} / {_number(second, digits)}"


def _bracket(value: float, other: float, digits: int = 1) -> str:
    return _number(value, digits) + ("" if math.isnan(other) else f" ({other:.{digits}f})")


def _median(rows: Sequence[Row]) -> Row:
    names = [field.name for field in dataclasses.fields(Row)]
    values = {name: [v for row in rows if not math.isnan(v := getattr(row, name))] for name in names}
    return Row(**{name: float(np.median(found)) if found else NAN for name, found in values.items()})


def _ratio(rounds: Sequence[Rows], client: str, to: str, cost: Callable[[Row], float]) -> str:
    """Median over rounds of one client's cost over another's, each ratio within its round."""
    pairs = [(rows.get(client), rows.get(to)) for rows in rounds]
    ratios = [cost(a) / cost(b) for a, b in pairs if isinstance(a, Row) and isinstance(b, Row)]
    return _number(float(np.median(ratios)) if ratios else NAN, 2)


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines)) + "\n"


COST: tuple[Column, ...] = (
    ("CPU, window us/token", lambda row: _number(row.cpu_us, 2)),
    ("per token more us", lambda row: _number(row.marginal_cpu_us, 2)),
    ("whole life us/token", lambda row: _number(row.life_cpu_us, 1)),
    ("others on its core %", lambda row: _number(row.others_percent, 0)),
    ("RSS window / life MB", lambda row: _pair(row.rss_mb, row.life_rss_mb, 0)),
    ("start s", lambda row: _number(row.start_s, 2)),
    ("makespan s", lambda row: _number(row.makespan_s, 2)),
)
TRUTH: tuple[Column, ...] = (
    ("send spread ms", lambda row: _bracket(row.spread_ms, row.own_spread_ms)),
    ("TTFT error p50 / p99 ms", lambda row: _pair(row.ttft_error_p50_ms, row.ttft_error_p99_ms, 2)),
    ("first event late p99 ms", lambda row: _number(row.first_late_p99_ms, 2)),
    ("event late p50 / p99 ms", lambda row: _pair(row.lag_p50_ms, row.lag_p99_ms, 2)),
    ("gap p99 ms (ratio to truth)", lambda row: _bracket(row.gap_p99_ms, row.gap_p99_ms / row.true_gap_p99_ms, 2)),
    ("gaps < 1 ms %", lambda row: _bracket(row.short_gaps_percent, row.true_short_gaps_percent, 2)),
)
README: tuple[Column, ...] = (
    ("CPU a token, us", lambda row: _number(row.cpu_us)),
    ("over its life", lambda row: _number(row.life_cpu_us)),
    ("ttft error p99, ms", lambda row: _number(row.ttft_error_p99_ms)),
    ("p99 gap, times the truth", lambda row: _number(row.gap_p99_ms / row.true_gap_p99_ms, 2)),
    ("start, s", lambda row: _number(row.start_s)),
)
PACING: tuple[Column, ...] = (
    ("received off its due time, p50 / p99 ms", lambda row: _pair(row.deviation_p50_ms, row.deviation_p99_ms, 2)),
    ("own send lag p99 / max ms", lambda row: _pair(row.own_send_lag_p99_ms, row.own_send_lag_max_ms, 2)),
)


def _rows(rounds: Sequence[Rows], columns: Sequence[Column], ratios: bool = False) -> str:
    """One table: a line a client, medians of the rounds, or the reason why there is none."""
    names = [client.name for client in CLIENTS if any(client.name in rows for rows in rounds)]
    head = ["client", *(title for title, _ in columns)]
    head += ["window / floor", "window / vLLM", "life / floor"] if ratios else []
    lines = []
    for name in names:
        found = [rows[name] for rows in rounds if name in rows]
        good = [row for row in found if isinstance(row, Row)]
        if good:
            median = _median(good)
            cells = [render(median) for _, render in columns]
            if ratios:
                cells += [_ratio(rounds, name, to, lambda row: row.cpu_us) for to in ("floor", "vllm")]
                cells.append(_ratio(rounds, name, "floor", lambda row: row.life_cpu_us))
            lost = f" ({len(found) - len(good)} of {len(found)} rounds failed)" if len(good) < len(found) else ""
            lines.append([TITLES[name] + lost, *cells])
        else:
            reason = next(str(row) for row in found).replace("|", "/")
            lines.append([TITLES[name], f"not measured: {reason}", *[""] * (len(head) - 2)])
    return _table(head, lines)


def _pace(rounds: Sequence[Rows]) -> str:
    paces = [row.server_pace for rows in rounds for row in rows.values() if isinstance(row, Row)]
    return f"{min(paces) * 100:.0f} % to {max(paces) * 100:.0f} %" if paces else "not known"


def _section(name: str, shape: Shape, rounds: Sequence[Rows]) -> str:
    return (
        f"## {name}: {shape.requests} x {shape.input_tokens} in, {shape.output_tokens} out, first token after "
        f"{shape.ttft_ms:g} ms, then every {shape.gap_ms:g} ms: {shape.events_per_s:,.0f} events/s\n\n"
        f"{len(rounds)} round(s). The server kept {_pace(rounds)} of the asked pace.\n\n"
        f"{_rows(rounds, COST, ratios=True)}\n{_rows(rounds, TRUTH)}"
    )


def _ceiling(steps: Sequence[tuple[Shape, Row]], lag_limit_ms: float, on_pace: float) -> str:
    head = ["asked events/s", "delivered by the server", "event late p50 / p99 ms", "CPU, window us/token", "sustained"]
    lines, best = [], 0.0
    for shape, row in steps:
        delivered = shape.events_per_s * row.server_pace
        if row.server_pace < on_pace:
            verdict = "the server gave out first"
        elif row.lag_p99_ms > lag_limit_ms:
            verdict = "no"
        else:
            verdict, best = "yes", max(best, delivered)
        lag = _pair(row.lag_p50_ms, row.lag_p99_ms, 2)
        lines.append([f"{shape.events_per_s:,.0f}", f"{delivered:,.0f}", lag, _number(row.cpu_us, 2), verdict])
    return (
        f"## Highest rate that loadgen sustains on one core\n\n1000 streams, gaps falling, until the arrival of events "
        f"is recorded more than {lag_limit_ms:g} ms late at p99 or the server cannot deliver the rate; "
        f"the better of up to two tries at each. Sustained: **{best:,.0f} events/s**.\n\n{_table(head, lines)}"
    )


def _json(row: Row | str) -> dict[str, float | None] | str:
    if isinstance(row, str):
        return row
    return {name: None if math.isnan(value) else value for name, value in dataclasses.asdict(row).items()}


def machine() -> str:
    """The date in UTC, cores, processor, kernel and Python, in words."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.machine())
    return (
        f"{time.strftime('%Y-%m-%d', time.gmtime())}, {os.cpu_count()} cores ({model}), "
        f"{platform.system()} {platform.release()}, Python {sys.version.split()[0]}"
    )


def command() -> str:
    """The script and its arguments, as typed in the repository's root."""
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def _raw(
    rounds: Mapping[str, Sequence[Rows]], shapes: Mapping[str, Shape], ceiling: Sequence[tuple[Shape, Row]]
) -> dict[str, Any]:
    """Every client in every round, and every step of the ceiling. null: not measured or not reported."""
    return {
        "machine": machine(),
        "command": command(),
        "shapes": {name: dataclasses.asdict(shape) for name, shape in shapes.items() if name in rounds},
        "rounds": {name: [{client: _json(row) for client, row in rows.items()} for rows in each]
                   for name, each in rounds.items()},
        "ceiling": [{"shape": dataclasses.asdict(shape), "row": _json(row)} for shape, row in ceiling],
    }  # fmt: skip


def write_report(
    path: Path,
    rounds: Mapping[str, Sequence[Rows]],
    shapes: Mapping[str, Shape],
    ceiling: Sequence[tuple[Shape, Row]],
    lag_limit_ms: float,
    on_pace: float,
) -> None:
    """Writes the tables to `path` and the rows behind them to a JSON file beside it."""
    parts = [PREAMBLE, f"Measured {machine()}, by `{command()}`. Raw results: {path.stem}.json.\n"]
    parts += [_section(name, shapes[name], each) for name, each in rounds.items() if name not in ("paced", "poisson")]
    if "paced" in rounds:
        parts.append(
            "## Keeping to a schedule: 50 requests/s, 500 requests\n\nConstant gaps, so the due times are a grid, "
            "laid through the median. One round.\n\n"
            f"{_rows(rounds['paced'], PACING)}\nPoisson arrivals, against the client's own schedule:\n\n"
            f"{_rows(rounds['poisson'], PACING)}"
        )
    if ceiling:
        parts.append(_ceiling(ceiling, lag_limit_ms, on_pace))
    path.write_text("\n".join(parts))
    path.with_suffix(".json").write_text(json.dumps(_raw(rounds, shapes, ceiling), indent=1) + "\n")


def write_readme(path: Path, rounds: Sequence[Rows]) -> None:
    """Puts the clients' table, but for our own variants, in place of the one that the file has."""
    rows = [{name: row for name, row in each.items() if not name.startswith("loadgen-")} for each in rounds]
    before, head, after = path.read_text().partition("| client | CPU a token")
    _, blank, rest = after.partition("\n\n")
    if not head or not blank:
        raise ValueError(f"{path} has no table of clients to replace.")
    path.write_text(before + _rows(rows, README).rstrip() + blank + rest)
