"""What will be started: from options, the model and this machine's GPUs to one `ServerSpec`, in full and beforehand.

`--dry-run`, `loadgen compose` and the run itself take the same `Launch`, so what is shown is what would run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec import UNSET

import backends
from backends import docker, foreign_files, gpus, process
from backends.launch import (
    WITHOUT_P2P,
    Adapter,
    Invocation,
    Launcher,
    LaunchError,
    Mount,
    ServerSettings,
    ServerSpec,
    version_in,
)
from backends.protocol import Backend, ServerInfo
from backends.untrusted import UNDECODABLE
from loadgen import models
from loadgen.config import DEFAULT_REQUESTS, Config, ConfigError, flag
from loadgen.models import ServedModel
from loadgen.plan import ClientPlan, plan_run, read_dataset
from loadgen.rundir.launch_facts import LaunchedGpu, LaunchedP2p, LaunchFacts
from loadgen.server.installed import Installed, installed
from loadgen.server.placement import gpu_pool, model_length, tensor_parallel
from loadgen.target import Target

CONTAINER_CONFIG = "/llm-dissect"  # where a container sees the files that are written for it
CONTAINER_MODELS = "/models"
UNDERFLOW = (
    "dummy weights underflow in float16: the MLP multiplies zeros, which takes less power and may be faster than real "
    "weights; --dtype bfloat16 does not."
)
TRACES = "trace"  # of the server's profiler, in the run's directory
MODEL_DIR = Path("/MODEL_DIR")  # in a dry run: stands for a directory that is not here

# to be there before it starts: content, where a link points, or what writes it where it is not there yet
Files = dict[Path, bytes | str | Callable[[Path], None]]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A server about to be started. `notes`: what a user should know about it, one sentence each."""

    launcher: Launcher
    backend: Backend
    adapter: Adapter
    model: ServedModel
    settings: ServerSettings
    start: ServerSpec
    files: Files
    inventory: gpus.Inventory
    gpu_indices: tuple[int, ...]
    p2p: gpus.P2pDecision
    notes: tuple[str, ...]

    @property
    def title(self) -> str:
        place = self.launcher.place(self.start)
        cards = f", GPUs {', '.join(map(str, self.gpu_indices))}" if self.gpu_indices else ""
        p2p = f", P2P {'on' if self.p2p.enabled else 'off'} ({self.p2p.reason})" if len(self.gpu_indices) > 1 else ""
        dp = f", {self.settings.dp} replicas" if self.settings.dp > 1 else ""
        parallel = f"tensor parallel {self.settings.tp}{dp}"
        return f"{self.backend.name} with {self.model.name} in {place}, {parallel}{cards}{p2p}"

    def command_line(self) -> str:
        """The equivalent command for a shell; secrets appear by name only."""
        return shlex.join(self.launcher.command_line(self.start))

    def text(self) -> str:
        """What a dry run shows of the server: title, notes and command."""
        return "\n".join([f"# {self.title}", *(f"# note: {note}" for note in self.notes), self.command_line()])

    def facts(self) -> LaunchFacts:
        """What the manifest holds of the server before it runs."""
        gpus_used = [gpu for gpu in self.inventory.gpus if gpu.index in self.gpu_indices]
        return LaunchFacts(
            launch=self.launcher.NAME,
            command=self.command_line(),
            version=".".join(map(str, self.settings.version)) if self.settings.version else None,
            image=self.start.image,
            model=self.settings.model,
            tensor_parallel=self.settings.tp,
            data_parallel=self.settings.dp if self.settings.dp > 1 else UNSET,
            dtype=self.settings.dtype,
            max_model_len=self.settings.max_model_len,
            max_running=self.settings.max_running,
            memory_ratio=self.settings.memory_ratio,
            prefix_caching=self.settings.prefix_caching,
            gpus=[LaunchedGpu(gpu.index, gpu.name, gpu.memory_bytes, gpu.power_limit_w) for gpu in gpus_used],
            driver=self.inventory.driver,
            p2p=LaunchedP2p(self.p2p.enabled, self.p2p.reason, [list(row) for row in self.inventory.p2p]),
            environment=self.launcher.environment(),
            notes=list(self.notes),
        )


