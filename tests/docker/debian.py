"""Images made without a registry: Debian's own files, unpacked by debootstrap and put straight into the engine.

Needs Debian, root or sudo, and a Docker engine (engine.sh).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import docker

ROOT = Path(__file__).resolve().parent.parent.parent
SUITE, PYTHON = "bookworm", "python3.11"


class ImageError(Exception):
    """An image cannot be made. One sentence."""


def check_room(directory: str, need_bytes: float) -> None:
    """Raises ImageError where the engine's directory has less than that free."""
    while not Path(directory).is_dir():  # an engine elsewhere, or one that hides it
        directory = os.path.dirname(directory)  # noqa: PTH120
    if (free := shutil.disk_usage(directory).free) < need_bytes:
        raise ImageError(
            f"the image needs {need_bytes / 1e9:.0f} GB in {directory}, which has {free / 1e9:.1f} GB free; make room."
        )


def unpack(directory: Path, packages: str) -> None:
    """Debian with these packages, in `directory`; nothing to do where that is there. Raises ImageError."""
    if directory.exists():
        return
    if shutil.which("debootstrap", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        if shutil.which("apt-get") is None:
            raise ImageError("debootstrap is not installed, and this is no Debian; install it.")
        _run("apt-get", "-qq", "update")
        _run("apt-get", "-qq", "install", "--yes", "--no-install-recommends", "debootstrap")
    print(f"unpacking Debian {SUITE} into {directory.relative_to(ROOT)}", file=sys.stderr)
    part = directory.with_suffix(".part")
    _run("rm", "-rf", str(part))
    part.parent.mkdir(exist_ok=True)
    _run("debootstrap", "--variant=minbase", f"--include={packages}", SUITE, str(part))
    _run("mv", str(part), str(directory))


def load(
    client: docker.DockerClient,
    name: str,
    directory: Path,
    changes: Sequence[str],
    options: Sequence[str] = (),
    files: Sequence[str] = (),
) -> None:
    """One archive of all files of `directory`, straight into the engine. options, files: more of tar's; changes: lines
    of a Dockerfile. Raises ImageError."""
    print(f"importing {name}", file=sys.stderr)
    archive = subprocess.Popen(
        _as_root(
            "tar", "--create", "--numeric-owner", "--owner=0", "--group=0", *options,
            "--exclude=./var/cache/apt", "--exclude=./var/lib/apt/lists", "--exclude=./dev/*", "--exclude=./proc/*",
            "--exclude=./sys/*", f"--directory={directory}", ".", *files,
        ),
        stdout=subprocess.PIPE,
    )  # fmt: skip
    with archive:
        repository, _, tag = name.rpartition(":")
        assert archive.stdout is not None
        client.api.import_image_from_stream(
            iter(partial(archive.stdout.read, 1 << 20), b""), repository, tag, changes=list(changes)
        )
    if archive.returncode:
        raise ImageError(f"tar ended with exit code {archive.returncode}; the image is not whole: remove {name}.")


def _as_root(*argv: str) -> list[str]:
    return list(argv) if os.geteuid() == 0 else ["sudo", *argv]


def _run(*argv: str) -> None:
    done = subprocess.run(
        _as_root(*argv), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
    )  # fmt: skip
    if done.returncode:
        print(done.stdout[-3000:], file=sys.stderr)
        raise ImageError(f"{argv[0]} ended with exit code {done.returncode}; the end of its output is above.")
