"""The engine of the tests that need one; where Docker was not asked for or cannot be used, they are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import docker as sdk
import pytest

from backends import docker


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[sdk.DockerClient]:
    if "docker" not in request.config.option.markexpr:
        pytest.skip("needs a Docker engine; run `make test-docker`")
    if problem := docker.problem():
        pytest.skip(f"Docker cannot be used: {problem}")
    client = sdk.from_env()
    yield client
    client.close()
