"""Measures a training of the user's own with torchtitan: its config and options stay as they are, behind `--`:

    torchrun --nproc-per-node=8 -m training_probe.torchtitan runs/mine -- --module llama3 --config llama3_8b

The directory gets what training_probe.callback leaves. Tokens are counted as torchtitan counts them, by labels; their
speed leaves out validations and checkpoints.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from backends.exit_codes import UserError, check_least
from loadgen import rundir, terminal
from training_probe import flops
from training_probe.grid import Cell, Method
from training_probe.recorder import WARMUP_STEPS, Recorder, model_name

ENGINE, PROGRAM = "torchtitan", "training_probe.torchtitan"


class TitanError(UserError):
    """It cannot be measured, said before anything is started."""


def main(argv: Sequence[str]) -> int:
    """Trains as `python -m torchtitan.train` would with what stands behind `--`."""
    own, mark, theirs = argv, "--" in argv, list[str]()
    if mark:
        own, theirs = argv[: argv.index("--")], list(argv[argv.index("--") + 1 :])
    parsed: list[Any] = []  # nothing of it where help was asked for

    def command() -> None:
        from cyclopts import App

        about = "Trains with torchtitan as its options behind -- say, and measures it."
        app = App(name=f"python -m {PROGRAM}", help=about, version_flags=[], result_action="return_value")
        app.default(_recorder)
        parsed.append(app(list(own), exit_on_error=False, print_error=False))
        if isinstance(parsed[0], Recorder):
            _check(parsed[0], theirs)

    code = terminal.invoke(PROGRAM, command)
    if code or not isinstance(parsed[0], Recorder):
        return code
    return _train(parsed[0], theirs)


def _recorder(directory: Path, /, *, warmup_steps: int = WARMUP_STEPS, metrics_port: int | None = None) -> Recorder:
    """Makes what measures.

    Parameters
    ----------
    directory
        New, or empty.
    warmup_steps
        Steps that are not timed.
    metrics_port
        Port of 127.0.0.1 for Prometheus, while the training lasts.
    """
    check_least(TitanError, 0, warmup_steps=warmup_steps)
    return Recorder(directory, warmup_steps, metrics_port)


def _check(recorder: Recorder, theirs: Sequence[str]) -> None:
    if not theirs:
        raise TitanError("torchtitan's own options are missing; add -- --module NAME --config NAME.")
    if find_spec("torchtitan") is None:
        raise TitanError("the Python package torchtitan is not installed; pip install 'torchtitan>=0.3'.")
    if find_spec("torchtitan.trainer") is None:
        raise TitanError("the Python package torchtitan is too old; pip install 'torchtitan>=0.3'.")
    if "RANK" not in os.environ:
        raise TitanError(f"torchtitan is started by torchrun; write torchrun --nproc-per-node GPUS -m {PROGRAM} ...")
    if os.environ["RANK"] == "0":
        rundir.create(recorder.directory)


def _train(recorder: Recorder, theirs: Sequence[str]) -> int:
    from torchtitan import train, trainer

    trainer.Trainer.train = _measured(trainer.Trainer.train, recorder)
    sys.argv = ["torchtitan", *theirs]
    train.main()
    if recorder.begun:
        return 0
    terminal.say_error(PROGRAM, "this config's trainer has a loop of its own or did not train; nothing was measured.")
    return TitanError.exit_code


def _measured(train: Callable[[Any], None], recorder: Recorder) -> Callable[[Any], None]:
    """torchtitan's loop; it calls what the trainer and its parts have under these names, once a step or less."""

    @functools.wraps(train)
    def measured(trainer: Any) -> None:
        titan, config = _Titan(trainer), trainer.config
        trainer.train_step = _step(trainer.train_step, recorder)
        trainer.batch_generator = _batches(trainer.batch_generator, recorder)
        trainer.metrics_processor.log = titan.logging(trainer.metrics_processor.log, recorder)
        if config.checkpoint.enable:
            trainer.checkpointer.save = _saving(trainer, recorder)
        if config.validator.enable:
            trainer.validator.validate = _left_out(trainer.validator.validate, recorder)
        goes_on = trainer.should_continue_training

        def until_the_last_step() -> bool:
            if goes_on():
                return True
            recorder.stop()  # the loop sleeps after it
            return False

        trainer.should_continue_training = until_the_last_step
        recorder.begin(titan)
        train(trainer)
        recorder.end()

    return measured


