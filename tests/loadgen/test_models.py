"""Which model is meant: names, ids, directories; what is described, and why what is not is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import backends
from backends import catalog
from loadgen import cli, models
from loadgen.config import Config, ConfigError
from loadgen.plan import choose_model
from loadgen.server import embedded
from tests.loadgen.test_cli import ServerInfo

NEMO = next(each for each in json.loads(catalog.DATA.read_bytes()) if each["name"] == "mistral-nemo")["config"]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A directory with the config.json of a Mistral-Nemo."""
    directory = tmp_path / "my nemo"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(NEMO))
    return directory


def test_a_directory_is_described_as_the_catalogs_model_is(own: Path) -> None:
    found, known = models.find(str(own)), catalog.find("mistral-nemo")
    assert known is not None and found.described().kinds == known.kinds
    assert found.described().parameters == known.parameters
    assert (found.name, found.described().hf_id, found.max_position) == ("my nemo", str(own), 131072)
    assert models.names(str(own)) == {"my nemo"} and models.spec("no such model") is None


def test_why_a_size_is_not_known(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own / "config.json").write_text(json.dumps({**NEMO, "model_type": "mamba2"}))
    with pytest.raises(ConfigError, match=r"^the size of 'my nemo' .*: in its config.json model_type 'mamba2' is not"):
        models.find(str(own)).described()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ConfigError, match=r"org/name.* `hf download org/name config.json`, or name a directory\.$"):
        models.find("org/name").described()


def test_a_cached_id_is_described(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--org--name"
    (repository / "snapshots").mkdir(parents=True)
    own.rename(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc\n")
    assert models.find("org/name").described().parameters == 12_247_782_400


@pytest.mark.parametrize(
    "name", ["a\0b/c", "\ud800/x", "组织/模型", "../..", "o/" + 9000 * "x", "models--x/../../etc", ""]
)
def test_what_a_server_may_call_its_model(name: str) -> None:
    """Names that no file can have, some under this locale only: the model is not known, and nothing is raised."""
    assert models.spec(name) is None
    assert models.names(name) <= {name}


def test_an_embedded_server_finds_a_directory_and_serves_its_name(own: Path) -> None:
    config = Config(model=str(own), gpu="h200")
    assert (embedded.model_name(config), embedded.model_place(config)) == ("my nemo", str(own))
    assert choose_model(config, backends.get("vllm"), ServerInfo("my nemo")) == "my nemo"


def test_a_directory_is_predicted_as_its_name_is(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports = []
    for number, model in enumerate(("mistral-nemo", str(own))):
        words = f"predict --gpu h100 --quantization fp8 --requests 40 --output-tokens 9 --out {tmp_path / str(number)}"
        assert cli.invoke([*words.split(), "--model", model]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    named, placed = (report["latency_ms"] if "latency_ms" in report else report["metrics"] for report in reports)
    assert named == placed
    emulations = [json.loads((tmp_path / str(number) / "manifest.json").read_bytes()) for number in (0, 1)]
    assert emulations[0]["emulation"]["quantization"] == emulations[1]["emulation"]["quantization"] == "fp8"
    assert emulations[1]["model"] == "my nemo"
