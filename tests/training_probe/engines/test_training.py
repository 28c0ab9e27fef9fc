"""Every engine with every method, in one process and in two over gloo: each trains, and those that do the same sums
reach the same losses. Weights, tokens and optimizer are the same for all (Megatron's layers have weights of their own).

Losses fall by about 0.4 in these steps. What only divides work differently agrees to 2e-3: bf16 rounds away less than
that; with bf16 masters instead of fp32 ones losses differ by ten times as much.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from tests.support.waiting import free_ports
from tests.training_probe.engines import tiny
from training_probe.flops import weights
from training_probe.grid import Cell
from training_probe.launch.runner import INTERPRETED, Launching, job_of, start_here
from training_probe.protocol import STEPS_FILE, RankReport, Step, write_atomically
from training_probe.results import loss_doubt

pytestmark = tiny.needs_engines

COMPILING = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # its pool of processes does not survive a fork
AGREE = 2e-3  # between engines and stages
SAME = 1e-3  # between ways to compute one and the same layer
SHARDED = [("deepspeed", method) for method in ("Z1", "Z2", "Z3", "Z2+O", "Z3+O", "Z3+OO")] + [
    ("fsdp2", method) for method in ("Z2", "Z3", "Z2+O")
]
BOTH = [
    *(
        ("deepspeed", method)
        for method in ("Naive", "L", "L+Z3", "QL", "QL+Z2", "QL+Z3", "PT", "PT+Z3", "R", "RS", "F", "F+R", "Q", "Q+Z2")
    ),
    ("fsdp2", "L+Z3"), ("fsdp2", "QL+Z3"), ("fsdp2", "QL+R+Z2"),
    ("ddp", "Naive"), ("ddp", "L"), ("ddp", "PT"), ("ddp", "Q"), ("ddp", "QL"),
    ("megatron", "Naive"), ("megatron", "R"), ("megatron", "RS"), ("megatron", "F"),
]  # fmt: skip
ACCUMULATING = [("deepspeed", "Naive"), ("deepspeed", "Z2"), ("deepspeed", "Z3"), ("ddp", "Naive"), ("fsdp2", "Z3"),
                ("megatron", "Naive")]  # fmt: skip
# What came after the paper, each beside the cell without the options.
SMALL_LORA = {"lora_rank": 8, "lora_alpha": 32, "lora_targets": ("q_proj", "v_proj", "o_proj")}
EIGHT_BIT, CHUNKED, LIGER = {"adamw_8bit": True}, {"loss": "chunked"}, {"loss": "liger"}
LORAS = [("ddp", "L"), ("deepspeed", "L+Z3"), ("fsdp2", "L+Z3")]
SINGLE_QUANT = [("ddp", "QL"), ("deepspeed", "QL+Z3"), ("fsdp2", "QL+Z3")]
HALVES, IN_HALVES = {"adapter_dtype": "bf16"}, [("ddp", "L"), ("ddp", "QL"), ("fsdp2", "L+Z3")]
IN_EIGHT_BITS = [("ddp", "Naive"), ("deepspeed", "Z2"), ("deepspeed", "Z3"), ("fsdp2", "Z3")]
AWAY, GONE_AWAY = {"offload_activations": True}, [
    ("ddp", "Naive"), ("ddp", "F+R"), ("ddp", "QL"), ("deepspeed", "Naive"), ("deepspeed", "Z2"), ("fsdp2", "Z2"),
    ("fsdp2", "Z3"), ("fsdp2", "R+Z3"), ("fsdp2", "L+Z3"), ("fsdp2", "QL+Z3"),
]  # fmt: skip
DORA, BY_DORA = {"dora": True}, [
    ("ddp", "L"), ("ddp", "QL"), ("deepspeed", "L"), ("deepspeed", "L+Z2"), ("fsdp2", "L+Z3"),
]  # fmt: skip
IN_BF16 = [("Z2", "bf16-stochastic"), ("Z3", "bf16-stochastic"), ("Z3", "bf16-kahan")]
MUON, BY_MUON = {"optim": "muon"}, [
    ("ddp", "Naive"), ("deepspeed", "Naive"), ("deepspeed", "Z1"), ("deepspeed", "Z2"), ("deepspeed", "Z3"),
    ("fsdp2", "Z2"), ("fsdp2", "Z3"), ("ddp", "L"), ("deepspeed", "L+Z3"), ("fsdp2", "L+Z3"),
]  # fmt: skip
IN_CHUNKS = [("ddp", "Naive"), ("deepspeed", "Z3"), ("fsdp2", "Z3"), ("deepspeed", "L+Z3"), ("ddp", "PT")]
PAIRS, PREFERRING = {"task": "dpo"}, [("deepspeed", "Z2"), ("deepspeed", "Z3"), ("fsdp2", "F+Z3"), ("ddp", "L")]
BY_LIGER = [("ddp", "Naive"), ("deepspeed", "Z3"), ("fsdp2", "Z3"), ("ddp", "L")]
PACKED = {"lengths": "lognormal:10:0.7", "packing": True}
IN_ROWS = [("ddp", "F"), ("fsdp2", "F+Z3"), ("deepspeed", "Z2")]
LATER = [
    *((engine, method, SMALL_LORA) for engine, method in LORAS),
    *((engine, method, {"double_quant": False}) for engine, method in SINGLE_QUANT),
    *((engine, method, HALVES) for engine, method in IN_HALVES),
    *((engine, method, EIGHT_BIT) for engine, method in IN_EIGHT_BITS),
    *((engine, method, AWAY) for engine, method in GONE_AWAY),
    *((engine, method, DORA) for engine, method in BY_DORA),
    *((engine, method, MUON) for engine, method in BY_MUON),
    *(("fsdp2", method, {"states": states}) for method, states in IN_BF16),
    *((engine, method, CHUNKED) for engine, method in IN_CHUNKS),
    *((engine, method, LIGER) for engine, method in BY_LIGER),
    *((engine, method, PACKED) for engine, method in IN_ROWS),
]
THREE_TIMES, AT_ONCE = {"micro_batch": 1, "grad_accum": 3}, {"micro_batch": 3}  # of the same three sequences


def cells(gpus: int) -> list[Cell]:
    found = [tiny.cell(engine, method, gpus) for engine, method in SHARDED + BOTH]
    for engine, method in ACCUMULATING:
        found += [tiny.cell(engine, method, gpus, **how) for how in (THREE_TIMES, AT_ONCE)]
    found += [tiny.cell(engine, method, gpus, **options) for engine, method, options in LATER]
    found.append(tiny.cell("deepspeed", "Naive", gpus, attention="math"))
    if gpus == 2:
        found += [
            tiny.cell("megatron", "Naive", 2, tp=2),
            tiny.cell("megatron", "R", 2, tp=2),
            tiny.cell("megatron", "Naive", 2, pp=2, grad_accum=3),
        ]
    return list(dict.fromkeys(found))


ALL = cells(1) + cells(2)
EVERY_KIND = [
    *(tiny.cell("deepspeed", method, 2) for method in ("Z2", "Z3+O", "L+Z3", "QL+Z2", "PT")),
    *(tiny.cell("ddp", method, 1) for method in ("Naive", "QL")),
    tiny.cell("fsdp2", "Z3", 2), tiny.cell("fsdp2", "L+Z3", 2), tiny.cell("megatron", "Naive", 2, tp=2),
]  # fmt: skip


class Trained:
    """The reports of the ranks of many trials. The first question runs all of the trials with as many processes."""

    def __init__(self, root: Path, cells: Sequence[Cell]) -> None:
        self._root, self._cells = root, cells
        self._places: dict[Cell, Path] = {}

    def reports(self, cell: Cell) -> list[RankReport]:
        if cell not in self._places:
            left = [each for each in self._cells if each.gpus == cell.gpus and each not in self._places]
            self._run(left if cell in left else [cell])
        place = self._places[cell]
        found = []
        for rank in range(cell.gpus):
            file, log = place / f"rank{rank}.json", place / f"log{rank}.txt"
            assert file.exists(), f"{cell.name}: {(place / f'exit{rank}').read_text()}\n{log.read_text()[-2000:]}"
            report = msgspec.json.decode(file.read_bytes(), type=RankReport)
            assert report.outcome == "ok", f"{cell.name}: {report.reason}\n{log.read_text()[-2000:]}"
            found.append(report)
        return found

    def losses(self, cell: Cell) -> list[float]:
        losses = self.reports(cell)[0].losses
        assert len(losses) == tiny.WARMUP_STEPS + tiny.STEPS
        assert None not in losses
        return [float(loss) for loss in losses if loss is not None]

    def steps(self, cell: Cell) -> list[Step]:
        self.reports(cell)
        return [msgspec.json.decode(line, type=Step) for line in (self._places[cell] / STEPS_FILE).open("rb")]

    def _run(self, cells: Sequence[Cell]) -> None:
        gpus = cells[0].gpus
        root = self._root / f"{gpus}_{len(self._places)}"
        ports = free_ports(len(cells) + 1)
        for number, cell in enumerate(cells):
            self._places[cell] = root / str(number)
            self._places[cell].mkdir(parents=True)
            write_atomically(self._places[cell] / "trial.json", tiny.trial(cell))
            (self._places[cell] / "port").write_text(str(ports[number]))
        program = Path(__file__).with_name("many_trials.py")

        def command(*, python: str, processes: int, port: int, directory: Path, node: object = None) -> tuple[str, ...]:
            return (
                python, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-addr", "127.0.0.1",
                "--master-port", str(port), str(program), str(directory),
            )  # fmt: skip

        start = start_here(job_of(tiny.trial(cells[0]), root, Launching(command=command)), ports[-1])
        done = subprocess.run(
            start.argv, env={**os.environ, **start.env, **COMPILING, INTERPRETED: "1"}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]


class Rehearsal(Trained):
    """Answers a test without training, to learn which cells it asks for."""

    def __init__(self) -> None:
        self.asked: list[Cell] = []

    def reports(self, cell: Cell) -> list[RankReport]:
        self.asked.append(cell)
        return []

    def losses(self, cell: Cell) -> list[float]:
        self.asked.append(cell)
        return [6.24 - 0.1 * step for step in range(tiny.WARMUP_STEPS + tiny.STEPS)]


def needed(request: pytest.FixtureRequest) -> list[Cell]:
    """The cells that the chosen tests of the file ask for. Where one test fails before its last question, its other
    cells are trained when it asks for them."""
    rehearsal = Rehearsal()
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.path == request.path and "trained" in item.fixturenames:
            with suppress(Exception):
                item.function(rehearsal, **item.callspec.params if hasattr(item, "callspec") else {})
    return list(dict.fromkeys(rehearsal.asked))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"), needed(request))


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=[pytest.mark.always] * (cell in EVERY_KIND)) for cell in ALL],
    ids=[cell.name for cell in ALL],
)  # fmt: skip
def test_it_trains(trained: Trained, cell: Cell) -> None:
    losses = trained.losses(cell)
    assert loss_doubt(losses) is None, losses
    assert losses[0] == pytest.approx(6.24, abs=0.1)  # nothing learned yet: the logarithm of 512 tokens
    assert losses[-1] < losses[0] - 0.02
    for report in trained.reports(cell):
        assert report.steps == tiny.STEPS
        assert report.seconds is not None and report.seconds > 0
        assert report.peak_allocated_bytes is not None and report.peak_allocated_bytes > 0
        assert report.versions["torch"]
    counted = weights(tiny.SPEC.decoder, cell)
    report = trained.reports(cell)[0]
    assert (report.parameters, report.trainable_parameters) == (counted.total, counted.trainable)
    _phases_are_within_their_steps(cell, trained.steps(cell))


def _phases_are_within_their_steps(cell: Cell, steps: list[Step]) -> None:
    assert [step.step for step in steps] == list(range(tiny.WARMUP_STEPS + tiny.STEPS))
    assert [step.phase for step in steps] == ["warmup"] * tiny.WARMUP_STEPS + ["timed"] * tiny.STEPS
    for step in steps:
        if cell.pp > 1:
            assert step.forward_s is None and step.backward_s is None
        else:
            assert step.forward_s is not None and step.backward_s is not None
            phases = step.forward_s + step.backward_s + step.optimizer_s
            assert phases == pytest.approx(step.step_s, rel=1e-6)


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize(("engine", "method"), SHARDED)
def test_sharding_changes_no_loss(trained: Trained, engine: str, method: str, gpus: int) -> None:
    expected = trained.losses(tiny.cell("deepspeed", "Z1", gpus))
    assert trained.losses(tiny.cell(engine, method, gpus)) == pytest.approx(expected, abs=AGREE)


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("method", ["Naive", "L", "PT", "Q", "QL"])
def test_ddp_and_deepspeed_without_zero_agree(trained: Trained, method: str, gpus: int) -> None:
    expected = trained.losses(tiny.cell("deepspeed", method, gpus))
    assert trained.losses(tiny.cell("ddp", method, gpus)) == pytest.approx(expected, abs=AGREE)


@pytest.mark.parametrize(("engine", "method"), [("deepspeed", "L+Z3"), ("fsdp2", "L+Z3")])
def test_adapters_over_a_sharded_model_learn_the_same(trained: Trained, engine: str, method: str) -> None:
    """In one process: rank 0 shows its own sequences only."""
    expected = trained.losses(tiny.cell("deepspeed", "L", 1))
    assert trained.losses(tiny.cell(engine, method, 1)) == pytest.approx(expected, abs=5 * AGREE)  # bf16 masters in L


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("method", ["QL+Z3", "QL+R+Z2"])
def test_4_bit_weights_that_are_divided_are_those_of_one_gpu(trained: Trained, method: str, gpus: int) -> None:
    expected = trained.losses(tiny.cell("ddp", "QL", gpus))
    assert trained.losses(tiny.cell("fsdp2", method, gpus)) == pytest.approx(expected, abs=AGREE)


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize(("engine", "method"), ACCUMULATING)
def test_accumulating_is_a_larger_batch(trained: Trained, engine: str, method: str, gpus: int) -> None:
    expected = trained.losses(tiny.cell(engine, method, gpus, **AT_ONCE))
    assert trained.losses(tiny.cell(engine, method, gpus, **THREE_TIMES)) == pytest.approx(expected, abs=AGREE)


@pytest.mark.parametrize("gpus", [1, 2])
def test_engines_accumulate_alike(trained: Trained, gpus: int) -> None:
    found = {(engine, method): trained.losses(tiny.cell(engine, method, gpus, **THREE_TIMES))
             for engine, method in ACCUMULATING}  # fmt: skip
    assert found["ddp", "Naive"] == pytest.approx(found["deepspeed", "Naive"], abs=AGREE)
    assert found["fsdp2", "Z3"] == pytest.approx(found["deepspeed", "Z3"], abs=AGREE)
    assert found["deepspeed", "Z2"] == pytest.approx(found["deepspeed", "Z3"], abs=AGREE)


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize(("method", "attention"), [("R", "eager"), ("RS", "eager"), ("F", "eager"), ("F+R", "eager"),
                                                   ("Naive", "math")])  # fmt: skip
def test_a_layer_may_be_computed_in_any_way(trained: Trained, method: str, attention: str, gpus: int) -> None:
    expected = trained.losses(tiny.cell("deepspeed", "Naive", gpus))
    found = trained.losses(tiny.cell("deepspeed", method, gpus, attention=attention))
    assert found == pytest.approx(expected, abs=SAME)


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("method", ["R", "RS", "F"])
def test_megatrons_too(trained: Trained, method: str, gpus: int) -> None:
    expected = trained.losses(tiny.cell("megatron", "Naive", gpus))
    assert trained.losses(tiny.cell("megatron", method, gpus)) == pytest.approx(expected, abs=SAME)


@pytest.mark.parametrize("gpus", [1, 2])
def test_lora_of_another_size_learns_the_same_in_every_engine(trained: Trained, gpus: int) -> None:
    """Its first loss is the model's own, whatever its size."""
    found = {each: trained.losses(tiny.cell(*each, gpus, **SMALL_LORA)) for each in LORAS}
    assert found["ddp", "L"][0] == trained.losses(tiny.cell("ddp", "L", gpus))[0]
    assert found["deepspeed", "L+Z3"] == pytest.approx(found["ddp", "L"], abs=5 * AGREE)
    if gpus == 1:
        assert found["fsdp2", "L+Z3"] == pytest.approx(found["ddp", "L"], abs=10 * AGREE)  # its own bf16 masters


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize(("engine", "method"), SINGLE_QUANT)
def test_scales_may_be_quantized_or_not(trained: Trained, engine: str, method: str, gpus: int) -> None:
    expected = trained.losses(tiny.cell(engine, method, gpus))
    found = trained.losses(tiny.cell(engine, method, gpus, double_quant=False))
    assert found == pytest.approx(expected, abs=SAME) and found != expected


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize(("engine", "method"), IN_HALVES)
def test_lora_in_bf16_begins_as_in_fp32_and_learns_about_as_much(
    trained: Trained, engine: str, method: str, gpus: int
) -> None:
    """PEFT begins with a zero matrix, so that both begin with the model's own loss."""
    expected = trained.losses(tiny.cell(engine, method, gpus))
    found = trained.losses(tiny.cell(engine, method, gpus, **HALVES))
    assert found[0] == expected[0] and found == pytest.approx(expected, abs=10 * AGREE) and found != expected


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize(("engine", "method"), IN_EIGHT_BITS)
def test_8_bit_adamw_learns_as_much(trained: Trained, engine: str, method: str, gpus: int) -> None:
    asked = tiny.cell(engine, method, gpus, **EIGHT_BIT)
    assert trained.losses(asked) == pytest.approx(trained.losses(tiny.cell(engine, method, gpus)), abs=AGREE)
    package = "torchao" if engine == "fsdp2" else "bitsandbytes"
    assert trained.reports(asked)[0].optimizer == f"{package} AdamW8bit"


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize(("method", "states"), IN_BF16)
def test_bf16_states_learn_as_much_as_fp32(trained: Trained, method: str, states: str, gpus: int) -> None:
    asked = tiny.cell("fsdp2", method, gpus, states=states)
    expected = trained.losses(tiny.cell("fsdp2", method, gpus))
    found = trained.losses(asked)
    bound = 10 * AGREE if states == "bf16-stochastic" else 2 * AGREE  # the loss falls by half a unit meanwhile
    assert found == pytest.approx(expected, abs=bound) and found != expected
    name = "torchao _AdamW" if states == "bf16-stochastic" else "training_probe KahanAdamW"
    assert trained.reports(asked)[0].optimizer == name


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize(("engine", "method"), GONE_AWAY)
def test_activations_on_the_host_change_no_loss(trained: Trained, engine: str, method: str, gpus: int) -> None:
    found = trained.losses(tiny.cell(engine, method, gpus, **AWAY))
    assert found == trained.losses(tiny.cell(engine, method, gpus))


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize(("engine", "method"), BY_DORA)
def test_dora_begins_as_lora_and_is_the_same_in_every_engine(
    trained: Trained, engine: str, method: str, gpus: int
) -> None:
    """Magnitudes begin as the norms of the weights, so that the first loss is the model's own."""
    found, plain = (trained.losses(tiny.cell(engine, method, gpus, **more)) for more in (DORA, {}))
    assert found[0] == pytest.approx(plain[0], abs=AGREE) and found != plain
    expected = trained.losses(tiny.cell("ddp", "QL" if "QL" in method else "L", gpus, **DORA))
    assert found == pytest.approx(expected, abs=10 * AGREE)


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize(("engine", "method"), BY_MUON)
def test_muon_is_the_same_in_every_engine(trained: Trained, engine: str, method: str, gpus: int) -> None:
    found = trained.losses(tiny.cell(engine, method, gpus, **MUON))
    expected = trained.losses(tiny.cell("ddp", "L" if "L" in method else "Naive", gpus, **MUON))
    assert found == pytest.approx(expected, abs=5 * AGREE)
    plain = trained.losses(tiny.cell(engine, method, gpus))
    assert found[0] == plain[0] and found != plain
    name = "deepspeed MuonWithAuxAdam" if engine == "deepspeed" else "torch Muon"
    assert trained.reports(tiny.cell(engine, method, gpus, **MUON))[0].optimizer.startswith(name)


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize(
    ("engine", "method", "loss"), [(*each, "chunked") for each in IN_CHUNKS] + [(*each, "liger") for each in BY_LIGER]
)
def test_a_loss_without_whole_logits_is_the_same(
    trained: Trained, engine: str, method: str, loss: str, gpus: int
) -> None:
    expected = trained.losses(tiny.cell(engine, method, gpus))
    assert trained.losses(tiny.cell(engine, method, gpus, loss=loss)) == pytest.approx(expected, abs=SAME)


