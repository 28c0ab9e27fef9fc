"""Golden outputs: records what loadgen and training_probe print and write for a fixed list of commands, and compares
two recordings byte for byte. For refactorings: what moves must not change.

    git worktree add --detach ../old HEAD        # what was; with a venv of its own:
    python3 -m venv ../old/.venv && ../old/.venv/bin/pip install -e '../old[dev]'
    python tests/golden.py record golden/before --checkout ../old
    python tests/golden.py record golden/after --inputs ../old
    python tests/golden.py compare golden/before golden/after

Each command runs in an empty directory of its own, with a fixed environment and copies of the kept measurements that it
reads (of the checkout, or of another one: --inputs). A recording holds GROUP/NAME/ with `command`, `exit`, `stdout`,
`stderr`, `files.txt` (every file that is there afterwards) and, under `files/`, those that the command wrote, but for
PNGs. What differs from one run to the next is replaced: MASKS, each with its reason. Of runs in real time, whose
numbers differ, only the names of what they tell are kept. Help pages are the group `help`, compared apart: they differ
on purpose, and do not count for the exit code of `compare`.

--only REGEX records, or compares, the GROUP/NAMEs that it finds. --renamed OLD=NEW, of `compare`, replaces in what was
recorded first a name that was changed on purpose, as of a module in a printed command.

Needs nothing but the standard library. Takes some minutes; two commands run at a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
SERVING, TRAINING = "benchmarks/h200/serving", "benchmarks/h200/training"
BREAKDOWN, MICRO, CLIENTS = "benchmarks/h200/breakdown", "benchmarks/h200/micro", "benchmarks/runs"
TIMEOUT_S = 300
# What `report` writes, besides figures.
MADE_ANEW = ("report.json", "report.md", "report.html", "tables.csv", "tables.tex")
FIGURES = (".png", ".svg")
HELP = "help"
REAL_TIME = "real-time"
COMPUTED_NOW = ("predict", "breakdown", "paper", "calibrate")  # groups whose outputs tell of this process and machine


@dataclasses.dataclass(frozen=True)
class Mask:
    """Something that differs from one run to the next; `groups`: where alone it is replaced."""

    pattern: str
    replacement: str
    reason: str
    groups: tuple[str, ...] | None = None


MASKS = (
    Mask(r"<BIN>/python[\d.]*", "<BIN>/python", "a venv's interpreter has several names"),
    Mask(r"\b\d+(\.\d+)? s of computing", "<DURATION> s of computing", "how long it took here"),
    Mask(r'("peak_rss_mb": ?)[\d.]+', r"\1<MB>", "memory of this process", COMPUTED_NOW),
    Mask(r'("(?:rss|maxrss|peak_rss)_\w+": ?)[\d.]+', r"\1<MB>", "memory of this process", COMPUTED_NOW),
    Mask(r"[\d.,]+ MB, loop lag", "<MB> MB, loop lag", "memory of this process", COMPUTED_NOW),
    Mask(r'("(?:platform|hostname)": ?)"[^"]*"', r'\1"<MACHINE>"', "this machine", COMPUTED_NOW),
    Mask(r'("python": ?)"[^"]*"', r'\1"<PYTHON>"', "this interpreter", COMPUTED_NOW),
    Mask(r'("cpu_count": ?)\d+', r"\1<CPUS>", "this machine", COMPUTED_NOW),
    Mask(r"\d+(\.\d+)? (GiB|GB|TB)\b", "<SIZE>", "disk and memory that are free just now", ("doctor",)),
    Mask(r"\d+ ns apart", "<DURATION> apart", "the clock's steps, as measured just now", ("doctor",)),
)
RUN_ID = re.compile(r"\b(\d{8}-\d{6})-[0-9a-f]{6}\b")  # of this recording's time alone: kept runs keep theirs
UNIX_SECONDS = re.compile(r"\b\d{10}(\.\d+)?\b")


@dataclasses.dataclass(frozen=True)
class Command:
    """A command line to record. copies: directories and files of the checkout that it finds in its directory, without
    what it is to make anew. files: others, by name. environment: more of it."""

    group: str
    name: str
    argv: tuple[str, ...]
    copies: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def place(self) -> str:
        return f"{self.group}/{self.name}"


# -- the commands ------------------------------------------------------------------------------------------------------


def numbered(group: str, program: str, lines: list[str], **more: tuple[tuple[str, str], ...]) -> Iterator[Command]:
    """Command lines named after their words, so that adding one renames no other."""
    for line in lines:
        name = re.sub(r"[^A-Za-z0-9.=@+-]+", "_", line).strip("_")[:90] or "nothing"
        yield Command(group, f"{program}_{name}", (program, *words(line)), **more)  # type: ignore[arg-type]


def words(line: str) -> list[str]:
    """As a shell would split it, for lines whose words hold no blanks; '' is an empty word."""
    return ["" if word == "''" else word.replace("\\s", " ") for word in line.split()]


def kept(inputs: Path, below: str, having: str) -> list[str]:
    """Directories of kept measurements, by a file that each must hold."""
    return sorted(path.parent.relative_to(inputs).as_posix() for path in (inputs / below).glob(f"*/{having}"))


def commands(inputs: Path) -> list[Command]:
    """All that are recorded; which kept measurements there are is read from the inputs."""
    found = [
        *serving_reports(inputs), *predictions(), *plans_of_servers(), *servers_to_start(), *training(inputs),
        *mistakes(), *runs_in_real_time(), *help_pages(),
    ]  # fmt: skip
    names = [each.place for each in found]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    return found


def serving_reports(inputs: Path) -> Iterator[Command]:
    """loadgen report and compare, of everything kept."""
    measured = ["benchmarks/vllm_cpu", *kept(inputs, SERVING, "manifest.json")]
    for each in measured:
        yield Command("report", Path(each).name, ("loadgen", "report", Path(each).name), (each,))
    for each in ("7b_burst_o64", "7b_poisson16_o128"):
        for convention in ("loadgen", "vllm", "guidellm", "aiperf", "mlperf"):
            argv = ("loadgen", "report", each, "--convention", convention)
            yield Command("convention", f"{each}_{convention}", argv, (f"{SERVING}/{each}",))
    pairs = [
        ("7b_burst_o64", "7b_lightllm_o64"), ("7b_burst_o256", "7b_burst_o256_again"), ("7b_tp2_o64", "7b_tp4_o64"),
        ("7b_poisson16_o128", "7b_poisson32_o128"), ("70b_tp2_o64", "70b_tp2_p2poff_o64"),
        ("7b_burst_o64", "13b_burst_o512_invalid"),
    ]  # fmt: skip
    for a, b in pairs:
        copies = (f"{SERVING}/{a}", f"{SERVING}/{b}")
        yield Command("compare", f"{a}_{b}", ("loadgen", "compare", a, b), copies)
        for out in ("cdf.svg", "cdf.png"):
            yield Command("overlay", f"{a}_{b}_{out}", ("loadgen", "report", a, b, "--out", out), copies)
    for each in kept(inputs, BREAKDOWN, "breakdown.json"):
        yield Command("report", f"breakdown_{Path(each).name}", ("loadgen", "report", Path(each).name), (each,))


DATASET = "".join(
    json.dumps({"prompt": list(range(count, 3 * count)), "output_tokens": 4 + count % 7}) + "\n"
    for count in range(1, 40)
)


def predictions() -> Iterator[Command]:
    """loadgen predict, breakdown and calibrate: computed in virtual time, from seeds."""
    lines = [
        "--gpu h200 --model 7b --requests 200 --seed 1",
        "--gpu h200 --requests 300 --arrival poisson:20 --output-tokens 64 --goodput ttft:200 tpot:30 --seed 2",
        "--backend tgi --gpu a100 --model 13b --requests 150 --arrival gamma:5:2 --seed 3",
        "--backend tgi --scheduler tgi@1 --gpu rtx4090 --gpus 8 --model 70b --requests 100 --seed 4",
        "--backend lightllm --gpu a800 --gpus 8 --model 70b --requests 200 --output-tokens 32 --seed 5",
        "--backend lightllm --scheduler lightllm@2310 --gpu a800 --requests 150 --arrival constant:10 --seed 6",
        "--gpu h200 --tp 4 --gpus 4 --p2p off --model 70b --requests 150 --input-tokens 1024 --seed 7",
        "--gpu h100 --model 13b --concurrency 16 --requests 120 --output-tokens 200 --seed 8",
        "--scheduler vllm@0.2 --gpu rtx3090 --gpus 2 --topology nvlink-pairs --tp 2 --model 7b --requests 100 --seed 9",
        "--gpu h200 --model 7b --kv-tokens 20000 --requests 200 --output-tokens 256 --dtype bfloat16 --seed 10",
        "--gpu h200 --model mixtral-8x7b --gpus 2 --requests 50 --concurrency 8 --seed 11",
        "--backend tgi --gpu h200 --model 7b --scheduler-arg max_concurrent_requests=16 --requests 64 --seed 12",
        "--gpu h200 --model 7b --dataset prompts.jsonl --arrival poisson:10 --seed 13",
    ]
    for line in lines:
        seed = line.rpartition("--seed ")[2]
        argv = ("loadgen", "predict", *words(line), "--out", "out")
        yield Command("predict", f"seed_{seed}", argv, files=(("prompts.jsonl", DATASET),))
    yield Command("paper", "predict", ("loadgen", "predict", "--preset", "paper", "--out", "out"))
    yield Command(
        "predict", "config_file", ("loadgen", "predict", "--config", "c.toml", "--requests", "40"),
        files=(("c.toml", 'gpu = "h200"\nmodel = "7b"\noutput_tokens = 9\nout = "out"\ngoodput = ["ttft:50"]\n'),),
    )  # fmt: skip
    for name, line in {
        "paper-table10": "--preset paper-table10", "h200": "--gpu h200 --model 7b --concurrency 64",
        "tgi": "--gpu a800 --backend tgi --model 13b --concurrency 32",
        "paper_own_gpu": "--preset paper-table10 --gpu h200 --backend vllm --concurrency 100",
    }.items():  # fmt: skip
        yield Command("breakdown", name, ("loadgen", "breakdown", *words(line), "--out", "out"))
    for backend in ("vllm", "lightllm"):
        line = f"--launch process --backend {backend} --model 7b --concurrency 8 --dry-run --port 8123"
        yield Command("breakdown", f"dry_run_{backend}", ("loadgen", "breakdown", *words(line)))
    files = ["h200_7b_poisson4_o256", "h200_7b_closed32_o128", "h100_7b_poisson8_o128"]
    copies = tuple(f"{CLIENTS}/{name}.jsonl.gz" for name in files)
    line = "calibrate {} {} --held-out {} --out mine.json".format(*(Path(each).name for each in copies))
    yield Command("calibrate", "client_files", ("loadgen", *words(line)), copies)


def plans_of_servers() -> Iterator[Command]:
    """loadgen plan."""
    for name, line in {
        "h200": "--slo ttft_ms=500,tpot_ms=50 --rate 5 --gpu h200",
        "several": "--model 70b --slo ttft_ms=500,tpot_ms=50 --rate 20 --gpu h200 a100 rtx4090",
        "tgi": "--backend tgi --slo e2el_ms=8000 --rate 3 --gpu a800 h100 --max-running 64 256 --percentile 95",
        "p2p_off": "--model 13b --slo tpot_ms=40 --rate 2 --gpu h200 --p2p off --max-gpus 2 --requests 200",
    }.items():  # fmt: skip
        yield Command("plan", name, ("loadgen", "plan", *words(line)))


def servers_to_start() -> Iterator[Command]:
    """loadgen run --dry-run, compose, backends and doctor: what a server would be started with."""
    for backend in ("vllm", "lightllm", "tgi"):
        for p2p in ("auto", "on", "off"):
            for launch in ("docker", "process"):
                line = f"run --dry-run --backend {backend} --launch {launch} --model 70b --p2p {p2p} --port 8123"
                yield Command("dry-run", f"{backend}_{launch}_p2p_{p2p}", ("loadgen", *words(line)))
            line = f"compose --backend {backend} --model 70b --p2p {p2p}"
            yield Command("compose", f"{backend}_70b_p2p_{p2p}", ("loadgen", *words(line)))
        yield Command(
            "compose", f"{backend}_7b_tp_1", ("loadgen", *words(f"compose --backend {backend} --model 7b --tp 1"))
        )
        yield Command(
            "dry-run", f"{backend}_docker_7b", ("loadgen", *words(f"run --dry-run --backend {backend} --model 7b"))
        )
        yield Command("doctor", backend, ("loadgen", *words(f"doctor --backend {backend} --model 7b")))
    for name, line in {
        "dummy_weights": "--backend vllm --model 7b --dummy-weights --dtype bfloat16 --server-arg=--enforce-eager",
        "several_gpus": "--backend vllm --model 13b --gpus 2,3 --tp all --memory-ratio 0.8 --max-running 64",
        "image": "--backend tgi --model 13b --image repo/image:tag --max-model-len 2048",
        "no_gpu": "--backend vllm --model 7b --gpus none --dtype bfloat16",
        "other_load": "--backend tgi --model 7b --no-stream --output-tokens 5 --input-tokens 9 --seed 4",
        "hub_id": "--backend vllm --model meta-llama/Llama-2-13b-hf --vocab-size 100 --input-tokens 16",
        "p2p_off_tp_4": "--backend lightllm --model 7b --tp 4 --p2p off --server-arg=--x\\sy",
    }.items():  # fmt: skip
        yield Command("dry-run", name, ("loadgen", "run", "--dry-run", *words(line)))
        yield Command("compose", name, ("loadgen", "compose", *words(line)))
    for line in ("backends", "doctor", "--version"):
        yield Command("doctor" if line == "doctor" else "list", line.strip("-"), ("loadgen", line))


TRAINING_PRESETS = (
    "laptop", "paper-table2", "paper-table3", "paper-table4", "paper-table5", "paper-table7", "paper-table8",
    "paper-table9", "paper-table13", "paper-table14", "paper-table15", "paper-table16", "paper-fig4", "paper-fig5",
)  # fmt: skip


def training(inputs: Path) -> Iterator[Command]:
    """training_probe's predictions, and its reports of everything kept."""
    memory = [
        "--model 70b --method F+R+Z3+O --gpus 8", "--model 7b --method Naive", "--model 7b --method F+Z3 --gpus 4",
        "--model 7b --method Z1 Z2+O Q R+Z3 --gpus 1 8",
        "--model 13b --method L F+QL PT L+Z3 --gpus 8 --micro-batch 4",
        "--model 7b --method F F+R --engine fsdp2 --gpus 4 --seq-len 4096",
        "--model tiny --method Naive F --engine ddp",
        "--model 13b --method F+Z1 F+R --engine megatron --tp 2 --gpus 8", "--model 7b --method Z1 --engine ddp",
        "--model 13b --method F+RS --engine megatron --tp 2 --pp 2 --gpus 8 --grad-accum 4",
        "--model mixtral-8x7b --method F+R+Z3+O --gpus 8",
        "--model llama-3-8b --method F+R+Z2 --gpus 8 --gpu-memory-gb 80",
        "--model 70b --method F+R+Z3+O --gpus 8 --gpu-memory-gb 4", "--preset paper-table3 --gpu-memory-gb 24",
        "--model 7b --method Naive R --attention math --micro-batch 8 --compile --engine fsdp2",
        "--model 7b --method F --engine megatron --cp 2 --gpus 2", "--model 7b --method F+R+Z3+O --micro-batch max",
        "--preset laptop", "--preset published", "--preset published --json",
        "--model 7b --method Naive Z3+O QL --gpus 1 4 --gpu-memory-gb 80 --node-memory-gb 128 --verbose",
        "--model 7b --method Z2 --gpus 4 --gpu-memory-gb 48 --json",
    ]  # fmt: skip
    yield from numbered("memory", "training_probe", [f"memory {line}" for line in memory])
    plans = [
        "plan", "plan --preset paper-table3 --gpus 8 --gpu-memory-gb 80",
        "plan --model 7b 13b --method Naive QL F+R+Z3+O --gpus 1 8",
        "plan --model 7b --method Naive QL --engine deepspeed fsdp2 --gpu-memory-gb=24",
        "plan --model 7b --method F+R+Z3+O --micro-batch max --gpu-memory-gb 80",
        "sweep --dry-run", "sweep --dry-run --gpus 1 --device cpu",
        "sweep --dry-run --model 7b --method Z3+O Naive --engine deepspeed ddp --gpus 8 --device cuda",
        "sweep --dry-run --model 13b --method F+Z1 --engine megatron --tp 2 --gpus 4 --device cuda",
        "sweep --dry-run --model 7b --method L QL PT --gpus 1 --device cuda --micro-batch 1 max --steps 5 --runs 2",
        *(f"plan --preset {preset}" for preset in TRAINING_PRESETS),
        *(f"plan --preset {preset} --gpu-memory-gb 24 --gpus 4" for preset in TRAINING_PRESETS if preset != "laptop"),
        *(f"sweep --dry-run --preset {preset}" for preset in TRAINING_PRESETS),
        *(f"sweep --dry-run --preset {preset} --device cuda --gpus 8" for preset in TRAINING_PRESETS),
        "letters", "--version",
    ]  # fmt: skip
    yield from numbered("training-plan", "training_probe", plans)
    swept = kept(inputs, TRAINING, "results.jsonl")
    traced, micro = kept(inputs, BREAKDOWN, "breakdown.jsonl"), kept(inputs, MICRO, "micro.jsonl")
    for each in (*swept, *traced, *micro):
        name = each.removeprefix("benchmarks/h200/").replace("/", "_")
        yield Command("training-report", name, ("training_probe", "report", Path(each).name), (each,))
    for a, b in zip(swept, [*swept[1:], swept[0]], strict=True):
        names = (Path(a).name, Path(b).name)
        yield Command("training-compare", "_".join(names), ("training_probe", "compare", *names), (a, b))


