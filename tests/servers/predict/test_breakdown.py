"""The modelled breakdown: the cost model's own terms, all of them, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import catalog
from backends.decoder import Precision
from loadgen import cli
from loadgen.breakdown.tables import ATTENTION, FFN, IDLE, UNASSIGNED, paper
from servers.predict import breakdown
from servers.schedulers import Sequence, Step
from servers.simulator import hardware
from servers.simulator.build import Setup, emulate
from servers.simulator.cost import Overheads, StepCost


def cost(model: str, gpu: str, tp: int, layer_us: float) -> StepCost:
    spec = catalog.find(model)
    assert spec is not None
    kind = hardware.find(gpu)
    _, link = hardware.link(kind, tp, None, True)
    own = Overheads(step_us=200.0, row_us=3.0, prefill_token_us=0.2, layer_us=layer_us, reduce_us=4.0, reduce_ratio=1.3)
    return StepCost(spec, kind, tp, link, Precision(), own)


@given(
    model=st.sampled_from(["7b", "70b", "mixtral-8x7b"]), gpu=st.sampled_from(["h200", "a800", "rtx4090"]),
    tp=st.sampled_from([1, 2, 8]), rows=st.integers(1, 1024), context=st.integers(1, 4000),
    prefill=st.integers(0, 2000), layer_us=st.sampled_from([0.0, 150.0, 5000.0]),
)  # fmt: skip
def test_terms_add_up_to_the_step(
    model: str, gpu: str, tp: int, rows: int, context: int, prefill: int, layer_us: float
) -> None:
    step = Step([Sequence(0, 1, 1)] * rows, rows, rows * context)
    if prefill:
        step.prefill(prefill, 0)
    of = cost(model, gpu, tp, layer_us)
    terms, whole = of.terms(step), pytest.approx(of(step), rel=1e-12)
    assert sum(breakdown.kinds(terms).values()) == whole
    assert sum(breakdown.parts(terms).values()) == whole
    assert min(breakdown.kinds(terms).values()) >= 0


def test_waiting_for_launches_is_idle_and_of_no_block() -> None:
    step = Step([Sequence(0, 1, 1)] * 4, 4, 4 * 100)
    fast, slow = cost("7b", "h200", 1, 0.0).terms(step), cost("7b", "h200", 1, 1000.0).terms(step)
    waited = slow.waiting
    assert fast.waiting == 0 and waited > 0.02  # 32 layers of a millisecond
    assert breakdown.kinds(slow)[IDLE] - breakdown.kinds(fast)[IDLE] == pytest.approx(waited)
    assert breakdown.parts(slow)[UNASSIGNED] == waited
    assert breakdown.parts(slow)[ATTENTION] == breakdown.parts(fast)[ATTENTION]
    assert breakdown.parts(slow)[FFN] == breakdown.parts(fast)[FFN]


def test_a_decode_step_is_what_the_server_would_take() -> None:
    spec = catalog.find("7b")
    assert spec is not None
    emulated = emulate(Setup(scheduler="vllm@v1", model=spec, gpu="h200"))
    found = breakdown.decode_step(emulated, 64, 512, 128)
    step = Step([Sequence(0, 512, 128)] * 64, 64, 64 * 576)
    assert found.step_ms == pytest.approx(emulated.cost(step) * 1000)
    assert (found.emulated, found.batch, found.context_tokens, found.layers) == (True, 64, 576, 32)
    assert found.kinds["AllReduce"] == 0


def loadgen(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.invoke(["breakdown", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_papers_setting(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, said = loadgen(capsys, "--preset", "paper-table10", "--out", str(tmp_path / "run"))
    assert code == 0
    found = json.loads(out.splitlines()[-1])
    assert found == json.loads((tmp_path / "run/breakdown.json").read_text())
    assert found["emulated"] is True and "emulated" in said
    assert (found["batch"], found["hardware"], found["backend"]) == (1024, "8 x NVIDIA A800 SXM 80 GB", "lightllm@2310")
    assert found["step_ms"] == pytest.approx(51.11, rel=0.05)  # nothing here was fitted to it
    assert sum(found["kinds"].values()) == pytest.approx(found["step_ms"])
    assert sum(found["parts"].values()) == pytest.approx(found["step_ms"])
    report = (tmp_path / "run/report.md").read_text()
    assert "to which nothing here was fitted" in report
    assert "| 23.05 | 45.10 |" in report and "| 35.13 | 68.73 |" in report and "2311.03687" in report
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert manifest["emulated"] is True and manifest["config"]["gpu"] == "a800"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "manifest.json", "breakdown.json", "report.md", "breakdown.html",
    }  # fmt: skip


def test_the_papers_rows_add_up_to_its_step() -> None:
    printed = paper()
    assert sum(printed.kinds.values()) == pytest.approx(printed.step_ms, abs=0.01)
    assert sum(printed.parts.values()) == pytest.approx(printed.step_ms, abs=0.01)


def test_options_win_over_the_preset(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = loadgen(
        capsys, "--preset", "paper-table10", "--gpu", "h200", "--concurrency", "100", "--out", str(tmp_path / "run")
    )
    found = json.loads(out.splitlines()[-1])
    assert code == 0 and (found["batch"], found["backend"]) == (100, "vllm@v1") and "H200" in found["hardware"]


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "name the GPU to model"),
        (["--gpu", "rtx4090", "--concurrency", "1000"], "lower --concurrency to"),
        (["--gpu", "h200", "--concurrency", "2000"], "more than --max-running"),
        (["--gpu", "h2000"], "h2000"),
        (["--gpu", "a800", "--backend", "openai"], "not modelled"),
        (["--gpu", "a800", "--steps", "1"], "--steps is 1"),
        (["--gpu", "a800", "--arrival", "poisson:3"], "--concurrency says how large"),
        (["--gpu", "a800", "--dataset", "prompts.jsonl"], "leave --dataset"),
        (["--gpu", "a800", "--no-stream"], "--no-stream out"),
        (["--gpu", "a800", "--metrics-port", "9465"], "leave --metrics-port out"),
        (["--gpu", "a800", "--max-model-len", "600"], "more than --max-model-len (600)"),
        (["--gpu", "a800", "--input-tokens", "4090"], "more than llama-2-7b takes (4096)"),
        (["--preset", "paper-table10", "--gpus", "4"], "or name the GPU to model with --gpu"),
        (["--url", "http://h:1"], "instead of --url"),
        (["--launch", "process", "--backend", "tgi"], "no profiler"),
        (["--launch", "process", "--requests", "3"], "--concurrency says how large"),
    ],
)
def test_mistakes_are_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], said: str
) -> None:
    code, out, error = loadgen(capsys, *words, "--out", str(tmp_path / "run"))
    assert (code, out) == (2, "") and said in error and len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()
