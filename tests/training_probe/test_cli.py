"""The command line: every mistake is one sentence and exit code 2, every prediction adds up, nothing needs a GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backends import exit_codes, gpus
from backends.exit_codes import install_command
from training_probe import cli, results
from training_probe.grid import LETTERS, Cell, cell
from training_probe.launch import node
from training_probe.protocol import deepspeed_config
from training_probe.results import CellResult, of_cell

EXAMPLE = ["memory", "--model", "70b", "--method", "F+R+Z3+O", "--gpus", "8"]
ROOT = Path(cli.__file__).parents[1]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without GPUs and without the engines, in an empty directory."""
    monkeypatch.setattr(gpus, "read", gpus.Inventory)
    monkeypatch.setattr(node, "installed", lambda name: False)
    monkeypatch.chdir(tmp_path)


def one_sentence(argv: list[str], capsys: pytest.CaptureFixture[str], message: str) -> str:
    assert cli.invoke(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("training_probe: ") and captured.err.count("\n") == 1, captured.err
    assert message in captured.err and "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--method", "Z4"], "unknown letter 'Z4' in method 'Z4'; known are Naive, Z1, Z2, Z3"),
        (["--method", "F", "Z9+F"], "unknown letter 'Z9'"),
        (["--method", "L+QL"], "L and QL exclude each other"),
        (["--method", "O"], "offloads without ZeRO; add Z1, Z2 or Z3"),
        (["--method", "Z3+Z3"], "names Z3 twice"),
        (["--method", "F", "--attention", "math"], "name one"),
        (["--method", "Z3", "--gpus", "9", "--device", "cuda"], "9 GPUs would be needed and this machine has none"),
        (["--method", "Z3", "--device", "cuda"], "1 GPU would be needed and this machine has none"),
        (["--method", "F", "--engine", "ddp"], "torch, transformers are not installed; pip install "),
        (["--method", "Z3"], "torch, transformers, deepspeed are not installed"),
        (["--method", "QL"], f"deepspeed, peft, bitsandbytes are not installed; {install_command('train')}"),
        (["--method", "F", "--engine", "ddp", "--adamw-8bit"], "transformers, bitsandbytes are not installed"),
        (["--method", "Z3", "--engine", "fsdp2", "--adamw-8bit"], "transformers, torchao are not installed"),
        (["--method", "F", "--engine", "ddp", "--loss", "liger"], "transformers, liger_kernel are not installed"),
        (["--method", "F", "--engine", "megatron"], f"megatron are not installed; {install_command('train,megatron')}"),
        ([], install_command("train")),
        (["--preset", "paper-table3"], "7b is for GPUs and this machine has none that can be used; with --device cpu"),
        (["--model", "7b", "--method", "Z3"], "its 6.7 billion parameters are trained all the same"),
        (["--model", "7b", "--method", "Z3", "--device", "cpu"], install_command("train")),
        (["--model", ".", "--method", "Z3"], "no config.json"),
        (["--model", "./no/such", "--method", "Z3"], "there is no directory './no/such'"),
        (["--model", "nosuch", "--method", "Z3"], "unknown model 'nosuch'; known are 7b"),
        (["--model", "70bb", "--method", "Z3"], "did you mean '70b'"),
        (["--model", "7b"], "name --method"),
        (["--method", "Z3", "--micro-batch", "0"], "--micro-batch is 0"),
        (["--method", "Z3", "--micro-batch", "x"], "--micro-batch is 'x'; it must be a number from 1 to"),
        (["--method", "Z3", "--gpus", "0"], "--gpus is 0; it must be at least 1"),
        (["--method", "Z3", "--gpus", "1.5"], "--gpus: '1.5' is not a whole number"),
        (["--metrics-port", "0"], "--metrics-port is 0; it must be from 1 to 65535"),
        (["--metrics-port", "9464.5"], "--metrics-port: '9464.5' is not a whole number"),
        (["--method", "Z3", "--steps", "0"], "--steps is 0; it must be at least 1"),
        (["--method", "Z3", "--steps", "many"], "--steps: 'many' is not a whole number"),
        (["--method", "Z3", "--warmup-steps", "-1"], "--warmup-steps is -1; it must be at least 0"),
        (["--method", "Z3", "--runs", "0"], "--runs is 0"),
        (["--method", "Z3", "--timeout", "-5"], "--timeout is -5; it must be above 0"),
        (["--method", "Z3", "--timeout", "nan"], "--timeout is nan"),
        (["--method", "Z3", "--limit", "0"], "--limit is 0"),
        (["--method", "Z3", "--host-memory-gb", "inf"], "--host-memory-gb is inf"),
        (["--engine", "deepsped", "--method", "Z3"], "deepsped"),
        (["--preset", "paper-table1"], 'Choose from: "laptop", "paper-table2"'),
        (["--preset", "laptop", "--model", "70b"], "has no cell of that --model, --engine and --method"),
        (["--preset", "laptop", "--method", "RS"], "--preset laptop has no cell"),
        (["--preset", "laptop", "--method", "Z4"], "unknown letter 'Z4'"),
        (["--preset", "paper-table3", "--seq-len", "100"], "has a --seq-len of its own; leave that out"),
        (["--preset", "laptop", "--micro-batch", "4"], "has a --micro-batch of its own"),
        (["--preset", "laptop", "--gpus", "1", "2"], "takes one number of --gpus"),
        (["--preset", "laptop", "--gpus", "0"], "--gpus is 0"),
        (["--resume", "no/such"], "holds no manifest.json; name the directory of a sweep"),
        (["--resume", "."], "holds no manifest.json"),
        (["--resume", ".", "--steps", "3"], "leave all other options out"),
        (["--resume", ".", "--method", "Z3"], "leave all other options out"),
        (["--resume", ".", "--out", "x"], "leave all other options out"),
        (["--resume", ".", "--dry-run"], "leave all other options out"),
        (["--metod", "Z3"], "Did you mean --method?"),
        (["--micro-bach", "2"], "Did you mean --micro-batch?"),
        (["surplus"], "surplus"),
        (["--method"], "--method"),
        (["--method", "--device", "cpu"], "--method"),
    ],
)  # fmt: skip
def test_bad_input(argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one_sentence(["sweep", *argv], capsys, message)
    assert list(tmp_path.iterdir()) == []  # and nothing was begun


def test_a_directory_in_use_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node, "installed", lambda name: True)
    (tmp_path / "notes.txt").write_text("precious")
    one_sentence(["sweep", "--device", "cpu", "--out", str(tmp_path)], capsys, "nothing was overwritten")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    one_sentence(["sweep", "--device", "cpu", "--out", str(tmp_path / "notes.txt" / "x")], capsys, "notes.txt")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["report", "."], "holds no results; name the directory of a sweep, a breakdown or a micro."),
        (["report", "no/such"], "holds no results"),
        (["report"], "requires an argument"),
        (["compare", ".", "."], "results.jsonl"),
        (["compare", "no/such", "."], "no/such"),
        (["compare", "."], "requires an argument"),
        (["memory"], "name --method"),
        (["memory", "--method", "Z3", "--device", "cpu"], "leave --device cpu out"),
        (["memory", "--method", "Z3", "--gpu-memory-gb", "0"], "--gpu-memory-gb is 0"),
        (["memory", "--method", "Z3", "--gpu-memory-gb", "inf"], "--gpu-memory-gb is inf"),
        (["memory", "--method", "Z3", "--gpu-memry-gb", "80"], "Did you mean --gpu-memory-gb?"),
        (["plan", "--gpu-memory-gb", "-1"], "--gpu-memory-gb is -1"),
        (["memory", "--method", "Z3", "--node-memory-gb", "0"], "--node-memory-gb is 0"),
        (["plan", "--method", "Z4"], "unknown letter 'Z4'"),
        (["plan", "--steps", "3"], "--steps"),
        (["letters", "x"], "x"),
        (["swep"], "swep"),
    ],
)
def test_bad_input_of_the_other_commands(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one_sentence(argv, capsys, message)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_without_room_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    argv = ["sweep", "--device=cpu", "--model=tiny", "--method=Z3", "--checkpoint-io", f"--out={tmp_path / 'a'}"]
    said = one_sentence(argv, capsys, "a checkpoint of tiny_pretrain_deepspeed_Z3_1x")
    assert f"{tmp_path} has 0.0 GB left; name an --out with more room." in said and not list(tmp_path.iterdir())


def test_what_is_typed_does_not_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    said = one_sentence(["sweep", "--method", "Z\x1b]0;owned\x07\u202e3"], capsys, "unknown letter")
    assert said[:-1].isprintable()


# -- predictions -------------------------------------------------------------------------------------------------------

TERM = re.compile(r" *(\d+\.\d\d)  (\S.*?)  +(\S.*)")
CARD = ["--gpu-memory-gb", "80", "--node-memory-gb", "1024"]


def adds_up(total: float, parts: list[float]) -> bool:
    """As far as two decimals tell."""
    return abs(total - sum(parts)) <= 0.005 * (len(parts) + 1) + 1e-9


def predicted(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, list[list[str]], str]:
    """The summary, the columns of each cell's line, and what follows the table."""
    assert cli.invoke(argv) == 0
    summary, table, *rest = capsys.readouterr().out.split("\n\n", 2)
    _, *lines = table.splitlines()
    return summary, [re.split(r"  +", line) for line in lines], rest[0] if rest else ""


def test_the_example_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    summary, ((name, *sizes, verdict),), rest = predicted([*EXAMPLE, *CARD, "--verbose"], capsys)
    assert summary == (
        "PREDICTED, nothing was run. 1 cell on GPUs of 80.0 GiB: 1 fits; "
        "offload in nodes of 1024.0 GiB: 1 does not fit."
    )
    assert name == "70b_pretrain_deepspeed_F+R+Z3+O_8x_s350_b1" and verdict == "fits; host: does not fit"
    allocated, reserved, process, host = map(float, sizes)
    reason, *sections = rest.rstrip("\n").split("\n\n")
    assert "of the 79.2 GiB that CUDA has of 80.0" in reason and "which is more than its 1024.0 GiB" in reason
    totals = {}
    for section in sections:
        title, heads, *lines = section.splitlines()
        found = re.fullmatch(r"(.+): (\d+\.\d\d) GiB( allocated(  <- peak)?)?", title)
        assert found and heads.split() == ["GiB", "term", "formula"], section
        terms = [TERM.fullmatch(line) for line in lines]
        assert terms and all(terms)
        assert adds_up(float(found[2]), [float(term[1]) for term in terms if term])
        totals[found[1]] = (float(found[2]), bool(found[4]))
    assert totals.pop("host memory of a node that holds all ranks")[0] == host
    assert totals.pop("beyond what is allocated")[0] == pytest.approx(process - allocated, abs=0.011)
    (peak,) = [size for size, peak in totals.values() if peak]
    assert peak == max(size for size, _ in totals.values()) == allocated < reserved < process
    # Masters, moments and fp32 gradients of 69 billion parameters are 16 B each; bf16 weights and gradients 2 B each.
    assert host > 20 * 68_976_648_192 / (1 << 30)


def test_plan_and_memory_answer_alike(capsys: pytest.CaptureFixture[str]) -> None:
    """Also of a card: 24 are GiB in both."""
    for options in (["--gpu-memory-gb", "24"], ["--gpu-memory-gb", "24", "--json"], ["--verbose"], []):
        argv = ["--model", "7b", "--method", "Naive", "QL", "Z3+O", "--gpus", "1", "4", *options]
        assert cli.invoke(["plan", *argv]) == 0
        planned = capsys.readouterr().out
        assert cli.invoke(["memory", *argv]) == 0
        assert capsys.readouterr().out == planned


def test_where_nothing_is_there_to_compare_with_the_smallest_card_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["memory", "--model", "7b", "--method", "QL", "R", "Z2"]
    summary, rows, _ = predicted(argv, capsys)
    assert summary.endswith("3 cells, no GPU here to compare with (--gpu-memory-gb): 3 predicted.")
    assert [row[-1] for row in rows] == ["RTX 4090", "A100-80", "B200"]
    summary, ((*_, card),), _ = predicted(["memory", "--model", "70b", "--method", "Naive"], capsys)
    assert card == "none that is known here"


def test_json_has_every_term(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke([*EXAMPLE, *CARD, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "training_probe.memory/1"
    assert document["gpu_memory_bytes"] == 80 << 30 and document["node_memory_bytes"] == 1024 << 30
    (answer,) = document["cells"]
    assert (answer["verdict"], answer["host_verdict"]) == ("fits", "does not fit")
    totals = {moment["name"]: sum(term["bytes"] for term in moment["terms"]) for moment in answer["moments"]}
    assert totals[answer["peak"]] == max(totals.values()) == answer["allocated_bytes"]
    assert answer["process_bytes"] == answer["allocated_bytes"] + sum(term["bytes"] for term in answer["beyond"])
    assert answer["host_bytes"] == sum(term["bytes"] for term in answer["host"])


def test_memory_of_what_cannot_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    summary, (row,), _ = predicted(["memory", "--method", "Z1", "--engine", "ddp"], capsys)
    assert summary.endswith(": 1 unsupported.")
    assert row[1:4] == ["-", "-", "-"] and row[4].startswith("unsupported: ddp shards nothing")


def test_plan_shows_a_line_of_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--model", "7b", "13b", "--method", "Naive", "QL", "F+R+Z3+O", "--gpus", "1", "8"]
    summary, rows, rest = predicted(argv, capsys)
    assert summary.endswith("12 cells, no GPU here to compare with (--gpu-memory-gb): 12 predicted.")
    assert len(rows) == 12 and rest == ""
    for name, allocated, reserved, process, *more in rows:
        assert 0 < float(allocated) < float(reserved) < float(process)
        assert len(more) == (2 if "+O" in name else 1)


def test_plan_says_what_will_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--model", "7b", "--method", "Naive", "QL", "--engine", "deepspeed", "fsdp2", "--gpu-memory-gb=24"]
    summary, rows, _ = predicted(argv, capsys)
    assert summary.endswith("4 cells on GPUs of 24.0 GiB: 1 fits, 1 does not fit, 2 unsupported.")
    naive, no_naive, qlora, no_qlora = (row[-1] for row in rows)
    assert (naive, qlora) == ("does not fit", "fits")
    assert "unsupported: fsdp2 always shards" in no_naive and "unsupported: fsdp2 always shards" in no_qlora


def test_a_verdict_is_tight_where_fragments_decide(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["memory", "--model", "7b", "--method", "Naive", "--gpu-memory-gb"]
    _, ((_, allocated, _, process, _),), _ = predicted([*argv, "200"], capsys)
    for gib, expected in ((float(allocated), "does not fit"), (float(process), "tight"), (80, "fits")):
        _, ((*_, verdict),), reason = predicted([*argv, str(gib)], capsys)
        assert verdict == expected
        assert ("expandable_segments" in reason) == (expected == "tight")


def test_a_plan_without_gpus_is_of_the_papers_eight(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke(["plan"]) == 0
    whole = capsys.readouterr().out
    assert cli.invoke(["plan", "--preset", "paper-table3", "--gpus", "8"]) == 0
    assert whole == capsys.readouterr().out and "_8x_" in whole and "_1x_" not in whole


def test_a_batch_that_is_searched_is_planned_from_its_start(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--model", "7b", "--method", "F+R+Z3+O", "--micro-batch", "max", "--gpu-memory-gb", "80"]
    _, ((name, *_),), _ = predicted(argv, capsys)
    found = re.search(r"_b(\d+) \(max is searched from here\)$", name)
    assert found and int(found[1]) > 1


def test_letters_are_all_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke(["letters"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["Naive", *LETTERS]
    assert [line.split(None, 1)[1] for line in lines[1:]] == list(LETTERS.values())


def test_one_process_may_be_all_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke(["sweep", "--gpus", "1", "--device", "cpu", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "--nproc-per-node 1" in shown and "--nproc-per-node 2" not in shown


@pytest.mark.parametrize("short", [False, True])
def test_deepspeed_makes_adamw_itself_unless_it_has_8_bits(short: bool) -> None:
    config = deepspeed_config(cell("Z2", model="7b", adamw_8bit=short))
    assert ("optimizer" in config) != short
    assert config["zero_allow_untested_optimizer"]


def test_a_dry_run_needs_neither_gpus_nor_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", "7b", "--method", "Z3+O", "Naive", "--engine", "deepspeed", "ddp", "--gpus", "8"]
    assert cli.invoke(["sweep", *argv, "--device", "cuda", "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "4 cells; nothing was started\n" and list(tmp_path.iterdir()) == []
    offloaded, sharded, plain, replicas = captured.out.rstrip("\n").split("\n\n")
    assert sharded.splitlines()[1:] == ["# unsupported: ddp shards nothing; use deepspeed or fsdp2 for ZeRO"]
    for part, config in ((offloaded, True), (plain, True), (replicas, False)):
        name, there, directory, trial, command, *more, predicted = part.splitlines()
        assert there.startswith("# for a machine with its 8 GPUs") and "CUDA_VISIBLE_DEVICES" not in command
        assert directory.startswith("mkdir --parents runs/") and '"gpus":8' in trial
        assert name.startswith("# 7b_pretrain_") and name.endswith("_8x_s350_b1")
        assert "-m torch.distributed.run --nproc-per-node 8" in command and "-m training_probe.worker" in command
        if config:
            asked = cell(name.split("_")[3], model="7b", gpus=8)
            assert json.loads("\n".join(line.removeprefix("# ") for line in more)) == deepspeed_config(asked)
        else:
            assert more == []
        found = re.fullmatch(r"# predicted memory: (\d+\.\d\d) GiB \((.+)\)", predicted)
        assert found
        assert adds_up(float(found[1]), [float(term.rpartition(" ")[2]) for term in found[2].split(", ")])


def test_a_dry_run_without_gpus_is_of_as_many_as_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke(["sweep", "--preset", "paper-table2", "--dry-run"]) == 0
    dry = [line[2:] for line in capsys.readouterr().out.splitlines() if line.startswith("# 7b_")]
    assert cli.invoke(["plan", "--preset", "paper-table2"]) == 0
    plan = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("7b_")]
    assert dry == plan and all("_8x_" in name for name in dry) and dry
    assert cli.invoke(["sweep", "--model", "7b", "--method", "F", "--dry-run"]) == 0
    assert "for a machine with its GPU;" in capsys.readouterr().out
    assert cli.invoke(["sweep", "--dry-run"]) == 0
    assert '"device":"cpu"' in capsys.readouterr().out  # what is for the CPU stays so


# -- results -----------------------------------------------------------------------------------------------------------


def row(outcome: str = "ok", **fields: Any) -> CellResult:
    asked = Cell(model="tiny", method={"ok": "Naive", "oom": "Z1"}.get(outcome, "Z2"), device="cpu")
    return of_cell(asked, platform="here", outcome=outcome, **fields)  # type: ignore[arg-type]


GOOD = row(valid=True, runs=1, tokens_per_s=100.0, tokens_per_s_runs=[100.0], peak_memory_gb=1.0)


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([GOOD], 0),
        ([GOOD, row("oom", reason="out of memory")], 0),
        ([GOOD, row("unsupported", reason="no")], 0),
        ([row("oom", reason="out of memory")], 0),
        ([row("unsupported", reason="no")], 3),  # nothing was run
        ([row("skipped", reason="too large")], 3),
        ([GOOD, row("crashed", reason="signal 11")], 3),
        ([row("timeout", reason="no step")], 3),
        ([row(valid=False, runs=1, tokens_per_s=9.0, reason="the loss did not fall")], 4),
        ([row(valid=False, runs=1, tokens_per_s=9.0), row("crashed")], 3),
        ([row(valid=True, runs=2, tokens_per_s=207.5, tokens_per_s_std=196.0)], 4),  # 346 and 69
        ([row(valid=True, runs=2, tokens_per_s=207.5, tokens_per_s_std=20.0)], 0),
    ],
)
def test_the_report_tells_by_its_exit_code(
    rows: list[CellResult], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for each in rows:
        results.append(tmp_path, each)
    assert cli.invoke(["report", str(tmp_path)]) == code
    captured = capsys.readouterr()
    assert json.loads(captured.out) == json.loads((tmp_path / "report.json").read_text())
    assert captured.out.count("\n") == 1 and "Traceback" not in captured.err
    assert cli.invoke(["compare", str(tmp_path), str(tmp_path)]) == 0


# -- as a program ------------------------------------------------------------------------------------------------------

PROGRAM = [sys.executable, "-c", "from training_probe.cli import main; main()"]


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([*PROGRAM, *argv], capture_output=True, text=True, env=environment, timeout=60)


def test_the_program_itself() -> None:
    done = run(*EXAMPLE)
    assert done.returncode == 0 and "RTX 4090" in done.stdout
    assert done.stderr == "sequences of 350 tokens are the paper's; --seq-len names others.\n"
    done = run("sweep", "--method", "Z4")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("training_probe: unknown letter 'Z4'") and done.stderr.count("\n") == 1
    assert run("--version").stdout.strip()


def test_a_reader_that_has_enough_ends_it_quietly() -> None:
    program = subprocess.Popen(
        [*PROGRAM, "plan"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert program.stdout is not None and program.stderr is not None
    program.stdout.close()
    assert program.stderr.read() == b"" and program.wait(60) == exit_codes.UNREAD
    program.stderr.close()


@pytest.mark.parametrize(
    "argv", [None, ["letters"], EXAMPLE, ["plan"], ["sweep", "--dry-run"], ["sweep", "--method", "Z4"]]
)
def test_nothing_heavy_is_imported_for_it(argv: list[str] | None) -> None:
    heavy = ["torch", "transformers", "deepspeed", "matplotlib", "aiohttp", "docker", "servers"]
    if argv in (None, ["letters"]):
        heavy.append("numpy")
    code = f"""
import sys, training_probe.cli
if {argv!r} is not None:
    training_probe.cli.invoke({argv!r})
print([name for name in {heavy} if name in sys.modules])
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_a_script_can_ask_whether_it_fits() -> None:
    argv = ["memory", "--model", "7b", "--method", "QL+F+R", "--seq-len", "1024", "--check"]
    assert cli.invoke([*argv, "--gpu-memory-gb", "24"]) == 0
    assert cli.invoke([*argv, "--gpu-memory-gb", "4"]) == 1
    assert cli.invoke(["memory", "--model", "7b", "--method", "Naive", "--check"]) == 2  # nothing to compare with


def test_memory_says_what_would_save_some_and_whose_the_length_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke(["memory", "--model", "7b", "--method", "L"]) == 0
    told = capsys.readouterr().err
    assert "FlashAttention (F) would save" in told and "both (F+R) would save" in told and "are the paper's" in told
    assert cli.invoke(["memory", "--model", "7b", "--method", "L+F+R", "--seq-len", "1024"]) == 0
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("LoRA of deepspeed trains in fp32, 16 bytes a trained parameter, and keeps fp32 inputs")