BAD_RUNS = """
--backend vlm|--model nosuch|--model 70bb|--launch embedded --model nosuch|--model ./no/such|--model .
--backend openai|--tp 2|--url http://h --gpus 0|--url http://localhost:9 --tp 2|--model 7b --tp x|--model 7b --tp 0
--model 7b --memory-ratio 1.5|--model 7b --port 70000|--model 7b --server-python python3|--launch process --image x
--model 7b --server-arg=--api-key=s3cret|--model 7b --server-arg=--api --server-arg=s3cret
--model 7b --server-arg=--hf-t\\ss3cret|--model ~nosuchuser/x|--model 7b --max-model-len 600
--backend tgi --dtype float32|--backend tgi --dummy-weights|--model 7b --input-tokens 5000
--model 7b --max-model-len 8000|--dry-run|--requests 0|--requests -5|--input-tokens 0|--output-tokens -1
--concurrency 0|--duration 0 --concurrency 1|--requests many|--reqests 5|--arrival posson:5|--duration 5
--concurrency 5 --arrival burst|--url http://h --launch embedded|--metrics-port 0|--url ftp://h|--url http://
--url http://user:secret@h|--goodput tft:5|--goodput ttft:nan|--goodput ttft:5 e2el:inf|--workers none
--kernel-timestamps --transport aiohttp|--api-key-env LOADGEN_TEST_NO_SUCH|--api-key-env LOADGEN_TEST_BAD_KEY
--url http://h/?key=secret|--url http://h/é|--dataset no/such.jsonl|--input-tokens 5000|--tokenizer dir
--model 7b --tokenizer dir|--backend tgi --launch embedded --vocab-size 100
--backend tgi --launch embedded --tokenizer dir --dataset d|--vocab-size 100 --dataset d|--input-tokens 64 --dataset d
--config no/such.toml|surplus|--requests 2.5|--seed -1|--speed 2|--gpu h200 --speed 0|--gpu nosuch
--gpu h200 --scheduler vllm@9|--gpu h200 --scheduler-arg x=1|--url http://a..b --out r
--url http://127.0.0.1:9 --out r|--connect-timeout 0|--warmup -1|--vocab-size 0|--max-running 0 --model 7b
--arrival gamma:1|--arrival poisson:0|--backend tgi --gpu h200 --gpus x|--gpu rtx4090 --model 70b
--out full --gpu h200|--out file/x --gpu h200|--config bad.toml|--config unknown.toml|--config zero.toml
--dataset bad.jsonl|--dataset empty.jsonl
"""
BAD_OTHERS = """
nosuch|report|report nosuch|report empty|compare empty empty|compare empty|report training|compare training training
report damaged|report a b --convention nosuch|report empty --convention vllm2|export --runs no/such
export --keep-days 0|export --port 1.5|serve --port 1.5|serve --max-running 1.5|calibrate
calibrate nosuch --out p.json|calibrate empty|calibrate nosuch --out p.json --tp 1.5|compose|compose --backend openai
compose --model 7b --launch process|compose --model nosuch|doctor --backend vlm|predict --model 7b
predict --gpu nosuch|predict --gpu h200 --url http://h|predict --preset paper --requests 10
predict --preset paper --backend tgi|predict --gpu h200 --workers 2|predict --gpu rtx4090 --model 70b
predict --gpu h200 --dry-run|predict --gpu h200 --speed 2|predict --gpu h200 --out full|plan|plan --slo ttft_ms=5
plan --slo x=5 --rate 1|plan --slo ttft_ms=0 --rate 1|plan --slo ttft_ms=5 --rate 0
plan --slo ttft_ms=5 --rate 1 --gpu nosuch|plan --slo ttft_ms=5 --rate 1 --max-gpus 1.5
plan --slo ttft_ms=5 --rate 1 --prices no|plan --slo ttft_ms=5 --rate 1 --max-running 8 1.5
plan --slo ttft_ms=5 --rate 1 --model nosuch --gpu h200|plan --slo ttft_ms=5 --rate 1 --percentile 101
plan --slo ttft_ms=5 --rate 1 --backend openai|breakdown --gpu rtx4090 --concurrency 1000
breakdown --gpu h200 --concurrency 2000|breakdown --gpu h2000|breakdown --gpu a800 --backend openai
breakdown --gpu a800 --steps 1|breakdown --gpu a800 --arrival poisson:3|breakdown --gpu a800 --dataset prompts.jsonl
breakdown --gpu a800 --no-stream|breakdown --gpu a800 --metrics-port 9465|breakdown --gpu a800 --max-model-len 600
breakdown --gpu a800 --input-tokens 4090|breakdown --preset paper-table10 --gpus 4|breakdown --url http://h:1
breakdown --launch process --backend tgi|breakdown --launch process --requests 3|serve --ttft|serve --dialect foo
serve --ttft-ms -1|serve --itl-ms nan|serve --jitter-ratio 1|serve --port 70000|serve --max-model-len 1
serve --fault explode:2|serve --dialect tgi --fault no_done:2|serve --stamps /no/such/place/s.npz
serve --api-key-env NOT_SET_ANYWHERE|serve --exit-with-stdin|serve --kv-tokens 100|serve --gpus 2|serve --speed 2
serve --gpu h200 --dtype int4|serve --gpu h200 --speed inf|serve --gpu h200 --scheduler-arg max_running=0
serve --host aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa.example|serve --fault kv_exhaustion:10%
serve --fault reset:200%|serve --gpu nosuch
"""
BAD_SWEEPS = """
--method Z4|--method F Z9+F|--method L+QL|--method O|--method Z3+Z3|--method F --attention math
--method Z3 --gpus 9 --device cuda|--method Z3 --device cuda|--method F --engine ddp|--method Z3|--method QL
--method F --engine megatron|''|--preset paper-table3|--model 7b --method Z3|--model 7b --method Z3 --device cpu
--model . --method Z3|--model ./no/such --method Z3|--model nosuch --method Z3|--model 70bb --method Z3|--model 7b
--method Z3 --micro-batch 0|--method Z3 --micro-batch x|--method Z3 --gpus 0|--method Z3 --gpus 1.5|--metrics-port 0
--metrics-port 9464.5|--method Z3 --steps 0|--method Z3 --steps many|--method Z3 --warmup-steps -1
--method Z3 --runs 0|--method Z3 --timeout -5|--method Z3 --timeout nan|--method Z3 --limit 0
--method Z3 --host-memory-gb inf|--engine deepsped --method Z3|--preset paper-table1|--preset laptop --model 70b
--preset laptop --method RS|--preset laptop --method Z4|--preset paper-table3 --seq-len 100
--preset laptop --micro-batch 4|--preset laptop --gpus 1 2|--preset laptop --gpus 0|--resume no/such|--resume .
--resume . --steps 3|--resume . --method Z3|--resume . --out x|--resume . --dry-run|--metod Z3|--micro-bach 2|surplus
--method|--method --device cpu|--platform ''|--tp 0 --method F
--engine megatron --tp 3 --gpus 4 --method F --device cuda
"""
BAD_TRAINING = """
report empty|report no/such|report|compare empty empty|compare no/such empty|compare empty|memory
memory --method Z3 --device cpu|memory --method Z3 --gpu-memory-gb 0|memory --method Z3 --gpu-memory-gb inf
memory --method Z3 --gpu-memry-gb 80|plan --gpu-memory-gb -1|plan --method Z4|plan --steps 3|letters x|swep|breakdown
breakdown --method QL|breakdown --preset paper-table5|breakdown --steps 0 --method F
breakdown --engine megatron --method F|report damaged|micro report|micro gemm|micro gemm --m 0|micro gemm --k 1.5
micro gemm --dtype fp4|micro gemm --preset paper-fig11|micro gemm --preset paper-fig11 --device cpu --m 5
micro gemm --device cuda|micro gemm --samples 1|micro memcpy --timeout 0|micro memcpy --sizes 1T
micro memcpy --sizes 0|micro collectives --gpus 1|micro collectives --gpus 65|micro collectives --op nosuch
micro collectives --p2p on --device cpu|micro memcpy --preset paper-fig12|report loadgen_run
"""


