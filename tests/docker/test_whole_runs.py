"""`loadgen run` and `loadgen clean` with a real Docker engine: the adapters' own command lines, refused as the real
servers would, and servers that fail in every way. Afterwards there is never a container."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import docker as sdk
import pytest

from backends import docker
from tests.docker import images

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("engine")]

LOADGEN = [sys.executable, "-c", "from loadgen.cli import main; main()"]
TOKEN = "hf_" + "5ecret" * 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that says what Llama-2-7B is; the stand-ins do not read it."""
    directory = tmp_path_factory.mktemp("models") / "small"
    directory.mkdir()
    config = {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008,
        "vocab_size": 32000, "max_position_embeddings": 4096,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text('{"eos_token_id": 2, "temperature": 0.6}')
    (directory / "model.safetensors").touch()
    return directory


def command(
    kind: images.Kind, model: Path | str, out: Path, *more: str, behaviour: str = "", requests: int = 40
) -> list[str]:
    return [
        *LOADGEN, "run", "--backend", kind, "--model", str(model), "--image", images.image(kind, behaviour),
        "--gpus", "none", "--requests", str(requests), "--output-tokens", "8", "--no-calibrate",
        "--out", str(out), *more,
    ]  # fmt: skip


MEASURED = (0, 4)  # 4: this machine was too busy for its numbers to be valid, which is not what is tested here


def run(*argv: str, expect: int | tuple[int, ...], **options: Any) -> tuple[dict[str, Any], str]:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode in (expect if isinstance(expect, tuple) else (expect,)), (
        done.stdout[-2000:] + done.stderr[-3000:]
    )
    lines = done.stdout.splitlines()
    return (json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}), done.stderr


def ours(client: sdk.DockerClient) -> list[str]:
    return sorted(
        container.name
        for container in client.containers.list(all=True, filters={"label": docker.LABEL}, ignore_removed=True)
    )


@pytest.mark.always
@pytest.mark.parametrize("kind", images.ENTRYPOINTS)
def test_a_whole_run(kind: images.Kind, model: Path, tmp_path: Path, engine: sdk.DockerClient) -> None:
    before = ours(engine)
    report, said = run(*command(kind, model, tmp_path / "run"), expect=MEASURED)
    assert report["requests"]["ok"] == 40
    assert report["tokens"] == {"prompt": 40 * 512, "output": 40 * 8}
    assert ours(engine) == before

    launch = report["launch"]
    assert launch == json.loads((tmp_path / "run/manifest.json").read_text())["launch"]
    assert launch["image"] == images.image(kind) and launch["image_id"].startswith("sha256:")
    assert launch["command"].startswith("docker run ") and launch["kv_cache_tokens"] == 123456
    assert "Started: Docker image" in said
    assert report["server"]["running_max"] is not None  # its metrics were sampled meanwhile

    log = (tmp_path / "run/server.log").read_text()
    recorded = json.loads(next(line for line in log.splitlines() if line.startswith("RECORDED "))[9:])
    words = launch["command"].split()
    after_image = words[words.index(images.image(kind)) + 1 :]
    assert recorded["argv"] == after_image[3 if kind == "lightllm" else 0 :]
    assert {
        "vllm": "--no-enable-prefix-caching", "lightllm": "--disable_dynamic_prompt_cache", "tgi": "--num-shard",
    }[kind] in recorded["argv"]  # fmt: skip
    assert recorded["env"].get("PREFIX_CACHING") == ("0" if kind == "tgi" else None)


