"""Measures a script of the user's own that trains with Hugging Face's Trainer, or one that stands on it such as TRL's:

    from training_probe.callback import ProbeCallback

    trainer = SFTTrainer(..., callbacks=[ProbeCallback("runs/mine")])

The directory gets what a sweep of one cell leaves: `training_probe report` and `compare` read it, and `loadgen export`
shows it while it goes on. Tokens are those that the model was given, padding left out where there is a mask; their
speed leaves out evaluations and checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from training_probe import flops
from training_probe.grid import NAIVE, Cell, Method, Model
from training_probe.recorder import WARMUP_STEPS, Recorder, model_name

ENGINE = "trainer"


class ProbeCallback(TrainerCallback):
    """directory: new, or empty. warmup_steps: that are not timed. metrics_port: of 127.0.0.1, for Prometheus, while the
    training lasts."""

    def __init__(
        self, directory: str | Path, *, warmup_steps: int = WARMUP_STEPS, metrics_port: int | None = None
    ) -> None:
        self._recorder = Recorder(directory, warmup_steps, metrics_port)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        optimizer = more.get("optimizer")
        self._trained = _Trained(args, state, model, type(getattr(optimizer, "optimizer", optimizer)).__name__)
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)
        self._recorder.begin(self._trained)

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._recorder.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._recorder.end_step()

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._recorder.resume()

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._recorder.leave_out()

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._recorder.saved(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._hook.remove()
        self._trained.state = state
        self._recorder.stop()
        self._recorder.end()

    def _count(self, module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """What the model is given in a step, before each of its forward passes."""
        ids = named.get("input_ids", given[0] if given else None)
        if not self._recorder.in_step or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            return
        self._trained.grow(*ids.shape)
        mask = named.get("attention_mask")
        masked = isinstance(mask, torch.Tensor) and mask.shape == ids.shape
        self._recorder.given(ids.numel(), named["attention_mask"].sum() if masked else ids.numel())


class _Trained:
    """What a Trainer trains."""

    packages: tuple[str, ...] = ("torch", "transformers", "accelerate", "trl", "peft", "deepspeed", "bitsandbytes")
    sharers = 1

    def __init__(self, args: Any, state: Any, model: Any, optimizer: str) -> None:
        self._args, self._model, self.state, self.optimizer = args, model, state, optimizer
        self.device, self.rank, self.ranks = args.device, args.process_index, args.world_size
        self._shape = (1, 1)  # sequences and positions of a micro batch, at the most

    @property
    def steps(self) -> int:
        return int(self.state.max_steps)

    def grow(self, sequences: int, positions: int) -> None:
        self._shape = max(self._shape[0], sequences), max(self._shape[1], positions)

    def losses(self) -> Sequence[float]:
        return [float(entry["loss"]) for entry in self.state.log_history if "loss" in entry]

    def parameters(self) -> Iterable[tuple[int, bool]]:
        return ((getattr(each, "ds_numel", each.numel()), each.requires_grad) for each in self._model.parameters())

    def cell(self) -> Cell:
        args, config = self._args, self._model.config
        name = model_name(Path(str(config._name_or_path)).name) or str(config.model_type)
        letters = self._letters()
        return Cell(
            model=name, task="finetune" if letters.adapter else "pretrain", engine=ENGINE, method=str(letters),
            gpus=self.ranks, seq_len=self._shape[1], micro_batch=self._shape[0],
            grad_accum=args.gradient_accumulation_steps, attention="flash" if letters.flash else "eager",
            compile=bool(args.torch_compile), device="cuda" if self.device.type == "cuda" else "cpu",
        )  # fmt: skip

    def _letters(self) -> Method:
        args, adapters = self._args, getattr(self._model, "peft_config", None) or {}
        kinds = {str(getattr(each.peft_type, "value", each.peft_type)) for each in adapters.values()}
        four_bit = "Q" if getattr(self._model, "is_loaded_in_4bit", False) else ""
        stage = getattr(getattr(args, "deepspeed_plugin", None), "zero_stage", 0) or (3 if args.fsdp else 0)
        letters = [
            "PT" if "PROMPT_TUNING" in kinds else f"{four_bit}L" if adapters else four_bit,
            "F" if self._model.config._attn_implementation not in (None, "eager") else "",
            "R" if args.gradient_checkpointing else "",
            f"Z{stage}" if stage else "",
        ]
        return Method.parse("+".join(filter(None, letters)) or NAIVE)

    def utilization(self, cell: Cell, tokens_per_s: float, device_name: str) -> tuple[float | None, float | None]:
        try:
            spec = Model(name=cell.model, config=self._model.config.to_dict()).decoder
            return (None, None) if spec is None else flops.utilization(cell, spec, tokens_per_s, device_name)
        except Exception:  # a model of a kind that is not known here: what it computes is not known either
            return None, None
