"""What will be started: from options, the model and this machine's GPUs to one `Start`, in full and before it begins.

`--dry-run`, `loadgen compose` and the run itself take the same `Launch`, so what is shown is what would run.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import backends
from backends import gpus
from backends.catalog import DTYPE_BYTES
from backends.launch import Adapter, Invocation, LaunchError, Mount, Settings, Start, version_in
from backends.protocol import Backend
from loadgen import models
from loadgen.config import Config, ConfigError
from loadgen.models import Model

ASSUMED_GPU_BYTES = 80 << 30  # a dry run where there is no GPU
USUAL_MODEL_LEN = 4096
GIB = 1 << 30

CONTAINER_CONFIG = "/llm-dissect"  # where a container sees the files that are written for it
CONTAINER_MODELS = "/models"

_FIND_MODULE = """
import importlib.metadata as m, importlib.util as u, sys
name = sys.argv[1]
if u.find_spec(name) is None: sys.exit(1)
dists = m.packages_distributions().get(name, [])
print(m.version(dists[0]) if dists else "")
"""

Files = dict[Path, bytes | str]  # to be there before it starts: content, or where a link points


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A server about to be started. `notes`: what a user should know about it, one sentence each."""

    how: str  # docker or process
    backend: Backend
    adapter: Adapter
    model: Model
    settings: Settings
    start: Start
    files: Files
    inventory: gpus.Inventory
    gpu_indices: tuple[int, ...]
    p2p: gpus.P2pDecision
    notes: tuple[str, ...]

    @property
    def launcher(self) -> Any:
        """The module that starts it: backends.docker or backends.process."""
        return importlib.import_module(f"backends.{self.how}")

    @property
    def title(self) -> str:
        where = f"Docker ({self.start.image})" if self.how == "docker" else "a process"
        cards = f", GPUs {', '.join(map(str, self.gpu_indices))}" if self.gpu_indices else ""
        p2p = f", P2P {'on' if self.p2p.enabled else 'off'} ({self.p2p.reason})" if len(self.gpu_indices) > 1 else ""
        return f"{self.backend.name} with {self.model.name} in {where}, tensor parallel {self.settings.tp}{cards}{p2p}"

    def command_line(self) -> str:
        """The equivalent command for a shell; secrets appear by name only."""
        return shlex.join(self.launcher.command_line(self.start))

    def facts(self) -> dict[str, Any]:
        """What the manifest says about it before it runs."""
        chosen = [gpu for gpu in self.inventory.gpus if gpu.index in self.gpu_indices]
        return {
            "launch": self.how,
            "command": self.command_line(),
            "version": ".".join(map(str, self.settings.version)) if self.settings.version else None,
            "image": self.start.image,
            "model": self.settings.model,
            "tensor_parallel": self.settings.tp,
            "dtype": self.settings.dtype,
            "max_model_len": self.settings.max_model_len,
            "max_running": self.settings.max_running,
            "memory_ratio": self.settings.memory_ratio,
            "gpus": [{"index": gpu.index, "name": gpu.name, "memory_bytes": gpu.memory_bytes} for gpu in chosen],
            "driver": self.inventory.driver,
            "p2p": {
                "enabled": self.p2p.enabled,
                "reason": self.p2p.reason,
                "matrix": [list(row) for row in self.inventory.p2p],
            },
            "notes": list(self.notes),
        }


