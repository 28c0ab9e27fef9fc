from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.loadgen.monitor.metrics_server import Script, scripted


@pytest.fixture
def script() -> Iterator[Script]:
    with scripted() as script:
        yield script
