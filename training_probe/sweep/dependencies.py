"""What a sweep asks of others, so that each can be another in a test: how processes are started, which GPUs there are,
what will fit; and what follows from the answers before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from backends import gpus
from backends.catalog import ModelSpec
from training_probe import flops, memory
from training_probe.grid import Cell, impossible
from training_probe.launch import runner
from training_probe.memory import Fit, Prediction
from training_probe.results import GIB, Outcome
from training_probe.sweep.manifests import Manifest, Settings
from training_probe.sweep.search import floor_power_of_two


class Predictor(Protocol):
    """Predicts memory as training_probe.memory does."""

    def predict(self, cell: Cell, spec: ModelSpec, /) -> Prediction: ...
    def fits(self, prediction: Prediction, device_memory_bytes: int, /) -> Fit: ...
    def largest_micro_batch(self, cell: Cell, spec: ModelSpec, device_memory_bytes: int, at_most: int, /) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a sweep asks of others: how processes are started, which GPUs there are, what will fit."""

    command: runner.Command = runner.worker_command
    inventory: Callable[[], gpus.Inventory] = gpus.read
    probe: Callable[[Sequence[int]], gpus.Probe] = gpus.Probe
    predictor: Predictor = memory

    def predict(self, cell: Cell, settings: Settings) -> Prediction | None:
        """The prediction for a cell, `sized`; None where nothing is known."""
        spec = settings.model(cell).spec
        return None if spec is None else self.predictor.predict(sized(cell), spec)

    def predicted_fields(self, cell: Cell, settings: Settings) -> dict[str, Any]:
        """The fields of CellResult that say what was predicted."""
        prediction = self.predict(cell, settings)
        if prediction is None:
            return {}
        return {
            "predicted_memory_gb": prediction.peak_bytes / GIB,
            "predicted_terms_gb": {name: size / GIB for name, size in prediction.terms_bytes.items()},
        }

    def refusal(self, cell: Cell, settings: Settings, memory_bytes: int | None) -> tuple[Outcome, str] | None:
        """Why a cell is not to be run on devices of this memory, and the outcome that this is; None when it is."""
        why = impossible(cell, settings.model(cell).spec)
        if why is None and cell.device == "cuda" and cell.gpus > len(settings.gpu_ids):
            why = f"it needs {cell.gpus} GPUs, and the sweep has {len(settings.gpu_ids) or 'none'}"
        if why is not None:
            return "unsupported", why
        prediction = self.predict(cell, settings)
        if settings.no_skip or prediction is None or memory_bytes is None:
            return None
        fit = self.predictor.fits(prediction, memory_bytes)
        return None if fit.ok else ("skipped", fit.reason)

    def first_micro_batch(self, cell: Cell, settings: Settings, memory_bytes: int | None) -> int:
        """Where a search begins: the largest power of two that is predicted to fit; 1 without a prediction."""
        spec = settings.model(cell).spec
        if spec is None or memory_bytes is None:
            return 1
        most = settings.max_micro_batch
        return floor_power_of_two(self.predictor.largest_micro_batch(sized(cell), spec, memory_bytes, most))


def sized(cell: Cell) -> Cell:
    """The cell, with micro batch 1 where it is still to be searched."""
    return cell if cell.micro_batch is not None else msgspec.structs.replace(cell, micro_batch=1)


def device_memory_bytes(cell: Cell, manifest: Manifest) -> int | None:
    """The smallest memory of the GPUs that a cell would run on; None where it is not known, as on a CPU."""
    if cell.device != "cuda":
        return None
    known = [memory for memory in manifest.device_memory_bytes[: cell.gpus] if memory is not None]
    return min(known, default=None)


def utilization(cell: Cell, manifest: Manifest, tokens_per_s: float) -> tuple[float | None, float | None]:
    """MFU and HFU of a cell at a speed on the devices of a sweep; None where they cannot be known."""
    spec, names = manifest.model(cell).spec, manifest.device_names
    if spec is None or not names:
        return None, None
    return flops.mfu(cell, spec, tokens_per_s, names[0]), flops.hfu(cell, spec, tokens_per_s, names[0])
