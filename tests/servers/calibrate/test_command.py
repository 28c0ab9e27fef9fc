"""From real runs to a profile: what a fit finds, what it cannot tell, how far off the built-in profiles are."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from loadgen.cli import main
from loadgen.rundir.emulation import HeldOut
from servers.calibrate import command
from servers.calibrate import runs as observed
from servers.simulator import virtual
from servers.simulator.build import emulate, profiles
from servers.simulator.options import Hardware
from tests.data import unpacked

RUNS = unpacked("runs")
HELD_OUT = (
    "h100_prompts3500_poisson2.5",
    "prompts5000_poisson2",
    "fp8_cache_prompts3000_poisson3",
    "cache_prompts4000_poisson2",
    "qwen3_30b_a3b_gamma5_cv2",
)  # of each GPU, format and model one


@pytest.mark.parametrize(
    ("run", "makespan", "mape", "w1"),
    [
        ("h200_7b_burst_o512", 0.04, 0.05, 0.05),
        ("h200_7b_poisson4_o256", 0.04, 0.08, 0.08),
        ("h200_13b_burst_o128", 0.08, 0.08, 0.08),
        ("h200x4_70b_tp4_burst_o128", 0.08, 0.08, 0.08),
        ("h200x4_7b_tp4_burst_o128", 0.27, 0.25, 0.25),  # bound by its front end, which is faster than the profile's
        ("h200x4_7b_tp4_p2poff_burst_o128", 0.08, 0.08, 0.08),
        ("h100_7b_burst_o128", 0.08, 0.08, 0.08),
        ("h200_7b_lightllm_burst_o64_b", 0.08, 0.08, 0.08),
    ],
)
def test_real_runs_that_the_profile_was_not_fitted_to(run: str, makespan: float, mape: float, w1: float) -> None:
    seen = observed.read(RUNS / f"{run}.jsonl")
    profile = profiles()[seen.setup.scheduler]
    assert run not in profile.fitted_on
    error = seen.predict(profile).error(seen)
    assert abs(error.makespan) <= makespan and error.e2el_mape <= mape and error.e2el_w1 <= w1
    check_as_shipped(next(each for each in profile.held_out if each.run == run), error)


def check_as_shipped(kept: HeldOut, error: HeldOut) -> None:
    facts = ("run", "gpu", "quantization", "architecture", "load")
    assert [getattr(kept, name) for name in facts] == [getattr(error, name) for name in facts]
    for name in set(kept.__struct_fields__) - set(facts):
        assert getattr(kept, name) == pytest.approx(getattr(error, name), rel=1e-6)


def test_the_last_two_rounds_are_held_out() -> None:
    """Predicted before they ran: in 0de7779 eighteen of a Mistral-7B's shape, in 393eafb eight of it with a KV cache in
    fp8 and three of a mixture. HELD_OUT are predicted again."""
    profile = profiles()["vllm@v1"]
    shipped = {each.run.removeprefix("frozen/"): each for each in profile.held_out if each.run.startswith("frozen/")}
    assert len(shipped) == 29 and not set(shipped) & set(profile.fitted_on)
    for name, kept in shipped.items():
        assert ("fp8" if "fp8" in name else None) == kept.quantization
    for name in HELD_OUT:
        kept = shipped[name]
        model = "qwen3-30b-a3b" if name.startswith("qwen3_30b_a3b") else "mistral-7b"
        facts = observed.RunFacts(model=model, gpu=kept.gpu, tp=1, quantization=kept.quantization)
        facts.kv_cache_dtype = "fp8" if "cache" in name else None
        seen = replace(observed.read(unpacked(f"frozen/measured/{name}"), facts), name=kept.run)
        check_as_shipped(kept, seen.predict(profile).error(seen))


CONFIG = {
    "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32768, "max_position_embeddings": 32768,
}  # fmt: skip


def test_a_directory_of_a_known_name_tells_what_it_holds(tmp_path: Path) -> None:
    started = shutil.copytree(unpacked("h200/serving/13b_burst_o64"), tmp_path / "run")
    manifest = json.loads((started / "manifest.json").read_text())
    manifest["config"]["model"] = str(model := tmp_path / "llama-2-13b")
    (started / "manifest.json").write_text(json.dumps(manifest))
    assert observed.read(started).setup.model.layers == 40  # by its name, where the directory is on another machine
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": {"quant_method": "fp8"}}))
    setup = observed.read(started).setup
    assert setup.model.layers == 12 and "fp8" in str(setup.precision())


def test_a_run_of_a_model_that_only_its_directory_describes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    run = unpacked("frozen/measured/prompts2048_poisson4")  # whose server called it mistral-7b-shape
    flags = observed.RunFacts(gpu="h200", model=str(tmp_path), kv_tokens=933_472)
    assert observed.read(run, flags).setup.model.layers == 12
    (tmp_path / "config.json").unlink()
    with pytest.raises(observed.ObservationError, match=r"holds no config\.json"):
        observed.read(run, flags)
    with pytest.raises(observed.ObservationError, match="unknown model 'foo'"):
        observed.read(run, observed.RunFacts(gpu="h200", model="foo"))


@pytest.mark.parametrize(("run", "most"), [("h200_7b_burst_o64_b", 0.055), ("h200_7b_poisson8_o128_b", 0.08)])
def test_real_runs_through_another_client(run: str, most: float) -> None:
    """The model can follow sends that are spread. The host of the second launched twice as fast as the mean of all."""
    seen = observed.read(RUNS / f"{run}.jsonl")
    profile = profiles()[seen.setup.scheduler]
    assert run not in profile.fitted_on
    error = seen.predict(profile).error(seen)
    assert abs(error.makespan) <= 0.05 and error.e2el_mape <= most and error.e2el_w1 <= most


def test_what_cannot_be_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*argv: str) -> str:
        sys.argv = ["loadgen", "calibrate", *argv, "--out", str(tmp_path / "p.json")]
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        said = capsys.readouterr().err.strip()
        assert len(said.splitlines()) == 1
        return said

    for flag, value in (("--tp", "0"), ("--tp", "-1"), ("--kv-tokens", "0"), ("--kv-tokens", "-5")):
        assert refused("no-such-run", f"{flag}={value}") == f"loadgen: {flag} is {value}; it must be at least 1."
    burst, light = (str(RUNS / f"h200_7b_{name}o64_b.jsonl") for name in ("burst_", "lightllm_burst_"))
    assert "are the same records" in refused(burst, burst)
    assert "are the same records" in refused(burst, "--held-out", burst)
    assert "cannot judge a fit of vllm@v1" in refused(burst, "--held-out", light)
    assert "of several servers" in refused(burst, light)
    good = {"i": 0, "send": 0.0, "first": 1.0, "end": 2.0, "usage": {"prompt_tokens": 5, "completion_tokens": 5}}
    for text, sentence in (
        ("", "holds no records"),
        (json.dumps(good), "a fit needs 20"),
        ("\n".join([json.dumps({**good, "first": 3.0})] * 30), "do not begin, answer and end in that order"),
        ("\n".join([json.dumps({"run": {"tp": "x"}}), json.dumps(good)]), "holds no records of requests"),
        (
            "\n".join([json.dumps({**good, "usage": {"prompt_tokens": 0, "completion_tokens": 5}})] * 30),
            "without a prompt",
        ),
    ):
        path = tmp_path / "h200_7b_x.jsonl"
        path.write_text(text)
        assert sentence in refused(str(path))


def test_flags_fill_only_what_a_run_does_not_tell() -> None:
    flags = observed.RunFacts(kv_tokens=5, model="7b", gpu="h100")
    seen = observed.read(RUNS / "h200x4_70b_tp4_burst_o128.jsonl", flags)
    assert (seen.setup.kv_tokens, seen.setup.model.name, seen.setup.gpu) == (1_211_232, "llama-2-70b", "h200")
    mixture = unpacked("frozen/measured/mixtral_8x7b_closed16_b")  # of a --url, which tells no TP
    for tp, known in ((None, False), (1, True), (2, True)):
        seen = observed.read(mixture, observed.RunFacts(gpu="h200", model="mixtral-8x7b", tp=tp))
        assert (seen.setup.tp, seen.tp_known) == (tp or 1, known)


def test_how_a_server_computed_is_told_by_the_run_that_started_it_or_by_flags(tmp_path: Path) -> None:
    started = shutil.copytree(unpacked("h200/serving/13b_burst_o64"), tmp_path / "fp8")
    manifest = json.loads((started / "manifest.json").read_text())
    manifest["config"] |= {"quantization": "fp8", "kv_cache_dtype": "fp8", "max_batched_tokens": 4096}
    (started / "manifest.json").write_text(json.dumps(manifest))
    own = observed.read(started).setup
    assert (own.quantization, own.kv_cache_dtype, own.max_batched_tokens) == ("fp8", "fp8", 4096)
    older = observed.read(unpacked("h200/serving/13b_burst_o64")).setup
    assert (older.quantization, older.kv_cache_dtype, older.max_batched_tokens) == (None, "auto", None)
    flags = observed.RunFacts(gpu="h100", model="mistral-7b", quantization="fp8")
    of_url = observed.read(unpacked("frozen/measured/h100_fp8_closed32"), flags)
    error, in_16_bit = (
        run.predict(profiles()["vllm@v1"]).error(run)
        for run in (of_url, replace(of_url, setup=msgspec.structs.replace(of_url.setup, quantization=None)))
    )
    assert error.quantization == "fp8" and error.e2el_w1 < 0.05
    assert in_16_bit.e2el_w1 > 0.2  # so a fit that takes it for 16 bit would be wrong


def test_a_run_whose_prompts_came_from_a_prefix_cache_is_refused() -> None:
    flags = observed.RunFacts(gpu="h100", model="mistral-7b")
    with pytest.raises(observed.ObservationError, match="took 156,160 of 199,680 prompt tokens from its prefix cache"):
        observed.read(unpacked("frozen/measured/h100_hot8"), flags)


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("A100-SXM4-80GB", "a100"),  # older drivers
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA A100 80GB PCIe", None),
        ("NVIDIA A800-SXM4-80GB", "a800"),
        ("NVIDIA A800 80GB", "a800"),
        ("NVIDIA A800 80GB PCIe", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H1000 80GB", None),
        ("NVIDIA H20", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A40", "a40"),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("NVIDIA B200", "b200"),
    ],
)
def test_gpus_by_the_names_that_nvml_gives(name: str, gpu: str | None) -> None:
    assert observed.gpu_of(name) == gpu


def test_scipy_is_loaded_by_a_fit_alone() -> None:
    script = "import sys, loadgen.cli, servers.predict.command, servers.plan.command, servers.calibrate.command; "
    script += "print('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False\n"


def known_world(backend: str, times: dict[str, float], tp: int = 1) -> Any:
    """A server on H200s whose software takes these times."""
    world = emulate(Hardware(gpu="h200", gpus=tp, tp=tp, kv_tokens=60_000).setup(backend, "7b", 4096))
    return world.with_profile(command.with_values(world.profile, times))


def made(path: Path, world: Any, load: list[tuple[float, int, int]]) -> observed.Observed:
    """A run of a known world, as a file would hold it."""
    times = virtual.bounds(virtual.simulate(world, load))
    path.write_text(
        "\n".join(
            json.dumps(
                {
                    "i": i,
                    "send": sent,
                    "first": first,
                    "end": end,
                    "usage": {"prompt_tokens": p, "completion_tokens": o},
                }
            )
            for i, ((sent, first, end), (_, p, o)) in enumerate(zip(times, load, strict=True))
        )
    )
    return observed.read(path, observed.RunFacts(kv_tokens=60_000, dtype="float16"))


@pytest.mark.processes
def test_a_fit_finds_a_known_world_again(tmp_path: Path) -> None:
    """Its CPU launches, and hands out, half as slowly again as where the fit starts; judged by a load that it has not
    seen. What is held stays as shipped."""
    times = {"launch_eager_layer_us": 1080.0, "prefill_token_us": 0.4, "request_us": 600.0}
    world = known_world("vllm", {**times, "latency_us": 3000.0})
    burst = made(tmp_path / "h200_7b_burst.jsonl", world, [(0.0, 512, 32)] * 300)
    steady = made(tmp_path / "h200_7b_steady.jsonl", world, [(at / 8, 512, 64) for at in range(80)])
    # whose prefills are graphs, so that a step's time is told from that of launching kernels
    short = made(tmp_path / "h200_7b_short.jsonl", world, [(at / 8, 64, 64) for at in range(80)])
    other = made(tmp_path / "h200_7b_other.jsonl", world, [(at / 20, 300, 100) for at in range(120)])
    said: list[str] = []
    fitted = command.calibrate([burst, steady, short], None, said.append)
    error, before = (other.predict(profile).error(other) for profile in (fitted, profiles()["vllm@v1"]))
    assert error.e2el_w1 < 0.02 and before.e2el_w1 > 0.04
    assert fitted.overheads.launch_eager_layer_us == pytest.approx(1080, rel=0.1)
    assert set(fitted.intervals) <= {*times, "latency_us"}
    alone = command.calibrate([steady], None, said.append)
    assert any(line.startswith("not identified: request_us") for line in said)
    assert alone.overheads.row_us == profiles()["vllm@v1"].overheads.row_us  # what nothing tells stays as shipped


@pytest.mark.processes
def test_on_several_gpus_a_fit_finds_how_long_launches_take(tmp_path: Path) -> None:
    """Launches twice as slow as in the profile that ships, and reductions as in it; judged by another load."""
    shipped = profiles()["vllm@v1"]
    world = known_world("vllm", {"launch_eager_layer_us": 1320.0}, tp=2)
    steady = made(tmp_path / "h200_7b_tp2_steady.jsonl", world, [(at / 6, 700, 64) for at in range(80)])
    other = made(tmp_path / "h200_7b_tp2_other.jsonl", world, [(at / 10, 1100, 40) for at in range(80)])
    log: list[str] = []
    fitted = command.calibrate([steady], None, log.append)
    assert log[0].startswith(
        "all runs have several GPUs: times that they cannot tell are those of the built-in profile"
    )
    assert fitted.overheads.launch_eager_layer_us == pytest.approx(1320, rel=0.05)
    error, before = (other.predict(profile).error(other) for profile in (fitted, shipped))
    assert error.e2el_w1 < 0.02 and before.e2el_w1 > 0.06


def test_what_moves_nothing_of_its_own_is_not_told() -> None:
    """A parameter without effect, and two that cannot be told apart."""
    rng = np.random.default_rng(1)
    one, two = rng.normal(size=(2, 50))
    order = command.by_influence(np.stack([0 * one, 5 * one, two, 2.5 * one + 1e-9 * two], axis=1))
    assert [at for at, _ in order[:2]] == [1, 2]
    assert all(influence < command.LEAST_INFLUENCE for _, influence in order[2:])
    assert [share for _, share in command.by_influence(np.zeros((50, 2)))] == [0.0, 0.0]


@pytest.mark.processes  # for its time: a dozen seconds
def test_what_two_bursts_tell_of_another_server(tmp_path: Path) -> None:
    """Attention, prompts and requests are told apart, though rows and tokens are not."""
    times = {"prefill_token_us": 2.0, "request_us": 1400.0, "attention_ratio": 0.95}
    world = known_world("lightllm", times)
    runs = [
        made(tmp_path / f"h200_7b_lightllm_o{output}.jsonl", world, [(0.0, 512, output)] * 200) for output in (8, 64)
    ]
    said: list[str] = []
    fitted = command.calibrate(runs, None, said.append)
    assert any(line.startswith("not identified: row_us") for line in said), said
    assert fitted.overheads.attention_ratio == pytest.approx(0.95, rel=0.1), said
    assert set(fitted.intervals) == set(times)


def test_what_lies_beside_runs_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beside = [tmp_path / "README.md", tmp_path / "figure.png", tmp_path / "notes"]
    beside[0].write_text("# Runs\n")
    beside[1].write_bytes(b"\x89PNG")
    beside[2].mkdir()
    world = emulate(Hardware(gpu="h200", kv_tokens=60_000).setup("vllm", "7b", 4096))
    made(tmp_path / "h200_7b_burst.jsonl", world, [(0.0, 512, 4)] * 30)
    runs = command.runs_among(sorted(tmp_path.iterdir()), observed.RunFacts())
    assert [run.name for run in runs] == ["h200_7b_burst"]
    told = capsys.readouterr().err
    assert told.count("left out: ") == 3 and all(path.name in told for path in beside)
    with pytest.raises(observed.ObservationError, match=r"README\.md is no run"):
        command.runs_among(beside, observed.RunFacts())
