"""A server in a Docker container: pulled, started, watched, taken down, and found again when its owner died.

One description of the container gives both the engine's call and the `docker run` line that equals it. Secrets are not
part of it: a variable given to the engine would be written to its disk and shown by `docker inspect`, so their values
lie in memory-backed files that a shell in the container reads before it becomes the server. `docker` is imported only
where it is used: a run without it does not pay for it. Works on Linux, with an engine on this machine.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import queue
import re
import shlex
import shutil
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from backends.launch import Exit, LaunchError, Mount, Start

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container as SdkContainer
    from docker.models.images import Image

LABEL = "llm-dissect.run"  # its value: the run's id
OWNER_LABEL = "llm-dissect.owner"  # host:pid:start of the process that takes the container down
ADDRESS = "127.0.0.1"
IPC_MODE = "host"  # NCCL and the servers' workers share memory; the default 64 MB are too few
CAPABILITIES = ("SYS_NICE",)  # lets NCCL place memory near a GPU
SYSCTLS = {"net.core.somaxconn": "4096"}  # a burst of connections must not be cut by the container's own limit
STOP_TIMEOUT_S = 20  # from SIGTERM to SIGKILL
LOG_LIMIT_BYTES = 20_000_000
ENGINE_TIMEOUT_S = 120
PROGRESS_INTERVAL_S = 3.0
SECRETS_ROOT = Path("/dev/shm")  # memory, never a disk
SECRETS_TARGET = "/run/llm-dissect"
_SECRETS_PREFIX = "llm-dissect-"


class _Ulimit(NamedTuple):
    name: str
    value: int  # soft and hard
    rlimit: int  # the kernel's number for it, as the engine names it in an error


ULIMITS = (_Ulimit("memlock", -1, 8), _Ulimit("stack", 67108864, 3), _Ulimit("nofile", 65535, 7))

# What the engine says when it cannot start a container -> what that means and what to do. The first that is found.
_START_FAILURES = (
    (
        r"could not select device driver|unknown or invalid runtime name: nvidia|no known GPU vendor|"
        r"nvidia-container-(?:cli|runtime)\S* (?:executable file )?not found|exec: .nvidia-container",
        "Docker cannot give GPUs to a container; install the NVIDIA Container Toolkit, run "
        "'sudo nvidia-ctk runtime configure --runtime=docker' and restart Docker",
    ),
    (
        r"unknown device|unresolvable CDI devices",
        "Docker does not know every one of the GPUs {gpus}; see which there are with nvidia-smi",
    ),
    (
        r"nvidia-container-cli: .*(?:driver|libnvidia-ml|nvml)",
        "the NVIDIA driver does not work in a container ({said}); nvidia-smi must work first",
    ),
    (
        r"port is already allocated|address already in use",
        "port {port} of 127.0.0.1 is taken; stop what listens there, or name another --port",
    ),
    (r"is already in use by container", "a container named {name} exists already; remove it with loadgen clean"),
    (r"no space left on device", "Docker's disk is full ({said}); make room with docker system prune"),
)


class Orphan(NamedTuple):
    """A container whose owner is gone."""

    id: str
    name: str
    run_id: str
    image: str
    status: str


@dataclass(frozen=True)
class _Description:
    """A container as it is to be, in the words that the engine's API and the command line have in common."""

    image: str
    command: tuple[str, ...]
    name: str
    port: int
    host_port: int | None
    env: Mapping[str, str]
    mounts: tuple[Mount, ...]
    gpu_ids: tuple[str, ...]
    run_id: str
    ulimits: tuple[_Ulimit, ...] = field(default_factory=lambda: ULIMITS)

    @classmethod
    def of(cls, start: Start) -> _Description:
        if not start.image:
            raise LaunchError("no image is named; name one with --image.")
        name = re.sub(r"[^a-zA-Z0-9_.-]", "-", f"llm-dissect-{start.backend}-{start.run_id}")
        mounts = tuple(replace(mount, source=mount.source.absolute()) for mount in start.mounts)
        return cls(
            start.image, start.argv, name, start.port, start.host_port, start.env, mounts, start.gpu_ids, start.run_id
        )

    def sdk(self) -> dict[str, Any]:
        """Arguments for `containers.create`."""
        from docker import types

        gpus = [types.DeviceRequest(device_ids=list(self.gpu_ids), capabilities=[["gpu"]])] if self.gpu_ids else None
        published = (ADDRESS,) if self.host_port is None else (ADDRESS, self.host_port)
        return {
            "image": self.image,
            "command": list(self.command),
            "name": self.name,
            "labels": {LABEL: self.run_id},
            "device_requests": gpus,
            "ipc_mode": IPC_MODE,
            "ulimits": [types.Ulimit(name=limit.name, soft=limit.value, hard=limit.value) for limit in self.ulimits],
            "cap_add": list(CAPABILITIES),
            "sysctls": dict(SYSCTLS),
            "environment": dict(self.env),
            "mounts": [
                types.Mount(mount.target, str(mount.source), type="bind", read_only=mount.read_only)
                for mount in self.mounts
            ],
            "ports": {f"{self.port}/tcp": published},
        }

    def command_line(self, secrets: Iterable[str]) -> list[str]:
        """The same for a shell. A secret is only named there: docker takes its value from its own environment."""
        words = ["docker", "run", "--detach", "--name", self.name, "--label", f"{LABEL}={self.run_id}"]
        if self.gpu_ids:
            words += ["--gpus", f'"device={",".join(self.gpu_ids)}"']  # the quotes are docker's: it splits at commas
        words += ["--ipc", IPC_MODE]
        for limit in self.ulimits:
            words += ["--ulimit", f"{limit.name}={limit.value}"]
        for capability in CAPABILITIES:
            words += ["--cap-add", capability]
        for key, value in SYSCTLS.items():
            words += ["--sysctl", f"{key}={value}"]
        for mount in self.mounts:
            words += ["--mount", _mount_words(mount)]
        for key, value in self.env.items():
            words += ["--env", f"{key}={value}"]
        for name in secrets:
            words += ["--env", name]
        host_port = "" if self.host_port is None else self.host_port
        words += ["--publish", f"{ADDRESS}:{host_port}:{self.port}"]
        return [*words, self.image, *self.command]


