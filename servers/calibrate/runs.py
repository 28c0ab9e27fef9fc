"""Real runs, as far as a fit needs them: when each request was sent, answered and done, and on what it ran.

Two forms are read: a run directory of loadgen, and a .jsonl.gz with one JSON object a request (`i`, `send`, `first`,
`end` in seconds, `usage`), such as those of results:runs. There the first line may hold what ran ({"run": {...}});
else the file's name is read: GPU, x count, model, tp, p2poff, lightllm. Flags fill what neither tells.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, cast

import msgspec
import numpy as np
import numpy.typing as npt

from backends import catalog
from backends.decoder import ModelSpec
from backends.exit_codes import UserError
from backends.files import opened
from backends.foreign_files import named_lines
from backends.launch import version_in
from backends.untrusted import UNDECODABLE, reason
from loadgen import models, rundir
from loadgen.config import ConfigError, KvCacheDtype, QuantizationName
from loadgen.load.load import parse_streams
from loadgen.rundir import records
from loadgen.rundir.emulation import HeldOut, kind_of_load
from loadgen.server import embedded
from servers.simulator import hardware, virtual
from servers.simulator.build import Emulated, ServerProfile, Setup, emulate, newest

Floats = npt.NDArray[np.float64]
Dtype = Literal["float16", "bfloat16", "float32"]
FEWEST = 20  # requests
AT_ONCE = 0.1  # of a run: where all were sent within it, they came as a burst
MOST_CACHED = 0.01  # of a run's prompt tokens
RECORD_FILES = (".jsonl", ".jsonl.gz")
_NAME = re.compile(r"(?P<gpu>[a-z]+\d+[a-z]*?)(x\d+)?_(?P<model>\d+b)(?:_|\.)")

# In NVML's names: other memory, clocks or links than those of the card that is known by that name (4090 D, Max-Q)
_OTHER_CARDS = frozenset({"40gb", "pcie", "nvl", "laptop", "max", "d", "ti"})


class ObservationError(UserError):
    """A run that cannot be used. One sentence."""


class NotARunError(ObservationError):
    """What lies beside runs: a README, a figure, a directory of another kind. One sentence."""


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class RunFacts(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What ran, in the words of Setup; None: not known."""

    scheduler: str | None = None
    gpu: str | None = None
    model: str | None = None
    tp: Annotated[int, msgspec.Meta(ge=1)] | None = None
    topology: str | None = None
    p2p: bool | None = None
    dtype: Dtype | None = None
    quantization: QuantizationName | None = None
    kv_cache_dtype: KvCacheDtype | None = None
    kv_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_running: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_batched_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    concurrency: Annotated[int, msgspec.Meta(ge=1)] | str | None = None
    options: dict[str, int] | None = None
    source: str = ""

    def over(self, other: RunFacts) -> RunFacts:
        """These, and those of `other` where these are not known."""
        known = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return msgspec.structs.replace(other, **known)


class _Line(msgspec.Struct):
    i: int = -1
    send: float = 0.0
    first: float = 0.0
    end: float = 0.0
    usage: _Usage | None = None
    run: RunFacts | None = None


@dataclass(frozen=True)
class Observed:
    """Columns of shape (n,), in order of sending; seconds."""

    name: str
    setup: Setup
    concurrency: int | str | None  # as --concurrency has it
    tp_known: bool  # from the run or the user; else 1 is assumed
    send_s: Floats
    first_s: Floats
    end_s: Floats
    prompt: npt.NDArray[np.int64]
    output: npt.NDArray[np.int64]

    @property
    def ttft_s(self) -> Floats:
        return self.first_s - self.send_s

    @property
    def e2el_s(self) -> Floats:
        return self.end_s - self.send_s

    @property
    def kind_of_load(self) -> str:
        if self.concurrency is not None:
            arrival = f"concurrency:{self.concurrency}"
        else:
            arrival = "burst" if self.send_s.max() < AT_ONCE * self.end_s.max() else "open"
        return kind_of_load(arrival, float(self.prompt.mean()))

    @functools.cached_property
    def emulated(self) -> Emulated:
        return emulate(self.setup)

    def predict(self, profile: ServerProfile) -> PredictedRun:
        """The same load through the model."""
        emulated = self.emulated.with_profile(profile)
        load = zip(self.send_s.tolist(), self.prompt.tolist(), self.output.tolist(), strict=True)
        streams = None if self.concurrency is None else parse_streams(self.concurrency)
        times = np.array(list(virtual.bounds(virtual.simulate(emulated, load, streams))))
        if len(times) < len(self.send_s):
            raise ObservationError(f"{self.name}: the emulated server refuses requests that the real one served.")
        sent, first, last = times.T
        return PredictedRun(first - sent, last - sent, float(last.max() - sent.min()))


