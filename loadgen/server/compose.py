"""A compose file for the server that `loadgen run` would start in Docker, made from the same `Launch`.

Only text comes out; nothing is started. Files that a run would write for its server are inline in it, and paths under
the user's home begin with ${HOME}, so that the file can be kept and given to others. Values of secrets are never in it.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from backends import docker, gpus
from backends.exit_codes import lacking
from backends.launch import LaunchError, Mount
from backends.untrusted import escaped, printable
from loadgen.config import Config, ConfigError
from loadgen.server.launch import MODEL_DIR, Launch, plan_launch

HOST_PORT = 8000  # where --port names no other

_RUN_DIRECTORY = Path("/run-directory")  # what a run would put there is written into the compose file instead

_WORD = re.compile(r"(?:--?|/)?[A-Za-z][\w./-]+", re.ASCII)  # PyYAML quotes those that mean something, such as "yes"
_LINES = re.compile(r"(?:[!-~](?:[ -~]*[!-~])?\n){2,}")

_Node: TypeAlias = "Mapping[str, _Node] | Sequence[_Node] | str | int | bool"


def compose(config: Config, inventory: gpus.Inventory | None = None) -> str:
    """The compose file for these options. Raises ConfigError or LaunchError as a run with them would.

    Works without GPUs: then as many are reserved as a dry run assumes. `inventory`: the GPUs (default: this machine's).
    """
    if config.where != "docker":
        raise ConfigError(
            "a compose file is for a server in Docker; name a --backend or a --model, and neither --url nor another "
            "--launch."
        )
    if inventory is None:
        inventory = gpus.read()
    launch = plan_launch(dataclasses.replace(config, dry_run=True), _RUN_DIRECTORY, "", inventory)
    volumes = [_volume(launch, mount) for mount in _mounts(launch)]
    model_dir = any(mount.source == MODEL_DIR for mount in launch.start.mounts)
    assumed = config.gpus is None and not gpus.choose(inventory, None)
    contents = {path: text.decode() for path, text in sorted(launch.files.items()) if isinstance(text, bytes)}
    service: dict[str, _Node] = {
        "image": _literal(str(launch.start.image)),
        "command": [_literal(word) for word in launch.start.argv],
        "environment": [*(_literal(f"{name}={value}") for name, value in launch.start.env.items()),
                        *launch.start.secrets],
        "ports": [f"{docker.ADDRESS}:{launch.start.host_port or HOST_PORT}:{launch.start.port}"],
        "volumes": volumes,
        "configs": [{"source": path.name, "target": _literal(_in_container(launch, path))} for path in contents],
        "ipc": docker.IPC_MODE,
        "ulimits": {limit.name: limit.value for limit in docker.ULIMITS},
        "cap_add": list(docker.CAPABILITIES),
        "sysctls": dict(docker.SYSCTLS),
        "deploy": _reservation(launch.start.gpu_ids or (), assumed),
    }  # fmt: skip
    document: dict[str, _Node] = {
        "name": f"llm-dissect-{launch.backend.name}",
        "services": {launch.backend.name: {key: value for key, value in service.items() if value}},
    }
    if contents:
        document["configs"] = {path.name: {"content": _literal(text)} for path, text in contents.items()}
    header = [f"# {printable(line, 2000)}" for line in _header(config, launch, assumed, model_dir, bool(contents))]
    return "\n".join([*header, "", as_yaml(document)])


def _mounts(launch: Launch) -> Iterator[Mount]:
    """What exists on this host: the mounts, and in place of the links in the run directory what they lead to."""
    for mount in launch.start.mounts:
        if not mount.source.is_relative_to(_RUN_DIRECTORY):
            yield mount
    for path, content in sorted(launch.files.items()):
        if isinstance(content, str):
            yield Mount(_on_host(launch, content), _in_container(launch, path))


def _in_container(launch: Launch, path: Path) -> str:
    """Where the container sees a path of this host."""
    mount = next(mount for mount in launch.start.mounts if path.is_relative_to(mount.source))
    return f"{mount.target}/{path.relative_to(mount.source)}"


def _on_host(launch: Launch, target: str) -> Path:
    """What on this host the container sees there."""
    mount = next(mount for mount in launch.start.mounts if Path(target).is_relative_to(mount.target))
    return mount.source / Path(target).relative_to(mount.target)


def _volume(launch: Launch, mount: Mount) -> _Node:
    """Docker is not to make a directory that is missing: it would be empty, and root's."""
    source = _home_relative(mount.source)
    if mount.source == MODEL_DIR:  # who starts it says which that is
        source = "${MODEL_DIR:?name the directory that holds " + str(launch.model.hf_id) + "}"
    return {"type": "bind", "source": source, "target": _literal(mount.target), "read_only": mount.read_only,
            "bind": {"create_host_path": False}}  # fmt: skip


def _home_relative(path: Path, home: str = "${HOME}") -> str:
    if path.is_relative_to(Path.home()):
        return f"{home}/{_literal(str(path.relative_to(Path.home())))}"
    return _literal(str(path))


def _literal(text: str) -> str:
    """Text that compose is to take as it is: it would replace variables."""
    return text.replace("$", "$$")


def _reservation(gpu_ids: Sequence[str], assumed: bool) -> dict[str, _Node]:
    if not gpu_ids:
        return {}
    which: dict[str, _Node] = {"count": len(gpu_ids)} if assumed else {"device_ids": list(gpu_ids)}
    device: dict[str, _Node] = {"driver": "nvidia", **which, "capabilities": ["gpu"]}
    return {"resources": {"reservations": {"devices": [device]}}}


def _header(config: Config, launch: Launch, assumed: bool, model_dir: bool, configs: bool) -> Iterator[str]:
    backend, port = launch.backend.name, launch.start.host_port or HOST_PORT
    yield f"{backend} with {launch.model.name}, as `loadgen run` starts it. Made by: {_command(config)}"
    yield from (f"note: {note}" for note in launch.notes)
    if launch.settings.tp > 1:
        if config.p2p == "auto" and (assumed or not launch.inventory.gpus):
            yield "P2P between the GPUs is on, which no GPU here could tell; make it with --p2p off for GPUs without."
        else:
            yield f"P2P between the GPUs is {'on' if launch.p2p.enabled else 'off'}: {launch.p2p.reason}."
    if model_dir:
        yield "MODEL_DIR must name that directory, with the files themselves in it, not links: add --local-dir DIR."
    for name in launch.start.secrets:
        yield f"{name} is taken from the environment of whoever starts it; not set there, it is not set."
    if configs:
        yield "Needs Docker Compose 2.23.1 or newer, for the content of configs."
    made = [_home_relative(mount.source, "~") for mount in launch.start.mounts if not mount.read_only]
    if made:
        yield f"Directories that must be there: mkdir -p {' '.join(made)}"
    yield f"When it is up: loadgen run --backend {backend} --url http://{docker.ADDRESS}:{port}"


def _command(config: Config) -> str:
    """The command that makes this file: every option that is not as by default."""
    words = ["loadgen", "compose"]
    for field in dataclasses.fields(config):
        value, flag = getattr(config, field.name), "--" + field.name.replace("_", "-")
        if field.name == "dry_run" or value == field.default:
            continue
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, tuple):
            words += [f"{flag}={item}" for item in value]
        else:
            words += [flag, _home_relative(Path(value), "~") if Path(str(value)).is_absolute() else str(value)]
    return shlex.join(words)


def as_yaml(document: Mapping[str, _Node]) -> str:
    """In block style, in the order of the document, each string on one line or, of several lines, as a block. A string
    is quoted unless it is a plain word, so that YAML 1.1 and 1.2 read the same, and what does not print is escaped.
    Raises LaunchError where there is no YAML package."""
    if (why := lacking("yaml")) is not None:
        raise LaunchError(f"no compose file can be written: {why}.")
    import yaml

    class Dumper(yaml.SafeDumper):
        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, indentless=False)  # sequences too

        def ignore_aliases(self, data: object) -> bool:
            return True

    def string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        style = None if _WORD.fullmatch(text) else "|" if _LINES.fullmatch(text) else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)

    Dumper.add_representer(str, string)
    text: str = yaml.dump(document, Dumper=Dumper, sort_keys=False, width=math.inf, allow_unicode=True)
    return "\n".join(map(escaped, text.split("\n")))
