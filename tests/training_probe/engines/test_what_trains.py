"""What a step changes and what it leaves as it was, to the bit; and that every engine starts from the same weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tests.training_probe.engines import tiny
from training_probe.flops import flops_per_token, matrix_parameters
from training_probe.grid import LORA_RANK, PROMPT_TOKENS
from training_probe.memory.layers import layer_bytes
from training_probe.memory.rank import NF4_BYTES, NF4_DOUBLE_BYTES, PACKED_BYTES, STATES_8BIT
from training_probe.protocol import MUON_TIMES, WEIGHT_DECAY, learning_rate

pytestmark = tiny.needs_engines

STEPS = 3


class Training:
    """One trial in this process, whose model can be looked at."""

    def __init__(self, torch: Any, engine: str, method: str, **more: Any) -> None:
        from training_probe.worker import batches, engines, model

        self.trial = tiny.trial(tiny.cell(engine, method, **more))
        device = torch.device("cpu")
        self._kernel = model.attention_kernel
        self.stepper: Any = engines.build(self.trial, device)
        self._batch = batches.batch(self.trial, 0, device, tiny.SPEC.vocab_size)
        self.model = self.stepper.engine.module if engine == "deepspeed" else self.stepper.model

    def gradients(self) -> None:
        """Both passes of all micro batches."""
        with self._kernel(self.trial.cell):
            for left in reversed(range(len(self._batch))):
                loss = self.stepper.forward(self._batch[-1 - left], left == 0)
                self.stepper.backward(loss, left == 0)

    def step(self) -> None:
        self.gradients()
        self.stepper.step()

    def digests(self) -> dict[str, str]:
        """Of the bytes of every parameter, packed ones included."""
        return {name: digest(parameter) for name, parameter in self.model.named_parameters()}


def digest(parameter: Any) -> str:
    import torch

    return hashlib.sha256(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def moved(training: Training) -> set[str]:
    before = training.digests()
    for _ in range(STEPS):
        training.step()
    return {name for name, now in training.digests().items() if now != before[name]}


@pytest.mark.parametrize("method", ["L", "QL"])
@pytest.mark.parametrize("engine", ["ddp", "deepspeed"])
def test_lora_moves_all_adapters_and_nothing_else(alone: Any, engine: str, method: str) -> None:
    training = Training(alone, engine, method)
    adapters = {name for name, _ in training.model.named_parameters() if ".lora_" in name}
    assert len(adapters) == tiny.SPEC.layers * 7 * 2
    assert moved(training) == adapters
    hidden, wide, kv = 128, 344, 64
    linears = [(hidden, hidden)] * 2 + [(hidden, kv)] * 2 + [(hidden, wide)] * 2 + [(wide, hidden)]
    assert training.stepper.parameters[1] == tiny.SPEC.layers * sum(LORA_RANK * (a + b) for a, b in linears)


def test_lora_sits_where_it_is_asked_to(alone: Any) -> None:
    from training_probe.protocol import Unsupported

    training = Training(alone, "ddp", "L", lora_rank=8, lora_alpha=32, lora_targets=("q_proj", "down_proj"))
    shapes = {name.split(".layers.")[1]: tuple(parameter.shape) for name, parameter in training.model.named_parameters()
              if ".lora_" in name and ".layers.0." in name}  # fmt: skip
    assert shapes == {
        "0.self_attn.q_proj.lora_A.default.weight": (8, 128), "0.self_attn.q_proj.lora_B.default.weight": (128, 8),
        "0.mlp.down_proj.lora_A.default.weight": (8, 344), "0.mlp.down_proj.lora_B.default.weight": (128, 8),
    }  # fmt: skip
    adapted = [module for module in training.model.modules() if hasattr(module, "lora_A")]
    assert len(adapted) == 2 * tiny.SPEC.layers and all(each.scaling == {"default": 4.0} for each in adapted)
    from training_probe.worker import model

    unlike = alone.nn.Sequential()
    unlike.add_module("qkv_proj", alone.nn.Linear(4, 4))
    unlike.config = training.model.config
    with pytest.raises(Unsupported, match=r"no linear layer q_proj that LoRA could adapt; it has \['qkv_proj'"):
        model.adapt(unlike, training.trial)


@pytest.mark.parametrize("double", [True, False])
def test_4_bit_weights_hold_as_many_bytes_as_predicted(alone: Any, double: bool) -> None:
    """But for tables of 16 and 256 values and an offset, which each layer has, and counts that are rounded up."""
    training = Training(alone, "ddp", "QL", double_quant=double)
    layer = training.model.get_submodule("base_model.model.model.layers.0.mlp.down_proj.base_layer")
    state, weights = layer.weight.quant_state, 128 * 344
    scales = state.absmax.nbytes + (state.state2.absmax.nbytes if double else 0)
    each = NF4_DOUBLE_BYTES if double else NF4_BYTES
    assert state.nested == double
    assert layer.weight.nbytes + scales == pytest.approx(each * weights, abs=8)


@pytest.mark.parametrize("double", [True, False])
def test_fsdp2_divides_what_is_packed_and_keeps_all_scales(alone: Any, double: bool) -> None:
    training = Training(alone, "fsdp2", "QL+Z3", double_quant=double)
    layer = training.model.get_submodule("base_model.model.model.layers.0.mlp.down_proj.base_layer")
    state, weights = layer.quant_state, 128 * 344
    scales = state.absmax.nbytes + (state.state2.absmax.nbytes if double else 0)
    assert layer.weight.to_local().nbytes == PACKED_BYTES * weights
    assert scales == pytest.approx(((NF4_DOUBLE_BYTES if double else NF4_BYTES) - PACKED_BYTES) * weights, abs=8)
    adapters = {name for name, _ in training.model.named_parameters() if ".lora_" in name}
    before = {name: digest(each.full_tensor()) for name, each in training.model.named_parameters()}
    training.step()
    training.step()
    now = {name: digest(each.full_tensor()) for name, each in training.model.named_parameters()}
    assert {name for name in now if now[name] != before[name]} == adapters


@pytest.mark.parametrize(("engine", "method"), [("ddp", "Naive"), ("deepspeed", "Z2"), ("deepspeed", "Z3")])
def test_8_bit_states_hold_as_many_bytes_as_predicted(alone: Any, engine: str, method: str) -> None:
    """bitsandbytes keeps 32 bits of tensors below 4096 elements, the norms; ZeRO has one flat tensor."""
    training = Training(alone, engine, method, adamw_8bit=True)
    training.step()
    optimizer = training.stepper.adam if engine == "ddp" else training.stepper.engine.optimizer.optimizer
    held = sum(state[name].nbytes for state in optimizer.state.values()
               for name in ("state1", "state2", "absmax1", "absmax2") if name in state)  # fmt: skip
    trained = training.stepper.parameters[1]
    norms = (2 * tiny.SPEC.layers + 1) * tiny.SPEC.hidden if engine == "ddp" else 0
    assert held == pytest.approx(STATES_8BIT * (trained - norms) + 8 * norms, rel=1e-3)


@pytest.mark.parametrize(
    ("engine", "method"), [("ddp", "Naive"), ("fsdp2", "Z3"), ("deepspeed", "Z2"), ("deepspeed", "Z3")]
)
def test_muon_gives_matrices_of_layers_one_moment_and_an_orthogonal_update(
    alone: Any, engine: str, method: str
) -> None:
    training = Training(alone, engine, method, optim="muon")
    name = "model.layers.0.self_attn.k_proj.weight"
    before = whole(training.model.get_parameter(name)).float()
    training.step()
    held = training.stepper.engine.optimizer.optimizer.state if engine == "deepspeed" else training.stepper.adam.state
    moments = [each["momentum_buffer"] for each in held.values() if "momentum_buffer" in each]
    trained, matrices = training.stepper.parameters[1], matrix_parameters(tiny.SPEC.decoder)
    assert sum(moment.numel() for moment in moments) == matrices
    if method == "Z2":  # the moment that a step is making
        staged = training.stepper.engine.optimizer._muon_pending_momentum.values()
        assert sum(each.numel() for each, _ in staged) == matrices
    assert {moment.element_size() for moment in moments} == {4 if engine == "fsdp2" else 2}
    assert sum(each["exp_avg"].numel() for each in held.values() if "exp_avg" in each) == trained - matrices
    if engine == "fsdp2":  # whose weights are not rounded to bf16
        rate = MUON_TIMES * learning_rate(training.trial.cell.letters)
        update = (before * (1 - rate * WEIGHT_DECAY) - whole(training.model.get_parameter(name))) / rate
        values = alone.linalg.svdvals(update)
        assert values.median() > 0.6 and values.max() < 1.3  # of the gradient itself they fall steeply


@pytest.mark.parametrize(
    ("engine", "method"),
    [
        ("ddp", "Naive"),
        ("ddp", "R"),
        ("fsdp2", "Z3"),
        ("fsdp2", "R+Z3"),
        ("deepspeed", "Z2"),
        ("ddp", "QL"),
        ("fsdp2", "QL+Z3"),
    ],
)
def test_what_goes_to_the_host_is_what_layers_keep(alone: Any, engine: str, method: str) -> None:
    """No weights, each storage once; besides the last norm's input and, once a layer, a rotation's cos and sin."""
    training = Training(alone, engine, method, offload_activations=True)
    training.gradients()
    asked = training.trial.cell
    kept = sum(kind.count * kind.kept for kind in layer_bytes(asked, tiny.SPEC.decoder, 2))
    tokens = 2 * asked.seq_len
    rotations = 0 if asked.recomputes else tiny.SPEC.layers * 2 * 2 * asked.seq_len * 32
    beside = tokens * tiny.SPEC.hidden * 6 + rotations
    assert kept <= training.model.offload.bytes_kept <= kept + beside + 0.02 * kept


@pytest.mark.parametrize(
    ("engine", "how"),
    [("ddp", {"optim": "muon"}), ("ddp", {"adamw_8bit": True}), ("fsdp2", {"optim": "muon"}),
     ("fsdp2", {"states": "bf16-kahan"}), ("fsdp2", {"states": "bf16-stochastic"})],
)  # fmt: skip
def test_every_optimizer_can_be_saved_and_loaded(alone: Any, tmp_path: Path, engine: str, how: dict[str, Any]) -> None:
    training = Training(alone, engine, "Naive" if engine == "ddp" else "Z3", **how)
    training.step()
    training.stepper.save(tmp_path)
    then = {name: digest(whole(weight)) for name, weight in training.model.named_parameters()}
    training.step()
    training.stepper.load(tmp_path)
    assert {name: digest(whole(weight)) for name, weight in training.model.named_parameters()} == then


def whole(parameter: Any) -> Any:
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()


@pytest.mark.parametrize("engine", ["ddp", "deepspeed"])
def test_q_trains_embeddings_norms_and_head(alone: Any, engine: str) -> None:
    """Norms have gradients and yet stand still: near one, bf16 has no room for a step of 1e-4."""
    training = Training(alone, engine, "Q")
    names = {name for name, _ in training.model.named_parameters()}
    trainable = {name for name, parameter in training.model.named_parameters() if parameter.requires_grad}
    assert trainable == {name for name in names if "_proj" not in name}
    assert len(names - trainable) == tiny.SPEC.layers * 7
    assert moved(training) == {name for name in trainable if "norm" not in name}


@pytest.mark.parametrize("engine", ["ddp", "deepspeed"])
def test_prompt_tuning_moves_the_prompt(alone: Any, engine: str) -> None:
    training = Training(alone, engine, "PT")
    (prompt,) = moved(training)
    assert "prompt_encoder" in prompt
    assert training.stepper.parameters[1] == PROMPT_TOKENS * tiny.SPEC.hidden


@pytest.mark.parametrize(("engine", "method"), [("ddp", "Naive"), ("deepspeed", "Z2")])
def test_full_training_moves_everything(alone: Any, engine: str, method: str) -> None:
    training = Training(alone, engine, method)
    names = set(training.digests())
    assert moved(training) >= {name for name in names if "norm" not in name}


def test_weights_go_by_their_names_in_every_engine(alone: Any) -> None:
    from torch.distributed.tensor import DTensor

    replicated = Training(alone, "ddp", "Naive").digests()
    assert Training(alone, "deepspeed", "Z2").digests() == replicated
    adapted = Training(alone, "ddp", "L").digests()
    base = {name.removeprefix("base_model.model.").replace(".base_layer", ""): value for name, value in adapted.items()}
    assert {name: value for name, value in base.items() if ".lora_" not in name} == replicated
    sharded = Training(alone, "fsdp2", "Z3").model
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor)
        assert digest(parameter.full_tensor().bfloat16()) == replicated[name], name


def test_weights_differ_between_seeds_and_names(alone: Any) -> None:
    from training_probe.worker import model

    shape = alone.Size([64, 64])
    one = model.draw("layers.0.self_attn.q_proj.weight", shape, 0, "cpu")
    for other in (model.draw("layers.1.self_attn.q_proj.weight", shape, 0, "cpu"),
                  model.draw("layers.0.self_attn.q_proj.weight", shape, 1, "cpu")):  # fmt: skip
        assert not alone.equal(one, other)
    assert one.float().std().item() == pytest.approx(model.STD, rel=0.05)


@pytest.mark.parametrize("method", ["Q", "QL"])
def test_no_weight_of_a_4_bit_model_is_constant(alone: Any, method: str) -> None:
    """Zeros would multiply faster. A norm begins as ones, the second matrix of a LoRA as zeros."""
    training = Training(alone, "ddp", method)
    packed = 0
    for name, parameter in training.model.named_parameters():
        bytes_ = parameter.detach().contiguous().view(alone.uint8)
        if "norm" in name or ".lora_B." in name:
            continue
        assert bytes_.unique().numel() > 16, name
        if getattr(parameter, "quant_state", None) is not None:
            packed += 1
            weights = parameter.quant_state.shape.numel()
            assert bytes_.numel() == pytest.approx(weights / 2, rel=0.01), name  # the last block may be padded
    assert packed == tiny.SPEC.layers * 7


def test_gradients_of_accumulated_micro_batches_are_those_of_one_large_one(alone: Any) -> None:
    found = []
    for how in ({"micro_batch": 1, "grad_accum": 3}, {"micro_batch": 3}):
        training = Training(alone, "ddp", "Naive", **how)
        training.gradients()
        found.append([parameter.grad.float() for parameter in training.model.parameters()])
    for accumulated, at_once in zip(*found, strict=True):
        assert (accumulated - at_once).norm() < 0.03 * at_once.norm()


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("Naive", {}), ("R", {}), ("RS", {}), ("PT", {}), ("PT+R", {}), ("Naive", {"checkpoint": "op"}),
        ("Naive", {"checkpoint": "1"}), ("Naive", {"checkpoint": "2"}), ("PT", {"checkpoint": "op"}),
        ("L+R", {"dora": True}),
        ("R+Z2", {"engine": "deepspeed"}), ("Z3", {"engine": "deepspeed"}), ("R+Z3", {"engine": "deepspeed"}),
    ],
)  # fmt: skip
def test_a_step_computes_what_is_counted(alone: Any, method: str, more: dict[str, str]) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    training = Training(alone, **{"engine": "ddp", "method": method, **more})
    with FlopCounterMode(display=False) as counted:
        training.gradients()
    cell = training.trial.cell
    assert cell.micro_batch is not None
    tokens = cell.seq_len * cell.micro_batch
    expected = tokens * flops_per_token(cell, tiny.SPEC.decoder).hardware
    assert counted.get_total_flops() == pytest.approx(expected, rel=1e-4)  # rotary embeddings are left out
