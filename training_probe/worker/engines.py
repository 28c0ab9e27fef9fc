"""The engines, each as a Stepper: forward, backward and step of the same model, with the engine's own machinery behind.

Megatron builds a model of its own and has a file of its own. What an engine holds in which precision stands in
docs/training.md; learning rate, betas, weight decay and gradient clipping are the same for all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training_probe import own_deepspeed, trials
from training_probe.protocol import CLIP_NORM, Trial, Unsupported
from training_probe.worker import experts, optimizers, packed, preference, ring, sharding
from training_probe.worker import model as models
from training_probe.worker.batches import Inputs
from training_probe.worker.measure import Stepper


def build(trial: Trial, device: torch.device) -> Stepper:
    """The cell's engine. Raises Unsupported."""
    engine = trial.cell.engine
    if trial.cell.own:
        return Own(trial)
    if engine == "megatron":
        from training_probe.worker.megatron import Megatron

        return Megatron(trial, device)
    others: dict[str, Callable[[Trial, torch.device], Stepper]] = {"deepspeed": DeepSpeed, "fsdp2": Fsdp2, "ddp": Ddp}
    return others[engine](trial, device)


class _Phased:
    """Engines whose passes follow one another."""

    pipelined = False

    def forward_backward(self, micro_batches: list[Inputs]) -> Tensor:
        raise NotImplementedError


class Own(_Phased):
    """A training script of the user's own."""

    def __init__(self, trial: Trial) -> None:
        name = trial.cell.engine
        entry = trials.available().get(name)
        if entry is None:
            raise Unsupported(f"no package here has {name} as an entry point of {trials.GROUP}")
        try:
            script = entry.load()
        except (ImportError, AttributeError) as error:
            raise Unsupported(f"the trial {name} cannot be loaded from {entry.value}: {error}") from error
        torch.manual_seed(trial.seed)
        built = script(trial.cell)
        if lacking := trials.lacking(built):
            raise Unsupported(f"what {entry.value} built ({type(built).__name__}) lacks {', '.join(lacking)}")
        self._forward, self.backward, self.step = built.forward, built.backward, built.step
        self.optimizer, self.vocab_size = str(built.optimizer), int(built.vocab_size)
        whole, trained = built.parameters
        self.parameters = (int(whole), int(trained))

    def forward(self, inputs: Inputs, last: bool) -> Tensor:
        loss: Tensor = self._forward(inputs["input_ids"], last)
        return loss


class DeepSpeed(_Phased):
    def __init__(self, trial: Trial, device: torch.device) -> None:
        cell = trial.cell
        os.environ.setdefault("DS_ACCELERATOR", cell.device)
        if archs := os.environ.get("TORCH_CUDA_ARCH_LIST"):  # its builder cannot read 9.0a, which some images set
            os.environ["TORCH_CUDA_ARCH_LIST"] = re.sub(r"(\d)[a-z]", r"\1", archs)
        import deepspeed
        import deepspeed.ops

        config = own_deepspeed.merged(cell, trial.deepspeed)
        if cell.device == "cpu":  # or it compiles a shared-memory allreduce of its own for about 20 s
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="nccl" if cell.device == "cuda" else "gloo")
        model = _zero3_model(trial, config, device) if cell.letters.zero == 3 else _model(trial, device)
        self.parameters = models.count(model)
        self._adapts = cell.letters.adapter is not None
        self.engine, optimizer, _, _ = deepspeed.initialize(
            model=model,
            optimizer=None if "optimizer" in config else optimizers.build(model, trial, fused=None),
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            config=config,
        )
        self.optimizer = optimizers.named(getattr(optimizer, "optimizer", optimizer))
        self.reference = None
        if cell.own_reference:
            self.reference = _frozen(trial, config, device)
        elif cell.has_reference:
            self.reference = preference.without_adapters(self.engine, model)

    def forward(self, inputs: Inputs, last: bool) -> Tensor:
        return _loss_of(self.engine, self.reference, inputs)

    def backward(self, loss: Tensor, last: bool) -> None:
        self.engine.backward(loss)
        if not last:
            self.engine.step()  # it counts the micro batches by this call

    def step(self) -> None:
        self.engine.step()

    def save(self, directory: Path) -> None:
        self.engine.save_checkpoint(str(directory), tag="once", exclude_frozen_parameters=self._adapts)

    def load(self, directory: Path) -> None:
        self.engine.load_checkpoint(str(directory), tag="once", load_module_strict=not self._adapts)


