"""Draws the pictures of the documents again, from results/*.jsonl.xz, into docs/pictures.

    python benchmarks/figures.py [WORD]    # those whose names have WORD; all take some minutes on one core

Figures 6 to 10 and published.png are of predictions, which are computed anew. The pictures of pages (docs/pages) need a
browser: `make figures` draws them too. timeline.png is as it was drawn: what it shows was not kept.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import kept

PICTURES = kept.ROOT / "docs" / "pictures"
COLOURS = 64  # of a picture: a third of the bytes, and no difference that shows
LOADGEN = (sys.executable, "-c", "from loadgen.cli import main; main()")
TRAINING_PROBE = (sys.executable, "-c", "from training_probe.cli import main; main()")
PREDICTED = "--gpu h200 --model 7b --output-tokens 512 --dtype bfloat16 --kv-tokens 230032"


def of(name: str, place: Path) -> Path:
    """A kept directory, unpacked."""
    directory = place / name
    if not directory.exists():
        for one in kept.under(kept.packed_files(), name):
            kept.unpack(one, place / one["name"])
    if not directory.is_dir():
        raise kept.KeptError(f"No results are named {name!r}.")
    return directory


def call(program: Sequence[str], *words: str) -> None:
    """Codes 0 and 4 are of reports that were made."""
    done = subprocess.run([*program, *words], capture_output=True, text=True, check=False, cwd=kept.ROOT)
    if done.returncode not in (0, 4):
        raise kept.KeptError(f"{' '.join(words)} failed: {done.stderr.strip()}")


def cdfs(names: str) -> Callable[[Path], Path]:
    """The latency CDFs of runs over each other."""

    def draw(place: Path) -> Path:
        out = place / f"{names.replace(' ', '-')}.png"
        call(LOADGEN, "report", *(str(of(f"h200/serving/{name}", place)) for name in names.split()), "--out", str(out))
        return out

    return draw


def report_of(name: str, file: str, program: Sequence[str] = TRAINING_PROBE) -> Callable[[Path], Path]:
    """A figure of a measurement's own report."""

    def draw(place: Path) -> Path:
        directory = of(name, place)
        call(program, "report", str(directory), *(["--figures"] if program == LOADGEN else []))
        return directory / file

    return draw


def largest_batch(place: Path) -> Path:
    """The throughput of five sweeps with the largest batch that fits, as one."""
    names = [f"h200/training/max-batch-7b-1gpu{more}" for more in ("", "-flash", "-r-384", "-qr-512", "-fr-384")]
    joined = Path(shutil.copytree(of(names[0], place), place / "largest_batch"))
    lines = "".join((of(name, place) / "results.jsonl").read_text() for name in names)
    (joined / "results.jsonl").write_text(lines)
    call(TRAINING_PROBE, "report", str(joined))
    return joined / "throughput-table-IV.png"


def predicted_and_measured(place: Path) -> Path:
    """A prediction over the run that it is of."""
    predicted, out = place / "predicted", place / "predicted_and_measured.png"
    call(LOADGEN, "predict", *PREDICTED.split(), "--out", str(predicted))
    call(LOADGEN, "report", str(predicted), str(of("h200/serving/7b_burst_o512", place)), "--out", str(out))
    return out


def made_by(program: Sequence[str], *words: str, file: str) -> Callable[[Path], Path]:
    """A file of what the command writes into its --out."""

    def draw(place: Path) -> Path:
        out = place / "-".join(words or program[-1:])
        if not out.exists():
            call(program, *words, "--out", str(out))
        return out / file

    return draw


FIGURES: dict[str, Callable[[Path], Path]] = {
    "demo.png": report_of("demo", "cdf.png", LOADGEN),
    "largest_batch.png": largest_batch,
    "parts.svg": report_of("h200/breakdown/train-2gpu", "parts.svg"),
    "predicted_and_measured.png": predicted_and_measured,
    "vllm_cpu.png": report_of("vllm_cpu", "cdf.png", LOADGEN),
    "cdf_bursts.png": cdfs("7b_burst_o64 7b_burst_o256 7b_burst_o512 13b_burst_o64 13b_burst_o256 13b_burst_o512"),
    "cdf_poisson.png": cdfs("7b_poisson16_o128 7b_poisson32_o128 7b_poisson40_o128"),
    "cdf_tp.png": cdfs("7b_tp2_o64 7b_tp2_p2poff_o64 7b_tp4_o64 7b_tp4_p2poff_o64 70b_tp2_o64 70b_tp2_p2poff_o64"),
    "cdf_servers.png": cdfs("7b_burst_o64 7b_lightllm_o64 7b_burst_o256 7b_lightllm_o256"),
    "figure4.png": report_of("h200/training/fig4", "scaling.png"),
    "figure11.png": report_of("h200/micro/fig11", "gemm.png"),
    "figure12.png": report_of("h200/micro/fig12", "memcpy.png"),
    "figure13-15.png": report_of("h200/micro/collectives", "collectives.png"),
    **{
        f"figure{number}.png": made_by(LOADGEN, "predict", "--preset", "paper", file=f"figure{number}.png")
        for number in (6, 7, 8, 9, 10)
    },
    "published.png": made_by((sys.executable, "-m", "benchmarks.published"), file="published.png"),
}


def main() -> int:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        for name, draw in FIGURES.items():
            if word in name:
                try:
                    drawn = draw(Path(directory))
                    shutil.copy(drawn, PICTURES / name)
                except (kept.KeptError, FileNotFoundError) as error:
                    print(f"figures: {name}: {error}", file=sys.stderr)
                    return kept.FAILED
                if name.endswith(".png"):
                    Image.open(PICTURES / name).convert("RGB").quantize(COLOURS).save(PICTURES / name, optimize=True)
                print(PICTURES / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