class Container:
    """A started container; implements backends.launch.Running. Made by `start`."""

    def __init__(
        self,
        container: SdkContainer,
        start: Start,
        facts: Mapping[str, Any],
        say: Callable[[str], None],
        secrets: Mapping[str, str],
        secrets_directory: Path | None,
    ) -> None:
        self.urls: Sequence[str] = _urls(container, start)
        self.facts: Mapping[str, Any] = facts
        self._container = container
        self._log = start.log
        self._say = say
        self._masked = [value.encode() for value in secrets.values()]
        self._secrets_directory = secrets_directory
        self._exit: Exit | None = None
        self._removed = False

    def poll(self) -> Exit | None:
        """How it ended; None while it runs. Raises LaunchError where the engine no longer answers."""
        if self._exit is None and not self._removed:
            try:
                self._container.reload()
                self._exit = _ended(self._container.attrs["State"])
            except _engine_errors() as error:
                if not _is_gone(error):
                    raise LaunchError(f"the Docker engine no longer answers: {_said(error)}.") from None
                self._exit = Exit(-9, error="somebody removed its container")
        return self._exit

    def log_tail(self, lines: int = 200) -> str:
        """The end of what it has written; after `stop`, of the log that was kept."""
        if self._removed:
            with contextlib.suppress(OSError):
                return "".join(self._log.read_text(errors="replace").splitlines(keepends=True)[-lines:])
            return ""
        with contextlib.suppress(*_engine_errors()):
            return self._without_secrets(self._container.logs(tail=lines)).decode(errors="replace")
        return ""

    def stop(self) -> None:
        """SIGTERM, SIGKILL after STOP_TIMEOUT_S; keeps the log, removes container and secrets. What it cannot do it
        says; it never raises for that."""
        try:
            if not self._removed:
                self._end()
        finally:
            if self._secrets_directory is not None:
                shutil.rmtree(self._secrets_directory, ignore_errors=True)

    def _end(self) -> None:
        with contextlib.suppress(*_engine_errors()):  # remove() kills it all the same
            self._container.stop(timeout=STOP_TIMEOUT_S)
        with contextlib.suppress(LaunchError):
            self.poll()
        self._keep_log()
        try:
            self._container.remove(force=True, v=True)
        except _engine_errors() as error:
            if not _is_gone(error):
                name = self._container.name
                self._say(f"could not remove the container {name} ({_said(error)}); run loadgen clean later.")
                return
        self._removed = True

    def _keep_log(self) -> None:
        """Writes the log, at most its last LOG_LIMIT_BYTES, from the start of a line."""
        chunks: deque[bytes] = deque()
        size = 0
        try:
            for chunk in self._container.logs(stream=True, follow=False):
                chunks.append(chunk)
                size += len(chunk)
                while size - len(chunks[0]) >= LOG_LIMIT_BYTES:
                    size -= len(chunks.popleft())
        except _engine_errors() as error:
            if not _is_gone(error):
                self._say(f"could not read the server's log: {_said(error)}.")
        log = self._without_secrets(b"".join(chunks))
        if len(log) > LOG_LIMIT_BYTES:
            log = log[-LOG_LIMIT_BYTES:].partition(b"\n")[2]
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._log.write_bytes(log)
        except OSError as error:
            self._say(f"could not keep the server's log in {self._log}: {error.strerror}.")

    def _without_secrets(self, log: bytes) -> bytes:
        for value in self._masked:
            log = log.replace(value, b"***")
        return log