@dataclass(frozen=True)
class PredictedRun:
    """What the model predicts of an observed run; seconds."""

    ttft_s: Floats
    e2el_s: Floats
    makespan_s: float

    def error(self, seen: Observed) -> HeldOut:
        """How far off."""
        makespan = float(seen.end_s.max() - seen.send_s.min())
        return HeldOut(
            run=seen.name,
            makespan=self.makespan_s / makespan - 1,
            throughput=makespan / self.makespan_s - 1,
            e2el_mape=float(np.mean(np.abs(self.e2el_s / seen.e2el_s - 1))),
            e2el_w1=_w1(self.e2el_s, seen.e2el_s),
            ttft_w1=_w1(self.ttft_s, seen.ttft_s),
            tpot_w1=_w1(_tpot_s(self, seen.output), _tpot_s(seen, seen.output)),
            gpu=seen.setup.gpu,
            quantization=seen.setup.quantization or seen.setup.model.quantization,
            architecture=seen.setup.model.architecture,
            load=seen.kind_of_load,
        )


def _tpot_s(run: Observed | PredictedRun, output: npt.NDArray[np.int64]) -> Floats:
    many = output > 1
    tpot: Floats = (run.e2el_s - run.ttft_s)[many] / (output[many] - 1)
    return tpot


def _w1(a: Floats, b: Floats) -> float:
    """Wasserstein-1 distance of two samples of one size, over the mean of the second; 0 for none."""
    if not len(b):
        return 0.0
    return float(np.mean(np.abs(np.sort(a) - np.sort(b))) / np.mean(b))


def read(path: Path, flags: RunFacts | None = None) -> Observed:
    """`flags`: the user's, for what the run itself does not tell. Raises ObservationError, or NotARunError for what
    lies beside runs."""
    if path.is_file() and not path.name.endswith(RECORD_FILES):
        raise NotARunError(f"{path} is no run: records are in {' or '.join(RECORD_FILES)} files, or run directories.")
    facts, columns = _directory(path) if path.is_dir() else _lines(path)
    if flags is not None:
        named = flags.model if facts.model and _known(facts.model) is None else None  # served by another name
        facts = facts.over(flags) if named is None else msgspec.structs.replace(facts.over(flags), model=named)
    setup = _setup(path, facts)
    sent, first, end, prompt, output = columns
    if len(sent) < FEWEST:
        raise ObservationError(f"{path} has {len(sent)} complete requests; a fit needs {FEWEST} of a run.")
    if not (np.isfinite([sent, first, end]).all() and (sent < first).all() and (first <= end).all()):
        raise ObservationError(f"{path} has requests that do not begin, answer and end in that order.")
    if prompt.min() < 1 or output.min() < 1:
        raise ObservationError(f"{path} has requests without a prompt or without output.")
    order = np.argsort(sent, kind="stable")
    begin = sent.min()
    return Observed(
        name=path.name.removesuffix(".gz").removesuffix(".jsonl"),
        setup=setup,
        concurrency=facts.concurrency,
        tp_known=facts.tp is not None,
        send_s=sent[order] - begin,
        first_s=first[order] - begin,
        end_s=end[order] - begin,
        prompt=prompt[order].astype(np.int64),
        output=output[order].astype(np.int64),
    )


def _known(model: str) -> ModelSpec | None:
    """The model that a directory here holds; else the one of that name, which a directory elsewhere may have too."""
    if (Path(model) / "config.json").is_file():
        return models.spec(model)
    return catalog.find(model) or catalog.find(Path(model).name)


def _setup(path: Path, facts: RunFacts) -> Setup:
    """Raises ObservationError."""
    if not facts.gpu or not facts.model:
        missing = [name for name, value in (("gpu", facts.gpu), ("model", facts.model)) if not value]
        raise ObservationError(f"{path} does not tell its {' and '.join(missing)}; name it with --{missing[0]}.")
    try:
        model = _known(facts.model) or models.find(facts.model).described()
    except ConfigError as error:
        raise ObservationError(f"{path}: {error}") from None
    tp = facts.tp or 1
    return Setup(
        scheduler=facts.scheduler or "vllm@v1",
        model=model,
        gpu=facts.gpu,
        gpus=tp,
        tp=tp,
        topology=facts.topology,
        p2p=facts.p2p is not False,
        dtype=facts.dtype or "bfloat16",
        quantization=facts.quantization,
        kv_cache_dtype=facts.kv_cache_dtype or "auto",
        kv_tokens=facts.kv_tokens,
        max_running=facts.max_running or 1024,
        max_batched_tokens=facts.max_batched_tokens,
        max_requests=embedded.UNREFUSED,
        options=tuple((facts.options or {}).items()),
    )


