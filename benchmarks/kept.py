"""What was measured, packed: results/*.jsonl.xz hold a line for each directory of measurements.

    python benchmarks/kept.py list [WORD]                # names, what each holds, and the summary of a run
    python benchmarks/kept.py unpack NAME DIR            # one directory, or all whose names begin with NAME/
    python benchmarks/kept.py pack DIR NAME FILE [--gaps]  # adds a directory of measurements to results/FILE.jsonl.xz
    python benchmarks/kept.py check                      # results/originals.tsv.xz against the history of git

A line is `{"name", "summary", "files", "requests"}`. `files` has a directory's files by name: JSON files as values,
JSON Lines as lists of values, others as text, and so a JSON file that is not laid out as Python lays it out. `requests`
are a run's records by columns: a value for each request, or one value that all have. Each time is nanoseconds after the
time before it in the record (scheduled, sent, headers, first token, last token, done), and each id is counted from the
one before. `itl_us`, the gaps between a request's tokens, are there for some runs only. What is unpacked,
`loadgen report`, `loadgen calibrate` and `training_probe report` read.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import subprocess
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
ORIGINALS = RESULTS / "originals.tsv.xz"
RECORDS = "requests.jsonl"
TIMES = ("scheduled_ns", "sent_ns", "headers_ns", "first_token_ns", "last_token_ns", "done_ns")
OPTIONAL = ("retried", "shared_tokens", "session", "turn")  # fields that a record may lack, and that are never null
GAPS = "itl_us"
BEGIN = '{"name":"'  # of each line
MEASURED = "frozen/measured/"
XZ = 9 | lzma.PRESET_EXTREME
MISUSED, FAILED = 2, 3


class KeptError(Exception):
    """What is wrong, as a sentence; code: how the command ends."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


def compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


# -- one file and its text ---------------------------------------------------------------------------------------------


def value_of(name: str, text: str) -> Any:
    """A file's text as a value, or the text itself where the value would not give it back."""
    try:
        if name.endswith(".json"):
            value = json.loads(text)
        elif name.endswith(".jsonl"):
            value = [json.loads(line) for line in text.splitlines()]
        else:
            return text
    except ValueError:
        return text
    return value if text_of(name, value) == text else text


