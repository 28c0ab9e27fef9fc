"""Writes the generated parts of docs/reliability.md and of docs/lab/truth_table.md: `python -m tests.faults.table`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from servers.serve import between
from servers.serve.faults import KINDS
from tests.faults import cases_connections, cases_http, cases_stream, served, truth, wires
from tests.faults.case import Case, Expected
from tests.faults.protocols import ALL

DOCS = Path(__file__).parents[2] / "docs"
BEGIN = "<!-- From here on written by `python -m tests.faults.table` -->\n"
GROUPS: dict[str, Sequence[Case]] = {
    "HTTP: framing": cases_http.FRAMING,
    "HTTP: heads": cases_http.HEADS,
    "HTTP: statuses": cases_http.STATUSES,
    "Bytes that belong to no reply": cases_http.FOREIGN_BYTES,
    "Replies in one piece (`--no-stream`)": cases_http.WHOLE,
    "Connections that end": cases_connections.ENDS,
    "Silence and slowness": cases_connections.SILENCE,
    "Events: framing": cases_stream.FRAMING,
    "Events: content": cases_stream.PAYLOADS,
    "Events: how a reply ends": cases_stream.ENDINGS,
    "Events: errors": cases_stream.ERRORS,
    "Events: counts": cases_stream.COUNTS,
}


def served_text() -> list[str]:
    """What `loadgen serve` can do wrong, and what lies between."""
    return [
        "## The faults of `loadgen serve --fault`",
        "",
        "What loadgen makes of each, with `tests/faults/test_served.py` as its test.",
        "",
        *_rows(("kind", "what the server does", "outcome", "beside it"), _served()),
        "",
        "## The wires of `loadgen serve --wire`",
        "",
        "What a run over each says of itself, with `tests/faults/test_wires.py` as its test.",
        "",
        *_rows(("wire", "what lies between", "verdict", "ttft", "tpot and itl", "with `--quick-acks`"), _wires()),
    ]


def truth_text() -> list[str]:
    """The truth table."""
    protocols = sum(len(case.protocols) for case in truth.CASES)
    lines = [
        f"{len(truth.CASES)} cases, {protocols} with their protocols, each over the fast and the aiohttp transport: "
        f"{len(truth.PLAYS)} plays.",
    ]
    for title, cases in GROUPS.items():
        header = ("case", "what the server does", "protocols", "outcome", "beside it")
        lines += ["", f"## {title}", "", *_rows(header, map(_row, cases))]
    return lines


DOCUMENTS: dict[Path, Callable[[], list[str]]] = {
    DOCS / "reliability.md": served_text,
    DOCS / "lab" / "truth_table.md": truth_text,
}


def written(document: Path) -> str:
    """The document with its generated part as it must be."""
    kept = document.read_text(encoding="utf-8").partition(BEGIN)[0]
    return kept + "\n".join([BEGIN, *DOCUMENTS[document]()]) + "\n"


def _rows(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    cells = [header, ("---",) * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|').replace('<', '&lt;') for cell in row)} |" for row in cells]


def _row(case: Case) -> tuple[str, ...]:
    protocols = "all" if case.protocols == ALL else ", ".join(protocol.name for protocol in case.protocols)
    return (case.name, case.does, protocols, *_expectation(case))


def _expectation(case: Case) -> tuple[str, str]:
    beside = _beside(case.expected)
    if case.aiohttp is not None:
        beside.append(f"aiohttp: {'; '.join([f'`{case.aiohttp.outcome}`', *_beside(case.aiohttp)])} ({case.why})")
    return f"`{case.expected.outcome}`", "; ".join(beside)


def _served() -> Iterable[tuple[str, ...]]:
    for kind, does in KINDS.items():
        if kind in served.EXPECTED:
            want = served.EXPECTED[kind]
            yield f"`{kind}`", does, f"`{want.outcome}`", "; ".join(_beside(want))
        else:
            yield f"`{kind}`", does, "", "its test is `tests/servers/serve/test_faults.py`"


def _wires() -> Iterable[tuple[str, ...]]:
    for kind, does in between.KINDS.items():
        told = wires.EXPECTED[kind]
        verdict = f"INVALID, `{told.finding}`" if told.finding else "VALID"
        ttft = "said to be a delivery's" if told.finding else "right"
        quick = "" if not told.finding else "VALID, all right" if told.quick else "the same"
        yield f"`{kind}`", does, verdict, ttft, "right" if told.paced else "undefined", quick


def _beside(want: Expected) -> list[str]:
    """What else the record has, in words."""
    parts = [f"{want.events} events"] if want.events is not None else []
    parts += [f"{want.tokens} tokens"] if want.tokens is not None else []
    parts += [f"{want.prompt_tokens} prompt tokens"] if want.prompt_tokens is not None else []
    parts += [f"{want.cached_tokens} cached"] if want.cached_tokens is not None else []
    parts += [f"“{want.error}”"] if want.error else []
    parts += ["never seen by the server"] if want.tries == 0 else []
    parts += [f"sent {want.tries} times"] if want.tries > 1 else []
    return parts + [f"finding {code}" for code in want.findings]


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(written(document), encoding="utf-8")
