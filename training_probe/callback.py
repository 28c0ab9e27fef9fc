"""Measures a script of the user's own that trains with Hugging Face's Trainer, or one that stands on it such as TRL's:

    from training_probe.callback import ProbeCallback

    trainer = SFTTrainer(..., callbacks=[ProbeCallback("runs/mine")])

The directory gets what a sweep of one cell leaves: `training_probe report` and `compare` read it, and `loadgen export`
shows it while it goes on. Tokens are those that the model was given, padding left out where there is a mask; their
speed leaves out evaluations and checkpoints. Steps are timed by the host's clock; the device is waited for before the
first timed step and after the last one alone.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from loadgen import rundir, terminal
from loadgen.rundir.series import MeasurementSeries
from training_probe import flops, results
from training_probe.conditions import Watch
from training_probe.grid import NAIVE, Cell, Method, Model
from training_probe.protocol import RankReport, Step, write_atomically
from training_probe.results import CellResult
from training_probe.sweep.cell import MANIFEST_FILE, SweepManifest
from training_probe.sweep.progress import Progress, finished
from training_probe.worker.measure import Energy, Memory, clock_of, nvml_handle

ENGINE = "trainer"
PACKAGES = ("torch", "transformers", "accelerate", "trl", "peft", "deepspeed", "bitsandbytes")


class ProbeCallback(TrainerCallback):
    """directory: new, or empty. warmup_steps: that are not timed. metrics_port: of 127.0.0.1, for Prometheus, while the
    training lasts."""

    def __init__(self, directory: str | Path, *, warmup_steps: int = 2, metrics_port: int | None = None) -> None:
        self.directory, self._warmup, self._metrics_port = Path(directory), warmup_steps, metrics_port
        self._steps: list[Step] = []
        self._waits_s: list[float] = []  # for data, before each step
        self._idle_since_s = 0.0
        self._shape = (1, 1)  # sequences and positions of a micro batch, at the most
        self._positions = 0  # of the timed steps
        self._tokens: Any = 0  # likewise; what a mask counts stays on the device
        self._left_out_s = 0.0
        self._saved: tuple[int, float] | None = None  # bytes, seconds
        self._progress: Progress | None = None
        self._in_step = False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        self._device = args.device
        self._begun_unix_s, self._rank, self._ranks = time.time(), args.process_index, args.world_size
        self._clock, self._energy = clock_of(args.device), Energy(args.device)
        self._memory, self._watch = Memory(args.device), Watch(nvml_handle(args.device))
        self._args, self._model = args, model
        optimizer = more.get("optimizer")
        self._optimizer = type(getattr(optimizer, "optimizer", optimizer)).__name__
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)
        if self._rank == 0:
            rundir.create(self.directory)
            if self._metrics_port is not None:
                from loadgen.monitor.exporter import in_background

                in_background(self.directory, self._metrics_port)
        self._begin_timing()

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._waits_s.append(time.perf_counter() - self._idle_since_s)
        self._in_step, self._step_since_s = True, time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        number, now_s = len(self._steps), time.perf_counter()
        phase = "warmup" if number < self._warmup else "timed"
        step = Step(step=number, phase=phase, step_s=now_s - self._step_since_s)  # type: ignore[arg-type]
        self._steps.append(step)
        self._in_step, self._idle_since_s = False, now_s
        if self._rank == 0:
            self._show(step, state)
        self._begin_timing()

    def _begin_timing(self) -> None:
        """Once the warm-up is over; the wait for the first timed step's data counts as that of the others."""
        if len(self._steps) == self._warmup:
            self._clock.synchronise()
            self._watch.start()
            self._energy.start()
            self._positions, self._tokens, self._left_out_s = 0, 0, 0.0
            self._timed_since_s = time.perf_counter()
        self._idle_since_s = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._idle_since_s = time.perf_counter()

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._leave_out()

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """A checkpoint was written since the last event."""
        took_s = self._leave_out()
        saved = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self._saved = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file()), took_s

    def _leave_out(self) -> float:
        """The time since the last event is none of training's."""
        now_s = time.perf_counter()
        took_s, self._idle_since_s = now_s - self._idle_since_s, now_s
        self._left_out_s += took_s
        return took_s

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._hook.remove()
        self._clock.synchronise()
        seconds = None
        if len(self._steps) > self._warmup:
            seconds = time.perf_counter() - self._timed_since_s - self._left_out_s
        report = self._report(seconds, state)
        gathered: list[Any] = [(report, int(self._tokens), self._positions)]
        if self._ranks > 1:
            gathered = [None] * self._ranks
            dist.all_gather_object(gathered, (report, int(self._tokens), self._positions))
        if self._rank == 0:
            result = self._result(*zip(*gathered, strict=True))
            results.append(self.directory, result)
            if self._progress is not None:
                self._progress.over(result)
                self._progress.end("finished")
            terminal.say(f"{finished(result)}; training_probe report {self.directory}")

    def _count(self, module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """What the model is given in a step, before each of its forward passes."""
        ids = named.get("input_ids", given[0] if given else None)
        if not self._in_step or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            return
        self._shape = tuple(max(pair) for pair in zip(self._shape, ids.shape, strict=True))
        self._positions += ids.numel()
        mask = named.get("attention_mask")
        masked = isinstance(mask, torch.Tensor) and mask.shape == ids.shape
        self._tokens = self._tokens + (named["attention_mask"].sum() if masked else ids.numel())

    def _show(self, step: Step, state: Any) -> None:
        """The snapshot for the exporter; sizes are known since the first step."""
        if self._progress is None:
            cell = self._cell()
            manifest = SweepManifest(
                run_id=rundir.new_run_id(), started_unix_s=self._begun_unix_s, version=rundir.package_version(),
                platform=self._device_name, cells=[cell], warmup_steps=self._warmup, runs=1,
                steps=max(0, state.max_steps - self._warmup),
            )  # fmt: skip
            write_atomically(self.directory / MANIFEST_FILE, manifest, indent=2)
            terminal.OUTPUT.quiet = True  # the trainer draws its own progress
            labels, series = {"platform": self._device_name}, MeasurementSeries("cell", [cell.name])
            self._progress = Progress(
                self.directory, manifest.run_id, labels, series, [], lambda line: None, self._utilization
            )
            self._shown = self._progress.begin(cell, None)
        done = step.step + 1
        self._shown.step(step, done, state.max_steps, min(1.0, done / max(1, state.max_steps)))

    @property
    def _device_name(self) -> str:
        return str(torch.cuda.get_device_name(self._device)) if self._device.type == "cuda" else "CPU"

    def _cell(self) -> Cell:
        args, config = self._args, self._model.config
        name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(str(config._name_or_path)).name) or str(config.model_type)
        letters = self._letters()
        return Cell(
            model=name, task="finetune" if letters.adapter else "pretrain", engine=ENGINE, method=str(letters),
            gpus=self._ranks, seq_len=self._shape[1], micro_batch=self._shape[0],
            grad_accum=args.gradient_accumulation_steps, attention="flash" if letters.flash else "eager",
            compile=bool(args.torch_compile), device="cuda" if self._device.type == "cuda" else "cpu",
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

    def _utilization(self, cell: Cell, tokens_per_s: float) -> tuple[float | None, float | None]:
        try:
            spec = Model(name=cell.model, config=self._model.config.to_dict()).decoder
            return (None, None) if spec is None else flops.utilization(cell, spec, tokens_per_s, self._device_name)
        except Exception:  # a model of a kind that is not known here: what it computes is not known either
            return None, None

    def _report(self, seconds: float | None, state: Any) -> RankReport:
        allocated, reserved = self._memory.peaks()
        sizes = [(getattr(each, "ds_numel", each.numel()), each.requires_grad) for each in self._model.parameters()]
        return RankReport(
            rank=self._rank, outcome="ok", seconds=seconds, steps=max(0, len(self._steps) - self._warmup),
            peak_allocated_bytes=allocated, peak_reserved_bytes=reserved, device_memory_bytes=self._memory.total_bytes,
            energy_j=self._energy.stop() if seconds else None, conditions=self._watch.stop(),
            losses=[float(entry["loss"]) for entry in state.log_history if "loss" in entry],
            parameters=sum(size for size, _ in sizes), trainable_parameters=sum(size for size, own in sizes if own),
            optimizer=self._optimizer, device_name=self._device_name,
            versions={name: version(name) for name in PACKAGES if name in sys.modules},
        )  # fmt: skip

    def _result(self, reports: Sequence[RankReport], tokens: Sequence[int], positions: Sequence[int]) -> CellResult:
        cell, took_s = self._cell(), [report.seconds for report in reports if report.seconds]
        result = results.of_cell(
            cell, platform=self._device_name, outcome="ok" if took_s else "skipped",
            reason="" if took_s else f"no step came after the {self._warmup} of the warm-up",
            started_unix_s=self._begun_unix_s, wall_s=time.time() - self._begun_unix_s,
            steps=reports[0].steps, warmup_steps=self._warmup,
        )  # fmt: skip
        if not took_s:
            return result
        run = results.run_result(cell, {report.rank: report for report in reports}, self._steps)
        joules = [report.energy_j for report in reports if report.energy_j is not None]
        trained, given = sum(tokens), sum(positions)
        per_token = sum(joules) / trained if trained and len(joules) == len(reports) else None
        speed = trained / max(took_s)
        result.add_runs([msgspec.structs.replace(run, tokens_per_s=speed, energy_j_per_token=per_token)])
        result.valid = all(isfinite(loss) for loss in reports[0].losses if loss is not None)
        result.mfu_ratio, result.hfu_ratio = self._utilization(cell, speed)
        result.data_wait_ms = 1e3 * sum(self._waits_s[self._warmup :]) / reports[0].steps
        if trained < given:
            result.padding_ratio = 1 - trained / given
        if self._saved is not None:
            result.checkpoint_bytes, result.checkpoint_save_s = self._saved
        return result
