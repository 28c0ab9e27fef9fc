"""A server in a Docker container: pulled, started, watched, taken down, and found again when its owner died.

One description of the container gives both the engine's call and the `docker run` line that equals it. Secrets are not
part of it: a variable given to the engine would be written to its disk and shown by `docker inspect`, so their values
lie in memory-backed files that a shell in the container reads before it becomes the server (ownership.py). What the
engine itself is asked is in engine.py. Works on Linux, with an engine on this machine.
"""

from __future__ import annotations

import contextlib
import csv
import io
import re
import shlex
import shutil
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from backends.docker.engine import connect, engine_errors, find_image, has_nvidia, is_gone, problem, reason_of
from backends.docker.ownership import (
    LABEL,
    OWNER_LABEL,
    SECRETS_ROOT,
    Orphan,
    SecretsReader,
    clean,
    orphans,
    owner,
    reading_secrets,
    secrets_of,
    write_secrets,
)
from backends.launch import Exit, LaunchError, Mount, ServerSpec
from backends.process import masked_log
from backends.untrusted import writings

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container as SdkContainer

__all__ = [
    "LABEL", "NAME", "OWNER_LABEL", "SECRETS_ROOT", "Container", "Orphan", "clean", "command_line", "environment",
    "has_nvidia", "orphans", "place", "problem", "start",
]  # fmt: skip

NAME = "docker"
ADDRESS = "127.0.0.1"
IPC_MODE = "host"  # NCCL and the servers' workers share memory; the default 64 MB are too few
CAPABILITIES = ("SYS_NICE",)  # lets NCCL place memory near a GPU
SYSCTLS = {"net.core.somaxconn": "4096"}  # a burst of connections must not be cut by the container's own limit
STOP_TIMEOUT_S = 20  # from SIGTERM to SIGKILL
LOG_LIMIT_BYTES = 20_000_000


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
        "the NVIDIA driver does not work in a container ({reason}); nvidia-smi must work first",
    ),
    (
        r"port is already allocated|address already in use",
        "port {port} of 127.0.0.1 is taken; stop what listens there, or name another --port",
    ),
    (r"is already in use by container", "a container named {name} exists already; remove it with loadgen clean"),
    (r"no space left on device", "Docker's disk is full ({reason}); make room with docker system prune"),
)


@dataclass(frozen=True)
class Description:
    """A container as it is to be, in the words that the engine's API and the command line have in common."""

    start: ServerSpec  # with absolute mounts
    image: str
    name: str
    ulimits: tuple[_Ulimit, ...] = field(default_factory=lambda: ULIMITS)

    @classmethod
    def of(cls, start: ServerSpec) -> Description:
        if not start.image:
            raise LaunchError("no image is named; name one with --image.")
        name = re.sub(r"[^a-zA-Z0-9_.-]", "-", f"llm-dissect-{start.backend}-{start.run_id}")
        mounts = tuple(replace(mount, source=mount.source.absolute()) for mount in start.mounts)
        return cls(replace(start, mounts=mounts), start.image, name)

    def sdk(self) -> dict[str, Any]:
        """Arguments for `containers.create`."""
        from docker import types

        start = self.start
        gpus = [types.DeviceRequest(device_ids=list(start.gpu_ids), capabilities=[["gpu"]])] if start.gpu_ids else None
        published = (ADDRESS,) if start.host_port is None else (ADDRESS, start.host_port)
        return {
            "image": self.image,
            "command": list(start.argv),
            "name": self.name,
            "labels": {LABEL: start.run_id},
            "device_requests": gpus,
            "ipc_mode": IPC_MODE,
            "ulimits": [types.Ulimit(name=limit.name, soft=limit.value, hard=limit.value) for limit in self.ulimits],
            "cap_add": list(CAPABILITIES),
            "sysctls": dict(SYSCTLS),
            "environment": dict(start.env),
            "mounts": [
                types.Mount(mount.target, str(mount.source), type="bind", read_only=mount.read_only)
                for mount in start.mounts
            ],
            "ports": {f"{start.port}/tcp": published},
        }

    def command_line(self) -> list[str]:
        """The same for a shell. A secret is only named there: docker takes its value from its own environment."""
        start = self.start
        words = ["docker", "run", "--detach", "--name", self.name, "--label", f"{LABEL}={start.run_id}"]
        if start.gpu_ids:
            words += ["--gpus", f'"device={",".join(start.gpu_ids)}"']  # the quotes are docker's: it splits at commas
        words += ["--ipc", IPC_MODE]
        for limit in self.ulimits:
            words += ["--ulimit", f"{limit.name}={limit.value}"]
        for capability in CAPABILITIES:
            words += ["--cap-add", capability]
        for key, value in SYSCTLS.items():
            words += ["--sysctl", f"{key}={value}"]
        for mount in start.mounts:
            words += ["--mount", _mount_words(mount)]
        for key, value in start.env.items():
            words += ["--env", f"{key}={value}"]
        for name in start.secrets:
            words += ["--env", name]
        host_port = "" if start.host_port is None else start.host_port
        words += ["--publish", f"{ADDRESS}:{host_port}:{start.port}"]
        return [*words, self.image, *start.argv]


