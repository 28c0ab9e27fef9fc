"""Compose files: what they start is what the Docker launcher starts, and the ones in `compose/` are up to date."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from backends import docker, gpus
from backends.gpus import Inventory
from loadgen import cli
from loadgen.config import Config, ConfigError
from loadgen.server.compose import as_yaml, compose
from loadgen.server.launch import Launch, plan_launch, write_files
from tests.loadgen.server.test_launch import A800, NOTHING, ONE_4090, RTX4090, cached, llama

REPOSITORY = Path(__file__).parents[3]
COMMITTED = ("vllm", "lightllm", "tgi")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home without models or tokens, and everything in its usual place below it."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_TOKEN", "HF_TOKEN_PATH", "XDG_CACHE_HOME", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


def read(text: str, **variables: str) -> Any:
    """The file as compose would take it, with variables replaced."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        assert match[1] in variables, f"a variable that was not meant: {match[0]}"
        return variables[match[1]]

    def replaced(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: replaced(item) for key, item in node.items()}
        if isinstance(node, list):
            return [replaced(item) for item in node]
        return re.sub(r"\$(?:\$|\{(\w+)(?::\?[^}]*)?\}|\w+)", value, node) if isinstance(node, str) else node

    return replaced(yaml.safe_load(text))


def service(text: str, **variables: str) -> dict[str, Any]:
    (only,) = read(text, **variables)["services"].values()
    return dict(only)


