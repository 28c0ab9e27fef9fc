"""What machines must agree on before they send one load together: the code, the schedule and the prompts."""

from __future__ import annotations

import hashlib
import sys
from importlib import import_module
from pathlib import Path

import msgspec

import backends
from backends.protocol import Sampling
from loadgen.plan import ClientPlan

PROMPTS = 64  # of a load, evenly spread, and of the warm-up: what one draws otherwise, all of them are
UNENDING = 4096  # of a load whose number of requests nobody knows: from among so many first ones


class Digests(msgspec.Struct, frozen=True):
    """Hexadecimal SHA-256."""

    code: str
    schedule: str
    prompts: str

    def differing(self, other: Digests) -> str | None:
        """The first thing that differs, as a word of a sentence; None: nothing."""
        names = {"code": "code of llm-dissect", "schedule": "schedule", "prompts": "prompts"}
        return next((text for name, text in names.items() if getattr(self, name) != getattr(other, name)), None)


def code() -> str:
    """A digest of the interpreter's version and every Python file of the packages that a client runs."""
    digest = hashlib.sha256(f"{sys.version_info[:2]}".encode())
    for package in ("backends", "loadgen"):
        file = import_module(package).__file__
        assert file is not None
        root = Path(file).parent
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{package}/{path.relative_to(root).as_posix()}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def of_plan(plan: ClientPlan) -> Digests:
    """Draws the plan's load as its clients will. Raises WorkloadError."""
    backend, job = backends.get(plan.backend), plan.job
    due_ns = job.load.due_ns()
    schedule = hashlib.sha256(due_ns.tobytes())
    schedule.update(msgspec.msgpack.encode([job.load.streams, job.load.duration_s, job.load.requests, job.warmup]))
    workload = plan.prompts.build(backend, job.load, job.warmup)
    prompts = hashlib.sha256()
    count = len(due_ns) or job.load.requests or UNENDING
    asked = [("warmup", number) for number in range(min(job.warmup, PROMPTS))]
    begun = sorted({number * count // PROMPTS for number in range(PROMPTS)})
    asked += [("measured", each if workload.turns is None else workload.turns.begin(each)) for each in begun]
    for phase, number in asked:
        sampling = Sampling(workload.own(number).output_tokens)
        request = job.request(backend, workload.prompt(phase, number), sampling)
        prompts.update(request.body + b"\n")
    return Digests(code(), schedule.hexdigest(), prompts.hexdigest())