def _named(name: str) -> RunFacts:
    """What a file's name tells."""
    named = _NAME.match(name)
    if named is None:
        return RunFacts()
    tp = re.search(r"_tp(\d+)", name) or re.match(r"[a-z]+\d+[a-z]*?x(\d+)_", name)
    return RunFacts(
        gpu=named["gpu"],
        model=named["model"],
        tp=int(tp[1]) if tp else 1,
        p2p="p2poff" not in name,
        scheduler=next((newest(server) for server in ("lightllm", "tgi") if server in name), "vllm@v1"),
    )


def _lines(path: Path) -> tuple[RunFacts, list[Floats]]:
    facts = _named(path.name)
    rows = []
    try:
        with opened(path) as file:
            for line in named_lines(file, path):
                row = msgspec.json.decode(line, type=_Line)
                if row.run is not None:
                    facts = row.run.over(facts)
                elif row.usage is not None:
                    rows.append((row.send, row.first, row.end, row.usage.prompt_tokens, row.usage.completion_tokens))
    except OSError as error:
        raise ObservationError(f"cannot read {path}: {error.strerror or error}.") from None
    except UNDECODABLE as error:
        raise ObservationError(f"{path} holds no records of requests: {reason(error)}.") from None
    if not rows:
        raise ObservationError(f"{path} holds no records of requests.")
    return facts, list(np.array(rows, float).T)


def _directory(path: Path) -> tuple[RunFacts, list[Floats]]:
    try:
        manifest = rundir.read_manifest(path)
        table = records.read(path)[0].measured()
    except rundir.RunError as error:
        raise NotARunError(str(error)) from None
    except records.RecordsError as error:
        raise ObservationError(str(error)) from None
    if manifest.emulated:
        raise ObservationError(f"{path} is emulated; only real runs can be fitted to.")
    table = table.select(table.ok & (table.output_tokens > 0))
    if not len(table):
        raise ObservationError(f"{path} holds no complete reply.")
    cached_tokens, prompt_tokens = int(np.maximum(table.cached_tokens, 0).sum()), int(table.prompt_tokens.sum())
    if cached_tokens > MOST_CACHED * prompt_tokens:
        raise ObservationError(
            f"{path} took {cached_tokens:,} of {prompt_tokens:,} prompt tokens from its prefix cache, which a fit does "
            "not follow; give runs whose prompts share nothing."
        )
    launch = manifest.launch
    facts = RunFacts(
        scheduler=_scheduler(path, manifest.backend, (launch and launch.version) or manifest.server_version),
        model=manifest.model,
        concurrency=manifest.config.get("concurrency"),
        kv_tokens=manifest.kv_cache_tokens,
    )
    if launch is not None:
        facts.gpu = gpu_of(launch.gpus[0].name) if launch.gpus else None
        facts.tp = launch.tensor_parallel
        facts.p2p = launch.p2p.enabled
        facts.dtype = cast(Dtype, launch.dtype)
        if (Path(served := str(manifest.config.get("model"))) / "config.json").is_file():
            facts.model = served
        for name in ("quantization", "kv_cache_dtype", "max_batched_tokens"):  # older runs could not choose them
            setattr(facts, name, manifest.config.get(name))
        facts.kv_tokens = launch.kv_cache_tokens or manifest.kv_cache_tokens
        facts.max_running = launch.max_running
    columns = (table.sent_ns * 1e-9, table.first_token_ns * 1e-9, table.done_ns * 1e-9)
    return facts, [np.asarray(each, float) for each in (*columns, table.prompt_tokens, table.output_tokens)]


def gpu_of(name: str) -> str | None:
    """The GPU whose name NVML gave: "NVIDIA H200" is the h200."""
    words = [word for word in name.lower().replace("-", " ").split() if word not in ("nvidia", "geforce")]
    if not _OTHER_CARDS.isdisjoint(words):
        return None
    beginnings = {"".join(words[:count]) for count in range(1, len(words) + 1)}  # "rtx 4090", and "h100" of "h100 80gb"
    return next((key for key in hardware.known() if key in beginnings), None)


def _scheduler(path: Path, backend: str, version: str | None) -> str | None:
    """Which of the modelled schedulers a server of that version has. Raises ObservationError for one between them."""
    numbers = version_in(version) if version else None
    if backend == "vllm" and numbers is not None and numbers < (0, 8):
        if numbers >= (0, 3):
            raise ObservationError(f"{path}: vLLM {version} is not modelled; vllm@0.2 and vllm@v1 (0.8 and newer) are.")
        return "vllm@0.2"
    if backend == "tgi" and numbers is not None and numbers < (2,):
        return "tgi@1"
    return newest(backend)
