"""The Docker engine of this machine: reached, asked what it can do, and told to pull an image. What it refuses becomes
a sentence. `docker` is imported only where it is used: a run without it does not pay for it.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.exit_codes import lacking
from backends.launch import LaunchError

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.images import Image

ENGINE_TIMEOUT_S = 120
PROGRESS_INTERVAL_S = 3.0


def problem() -> str | None:
    """Why Docker cannot be used, and what to do, as one clause; None: it can."""
    if (why := lacking("docker")) is not None:
        return why
    try:
        _client().close()
    except engine_errors() as error:
        return _why(error)
    return None


def has_nvidia() -> bool:
    """Whether the engine can give GPUs to a container. Raises LaunchError where it cannot be asked."""
    client = connect()
    try:
        info = client.info()
    except engine_errors() as error:
        raise LaunchError(f"Docker cannot be used: {_why(error)}.") from None
    devices = info.get("DiscoveredDevices") or ()
    specs = [path for folder in info.get("CDISpecDirs") or () for path in Path(folder).glob("*nvidia*")]
    return (
        "nvidia" in (info.get("Runtimes") or {})
        or any(str(device.get("ID", "")).startswith("nvidia.com/gpu") for device in devices)
        or bool(specs)
        or shutil.which("nvidia-container-runtime-hook") is not None
    )


def engine_errors() -> tuple[type[Exception], ...]:
    """What the SDK raises when the engine refuses, breaks off or is not there."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException
    from urllib3.exceptions import HTTPError

    return (DockerException, RequestException, HTTPError)


def is_gone(error: Exception) -> bool:
    """Whether the container is not there, or is just being removed by someone else."""
    return getattr(error, "status_code", None) == 404 or "removal of container" in str(error)


def reason_of(error: Exception) -> str:
    """Why the engine refused, in its own words: one line without a full stop."""
    words = " ".join(str(getattr(error, "explanation", None) or error).split())
    return (words if len(words) <= 300 else words[:297] + "...").rstrip(".")


def _client() -> DockerClient:
    import docker

    try:
        return docker.from_env(timeout=ENGINE_TIMEOUT_S)
    except ValueError as error:  # DOCKER_HOST is no address
        raise docker.errors.DockerException(str(error)) from None


def connect() -> DockerClient:
    """The engine that DOCKER_HOST names, or this machine's. Raises LaunchError."""
    if (why := lacking("docker")) is not None:
        raise LaunchError(f"Docker cannot be used: {why}.")
    try:
        return _client()
    except engine_errors() as error:
        raise LaunchError(f"Docker cannot be used: {_why(error)}.") from None


def _why(error: Exception) -> str:
    message = str(error)
    where = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if "Permission denied" in message or "PermissionError" in message:
        return (
            "this user may not talk to the engine; join its group ('sudo usermod -aG docker $USER', then log in "
            "again), or use --launch process"
        )
    if "FileNotFoundError" in message or "No such file" in message:
        return f"no engine is installed or running (there is no {where}); install or start it, or use --launch process"
    if "ConnectionRefusedError" in message or "Connection refused" in message:
        return f"the engine is not running ({where} refuses connections); start it ('sudo systemctl start docker')"
    return f"the engine at {where} does not answer as one ({reason_of(error)})"


def find_image(client: DockerClient, name: str, say: Callable[[str], None], cancelled: threading.Event) -> Image:
    """The image of that name, pulled when it is not here. Raises LaunchError."""
    from docker.errors import ImageNotFound

    try:
        try:
            return client.images.get(name)
        except ImageNotFound:
            _pull(client, name, say, cancelled)
            return client.images.get(name)
    except engine_errors() as error:
        raise _no_image(name, reason_of(error)) from None


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
    reported_at_s = time.monotonic()
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
            raise _no_image(name, reason_of(message))
        if "error" in message:
            raise _no_image(name, " ".join(str(message["error"]).split()).rstrip("."))
        progress.take(message)
        if time.monotonic() - reported_at_s >= PROGRESS_INTERVAL_S:
            reported_at_s = time.monotonic()
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
