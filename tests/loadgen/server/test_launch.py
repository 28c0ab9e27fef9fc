"""What would be started, on machines of every kind: models, GPUs, and what does not fit said in one sentence."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from backends.exit_codes import UserError
from backends.gpus import Gpu, Inventory
from backends.launch import LaunchError, Mount
from loadgen import models
from loadgen.config import Config, ConfigError
from loadgen.load.lengths import WorkloadError
from loadgen.server.launch import UNDERFLOW, Launch, plan_launch, write_files

GIB = 1 << 30


def machine(count: int, name: str, gib: int, p2p: str = "ok", driver: str = "580.1") -> Inventory:
    cards = tuple(Gpu(index=n, name=name, uuid=f"GPU-{n}", memory_bytes=gib * GIB, used_bytes=0) for n in range(count))
    matrix = tuple(tuple("self" if a == b else p2p for b in range(count)) for a in range(count))
    links = tuple(tuple(a != b and p2p == "ok" for b in range(count)) for a in range(count))
    return Inventory(gpus=cards, driver=driver, p2p=matrix, nvlink=links)


A800 = machine(8, "NVIDIA A800-SXM4-80GB", 80)
RTX4090 = machine(8, "NVIDIA GeForce RTX 4090", 24, "not supported")
ONE_4090 = machine(1, "NVIDIA GeForce RTX 4090", 24)
NOTHING = Inventory(problem="no NVIDIA driver")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No model cache, no token, no home but the test's own."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def llama(directory: Path, weights: bool = True) -> Path:
    """A directory that looks like Llama-2-7B to those who do not read the weights."""
    directory.mkdir(parents=True)
    config = {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008,
        "vocab_size": 32000, "max_position_embeddings": 4096,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text('{"eos_token_id": 2, "top_p": 0.9}')
    if weights:
        (directory / "model.safetensors").touch()
    return directory


def cached(tmp_path: Path, hf_id: str = "meta-llama/Llama-2-7b-hf") -> Path:
    """The same in the hub's cache: links into blobs."""
    repository = tmp_path / "hf/hub" / f"models--{hf_id.replace('/', '--')}"
    blobs = llama(repository / "blobs")
    snapshot = repository / "snapshots/abc"
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    return snapshot


def launch(tmp_path: Path, inventory: Inventory = A800, **options: Any) -> Launch:
    options = {"backend": "vllm", "model": "7b", **options}
    return plan_launch(Config(**options), tmp_path / "run", "id", inventory)


def planned(tmp_path: Path, inventory: Inventory = A800, **options: Any) -> Launch:
    return launch(tmp_path, inventory, dry_run=True, **options)


@pytest.mark.parametrize(
    ("inventory", "model", "tp"),
    [
        (A800, "7b", 1), (A800, "13b", 1), (A800, "70b", 2), (RTX4090, "7b", 1), (RTX4090, "13b", 2),
        (RTX4090, "70b", 8), (machine(2, "NVIDIA H200", 141), "70b", 2), (machine(8, "NVIDIA H200", 141), "70b", 2),
    ],
)  # fmt: skip
def test_the_smallest_tensor_parallelism_that_fits(inventory: Inventory, model: str, tp: int, tmp_path: Path) -> None:
    found = planned(tmp_path, inventory, model=model)
    assert found.settings.tp == tp
    assert found.start.gpu_ids == tuple(map(str, range(tp)))


def test_asked_parallelism_and_gpus(tmp_path: Path) -> None:
    assert planned(tmp_path, tp="all").settings.tp == 8
    some = planned(tmp_path, tp="2", gpus="5,GPU-3,1")
    assert some.gpu_indices == (5, 3)
    assert planned(tmp_path, gpus="none").start.gpu_ids == ()


