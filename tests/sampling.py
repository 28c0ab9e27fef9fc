"""Samples of slow tests: `pytest --sample N` runs the tests marked `always`, and an eighth of the others. Eight
successive numbers run them all. The gate takes its number from the commit, so that landings run different samples; a
failure says which sample repeats it.

A file of TOGETHER has one turn for all of its tests, since they share something that takes minutes to make.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence

import pytest

SAMPLES = 8
TOGETHER = {"tests/docker/test_vllm_image.py", "tests/docker/test_client_image.py"}


def turn_of(file: str, position: int) -> int:
    """Which of the samples runs the test at this position of a file. Files begin at different turns, so that a file
    of few tests does not always burden the same sample."""
    return (zlib.crc32(file.encode()) + (0 if file in TOGETHER else position)) % SAMPLES


def chosen(tests: Sequence[tuple[str, bool]], number: int) -> list[bool]:
    """Whether the sample runs each test; tests come in their order, each with its file and whether it always runs."""
    positions: dict[str, int] = defaultdict(int)
    found = []
    for file, always in tests:
        found.append(always or turn_of(file, positions[file]) == number % SAMPLES)
        positions[file] += not always
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", type=int, metavar="N", help=f"an {SAMPLES}th of the tests: those of sample N")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "always: runs in every sample (tests/sampling.py)")


# After the marks of -m and the names of -k have chosen: positions are those of one stage's tests.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    number = config.getoption("--sample")
    if number is None:
        return
    runs = chosen([(_file(item), item.get_closest_marker("always") is not None) for item in items], number)
    config.hook.pytest_deselected(items=[item for item, run in zip(items, runs, strict=True) if not run])
    items[:] = [item for item, run in zip(items, runs, strict=True) if run]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.config.getoption("--sample") is not None and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK  # a stage may have no test in a sample


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    number = config.getoption("--sample")
    if number is not None:
        failed = bool(terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"))
        repeat = f"; `make gate SAMPLE={number}` repeats it" if failed else ""
        terminalreporter.write_line(f"sample {number % SAMPLES} of {SAMPLES} (SAMPLE={number}){repeat}")


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
