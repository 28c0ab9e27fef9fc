"""Going on in a directory that may be another's: what is started, where it is sent and with which secret is the command
line's word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadgen import cli, rundir
from loadgen.config import OWNERS_WORD, Config, check_owners_word
from loadgen.search.results import SearchOptions, SearchResult

OTHERS: dict[str, tuple[str, Any, Any]] = {
    "an address": ("--url", "url", "http://evil.example"),
    "a program": ("--server-python", "server_python", "/tmp/evil"),
    "an image": ("--image", "image", "evil/image"),
    "a variable": ("--api-key-env", "api_key_env", "AWS_SECRET"),
    "a header": ("--header", "header", ["X-A=env:AWS_SECRET"]),
    "a file": ("--dataset", "dataset", "/etc/passwd"),
    "a cluster": ("--on", "on", "ray:evil.example:6379"),
}
NEEDS: dict[str, dict[str, Any]] = {
    "server_python": {"launch": "process", "backend": "vllm", "model": "org/m"},
    "image": {"launch": "docker", "backend": "vllm", "model": "org/m"},
    "api_key_env": {"url": "http://h"}, "header": {"url": "http://h"}, "on": {"url": "http://h"},
    "dataset": {"repeat_dataset": True},
}  # fmt: skip


def a_search(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir()
    options = SearchOptions(slo_ms={"ttft": 1000.0}, attain=0.9, axis="rate", budget_s=60.0, config=config)
    rundir.write_json(directory / "search.json", SearchResult(version="1", options=options))
    return directory


@pytest.mark.parametrize(("flag", "name", "value"), OTHERS.values(), ids=OTHERS.keys())
def test_a_search_starts_and_sends_nothing_by_its_directory(
    flag: str,
    name: str,
    value: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SECRET", "very-secret-value")
    directory = a_search(tmp_path / "s", {name: value, **NEEDS.get(name, {})})
    before = (directory / "search.json").read_bytes()
    assert cli.invoke(["search", "--resume", str(directory)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "beside --resume" in told and flag in told and "very-secret" not in told
    assert (directory / "search.json").read_bytes() == before and len(list(directory.iterdir())) == 1


def test_a_search_with_another_word_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = a_search(tmp_path / "s", {"url": "http://one"})
    assert cli.invoke(["search", "--resume", str(directory), "--url", "http://two"]) == 2
    assert "leave --url out" in capsys.readouterr().err


def test_a_search_goes_on_when_its_owner_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As far as to the server, which is not there."""
    directory = a_search(tmp_path / "s", {"url": "http://127.0.0.1:1", "backend": "openai"})
    assert cli.invoke(["search", "--resume", str(directory), "--url", "http://127.0.0.1:1"]) == 3
    assert "cannot reach http://127.0.0.1:1" in capsys.readouterr().err


def test_the_embedded_server_needs_no_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is this program itself. Another mistake is told first, so that nothing is started here."""
    directory = a_search(tmp_path / "s", {"launch": "embedded"})
    assert cli.invoke(["search", "--resume", str(directory), "--seed", "9"]) == 2
    assert "leave --seed out" in capsys.readouterr().err
    check_owners_word(directory, Config(launch="embedded"), (), str)


def test_a_masked_address_is_typed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = "http://127.0.0.1:1/sk-resumed-0123456789"
    Config(url=url)
    directory = a_search(tmp_path / "s", {"url": url, "backend": "openai"})
    assert "sk-resumed" not in (directory / "search.json").read_text()
    assert cli.invoke(["search", "--resume", str(directory), "--url", url]) == 3
    assert "cannot reach http://127.0.0.1:1/***" in capsys.readouterr().err


def test_a_sweep_sends_nothing_by_its_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from loadgen.search import sweep
    from loadgen.search.points import SweepOptions

    out = tmp_path / "s"
    planned = sweep.prepare(SweepOptions(rates=(1.0,), url="http://127.0.0.1:1", backend="openai", out=out), print)
    rundir.create(out)
    rundir.write_json(out / "sweep.json", planned.kept)
    assert cli.invoke(["sweep", "--resume", str(out)]) == 2
    told = capsys.readouterr().err
    assert "beside --resume" in told and "--url http://127.0.0.1:1" in told
    assert cli.invoke(["sweep", "--resume", str(out), "--url", "http://127.0.0.1:1"]) == 3
    assert "cannot reach http://127.0.0.1:1" in capsys.readouterr().err


def test_the_options_are_those_of_a_run() -> None:
    assert set(OWNERS_WORD) <= Config().as_dict().keys()