def plan_launch(config: Config, directory: Path, run_id: str, inventory: gpus.Inventory | None = None) -> Launch:
    """Decides everything about the server. Raises ConfigError (options) or LaunchError (this machine).

    `directory`: the run's, where the server's log and files go. `inventory`: the GPUs (default: those of this machine).
    """
    backend = backends.get(config.kind)
    adapter = backend.adapter
    if adapter is None:
        raise ConfigError(f"loadgen cannot start a '{backend.name}' server; give --url, or --launch embedded.")
    if config.dtype not in adapter.dtypes:
        raise ConfigError(f"{backend.name} has no --dtype {config.dtype}; it has {', '.join(adapter.dtypes)}.")
    if config.dummy_weights and not adapter.dummy_weights:
        raise ConfigError(f"{backend.name} cannot make --dummy-weights; only vllm can.")
    model = models.find(config.model or "7b")
    length = _model_length(config, model)
    if inventory is None:
        inventory = gpus.read()
    notes: list[str] = []
    pool = _pool(config, inventory, notes)
    tp = _tensor_parallel(config, model, length, pool, notes)
    chosen = tuple(gpu.index for gpu in pool[:tp])
    p2p = gpus.decide_p2p(config.p2p, inventory, chosen if inventory.gpus else ())  # assumed cards have no driver
    settings = Settings(
        model=model.name,
        served_name=model.name,
        tp=tp,
        dtype=config.dtype,
        max_model_len=length,
        max_running=config.max_running,
        max_requests=max(config.max_running, config.requests or 0, config.concurrency or 0),
        memory_ratio=config.memory_ratio,
        seed=config.seed,
        dummy_weights=config.dummy_weights,
        p2p=p2p.enabled,
        host="",
        port=0,
        config_dir="",
        extra=config.server_arg,
    )
    local = _local(adapter, model, config, notes)
    draft = _Draft(config, backend, adapter, model.hf_id or "", local, settings, directory.absolute())
    settings, start, files = draft.in_docker() if config.where == "docker" else draft.as_process()
    start = dataclasses.replace(start, run_id=run_id, gpu_ids=tuple(str(index) for index in chosen))
    return Launch(
        how=config.where,
        backend=backend,
        adapter=adapter,
        model=model,
        settings=settings,
        start=start,
        files=files,
        inventory=inventory,
        gpu_indices=chosen,
        p2p=p2p,
        notes=tuple(notes),
    )


def _model_length(config: Config, model: Model) -> int:
    needed = config.input_tokens + config.output_tokens
    limit = model.max_position
    # One more than needed where there is room: TGI counts a begin-of-sequence token.
    length = config.max_model_len or min(limit or USUAL_MODEL_LEN, max(USUAL_MODEL_LEN, needed + 1))
    if limit is not None and length > limit:
        raise ConfigError(f"--max-model-len is {length} and {model.name} ends at {limit} tokens.")
    if config.dataset is None and needed > length:
        raise ConfigError(
            f"{config.input_tokens} input and {config.output_tokens} output tokens are more than "
            f"{'--max-model-len' if config.max_model_len else model.name + ' takes'} ({length}); lower them."
        )
    return length


def _pool(config: Config, inventory: gpus.Inventory, notes: list[str]) -> tuple[gpus.Gpu, ...]:
    """The GPUs that may be used; empty for a server without. Raises ConfigError or LaunchError."""
    if config.gpus == "none":
        return ()
    ids = None if config.gpus is None else [word.strip() for word in config.gpus.split(",") if word.strip()]
    try:
        indices = gpus.choose(inventory, ids)
    except gpus.GpuError as error:
        raise ConfigError(str(error)) from None
    if indices:
        by_index = {gpu.index: gpu for gpu in inventory.gpus}
        return tuple(by_index[index] for index in indices)
    if not config.dry_run:
        raise LaunchError(
            f"there is no GPU for the server ({inventory.problem or 'none is visible'}); run this on a GPU machine, "
            "see what would run with --dry-run, or say --gpus none for a server that needs none."
        )
    if config.tp is None:
        notes.append("no GPU here: tensor parallelism is for 80 GiB cards; name another with --tp.")
    return tuple(
        gpus.Gpu(index=index, name="assumed", uuid="", memory_bytes=ASSUMED_GPU_BYTES, used_bytes=0)
        for index in range(8)
    )