def _gpu_ids(config: Config, inventory: gpus.Inventory, chosen: Sequence[int]) -> tuple[str, ...] | None:
    """None where the GPUs of a dry run are those of another machine, which are not known."""
    unknown = config.dry_run and config.where == "process" and config.gpus is None and not inventory.gpus
    return None if unknown else tuple(map(str, chosen))


def plan_launch(
    config: Config, directory: Path, run_id: str, inventory: gpus.Inventory | None = None, *, profiled: bool = False
) -> Launch:
    """Decides everything about the server. Raises ConfigError (options) or LaunchError (this machine).

    `directory`: the run's, where the server's log and files go. `inventory`: the GPUs (default: those of this machine).
    `profiled`: it gets its profiler, whose traces go to `directory`/trace.
    """
    backend = backends.get(config.kind)
    adapter, model = _adapter(config, backend, profiled), models.find(config.model or "7b")
    plan = plan_run(config, backend, Target(""), ServerInfo(model.name), run_id, model)
    notes = [adapter.profiler.note] if profiled and adapter.profiler and adapter.profiler.note else []
    notes += [UNDERFLOW] if config.dummy_weights and config.dtype == "float16" and not adapter.random_weights else []
    length = model_length(config, model, _longest(config, backend, model), notes)
    inventory = inventory or gpus.read()
    pool = gpu_pool(config, inventory, notes, needed=adapter.needs_gpu)
    tp = tensor_parallel(config, model, length, pool, notes)
    chosen = tuple(gpu.index for gpu in pool[: tp * config.dp])
    p2p = gpus.decide_p2p(config.p2p, inventory, chosen if inventory.gpus else ())  # assumed cards have no driver
    if config.where == "process" and p2p.enabled and tp > 1:
        notes += _inherited_notes()
    running = _running(config, adapter, notes)
    common = partial(
        ServerSettings,
        served_name=model.name,
        tp=tp,
        dp=config.dp,
        api_servers=config.api_servers,
        dtype=config.dtype,
        quantization=_quantization(config, adapter, model),
        kv_cache_dtype=_kv_cache_dtype(config, adapter),
        max_batched_tokens=config.max_batched_tokens,
        max_model_len=length,
        max_running=running,
        max_requests=max(running, _at_once(config, plan)),
        memory_ratio=config.memory_ratio,
        seed=config.seed,
        dummy_weights=config.dummy_weights,
        p2p=p2p.enabled,
        prefix_caching=config.caches_prefixes,
        by_priority=config.priority is not None,
        extra=config.server_arg,
    )
    local = _local(adapter, model, config, notes)
    draft = _Draft(config, backend, adapter, model, local, common, directory.absolute(), profiled)
    settings, start, files = draft.in_docker() if config.where == "docker" else draft.as_process()
    start = dataclasses.replace(start, run_id=run_id, gpu_ids=_gpu_ids(config, inventory, chosen))
    return Launch(
        launcher=docker if config.where == "docker" else process,
        backend=backend,
        adapter=adapter,
        model=model,
        settings=settings,
        start=start,
        files=files,
        inventory=inventory,
        gpu_indices=() if start.gpu_ids is None else chosen,
        p2p=p2p,
        notes=tuple(notes),
    )


def _adapter(config: Config, backend: Backend, profiled: bool) -> Adapter:
    """What can start this kind of server so. Raises ConfigError."""
    adapter = backend.adapter
    if adapter is None:
        raise ConfigError(f"loadgen cannot start a server of kind '{backend.name}'; give --url, or --launch embedded.")
    if config.dtype not in adapter.dtypes:
        raise ConfigError(f"{backend.name} has no --dtype {config.dtype}; it has {', '.join(adapter.dtypes)}.")
    if config.dummy_weights and not adapter.dummy_weights:
        raise ConfigError(f"{backend.name} cannot make --dummy-weights; vllm, sglang and llamacpp can.")
    for name in config.given(("dp", "api_servers")):
        if name not in adapter.takes:
            raise ConfigError(f"{backend.name} takes no {flag(name)}; leave it out.")
    if profiled and adapter.profiler is None:
        raise ConfigError(f"{backend.name} has no profiler for a client to start; vllm, sglang and lightllm have one.")
    return adapter


