"""What others measured and published beside what is predicted of it, misses included.

    python -m benchmarks.published --out DIR        # 241 runs of servers: published.csv, .json, .md, .png, .svg, .html
    python -m benchmarks.published --memory         # memory of training; --measured DIR: a sweep of its cells beside
    python -m benchmarks.published --keep           # computes (two minutes on one core), keeps them in results/
    python -m benchmarks.published --written        # writes the document's part from the results alone

The part of docs/lab/accuracy.md between `<!-- published -->` and `<!-- /published -->` is replaced by the last two;
nobody edits it by hand.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import kept, published
from benchmarks.published import memory, page
from loadgen.document import figure, html
from training_probe import results

ROOT = Path(__file__).resolve().parents[2]

DOCUMENT = ROOT / "docs" / "lab" / "accuracy.md"
BEGIN, END = "<!-- published -->", "<!-- /published -->"
METRICS = ("ttft", "tpot", "e2e", "throughput")
# this project's own closed loops on a real vLLM: what was kept of it, and the same load for `loadgen predict`
OWN = {
    "h200_7b_closed32_o128": (
        "runs",
        "h200_7b_closed32_o128.jsonl",
        "--gpu h200 --model 7b --dtype bfloat16 --concurrency 32 --requests 200 --input-tokens 512 --output-tokens 128",
    ),
    "frozen_closed32_mixed": (
        "frozen/measured/closed32_mixed",
        "requests.jsonl",
        "--gpu h200 --model mistral-7b --dtype bfloat16 --max-model-len 8192 --concurrency 32 --requests 256 --seed 1 "
        "--input-tokens uniform:256:1024 --output-tokens 128",
    ),
}


def play(out: Path, seed: int = 0) -> str:
    """Predicts all rows, and writes tables, figure and page into `out`; the table as text."""
    out.mkdir(parents=True, exist_ok=True)
    predicted = published.predict_all(seed, lambda line: print(line, file=sys.stderr))
    found, text = list(predicted.all()), published.markdown(predicted)
    (out / "published.csv").write_text(published.table_csv(found), encoding="utf-8")
    (out / "published.json").write_bytes(msgspec.json.format(published.as_json(predicted, seed), indent=1) + b"\n")
    (out / "published.md").write_text(text, encoding="utf-8")
    shown = page.page(predicted, ["python", "-m", "benchmarks.published", *sys.argv[1:]])
    figure.write(shown, out)
    (out / "published.html").write_text(html.render(shown), encoding="utf-8")
    return text


def compute(out: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory) / "published"
        play(made)
        for name in ("published.csv", "published.json"):
            shutil.copy(made / name, out / name)
        shutil.copy(made / "published.md", ROOT / "docs" / "lab" / "published.md")
        shutil.copy(made / "published.png", ROOT / "docs" / "pictures" / "published.png")
        with (out / "own.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(
                ["run", *(f"{kind}_{m}_ms" for m in ("ttft", "tpot") for kind in ("predicted", "measured"))]
            )
            for run, (name, records, options) in OWN.items():
                predict(options, Path(directory) / run)
                kept.unpack(next(kept.under(kept.packed_files(), name)), Path(directory) / name)
                predicted = means(Path(directory) / run / "requests.jsonl")
                pairs = zip(predicted, means(Path(directory) / name / records), strict=True)
                writer.writerow([run, *(f"{value:.3f}" for pair in pairs for value in pair)])


def predict(options: str, out: Path) -> None:
    words = ["predict", *options.split(), "--out", str(out)]
    command = [sys.executable, "-c", "from loadgen.cli import main; main()", *words]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def means(path: Path) -> tuple[float, float]:
    """ttft and tpot in ms of the measured requests: of a run's records, or of the shorter lines of "runs"."""
    ttft, tpot = [], []
    with path.open() as file:
        for line in map(json.loads, file):
            if "first" in line:
                sent, first, last, tokens = (
                    1e3 * line["send"], 1e3 * line["first"], 1e3 * line["end"], line["usage"]["completion_tokens"],
                )  # fmt: skip
            elif line.get("outcome") == "ok" and line.get("phase") != "warmup":
                sent, first, last = (line[f"{at}_ns"] / 1e6 for at in ("sent", "first_token", "last_token"))
                tokens = line["output_tokens"]
            else:
                continue
            ttft.append(first - sent)
            tpot.append((last - first) / (tokens - 1))
    return statistics.mean(ttft), statistics.mean(tpot)


