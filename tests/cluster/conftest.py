"""The cluster of the tests that need one; where it was not asked for or cannot be made, they are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.nodes import ENVIRONMENT, Nodes, problem, three_nodes


@pytest.fixture(scope="session")
def nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    if "cluster" not in request.config.option.markexpr:
        pytest.skip("needs a Ray cluster; run `make test-cluster`")
    if why := problem():
        pytest.skip(f"no Ray cluster can be made: {why}")
    with pytest.MonkeyPatch.context() as patch, three_nodes() as nodes:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield nodes
