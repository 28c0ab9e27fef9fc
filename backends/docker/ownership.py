"""Whose a container is: the process that is to take it down, the secrets that it lent to it, and what is left of both
when that process died. Secrets lie in memory-backed files that only the container's first process is to read.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from backends.docker.engine import connect, engine_errors, is_gone, reason_of
from backends.launch import LaunchError

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container as SdkContainer
    from docker.types import Mount as SdkMount

LABEL = "llm-dissect.run"  # its value: the run's id
OWNER_LABEL = "llm-dissect.owner"  # of the process that takes the container down, see `owner`
SECRETS_ROOT = Path("/dev/shm")  # memory, never a disk
SECRETS_TARGET = "/run/llm-dissect"
_SECRETS_PREFIX = "llm-dissect-"


class Orphan(NamedTuple):
    """A container whose owner is gone."""

    id: str
    name: str
    run_id: str
    image: str
    status: str


def orphans() -> list[Orphan]:
    """Containers of ours, running or not, whose owner is gone. Raises LaunchError where Docker cannot be asked."""
    return [_orphan(container) for container in _ours(connect()) if _is_gone_owner(_owner_of(container))]


def clean(say: Callable[[str], None]) -> int:
    """Removes orphans and the secrets that they were given; how many containers. Raises LaunchError like `orphans`, and
    at the end when one of them could not be removed."""
    for directory in SECRETS_ROOT.glob(f"{_SECRETS_PREFIX}*"):
        match = re.fullmatch(rf"{_SECRETS_PREFIX}(\d+)-(\d{{1,9}})-(\d+)-\w+", directory.name, re.ASCII)
        if match and match[1] == _namespace() and is_dead(int(match[2]), match[3]):
            shutil.rmtree(directory, ignore_errors=True)
    removed = 0
    stuck: list[str] = []
    for container in _ours(connect()):
        owner = _owner_of(container)
        if _is_gone_owner(owner):
            try:
                container.remove(force=True, v=True)
            except engine_errors() as error:
                if not is_gone(error):
                    stuck.append(f"{container.name} ({reason_of(error)})")
                    continue
            removed += 1
            say(f"removed the container {container.name} ({container.status}).")
        elif owner and not owner.startswith(_here()):
            host, _, place = owner.partition(":")
            where = f"on {host}" if host != socket.gethostname() else f"in the PID namespace {place.partition(':')[0]}"
            say(
                f"left the container {container.name}: whether its owner {where} lives cannot be seen from here; run "
                f"loadgen clean there, or docker rm -f {container.name}."
            )
    if stuck:
        raise LaunchError(f"could not remove {', '.join(stuck)}; see whether the engine is well, and run it again.")
    return removed


def secrets_of(names: Iterable[str]) -> dict[str, str]:
    """Those that our environment holds. Raises LaunchError for one that no line can hold."""
    secrets = {name: os.environ[name] for name in names if os.environ.get(name)}
    for name, value in secrets.items():
        if "\n" in value:
            raise LaunchError(f"the value of {name} holds a line break; set it again without.")
    return secrets


def write_secrets(secrets: Mapping[str, str]) -> Path:
    """A fresh directory in memory, for us and root alone, with one file a secret."""
    try:
        directory = Path(tempfile.mkdtemp(prefix=_SECRETS_PREFIX + "-".join(_myself()) + "-", dir=SECRETS_ROOT))
    except OSError as error:
        raise LaunchError(
            f"cannot pass {', '.join(secrets)} to the server: {SECRETS_ROOT}: {error.strerror}."
        ) from None
    for name, value in secrets.items():
        descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.fsencode(value) + b"\n")
    return directory


class SecretsReader(NamedTuple):
    """What makes a container's first process read secrets into its environment and then become the server."""

    mount: SdkMount
    entrypoint: list[str]


def reading_secrets(directory: Path, secrets: Iterable[str], image: Mapping[str, Any]) -> SecretsReader:
    """The reader of the secrets in `directory`, before the entry point of `image` (as the engine describes it)."""
    from docker.types import Mount as SdkMount

    reads = [f"IFS= read -r {name} <{SECRETS_TARGET}/{name} || exit 126; export {name}" for name in secrets]
    script = "; ".join([*reads, 'exec "$@"'])
    entrypoint = (image.get("Config") or {}).get("Entrypoint") or []
    mount = SdkMount(SECRETS_TARGET, str(directory), type="bind", read_only=True)
    return SecretsReader(mount, ["/bin/sh", "-c", script, "sh", *entrypoint])


def _ours(client: DockerClient) -> list[SdkContainer]:
    try:
        containers: list[SdkContainer] = client.containers.list(all=True, filters={"label": LABEL}, ignore_removed=True)
    except engine_errors() as error:
        raise LaunchError(f"Docker cannot list its containers: {reason_of(error)}.") from None
    return containers


def _orphan(container: SdkContainer) -> Orphan:
    return Orphan(
        container.short_id,
        container.name,
        container.labels.get(LABEL, ""),
        container.attrs["Config"]["Image"],
        container.status,
    )


def owner() -> str:
    """This process, so that it is known again: host:PID namespace:pid:start. A number of a process means something only
    within a namespace, and hosts of the same name may have several."""
    return ":".join((socket.gethostname(), *_myself()))


def _myself() -> tuple[str, str, str]:
    return _namespace(), str(os.getpid()), began(os.getpid()) or ""


def _here() -> str:
    return f"{socket.gethostname()}:{_namespace()}:"


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        return "0"


def _owner_of(container: SdkContainer) -> str:
    """What `owner` said; empty for a container that was started by hand."""
    return str(container.labels.get(OWNER_LABEL, ""))


def _is_gone_owner(owner: str) -> bool:
    """Whether the owner ran here and does no longer."""
    process = re.fullmatch(re.escape(_here()) + r"(\d{1,9}):(\d+)", owner, re.ASCII)
    return process is not None and is_dead(int(process[1]), process[2])


def is_dead(pid: int, started: str) -> bool:
    """Whether the process `pid` that began at `started` has surely ended; another may have its number since. One that
    cannot be looked at (another user's under hidepid) may live."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return began(pid) not in (None, started)


def began(pid: int) -> str | None:
    """When the process began, in the kernel's ticks; "" for one that has been killed; None: it cannot be seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]
