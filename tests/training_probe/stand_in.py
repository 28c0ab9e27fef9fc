"""Training without training: a launcher that behaves as torchrun does, and ranks that obey the files of a trial.

    python stand_in.py PROCESSES DIR FIRST      the launcher of ranks FIRST and up
    RANK=0 python stand_in.py DIR               one rank

What a rank does is the name of the cell's model. Standard library only: it starts in no time.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STEP_S = 0.02
GIB = 1 << 30


def command(*, python: str, processes: int, port: int, directory: Path, node: Any = None) -> tuple[str, ...]:
    first = processes * node.rank if node else 0
    return python, "-I", "-S", str(Path(__file__).resolve()), str(processes), str(directory), str(first)


def launch(processes: int, directory: str, first: int) -> int:
    """As torchrun: the first that fails ends the others, and is named in a block of this very form."""
    argv = [sys.executable, "-I", "-S", __file__, directory]
    ranks = [subprocess.Popen(argv, env={**os.environ, "RANK": str(first + rank)}) for rank in range(processes)]
    failed: list[int] = []
    while not failed:
        running = any(rank.poll() is None for rank in ranks)
        failed = [number for number, rank in enumerate(ranks) if rank.poll() not in (None, 0)]
        if not running:
            break
        time.sleep(0.01)
    if not failed:
        return 0
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    codes = [rank.wait() for rank in ranks]
    print("E1121 18:25:30.95 488 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: ...)")
    print("Failures:\n  <NO_OTHER_FAILURES>\nRoot Cause (first observed failure):\n[0]:")
    number = failed[0]
    print(f"  rank      : {first + number} (local_rank: {number})\n  exitcode  : {codes[number]} (pid: 1) ", flush=True)
    return 1


class Rank:
    """One process of a trial."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.rank = directory, int(os.environ["RANK"])
        self.trial = json.loads((directory / "trial.json").read_text())
        self.cell = self.trial["cell"]
        self.micro_batch = self.cell["micro_batch"]
        (directory / f"pid{self.rank}").write_text(str(os.getpid()))

    def report(self, outcome: str, **fields: Any) -> None:
        part = self.directory / f"rank{self.rank}.json.part"
        part.write_text(json.dumps({"rank": self.rank, "outcome": outcome, **fields}))
        part.replace(self.directory / f"rank{self.rank}.json")

    def steps(self, count: int | None = None) -> None:
        if self.rank:
            return
        warmup = self.trial["warmup_steps"]
        with (self.directory / "steps.jsonl").open("ab", buffering=0) as file:
            for number in range(warmup + self.trial["steps"] if count is None else count):
                step = {
                    "step": number, "phase": "warmup" if number < warmup else "timed", "step_s": STEP_S,
                    "forward_s": None if self.cell["engine"] == "megatron" else 0.006,  # a pipeline has no phases
                    "backward_s": 0.01, "optimizer_s": 0.003, "loss": 7.0 - number / 10,
                }  # fmt: skip
                file.write(json.dumps(step).encode() + b"\n")

    def see_steps(self, count: int) -> None:
        """Waits until the first rank has done them."""
        file = self.directory / "steps.jsonl"
        while not file.exists() or file.read_bytes().count(b"\n") < count:
            time.sleep(0.005)

    def succeed(self, **fields: Any) -> None:
        """The second rank is the slower one, and needs more memory."""
        self.steps()
        total = self.trial["warmup_steps"] + self.trial["steps"]
        told = {
            "seconds": self.trial["steps"] * STEP_S * (1 + self.rank),
            "steps": self.trial["steps"],
            "peak_allocated_bytes": (self.micro_batch + self.rank) * GIB,
            "peak_reserved_bytes": (self.micro_batch + self.rank + 1) * GIB,
            "device_memory_bytes": 80 * GIB,
            "energy_j": 35.0,
            "losses": [7.0 - number / 10 for number in range(total)],
            "parameters": 1000,
            "trainable_parameters": 10,
            "optimizer": "AdamW",
            "versions": {"torch": "0"},
            "device_name": "stand-in",
        }
        self.report("ok", **{**told, **fields})

    def wait(self) -> None:
        time.sleep(60)

    # -- what the model's name says ------------------------------------------------------------------------------------

    def ok(self) -> None:
        self.succeed()

    def no_power(self) -> None:
        self.succeed(**({"energy_j": None} if self.rank else {}))

    def rising(self) -> None:
        self.succeed(losses=[1.0, 1.0, 2.0, 2.0])

    def infinite(self) -> None:
        self.succeed(losses=[1.0, None, 1.0, 0.5])

    def oom(self) -> None:
        """The last rank; the others wait for it in a collective operation."""
        self.steps(2)
        if self.rank == self.cell["gpus"] - 1:
            reason = "OutOfMemoryError: CUDA out of memory.\nTried to allocate 2.00 GiB."
            self.report("oom", reason=reason, peak_allocated_bytes=79 * GIB)
            os._exit(77)
        self.wait()

    def oom_and_echo(self) -> None:
        """One rank is out of memory, the other sees it go and crashes with an error of its own."""
        outcome, reason = ("crashed", "RuntimeError: Connection reset by peer") if self.rank == 0 else ("oom", "")
        while self.rank == 0 and not (self.directory / "rank1.json").exists():
            time.sleep(0.01)
        self.report(outcome, reason=reason)
        os._exit(1 if self.rank == 0 else 77)

    def exit_77(self) -> None:
        os._exit(77)

    def fills(self) -> None:
        limit = 256 << 20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        bytearray(1 << 30)

    def unsupported(self) -> None:
        self.report("unsupported", reason="bitsandbytes is not installed")
        os._exit(78)

    def crashes(self) -> None:
        if self.rank == self.cell["gpus"] - 1:
            self.report("crashed", reason="RuntimeError: some\ttrouble\x1b[31m")
            os._exit(1)
        self.wait()

    def crashes_and_hangs(self) -> None:
        self.report("crashed", reason="RuntimeError: some trouble")
        self.wait()

    def segv(self) -> None:
        self.steps(3)
        if self.rank == self.cell["gpus"] - 1:
            self.see_steps(3)
            print("about to\x1b[0m go\n\n[rank1]: last words", flush=True)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.kill(os.getpid(), signal.SIGSEGV)
        self.wait()

    def second_node_dies(self) -> None:
        """The first rank waits for it."""
        self.steps(2)
        if self.rank:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.abort()
        self.wait()

    def sigkill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hangs(self) -> None:
        self.steps(3)
        print("[rank0]:[E1121] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)", flush=True)
        self.wait()

    def stubborn(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.steps(1)
        self.wait()

    def crawls(self) -> None:
        """Always a step in time, and never the last."""
        while True:
            self.steps(1)
            time.sleep(0.05)

    def garbage(self) -> None:
        (self.directory / "steps.jsonl").write_bytes(b'\xff\n{"step": 0}\n[]\n\n{')
        (self.directory / f"rank{self.rank}.json").write_bytes(b"\xff{not json")

    def silent(self) -> None:
        pass

    def untimed(self) -> None:
        self.succeed(seconds=0.0)

    def aborts(self) -> None:
        """When all have reported: what is torn down then has been measured."""
        self.succeed()
        while len(list(self.directory.glob("rank*.json"))) < self.cell["gpus"]:
            time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.abort()

    def never_ends(self) -> None:
        self.succeed()
        self.wait()

    def port_taken(self) -> None:
        """The first time."""
        seen = self.directory.parent / "seen"
        if seen.exists():
            self.succeed()
            return
        seen.touch()
        print(
            "RuntimeError: The server socket has failed to bind, errno: 98 - Address already in use (EADDRINUSE)",
            flush=True,
        )
        os._exit(1)

    def fits_4(self) -> None:
        """Micro batches up to 4 fit."""
        self.succeed() if self.micro_batch <= 4 else self.oom()

    def fits_2_when_timed(self) -> None:
        """Up to 4 in the search, up to 2 in a measurement."""
        self.succeed() if self.micro_batch <= (4 if self.trial["warmup_steps"] == 2 else 2) else self.oom()

    def second_run_fails(self) -> None:
        self.crashes() if self.trial["seed"] == 1 else self.succeed()

    def waits(self) -> None:
        """Until somebody makes the file `go` beside the sweep's manifest."""
        self.steps(2)
        go = self.directory.parents[2] / "go"
        while not go.exists():
            time.sleep(0.01)
        (self.directory / "steps.jsonl").unlink()
        self.succeed()

    def fits_2_and_waits(self) -> None:
        """In the runs after the first."""
        if self.micro_batch > 2:
            self.oom()
        elif self.trial["seed"]:
            self.waits()
        else:
            self.succeed()


if __name__ == "__main__":
    if len(sys.argv) == 4:
        sys.exit(launch(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
    rank = Rank(Path(sys.argv[1]))
    getattr(rank, rank.cell["model"])()
