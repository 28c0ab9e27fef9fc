"""`training_probe sweep` as its users start it, with real engines: memory that runs out, ranks that hang or are killed,
a sweep that is killed itself; and the laptop preset. Nothing that was started may be left over."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.training_probe.cgroups import limited
from tests.training_probe.engines import tiny
from training_probe import results
from training_probe.protocol import STEPS_FILE, TIMELINE_FILE, TIMELINE_STEPS, Timeline
from training_probe.results import CellResult

pytestmark = [
    tiny.needs_engines,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are started on Linux only"),
]

COMMAND = str(Path(sys.executable).with_name("training_probe"))
CORES = 2  # the stacks of threads count as a process's own memory
LONG_S, HANG_S = 900.0, 30.0
CPU = ("--device", "cpu", "--model", "tiny")
QUICK = ("--warmup-steps", "1", "--steps", "4", "--runs", "1")


class Sweep:
    """A sweep in progress, in a directory of its own."""

    def __init__(self, directory: Path, *options: str, before: Callable[[], None] = lambda: None) -> None:
        self.directory = directory
        cores = sorted(os.sched_getaffinity(0))[:CORES]

        def prepare() -> None:
            os.sched_setaffinity(0, cores)
            before()

        where = ("--out", str(directory)) if "--resume" not in options else ()
        self.process = subprocess.Popen(
            (COMMAND, "sweep", *options, *where), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=prepare, cwd=directory.parent,
        )  # fmt: skip

    def end(self) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        out, err = self.process.communicate(timeout=LONG_S)
        return self.process.returncode, out, err

    def results(self) -> list[CellResult]:
        return results.read(self.directory)

    def wait_for(self, happened: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + LONG_S
        while time.monotonic() < deadline:
            if found := happened():
                return found
            assert self.process.poll() is None, f"ended before {what}:\n{self.process.communicate()[1][-3000:]}"
            time.sleep(0.05)
        raise AssertionError(f"never {what}")

    def ranks(self, cell: str) -> dict[int, Any]:
        """The training processes of a cell once it has made a step, by rank."""
        import psutil

        steps = self.directory / "trials" / cell / "run-1" / STEPS_FILE
        self.wait_for(lambda: steps.exists() and steps.stat().st_size, f"a step of {cell}")
        found: dict[int, Any] = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "training_probe.worker" in process.cmdline() and "RANK" in (environment := process.environ()):
                    found[int(environment["RANK"])] = process
        return found


@contextlib.contextmanager
def sweeping(*args: Any, **more: Any) -> Iterator[Sweep]:
    started = Sweep(*args, **more)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.communicate()


def measured(directory: Path, *options: str, code: int = 0, **more: Any) -> list[CellResult]:
    """The results of a whole sweep."""
    with sweeping(directory, *options, **more) as sweep:
        ended, out, err = sweep.end()
    assert ended in (tiny.MEASURED if code == 0 else (code,)), err[-3000:]
    found = sweep.results()
    said = json.loads(out.splitlines()[-1])
    assert [row["cell"] for row in said["results"]] == [result.cell for result in found]
    return found


def llama(directory: Path, **shape: int) -> str:
    """A directory with the config.json of a Llama of that shape."""
    import transformers

    config = transformers.LlamaConfig(**shape)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    return str(directory)


def test_memory_that_runs_out_ends_a_cell_and_bounds_a_search(tmp_path: Path) -> None:
    """Logits of 1024 tokens over a vocabulary of 32,768 and what the loss makes of them: some 420 MiB a sequence. The
    layer is small, as a CPU without instructions for bf16 takes its time for products."""
    model = llama(
        tmp_path / "wide", hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=32768, max_position_embeddings=1024,
    )  # fmt: skip
    options = ("--device", "cpu", "--model", model, *QUICK, "--engine", "ddp", "--method", "Naive")
    options += ("--seq-len", "1024", "--host-memory-gb", "1.5")
    whole, searched = measured(tmp_path / "sweep", *options, "--micro-batch", "16", "max", "--max-micro-batch", "16")
    assert (whole.outcome, whole.valid) == ("oom", False)
    assert "rank 0" in whole.reason and "memory" in whole.reason
    assert searched.outcome == "ok" and searched.valid, searched.reason
    assert searched.batch_size is not None and 1 < searched.batch_size < 16
    tried = {attempt.micro_batch: attempt.outcome for attempt in searched.search}
    too_large = min(size for size, outcome in tried.items() if outcome == "oom")
    assert tried[searched.batch_size] == "ok" and too_large == searched.batch_size + 1
    assert list(tried)[:2] == [1, 2]
    fitting = sorted((attempt for attempt in searched.search if attempt.outcome == "ok"), key=lambda a: a.micro_batch)
    peaks = [attempt.peak_allocated_bytes for attempt in fitting]
    assert all(a is not None and b is not None and a < b for a, b in pairwise(peaks))


def test_a_hang_and_a_death_end_their_cells_only(tmp_path: Path) -> None:
    """Rank 1 is stopped in the first cell and dies in the second; the third is left alone."""
    options = (
        *(*CPU, "--engine", "deepspeed", "--method", "Z2", "--gpus", "2", "--seq-len", "16"),
        *("--micro-batch", "1", "2", "3", "--warmup-steps", "1", "--steps", "60", "--runs", "1"),
    )
    with sweeping(tmp_path / "sweep", *options, "--timeout", str(HANG_S)) as sweep:
        one, two = (f"tiny_pretrain_deepspeed_Z2_2x_s16_b{size}" for size in (1, 2))
        stopped = sweep.ranks(one)
        stopped[1].send_signal(signal.SIGSTOP)
        killed = sweep.ranks(two)
        assert not any(rank.is_running() for rank in stopped.values())
        killed[1].send_signal(signal.SIGSEGV)
        code, _, err = sweep.end()
    assert code == 3, err[-3000:]
    hung, dead, well = sweep.results()
    assert (hung.outcome, hung.valid) == ("timeout", False)
    assert hung.reason.startswith(f"no new step in {HANG_S:g} s; ")
    assert (dead.outcome, dead.valid) == ("crashed", False)
    assert "rank 1 was killed by SIGSEGV" in dead.reason
    assert (well.outcome, well.valid) == ("ok", True), well.reason
    assert not any(rank.is_running() for rank in killed.values())


def test_a_sweep_that_was_killed_goes_on(tmp_path: Path) -> None:
    import psutil

    directory = tmp_path / "sweep"
    options = (*CPU, *QUICK, "--engine", "ddp", "--method", "Naive", "L", "R", "--seq-len", "32")
    with sweeping(directory, *options) as sweep:
        first = directory / results.RESULTS_FILE
        sweep.wait_for(lambda: first.exists() and first.read_bytes().endswith(b"\n"), "a first result")
        second = directory / "trials" / "tiny_finetune_ddp_L_1x_s32_b1_fp32-adapters" / "run-1" / "log.txt"
        sweep.wait_for(second.exists, "the start of a second cell")
        family = psutil.Process(sweep.process.pid).children(recursive=True)
        assert family
        sweep.process.kill()
        sweep.process.communicate()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    written = first.read_bytes()
    (done,) = sweep.results()
    run = directory / "trials" / done.cell / "run-1"
    inodes = {path.name: path.stat().st_ino for path in run.iterdir()}
    found = measured(directory, "--resume", str(directory))
    assert [(result.method, result.outcome, result.valid) for result in found] == [
        ("Naive", "ok", True), ("L", "ok", True), ("R", "ok", True),
    ]  # fmt: skip
    assert first.read_bytes().startswith(written)
    assert {path.name: path.stat().st_ino for path in run.iterdir()} == inodes


def test_a_timeline_says_what_memory_is_for(tmp_path: Path) -> None:
    """ddp without letters: bf16 weights, gradients and moments, two bytes each."""
    directory = tmp_path / "sweep"
    (result,) = measured(
        directory, *CPU, *QUICK, "--engine", "ddp", "--method", "Naive", "--seq-len", "64", "--timeline"
    )
    assert (result.outcome, result.reason) == ("ok", "")
    weights = 2 * (result.parameters or 0)
    file = directory / "trials" / result.cell / "timeline" / TIMELINE_FILE
    timeline = msgspec.json.decode(file.read_bytes(), type=Timeline)
    assert list(timeline.time_s) == sorted(timeline.time_s) and len(timeline.steps_s) == TIMELINE_STEPS
    levels = dict(zip(timeline.categories, timeline.bytes, strict=True))

    def within(category: str, start_s: float, end_s: float) -> list[int]:
        return [size for at_s, size in zip(timeline.time_s, levels[category], strict=True) if start_s <= at_s <= end_s]

    for step, (start_s, end_s) in enumerate(pairwise([*timeline.steps_s, timeline.time_s[-1]])):
        assert within("optimizer states", start_s, end_s)[0] == pytest.approx(2 * weights if step else 0, rel=0.01)
        for passing in ("gradients", "activations", "temporary"):
            assert within(passing, start_s, end_s)[0] < 0.3 * weights  # not every point is kept
            assert min(within(passing, start_s, end_s)) == 0
    assert [levels[name][-1] for name in ("gradients", "activations", "temporary")] == [0, 0, 0]
    assert max(levels["gradients"]) == pytest.approx(weights, rel=0.02)
    assert max(levels["activations"]) > 0
    held = levels["model and engine"]
    assert min(held) == pytest.approx(max(held), rel=0.001)
    assert weights <= held[0] < 1.3 * weights
    (figure,) = directory.glob("timeline-*.svg")
    assert figure.stat().st_size > 1000


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    """A directory with a config.json: its shape is trained, here with untied heads and one sequence of 32."""
    model = llama(
        tmp_path / "mine", hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=256, max_position_embeddings=128,
    )  # fmt: skip
    options = ("--device", "cpu", "--model", model, "--seq-len", "32", *QUICK)
    (result,) = measured(tmp_path / "sweep", *options, "--engine", "fsdp2", "--method", "Z3")
    assert (result.outcome, result.valid) == ("ok", True), result.reason
    attention, mlp = 2 * 64 * 64 + 2 * 64 * 32, 3 * 64 * 176
    assert result.parameters == 2 * 256 * 64 + 2 * (attention + mlp + 2 * 64) + 64


def test_the_laptop_preset(tmp_path: Path) -> None:
    begun = time.monotonic()
    found = measured(tmp_path / "sweep", "--preset", "laptop", "--device", "cpu", "--warmup-steps", "1", "--steps", "4")
    print(f"\nthe laptop preset with 5 steps a cell: {len(found)} cells in {time.monotonic() - begun:.0f} s")
    assert [(result.cell, result.reason) for result in found if result.outcome != "ok" or not result.valid] == []
    assert len(found) >= 10
    assert len({result.engine for result in found}) >= 3


def test_a_memory_limit_of_the_kernel_is_out_of_memory(tmp_path: Path) -> None:
    """Here nothing raises an error: the kernel kills a rank. One sequence takes 0.6 GiB, with launcher and page cache,
    64 take over 4."""
    with limited(1400 << 20) as join:
        options = (*CPU, *QUICK, "--engine", "ddp", "--method", "Naive", "--seq-len", "512", "--micro-batch", "64", "1")
        large, small = measured(tmp_path / "sweep", *options, before=join)
    assert large.outcome == "oom" and "OOM killer" in large.reason
    assert small.outcome == "ok", small.reason


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--engine", "ddp", "--method", "Naive", "--gpus", "2", "--device", "cuda"),
            "and this machine has",
        ),
        (("--model", "config-less", "--method", "Naive", "--device", "cpu"), "config.json"),
        (("--host-memory-gb", "0", "--preset", "laptop", "--device", "cpu"), "--host-memory-gb is 0"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    (tmp_path / "config-less").mkdir()
    with sweeping(tmp_path / "sweep", *options) as sweep:
        code, out, err = sweep.end()
    assert (code, out) == (2, "")
    assert said in err and err.count("\n") == 1
    assert not sweep.directory.exists()
