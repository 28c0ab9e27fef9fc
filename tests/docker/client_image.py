"""The image of compose/client.Dockerfile, made without a registry: on a Debian of our own, in which pip is set to the
wheels that lie there, so that the build itself reaches nothing.

    python -m tests.docker.client_image      makes it, prints its name: 4 minutes the first time, 2 GB

Needs Debian, root or sudo, a Docker engine (engine.sh), and pip's index for the wheels.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import docker
from docker.errors import BuildError, ImageNotFound

from tests.docker import debian
from tests.docker.debian import PYTHON, ROOT, SUITE, ImageError, check_room

NAME, BASE = "llm-dissect-test-client:latest", "llm-dissect-test-client-base:latest"
DEBIAN = ROOT / "build/client-base"  # kept for the next image
WHEELS = ROOT / "build/client-wheels"
PACKAGES = "python3,python3-venv,wget"
LABEL = "llm-dissect.test-image"
ROOM_BYTES = 4_000_000_000
PIP_CONF = "[global]\nno-index = true\nfind-links = /wheels\n"


def make() -> str:
    """Name of the image, of this checkout as it is. Raises ImageError."""
    client = docker.from_env(timeout=600)
    try:
        _make_base(client)
        try:
            old = client.images.get(NAME).id
        except ImageNotFound:
            old = None
        try:
            built, _ = client.images.build(
                path=str(ROOT), dockerfile="compose/client.Dockerfile", tag=NAME, buildargs={"BASE": BASE}, rm=True,
                forcerm=True, network_mode="none",
            )  # fmt: skip
        except BuildError as error:
            print(*(line.get("stream", "").rstrip() for line in error.build_log), sep="\n", file=sys.stderr)
            raise ImageError(f"the build failed: {error}; its output is above.") from None
        if old not in (None, built.id):
            client.images.remove(old)
        return NAME
    finally:
        client.close()


def _make_base(client: docker.DockerClient) -> None:
    wanted = _wanted()
    key = hashlib.sha256(json.dumps([SUITE, PACKAGES, PIP_CONF, wanted]).encode()).hexdigest()[:16]
    try:
        if client.images.get(BASE).labels.get(LABEL) == key:
            return
    except ImageNotFound:
        pass
    check_room(client.info()["DockerRootDir"], ROOM_BYTES)
    debian.unpack(DEBIAN, PACKAGES)
    WHEELS.mkdir(parents=True, exist_ok=True)
    for old in WHEELS.iterdir():
        old.unlink()
    version = PYTHON.removeprefix("python")
    argv = ["pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:",
            "--python-version", version, "--dest", str(WHEELS)]  # fmt: skip
    if subprocess.run([sys.executable, "-m", *argv, *wanted]).returncode:
        raise ImageError("pip cannot download the wheels; the end of its output is above.")
    with tempfile.TemporaryDirectory() as made:
        pip_conf = Path(made, "etc/pip.conf")
        pip_conf.parent.mkdir()
        pip_conf.write_text(PIP_CONF)
        pip_conf.chmod(0o644)
        debian.load(
            client, BASE, DEBIAN, ["ENV PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", f"LABEL {LABEL}={key}"],
            options=(f"--transform=flags=r;s,^{WHEELS.name},wheels,",),
            files=(f"--directory={WHEELS.parent}", WHEELS.name, f"--directory={made}", "etc/pip.conf"),
        )  # fmt: skip


def _wanted() -> list[str]:
    """What the Dockerfile asks pip for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    own = project["project"]
    extra = own["optional-dependencies"]["ray"]
    return [*project["build-system"]["requires"], *own["dependencies"], *extra, "ray[default]"]


if __name__ == "__main__":
    try:
        print(make())
    except ImageError as error:
        sys.exit(f"client_image: {error}")