def start(start: Start, say: Callable[[str], None], cancelled: threading.Event) -> Container:
    """Starts the container and returns at once, before the server in it can serve. Pulls its image when it is missing.

    Raises LaunchError, with nothing left behind.
    """
    description = _Description.of(start)
    for mount in description.mounts:
        if not mount.source.exists():
            raise LaunchError(f"there is no {mount.source} to be mounted at {mount.target}; check the path.")
    secrets = _secrets(start.secrets)
    client = _connect()
    image = _image(client, description.image, say, cancelled)
    directory = _write(secrets) if secrets else None
    try:
        extra = _reading(directory, secrets, image.attrs) if directory is not None else {}
        container, description = _run(client, description, extra, say, cancelled)
        try:
            container.reload()
            facts = {
                "container_id": container.id,
                "image": description.image,
                "image_id": image.id,
                "image_digest": next(iter(image.attrs.get("RepoDigests") or ()), None),
                "engine_version": client.version()["Version"],
                "command": shlex.join(description.command_line(start.secrets)),
            }
            return Container(container, start, facts, say, secrets, directory)
        except BaseException:
            _remove(container)
            raise
    except BaseException as error:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        if isinstance(error, _engine_errors()):
            raise _not_started(error, description) from None
        raise


def command_line(start: Start) -> list[str]:
    """The `docker run` that equals `start`, for a person to read or use. Only the label that names an owner is not
    there: a container started by hand has none, so nothing here will take it down."""
    return _Description.of(start).command_line(start.secrets)


def orphans() -> list[Orphan]:
    """Containers of ours, running or not, whose owner is gone. Raises LaunchError where Docker cannot be asked."""
    return [_orphan(container) for container in _ours(_connect()) if _is_gone_owner(_owner_of(container))]


def clean(say: Callable[[str], None]) -> int:
    """Removes orphans and the secrets that they were given; how many containers. Raises LaunchError like `orphans`."""
    for directory in SECRETS_ROOT.glob(f"{_SECRETS_PREFIX}*"):
        match = re.fullmatch(rf"{_SECRETS_PREFIX}(\d+)-(\d+)-\w+", directory.name)
        if match and _is_dead(int(match[1]), match[2]):
            shutil.rmtree(directory, ignore_errors=True)
    removed = 0
    for container in _ours(_connect()):
        owner = _owner_of(container)
        if _is_gone_owner(owner):
            try:
                container.remove(force=True, v=True)
            except _engine_errors() as error:
                if not _is_gone(error):
                    say(f"could not remove the container {container.name}: {_said(error)}.")
                    continue
            removed += 1
            say(f"removed the container {container.name} ({container.status}).")
        elif owner and not owner.startswith(f"{socket.gethostname()}:"):
            host = owner.partition(":")[0]
            say(f"left the container {container.name}: whether its owner on {host} lives cannot be seen from here.")
    return removed