def text_of(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if name.endswith(".jsonl"):
        return "".join(compact(row) + "\n" for row in value)
    return json.dumps(value, indent=2) + "\n"


# -- the records of a run ----------------------------------------------------------------------------------------------


def columns_of(lines: list[dict[str, Any]], gaps: bool) -> dict[str, Any]:
    """Records as columns, with their file's first line and those of the client's facts at its end."""
    rows = [dict(line) for line in lines[1:] if "id" in line]
    names = max((list(row) for row in rows), key=len, default=[])
    before = 0
    for row in rows:
        row["id"], before = row["id"] - before, row["id"]
        at_ns = 0
        for name in TIMES:
            if row[name] is not None:
                row[name], at_ns = row[name] - at_ns, row[name]
    columns: dict[str, Any] = {}
    for name in names:
        if name != GAPS:
            column = [row.get(name) for row in rows]
            columns[name] = column[0] if all(value == column[0] for value in column) else column
        elif gaps:
            columns[name] = [row[name] for row in rows]
    facts = [line for line in lines[1:] if "id" not in line]
    return {"header": lines[0], "rows": len(rows), "columns": columns, "facts": facts}


def records_of(packed: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The lines of a file of records. Without kept gaps a request has none."""
    yield packed["header"]
    count = packed["rows"]
    columns = {name: kept if isinstance(kept, list) else [kept] * count for name, kept in packed["columns"].items()}
    columns.setdefault(GAPS, [[]] * count)
    number = 0
    for values in zip(*columns.values(), strict=True):
        row = dict(zip(columns, values, strict=True))
        row["id"] = number = row["id"] + number
        at_ns = 0
        for name in TIMES:
            if row[name] is not None:
                row[name] = at_ns = row[name] + at_ns
        yield {name: value for name, value in row.items() if value is not None or name not in OPTIONAL}
    yield from packed["facts"]


# -- directories -------------------------------------------------------------------------------------------------------


def read(path: Path, name: str = "") -> Iterator[dict[str, Any]]:
    """The directories that a packed file holds, and whose names begin so. Raises KeptError for a file that is cut off
    or damaged."""
    try:
        with lzma.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                if not line.startswith(BEGIN):
                    raise ValueError(line)
                if line.startswith(BEGIN + name):  # only these are parsed
                    yield json.loads(line)
    except FileNotFoundError:
        raise KeptError(f"{path} is missing: get it back with `git checkout`.") from None
    except (EOFError, lzma.LZMAError, ValueError):
        raise KeptError(f"{path} is cut off or damaged: get it back with `git checkout`.") from None


def write(path: Path, directories: Iterable[dict[str, Any]]) -> None:
    """Raises OSError; what was there stays until all is written."""
    anew = path.with_suffix(".new")
    with lzma.open(anew, "wt", preset=XZ, encoding="utf-8") as file:
        file.writelines(compact(one) + "\n" for one in directories)
    anew.replace(path)


def packed_files(results: Path = RESULTS) -> list[Path]:
    return sorted(results.glob("*.jsonl.xz"))


def under(files: Iterable[Path], name: str) -> Iterator[dict[str, Any]]:
    """The directory of that name and all below it."""
    for path in files:
        for one in read(path, name):
            if one["name"] == name or one["name"].startswith(name + "/"):
                yield one


def unpack(one: dict[str, Any], place: Path) -> None:
    """Writes a directory as it was when it was packed, but for gaps that were not kept. Raises OSError."""
    place.mkdir(parents=True, exist_ok=True)
    for name, value in one["files"].items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text_of(name, value), encoding="utf-8")
    if "requests" in one:
        (place / RECORDS).write_text(text_of(RECORDS, records_of(one["requests"])), encoding="utf-8")


def pack(directory: Path, name: str, gaps: bool) -> dict[str, Any]:
    """Raises KeptError where the records would not come back, and OSError."""
    files = {
        path.relative_to(directory).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(directory.rglob("*")) if path.is_file()
    }  # fmt: skip
    one: dict[str, Any] = {"name": name}
    records = files.pop(RECORDS, None)
    if records is not None:
        one["summary"] = summary(directory)
    one["files"] = {path: value_of(path, text) for path, text in files.items()}
    if records is not None:
        lines = [json.loads(line) for line in records.splitlines()]
        one["requests"] = columns_of(lines, gaps)
        back = list(records_of(one["requests"]))
        if not gaps:
            lines = [line | ({GAPS: []} if "id" in line else {}) for line in lines]
        if back != lines or (gaps and text_of(RECORDS, back) != records):
            raise KeptError(f"{directory / RECORDS} would not come back as it is.")
    return one


def summary(run: Path) -> dict[str, Any]:
    """What a run gave, in a few numbers."""
    from loadgen.report import build

    report, _ = build.from_directory(run)
    return {
        "ok": report.requests.ok,
        "duration_s": report.duration_s,
        "output_tokens_per_s": report.throughput.output_tokens_per_s,
        **{
            name: {"p50": report.metrics[name].p50, "p99": report.metrics[name].p99}
            for name in ("ttft_ms", "tpot_ms", "e2el_ms") if name in report.metrics
        },
    }  # fmt: skip


# -- where it came from ------------------------------------------------------------------------------------------------


def git(*words: str, data: bytes | None = None) -> bytes:
    done = subprocess.run(["git", "-C", str(ROOT), *words], input=data, capture_output=True, check=False)
    if done.returncode:
        raise KeptError(f"git {words[0]} failed: {done.stderr.decode().strip() or 'no reason given'}")
    return done.stdout


def originals() -> list[tuple[str, str, str]]:
    """Path, SHA-256 and commit of each file as it was before it was packed."""
    try:
        head, *lines = lzma.decompress(ORIGINALS.read_bytes()).decode().splitlines() or [""]
    except (EOFError, lzma.LZMAError):
        head, lines = "", []
    rows = [tuple(line.split("\t")) for line in lines]
    if any(len(row) != 3 for row in rows) or f"# {len(rows)} files" not in head:
        raise KeptError(f"{ORIGINALS} is cut off or damaged: get it back with `git checkout`.")
    return rows  # type: ignore[return-value]


def blobs(rows: list[tuple[str, str, str]]) -> Iterator[bytes | None]:
    """Each file's content in its commit; None where the history has none."""
    wanted = "".join(f"{commit}:{path}\n" for path, _, commit in rows).encode()
    found, at = git("cat-file", "--batch", data=wanted), 0
    for _ in rows:
        end = found.index(b"\n", at)
        words, at = found[at:end].split(), end + 1
        if words[-1] == b"missing":
            yield None
            continue
        size = int(words[-1])
        yield found[at : at + size]
        at += size + 1


def predictions(rows: list[tuple[str, str, str]]) -> Iterator[tuple[str, str, str]]:
    """Name of a measured run that was predicted, the commit that had the predicted records first, that of the run."""
    commits = {path: commit for path, _, commit in rows}
    for path, commit in commits.items():
        before, predicted, rest = path.partition("/frozen/predicted/")
        name, _, file = rest.partition("/")
        measured = f"{before}/frozen/measured/{rest}"
        if predicted and file.startswith(RECORDS) and measured in commits:
            yield name, commit, commits[measured]


def packed_runs(rows: list[tuple[str, str, str]]) -> Iterator[tuple[str, str, str, float]]:
    """Of measured runs that were packed and never committed as they were: name, the commit that had the prediction
    first, that of the run as it was packed, and when the run began by its own clock. Raises KeptError where what is
    packed is not what was."""
    commits = {path: commit for path, _, commit in rows}
    predicted = {
        rest.partition("/")[0]: commit
        for path, commit in commits.items()
        for before, found, rest in [path.partition("/frozen/predicted/")]
        if found and f"{before}/frozen/measured/{rest}" not in commits and rest.partition("/")[2].startswith(RECORDS)
    }
    for path in packed_files(ROOT / "results"):
        runs = {one["name"]: one for one in read(path, MEASURED) if one["name"].removeprefix(MEASURED) in predicted}
        place = path.relative_to(ROOT)
        for commit in git("log", "--reverse", "--format=%H", "--", str(place)).decode().split() if runs else ():
            for line in lzma.decompress(git("show", f"{commit}:{place}")).decode().splitlines():
                then = json.loads(line) if line.startswith(BEGIN + MEASURED) else {"name": ""}
                if (now := runs.pop(then["name"], None)) is None:
                    continue
                if now != then:
                    raise KeptError(f"{then['name']} in {place} is not as it was packed in {commit}.")
                name = then["name"].removeprefix(MEASURED)
                yield name, predicted[name], commit, then["files"]["manifest.json"]["started_unix_s"]


def check_order(name: str, predicted: str, measured: str, began_s: float) -> None:
    """Raises KeptError where the history does not have the prediction before the run."""
    if not git("merge-base", predicted, measured).decode().startswith(predicted):
        raise KeptError(f"The prediction of {name} was not committed before the run.")
    if int(git("show", "--no-patch", "--format=%ct", predicted)) >= began_s:
        began = datetime.fromtimestamp(began_s, UTC)
        raise KeptError(f"{name} began at {began:%Y-%m-%d %H:%M:%S}, before {predicted} had its prediction.")


def check() -> None:
    """Prints what the history of git proves. Raises KeptError for the first thing that it contradicts."""
    if git("rev-parse", "--is-shallow-repository").strip() == b"true":
        raise KeptError("The history of this clone is shallow: get all of it with `git fetch --unshallow`.")
    rows = originals()
    began_s = {}
    for (path, digest, commit), content in zip(rows, blobs(rows), strict=True):
        if content is None:
            raise KeptError(f"{path} is not in commit {commit}.")
        if hashlib.sha256(content).hexdigest() != digest:
            raise KeptError(f"{path} in commit {commit} is not the file that originals.tsv.xz names.")
        if path.endswith("/manifest.json") and "/frozen/measured/" in path:
            began_s[path.split("/")[-2]] = json.loads(content)["started_unix_s"]
    print(f"{len(rows)} originals are in the history as they were packed.")
    before, together = 0, []
    for name, predicted, measured in predictions(rows):
        if predicted == measured:
            together.append(name)
            continue
        check_order(name, predicted, measured, began_s[name])
        before += 1
    print(f"{before} predictions were committed before their runs began.")
    packed = list(packed_runs(rows))
    for run_facts in packed:
        check_order(*run_facts)
    if packed:
        print(
            f"{len(packed)} more were, by the runs' own clocks: the history has these runs as they were packed, and no "
            "originals of them."
        )
    if together:
        print(f"Of {len(together)} the history has prediction and run in one commit: {', '.join(together)}.")


# -- the command -------------------------------------------------------------------------------------------------------


def line_of(one: dict[str, Any]) -> str:
    numbers = one.get("summary", {})
    files = ", ".join([*one["files"], *([RECORDS] if "requests" in one else [])])
    told = f"{numbers['ok']} ok, {numbers['output_tokens_per_s']:.0f} tokens/s: " if numbers else ""
    return f"{one['name']}: {told}{files}"


def run(arguments: argparse.Namespace) -> None:
    if arguments.command == "list":
        for path in packed_files():
            for one in read(path):
                if arguments.word in one["name"]:
                    print(line_of(one))
    elif arguments.command == "unpack":
        found = False
        name, place = arguments.name.strip("/"), Path(arguments.directory)
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise KeptError(f"{place} is there already: name a directory that is not.", MISUSED)
        for one in under(packed_files(), name):
            found = True
            unpack(one, place / one["name"].removeprefix(name).strip("/"))
        if not found:
            raise KeptError(f"No results are named {name!r}: `python benchmarks/kept.py list` has the names.", MISUSED)
    elif arguments.command == "pack":
        path = RESULTS / f"{arguments.file}.jsonl.xz"
        if not Path(arguments.directory).is_dir():
            raise KeptError(f"{arguments.directory} is no directory.", MISUSED)
        one = pack(Path(arguments.directory), arguments.name, arguments.gaps)
        others = [other for other in (read(path) if path.exists() else ()) if other["name"] != arguments.name]
        write(path, [*others, one])
    else:
        check()


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list").add_argument("word", nargs="?", default="")
    command = commands.add_parser("unpack")
    command.add_argument("name")
    command.add_argument("directory")
    command = commands.add_parser("pack")
    for name in ("directory", "name", "file"):
        command.add_argument(name)
    command.add_argument("--gaps", action="store_true", help="keep the gaps between tokens, a byte for each")
    commands.add_parser("check")
    try:
        run(parser.parse_args(words))
    except KeptError as error:
        print(f"kept: {error}", file=sys.stderr)
        return error.code
    except OSError as error:
        print(f"kept: {error.filename}: {error.strerror}", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