def _zero3_model(trial: Trial, config: dict[str, Any], device: torch.device) -> nn.Module:
    """Every parameter is divided among the ranks as soon as it is made; 4-bit ones by `deepspeed.initialize`."""
    import deepspeed

    cell = trial.cell
    if cell.letters.four_bit:
        return _model(trial, device)
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
        model = models.construct(trial)
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if dist.get_rank() == 0:
                parameter.data.copy_(models.draw(name, parameter.shape, trial.seed, device))
    return models.adapt(model, trial)


def _frozen(trial: Trial, config: dict[str, Any], device: torch.device) -> Any:
    """DPO's reference: with ZeRO 3 it is divided as the policy is, by an engine of its own."""
    import deepspeed

    sharded = trial.cell.letters.zero == 3
    model = _zero3_model(trial, config, device) if sharded else _model(trial, device)
    model.requires_grad_(False).eval()
    if not sharded:
        return model
    plain = {name: value for name, value in config.items() if name != "optimizer"}
    return deepspeed.initialize(model=model, config=plain)[0]


def _loss_of(policy: preference.Model, reference: preference.Model | None, inputs: Inputs) -> Tensor:
    """reference: DPO's; None where the model learns its labels."""
    if reference is not None:
        return preference.loss(policy, reference, inputs["input_ids"])
    loss: Tensor = policy(**inputs).loss
    return loss


def _model(trial: Trial, device: torch.device) -> nn.Module:
    model = models.build(trial)
    models.materialise(model, trial, device)
    return models.adapt(model, trial)


class _Torch(_Phased):
    """What ddp and fsdp2 share: torch's optimizer and clipping."""

    parameters: tuple[int, int]

    def __init__(self, trial: Trial, model: nn.Module, reference: nn.Module | None) -> None:
        self.model = model
        self.reference: preference.Model | None = reference
        if trial.cell.has_reference and reference is None:
            self.reference = preference.without_adapters(model, model)
        self._accumulated = trial.cell.grad_accum
        self.adam = optimizers.build(model, trial)
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        label = optimizers.named(self.adam)
        self.optimizer = label + (" fused" if label.endswith(" AdamW") else "")

    def forward(self, inputs: Inputs, last: bool) -> Tensor:
        self._synchronise(last)
        return self._loss(inputs)

    def _loss(self, inputs: Inputs) -> Tensor:
        return _loss_of(self.model, self.reference, inputs)

    def backward(self, loss: Tensor, last: bool) -> None:
        (loss / self._accumulated).backward()

    def step(self) -> None:
        sharding.clip(self._trained, CLIP_NORM)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)

    def save(self, directory: Path) -> None:
        from torch.distributed import checkpoint

        checkpoint.save(self._state(), checkpoint_id=directory)

    def load(self, directory: Path) -> None:
        from torch.distributed import checkpoint

        checkpoint.load(self._state(), checkpoint_id=directory)

    def _state(self) -> dict[str, Any]:
        trained = {name: each.detach() for name, each in self.model.named_parameters() if each.requires_grad}
        return {"model": trained, "optimizer": self.adam.state_dict()}

    def _synchronise(self, last: bool) -> None:
        raise NotImplementedError


class Ddp(_Torch):
    """Replicas of a plain bf16 model; Adam's moments in bf16 as well."""

    def __init__(self, trial: Trial, device: torch.device) -> None:
        model = _model(trial, device)
        self.parameters = models.count(model)
        _compile_layers(model, trial)
        self._ddp: Any = None
        if dist.get_world_size() > 1:
            self._ddp = nn.parallel.DistributedDataParallel(
                model, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True
            )
        frozen = _model(trial, device).requires_grad_(False).eval() if trial.cell.own_reference else None
        super().__init__(trial, self._ddp or model, frozen)

    def _synchronise(self, last: bool) -> None:
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = last