def _quantization(config: Config, adapter: Adapter, model: ServedModel) -> str | None:
    """The server's own word for what it is to make of 16-bit weights; None: it takes them as they are. Raises
    ConfigError."""
    name = config.quantization
    if name is None or (model.spec is not None and model.spec.quantization == name):
        return None
    if name not in adapter.quantizations:
        makes = " and ".join(adapter.quantizations)
        raise ConfigError(
            f"{config.kind} makes {makes} of 16-bit weights itself and not {name}; name a model whose weights come as "
            f"{name}."
        )
    return adapter.quantizations[name]


def _kv_cache_dtype(config: Config, adapter: Adapter) -> str | None:
    """The server's own word; None: as its activations. Raises ConfigError."""
    name = config.kv_cache_dtype
    if name == "auto":
        return None
    if name not in adapter.kv_cache_dtypes:
        raise ConfigError(
            f"{config.kind} keeps no KV cache in {name} without a file of scales; leave --kv-cache-dtype out."
        )
    return adapter.kv_cache_dtypes[name]


def _running(config: Config, adapter: Adapter, notes: list[str]) -> int:
    """Requests in a batch at most."""
    if adapter.usual_running is None or config.given(["max_running"]):
        return config.max_running
    notes.append(
        f"{config.kind} computes {adapter.usual_running} requests at once, each with a KV cache of its own, and others "
        "wait; name more with --max-running."
    )
    return adapter.usual_running


def _inherited_notes() -> list[str]:
    return [
        f"{name}={off} is set here, and the server inherits it: P2P is not what it could be; unset it."
        for name, off in WITHOUT_P2P.items()
        if os.environ.get(name) == off
    ]


def _longest(config: Config, backend: Backend, model: ServedModel) -> int | None:
    """Tokens of the run's longest prompt and its reply; None where the prompts' lengths are unknown. What a trace has
    beyond the server's length is left out. Raises ConfigError or WorkloadError."""
    if config.trace is not None:
        return config.load.within(config.max_model_len or model.max_position).longest_tokens()
    if config.dataset is None:
        return config.longest_tokens()
    return read_dataset(config, backend).longest_tokens()


def _at_once(config: Config, plan: ClientPlan) -> int:
    """Requests that the server may have at once, running or waiting: all of an open loop if it is slow, one of each
    session. Not fewer than a usual burst: a compose file's server may be measured with other options."""
    load = plan.job.load
    most = load.planned if load.sessions is None else load.requests
    most = most or 0 if load.streams is None else load.streams.most
    return max(most, config.warmup, DEFAULT_REQUESTS)


