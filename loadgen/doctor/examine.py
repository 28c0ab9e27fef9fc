"""What a run needs of this machine, looked at before it begins: one check a question, each with what was found.

Nothing is started, pulled or written; `wire` alone sends requests. A check that cannot be made says so and stops no
other. "problem": the run would fail. "warning": it would work, but what it measures may be worse than it must be, or it
may fail under load.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from itertools import combinations
from pathlib import Path

import backends
from backends import docker, gpus
from backends.exit_codes import UserError
from backends.gpus import Gpu, Inventory
from backends.launch import Adapter
from backends.protocol import Backend
from backends.untrusted import printable
from loadgen import models
from loadgen.config import Config, ConfigError
from loadgen.doctor.machine import DoctorCheck, Observation, State, client_checks, guarded
from loadgen.document.content import Table
from loadgen.document.terminal import aligned, rows
from loadgen.load.dataset_files import counted
from loadgen.models import ServedModel
from loadgen.plan import planned_load
from loadgen.rundir import WireFacts
from loadgen.server import embedded
from loadgen.server.installed import installed
from loadgen.server.launch import Launch, plan_launch

GIB = 1 << 30
SHM_BYTES_PER_GPU = 1 * GIB
IMAGE_BYTES = 20 * 10**9  # of the servers' images, unpacked

_MARKS: dict[State, str] = {"ok": "ok", "warning": "! ", "problem": "!!"}


def examine(config: Config, inventory: Inventory | None = None) -> list[DoctorCheck]:
    """Every check that says something about a run with these options; with no options, about this machine.

    `inventory`: the GPUs (default: this machine's). Raises ConfigError and UnknownBackend for options that make no run
    on any machine.
    """
    own = [*_load_checks(config), *client_checks(config)]
    if config.where == "url" or config.launch == "embedded":
        return own
    inventory = gpus.read() if inventory is None else inventory
    return [*(_open_checks(inventory) if config.where == "embedded" else _launch_checks(config, inventory)), *own]


def wire(measure: Callable[[], WireFacts | None]) -> DoctorCheck:
    """What lies between this machine and the server of --url adds to the time of a first token."""

    def found() -> Observation:
        facts = measure()
        if facts is None:
            return Observation("warning", "not measured: it takes Linux and replies of a few tokens in half a second")
        times = f"first token after {facts.ttft_ms:.1f} ms, with quick ACKs after {facts.ttft_quick_ms:.1f} ms"
        if not facts.waits:
            return Observation("ok", f"{times}, medians of {facts.n} requests each")
        return Observation(
            "warning",
            f"{times}: the server or a proxy does not set TCP_NODELAY, and waits for delayed ACKs",
            "set it where the stream is written (HAProxy: option http-no-delay, nginx: tcp_nodelay on), or measure the "
            "server itself with --quick-acks",
        )

    return guarded("wire", found)


def render(checks: list[DoctorCheck]) -> str:
    """One line a check, with advice below those that need it. ASCII marks, for any terminal or log."""
    cells = []
    for check in checks:
        cells.append((_MARKS[check.state], check.name, printable(check.seen, 400)))
        if check.advice:
            cells.append(("", "", printable(check.advice, 400)))
    return "\n".join(aligned(cells))


def backends_table() -> str:
    """Every installed backend, a line each. One that cannot be loaded says why, and hides no other."""
    heads = ("started in", "protocol", "prompts as", "metrics", "simulated", "seen for real", "image", "from")
    cells: list[tuple[str, ...]] = []
    for entry in sorted(entry_points(group=backends.GROUP), key=lambda entry: entry.name):
        origin = entry.dist.name if entry.dist is not None else "unknown"
        try:
            backend = backends.get(entry.name)
            adapter = backend.adapter
            says = (
                "no" if adapter is None else "docker, process", "its own" if backend.native else "OpenAI's",
                backend.prompt_kind.replace("_", " "), "yes" if backend.server_metrics else "no",
                _simulated(entry.name), backend.seen or "never", "-" if adapter is None else adapter.image, origin,
            )  # fmt: skip
            here = "-" if adapter is None else "yes" if installed(adapter) else "no"
            cells.append((entry.name, *says, here))
        except Exception as error:  # anything may be in a plugin
            cells.append((entry.name, f"cannot be loaded: {printable(str(error), 200)}", *[""] * len(heads)))
    return "\n".join(rows(Table(["backend", *heads, "server here"], cells, numeric=False)))


def _simulated(name: str) -> str:
    """How the embedded server stands for such a server, if it does: with times of its own, or of modelled GPUs too."""
    if name not in embedded.DIALECTS:
        return "no"
    return "timetable, GPUs" if name in embedded.MODELLED else "timetable"


def _refused(state: State, why: object) -> Observation:
    """What someone else found, as "what is wrong; what to do."."""
    seen, _, advice = str(why).rstrip(".").partition("; ")
    return Observation(state, seen, advice)


def _load_checks(config: Config) -> Iterator[DoctorCheck]:
    """Checks the file that the load is made of."""
    if (path := config.dataset or config.trace) is not None:
        backend = backends.get(config.kind)
        yield guarded("dataset" if config.trace is None else "trace", lambda: _load(config, backend, path))


def _load(config: Config, backend: Backend, path: Path) -> Observation:
    try:
        load = planned_load(config, backend)
        planned = load.planned
    except UserError as error:
        return _refused("problem", error)
    seen = "as many requests as time allows" if planned is None else counted(planned, "request")
    if load.sessions is not None:
        seen = f"{counted(load.requests or 0, 'conversation')} with {counted(planned or 0, 'turn')} in all"
    left_out = f"; left out: {load.left_out}" if load.left_out else ""
    return Observation("ok", f"{path}: {seen}{left_out}")


# -- a server that would be started ------------------------------------------------------------------------------------


def _open_checks(inventory: Inventory) -> Iterator[DoctorCheck]:
    """No run is named: Docker and GPUs are only listed, since the embedded server needs neither."""
    engine = guarded("Docker", lambda: _docker("warning"))
    yield engine
    yield guarded("GPUs", lambda: _gpus(inventory, inventory.gpus, "warning"))
    if inventory.gpus and engine.state == "ok":
        yield guarded("GPUs in Docker", lambda: _nvidia("warning"))
    if len(inventory.gpus) > 1:
        chosen = tuple(gpu.index for gpu in inventory.gpus)
        yield guarded("P2P", lambda: _p2p(gpus.decide_p2p("auto", inventory, chosen), inventory, chosen))


def _launch_checks(config: Config, inventory: Inventory) -> Iterator[DoctorCheck]:
    backend, model = backends.get(config.kind), models.find(config.model or "7b")
    adapter = backend.adapter
    if adapter is None:
        raise ConfigError(f"loadgen cannot start a server of kind '{backend.name}'; give --url, or --launch embedded.")
    in_docker = config.where == "docker"
    launch = _planned(config, inventory)
    engine_ok = False
    if in_docker:
        engine = guarded("Docker", lambda: _docker("problem"))
        engine_ok = engine.state == "ok"
        yield engine
    else:
        yield guarded("server", lambda: _server(config, adapter))
    if config.gpus != "none":
        if engine_ok and inventory.gpus:
            yield guarded("GPUs in Docker", lambda: _nvidia("problem"))
        yield from _gpu_checks(config, inventory, launch)
    yield guarded("plan", lambda: _plan(launch))
    tp = 1 if isinstance(launch, Exception) else launch.settings.tp
    yield guarded("/dev/shm", lambda: _shared_memory(tp))
    yield guarded("model", lambda: _model(config, adapter, model))
    if model.spec is not None and model.spec.gated and not model.local(dummy_weights=config.dummy_weights):
        yield guarded("HF token", lambda: _token(model))
    if engine_ok:
        yield guarded("image", lambda: _image(config.image or adapter.image))


def _planned(config: Config, inventory: Inventory) -> Launch | Exception:
    """What would be started, or why it would not: a dry run, since what it leaves out is checked one by one."""
    try:
        return plan_launch(dataclasses.replace(config, dry_run=True), Path("runs"), "doctor", inventory)
    except UserError as error:
        return error


def _plan(launch: Launch | Exception) -> Observation:
    if isinstance(launch, Exception):
        return _refused("problem", launch)
    return Observation("warning" if launch.notes else "ok", launch.title, " ".join(launch.notes))


def _docker(absent: State) -> Observation:
    why = docker.problem()
    return Observation("ok", "the engine answers") if why is None else _refused(absent, why)


def _nvidia(absent: State) -> Observation:
    if docker.has_nvidia():
        return Observation("ok", "the engine can give GPUs to a container")
    return Observation(
        absent,
        "the engine cannot give GPUs to a container",
        "install the NVIDIA Container Toolkit, run 'sudo nvidia-ctk runtime configure --runtime=docker' and restart "
        "Docker",
    )


def _server(config: Config, adapter: Adapter) -> Observation:
    python = config.server_python or sys.executable
    try:
        installation = installed(adapter, config.server_python)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Observation("problem", f"--server-python {python} cannot be run ({error})", "name another")
    if installation is not None:
        return Observation("ok", f"{installation.what} is installed")
    program = adapter.process_command[0]
    if program != "{python}":
        return Observation("problem", f"{program} is not on the PATH", "install it, or use --launch docker")
    return Observation(
        "problem",
        f"{config.kind} is not installed for {python}",
        "name the interpreter that has it with --server-python, or use --launch docker",
    )


def _gpu_checks(config: Config, inventory: Inventory, launch: Launch | Exception) -> Iterator[DoctorCheck]:
    """Checks the GPUs that would be used, or all that might be, where it is not known which would."""
    try:
        ids = None if config.gpus is None else [name for name in config.gpus.split(",") if name.strip()]
        indices = gpus.choose(inventory, ids)
    except gpus.GpuError:
        return  # the plan says it
    if indices and isinstance(launch, Launch):
        indices = launch.gpu_indices
    chosen = tuple(gpu for gpu in inventory.gpus if gpu.index in indices)
    yield guarded("GPUs", lambda: _gpus(inventory, chosen, "problem", 1 - config.memory_ratio))
    if len(indices) > 1:
        decision = gpus.decide_p2p(config.p2p, inventory, indices)
        yield guarded("P2P", lambda: _p2p(decision, inventory, indices))


def _gpus(inventory: Inventory, chosen: tuple[Gpu, ...], absent: State, spare_ratio: float = 0.1) -> Observation:
    """`spare_ratio`: part of a GPU's memory that others may use."""
    if not inventory.gpus:
        return Observation(
            absent, f"there is none ({inventory.problem or 'nothing found'})", "nvidia-smi must list them"
        )
    if not chosen:
        return Observation(
            absent,
            f"{len(inventory.gpus)} here, all of them hidden",
            "see CUDA_VISIBLE_DEVICES, or name --gpus",
        )
    kinds = Counter((gpu.name, gpu.memory_bytes) for gpu in chosen)
    cards = ", ".join(
        f"{count} x {name}" + (f" ({memory / GIB:.0f} GiB)" if memory else "")
        for (name, memory), count in kinds.items()
    )
    used = f"{len(chosen)} of {len(inventory.gpus)}: " if len(chosen) < len(inventory.gpus) else ""
    seen = f"{used}{cards}, driver {inventory.driver or 'unknown'}, CUDA {inventory.cuda or 'unknown'}"
    busy = [gpu for gpu in chosen if gpu.used_bytes and gpu.memory_bytes and
            gpu.used_bytes > spare_ratio * gpu.memory_bytes]  # fmt: skip
    if busy:
        who = ", ".join(f"GPU {gpu.index}: {(gpu.used_bytes or 0) / GIB:.1f} GiB" for gpu in busy)
        return Observation("warning", f"{seen}; in use ({who})", "stop what uses them, or name others with --gpus")
    if inventory.problem:
        return Observation("warning", f"{seen}; {inventory.problem}", "see nvidia-smi and dmesg")
    return Observation("ok", seen)


def _p2p(decision: gpus.P2pDecision, inventory: Inventory, chosen: tuple[int, ...]) -> Observation:
    """Off is no problem: servers work without, only more slowly. On against what NVML says may hang."""
    places = [place for place, gpu in enumerate(inventory.gpus) if gpu.index in chosen]
    pairs = [{inventory.p2p[a][b], inventory.p2p[b][a]} for a, b in combinations(places, 2)]
    good = pairs.count({"ok"})
    seen = f"{'on' if decision.enabled else 'off'}: {decision.reason} ({good} of {len(pairs)} pairs report it)"
    if decision.enabled and not gpus.decide_p2p("auto", inventory, chosen).enabled:
        return Observation("warning", seen, "if the server hangs or its output is wrong: --p2p auto")
    return Observation("ok", seen)


def _shared_memory(tp: int) -> Observation:
    size, _ = space(Path("/dev/shm"))
    needed = tp * SHM_BYTES_PER_GPU
    seen = f"{size / GIB:.1f} GiB in all"
    if size >= needed:
        return Observation("ok", seen)
    return Observation(
        "warning",
        f"{seen}, and {tp} GPUs may want {needed / GIB:.0f}",
        f"sudo mount -o remount,size={max(16, needed // GIB)}G /dev/shm",
    )


def _model(config: Config, adapter: Adapter, model: ServedModel) -> Observation:
    if directory := model.local(dummy_weights=config.dummy_weights):
        return Observation("ok", f"{model.name} is here: {directory}")
    if not adapter.loads_from_hub:
        return Observation(
            "problem",
            f"{config.kind} loads from a directory, and {model.hf_id} is not on this machine",
            f"hf download {model.hf_id}, or name its directory with --model",
        )
    home = models.hf_home()
    _, free = space(home)
    here = f"{free / 1e9:.0f} GB are free in {home}"
    if config.dummy_weights:
        return Observation("ok", f"{model.hf_id}: no weights will be downloaded, {here}")
    if model.spec is None:
        return Observation("ok", f"{model.hf_id} will be downloaded, its size is not known here; {here}")
    needed = model.spec.weight_bytes(model.spec.precision("bfloat16"))  # as the hub has them
    seen = f"{needed / 1e9:.0f} GB of {model.hf_id} will be downloaded, {here}"
    if free < needed:
        return Observation("problem", seen, "make room, or set HF_HOME to a directory on a larger disk")
    return Observation("ok", seen)


def _token(model: ServedModel) -> Observation:
    if models.hf_token():
        return Observation("ok", f"there is one; whether its owner may read {model.hf_id} will show")
    return Observation(
        "problem",
        f"{model.hf_id} is gated and no token is known",
        "accept its licence on huggingface.co and set HF_TOKEN, or name a local directory with --model",
    )


def _image(image: str) -> Observation:
    """Whether the image is here, or Docker has room for it."""
    import docker as sdk  # the package; backends.docker is ours

    client = sdk.from_env()
    try:
        try:
            client.images.get(image)
            return Observation("ok", f"{image} is here")
        except sdk.errors.ImageNotFound:
            root = Path(client.info()["DockerRootDir"])
    finally:
        client.close()
    if not root.exists():
        return Observation("ok", f"{image} will be pulled; Docker's disk ({root}) cannot be seen from here")
    _, free = space(root)
    seen = f"{image} will be pulled, {free / 1e9:.0f} GB are free in {root}"
    if free < IMAGE_BYTES:
        return Observation(
            "problem", f"{seen}, and it may need {IMAGE_BYTES / 1e9:.0f}", "make room: docker system prune"
        )
    return Observation("ok", seen)


def space(path: Path) -> tuple[int, int]:
    """Bytes in all, and free for us, of the file system that `path` is on or will be."""
    while not path.exists() and path != path.parent:
        path = path.parent
    usage = shutil.disk_usage(path)
    return usage.total, usage.free
