"""Docker images for the tests, made without a registry: this machine's Python with the embedded server, and entry
points that behave like those of vLLM, LightLLM and TGI (see stand_in.py).

    python -m tests.docker.images [KIND [BEHAVIOUR]]      builds, prints the image's name

All share one layer. Names carry a hash of the content, so an image is made once and found again by the next test run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent.parent
REPOSITORY = "llm-dissect-test"
Kind = Literal["vllm", "lightllm", "tgi"]
PORTS: dict[Kind, int] = {"vllm": 8000, "lightllm": 8080, "tgi": 80}
ENTRYPOINTS: dict[Kind, list[str]] = {"vllm": ["vllm", "serve"], "lightllm": [], "tgi": ["/tgi-entrypoint.sh"]}

_APP = "app"
_UNUSED = {"test", "tests", "idlelib", "tkinter", "lib2to3", "turtledemo", "ensurepip", "site-packages", "pydoc_data",
           "dist-packages", "__pycache__"}  # fmt: skip
_SCRIPTS = {
    "usr/bin/vllm": f'#!/bin/sh\n[ "$1" = serve ] && shift\nexec python /{_APP}/stand_in.py vllm "$@"\n',
    "tgi-entrypoint.sh": "#!/bin/sh\nexec text-generation-launcher $@\n",
    "usr/bin/text-generation-launcher": f'#!/bin/sh\nexec python /{_APP}/stand_in.py tgi "$@"\n',
    f"{_APP}/lightllm/__init__.py": "",
    f"{_APP}/lightllm/server/__init__.py": "",
    f"{_APP}/lightllm/server/api_server.py": (
        'import sys\nsys.path.insert(0, "/app")\nimport stand_in\nstand_in.main("lightllm", sys.argv[1:])\n'
    ),
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
}


def image(kind: Kind, behaviour: str = "") -> str:
    """Name of the image that stands for the server `kind`, made when it is missing; `behaviour`: see stand_in.py."""
    import docker

    client = docker.from_env()
    try:
        _, tag = packed_layer()
        name = f"{REPOSITORY}/{kind}:{tag}"
        if not client.images.list(name):
            _forget_old(client)
            client.images.load(_archive())
        if not behaviour:
            return name
        failing = f"{name}-{hashlib.sha256(behaviour.encode()).hexdigest()[:8]}"
        if not client.images.list(failing):
            made = client.api.create_container(name, command=["none"], environment={"STAND_IN": behaviour})
            try:
                repository, _, failing_tag = failing.partition(":")
                client.api.commit(made["Id"], repository, failing_tag)
            finally:
                client.api.remove_container(made["Id"])
        return failing
    finally:
        client.close()


def config(kind: Kind, layer: bytes) -> bytes:
    """The image's configuration, as a registry holds it."""
    env = ["PATH=/usr/bin:/bin", f"PYTHONPATH=/{_APP}/site:/{_APP}", f"LD_LIBRARY_PATH={':'.join(_library_paths())}"]
    if kind == "tgi":
        env += ["HF_HOME=/data", "PORT=80"]
    return json.dumps(
        {
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Env": env, "Entrypoint": ENTRYPOINTS[kind], "Cmd": ["the image's own command"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "history": [{"created_by": "tests/docker/images.py"}],
        }
    ).encode()


def _archive() -> bytes:
    """All images as `docker load` takes them."""
    layer, tag = packed_layer()
    files, manifest = {"layer.tar": layer}, []
    for kind in ENTRYPOINTS:
        files[f"{kind}.json"] = config(kind, layer)
        names = [f"{REPOSITORY}/{kind}:{tag}"]
        manifest.append({"Config": f"{kind}.json", "RepoTags": names, "Layers": ["layer.tar"]})
    files["manifest.json"] = json.dumps(manifest).encode()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in files.items():
            _add(tar, name, content)
    return out.getvalue()