def refusal(kind: type[Exception], tmp_path: Path, inventory: Inventory = A800, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        launch(tmp_path, inventory, **options)
    said = str(caught.value)
    assert said.count("\n") == 0 and said.endswith(".")
    return said


def test_what_does_not_fit_says_how_much_and_what_would(tmp_path: Path) -> None:
    model = str(llama(tmp_path / "m"))
    said = refusal(LaunchError, tmp_path, ONE_4090, model=model, dtype="float32")
    # 6.738 G parameters x 4 bytes + 4096 tokens x 1 MiB + 2 GiB, of 0.9 x 24 GiB
    assert "m in float32 does not fit: 10.2 GB are missing on 1 x NVIDIA GeForce RTX 4090 (22 GiB" in said
    assert "--tp 2 would fit and --dtype float16 would fit on 1" in said
    said = refusal(LaunchError, tmp_path, ONE_4090, model="70b")
    assert "does not fit" in said and "--tp 8 would fit" in said
    assert "does not fit" in refusal(LaunchError, tmp_path, A800, model="70b", tp="1")


@pytest.mark.parametrize(("count", "used"), [(3, 2), (6, 4)])
def test_what_is_missing_is_of_gpus_that_could_share_it(count: int, used: int, tmp_path: Path) -> None:
    said = refusal(LaunchError, tmp_path, machine(count, "NVIDIA RTX 5090", 32), model="70b")
    missing = float(said.partition("does not fit: ")[2].split(" GB")[0])
    # 68.98 G parameters x 2 bytes, 1.34 GB of KV and 2 GiB for each; 0.9 x 32 GiB of each may be used
    assert missing == pytest.approx(137.95 + 1.34 + used * (2 - 0.9 * 32) * 1.0737, abs=0.1)
    assert f"on {used} x NVIDIA RTX 5090" in said and "--tp 8 would fit" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpus": "9"}, "9"),
        ({"gpus": "0,0"}, "twice"),
        ({"tp": "9"}, "--tp 9 needs 9 GPUs and there are 8"),
        ({"model": "13b", "tp": "3"}, "40 attention heads, which --tp 3 does not divide"),
    ],
)
def test_impossible_options(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in refusal(UserError, tmp_path, **options)


def test_without_a_gpu(tmp_path: Path) -> None:
    said = refusal(LaunchError, tmp_path, NOTHING)
    assert "no NVIDIA driver" in said and "--dry-run" in said and "--gpus none" in said
    assert planned(tmp_path, NOTHING, model="70b").settings.tp == 2
    assert "80 GiB" in planned(tmp_path, NOTHING).notes[0]
    assert planned(tmp_path, NOTHING, gpus="none").settings.tp == 1
    named = planned(tmp_path, NOTHING, model="70b", gpus="5, 3,1")
    assert named.gpu_indices == (5, 3) and named.start.gpu_ids == ("5", "3")
    for ids in ("0,0", "GPU-1", "0,x"):
        assert refusal(UserError, tmp_path, NOTHING, model="70b", gpus=ids, dry_run=True)


def test_the_manifest_keeps_the_environment_of_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    made = planned(tmp_path, model="70b", launch="process", server_python=sys.executable, p2p="on")
    kept = made.facts().environment
    assert isinstance(kept, dict) and kept["OMP_NUM_THREADS"] == "7" and "s3cret" not in str(made.facts())
    assert [note for note in made.notes if note.startswith("NCCL_P2P_DISABLE=1 is set here")]
    assert planned(tmp_path, model="70b").facts().environment == {}  # a container gets none of it


def test_what_a_trace_has_beyond_the_model_does_not_lengthen_the_server(tmp_path: Path) -> None:
    """llama-2-7b takes 4096 tokens: the second request is left out, as the run's plan has it."""
    trace = tmp_path / "trace.csv"
    trace.write_text("Timestamp,Request tokens,Response tokens\n0,300,20\n1,9000,20\n2,4000,90\n")
    assert planned(tmp_path, trace=trace).settings.max_model_len == 4096
    with pytest.raises(WorkloadError, match="every request of the trace has more tokens than the 200 that"):
        planned(tmp_path, trace=trace, max_model_len=200)


def test_dummy_weights_in_float16_are_told(tmp_path: Path) -> None:
    assert UNDERFLOW in planned(tmp_path, dummy_weights=True).notes
    assert UNDERFLOW not in planned(tmp_path, dummy_weights=True, dtype="bfloat16").notes


def test_p2p_reaches_server_and_manifest(tmp_path: Path) -> None:
    on, off = planned(tmp_path, model="70b"), planned(tmp_path, RTX4090, model="70b")
    assert on.p2p.enabled and "NCCL_P2P_DISABLE" not in on.start.env
    assert not off.p2p.enabled and off.start.env["NCCL_P2P_DISABLE"] == "1"
    assert "--disable-custom-all-reduce" in off.start.argv
    assert planned(tmp_path, model="70b", p2p="off").start.env["NCCL_P2P_DISABLE"] == "1"
    facts = off.facts()
    assert facts.p2p.reason and facts.p2p.matrix[0][1] == "not supported" and facts.driver == "580.1"
    assert "P2P off" in off.title and "P2P" not in planned(tmp_path).title


def test_gated_without_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "HF_TOKEN" in refusal(LaunchError, tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    found = launch(tmp_path)
    assert found.start.secrets == ("HF_TOKEN",)
    assert found.start.argv[:2] == ("--model", "meta-llama/Llama-2-7b-hf")
    assert Mount(tmp_path / "hf", "/root/.cache/huggingface", read_only=False) in found.start.mounts
    assert "hf_secret" not in repr(found)


@pytest.mark.parametrize("where", ["usual", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN"])
def test_the_token_of_a_login_is_given_like_any(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "")  # so that it is taken back
    if where == "HUGGING_FACE_HUB_TOKEN":
        monkeypatch.setenv(where, "hf_secret")
    else:
        path = tmp_path / ("hf/token" if where == "usual" else "elsewhere")
        path.parent.mkdir(exist_ok=True)
        path.write_text("hf_secret\n")
        if where == "HF_TOKEN_PATH":
            monkeypatch.setenv(where, str(path))
    found = launch(tmp_path)
    assert found.start.secrets == ("HF_TOKEN",)
    assert any("your login to the hub" in note for note in found.notes)
    assert "hf_secret" not in repr(found) + found.command_line() and not os.environ["HF_TOKEN"]
    models.lend_token()
    assert os.environ["HF_TOKEN"] == "hf_secret"


def test_the_places_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As huggingface_hub takes them."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", "~/hub home")
    assert (models.hf_home(), models.hub_cache()) == (tmp_path / "hub home", tmp_path / "hub home/hub")
    monkeypatch.delenv("HF_HOME")
    assert models.hf_home() == tmp_path / "cache/huggingface"  # XDG_CACHE_HOME
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models.hf_home() == tmp_path / ".cache/huggingface"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HUB_CACHE", "~/big")
    for backend, target in (("vllm", "/root/.cache/huggingface/hub"), ("tgi", "/data/hub")):
        mounts = launch(tmp_path, backend=backend).start.mounts
        assert mounts[0] == Mount(tmp_path / "big", target, read_only=False)
        assert not any(mount.source == models.hf_home() for mount in mounts)


def test_the_key_is_masked_in_the_log_of_a_process(tmp_path: Path) -> None:
    options = {"model": str(llama(tmp_path / "m")), "gpus": "none", "api_key_env": "MY_KEY"}
    assert planned(tmp_path, launch="process", **options).start.secrets == ("MY_KEY",)
    assert planned(tmp_path, **options).start.secrets == ()  # a container does not get it


def test_a_cached_model_needs_neither_hub_nor_token(tmp_path: Path) -> None:
    snapshot = cached(tmp_path)
    found = launch(tmp_path)
    assert found.start.secrets == ()
    assert found.settings.model == "/models/models--meta-llama--Llama-2-7b-hf/snapshots/abc"
    assert Mount(snapshot.parent.parent, "/models/models--meta-llama--Llama-2-7b-hf") in found.start.mounts
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors", "b": "x"}}')
    assert "HF_TOKEN" in refusal(LaunchError, tmp_path)  # a part of the weights is missing


def test_weights_in_one_format_are_enough(tmp_path: Path) -> None:
    model = llama(tmp_path / "m", weights=False)
    assert not models.find(str(model)).has_weights
    (model / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "pytorch_model-1.bin"}}')
    (model / "training_args.bin").touch()
    assert not models.find(str(model)).has_weights
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}')
    (model / "1.safetensors").touch()
    assert not models.find(str(model)).has_weights
    (model / "2.safetensors").touch()
    assert models.find(str(model)).has_weights
    (model / "a.index.json").write_text("not json")
    assert models.find(str(model)).has_weights


def test_a_directory(tmp_path: Path) -> None:
    found = launch(tmp_path, model=str(llama(tmp_path / "my-model")))
    assert (found.settings.model, found.settings.served_name) == ("/models/my-model", "my-model")
    assert found.model.spec is not None and found.model.spec.vocab_size == 32000
    assert [mount.target for mount in found.start.mounts] == ["/models/my-model", "/root/.cache/vllm"]


def test_a_directory_by_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (llama(tmp_path / "my-model") / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "my-model/sub")
    found = launch(tmp_path, model="..")
    assert (found.settings.model, found.settings.served_name) == ("/models/my-model", "my-model")

    snapshot = cached(tmp_path)
    (tmp_path / "link").symlink_to(snapshot)
    found = launch(tmp_path, model=str(tmp_path / "link"))
    assert (found.settings.model, found.settings.served_name) == (
        "/models/models--meta-llama--Llama-2-7b-hf/snapshots/abc", "link",
    )  # fmt: skip
    assert found.start.mounts[0].source == snapshot.parent.parent


def test_a_link_that_no_container_could_follow(tmp_path: Path) -> None:
    model = llama(tmp_path / "m", weights=False)
    (tmp_path / "model.safetensors").touch()
    (model / "model.safetensors").symlink_to(tmp_path / "model.safetensors")
    said = refusal(LaunchError, tmp_path, model=str(model))
    assert f"{model}/model.safetensors is a link out of {model}" in said
    (model / "circle").symlink_to("circle")
    assert planned(tmp_path, model=str(model), launch="process").settings.model == str(model)


def test_lightllm_needs_a_directory(tmp_path: Path) -> None:
    assert "hf download meta-llama/Llama-2-7b-hf" in refusal(LaunchError, tmp_path, backend="lightllm")
    dry = planned(tmp_path, backend="lightllm")
    assert dry.start.argv[3:5] == ("--model_dir", "/models/llama-2-7b") and dry.start.secrets == ()
    assert dry.start.mounts[0] == Mount(Path("/MODEL_DIR"), "/models/llama-2-7b")
    assert any("/MODEL_DIR stands for" in note for note in dry.notes)
    assert planned(tmp_path, backend="lightllm", launch="process").settings.model == "/MODEL_DIR"
    cached(tmp_path)
    found = launch(tmp_path, backend="lightllm")
    assert found.start.argv[:3] == ("python", "-m", "lightllm.server.api_server")
    write_files(found, print)
    config = next(mount for mount in found.start.mounts if mount.target == "/llm-dissect/config")
    assert "backlog" in (config.source / "hypercorn.toml").read_text()


def test_tgi_sees_a_model_without_an_end(tmp_path: Path) -> None:
    model = llama(tmp_path / "m")
    found = launch(tmp_path, backend="tgi", model=str(model))
    write_files(found, print)
    assert found.settings.model == "/llm-dissect/model"
    view = next(mount.source for mount in found.start.mounts if mount.target == "/llm-dissect/model")
    assert json.loads((view / "generation_config.json").read_text()) == {"eos_token_id": [-1], "top_p": 0.9}
    assert (view / "config.json").readlink() == Path("/models/m/config.json")
    assert {path.name for path in view.iterdir()} == {path.name for path in model.iterdir()}
    assert json.loads((model / "generation_config.json").read_text())["eos_token_id"] == 2


@pytest.mark.parametrize("wrong", ["[]", "{", pytest.param('{"a": ' + "[" * 100_000, id="nested without end")])
def test_a_model_whose_files_cannot_be_read_is_one_sentence(tmp_path: Path, wrong: str) -> None:
    model = llama(tmp_path / "m")
    (model / "generation_config.json").write_text(wrong)
    with pytest.raises(LaunchError, match=r"cannot use .*generation_config\.json: "):
        launch(tmp_path, backend="tgi", model=str(model))


def test_tgi_from_the_hub_says_that_replies_may_end(tmp_path: Path) -> None:
    assert any("replies may end early" in note for note in planned(tmp_path, backend="tgi").notes)


def test_an_unknown_architecture(tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/config.json").write_text('{"model_type": "odd"}')
    found = launch(tmp_path, model=str(tmp_path / "odd"))
    assert found.settings.tp == 1
    assert any("how long a sequence odd takes is not known here" in note for note in found.notes)
    assert any("size of odd is not known" in note for note in found.notes)


def test_the_length_is_what_the_model_says_or_the_run_needs(tmp_path: Path) -> None:
    def model(name: str, config: str) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
        return str(tmp_path / name)

    opt = model("opt", '{"model_type": "opt", "max_position_embeddings": 2048}')
    assert launch(tmp_path, model=opt).settings.max_model_len == 2048
    assert "more than opt takes (2048)" in refusal(ConfigError, tmp_path, model=opt, input_tokens=2000)
    assert "ends at 2048" in refusal(ConfigError, tmp_path, model=opt, max_model_len=4096)
    gpt = model("gpt", '{"n_positions": 1024}')
    assert launch(tmp_path, model=gpt).settings.max_model_len == 1024
    odd = model("odd", "{}")
    assert launch(tmp_path, model=odd).settings.max_model_len == 512 + 128 + 1
    assert launch(tmp_path, model=odd, input_tokens=9000).settings.max_model_len == 9000 + 128 + 1
    assert launch(tmp_path, model=odd, max_model_len=2000).settings.max_model_len == 2000


def test_the_length_is_enough_for_a_dataset(tmp_path: Path) -> None:
    ids, text = tmp_path / "ids.jsonl", tmp_path / "text.jsonl"
    ids.write_text("".join(json.dumps({"prompt": [7] * n, "output_tokens": 9}) + "\n" for n in (5, 5000, 6)))
    text.write_text('{"prompt": "a b"}\n{"prompt": "a", "prompt_tokens": 1}\n')
    assert planned(tmp_path, model="llama-3-8b", dataset=ids, warmup=1).settings.max_model_len == 5010
    assert "5009 tokens" in refusal(ConfigError, tmp_path, dataset=ids, warmup=1)
    assert planned(tmp_path, dataset=text, warmup=1).settings.max_model_len == 4096


@pytest.mark.parametrize(
    ("options", "accepted"),
    [
        ({}, 1000), ({"requests": 3000}, 3000), ({"arrival": "constant:100", "duration": 40.0}, 4000),
        ({"concurrency": 2000, "requests": 9000}, 2000), ({"concurrency": 32}, 1000), ({"dataset": 1499}, 1499),
        ({"max_running": 5000}, 5000),
    ],
)  # fmt: skip
def test_no_planned_request_is_refused(options: dict[str, Any], accepted: int, tmp_path: Path) -> None:
    if "dataset" in options:
        dataset = tmp_path / "d.jsonl"
        dataset.write_text('{"prompt": "a"}\n' * (options["dataset"] + 8))
        options = {"dataset": dataset}
    argv = planned(tmp_path, backend="tgi", **{"max_running": 64, **options}).start.argv
    assert argv[argv.index("--max-concurrent-requests") + 1] == str(accepted)


def test_version_from_the_image(tmp_path: Path) -> None:
    cached(tmp_path)
    argv = launch(tmp_path, backend="lightllm", image="lightllm:v1.1.0").start.argv
    assert "--disable_dynamic_prompt_cache" in argv and "--hypercorn_config" not in argv


def test_nothing_is_written_before_the_start(tmp_path: Path) -> None:
    cached(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for backend in ("vllm", "lightllm", "tgi"):
        launch(tmp_path, backend=backend)
    assert sorted(tmp_path.rglob("*")) == before


def test_process_not_installed(tmp_path: Path) -> None:
    model = str(llama(tmp_path / "m"))
    said = refusal(LaunchError, tmp_path, backend="lightllm", model=model, launch="process")
    assert "lightllm is not installed for" in said and "--server-python" in said
    said = refusal(LaunchError, tmp_path, model=model, launch="process", server_python="/no/python")
    assert "/no/python cannot be run" in said
    said = refusal(LaunchError, tmp_path, backend="tgi", model=model, launch="process")
    assert "text-generation-launcher is not on the PATH" in said


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_only_what_the_server_would_see_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(llama(tmp_path / "m"))
    package = tmp_path / "site/vllm"
    package.mkdir(parents=True)
    options = {"model": model, "launch": "process", "gpus": "none", "server_python": sys.executable}
    monkeypatch.chdir(tmp_path / "site")  # a folder of that name, with nothing in it
    assert "vllm is not installed for" in refusal(LaunchError, tmp_path, **options)
    (package / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))  # ours, which the server does not get
    assert "vllm is not installed for" in refusal(LaunchError, tmp_path, **options)
    python = script(tmp_path / "python", f"PYTHONPATH='{tmp_path}/site' exec '{sys.executable}' \"$@\"")
    assert launch(tmp_path, **{**options, "server_python": python}).settings.version is None


def test_a_dry_run_takes_the_version_that_is_installed(tmp_path: Path) -> None:
    options = {"model": str(llama(tmp_path / "m")), "launch": "process", "gpus": "none"}
    old = planned(tmp_path, server_python=script(tmp_path / "old", "echo 0.9.1"), **options)
    assert old.settings.version == (0, 9, 1) and "--disable-log-requests" in old.start.argv
    assert planned(tmp_path, server_python="/no/python", **options).settings.version is None


@pytest.mark.parametrize("name", ["meta-llama/Llama-2-7b-hf", "llama-2-7b", "7B"])
def test_names_of_one_model(name: str) -> None:
    assert models.find(name).name == "llama-2-7b"


def test_a_hub_id_that_nobody_knows() -> None:
    found = models.find("org/name")
    assert (found.name, found.hf_id, found.spec, found.directory) == ("org/name", "org/name", None, None)


def test_a_profiled_server_leaves_its_traces_in_the_runs_directory(tmp_path: Path) -> None:
    config = Config(launch="docker", model=str(llama(tmp_path / "m")))
    launch = plan_launch(config, tmp_path / "run", "r", A800, profiled=True)
    assert launch.settings.trace_dir == "/llm-dissect/trace"
    assert Mount(tmp_path / "run/trace", "/llm-dissect/trace", read_only=False) in launch.start.mounts
    write_files(launch, print)
    assert (tmp_path / "run/trace").is_dir()
    assert plan_launch(config, tmp_path / "run", "r", A800).settings.trace_dir is None


def test_a_server_without_a_profiler_is_told_before_it_starts(tmp_path: Path) -> None:
    config = Config(launch="docker", backend="tgi", model=str(llama(tmp_path / "m")))
    with pytest.raises(ConfigError, match="tgi has no profiler"):
        plan_launch(config, tmp_path / "run", "r", A800, profiled=True)