@dataclass(frozen=True)
class _Draft:
    """A launch but for where the server finds its model and its files: in a container, or as a process of this machine.

    `common`: its settings but for that. `local`: the model's directory on this host, or MODEL_DIR; None: the server
    takes its `hf_id` from the hub.
    """

    config: Config
    backend: Backend
    adapter: Adapter
    model: ServedModel
    local: Path | None
    common: partial[ServerSettings]
    directory: Path
    profiled: bool

    def in_docker(self) -> tuple[ServerSettings, ServerSpec, Files]:
        adapter, image = self.adapter, self.config.image or self.adapter.image
        mounts: list[Mount] = []
        seen = self.model.hf_id or ""
        if self.local == MODEL_DIR:
            mounts.append(Mount(MODEL_DIR, seen := f"{CONTAINER_MODELS}/{self.model.name.rpartition('/')[2]}"))
        elif self.local is not None:
            seen = _mount_model(self.local, mounts)
        else:
            mounts.append(_hub_mount(adapter))
        seen, files = self._overlay(seen)
        if any(path.is_relative_to(self.directory) for path in files):
            mounts.append(Mount(self.directory / "model", seen := f"{CONTAINER_CONFIG}/model"))
        cache = models.user_cache() / "llm-dissect"
        mounts += [Mount(cache / name, target, read_only=False) for name, target in adapter.caches.items()]
        settings = self._settled(seen, "0.0.0.0", adapter.port, CONTAINER_CONFIG, version_in(image))
        if settings.trace_dir is not None:
            mounts.append(Mount(self.directory / TRACES, settings.trace_dir, read_only=False))
        invocation = adapter.invoke(settings)
        if invocation.files:
            mounts.append(Mount(self.directory / "config", settings.config_dir))
        argv = (*adapter.image_command, *invocation.arguments)
        start = dataclasses.replace(
            self._start(argv, invocation, adapter.port), image=image, host_port=self.config.port, mounts=tuple(mounts)
        )
        return settings, start, files | self._config_files(invocation)

    def as_process(self) -> tuple[ServerSettings, ServerSpec, Files]:
        try:
            installation = _installed(self.config, self.adapter)
        except LaunchError:
            if not self.config.dry_run:
                raise
            python = self.config.server_python or sys.executable
            words = (python if word == "{python}" else word for word in self.adapter.process_command)
            installation = Installed("", None, tuple(words))
        seen, files = self._overlay(str(self.local or self.model.hf_id))
        settings = self._settled(
            seen, "127.0.0.1", self.config.port or process.free_port(), str(self.directory), installation.version
        )
        invocation = self.adapter.invoke(settings)
        command = (installation.command[0], *invocation.module) if invocation.module else installation.command
        start = self._start((*command, *invocation.arguments), invocation, settings.port)
        # the server inherits them, and may print them
        start = dataclasses.replace(start, secrets=(*start.secrets, *self.config.secret_variables))
        return settings, start, files | self._config_files(invocation)

    def _overlay(self, seen: str) -> tuple[str, Files]:
        """Where the server is to look for a model that it would find at `seen`: there, or in a directory of links to it
        but for the files that it must see otherwise. Raises LaunchError."""
        if self.local is not None and self.adapter.random_weights is not None and self.config.dummy_weights:
            return seen, {self.local: partial(self.adapter.random_weights, self.model.described(), self.config.dtype)}
        if self.local in (None, MODEL_DIR) or not self.adapter.overlays:
            return seen, {}
        view = self.directory / "model"
        files: Files = {view / path.name: f"{seen}/{path.name}" for path in self.local.iterdir()}
        for name, change in self.adapter.overlays.items():
            path = self.local / name
            try:
                files[view / name] = change(foreign_files.read_named(path) if path.is_file() else None)
            except (OSError, ValueError, *UNDECODABLE) as error:
                raise LaunchError(f"cannot use {path}: {error}.") from None
        return str(view), files

    def _settled(
        self, model: str, host: str, port: int, directory: str, version: tuple[int, ...] | None
    ) -> ServerSettings:
        """`directory`: the run's, as the server sees it."""
        return self.common(
            model=model,
            host=host,
            port=port,
            config_dir=f"{directory}/config",
            version=version,
            trace_dir=f"{directory}/{TRACES}" if self.profiled else None,
        )

    def _start(self, argv: tuple[str, ...], invocation: Invocation, port: int) -> ServerSpec:
        return ServerSpec(
            run_id="",
            backend=self.backend.name,
            argv=argv,
            env=invocation.env,
            port=port,
            log=self.directory / "server.log",
            secrets=() if self.local is not None else ("HF_TOKEN",),
        )

    def _config_files(self, invocation: Invocation) -> Files:
        return {self.directory / "config" / name: text.encode() for name, text in invocation.files.items()}


def _local(adapter: Adapter, model: ServedModel, config: Config, notes: list[str]) -> Path | None:
    """The model's directory on this host; None: the server takes it from the hub; MODEL_DIR: it will have to be there.
    Raises LaunchError."""
    if adapter.model_file:
        return _model_file(adapter, model, config)
    if directory := model.local(dummy_weights=config.dummy_weights):
        if directory.is_file():
            raise LaunchError(f"{config.kind} loads a directory, not the file {directory}; name one with --model.")
        return directory
    if not adapter.loads_from_hub and not config.dry_run:
        raise LaunchError(
            f"{config.kind} loads a model from a directory and {model.hf_id} is not on this machine; download it with "
            f"`hf download {model.hf_id}`, or name its directory with --model."
        )
    if model.spec is not None and model.spec.gated and not models.hf_token() and not config.dry_run:
        raise LaunchError(
            f"{model.hf_id} is gated: accept its licence on huggingface.co and set HF_TOKEN, or name a local directory "
            "with --model."
        )
    if not adapter.loads_from_hub:
        notes.append(
            f"{config.kind} loads from a directory: {MODEL_DIR} stands for where `hf download {model.hf_id}` puts it."
        )
        return MODEL_DIR
    if not os.environ.get("HF_TOKEN") and models.hf_token():
        notes.append("HF_TOKEN is not set: a run takes the token of your login to the hub.")
    if adapter.overlays:
        notes.append(
            f"{model.hf_id} is not on this machine, so its end token cannot be taken away: replies may end early; "
            f"`hf download {model.hf_id}` first."
        )
    return None


