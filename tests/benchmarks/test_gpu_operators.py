"""How operators are timed on a GPU: in which order the GPU gets what it runs."""

from __future__ import annotations

import importlib
import sys
from unittest.mock import MagicMock, call

import pytest

from tests.benchmarks.test_operators import BENCHMARKS


def test_a_launch_waits_for_its_inputs_which_another_stream_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts' ids that were not yet written are any number: an illegal memory access."""
    gpu = MagicMock()
    gpu.cuda.Event().elapsed_time.return_value = 0.5
    monkeypatch.setitem(sys.modules, "torch", gpu)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    operators = importlib.import_module("gpu_operators")
    monkeypatch.delitem(sys.modules, "gpu_operators")  # it holds this torch
    gpu.reset_mock()
    assert operators.timed_us([gpu.launch] * 4) == 500 / 4
    done = gpu.mock_calls
    waits = call.cuda.Stream().wait_stream(gpu.cuda.current_stream())
    assert done.index(waits) < done.index(call.launch())