def _tensor_parallel(config: Config, model: Model, length: int, pool: tuple[gpus.Gpu, ...], notes: list[str]) -> int:
    """How many GPUs share the model. Raises ConfigError when they are too few or cannot hold it."""
    asked = None if config.tp is None else len(pool) if config.tp == "all" else int(config.tp)
    if not pool:
        return asked or 1
    if asked is not None and asked > len(pool):
        raise ConfigError(f"--tp {asked} needs {asked} GPUs and there {_are(len(pool))} to use; lower it.")
    spec = model.spec
    if spec is None:
        notes.append(f"the size of {model.name} is not known here: whether it fits will show when it starts.")
        return asked or 1
    memories = [gpu.memory_bytes for gpu in pool if gpu.memory_bytes is not None]
    if not memories:
        return asked or 1
    usable = min(memories) * config.memory_ratio
    fits = spec.smallest_tp(config.dtype, length, usable, at_most=len(pool))
    tp = asked or fits
    if tp is not None and not spec.tensor_parallel(tp):
        raise ConfigError(f"{model.name} has {spec.heads} attention heads, which --tp {tp} does not divide.")
    if tp is not None and spec.serving_bytes(config.dtype, tp, length) <= usable:
        return tp
    tp = tp or len(pool)
    missing = tp * (spec.serving_bytes(config.dtype, tp, length) - usable)
    raise LaunchError(
        f"{model.name} in {config.dtype} does not fit: {missing / 1e9:.1f} GB are missing on {tp} x "
        f"{pool[0].name} ({usable / GIB:.0f} GiB of each may be used); {_what_fits(config, spec, length, usable, tp)}."
    )


def _are(count: int) -> str:
    return f"is {count}" if count == 1 else f"are {count}"


def _what_fits(config: Config, spec: Any, length: int, usable: float, tp: int) -> str:
    enough = spec.smallest_tp(config.dtype, length, usable)
    ways = []
    if enough is not None:
        ways.append(f"--tp {enough} would fit")
    for dtype in ("float16",) if DTYPE_BYTES[config.dtype] > 2 else ():
        smaller = spec.smallest_tp(dtype, length, usable)
        if smaller is not None and smaller <= tp:
            ways.append(f"--dtype {dtype} would fit on {smaller}")
    return " and ".join(ways) or "it needs larger GPUs"