class Container:
    """A started container; implements backends.launch.Running. Made by `start`."""

    def __init__(
        self,
        container: SdkContainer,
        start: ServerSpec,
        facts: Mapping[str, Any],
        say: Callable[[str], None],
        secrets: Mapping[str, str],
        secrets_directory: Path | None,
    ) -> None:
        self.urls: Sequence[str] = _urls(container, start)
        self.facts: Mapping[str, Any] = facts
        self.container = container
        self._log = start.log
        self._say = say
        self._secrets = writings(secrets.values())
        self._secrets_directory = secrets_directory
        self._exit: Exit | None = None
        self._removed = False

    def poll(self) -> Exit | None:
        """How it ended; None while it runs. Raises LaunchError where the engine no longer answers."""
        if self._exit is None and not self._removed:
            try:
                self.container.reload()
                self._exit = _ended(self.container.attrs["State"])
            except engine_errors() as error:
                if not is_gone(error):
                    raise LaunchError(f"the Docker engine no longer answers: {reason_of(error)}.") from None
                self._exit = Exit(-9, error="somebody removed its container")
        return self._exit

    def log_tail(self, lines: int = 200) -> str:
        """The end of what it has written; after `stop`, of the log that was kept."""
        if self._removed:
            with contextlib.suppress(OSError):
                return "".join(self._log.read_text(errors="replace").splitlines(keepends=True)[-lines:])
            return ""
        with contextlib.suppress(*engine_errors()):
            return masked_log(self.container.logs(tail=lines), self._secrets).decode(errors="replace")
        return ""

    def stop(self) -> None:
        """SIGTERM, SIGKILL after STOP_TIMEOUT_S; keeps the log, removes container and secrets. What it cannot do it
        says, when all is done; it never raises for that."""
        failed: list[str] = []
        try:
            if not self._removed:
                self._end(failed)
        finally:
            if self._secrets_directory is not None:
                shutil.rmtree(self._secrets_directory, ignore_errors=True)
        for sentence in failed:
            self._say(sentence)

    def _end(self, failed: list[str]) -> None:
        with contextlib.suppress(*engine_errors()):  # remove() kills it all the same
            self.container.stop(timeout=STOP_TIMEOUT_S)
        with contextlib.suppress(LaunchError):
            self.poll()
        self._keep_log(failed)
        try:
            self.container.remove(force=True, v=True)
        except engine_errors() as error:
            if not is_gone(error):
                name = self.container.name
                failed.append(f"could not remove the container {name} ({reason_of(error)}); run loadgen clean later.")
                return
        self._removed = True

    def _keep_log(self, failed: list[str]) -> None:
        """Writes the log, at most its last LOG_LIMIT_BYTES, from the start of a line."""
        chunks: deque[bytes] = deque()
        size = 0
        try:
            for chunk in self.container.logs(stream=True, follow=False):
                chunks.append(chunk)
                size += len(chunk)
                while size - len(chunks[0]) >= LOG_LIMIT_BYTES:
                    size -= len(chunks.popleft())
        except engine_errors() as error:
            if not is_gone(error):
                failed.append(f"could not read the server's log: {reason_of(error)}.")
        log = masked_log(b"".join(chunks), self._secrets)
        if len(log) > LOG_LIMIT_BYTES:
            log = log[-LOG_LIMIT_BYTES:].partition(b"\n")[2]
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._log.write_bytes(log)
        except OSError as error:
            failed.append(f"could not keep the server's log in {self._log}: {error.strerror}.")