def problem() -> str | None:
    """Why Docker cannot be used, and what to do, as one clause; None: it can."""
    try:
        _client().close()
    except _engine_errors() as error:
        return _why(error)
    return None


def has_nvidia() -> bool:
    """Whether the engine can give GPUs to a container. Raises LaunchError where it cannot be asked."""
    client = _connect()
    try:
        info = client.info()
    except _engine_errors() as error:
        raise LaunchError(f"Docker cannot be used: {_why(error)}.") from None
    devices = info.get("DiscoveredDevices") or ()
    specs = [path for folder in info.get("CDISpecDirs") or () for path in Path(folder).glob("*nvidia*")]
    return (
        "nvidia" in (info.get("Runtimes") or {})
        or any(str(device.get("ID", "")).startswith("nvidia.com/gpu") for device in devices)
        or bool(specs)
        or shutil.which("nvidia-container-runtime-hook") is not None
    )


def _engine_errors() -> tuple[type[Exception], ...]:
    """What the SDK raises when the engine refuses, breaks off or is not there."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException
    from urllib3.exceptions import HTTPError

    return (DockerException, RequestException, HTTPError)


def _is_gone(error: Exception) -> bool:
    """Whether the container is not there, or is just being removed by someone else."""
    return getattr(error, "status_code", None) == 404 or "removal of container" in str(error)


def _said(error: Exception) -> str:
    """What the engine said, in one line without a full stop."""
    words = " ".join(str(getattr(error, "explanation", None) or error).split())
    return (words if len(words) <= 300 else words[:297] + "...").rstrip(".")


def _client() -> DockerClient:
    import docker

    return docker.from_env(timeout=ENGINE_TIMEOUT_S)


def _connect() -> DockerClient:
    try:
        return _client()
    except _engine_errors() as error:
        raise LaunchError(f"Docker cannot be used: {_why(error)}.") from None


def _why(error: Exception) -> str:
    said = str(error)
    where = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if "Permission denied" in said or "PermissionError" in said:
        return (
            "this user may not talk to the engine; join its group ('sudo usermod -aG docker $USER', then log in "
            "again), or use --launch process"
        )
    if "FileNotFoundError" in said or "No such file" in said:
        return f"no engine is installed or running (there is no {where}); install or start it, or use --launch process"
    if "ConnectionRefusedError" in said or "Connection refused" in said:
        return f"the engine is not running ({where} refuses connections); start it ('sudo systemctl start docker')"
    return f"the engine at {where} does not answer as one ({_said(error)})"


def _image(client: DockerClient, name: str, say: Callable[[str], None], cancelled: threading.Event) -> Image:
    from docker.errors import ImageNotFound

    try:
        try:
            return client.images.get(name)
        except ImageNotFound:
            _pull(client, name, say, cancelled)
            return client.images.get(name)
    except _engine_errors() as error:
        raise _no_image(name, _said(error)) from None


def _no_image(name: str, why: str) -> LaunchError:
    return LaunchError(f"there is no image {name} here, and it cannot be pulled: {why}; name another with --image.")


def _pull(client: DockerClient, name: str, say: Callable[[str], None], cancelled: threading.Event) -> None:
    """Pulls, and says every few seconds how far it is. The engine may be silent for long, so another thread listens;
    it gives up, and with it the engine, at the first word after `cancelled`."""
    messages: queue.SimpleQueue[dict[str, Any] | Exception | None] = queue.SimpleQueue()

    def listen() -> None:
        try:
            for message in client.api.pull(name, stream=True, decode=True):
                messages.put(message)
                if cancelled.is_set():
                    return
            messages.put(None)
        except Exception as error:  # whatever it is, the one who waits must hear of it
            messages.put(error)

    say(f"pulling {name}.")
    threading.Thread(target=listen, name="docker-pull", daemon=True).start()
    progress = _Progress()
    said_at_s = time.monotonic()
    while True:
        if cancelled.is_set():
            raise LaunchError(f"the pull of {name} was broken off.")
        try:
            message = messages.get(timeout=0.2)
        except queue.Empty:
            continue
        if message is None:
            return
        if isinstance(message, Exception):
            raise _no_image(name, _said(message))
        if "error" in message:
            raise _no_image(name, " ".join(str(message["error"]).split()).rstrip("."))
        progress.take(message)
        if time.monotonic() - said_at_s >= PROGRESS_INTERVAL_S:
            said_at_s = time.monotonic()
            say(f"pulling {name}: {progress}.")


class _Progress:
    """How far a pull is, from the engine's messages. A layer's size is known once its download began."""

    def __init__(self) -> None:
        self._layers: dict[str, tuple[int, int]] = {}  # id -> bytes here, bytes in all

    def take(self, message: Mapping[str, Any]) -> None:
        layer, status = message.get("id", ""), message.get("status")
        detail = message.get("progressDetail") or {}
        if status == "Downloading" and detail.get("total"):
            self._layers[layer] = (detail.get("current", 0), detail["total"])
        elif status in ("Download complete", "Pull complete") and layer in self._layers:
            total = self._layers[layer][1]
            self._layers[layer] = (total, total)

    def __str__(self) -> str:
        here = sum(current for current, _ in self._layers.values())
        total = sum(total for _, total in self._layers.values())
        if not total:
            return "waiting for the registry"
        if here >= total:
            return f"{total / 1e6:.0f} MB are here, unpacking"
        return f"{here / 1e6:.0f} of {total / 1e6:.0f} MB ({100 * here // total}%)"


def _run(
    client: DockerClient,
    description: _Description,
    extra: Mapping[str, Any],
    say: Callable[[str], None],
    cancelled: threading.Event,
) -> tuple[SdkContainer, _Description]:
    """Creates and starts. An engine that may not raise a limit (a rootless one) starts it with its own: the description
    that comes back says with which. Raises what the SDK raises, with nothing left behind."""
    while True:
        options = description.sdk()
        options["labels"][OWNER_LABEL] = _owner()
        options["mounts"] += extra.get("mounts", [])
        container = client.containers.create(
            **{**options, **{key: value for key, value in extra.items() if key != "mounts"}}
        )
        try:
            if cancelled.is_set():
                raise LaunchError("the start was broken off.")
            container.start()
            return container, description
        except BaseException as error:
            _remove(container)
            refused = _refused_limit(error, description.ulimits)
            if refused is None:
                raise
        say(f"the Docker engine may not set the limit {refused.name} to {refused.value}; its own limit holds.")
        kept = tuple(limit for limit in description.ulimits if limit is not refused)
        description = replace(description, ulimits=kept)


def _refused_limit(error: BaseException, limits: Sequence[_Ulimit]) -> _Ulimit | None:
    """The limit that the error is about: runc gives the kernel's number, crun its name."""
    match = re.search(r"setting rlimit type (\d+)|setrlimit `?RLIMIT_(\w+)", str(error))
    if match is None:
        return None
    meant = (match[1] or match[2]).lower()
    return next((limit for limit in limits if meant in (str(limit.rlimit), limit.name)), None)