def mistakes() -> Iterator[Command]:
    """Command lines that must end in one sentence."""
    files = (
        ("empty/x", ""), ("file", ""), ("full/report.json", "precious"), ("bad.toml", "requests = "),
        ("unknown.toml", "requets = 6\n"), ("zero.toml", "requests = 0\n"), ("bad.jsonl", '{"prompt": 7}\n'),
        ("empty.jsonl", ""), ("damaged/manifest.json", '{"schema":7}'), ("damaged/results.jsonl", "{]\n"),
        ("training/manifest.json", '{"platform": "GPU", "schema": "training_probe.manifest/1"}'),
        ("loadgen_run/manifest.json", '{"schema": "loadgen.manifest/1"}'),
    )  # fmt: skip
    secret = (("LOADGEN_TEST_BAD_KEY", "s3cret\n"),)
    for group, program, before, text in (
        ("bad-run", "loadgen", "run ", BAD_RUNS), ("bad", "loadgen", "", BAD_OTHERS),
        ("bad-sweep", "training_probe", "sweep ", BAD_SWEEPS), ("bad-training", "training_probe", "", BAD_TRAINING),
    ):  # fmt: skip
        lines = [before + line for line in text.strip().replace("\n", "|").split("|")]
        yield from numbered(group, program, lines, files=files, environment=secret)
    yield Command("bad", "sweep_escape", ("training_probe", "sweep", "--method", "Z\x1b]0;owned\x07\u202e3"))
    yield Command("bad", "run_escape", ("loadgen", "run", "--model", "Z\x1b]0;owned\x07\u202e3"))