def test_files_that_a_server_is_shown(model: Path, tmp_path: Path) -> None:
    run(*command("tgi", model, tmp_path / "tgi"), expect=MEASURED)
    shown = json.loads((tmp_path / "tgi/model/generation_config.json").read_text())
    assert shown == {"eos_token_id": [-1], "temperature": 0.6}
    run(*command("lightllm", model, tmp_path / "lightllm"), expect=MEASURED)
    assert "backlog = 4096" in (tmp_path / "lightllm/config/hypercorn.toml").read_text()


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("exit:3", "vllm ended with exit code 3"),
        (
            "say:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
            "CUDA out of memory; use more GPUs",
        ),
        ("say:ValueError: No available memory for the cache blocks.", "leave no room for the KV cache"),
        ("say:RuntimeError: NCCL error: unhandled system error", "try --p2p off"),
        ("say:OSError: Cannot access gated repo", "HF_TOKEN"),
        ("say:RuntimeError: Found no NVIDIA driver on your system", "read its log"),  # it was given no GPU
    ],
)
def test_servers_that_end_while_starting(
    behaviour: str, said: str, model: Path, tmp_path: Path, engine: sdk.DockerClient
) -> None:
    before = ours(engine)
    _, text = run(*command("vllm", model, tmp_path / "run", behaviour=behaviour), expect=3)
    assert said in text.splitlines()[-1] and "Traceback" not in text
    assert behaviour.partition(":")[2] in text or behaviour == "exit:3"  # the end of its log
    assert ours(engine) == before
    assert (tmp_path / "run/server.log").exists() and not (tmp_path / "run/requests.jsonl").exists()


def test_a_bad_flag_is_named(model: Path, tmp_path: Path) -> None:
    _, said = run(*command("vllm", model, tmp_path / "run", "--server-arg=--frobnicate"), expect=3)
    assert "--frobnicate" in said.splitlines()[-1] and "--server-arg" in said.splitlines()[-1]


def test_a_server_that_is_never_ready(model: Path, tmp_path: Path, engine: sdk.DockerClient) -> None:
    before = ours(engine)
    argv = command("tgi", model, tmp_path / "run", "--ready-timeout", "2", behaviour="hang")
    _, said = run(*argv, expect=3)
    assert "tgi was not ready within 2 s" in said.splitlines()[-1] and "it hangs" in said
    assert ours(engine) == before


def test_a_server_that_dies_during_the_run(model: Path, tmp_path: Path, engine: sdk.DockerClient) -> None:
    before = ours(engine)
    argv = command("vllm", model, tmp_path / "run", "--arrival", "constant:20", requests=200, behaviour="die:4:7")
    report, _ = run(*argv, expect=4)
    assert 0 < report["requests"]["ok"] < 200
    found = report["verdict"]["findings"][0]
    assert found["code"] == "SERVER_ENDED" and "exit code 7" in found["message"]
    assert ours(engine) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("behaviour", ["hang", ""])
def test_stopped(number: signal.Signals, behaviour: str, model: Path, tmp_path: Path, engine: sdk.DockerClient) -> None:
    """While it starts: nothing was measured. During the load: what finished is reported."""
    before = ours(engine)
    argv = command("vllm", model, tmp_path / "run", "--arrival", "constant:20", requests=2000, behaviour=behaviour)
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait(lambda: len(ours(engine)) > len(before))
    if not behaviour:
        wait(lambda: (tmp_path / "run/requests.jsonl").exists())
        time.sleep(0.5)
    process.send_signal(number)
    out, said = process.communicate(timeout=60)
    if behaviour:
        assert process.returncode == 128 + number and "stopped before the load began" in said.splitlines()[-1]
    else:
        assert process.returncode == 128 + number, said
        codes = {finding["code"] for finding in json.loads(out.splitlines()[-1])["verdict"]["findings"]}
        assert "INTERRUPTED" in codes and "SERVER_ENDED" not in codes
    assert ours(engine) == before


def test_a_server_that_ignores_sigterm_is_ended(model: Path, tmp_path: Path, engine: sdk.DockerClient) -> None:
    before = ours(engine)
    patched = "from backends import docker; docker.STOP_TIMEOUT_S = 1; from loadgen.cli import main; main()"
    argv = command("vllm", model, tmp_path / "run", behaviour="stubborn")
    argv[argv.index(LOADGEN[2])] = patched
    report, _ = run(*argv, expect=MEASURED)
    assert report["requests"]["ok"] == 40
    assert ours(engine) == before