def _remove(container: SdkContainer) -> None:
    with contextlib.suppress(*_engine_errors()):
        container.remove(force=True, v=True)


def _not_started(error: Exception, description: _Description) -> LaunchError:
    said = _said(error)
    for pattern, sentence in _START_FAILURES:
        if re.search(pattern, said, re.IGNORECASE):
            words = {"gpus": ", ".join(description.gpu_ids), "port": description.host_port or description.port}
            return LaunchError(sentence.format(said=said, name=description.name, **words) + ".")
    return LaunchError(f"Docker did not start the image {description.image}: {said}.")


def _secrets(names: Iterable[str]) -> dict[str, str]:
    """Those that our environment holds. Raises LaunchError for one that no line can hold."""
    secrets = {name: os.environ[name] for name in names if os.environ.get(name)}
    for name, value in secrets.items():
        if "\n" in value:
            raise LaunchError(f"the value of {name} holds a line break; set it again without.")
    return secrets


def _write(secrets: Mapping[str, str]) -> Path:
    """A fresh directory in memory, for us and root alone, with one file a secret."""
    try:
        directory = Path(tempfile.mkdtemp(prefix=f"{_SECRETS_PREFIX}{os.getpid()}-{_started(os.getpid())}-",
                                          dir=SECRETS_ROOT))  # fmt: skip
    except OSError as error:
        raise LaunchError(
            f"cannot pass {', '.join(secrets)} to the server: {SECRETS_ROOT}: {error.strerror}."
        ) from None
    for name, value in secrets.items():
        descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.fsencode(value) + b"\n")
    return directory


