"""Options: each arrives where it belongs, none is misread, and what they mean together is told cell by cell."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from backends import catalog, gpus
from training_probe import cli, grid, options, paper
from training_probe.grid import Cell, GridError, Model
from training_probe.launch import node
from training_probe.options import Grid, Measuring
from training_probe.sweep import run as sweeps
from training_probe.sweep.cell import Settings

GIB = 1 << 30
# Typed for a flag, and the field of every cell that it arrives in.
OF_CELLS: dict[str, tuple[list[str], str, Any]] = {
    "model": (["13b"], "model", "13b"),
    "task": (["finetune"], "task", "finetune"),
    "engine": (["megatron"], "engine", "megatron"),
    "method": (["F+Z3"], "method", "F+Z3"),
    "gpus": (["4"], "gpus", 4),
    "seq_len": (["128"], "seq_len", 128),
    "micro_batch": (["max"], "micro_batch", None),
    "grad_accum": (["3"], "grad_accum", 3),
    "tp": (["2"], "tp", 2),
    "pp": (["2"], "pp", 2),
    "cp": (["2"], "cp", 2),
    "ep": (["2"], "ep", 2),
    "attention": (["math"], "attention", "math"),
    "compile": ([], "compile", True),
    "device": (["cpu"], "device", "cpu"),
    "lora_rank": (["8"], "lora_rank", 8),
    "lora_alpha": (["32"], "lora_alpha", 32),
    "lora_targets": (["q_proj", "v_proj"], "lora_targets", ("q_proj", "v_proj")),
    "adapter_dtype": (["bf16"], "adapter_dtype", "bf16"),
    "dora": ([], "dora", True),
    "offload_activations": ([], "offload_activations", True),
    "double_quant": ([], "double_quant", False),
    "adamw_8bit": ([], "adamw_8bit", True),
    "optimizer": (["muon"], "optim", "muon"),
    "states": (["bf16-kahan"], "states", "bf16-kahan"),
    "checkpoint": (["op"], "checkpoint", "op"),
    "loss": (["chunked"], "loss", "chunked"),
    "dp_replicate": (["2"], "dp_replicate", 2),
    "fp8": ([], "fp8", True),
    "lengths": (["uniform:8:64"], "lengths", "uniform:8:64"),
    "packing": (["--lengths=8"], "packing", True),
}
# Typed for a flag, and the setting of the sweep that it arrives in.
OF_SETTINGS: dict[str, tuple[list[str], str, Any]] = {
    "warmup_steps": (["0"], "warmup_steps", 0),
    "steps": (["7"], "steps", 7),
    "runs": (["2"], "runs", 2),
    "timeline": ([], "timeline", True),
    "checkpoint_io": ([], "checkpoint_io", True),
    "timeout": (["1.5"], "timeout_s", 1.5),
    "limit": (["60"], "limit_s", 60.0),
    "max_micro_batch": (["16"], "max_micro_batch", 16),
    "skip": ([], "no_skip", True),
    "host_memory_gb": (["2.5"], "host_memory_bytes", int(2.5 * GIB)),
    "platform": (["my box"], "platform", "my box"),
}
FLAG = {"skip": "--no-skip", "double_quant": "--no-double-quant"}
PRESET = "preset"


def flag(name: str) -> str:
    return FLAG.get(name, "--" + name.replace("_", "-"))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes in GiB of the GPUs of this machine, on which everything is installed: none, to be added to."""
    sizes: list[int] = []

    def read() -> gpus.Inventory:
        here = [
            gpus.Gpu(index=index, name="H100", uuid=f"GPU-{index}", memory_bytes=size * GIB, used_bytes=0)
            for index, size in enumerate(sizes)
        ]
        return gpus.Inventory(gpus=tuple(here))

    monkeypatch.setattr(gpus, "read", read)
    monkeypatch.setattr(node, "installed", lambda name: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return sizes


Swept = list[tuple[list[Cell], Settings]]


@pytest.fixture
def swept(machine: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Swept:
    """What is to be measured, instead of measuring it."""
    seen: Swept = []

    def sweep(cells: list[Cell], settings: Settings, directory: Path, say: object) -> int:
        seen.append((cells, settings))
        return 0

    monkeypatch.setattr(sweeps, "sweep", sweep)
    monkeypatch.setattr(options, "check_built", lambda known: None)  # asks transformers, which is not here
    monkeypatch.chdir(tmp_path)
    return seen


def test_the_lists_above_are_complete() -> None:
    assert {*OF_CELLS, PRESET} == {field.name for field in dataclasses.fields(Grid)}
    files = {"deepspeed"}  # test_own_deepspeed.py
    assert set(OF_SETTINGS) == {field.name for field in dataclasses.fields(Measuring)} - files


@pytest.mark.parametrize("command", ["sweep", "plan", "memory"])
def test_help_names_every_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke([command, "--help"]) == 0
    text = capsys.readouterr().out
    named = [*OF_CELLS, PRESET, *(OF_SETTINGS if command == "sweep" else ["gpu_memory_gb"])]
    assert [name for name in named if flag(name) not in text] == ([] if command == "sweep" else ["device"])
    assert "()" not in text and "default: False" not in text


def asked(swept: Swept, *argv: str) -> tuple[list[Cell], Settings]:
    swept.clear()
    assert cli.invoke(["sweep", *argv]) == 0
    ((cells, settings),) = swept
    return cells, settings


@pytest.mark.parametrize("name", OF_CELLS)
def test_every_flag_of_cells_arrives(
    name: str, machine: list[int], swept: Swept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "check_possible", lambda cells, known: None)
    machine += [80] * 8
    typed, field, value = OF_CELLS[name]
    method = "QL+Z2" if name.startswith("lora_") or name in ("double_quant", "dora") else "Z2"
    method = "QL" if name == "adapter_dtype" else method
    (before,), _ = asked(swept, "--method", method)
    (after,), _ = asked(swept, *([] if name == "method" else ["--method", method]), flag(name), *typed)
    assert getattr(after, field) == value != getattr(before, field)


@pytest.mark.parametrize("name", OF_SETTINGS)
def test_every_flag_of_measuring_arrives(name: str, swept: Swept) -> None:
    typed, field, value = OF_SETTINGS[name]
    _, before = asked(swept)
    _, after = asked(swept, flag(name), *typed)
    assert getattr(after, field) == value != getattr(before, field)


def test_several_values_are_axes(swept: Swept) -> None:
    cells, _ = asked(swept, "--method", "Z3", "O+Z2", "--gpus", "1", "2", "--device=cpu", "--micro-batch", "1", "max")
    assert [(cell.method, cell.gpus, cell.micro_batch) for cell in cells] == [
        (method, count, batch) for method in ("Z3", "Z2+O") for count in (1, 2) for batch in (1, None)
    ]


def test_tasks_follow_from_methods(swept: Swept) -> None:
    cells, _ = asked(swept, "--method", "F+Z3", "QL+F", "--device", "cpu")
    assert [cell.task for cell in cells] == ["pretrain", "finetune"]


@pytest.mark.parametrize("here", [0, 1, 8])
def test_by_default_all_that_is_here_is_used(here: int, machine: list[int], swept: Swept) -> None:
    machine += [80] * here
    (cell,), settings = asked(swept, "--method", "Z3")
    assert (cell.device, cell.gpus) == (("cuda", here) if here else ("cpu", 1))
    assert cell.model == ("7b" if here else "tiny")
    assert settings.gpu_ids == tuple(range(here))


def test_gpus_that_cuda_may_not_see_do_not_count(
    machine: list[int], swept: Swept, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine += [80] * 8
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    (cell,), settings = asked(swept, "--method", "Z3")
    assert cell.gpus == 2 and settings.gpu_ids == (5, 3)


@pytest.mark.parametrize("argv", [[], ["--device", "cpu"], ["--preset", "laptop"], ["--steps", "8"]])
def test_without_cells_it_is_the_laptop(argv: list[str], swept: Swept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "multiplies_bf16", lambda cpu_info: True)
    cells, settings = asked(swept, *argv)
    assert cells == paper.presets()["laptop"](0, "cpu") and {cell.gpus for cell in cells} == {1, 2}
    steps = 8 if "--steps" in argv else 100
    assert (settings.warmup_steps, settings.steps, settings.runs) == (2, steps, 1)


def test_one_process_is_asked_for(swept: Swept) -> None:
    cells, _ = asked(swept, "--preset", "laptop", "--gpus", "1")
    assert {cell.gpus for cell in cells} == {1} and {cell.device for cell in cells} == {"cpu"}


@pytest.mark.parametrize("preset", sorted(paper.presets()))
def test_presets_and_a_choice_among_them(preset: str, machine: list[int], swept: Swept) -> None:
    machine += [80] * 4
    cells, settings = asked(swept, "--preset", preset)
    assert cells == paper.presets()[preset](4, "cuda")
    assert (settings.preset, settings.steps) == (preset, 100)
    first = cells[0]
    chosen, _ = asked(swept, "--preset", preset, "--method", first.method.lower(), "--engine", first.engine)
    assert chosen == [cell for cell in cells if (cell.method, cell.engine) == (first.method, first.engine)]


def test_other_cells_are_measured_as_in_the_paper(swept: Swept) -> None:
    _, settings = asked(swept, "--method", "Z3")
    assert (settings.warmup_steps, settings.steps, settings.runs) == options.PAPER_STEPS == (30, 100, 3)


def own_config(directory: Path, **fields: Any) -> dict[str, Any]:
    """A config.json in that directory; what is in it."""
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 512, **fields,
    }  # fmt: skip
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    return config


def test_a_directory_is_a_model(swept: Swept, tmp_path: Path) -> None:
    own = tmp_path / "own"
    config = own_config(own)
    (cell,), settings = asked(swept, "--model", str(own), "--method", "Z3")
    model = settings.model(cell)
    assert model.directory == str(own) and model.spec is not None and model.spec.hidden == 64
    assert settings.trial(cell).config == config
    assert cell.name.startswith("own_pretrain")
    earlier = Settings(models={cell.model: Model(directory=str(own))})  # a manifest without the config
    assert earlier.trial(cell).config == config


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}


@pytest.mark.parametrize(
    ("fields", "in_the_way"),
    [
        ({"model_type": "qwen3"}, "norms of queries and keys"),
        ({"model_type": "qwen3_moe", **MOE}, "norms of queries and keys"),
        ({"model_type": "gemma"}, "scales its embeddings"),
        ({"model_type": "gemma2", "sliding_window": 32}, "layer_types"),
        ({"model_type": "gemma3_text", "sliding_window": 32, "sliding_window_pattern": 2}, "layer_types"),
        ({"model_type": "mistral", "sliding_window": 32}, "sliding_window"),
    ],
)
def test_a_model_of_another_family_is_built_of_its_config(
    swept: Swept, tmp_path: Path, fields: dict[str, Any], in_the_way: str
) -> None:
    """By the engines of transformers; Megatron's Llama is not it."""
    config = own_config(tmp_path / "own", **fields)
    (cell,), settings = asked(swept, "--model", "./own", "--method", "Z3", "--engine", "fsdp2")
    trial, decoder = settings.trial(cell), settings.model(cell).decoder
    assert trial.config == config and decoder is not None and decoder.model_type == fields["model_type"]
    with pytest.raises(GridError, match=in_the_way):
        known = options.known_models([cell])
        options.check_possible([grid.cell("Z1", model=cell.model, engine="megatron", gpus=2)], known)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"model_type": "qwen3", "num_hidden_layers": "two"}, "num_hidden_layers is 'two'"),
        ({"model_type": "gemma3_text", "layer_types": ["conv", "conv"]}, "layer_types holds 'conv'"),
        ({"num_experts": 8}, "num_experts says"),
    ],
)
def test_what_cannot_be_built_is_refused_with_its_field(
    swept: Swept, tmp_path: Path, fields: dict[str, Any], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own_config(tmp_path / "own", **fields)
    assert cli.invoke(["sweep", "--model", "./own", "--method", "Z3"]) == 2 and not swept
    said = capsys.readouterr().err
    assert names in said and said.count("\n") == 1


@pytest.mark.parametrize("main", [True, False])
def test_a_cached_id_is_a_model(
    swept: Swept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], main: bool
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert cli.invoke(["sweep", "--model", "org/name", "--method", "Z3"]) == 2
    said = capsys.readouterr().err
    assert "its config.json is not on this machine" in said and said.count("\n") == 1
    repository = tmp_path / "hub" / "models--org--name"
    config = own_config(repository / "snapshots" / "abc123", model_type="qwen3")
    if main:
        own_config(repository / "snapshots" / "older")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("abc123")
    (cell,), settings = asked(swept, "--model", "org/name", "--method", "Z3")
    assert settings.trial(cell).config == config
    assert cell.name.startswith("name_pretrain")


def test_a_name_of_the_catalog_that_is_no_llama_is_built_of_its_config(swept: Swept) -> None:
    (cell,), settings = asked(swept, "--model", "qwen3-8b", "--method", "Z3", "--device", "cpu")
    found, decoder, named = settings.trial(cell), settings.model(cell).decoder, catalog.find("qwen3-8b")
    assert found.spec is None and found.config is not None and found.config["model_type"] == "qwen3"
    assert decoder is not None and named is not None and decoder.parameters == named.parameters


def test_a_model_type_that_the_installed_transformers_does_not_know_is_refused_unimported(
    swept: Swept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    types = tmp_path / "site" / "transformers" / "models" / "auto"
    types.mkdir(parents=True)
    (tmp_path / "site" / "transformers" / "__init__.py").write_text("raise AssertionError('it was imported')")
    (types / "auto_mappings.py").write_text('("llama", "LlamaConfig"), ("qwen3", "Qwen3Config")')
    monkeypatch.syspath_prepend(tmp_path / "site")
    for model_type in ("qwen3", "mistral"):
        own_config(tmp_path / model_type, model_type=model_type)
    asked(swept, "--model", "./qwen3", "--method", "Z3")
    assert cli.invoke(["sweep", "--model", "./mistral", "--method", "Z3"]) == 2
    assert "model_type 'mistral', which the installed transformers does not know" in capsys.readouterr().err


BAD = ["", "x", "-", "0", "-1", "1.5", "1e3", "nan", "inf", "1e400", "9" * 30, "0x10", "1_000", "é", "\x1b[31m", "a\nb"]


@pytest.mark.parametrize("name", [*OF_CELLS, PRESET, *OF_SETTINGS])
def test_whatever_is_typed_is_taken_or_refused_in_a_sentence(
    name: str, swept: Swept, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = []
    for typed in BAD:
        method = [] if name in ("method", PRESET) else ["--method", "Z2"]
        code = cli.invoke(["sweep", "--device=cpu", *method, f"{flag(name)}={typed}"])
        captured = capsys.readouterr()
        if code == 0:
            taken.append(typed)
        else:
            assert code == 2 and captured.out == "", typed
            assert captured.err.startswith("training_probe: ") and captured.err.count("\n") == 1, typed
            assert captured.err[:-1].isprintable(), typed
    numbers = {flag: ["1.5", "1e3", "1_000"] for flag in ("timeout", "limit", "host_memory_gb")}
    sizes = ("seq_len", "grad_accum", "lora_rank", "lora_alpha", "steps", "runs", "max_micro_batch")
    numbers |= {flag: ["1e3", "1_000"] for flag in sizes} | {"warmup_steps": ["0", "1e3", "1_000"]}
    if name not in (
        "compile",
        "timeline",
        "checkpoint_io",
        "skip",
        "double_quant",
        "adamw_8bit",
        "fp8",
        "packing",
        "dora",
        "offload_activations",
    ):  # which take yes and no
        assert taken == {"platform": BAD, "checkpoint": [""], "lengths": ["", "1e3"], **numbers}.get(name, [])


def test_an_option_that_changes_nothing_for_a_cell_says_so(swept: Swept, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--device=cpu", "--engine=ddp", "--method", "Naive", "L", "--lora-rank", "8"]
    assert cli.invoke(["sweep", *argv]) == 0
    naive = "tiny_pretrain_ddp_Naive_1x_s350_b1"
    assert capsys.readouterr().err == f"--lora-rank changes nothing for {naive}: it has no LoRA (L or QL).\n"
    assert [cell.name for cell in swept[-1][0]] == [naive, "tiny_finetune_ddp_L_1x_s350_b1_r8_fp32-adapters"]


@pytest.mark.parametrize(
    "name", [name for name in OF_CELLS if name not in ("model", "engine", "method", "gpus", "device")]
)
def test_a_preset_has_its_own_sizes(name: str) -> None:
    value = OF_CELLS[name][2]
    given: Any = (str(value or "max"),) if name == "micro_batch" else (value,) if name == "seq_len" else value
    with pytest.raises(GridError, match=f"has a --{name.replace('_', '-')} of its own"):
        Grid(preset="paper-table3", **{name: given}).cells("cuda", 8)


def test_the_extras_that_a_user_is_told_to_install_exist() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    packages = {name: {re.split(r"[<>=]", each)[0] for each in extras[name]} for name in ("train", "megatron")}
    assert packages == {
        "train": {*options.PACKAGES, "deepspeed", "peft", "bitsandbytes", "torchao", "liger-kernel", "nvidia-ml-py"},
        "megatron": {"megatron-core"},
    }


@pytest.mark.parametrize(
    ("said", "has"),
    [("flags\t: fpu avx2 avx512f avx512_bf16", True), ("flags : fpu avx2 avx512f", False), ("Features : bf16", True)],
)
def test_a_laptop_that_emulates_bf16_takes_fewer_steps(
    said: str, has: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "CPU_INFO", tmp_path / "cpuinfo")
    assert options.multiplies_bf16(options.CPU_INFO)  # no Linux
    options.CPU_INFO.write_text(said)
    measuring = options.Measuring()
    assert measuring.settings("laptop", {}, (), ()).steps == (100 if has else 20)
    assert (
        measuring.settings("paper-table3", {}, (), ()).steps == measuring.settings("laptop", {}, (0,), ()).steps == 100
    )


def test_of_a_model_that_sees_the_text_is_taken_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = {
        "model_type": "qwen3_vl_text", "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151_936,
        "max_position_embeddings": 262_144, "tie_word_embeddings": True,
    }  # fmt: skip
    described = {"model_type": "qwen3_vl", "text_config": text, "vision_config": {"depth": 24}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text(json.dumps({**text, "model_type": "qwen3"}))
    told = []
    for directory in (tmp_path, tmp_path / "text"):
        assert cli.invoke(["memory", "--json", "--model", str(directory), "--engine", "ddp", "--method", "F"]) == 0
        out, err = capsys.readouterr()
        told.append((json.loads(out)["cells"][0]["allocated_bytes"], "is taken as its decoder of text" in err))
    assert told[0] == (told[1][0], True) and told[1][1] is False
    packed = ["--lengths", "100", "--packing", "--engine", "ddp"]
    assert cli.invoke(["memory", "--model", str(tmp_path), "--method", "Naive", *packed]) == 0
    assert "use F, or leave --packing out" in " ".join(capsys.readouterr().out.split())