@dataclass(frozen=True)
class _Draft:
    """A launch but for where the server finds its model and its files: in a container, or as a process of this machine.

    `local`: the model's directory on this host; None: the server takes `hf_id` from the hub.
    """

    config: Config
    backend: Backend
    adapter: Adapter
    hf_id: str
    local: Path | None
    settings: Settings
    directory: Path

    def in_docker(self) -> tuple[Settings, Start, Files]:
        adapter, image = self.adapter, self.config.image or self.adapter.image
        mounts: list[Mount] = []
        seen = self.hf_id
        if self.local is not None:
            seen = _mount_model(self.local, mounts)
        else:
            mounts.append(Mount(models.hf_home(), adapter.cache_dir, read_only=False))
        seen, files = self._overlay(seen)
        if files:
            mounts.append(Mount(self.directory / "model", seen := f"{CONTAINER_CONFIG}/model"))
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "llm-dissect"
        mounts += [Mount(cache / name, target, read_only=False) for name, target in adapter.caches.items()]
        settings = self._settled(seen, "0.0.0.0", adapter.port, f"{CONTAINER_CONFIG}/config", version_in(image))
        invocation = adapter.invoke(settings)
        if invocation.files:
            mounts.append(Mount(self.directory / "config", settings.config_dir))
        argv = (*adapter.image_command, *invocation.arguments)
        start = dataclasses.replace(
            self._start(argv, invocation, adapter.port), image=image, host_port=self.config.port, mounts=tuple(mounts)
        )
        return settings, start, files | self._config_files(invocation)

    def as_process(self) -> tuple[Settings, Start, Files]:
        from backends import process

        python = self.config.server_python or sys.executable
        version = None if self.config.dry_run else _installed(self.backend.name, self.adapter, python)
        seen, files = self._overlay(str(self.local or self.hf_id))
        settings = self._settled(
            seen, "127.0.0.1", self.config.port or process.free_port(), str(self.directory / "config"), version
        )
        invocation = self.adapter.invoke(settings)
        command = tuple(python if word == "{python}" else word for word in self.adapter.process_command)
        start = self._start((*command, *invocation.arguments), invocation, settings.port)
        return settings, start, files | self._config_files(invocation)

    def _overlay(self, seen: str) -> tuple[str, Files]:
        """Where the server is to look for a model that it would find at `seen`: there, or in a directory of links to it
        but for the files that it must see otherwise. Raises LaunchError."""
        if self.local is None or not self.adapter.overlays:
            return seen, {}
        view = self.directory / "model"
        files: Files = {view / path.name: f"{seen}/{path.name}" for path in self.local.iterdir()}
        for name, change in self.adapter.overlays.items():
            path = self.local / name
            try:
                files[view / name] = change(path.read_bytes() if path.is_file() else None)
            except (OSError, ValueError) as error:
                raise LaunchError(f"cannot use {path}: {error}.") from None
        return str(view), files

    def _settled(self, model: str, host: str, port: int, config_dir: str, version: tuple[int, ...] | None) -> Settings:
        return msgspec.structs.replace(
            self.settings, model=model, host=host, port=port, config_dir=config_dir, version=version
        )

    def _start(self, argv: tuple[str, ...], invocation: Invocation, port: int) -> Start:
        return Start(
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


def _local(adapter: Adapter, model: Model, config: Config, notes: list[str]) -> Path | None:
    """The model's directory on this host; None: the server takes it from the hub. Raises LaunchError."""
    if model.directory is not None and (model.has_weights or config.dummy_weights or model.hf_id is None):
        return model.directory
    if not adapter.loads_from_hub and not config.dry_run:
        raise LaunchError(
            f"{config.kind} loads a model from a directory and {model.hf_id} is not on this machine; download it with "
            f"`hf download {model.hf_id}`, or name its directory with --model."
        )
    if model.spec is not None and model.spec.gated and not models.hf_token_known() and not config.dry_run:
        raise LaunchError(
            f"{model.hf_id} is gated: accept its licence on huggingface.co and set HF_TOKEN, or name a local directory "
            "with --model."
        )
    if not adapter.loads_from_hub:
        notes.append(f"{config.kind} loads from a directory: `hf download {model.hf_id}` must have put it there.")
    elif adapter.overlays:
        notes.append(
            f"{model.hf_id} is not on this machine, so its end token cannot be taken away: replies may end early; "
            f"`hf download {model.hf_id}` first."
        )
    return None


def _mount_model(local: Path, mounts: list[Mount]) -> str:
    """Mounts the directory and returns where a container sees it. A snapshot in the hub's cache is made of links into
    the directory two above it."""
    root = local.parent.parent if local.parent.name == "snapshots" else local
    mounts.append(Mount(root, f"{CONTAINER_MODELS}/{root.name}"))
    return f"{CONTAINER_MODELS}/{local.relative_to(root.parent)}"


def write_files(launch: Launch) -> None:
    """Writes what the server will be shown, and makes the caches that Docker would otherwise make as root's."""
    for path, content in launch.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)
    for mount in launch.start.mounts:
        if not mount.read_only:
            mount.source.mkdir(parents=True, exist_ok=True)


def _installed(name: str, adapter: Adapter, python: str) -> tuple[int, ...] | None:
    """The installed server's version, as far as it tells. Raises LaunchError when it is not installed."""
    program = adapter.process_command[0]
    if program != "{python}":
        if shutil.which(program) is None:
            raise LaunchError(f"{program} is not on the PATH; install {name} on this machine or use --launch docker.")
        return None
    module = adapter.process_command[2].partition(".")[0]
    try:
        found = subprocess.run([python, "-c", _FIND_MODULE, module], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"--server-python {python} cannot be run: {error}.") from None
    if found.returncode != 0:
        raise LaunchError(
            f"{module} is not installed for {python}; name the interpreter that has it with --server-python, or use "
            "--launch docker."
        )
    return version_in(found.stdout)