def runs_in_real_time() -> Iterator[Command]:
    """Short loads on the embedded server, of which the names alone are kept."""
    short = "--requests 20 --output-tokens 4 --input-tokens 32 --no-calibrate --warmup 0 --out out"
    for name, line in {
        "vllm": "--launch embedded --backend vllm", "tgi": "--launch embedded --backend tgi",
        "lightllm": "--launch embedded --backend lightllm", "openai-chat": "--launch embedded --backend openai-chat",
        "gpu_h200": "--gpu h200 --model 7b", "aiohttp": "--transport aiohttp", "workers": "--workers 2",
        "poisson_kernel": "--arrival poisson:50 --kernel-timestamps --goodput ttft:500",
        "closed": "--concurrency 4", "no_stream": "--no-stream --connect fresh",
    }.items():  # fmt: skip
        yield Command(REAL_TIME, name, ("loadgen", "run", *words(line), *words(short)))
    line = "run --requests 20 --output-tokens 4 --out out"
    yield Command(REAL_TIME, "calibrated", ("loadgen", *words(line)))


def help_pages() -> Iterator[Command]:
    """Every --help."""
    pages = [
        "", "run", "report", "compare", "predict", "plan", "breakdown", "compose", "backends", "calibrate", "doctor",
        "serve", "clean", "export",
    ]  # fmt: skip
    yield from numbered(HELP, "loadgen", [f"{page} --help" for page in pages])
    pages = [
        "", "sweep", "memory", "plan", "letters", "report", "compare", "breakdown", "micro", "micro gemm",
        "micro memcpy", "micro collectives",
    ]  # fmt: skip
    yield from numbered(HELP, "training_probe", ["micro", *(f"{page} --help" for page in pages)])


