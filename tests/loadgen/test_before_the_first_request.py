"""What the command line shows and leaves where nothing was sent: dry runs, and servers that are not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen import cli
from loadgen.rundir import records
from tests.support.waiting import free_ports


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


def test_a_dry_run_shows_the_first_request_to_a_url(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The host does not exist: nothing may be asked of it."""
    monkeypatch.setenv("THE_KEY", "sk-verysecret")
    words = (
        "--url https://example.invalid/v1 --backend openai-chat --model m --api-key-env THE_KEY --header X-Team=blue"
    )
    assert cli.invoke(["run", *words.split(), "--input-tokens", "5", "--dry-run"]) == 0
    out = capsys.readouterr().out
    where, _, line, *fields = out.split("\n")
    assert where == "# the first request, to example.invalid, port 443, over TLS; nothing was sent"
    assert line == "POST /v1/chat/completions HTTP/1.1"
    assert {"Host: example.invalid:443", "Authorization: Bearer ***", "X-Team: blue"} <= set(fields)
    assert json.loads(out.rstrip().rpartition("\n")[2])["model"] == "m"
    assert "verysecret" not in out and not list(tmp_path.iterdir())


def test_without_gpus_a_dry_run_names_none(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--backend vllm --launch process --model 7b --dry-run"
    assert cli.invoke(["run", *words.split()]) == 0
    assert "CUDA_VISIBLE_DEVICES" not in capsys.readouterr().out
    assert cli.invoke(["run", *words.split(), "--gpus", "0"]) == 0
    assert "CUDA_VISIBLE_DEVICES=0 " in capsys.readouterr().out


def test_a_search_of_a_server_that_is_not_there_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    assert cli.invoke(["search", "--url", url, "--slo", "ttft<500ms", "--out", "new/search"]) == 3
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "cannot reach" in said.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("caching", ["on", "off"])
def test_a_prediction_calls_requests_warm_only_with_a_cache(caching: str) -> None:
    words = f"--gpu h200 --model 7b --prefix 2:256 --prefix-caching {caching} --requests 20 --output-tokens 2 --out run"
    assert cli.invoke(["predict", *words.split()]) in (0, 4)
    sharing = json.loads(Path("run/report.json").read_text())["sharing"]
    assert sharing["shareable_tokens"] > 0
    assert (sharing["ttft_warm_ms"]["n"] > 0) == (sharing["cached_tokens"] > 0) == (caching == "on")
    table, _ = records.read(Path("run"))
    assert bool((table.cached_tokens > 0).any()) == (caching == "on")