def _step(step: Callable[[Any], None], recorder: Recorder) -> Callable[[Any], None]:
    from torchtitan.components.dataloader import DataloaderExhaustedError

    def measured(batches: Any) -> None:
        recorder.resume()  # the wait for data is within the step
        recorder.begin_step()
        try:
            step(batches)
        except DataloaderExhaustedError:
            recorder.drop_step()
            recorder.stop()
            raise
        recorder.end_step()

    return measured


def _batches(generate: Callable[[Any], Iterator[Any]], recorder: Recorder) -> Callable[[Any], Iterator[Any]]:
    def measured(loader: Any) -> Iterator[Any]:
        batches = generate(loader)
        while True:
            since_s = time.perf_counter()
            batch = next(batches)
            recorder.waited(time.perf_counter() - since_s)
            recorder.given(batch[1].numel(), batch[1].numel())
            yield batch

    return measured


def _left_out(work: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    def measured(*given: Any, **named: Any) -> Any:
        recorder.keep_peaks()
        recorder.settle()
        done = work(*given, **named)
        recorder.leave_out()
        return done

    return measured


def _saving(trainer: Any, recorder: Recorder) -> Callable[..., bool]:
    save, config = trainer.checkpointer.save, trainer.config
    folder = Path(config.dump_folder) / config.checkpoint.folder

    def measured(step: int, last_step: bool = False) -> bool:
        if last_step or step % config.checkpoint.interval == 0:
            recorder.settle()
        done = bool(save(step, last_step=last_step))
        if done and str(getattr(config.checkpoint, "async_mode", "disabled")).lower() == "disabled":
            recorder.saved(folder / f"step-{step}")
        elif done:
            recorder.leave_out()  # it is still being written
        return done

    return measured


class _Titan:
    """What torchtitan's Trainer trains."""

    packages: tuple[str, ...] = ("torch", "torchtitan", "torchao")

    def __init__(self, trainer: Any) -> None:
        import torch.distributed as dist

        self._trainer, self._losses = trainer, list[float]()
        self.device, self.rank, self.ranks = trainer.device, dist.get_rank(), dist.get_world_size()
        dims = trainer.parallel_dims
        self.sharers = self.ranks // (dims.dp_replicate * dims.dp_shard)
        self.steps = trainer.config.training.steps
        self.optimizer = type(next(iter(trainer.optimizers))).__name__

    def logging(self, log: Callable[..., None], recorder: Recorder) -> Callable[..., None]:
        """Keeps the losses that are logged, on all ranks, and the peaks that are reset then."""

        def measured(step: int, global_avg_loss: float, *given: Any, **named: Any) -> None:
            self._losses.append(float(global_avg_loss))
            recorder.keep_peaks()
            log(step, global_avg_loss, *given, **named)

        return measured

    def losses(self) -> Sequence[float]:
        return self._losses

    def parameters(self) -> Iterable[tuple[int, bool]]:
        parts = [] if self._trainer.parallel_dims.pp_enabled else self._trainer.model_parts
        return ((each.numel(), each.requires_grad) for part in parts for each in part.parameters())

    def cell(self) -> Cell:
        trainer, config = self._trainer, self._trainer.config
        spec, dims, training = config.model_spec, trainer.parallel_dims, config.training
        adapters = any(".lora_a." in name for part in trainer.model_parts for name, _ in part.named_parameters())
        sharded, recomputed = dims.fsdp_enabled, config.activation_checkpoint is not None
        letters = ("L" if adapters else "", "F", "R" if recomputed else "", "Z3" if sharded else "")
        return Cell(
            model=model_name(f"{spec.name}-{spec.flavor}"), task="finetune" if adapters else "pretrain", engine=ENGINE,
            method=str(Method.parse("+".join(filter(None, letters)))), gpus=self.ranks, seq_len=training.seq_len,
            micro_batch=training.local_batch_size, grad_accum=trainer.gradient_accumulation_steps, tp=dims.tp,
            pp=dims.pp, cp=dims.cp, ep=dims.ep, dp_replicate=dims.dp_replicate if sharded else 1, attention="flash",
            compile=config.compile.enable, device="cuda" if self.device.type == "cuda" else "cpu",
        )  # fmt: skip

    def utilization(self, cell: Cell, tokens_per_s: float, device_name: str) -> tuple[float | None, float | None]:
        """By torchtitan's own count of FLOPs; what is recomputed is not in it."""
        peak = None if cell.device == "cpu" else flops.peak_flops(device_name)
        if peak is None:
            return None, None
        mfu = self._trainer.metrics_processor.num_flops_per_token * tokens_per_s / (cell.gpus * peak)
        return mfu, None if cell.recomputes else mfu


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