# -- recording ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Recorder:
    """Runs commands of one checkout and writes what they did below `into`."""

    into: Path
    checkout: Path
    programs: Path
    inputs: Path
    scratch: Path
    started: float

    def record(self, command: Command) -> float:
        """Seconds that it took."""
        base = self.scratch / re.sub(r"\W", "_", command.place)
        work, home = base / "work", base / "home"
        for directory in (work, home):
            directory.mkdir(parents=True)
        given = self._prepare(command, work)
        begun = time.monotonic()
        try:
            done = subprocess.run(
                [str(self.programs / command.argv[0]), *command.argv[1:]], cwd=work, capture_output=True,
                env=self._environment(command, home), stdin=subprocess.DEVNULL, timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
            code, out, err = str(done.returncode), done.stdout, done.stderr
        except subprocess.TimeoutExpired:
            code, out, err = f"ended after {TIMEOUT_S} s", b"", b""
        took = time.monotonic() - begun
        kept = {"command": " ".join(repr(word) for word in command.argv) + "\n", "exit": code + "\n"}
        left = {path.relative_to(work).as_posix(): path for path in sorted(work.rglob("*")) if path.is_file()}
        if command.group == REAL_TIME:
            kept |= names_alone(code, left)
        else:
            kept |= {"stdout": self._text(command, out), "stderr": self._text(command, err)}
            for name, path in left.items():
                content = path.read_bytes()
                if given.get(name) != content and path.suffix != ".png":
                    kept[f"files/{self._text(command, name.encode())}"] = self._text(command, content)
        kept["files.txt"] = "".join(sorted(self._text(command, name.encode()) + "\n" for name in left))
        target = self.into / command.place
        shutil.rmtree(target, ignore_errors=True)
        for name, text in kept.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_text(text, encoding="utf-8", errors="surrogateescape", newline="")
        shutil.rmtree(base)
        return took

    def _prepare(self, command: Command, work: Path) -> dict[str, bytes]:
        """The files that the command finds, by name."""
        for each in command.copies:
            source = self.inputs / each
            target = work / source.name
            if source.is_dir():
                if not target.exists():
                    shutil.copytree(source, target)
                for path in target.iterdir():
                    if path.name in MADE_ANEW or path.suffix in FIGURES:
                        path.unlink()
            else:
                shutil.copy(source, target)
        for name, content in command.files:
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_text(content, encoding="utf-8")
        return {path.relative_to(work).as_posix(): path.read_bytes() for path in work.rglob("*") if path.is_file()}

    def _environment(self, command: Command, home: Path) -> dict[str, str]:
        return {
            "HOME": str(home), "PATH": f"{self.programs}:/usr/local/bin:/usr/bin:/bin", "TZ": "UTC",
            "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "COLUMNS": "100", "PYTHONHASHSEED": "0",
            "MPLCONFIGDIR": str(self.scratch / "matplotlib"), "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1", **dict(command.environment),
        }  # fmt: skip

    def _text(self, command: Command, content: bytes) -> str:
        """With all that may differ replaced. Paths first, the longest first: one may lie in another."""
        text = content.decode("utf-8", "surrogateescape")
        base = self.scratch / re.sub(r"\W", "_", command.place)
        paths = {base: "<SCRATCH>", self.scratch: "<SCRATCH>", self.programs: "<BIN>", self.checkout: "<CHECKOUT>"}
        for path in sorted(paths, key=lambda path: -len(str(path))):
            text = text.replace(str(path), paths[path])
        for mask in MASKS:
            if mask.groups is None or command.group in mask.groups:
                text = re.sub(mask.pattern, mask.replacement, text)
        text = RUN_ID.sub(self._if_now(lambda at: _unix(at.group(1)), "<RUN_ID>"), text)
        return UNIX_SECONDS.sub(self._if_now(lambda at: float(at.group()), "<UNIX_SECONDS>"), text)

    def _if_now(self, when: Callable[[re.Match[str]], float], replacement: str) -> Callable[[re.Match[str]], str]:
        """Replaces a time since the recording began, and leaves others: those of kept runs must not change."""

        def replaced(found: re.Match[str]) -> str:
            return replacement if self.started - 2 <= when(found) <= time.time() + 2 else found.group()

        return replaced


def _unix(text: str) -> float:
    try:
        return datetime.strptime(text, "%Y%m%d-%H%M%S").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0


def names_alone(code: str, left: dict[str, Path]) -> dict[str, str]:
    """Of a run in real time: the paths of keys in its JSON files, and how its requests ended. A busy machine may make a
    measurement invalid (4), which is no difference."""
    kept = {"exit": "0 or 4\n" if code in ("0", "4") else code + "\n"}
    for name, path in left.items():
        if path.suffix == ".json":
            values = [json.loads(path.read_text(encoding="utf-8"))]
        elif path.suffix == ".jsonl":
            values = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        else:
            continue
        found = sorted({key for value in values for key in key_paths(value)})
        kept[f"files/{name}.keys"] = "".join(key + "\n" for key in found)
        if path.name == "report.json":
            told = {key: values[0].get(key) for key in ("schema", "backend", "model", "emulated", "requests", "tokens")}
            kept["requests"] = json.dumps(told, indent=1) + "\n"
    return kept


def key_paths(value: object, above: str = "") -> Iterator[str]:
    """Where the values are, as `a.b[].c`; with the value where it is the name of a metric or a schema."""
    if isinstance(value, dict):
        for key, item in value.items():
            name = "#" if str(key).isdigit() else str(key)  # a bucket of a histogram: which ones are met differs
            here = f"{above}.{name}" if above else name
            yield f"{here} = {item}" if key in ("name", "schema") and isinstance(item, str) else here
            yield from key_paths(item, here)
    elif isinstance(value, list):
        for item in value:
            yield from key_paths(item, above + "[]")


def record(into: Path, checkout: Path, programs: Path, inputs: Path, only: str) -> int:
    """Records all commands, two at a time, and says how long it took."""
    if into.exists() and any(into.iterdir()) and not only:
        sys.exit(f"{into} is not empty; name another directory.")
    missing = [name for name in ("loadgen", "training_probe") if not (programs / name).is_file()]
    if missing:
        sys.exit(f"{programs} has no {' and no '.join(missing)}; name the directory of both with --bin.")
    chosen = [each for each in commands(inputs) if re.search(only, each.place)]
    scratch = Path(tempfile.mkdtemp(prefix="golden-")).resolve()
    recorder = Recorder(into.absolute(), checkout, programs, inputs, scratch, time.time())
    begun = time.monotonic()
    try:
        with ThreadPoolExecutor(2) as pool:
            took = dict(zip([each.place for each in chosen], pool.map(recorder.record, chosen), strict=True))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"{len(chosen)} commands in {time.monotonic() - begun:.0f} s -> {into}")
    slowest = sorted(took, key=lambda name: -took[name])[:5]
    print("slowest: " + ", ".join(f"{name} {took[name]:.1f} s" for name in slowest))
    return 0


