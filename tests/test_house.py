"""The house rules that no linter holds: short functions, few files in a room, structs rather than dictionaries."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import WHOLE

ROOT = Path(__file__).parents[1]
PACKAGES = ("backends", "loadgen", "servers", "training_probe")
MOST_LINES = 60  # of a function
MOST_FILES = 22  # that lie flat in a package
MOST_PLAIN = 20  # `dict[str, Any]` in loadgen
MOST_SHARED_NAMES = 15  # of public types, which two modules define


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_no_function_is_long() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in sources(*PACKAGES, "benchmarks", "compose")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= MOST_LINES
    ]
    assert not long


def test_no_room_is_crowded() -> None:
    assert max(Counter(path.parent for path in sources(*PACKAGES)).values()) <= MOST_FILES


def test_a_checkout_takes_15_megabytes() -> None:
    """Measurements are packed (benchmarks/kept.py), and gaps between tokens kept where a figure needs them."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=False).stdout
    if not listed:
        pytest.skip("these files are no checkout")
    files = [ROOT / name for name in listed.decode().split("\0") if name]
    assert sum(file.stat().st_size for file in files if file.exists()) <= 15_000_000


def test_every_file_opens_with_what_it_is() -> None:
    bare = [path for path in sources(*PACKAGES) if path.stat().st_size]
    assert not [path for path in bare if ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None]


def test_dictionaries_of_anything_stand_at_the_edge() -> None:
    assert sum(path.read_text(encoding="utf-8").count("dict[str, Any]") for path in sources("loadgen")) <= MOST_PLAIN


def test_a_type_name_has_one_meaning() -> None:
    modules: dict[str, list[str]] = {}
    for path in sources(*PACKAGES):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules.setdefault(node.name, []).append(_name(path))
    shared = {name: found for name, found in modules.items() if len(found) > 1}
    advice = f"say in the new type's name what it is of, or use the type that exists: {shared}"
    assert all(len(found) == 2 for found in shared.values()) and len(shared) <= MOST_SHARED_NAMES, advice


def test_the_command_line_loads_nothing_heavy() -> None:
    heavy = {"aiohttp", "docker", "httpx", "matplotlib", "numpy", "ray", "scipy", "torch", "yaml"}
    for program in ("loadgen.cli", "training_probe.cli"):
        code = f"import sys, {program}; print(*sorted({heavy} & set(sys.modules)))"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_a_run_loads_what_it_uses() -> None:
    """Figures come after the numbers, and a server at a --url needs neither Docker nor another transport."""
    unused = {"aiohttp", "docker", "httpx", "matplotlib", "ray", "scipy", "torch", "yaml"}
    code = f"import sys, backends, loadgen.run; backends.get('vllm'); print(*sorted({unused} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_no_two_rooms_import_each_other() -> None:
    """What import-linter holds layer by layer, once for all files: imports at the top of modules make no circle."""
    modules = {path: _name(path) for path in sources(*PACKAGES)}
    known = set(modules.values())
    imports = {name: _imports(path, known) - {name} for path, name in modules.items()}
    while free := [name for name, needed in imports.items() if not needed & imports.keys()]:
        for name in free:
            del imports[name]
    assert not imports, f"a circle among {sorted(imports)}"


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imports(path: Path, known: set[str]) -> set[str]:
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & known) or {node.module}
    return found & known


def test_files_that_go_to_a_core_at_once_exist() -> None:
    assert not [file for file in WHOLE if not (ROOT / file).is_file()]