def flags(argv: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """`docker run` taken apart: values by flag, and what follows them."""
    assert argv[:3] == ["docker", "run", "--detach"]
    rest = argv[3:]
    found: dict[str, list[str]] = {}
    while rest[0].startswith("--"):
        found.setdefault(rest[0], []).append(rest[1])
        rest = rest[2:]
    return found, rest


def planned(config: Config, run: Path, inventory: Inventory) -> Launch:
    return plan_launch(dataclasses.replace(config, dry_run=True), run, "id", inventory)


def assert_equal(text: str, launch: Launch, run: Path, **variables: str) -> None:
    """That compose starts the launch: everything that `docker run` would be told, and every file that it would see."""
    whole = read(text, **variables)
    (ours,) = whole["services"].values()
    theirs, rest = flags(docker.command_line(launch.start))
    assert [ours["image"], *ours["command"]] == rest
    assert ours.get("environment", []) == theirs.get("--env", [])
    host, _, port = theirs["--publish"][0].rpartition(":")
    assert ours["ports"] == [f"{host if launch.start.host_port else '127.0.0.1:8000'}:{port}"]
    assert [f"{name}={value}" for name, value in ours["ulimits"].items()] == theirs["--ulimit"]
    assert [f"{name}={value}" for name, value in ours["sysctls"].items()] == theirs["--sysctl"]
    assert [ours["ipc"]] == theirs["--ipc"]
    assert ours["cap_add"] == theirs["--cap-add"]
    if "--gpus" in theirs:
        (device,) = ours["deploy"]["resources"]["reservations"]["devices"]
        ids = device.get("device_ids") or [str(n) for n in range(device["count"])]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        assert theirs["--gpus"] == [f'"device={",".join(ids)}"']
    else:
        assert "deploy" not in ours
    for volume in ours["volumes"]:
        assert (volume["type"], volume["bind"]) == ("bind", {"create_host_path": False})
    told = {(v["source"], v["target"]): v["read_only"] for v in ours["volumes"]}
    in_run = {path for path in told if path[1].startswith("/llm-dissect/")}
    mounts = {words for words in theirs["--mount"] if f"source={run}/" not in words}
    assert {
        f"type=bind,source={source},target={target}" + (",readonly" if told[source, target] else "")
        for source, target in told.keys() - in_run
    } == mounts

    write_files(launch, print)
    seen = {target: Path(source).read_bytes() for source, target in in_run}
    for config in ours.get("configs", []):
        seen[config["target"]] = whole["configs"][config["source"]]["content"].encode()
    roots = {mount.target: mount.source for mount in launch.start.mounts}
    expected = {}
    for path in launch.files:
        target = next(f"{to}/{path.relative_to(source)}" for to, source in roots.items() if path.is_relative_to(source))
        if path.is_symlink():  # it is one for the container only
            link = str(path.readlink())
            root = next(to for to in roots if link.startswith(to + "/"))
            path = roots[root] / link.removeprefix(root + "/")
        expected[target] = path.read_bytes()
    assert seen == expected


@pytest.mark.parametrize("backend", COMMITTED)
def test_the_committed_file_is_what_the_command_in_it_makes(backend: str) -> None:
    text = compose(Config(backend=backend, model="7b", tp="1"), NOTHING)
    assert (REPOSITORY / "compose" / f"{backend}.yaml").read_text() == text, "run `make compose`"
    assert f"Made by: loadgen compose --backend {backend} --model 7b --tp 1\n" in text


@pytest.mark.parametrize("backend", ["vllm", "tgi"])
def test_the_committed_file_is_the_launch(backend: str, home: Path, tmp_path: Path) -> None:
    launch = planned(Config(backend=backend, model="7b", tp="1"), tmp_path / "run", NOTHING)
    text = (REPOSITORY / "compose" / f"{backend}.yaml").read_text()
    assert_equal(text, launch, tmp_path / "run", HOME=str(home))


def test_the_committed_file_of_lightllm_is_the_launch_of_a_directory(tmp_path: Path) -> None:
    model = llama(tmp_path / "llama-2-7b")
    launch = planned(Config(backend="lightllm", model=str(model), tp="1"), tmp_path / "run", NOTHING)
    text = (REPOSITORY / "compose" / "lightllm.yaml").read_text()
    assert_equal(text, launch, tmp_path / "run", MODEL_DIR=str(model))


@pytest.mark.parametrize(
    ("inventory", "options"),
    [
        (A800, {"backend": "vllm", "model": "70b", "port": 9000}),
        (RTX4090, {"backend": "vllm", "model": "13b", "gpus": "5,6", "server_arg": ("--enforce-eager", "--x=$HOME")}),
        (RTX4090, {"backend": "tgi", "model": "70b", "image": "somewhere/tgi:2.4.1"}),
        (NOTHING, {"backend": "tgi", "model": "70b", "tp": "4"}),
        (NOTHING, {"backend": "vllm", "model": "70b", "gpus": "4,6"}),
        (NOTHING, {"backend": "vllm", "model": "org/unknown", "gpus": "none", "dummy_weights": True}),
        (A800, {"model": "mixtral-8x7b", "dtype": "bfloat16", "p2p": "off", "tp": "all"}),
    ],
)
def test_the_file_is_the_launch(inventory: Inventory, options: dict[str, Any], home: Path, tmp_path: Path) -> None:
    config = Config(**options)
    text = compose(config, inventory)
    assert str(home) not in text
    assert_equal(text, planned(config, tmp_path / "run", inventory), tmp_path / "run", HOME=str(home))


@pytest.mark.parametrize("backend", COMMITTED)
@pytest.mark.parametrize("place", ["directory", "cache"])
def test_local_model(backend: str, place: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if place == "directory":
        name = str(llama(home / "my models" / "tuned"))
    else:
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        cached(tmp_path)
        name = "7b"
    config = Config(backend=backend, model=name)
    text = compose(config, A800)
    assert "HF_TOKEN" not in text and str(home) not in text and "/run-directory" not in text
    assert_equal(text, planned(config, tmp_path / "run", A800), tmp_path / "run", HOME=str(home))
    if backend == "tgi":
        contents = [config["content"] for config in read(text, HOME=str(home))["configs"].values()]
        assert len(contents) == 1 and yaml.safe_load(contents[0]) == {"eos_token_id": [-1], "top_p": 0.9}


def test_gpus_are_named_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    def device(config: Config, inventory: Inventory) -> dict[str, Any]:
        (found,) = service(compose(config, inventory), HOME="/h")["deploy"]["resources"]["reservations"]["devices"]
        return dict(found)

    config = Config(model="7b", tp="2")
    assert device(config, A800)["device_ids"] == ["0", "1"]
    assert device(dataclasses.replace(config, gpus="7,3"), A800)["device_ids"] == ["7", "3"]
    assert device(config, NOTHING)["count"] == 2 and "device_ids" not in device(config, NOTHING)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device(config, A800)["count"] == 2


@pytest.mark.parametrize(
    ("inventory", "p2p", "said", "off"),
    [
        (A800, "auto", "is on: every pair reports P2P", False),
        (RTX4090, "auto", "is off: NVML says of P2P", True),
        (NOTHING, "auto", "is on, which no GPU here could tell", False),
        (NOTHING, "off", "is off: asked for with --p2p off", True),
    ],
)
@pytest.mark.parametrize("named", [None, "0,1"])
def test_what_is_said_of_p2p_is_what_is_done(
    inventory: Inventory, p2p: Any, said: str, off: bool, named: str | None
) -> None:
    text = compose(Config(model="13b", tp="2", p2p=p2p, gpus=named), inventory)
    assert f"# P2P between the GPUs {said}" in text
    assert ("NCCL_P2P_DISABLE=1" in service(text, HOME="/h")["environment"]) == off


def test_no_value_of_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_s3cret")
    text = compose(Config(model="7b"), A800)
    assert "s3cret" not in text and "HF_TOKEN" in service(text, HOME="/h")["environment"]


def test_text_that_looks_like_a_variable_or_ends_a_comment_stays_text() -> None:
    words = ("--a=${HOME}", "--b=$$", "--c=1\nname: evil", '--d="\\\x07')
    text = compose(Config(model="7b", server_arg=words), A800)
    assert tuple(service(text, HOME="/h")["command"][-4:]) == words
    assert read(text, HOME="/h")["name"] == "llm-dissect-vllm"


@pytest.mark.parametrize(
    "options", [{}, {"url": "http://h:1"}, {"launch": "embedded"}, {"launch": "process", "model": "7b"}]
)
def test_only_for_docker(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="for a server in Docker"):
        compose(Config(**options), A800)


@pytest.mark.parametrize("command", [["compose"], ["run", "--dry-run"]])
def test_what_does_not_fit_is_one_sentence(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpus, "read", lambda: ONE_4090)
    assert cli.invoke([*command, "--backend", "vllm", "--model", "70b"]) == 3
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "does not fit" in captured.err


def test_the_command_prints_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpus, "read", lambda: NOTHING)
    monkeypatch.chdir(tmp_path)
    options = tmp_path / "c.toml"
    options.write_text('backend = "tgi"\nmodel = "13b"\nport = 8123\n')
    assert cli.invoke(["compose", "--config", str(options), "--tp", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out == compose(Config(backend="tgi", model="13b", port=8123, tp="2"), NOTHING)
    assert service(captured.out, HOME="/h")["ports"] == ["127.0.0.1:8123:80"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.toml", "home"], "nothing is written"


TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
KEYS = st.sampled_from(["a", "net.core.somaxconn", "yes", "null", "x-y", "1", ""]) | TEXT
NODES = st.recursive(
    TEXT | st.integers() | st.booleans(),
    lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(KEYS, inner, min_size=1, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(KEYS, NODES, min_size=1))
def test_what_is_written_is_what_is_read(document: dict[str, Any]) -> None:
    text = as_yaml(document)
    assert yaml.safe_load(text) == document
    assert all(line.isprintable() for line in text.split("\n"))


def test_what_is_written_is_easily_read() -> None:
    long = "a long text " * 30
    document = {
        "last": {"list": ["word", "--flag", "/a/path", "off", "1e3", "0x1f", "8:30", "~", long]},
        "first": "x = 1\ny\n",
    }
    assert as_yaml(document) == (
        "last:\n  list:\n    - word\n    - --flag\n    - /a/path\n    - 'off'\n"
        '    - "1e3"\n    - "0x1f"\n    - "8:30"\n    - "~"\n'
        f'    - "{long}"\n'
        "first: |\n  x = 1\n  y\n"
    )


def compose_program() -> list[str] | None:
    """Docker Compose 2, wherever it is installed."""
    for words in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(words[0]):
            asked = subprocess.run([*words, "version", "--short"], capture_output=True, text=True, timeout=30)
            if asked.returncode == 0 and not asked.stdout.strip().startswith("1."):
                return words
    return None


@pytest.mark.parametrize("backend", COMMITTED)
def test_docker_compose_takes_it(backend: str, tmp_path: Path) -> None:
    program = compose_program()
    if program is None:
        pytest.skip("Docker Compose 2 is not installed")
    file = REPOSITORY / "compose" / f"{backend}.yaml"
    asked = subprocess.run(
        [*program, "-f", str(file), "config"], capture_output=True, text=True, timeout=60,
        env={**os.environ, "MODEL_DIR": str(tmp_path)},
    )  # fmt: skip
    assert asked.returncode == 0, asked.stderr
    assert service(asked.stdout)["command"] == service(file.read_text(), HOME="/h", MODEL_DIR="/m")["command"]


def test_what_does_not_print_is_escaped(home: Path) -> None:
    text = compose(Config(backend="vllm", model="7b", server_arg=("--x=\u00ad\u061c\U000e0041 é",)), A800)
    assert '"--x=\\xad\\u061c\\U000E0041 é"' in text
    assert all(line.isprintable() for line in text.splitlines())
