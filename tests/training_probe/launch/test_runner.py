"""Runs of stand-in processes that do everything that training does to its sweep, and worse."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.exit_codes import Stopped
from tests.training_probe import stand_in
from tests.training_probe.cgroups import limited
from tests.training_probe.stand_in import GIB, STEP_S
from training_probe.grid import Cell, Device, Engine, Loss
from training_probe.launch import outcome as endings
from training_probe.launch import runner
from training_probe.launch.outcome import Ended, Evidence, judge
from training_probe.launch.runner import Launching, Limits, TrialOutcome, job_of, run_trial, start_here
from training_probe.protocol import RankReport, Step, Trial
from training_probe.results import loss_doubt

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are started on Linux only"),
]

LONG_S = 30.0  # nothing here takes that long unless it is broken


def trial_of(does: str, gpus: int = 1, **fields: Any) -> Trial:
    cell = Cell(model=does, gpus=gpus, seq_len=10, micro_batch=3, device="cpu")
    return Trial(cell=cell, **{"warmup_steps": 2, "steps": 5, **fields})


def run(directory: Path, does: str, gpus: int = 1, **options: Any) -> TrialOutcome:
    how = Launching(command=options.pop("command", stand_in.command), gpu_ids=options.pop("gpu_ids", ()))
    limits = Limits(timeout_s=options.pop("timeout_s", LONG_S), limit_s=options.pop("limit_s", None))
    cancelled = options.pop("cancelled", threading.Event())
    return run_trial(trial_of(does, gpus), directory / "run-1", how, limits, cancelled=cancelled, **options)


def evidence(
    gpus: int = 1, reports: dict[int, RankReport] | None = None, *, ended: Ended | None = None, **fields: Any
) -> Evidence:
    """What `trial_of` may leave; fields: how its processes ended."""
    return Evidence(ended=ended or Ended(**fields), ranks=gpus, reports=reports or {}, steps=7)


def alive(directory: Path) -> list[int]:
    pids = [int(path.read_text()) for path in directory.glob("**/pid[0-9]*")]
    assert pids
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_good_run_is_measured(tmp_path: Path, gpus: int) -> None:
    seen: list[Step] = []
    ended = run(tmp_path, "ok", gpus, on_step=seen.append)
    assert (ended.outcome, ended.reason) == ("ok", "")
    got = ended.measured
    # the slowest rank counts: 5 steps of 3 x 10 tokens on each GPU in 5 x 20 ms x its rank + 1
    assert got.tokens_per_s == pytest.approx(gpus * 30 / (STEP_S * gpus))
    assert got.energy_j_per_token == pytest.approx(gpus * 35.0 / (gpus * 30 * 5))
    assert got.allocated_bytes == tuple((3 + rank) * GIB for rank in range(gpus))
    assert got.reserved_bytes == tuple((4 + rank) * GIB for rank in range(gpus))
    assert [step.step for step in seen] == list(range(7))
    assert [step.step for step in got.timed] == [2, 3, 4, 5, 6]
    assert (got.report.parameters, got.report.trainable_parameters, got.report.optimizer) == (1000, 10, "AdamW")
    assert json.loads((tmp_path / "run-1" / "trial.json").read_text())["cell"]["model"] == "ok"
    assert not alive(tmp_path)


def test_energy_that_one_rank_does_not_know_is_not_known(tmp_path: Path) -> None:
    ended = run(tmp_path, "no_power", 2)
    assert ended.outcome == "ok"
    assert ended.measured.energy_j_per_token is None
    assert ended.measured.tokens_per_s is not None


@pytest.mark.parametrize(
    ("does", "gpus", "outcome", "reason"),
    [
        ("oom", 1, "oom", "rank 0: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        ("oom", 2, "oom", "rank 1: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        ("oom_and_echo", 2, "oom", "rank 1: out of memory"),
        ("exit_77", 1, "oom", "a rank ended with exit code 77: out of memory"),
        ("fills", 1, "oom", "MemoryError"),
        ("unsupported", 1, "unsupported", "bitsandbytes is not installed"),
        ("crashes", 2, "crashed", "rank 1: RuntimeError: some trouble"),
        ("segv", 2, "crashed", "rank 1 was killed by SIGSEGV; 3 of 7 steps were done; it said: last words"),
        (
            "segv",
            1,
            "crashed",
            "rank 0 was killed by SIGSEGV; 3 of 7 steps were done; it said: about to go",
        ),
        ("silent", 2, "crashed", "it ended without an error and without a report of rank 0, 1; 0 of 7 steps were done"),
        ("untimed", 1, "crashed", "rank 0 reports success, but 5 timed steps in 0.0 s"),
        ("aborts", 2, "ok", ""),
        ("port_taken", 1, "ok", ""),
    ],
)
def test_what_became_of_a_run(tmp_path: Path, does: str, gpus: int, outcome: str, reason: str) -> None:
    ended = run(tmp_path, does, gpus)
    assert (ended.outcome, ended.reason) == (outcome, reason)
    assert not alive(tmp_path)
    assert (ended.measured.tokens_per_s is not None) == (outcome == "ok")


def test_what_ran_out_of_memory_still_tells_its_peak(tmp_path: Path) -> None:
    ended = run(tmp_path, "oom")
    assert ended.measured.allocated_bytes == (79 * GIB,)


def test_garbage_is_a_crash(tmp_path: Path) -> None:
    ended = run(tmp_path, "garbage")
    assert ended.outcome == "crashed"
    assert ended.reason.startswith("rank 0 left a report that cannot be read (")
    assert ended.measured.timed == ()


@pytest.mark.parametrize("does", ["never_ends", "crashes_and_hangs"])
def test_what_hangs_after_its_report_is_judged_by_it(
    tmp_path: Path, does: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "TEARDOWN_S", 0.1)
    ended = run(tmp_path, does, 2)
    if does == "never_ends":
        assert (ended.outcome, ended.reason) == ("ok", "")
    else:
        assert (ended.outcome, ended.reason) == ("crashed", "rank 0: RuntimeError: some trouble")
    assert not alive(tmp_path)


def test_a_hang_is_a_timeout_with_the_watchdogs_words(tmp_path: Path) -> None:
    ended = run(tmp_path, "hangs", 2, timeout_s=0.5)
    assert ended.outcome == "timeout"
    assert ended.reason == (
        "no new step in 0.5 s; 3 of 7 steps were done; Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)"
    )
    assert not alive(tmp_path)


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "STOP_S", 0.1)
    ended = run(tmp_path, "stubborn", 2, timeout_s=0.5)
    assert (ended.outcome, ended.reason) == ("timeout", "no new step in 0.5 s; 1 of 7 steps were done")
    assert not alive(tmp_path)


def test_steps_in_time_do_not_save_a_run_from_its_limit(tmp_path: Path) -> None:
    ended = run(tmp_path, "crawls", timeout_s=0.5, limit_s=1.0)
    assert ended.outcome == "timeout"
    assert ended.reason.startswith("beyond its limit of 1 s; ")


def test_a_cancelled_run_leaves_nothing(tmp_path: Path) -> None:
    cancelled = threading.Event()
    with pytest.raises(Stopped):
        run(tmp_path, "hangs", 2, cancelled=cancelled, on_step=lambda _: cancelled.set())
    assert not alive(tmp_path)
    with pytest.raises(Stopped):
        run(tmp_path, "ok", cancelled=cancelled)


@pytest.mark.parametrize(
    ("counts", "outcome", "reason"),
    [
        ((4, 5), "oom", "the kernel's OOM killer ended it: host memory"),
        ((4, 4), "crashed", "rank 0 was killed by SIGKILL; 0 of 7 steps were done"),
        ((None, None), "crashed", "rank 0 was killed by SIGKILL; 0 of 7 steps were done"),
    ],
)
def test_who_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: tuple[int | None, int | None], outcome: str, reason: str
) -> None:
    answers = iter(counts)
    monkeypatch.setattr(runner, "oom_kills", lambda: next(answers))
    ended = run(tmp_path, "sigkill")
    assert (ended.outcome, ended.reason) == (outcome, reason)


def test_a_compiler_that_the_kernel_killed_wanted_memory() -> None:
    log = "c++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated."
    reports = {0: RankReport(rank=0, outcome="crashed", reason="RuntimeError: Error building extension 'cpu_adam'")}
    for killed, outcome in ((True, "oom"), (False, "crashed")):
        assert judge(evidence(1, reports, exit_code=1, log=log, oom_killed=killed))[0] == outcome


def test_only_a_lock_that_nobody_holds_is_removed(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    left, held = (tmp_path / "torch_extensions" / "py312_cu130" / name / "lock" for name in ("fused_adam", "cpu_adam"))
    for path in (left, held):
        path.parent.mkdir(parents=True)
        path.touch()
    (left.parent / "fused_adam.so").touch()
    with held.open():
        assert runner.remove_forsaken_locks(environ) == [left.resolve()]
        assert runner.remove_forsaken_locks(environ) == []
    assert not left.exists() and held.exists() and (left.parent / "fused_adam.so").exists()
    assert runner.remove_forsaken_locks({"TORCH_EXTENSIONS_DIR": str(held.parents[1])}) == [held.resolve()]
    assert runner.remove_forsaken_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path / "none")}) == []


# In a cgroup: a process of its own takes more memory than there is, is killed, and the survivor counts.
TAKES_TOO_MUCH = """
import subprocess, sys
from training_probe.launch.outcome import oom_kills
before = oom_kills()
taken = subprocess.run([sys.executable, "-c", "b'x' * (%d << 20)"])
print(taken.returncode, oom_kills() - before)
"""


@pytest.mark.parametrize(("size_mib", "ended"), [(400, "-9 1"), (4, "0 0")])
def test_the_kernels_oom_killer_is_counted(size_mib: int, ended: str) -> None:
    with limited(200 << 20) as join:
        command = [sys.executable, "-c", TAKES_TOO_MUCH % size_mib]
        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=join, cwd=Path(__file__).parents[3])
    assert (done.stdout.strip(), done.stderr) == (ended, "")


def test_the_kernels_count(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    assert endings.oom_kills(proc, cgroups) is None
    (proc / "vmstat").write_text("oom_kill_x 9\nnr_free_pages 1\noom_kill 3\n")
    assert endings.oom_kills(proc, cgroups) == 3
    (proc / "self" / "cgroup").write_text("4:cpu,memory:/a/b\n0::/c\n")
    assert endings.oom_kills(proc, cgroups) == 3
    (cgroups / "memory" / "a" / "b").mkdir(parents=True)
    (cgroups / "memory" / "a" / "b" / "memory.oom_control").write_text("under_oom 0\noom_kill 2\n")
    assert endings.oom_kills(proc, cgroups) == 2
    (proc / "self" / "cgroup").write_text("0::/c\n")
    (cgroups / "c").mkdir()
    (cgroups / "c" / "memory.events").write_text("oom 1\noom_kill 7\noom_group_kill 0\n")
    assert endings.oom_kills(proc, cgroups) == 7


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ...",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "[rank1]: DistBackendError: NCCL error, ncclUnhandledCudaError: Cuda failure 2 'out of memory'",
        "RuntimeError: Triton Error [CUDA]: out of memory",
        "torch.AcceleratorError: CUDA error: out of memory",
        "[rank0]: DistBackendError: unhandled cuda error, Last error: Failed to CUDA calloc async 4 bytes",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:129] DefaultCPUAllocator: can't allocate memory: you tried ...",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8.00 GiB",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "OSError: [Errno 12] Cannot allocate memory",
    ],
)
def test_lines_that_mean_out_of_memory(line: str) -> None:
    assert judge(evidence(2, exit_code=1, log=f"loading\n{line}\nmore\n")) == (
        "oom",
        re.sub(r"^\[rank\d\]: ", "", line),
    )
    # what was all measured is good, whatever the log says
    done = {rank: RankReport(rank=rank, outcome="ok", seconds=1.0, steps=5) for rank in (0, 1)}
    assert judge(evidence(2, done, exit_code=1, log=line)) == ("ok", "")


TORCHRUN = """\
hello
[rank1]: Traceback (most recent call last):
[rank1]:                    ^^^^^
[rank1]: RuntimeError: its own fault
[rank0]: RuntimeError: Connection reset by peer
W1121 18:25:27.005000 477 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 480 closing signal
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Failures:
[1]:
  time      : 2026-11-21_18:25:27
  rank      : 0 (local_rank: 0)
  exitcode  : {other} (pid: 480)  (SIGTERM)
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_18:25:27
  rank      : 1 (local_rank: 1)
  exitcode  : {first} (pid: 481)  (SIGSEGV)
  error_file: <N/A>