# -- comparing ---------------------------------------------------------------------------------------------------------


def recorded(directory: Path, only: str, renamed: Sequence[str] = (), without: str = "") -> dict[str, dict[str, bytes]]:
    """The files of each command, by GROUP/NAME, with names replaced: OLD=NEW. without: files that are left out."""
    pairs = [name.encode().partition(b"=") for name in renamed]
    found: dict[str, dict[str, bytes]] = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            group, name, *rest = path.relative_to(directory).parts
            if re.search(only, f"{group}/{name}") and not (without and re.search(without, path.name)):
                content = path.read_bytes()
                for old, _, new in pairs:
                    content = content.replace(old, new)
                found.setdefault(f"{group}/{name}", {})["/".join(rest)] = content
    return found


def readable(content: bytes) -> list[str]:
    """Lines to be shown: long lines of JSON are spread, others cut into pieces."""
    lines: list[str] = []
    for line in content.decode("utf-8", "surrogateescape").splitlines():
        try:
            lines += json.dumps(json.loads(line), indent=1).splitlines() if len(line) > 200 else [line]
        except ValueError:
            lines += [line[at : at + 200] for at in range(0, len(line), 200)]
    return lines


def differences(name: str, before: bytes | None, after: bytes | None, most: int) -> list[str]:
    """What is shown of a file that differs."""
    if before is None or after is None:
        return [f"  {name}: only {'after' if before is None else 'before'}"]
    diff = list(difflib.unified_diff(readable(before), readable(after), lineterm="", n=1))[2:]
    shown = [f"    {line[:240]}" for line in diff[:most]] or ["    the same lines, laid out otherwise"]
    more = [f"    ... {len(diff) - most} more lines"] if len(diff) > most else []
    return [f"  {name}:", *shown, *more]