class Fsdp2(_Torch):
    """torch's fully_shard, a group a layer: fp32 weights and moments (or --states), bf16 compute, fp32 reduction. How
    ranks divide the weights is `sharding`'s."""

    def __init__(self, trial: Trial, device: torch.device) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        self._cell = cell = trial.cell
        mesh = sharding.mesh_of(cell, device)
        self._part = ring.Part(cell, device) if cell.cp > 1 else None
        exchange = experts.TokenExchange(cell, device) if cell.ep > 1 else None
        with torch.device("meta"):
            built = models.build(trial)
            model = models.adapt(packed.put_in(built, cell) if cell.letters.four_bit else built, trial)
        if cell.letters.four_bit:
            packed.made_plain(model)
        if cell.letters.adapter is None and cell.states == "fp32":
            model.to(torch.float32)  # what is trained has fp32 masters; a frozen model with its adapters stays bf16
        policy: dict[str, Any] = {
            "mesh": sharding.data_mesh(mesh),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        }
        if cell.letters.offload:
            policy["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        home = torch.device("cpu") if cell.letters.offload else device
        self.parameters = models.count(model)
        if cell.tp > 1:
            sharding.parallelize(model, models.decoder(model), mesh["tp"])
            model.tie_weights()
        _compile_layers(model, trial)
        if exchange is not None:
            exchange.divide(models.decoder(model).layers, **policy, reshard_after_forward=cell.letters.zero == 3)
        for layer in models.decoder(model).layers:
            fully_shard(layer, **policy, reshard_after_forward=cell.letters.zero == 3)
        fully_shard(model, **policy, reshard_after_forward=False)  # the backward pass begins with what it holds
        _fill_shards(model, trial, device, home)
        super().__init__(trial, model, self._frozen(trial, policy, device) if cell.own_reference else None)

    def _frozen(self, trial: Trial, policy: dict[str, Any], device: torch.device) -> nn.Module:
        """DPO's reference, divided as the policy is, and nothing of it kept after its forward pass."""
        from torch.distributed.fsdp import fully_shard

        with torch.device("meta"):
            model = models.build(trial).requires_grad_(False).eval()
        for part in (*models.decoder(model).layers, model):
            fully_shard(part, **policy, reshard_after_forward=True)
        _fill_shards(model, trial, device, device)
        return model

    def forward(self, inputs: Inputs, last: bool) -> Tensor:
        with sharding.loss_by_parts(self._cell):
            return sharding.local(super().forward(inputs, last))

    def _loss(self, inputs: Inputs) -> Tensor:
        return super()._loss(inputs) if self._part is None else self._part.loss(self.model, inputs)

    def backward(self, loss: Tensor, last: bool) -> None:
        with sharding.loss_by_parts(self._cell):
            super().backward(loss, last)

    def _synchronise(self, last: bool) -> None:
        self.model.set_requires_gradient_sync(last)


def _compile_layers(model: nn.Module, trial: Trial) -> None:
    if trial.cell.compile:
        for layer in models.decoder(model).layers:
            layer.compile()


def _fill_shards(model: nn.Module, trial: Trial, device: torch.device, home: torch.device) -> None:
    """The weights that any other engine has, of which each rank keeps its part, in the memory of `home`."""
    from torch.distributed.tensor import DTensor

    model.to_empty(device=home)
    models.restore_buffers(model, device)
    seed = trial.seed
    with torch.no_grad():
        done = packed.fill(model, trial.cell, seed, device) if trial.cell.letters.four_bit else ()
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            if name in done:
                continue
            if models.MAGNITUDE in name:  # the norms of the rows of its weight
                of = name.replace(models.MAGNITUDE, ".base_layer.")
                whole = models.draw(of, model.get_parameter(of).shape, seed, device).norm(dim=1)
            else:
                whole = models.draw(name, parameter.shape, seed, device)
            sharding.fill(parameter, whole)