@pytest.mark.parametrize("gpus", [1, 2])
def test_engines_agree_on_packed_rows(trained: Trained, gpus: int) -> None:
    found = [trained.losses(tiny.cell(*each, gpus, **PACKED)) for each in IN_ROWS]
    assert found[1] == pytest.approx(found[2], abs=SAME) and found[0] == pytest.approx(found[2], abs=10 * AGREE)


@pytest.mark.parametrize("gpus", [1, 2])
def test_engines_prefer_alike(trained: Trained, gpus: int) -> None:
    z2, z3, fsdp2, lora = (trained.losses(tiny.cell(*each, gpus, **PAIRS)) for each in PREFERRING)
    assert z2[0] == z3[0] == fsdp2[0] == lora[0] == pytest.approx(0.693147, abs=1e-5)
    assert z3 == pytest.approx(z2, abs=AGREE) and fsdp2 == pytest.approx(z2, abs=AGREE)
    assert max(z2[-1], lora[-1]) < 0.6


def test_two_replicas_see_different_sequences(trained: Trained) -> None:
    ranks = trained.reports(tiny.cell("ddp", "Naive", 2))
    assert ranks[0].losses[0] != ranks[1].losses[0]
    assert trained.losses(tiny.cell("ddp", "Naive", 1)) != pytest.approx(
        trained.losses(tiny.cell("ddp", "Naive", 2)), abs=AGREE
    )


@pytest.mark.parametrize("split", ["tp", "pp"])
def test_ranks_of_one_replica_see_the_same_loss(trained: Trained, split: str) -> None:
    more = {"pp": 2, "grad_accum": 3} if split == "pp" else {"tp": 2}
    ranks = trained.reports(tiny.cell("megatron", "Naive", 2, **more))
    assert list(ranks[0].losses) == pytest.approx(list(ranks[1].losses), abs=1e-6)
