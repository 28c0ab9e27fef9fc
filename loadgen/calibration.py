"""The client's own ceiling on this machine: the run's shape, cut to about a second, sent to the embedded server.

The embedded server stamps every event just before it sends it. What the client recorded later than that is the error of
its stamps, the server's write and the kernel included. A ceiling is kept in the user's cache and serves runs of the
same shape on the same machine, since its start, with the same versions, for an hour.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

import backends
from backends import foreign_files
from backends.untrusted import UNDECODABLE
from loadgen import models, rundir
from loadgen.client.engine import run_here
from loadgen.client.limits import OPEN_FILES_BESIDES
from loadgen.load.lengths import fixed
from loadgen.load.load import Load, Streams
from loadgen.load.request_body import BodyEdits
from loadgen.plan import ClientPlan, PromptSource
from loadgen.rundir import Ceiling, records
from loadgen.server import embedded
from loadgen.target import Target

CALIBRATION_EVENTS = 40_000  # about a second
LEAST_EVENTS = 1000  # fewer give no cost per event
REUSED_S = 3600.0  # longer, and the machine may be busy with something else
MOST_KEPT = 64
OWNER_ONLY = 0o700


class _Shape(NamedTuple):
    """What the embedded server is asked for."""

    streams: int
    requests: int
    prompt_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, load: Load) -> _Shape:
        """As the load, cut to about a second."""
        streams = min(max(load.at_once, 16), 512)
        prompt_tokens, reply_tokens = load.typical_tokens()
        tokens = min(reply_tokens, max(4, CALIBRATION_EVENTS // streams))
        return cls(streams, min(max(streams, CALIBRATION_EVENTS // tokens), 8 * streams), prompt_tokens, tokens)


async def calibrate(plan: ClientPlan) -> Ceiling | None:
    """The client's cost in the plan's shape, as kept or measured now; None where no embedded server speaks the plan's
    protocol, or too few events arrived. Raises EmbeddedError or TransportError."""
    dialect = embedded.DIALECTS.get(plan.backend)
    if dialect is None or backends.get(plan.backend).pooled:  # whose replies have no events
        return None
    shape = _Shape.of(plan.job.load)
    name, kept = _name(plan, shape), _kept()
    if name in kept:
        return kept[name]
    measured = await _measure(plan, dialect, shape)
    if measured is not None:
        _keep(name, measured)
    return measured


def _name(plan: ClientPlan, shape: _Shape) -> str:
    """Of a ceiling: all that it hangs on."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    how = (plan.transport, plan.fresh, plan.kernel_timestamps, plan.quick_acks, plan.job.sampling.stream)
    machine = msgspec.structs.astuple(rundir.this_machine())
    return " ".join(map(str, (plan.job.version, *machine, boot, plan.backend, *how, *shape)))


def _file() -> Path:
    return models.user_cache() / "llm-dissect" / "ceilings.json"


def _kept() -> dict[str, Ceiling]:
    """The ceilings that are young enough, the oldest first; none of a file that somebody else could have written."""
    path, now_s = _file(), time.time()
    try:
        status = path.lstat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return {}
        kept = msgspec.json.decode(foreign_files.read_bytes(path), type=dict[str, Ceiling])
    except (OSError, *UNDECODABLE):
        return {}
    return {name: each for name, each in kept.items() if 0 <= now_s - (each.measured_unix_s or 0) < REUSED_S}


def _keep(name: str, measured: Ceiling) -> None:
    """For later runs; where that cannot be written they measure again."""
    path = _file()
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=OWNER_ONLY, parents=True, exist_ok=True)
        kept = list({**_kept(), name: measured}.items())[-MOST_KEPT:]
        rundir.replace(path, msgspec.json.encode(dict(kept)), mode=0o600)


async def _measure(plan: ClientPlan, dialect: str, shape: _Shape) -> Ceiling | None:
    load, (streams, requests, prompt_tokens, tokens) = plan.job.load, shape
    itl_ms = max(1.0, streams * 1000 / CALIBRATION_EVENTS)
    with tempfile.TemporaryDirectory(prefix="loadgen-calibrate-") as scratch:
        directory, stamps = Path(scratch) / "run", Path(scratch) / "stamps.npz"
        directory.mkdir()
        options = ("--dialect", dialect, "--stamps", str(stamps), "--ttft-ms", "30", "--itl-ms", f"{itl_ms:g}")
        length = prompt_tokens + tokens + OPEN_FILES_BESIDES
        async with embedded.serving(*options, "--max-model-len", str(length)) as serving:
            like = Load(
                arrival=load.arrival,
                input_tokens=fixed(prompt_tokens),
                output_tokens=fixed(tokens),
                requests=requests,
                streams=Streams(streams, streams),
                seed=load.seed,
            )
            job = msgspec.structs.replace(plan.job, model="llama-2-7b", load=like, warmup=0, body_edits=BodyEdits())
            short = msgspec.structs.replace(plan, job=job, target=Target(serving.url), prompts=PromptSource())
            await run_here(short, directory, lambda snapshots: None)
        return await asyncio.to_thread(ceiling, directory, stamps, requests, tokens)


def ceiling(directory: Path, stamps: Path, requests: int, output_tokens: int) -> Ceiling | None:
    """The client's cost and error from the records in `directory` and the server's own stamps. None when too few
    events arrived."""
    table, facts = records.read(directory)
    table = table.measured()
    if not facts or facts[0].events < LEAST_EVENTS or facts[0].cpu_s <= 0:
        return None
    t0_ns = records.read_header(directory).t0_monotonic_ns
    with np.load(stamps) as truth:
        rows = {str(name).rpartition("-")[2]: row for row, name in enumerate(truth["request_id"])}
        offsets, sent_ns = truth["offsets"], truth["sent_ns"]
    lags_ns = []
    for index in range(len(table)):
        row = rows.get(str(table.id[index]))
        if row is None or table.events[index] != offsets[row + 1] - offsets[row]:
            continue
        lags_ns.append(t0_ns + table.arrivals_ns(index) - sent_ns[offsets[row] : offsets[row + 1]])
    cpu_us = facts[0].cpu_s / facts[0].events * 1e6
    return Ceiling(
        events_per_s_per_core=1e6 / cpu_us,
        cpu_us_per_event=cpu_us,
        event_error_p50_ms=float(np.percentile(np.concatenate(lags_ns), 50)) / 1e6 if lags_ns else None,
        event_error_p99_ms=float(np.percentile(np.concatenate(lags_ns), 99)) / 1e6 if lags_ns else None,
        requests=requests,
        output_tokens=output_tokens,
        measured_unix_s=time.time(),
    )