def start(start: ServerSpec, say: Callable[[str], None], cancelled: threading.Event) -> Container:
    """Starts the container and returns at once, before the server in it can serve. Pulls its image when it is missing.

    Raises LaunchError, with nothing left behind.
    """
    description = Description.of(start)
    for mount in description.start.mounts:
        if not mount.source.exists():
            raise LaunchError(f"there is no {mount.source} to be mounted at {mount.target}; check the path.")
    secrets = secrets_of(start.secrets)
    client = connect()
    image = find_image(client, description.image, say, cancelled)
    directory = write_secrets(secrets) if secrets else None
    try:
        reader = reading_secrets(directory, secrets, image.attrs) if directory is not None else None
        container, description = _run(client, description, reader, say, cancelled)
        try:
            container.reload()
            facts = {
                "container_id": container.id,
                "image": description.image,
                "image_id": image.id,
                "image_digest": next(iter(image.attrs.get("RepoDigests") or ()), None),
                "engine_version": client.version()["Version"],
                "command": shlex.join(description.command_line()),
            }
            return Container(container, start, facts, say, secrets, directory)
        except BaseException:
            _remove(container)
            raise
    except BaseException as error:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        if isinstance(error, engine_errors()):
            raise not_started(error, description) from None
        raise


def command_line(start: ServerSpec) -> list[str]:
    """The `docker run` that equals `start`, for a person to read or use. Only the label that names an owner is not
    there: a container started by hand has none, so nothing here will take it down."""
    return Description.of(start).command_line()


def place(start: ServerSpec) -> str:
    """Where the server is to run, for a person."""
    return f"Docker ({start.image})"


def environment() -> dict[str, str]:
    """Nothing: a container gets what `ServerSpec.env` holds."""
    return {}


def _run(
    client: DockerClient,
    description: Description,
    reader: SecretsReader | None,
    say: Callable[[str], None],
    cancelled: threading.Event,
) -> tuple[SdkContainer, Description]:
    """Creates and starts. An engine that may not raise a limit (a rootless one) starts it with its own: the description
    that comes back says with which. Raises what the SDK raises, with nothing left behind."""
    while True:
        options = description.sdk()
        options["labels"][OWNER_LABEL] = owner()
        if reader is not None:
            options["mounts"].append(reader.mount)
            options["entrypoint"] = reader.entrypoint
        container = client.containers.create(**options)
        try:
            if cancelled.is_set():
                raise LaunchError("the start was broken off.")
            container.start()
            return container, description
        except BaseException as error:
            _remove(container)
            refused = refused_limit(error, description.ulimits)
            if refused is None:
                raise
        say(f"the Docker engine may not set the limit {refused.name} to {refused.value}; its own limit holds.")
        kept = tuple(limit for limit in description.ulimits if limit is not refused)
        description = replace(description, ulimits=kept)


def refused_limit(error: BaseException, limits: Sequence[_Ulimit]) -> _Ulimit | None:
    """The limit that the error is about: runc gives the kernel's number, crun its name."""
    match = re.search(r"setting rlimit type (\d+)|setrlimit `?RLIMIT_(\w+)", str(error))
    if match is None:
        return None
    meant = (match[1] or match[2]).lower()
    return next((limit for limit in limits if meant in (str(limit.rlimit), limit.name)), None)


def _remove(container: SdkContainer) -> None:
    with contextlib.suppress(*engine_errors()):
        container.remove(force=True, v=True)


def not_started(error: Exception, description: Description) -> LaunchError:
    reason, start = reason_of(error), description.start
    for pattern, sentence in _START_FAILURES:
        if re.search(pattern, reason, re.IGNORECASE):
            words = {"gpus": ", ".join(start.gpu_ids or ()), "port": start.host_port or start.port}
            return LaunchError(sentence.format(reason=reason, name=description.name, **words) + ".")
    return LaunchError(f"Docker did not start the image {description.image}: {reason}.")


def _urls(container: SdkContainer, start: ServerSpec) -> tuple[str, ...]:
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
