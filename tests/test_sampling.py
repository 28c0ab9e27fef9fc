"""Samples of the slow stages: eight successive ones run every test, whatever the stage."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.sampling import SAMPLES, TOGETHER, chosen

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("first", [0, 5, 0x7FFF_FFFF])
def test_eight_successive_samples_run_every_test(first: int) -> None:
    tests = [(file, number % 9 == 0) for file in ("a.py", "b.py", *sorted(TOGETHER)) for number in range(21)]
    runs = Counter(index for number in range(first, first + SAMPLES)
                   for index, run in enumerate(chosen(tests, number)) if run)  # fmt: skip
    assert runs == {index: SAMPLES if always else 1 for index, (_, always) in enumerate(tests)}


def test_samples_are_of_one_size() -> None:
    sizes = [sum(chosen([("a.py", False)] * 1003, number)) for number in range(SAMPLES)]
    assert max(sizes) - min(sizes) <= 1


def test_a_shared_fixture_has_one_turn() -> None:
    file = min(TOGETHER)
    assert sorted(sum(chosen([(file, False)] * 7, number)) for number in range(SAMPLES)) == [0] * 7 + [7]


def test_files_of_one_turn_exist() -> None:
    assert not [file for file in TOGETHER if not (ROOT / file).is_file()]


def test_the_samples_of_real_stages_cover_them() -> None:
    """Bad command lines and kills, as pytest itself collects them."""

    def collected(*options: str) -> list[str]:
        files = ["tests/bad_commands/test_bad_commands.py", "tests/kills/test_kills.py"]
        argv = [sys.executable, "-m", "pytest", "--collect-only", "-m", "processes", *files, *options]
        ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
        return [line for line in ended.stdout.splitlines() if "::" in line]

    samples = [collected("--sample", str(number)) for number in range(3, 3 + SAMPLES)]
    assert {test for sample in samples for test in sample} == set(collected())
    assert max(map(len, samples)) < len(set().union(*samples)) / 3


def test_a_sample_that_is_no_number_is_refused() -> None:
    ended = subprocess.run([sys.executable, "-m", "pytest", "--sample", "x", "tests/test_house.py"], cwd=ROOT,
                           capture_output=True, text=True)  # fmt: skip
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR and "--sample: invalid int value: 'x'" in ended.stderr