def test_killed_and_cleaned(model: Path, tmp_path: Path, engine: sdk.DockerClient) -> None:
    """kill -9 of loadgen leaves its container; `loadgen clean` takes it away, and a living run's stays."""
    before = ours(engine)
    argv = command("vllm", model, tmp_path / "run", "--arrival", "constant:20", requests=2000)
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait(lambda: (tmp_path / "run/requests.jsonl").exists())
    run(*LOADGEN, "clean", expect=0)
    assert len(ours(engine)) == len(before) + 1
    process.kill()
    process.wait()
    assert len(ours(engine)) == len(before) + 1
    _, said = run(*LOADGEN, "clean", expect=0)
    assert "removed the container llm-dissect-vllm-" in said
    assert ours(engine) == before


def test_killed_at_random_times(model: Path, tmp_path: Path, engine: sdk.DockerClient) -> None:
    """Ten of the kills of tests/kills: whatever loadgen was doing, no container is left after `loadgen clean`, and a
    run whose records are not whole is said to be killed."""
    seed = int(os.environ.get("KILLS_SEED", "20"))
    rng, before = random.Random(seed), ours(engine)
    for number in range(10):
        directory = tmp_path / str(number)
        argv = command("vllm", model, directory, "--arrival", "constant:100", requests=200)
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        after_s = rng.uniform(0, 6)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(after_s)
        process.kill()
        process.wait()
        when = f"KILLS_SEED={seed}, killed after {after_s:.3f} s"
        run(*LOADGEN, "clean", expect=0)
        assert ours(engine) == before, when
        if (directory / "requests.jsonl").exists():
            report, _ = run(*LOADGEN, "report", str(directory), expect=MEASURED)
            codes = {finding["code"] for finding in report["verdict"]["findings"]}
            assert ("KILLED" in codes) == (sum(report["requests"]["by_outcome"].values()) < 200), when


def wait(true: Any) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_port_that_is_taken(model: Path, tmp_path: Path, engine: sdk.DockerClient) -> None:
    import socket

    before = ours(engine)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        _, said = run(*command("vllm", model, tmp_path / "run", "--port", str(port)), expect=3)
    assert f"port {port}" in said.splitlines()[-1]
    assert ours(engine) == before


def test_an_image_that_is_not_there(model: Path, tmp_path: Path) -> None:
    argv = command("vllm", model, tmp_path / "run")
    argv[argv.index("--image") + 1] = "localhost:9/no/such:image"
    _, said = run(*argv, expect=3)
    assert "localhost:9/no/such:image" in said.splitlines()[-1] and "--image" in said.splitlines()[-1]


def test_an_engine_that_is_not_there(model: Path, tmp_path: Path) -> None:
    env = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    _, said = run(*command("vllm", model, tmp_path / "run"), expect=3, env=env)
    assert "Docker" in said.splitlines()[-1] and "Traceback" not in said


def test_the_token_reaches_the_server_and_no_file(tmp_path: Path, engine: sdk.DockerClient) -> None:
    """A model from the hub: the stand-in tells its token in its log, where it must be masked."""
    home = tmp_path / "hf"
    home.mkdir()
    env = {**os.environ, "HF_TOKEN": TOKEN, "HF_HOME": str(home)}
    argv = command("vllm", "meta-llama/Llama-2-7b-hf", tmp_path / "run", behaviour="tell")
    report, said = run(*argv, expect=MEASURED, env=env)
    log = (tmp_path / "run/server.log").read_text()
    recorded = json.loads(next(line for line in log.splitlines() if line.startswith("RECORDED "))[9:])
    assert recorded["secrets"]["HF_TOKEN"]["length"] == len(TOKEN)
    assert "the token is ***" in log
    everything = "".join(path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert TOKEN not in everything + said + json.dumps(report)
    assert "--env HF_TOKEN " in report["launch"]["command"]
