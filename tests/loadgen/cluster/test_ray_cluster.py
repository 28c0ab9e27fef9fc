"""What is refused before Ray is asked for anything; with Ray itself: tests/cluster."""

from __future__ import annotations

import importlib.util
import socket
import sys
from typing import Any

import pytest

from backends.exit_codes import install_command
from loadgen import cli
from loadgen.cluster import ray_cluster


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = cli.invoke(["run", "--url", "http://127.0.0.1:9", *arguments])
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "Traceback" not in err
    return code, err


def test_without_ray_a_sentence_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else there(name, *rest))
    monkeypatch.setitem(sys.modules, "ray", None)
    code, err = refused(capsys, "--on", "ray")
    assert code == 2 and f"the Python package ray is not installed; {install_command('ray')}" in err


def test_an_address_where_nobody_answers_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_cluster, "check_installed", lambda: None)
    monkeypatch.setattr("loadgen.cluster.ray_cluster.check_installed", lambda: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, err = refused(capsys, "--on", f"ray:{address}")
    assert code == 3 and f"there is no Ray cluster at {address} (Connection refused); start one" in err
    assert not list(tmp_path.rglob("*.json*"))