def _reading(directory: Path, secrets: Iterable[str], image: Mapping[str, Any]) -> dict[str, Any]:
    """What makes the container's first process read the secrets into its environment and then become the server."""
    from docker.types import Mount as SdkMount

    reads = [f"IFS= read -r {name} <{SECRETS_TARGET}/{name} || exit 126; export {name}" for name in secrets]
    script = "; ".join([*reads, 'exec "$@"'])
    entrypoint = (image.get("Config") or {}).get("Entrypoint") or []
    return {
        "mounts": [SdkMount(SECRETS_TARGET, str(directory), type="bind", read_only=True)],
        "entrypoint": ["/bin/sh", "-c", script, "sh", *entrypoint],
    }


def _urls(container: SdkContainer, start: Start) -> tuple[str, ...]:
    """The container's own address first: Docker's proxy in front of a published port copies every byte and has a
    backlog of its own. Empty for a container that has ended already."""
    network = container.attrs["NetworkSettings"]
    addresses = [joined.get("IPAddress") for joined in (network.get("Networks") or {}).values()]
    published = (network.get("Ports") or {}).get(f"{start.port}/tcp") or []
    own = [f"http://{address}:{start.port}" for address in addresses if address]
    return (*own, *(f"http://{ADDRESS}:{port['HostPort']}" for port in published))


def _ended(state: Mapping[str, Any]) -> Exit | None:
    if state.get("Status") not in ("exited", "dead"):
        return None
    code = int(state.get("ExitCode", 0))
    killed = 128 < code <= 128 + 64  # as a shell counts: 128 + signal
    return Exit(128 - code if killed else code, bool(state.get("OOMKilled")), str(state.get("Error") or ""))


def _mount_words(mount: Mount) -> str:
    """The value of --mount: one line of CSV."""
    line = io.StringIO()
    words = ["type=bind", f"source={mount.source}", f"target={mount.target}"]
    csv.writer(line, lineterminator="").writerow([*words, "readonly"] if mount.read_only else words)
    return line.getvalue()


def _ours(client: DockerClient) -> list[SdkContainer]:
    try:
        containers: list[SdkContainer] = client.containers.list(all=True, filters={"label": LABEL}, ignore_removed=True)
    except _engine_errors() as error:
        raise LaunchError(f"Docker cannot list its containers: {_said(error)}.") from None
    return containers


def _orphan(container: SdkContainer) -> Orphan:
    return Orphan(
        container.short_id,
        container.name,
        container.labels.get(LABEL, ""),
        container.attrs["Config"]["Image"],
        container.status,
    )


def _owner() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{_started(os.getpid())}"


def _owner_of(container: SdkContainer) -> str:
    """host:pid:start; empty for a container that was started by hand."""
    return str(container.labels.get(OWNER_LABEL, ""))


def _is_gone_owner(owner: str) -> bool:
    """Whether the owner ran on this host and does no longer."""
    host, _, process = owner.partition(":")
    pid, _, started = process.partition(":")
    return host == socket.gethostname() and pid.isdigit() and _is_dead(int(pid), started)


def _is_dead(pid: int, started: str) -> bool:
    """Whether the process `pid` that began at `started` has ended; another may have its number since."""
    return _started(pid) != started


def _started(pid: int) -> str:
    """When the process began, in the kernel's ticks; "" for one that is not there or has been killed."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