"""


@pytest.mark.parametrize(
    ("first", "other", "expected"),
    [
        (-11, -15, ("crashed", "rank 1 was killed by SIGSEGV; ")),
        (1, -15, ("crashed", "rank 1 ended with exit code 1; ")),
        (-9, -15, ("crashed", "rank 1 was killed by SIGKILL; ")),
        (1, -6, ("crashed", "rank 0 was killed by SIGABRT; ")),  # seen in the same moment: a signal tells more
        (1, 77, ("oom", "a rank ended with exit code 77")),
        (-60, -15, ("crashed", "rank 1 was killed by signal 60; ")),
    ],
)
def test_torchruns_account(first: int, other: int, expected: tuple[str, str]) -> None:
    outcome, reason = judge(evidence(2, exit_code=1, log=TORCHRUN.format(first=first, other=other)))
    assert (outcome, reason[: len(expected[1])]) == expected
    if "rank 1" in reason:
        assert reason.endswith("it said: Traceback (most recent call last): | RuntimeError: its own fault")


def test_the_words_of_another_rank_are_not_the_dead_ones() -> None:
    log = "\n".join(line for line in TORCHRUN.splitlines() if not line.startswith("[rank1]"))
    _, reason = judge(evidence(2, exit_code=1, log=log.format(first=-9, other=-15)))
    assert reason == "rank 1 was killed by SIGKILL; 0 of 7 steps were done; it said: hello"


@given(st.text(), st.integers(-64, 255), st.sampled_from([None, "no new step"]))
def test_every_end_has_a_reason_of_one_printable_line(log: str, code: int, given_up: str | None) -> None:
    for ranks in (0, 2):
        outcome, reason = judge(evidence(ranks, exit_code=code, log=log, given_up=given_up))
        assert outcome != "ok"
        assert reason and reason.isprintable() and len(reason) <= endings.REASON_CHARACTERS


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        (Ended(exit_code=1, log="x\ncannot go on: CUDA error: an illegal memory access\n"),
         ("crashed", "CUDA error: an illegal memory access")),
        (Ended(exit_code=1, log="ImportError: no such name\n"),
         ("crashed", "the process ended with exit code 1; it said: ImportError: no such name")),
        (Ended(exit_code=-signal.SIGKILL, oom_killed=True), ("oom", "the kernel's OOM killer ended it: host memory")),
        (Ended(given_up="no result in 2 s"), ("timeout", "no result in 2 s")),
        (Ended(), ("crashed", "the process ended with exit code 0")),
    ],
)  # fmt: skip
def test_processes_without_reports_are_judged_by_the_rest(ended: Ended, expected: tuple[str, str]) -> None:
    assert judge(Evidence(ended=ended)) == expected


def test_losses() -> None:
    assert loss_doubt([4.0, 3.0, 3.5, 2.0]) is None
    assert loss_doubt([2.0, 1.0, 1.0, 2.0]) == "the loss did not fall: from 2.0000 to 2.0000"
    assert loss_doubt([3.0, 2.0, 1.0]) == "3 losses are too few to see whether they fall"
    assert loss_doubt([3.0, None, float("inf"), 1.0]) == "2 of 4 losses are not finite"


# -- the environment of the processes ----------------------------------------------------------------------------------

IMPORTS = """
import json, os, sys, training_probe
told = {name: os.environ.get(name) for name in ("NCCL_TEST", "TORCH_TEST", "NVSHMEM_TEST", "CUDA_VISIBLE_DEVICES")}
told |= {"file": training_probe.__file__, "path": sys.path}
report = {"rank": 0, "outcome": "unsupported", "reason": json.dumps(told)}
open(sys.argv[1] + "/told", "w").write(json.dumps(told))
"""


def test_children_import_this_very_package_and_inherit_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoy, other = tmp_path / "decoy", tmp_path / "other"
    for place in (decoy, other):
        (place / "training_probe").mkdir(parents=True)
        (place / "training_probe" / "__init__.py").touch()
    monkeypatch.chdir(decoy)
    monkeypatch.setenv("PYTHONPATH", str(other))
    for name in ("NCCL_TEST", "TORCH_TEST", "NVSHMEM_TEST"):
        monkeypatch.setenv(name, name)

    def command(*, python: str, processes: int, port: int, directory: Path, node: object = None) -> tuple[str, ...]:
        return python, "-c", IMPORTS, str(directory)

    def told(**options: Any) -> dict[str, Any]:
        run(tmp_path, "any", command=command, **options)
        found: dict[str, Any] = json.loads((tmp_path / "run-1" / "told").read_text())
        return found

    found = told()
    assert Path(found["file"]).resolve() == Path(runner.__file__).resolve().parents[1] / "__init__.py"
    assert str(other) in found["path"]
    assert [found[name] for name in ("NCCL_TEST", "TORCH_TEST", "NVSHMEM_TEST")] == [
        "NCCL_TEST", "TORCH_TEST", "NVSHMEM_TEST",
    ]  # fmt: skip
    assert found["CUDA_VISIBLE_DEVICES"] == ""  # no GPU unless it is given one
    assert told(gpu_ids=(3, 1))["CUDA_VISIBLE_DEVICES"] == "3"  # as many as the cell has processes


def test_the_real_command_line(tmp_path: Path) -> None:
    start = start_here(job_of(trial_of("ok", 2), tmp_path, Launching(python="/py", gpu_ids=(5, 6, 7))), 1234)
    assert start.argv == (
        "/py", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1",
        "--master-port", "1234", "-m", "training_probe.worker", str(tmp_path),
    )  # fmt: skip
    assert start.gpu_ids == ("5", "6")


def test_ranks_share_the_cores_unless_the_user_has_said_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def threads(ranks: int) -> str | None:
        job = job_of(trial_of("ok", ranks), tmp_path, Launching(python="/py"))
        return start_here(job, 1).env.get("OMP_NUM_THREADS")

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(runner, "cores", lambda: 15)
    assert [threads(ranks) for ranks in (1, 2, 4, 16)] == ["15", "7", "3", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads(2) is None  # it is inherited


def test_cores_are_physical_and_no_more_than_the_cgroup_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    assert runner.cores(tmp_path) == 12  # nothing is known of them
    for cpu in range(12):
        write(f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list", f"{cpu % 6},{cpu % 6 + 6}")
    assert runner.cores(tmp_path) == 6
    write("proc/self/cgroup", "0::/kubepods/pod1/container")
    for place, quota, cores in (
        ("kubepods/pod1/container/", "max 100000", 6), ("kubepods/pod1/", "350000 100000", 3),
        ("", "50000 100000", 1),
    ):  # fmt: skip
        write(f"sys/fs/cgroup/{place}cpu.max", quota)
        assert runner.cores(tmp_path) == cores


def test_megatron_with_tensor_parallelism_gets_one_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def queues(engine: Engine, tp: int) -> str | None:
        of = Trial(cell=Cell(model="7b", engine=engine, gpus=2, seq_len=10, micro_batch=1, tp=tp))
        return start_here(job_of(of, tmp_path, Launching(gpu_ids=(0, 1))), 1).env.get("CUDA_DEVICE_MAX_CONNECTIONS")

    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert [queues("megatron", 2), queues("megatron", 1), queues("deepspeed", 1)] == ["1", None, None]
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert queues("megatron", 2) is None


def test_triton_interprets_ligers_kernels_on_the_cpu(tmp_path: Path) -> None:
    def interpreted(device: Device, loss: Loss) -> str | None:
        of = Trial(cell=Cell(model="7b", engine="ddp", seq_len=10, loss=loss, device=device))
        return start_here(job_of(of, tmp_path, Launching(gpu_ids=(0,))), 1).env.get("TRITON_INTERPRET")

    assert [interpreted("cpu", "liger"), interpreted("cpu", "chunked"), interpreted("cuda", "liger")] == [
        "1",
        None,
        None,
    ]


def test_a_run_leaves_no_trace_of_the_one_before(tmp_path: Path) -> None:
    run(tmp_path, "ok", 2)
    ended = run(tmp_path, "silent", 2)
    assert ended.outcome == "crashed"
    assert not (tmp_path / "run-1" / "steps.jsonl").exists()


def test_the_run_of_a_killed_parent_ends(tmp_path: Path) -> None:
    code = f"""
import threading
from pathlib import Path
from tests.training_probe.launch.test_runner import run
run(Path({str(tmp_path)!r}), "hangs", 2)
"""
    root = str(Path(runner.__file__).resolve().parents[2])
    pid = os.spawnve(os.P_NOWAIT, sys.executable, [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": root})
    give_up = time.monotonic() + LONG_S
    while len(list(tmp_path.glob("**/pid[0-9]*"))) < 2:
        assert time.monotonic() < give_up
        time.sleep(0.01)
    time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while alive(tmp_path):
        assert time.monotonic() < give_up
        time.sleep(0.01)