def compare(a: Path, b: Path, options: argparse.Namespace) -> int:
    """Prints what differs, help pages last. 1: something does that is no help page."""
    only, without, most = options.only, options.without, options.lines
    first, second = recorded(a, only, options.renamed, without), recorded(b, only, (), without)
    counts = {False: 0, True: 0}
    for of_help in (False, True):
        for place in sorted(first.keys() | second.keys()):
            if (place.split("/")[0] == HELP) != of_help:
                continue
            before, after = first.get(place), second.get(place)
            if before == after:
                continue
            counts[of_help] += 1
            if before is None or after is None:
                print(f"{place}: only in {b if before is None else a}")
                continue
            print(f"{place}: {before['command'].decode('utf-8', 'replace').strip()}")
            for name in sorted(before.keys() | after.keys()):
                if before.get(name) != after.get(name):
                    print("\n".join(differences(name, before.get(name), after.get(name), most)))
    pages = len({place for place in first.keys() | second.keys() if place.startswith(HELP + "/")})
    rest = len(first.keys() | second.keys()) - pages
    print(f"{counts[False]} of {rest} commands differ; {counts[True]} of {pages} help pages differ.")
    if not rest + pages:
        sys.exit("nothing was recorded in either directory.")
    return 1 if counts[False] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    actions = parser.add_subparsers(dest="action", required=True)
    recording = actions.add_parser("record", help="run the commands and keep what they print and write")
    recording.add_argument("directory", type=Path)
    recording.add_argument("--checkout", type=Path, default=HERE, help="whose commands (default: this one)")
    recording.add_argument("--bin", type=Path, help="where they are installed (default: the checkout's .venv/bin)")
    recording.add_argument("--inputs", type=Path, help="whose kept measurements (default: the checkout's)")
    recording.add_argument("--only", default="", metavar="REGEX", help="those whose GROUP/NAME it finds")
    comparing = actions.add_parser("compare", help="print how two recordings differ; 1 if they do")
    comparing.add_argument("a", type=Path)
    comparing.add_argument("b", type=Path)
    comparing.add_argument("--only", default="", metavar="REGEX", help="those whose GROUP/NAME it finds")
    comparing.add_argument("--renamed", nargs="+", default=[], metavar="OLD=NEW", help="replaced in the first")
    comparing.add_argument("--without", default="", metavar="REGEX", help="not the files whose name it finds")
    comparing.add_argument("--lines", type=int, default=20, help="most lines shown of each file")
    options = parser.parse_args()
    if options.action == "compare":
        return compare(options.a, options.b, options)
    checkout = options.checkout.resolve()
    programs = (options.bin or checkout / ".venv" / "bin").absolute()
    return record(options.directory, checkout, programs, (options.inputs or checkout).resolve(), options.only)


if __name__ == "__main__":
    sys.exit(main())