@functools.cache
def packed_layer() -> tuple[bytes, str]:
    """The root file system as a tar, and the begin of its hash."""
    out = io.BytesIO()
    seen: set[str] = set()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in ("tmp", "run", "data", "root"):
            _add(tar, name, None, 0o1777 if name == "tmp" else 0o755)
        for source, name in _files():
            if name not in seen:
                seen.add(name)
                _add(tar, name, source.read_bytes(), 0o755 if source.stat().st_mode & 0o111 else 0o644)
        for name, text in _SCRIPTS.items():
            _add(tar, name, text.encode(), 0o755)
        for name in ("python", "python3"):
            link = tarfile.TarInfo(f"usr/bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, str(_python())
            tar.addfile(link)
    layer = out.getvalue()
    return layer, hashlib.sha256(layer + json.dumps([ENTRYPOINTS, PORTS]).encode()).hexdigest()[:12]


def _files() -> Iterator[tuple[Path, str]]:
    """What goes into the layer: where it is here, and its name there."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    binaries = [_python(), Path("/bin/sh").resolve()]
    yield _python(), str(_python()).lstrip("/")
    yield binaries[1], "bin/sh"
    for path in _tree(stdlib):
        yield path, str(path).lstrip("/")
    packages = [path for name in _packages() for path in _tree(name)]
    site = Path(sysconfig.get_path("purelib"))
    for path in packages:
        yield path, f"{_APP}/site/{path.relative_to(site)}"
    for path in (*_tree(ROOT / "servers"), *_tree(ROOT / "loadgen"), *_tree(ROOT / "backends")):  # all that it imports
        yield path, f"{_APP}/{path.relative_to(ROOT)}"
    yield Path(__file__).with_name("stand_in.py"), f"{_APP}/stand_in.py"
    native = [path for path in (*_tree(stdlib), *packages) if ".so" in path.suffixes]
    for library in _libraries((*binaries, *native)):
        yield Path(library), library.lstrip("/")


def _tree(path: Path) -> Iterator[Path]:
    """The files in it that a program may need, always in the same order; the path itself when it is one."""
    if path.is_file():
        yield path
        return
    for child in sorted(path.iterdir()):
        unused = child.name in _UNUSED or child.name.startswith("config-") or child.suffix in (".a", ".pyc", ".exe")
        if not unused and child.exists():
            yield from _tree(child)


def _python() -> Path:
    return Path(sys._base_executable).resolve()  # type: ignore[attr-defined]


@functools.cache
def _packages() -> tuple[Path, ...]:
    """The installed packages that the embedded server loads, found by starting it with a port that it refuses."""
    script = (
        "import json, runpy, sys\n"
        "sys.argv = ['servers', '--port', '99999']\n"
        "try: runpy.run_module('servers', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print(json.dumps([m.__file__ for m in list(sys.modules.values()) if getattr(m, '__file__', None)]))\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    site = Path(sysconfig.get_path("purelib"))
    loaded = [Path(name).relative_to(site) for name in json.loads(ran.stdout) if Path(name).is_relative_to(site)]
    names = {path.parts[0] for path in loaded}
    return tuple(site / name for name in sorted(names) if not name.startswith(("_", "pip", "setuptools")))


def _libraries(binaries: tuple[Path, ...]) -> list[str]:
    """The shared libraries that they need, and the loader."""
    ran = subprocess.run(["ldd", *map(str, binaries)], capture_output=True, text=True, check=False)
    found = re.findall(r"^\s+(?:\S+ => )?(/\S+) \(0x", ran.stdout, re.MULTILINE)
    return sorted({os.path.normpath(name) for name in found})  # an engine refuses a path that is there twice


@functools.cache
def _library_paths() -> tuple[str, ...]:
    return tuple(sorted({str(Path(name).parent) for name in _libraries((_python(), Path("/bin/sh").resolve()))}))


def _add(tar: tarfile.TarFile, name: str, content: bytes | None, mode: int = 0o644) -> None:
    """A file, or a directory where there is no content; its time is fixed, so that the same content is the same tar."""
    entry = tarfile.TarInfo(name)
    entry.mode = mode
    if content is None:
        entry.type = tarfile.DIRTYPE
        tar.addfile(entry)
    else:
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))


def _forget_old(client: Any) -> None:
    """Removes what was made more than a day ago: by then its content has changed, and no other run still needs it."""
    from docker.errors import APIError

    names = [
        name
        for old in client.api.images()
        if old["Created"] < time.time() - 86_400
        for name in old["RepoTags"] or ()
        if name.startswith(f"{REPOSITORY}/")
    ]
    for name in sorted(names, key=len, reverse=True):  # those with a behaviour stand on those without
        with contextlib.suppress(APIError):  # a container still uses it
            client.images.remove(name)


if __name__ == "__main__":
    print(image(*sys.argv[1:]))  # type: ignore[arg-type]