def _model_file(adapter: Adapter, model: ServedModel, config: Config) -> Path:
    """The one file that it serves. Raises ConfigError or LaunchError."""
    if config.dummy_weights and adapter.random_weights is not None:
        spec = model.described()
        of = hashlib.sha256(repr(spec).encode()).hexdigest()[:12]
        return models.user_cache() / "llm-dissect/random-weights" / f"{of}-{config.dtype}{adapter.model_file}"
    found = [] if model.directory is None else [model.directory]
    if found and found[0].is_dir():
        found = sorted(found[0].glob(f"*{adapter.model_file}"))
    if len(found) == 1:
        return found[0]
    raise LaunchError(
        f"{config.kind} serves one file that ends in {adapter.model_file}, and {model.name} names "
        f"{len(found) or 'none'}; give it with --model FILE{adapter.model_file}, or have one made with --dummy-weights."
    )


def _mount_model(local: Path, mounts: list[Mount]) -> str:
    """Mounts the directory and returns where a container sees it. A snapshot in the hub's cache is made of links into
    the directory two above it. Raises LaunchError for a link that leads elsewhere: no container could follow it."""
    if not local.is_dir():
        mounts.append(Mount(local, f"{CONTAINER_MODELS}/{local.name}"))
        return f"{CONTAINER_MODELS}/{local.name}"
    root = local.parent.parent if local.parent.name == "snapshots" else local
    for path in local.iterdir():
        if path.is_symlink() and not foreign_files.is_inside(path, root):
            raise LaunchError(
                f"{path} is a link out of {root}, which a container cannot follow; name a directory that holds the "
                "files themselves with --model, or use --launch process."
            )
    mounts.append(Mount(root, f"{CONTAINER_MODELS}/{root.name}"))
    return f"{CONTAINER_MODELS}/{local.relative_to(root.parent)}"


def _hub_mount(adapter: Adapter) -> Mount:
    """The hub's cache as the container sees it: with all that is beside it, unless it lies elsewhere on this host."""
    home, hub = models.hf_home(), models.hub_cache()
    if hub == home / "hub":
        return Mount(home, adapter.cache_dir, read_only=False)
    return Mount(hub, f"{adapter.cache_dir}/hub", read_only=False)


def write_files(launch: Launch, say: Callable[[str], None]) -> None:
    """Writes what the server will be shown, and makes the caches that Docker would otherwise make as root's. Raises
    LaunchError."""
    for path, content in launch.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.symlink_to(content)
        elif not path.exists():
            say(f"writing random weights to {path}")
            content(path)
    for mount in launch.start.mounts:
        if not mount.read_only:
            mount.source.mkdir(parents=True, exist_ok=True)


def _installed(config: Config, adapter: Adapter) -> Installed:
    """The installed server. Raises LaunchError when it is not installed."""
    name, python = config.kind, config.server_python or sys.executable
    program = adapter.process_command[0]
    try:
        installation = installed(adapter, config.server_python)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"--server-python {python} cannot be run: {error}.") from None
    if installation is not None:
        return installation
    if adapter.package is not None:
        raise LaunchError(
            f"{program} is not on the PATH, nor {adapter.package[0]} installed for {python}; install one of them, or "
            "use --launch docker."
        )
    if program != "{python}":
        raise LaunchError(f"{program} is not on the PATH; install {name} on this machine or use --launch docker.")
    raise LaunchError(
        f"{name} is not installed for {python}; name the interpreter that has it with --server-python, or use "
        "--launch docker."
    )