def section(out: Path) -> str:
    """The document's part, of published.json and published.csv and of aiconfigurator.csv, where that was made."""
    sources = json.loads((out / "published.json").read_text())["sources"]
    lines = [BEGIN, "| source | rows | | median off | with its sign | worst | target for the median |"]
    lines.append("|---|---:|---|---:|---:|---|---|")
    for name, source in sources.items():
        for metric, found in source["errors"].items():
            verdict = "met" if found["median"] <= found["target"] else "**missed**"
            lines.append(
                f"| {name} | {found['rows']} | {metric} | {found['median']:.1%} | {found['bias']:+.1%} | "
                f"{found['worst']:+.1%} ({found['worst_run']}) | {found['target']:.0%}: {verdict} |"
            )
    lines += [
        "",
        "Median errors under other assumptions:",
        "",
        "| source | assumption | ttft | tpot | e2e | throughput |",
    ]
    lines.append("|---|---|---:|---:|---:|---:|")
    for name, source in sources.items():
        for why, found in source["alternatives"].items():
            cells = (f"{found[metric]:.1%}" if metric in found else "" for metric in METRICS)
            lines.append(f"| {name} | {why} | " + " | ".join(cells) + " |")
    if (out / "aiconfigurator.csv").exists():
        lines += ["", *beside(out)]
    return "\n".join([*lines, END])


def beside(out: Path) -> list[str]:
    """Ours and another's median errors on the rows that both express."""
    theirs = {(row["source"], row["run"]): row for row in table(out / "aiconfigurator.csv")}
    lines = ["Beside aiconfigurator 0.12, on the rows that it expresses (median error, ours and its):", ""]
    lines += ["| source | rows | ttft, ours | its | tpot, ours | its |", "|---|---:|---:|---:|---:|---:|"]
    ours = [row for row in table(out / "published.csv") if row["measured_tpot_ms"]]
    for source in dict.fromkeys(row["source"] for row in ours):
        rows = [row for row in ours if row["source"] == source and theirs[source, row["run"]]["tpot_ms"]]
        cells = []
        for metric in ("ttft_ms", "tpot_ms"):
            cells.append(median(abs(float(row[f"off_{metric}"])) for row in rows))
            its = (float(theirs[source, row["run"]][metric]) / float(row[f"measured_{metric}"]) - 1 for row in rows)
            cells.append(median(map(abs, its)))
        lines.append(f"| {source} | {len(rows)} | " + " | ".join(cells) + " |")
    for row in table(out / "own.csv"):
        cells = []
        for metric in ("ttft_ms", "tpot_ms"):
            its = theirs["own", row["run"]][metric]
            for value in (row[f"predicted_{metric}"], its):
                cells.append(f"{float(value) / float(row[f'measured_{metric}']) - 1:+.1%}" if value else "none")
        lines.append(f"| own: {row['run']} | 1 | " + " | ".join(cells) + " |")
    return lines


def median(errors: Any) -> str:
    values = list(errors)
    return f"{statistics.median(values):.1%}" if values else "none"


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def write(out: Path) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(before + section(out) + after, encoding="utf-8")


def keep(written: bool) -> None:
    """Writes the document's part, after computing the numbers anew unless `written`."""
    packed = kept.RESULTS / "published.jsonl.xz"
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "published"
        before = list(kept.read(packed))
        kept.unpack(next(one for one in before if one["name"] == "published"), out)
        if not written:
            compute(out)
            anew = kept.pack(out, "published", gaps=False)
            kept.write(packed, [anew if one["name"] == "published" else one for one in before])
        write(out)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__.split("\n", 1)[0])
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--out", type=Path, metavar="DIR", help="predict the runs of servers, into this directory")
    asked.add_argument("--memory", action="store_true", help="print the memory of training")
    asked.add_argument("--keep", action="store_true", help="predict, keep the numbers, write the document's part")
    asked.add_argument("--written", action="store_true", help="write the document's part from what is kept")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn lengths and arrivals (--out)")
    parser.add_argument("--measured", type=Path, metavar="DIR", help="a sweep of the cells (--memory)")
    parser.add_argument("--json", action="store_true", help="print JSON (--memory)")
    given = parser.parse_args(argv)
    if given.out is not None:
        print(play(given.out, given.seed))
    elif given.memory:
        try:
            lines = memory.beside(results.read(given.measured) if given.measured else ())
        except results.ResultsError as error:
            parser.error(str(error))
        print(memory.as_json(lines) if given.json else memory.text(lines), end="")
    else:
        keep(given.written)


if __name__ == "__main__":
    main()
