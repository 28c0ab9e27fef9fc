"""Clients of other people ask the embedded server: straight, through nginx with its defaults, which speaks HTTP/1.0
to it, and through LiteLLM. Each gets the text that is true."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import embedded, program
from tests.support.waiting import free_ports
from tests.vllm.tiny_model import write as write_tiny_model

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from side_by_side.clients import CLIENTS, Shape, Work  # noqa: E402

PYTHON = ROOT / ".venv-clients" / "bin" / "python"
UNPACKED = ROOT / "build" / "nginx" / "usr" / "sbin"  # by install.sh
TTFT_MS, ITL_MS = 5, 2
NGINX = """\
daemon off;
pid {directory}/pid;
error_log stderr;
events {{}}
http {{
  access_log off;
  client_body_temp_path {directory}; proxy_temp_path {directory}; fastcgi_temp_path {directory};
  uwsgi_temp_path {directory}; scgi_temp_path {directory};
  server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass {server}; }} }}
}}
"""
LITELLM = """\
model_list:
  - model_name: llama-2-7b
    litellm_params: {{model: openai/llama-2-7b, api_base: "{server}/v1", api_key: none}}
"""
# Only this test can reach the proxy; and it fetches no list of prices and no tokenizer.
LITELLM_ENV = {
    "HF_HUB_OFFLINE": "1",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
}


@contextlib.contextmanager
def behind_nginx(server: str, directory: Path) -> Iterator[str]:
    (port,) = free_ports(1)
    (directory / "nginx.conf").write_text(NGINX.format(directory=directory, port=port, server=server))
    found = shutil.which("nginx") or shutil.which("nginx", path=f"/usr/sbin:{UNPACKED}")
    assert found, "nginx is not installed; run `make test-clients`"
    with program([found, "-c", str(directory / "nginx.conf")], f"http://127.0.0.1:{port}", "/health") as url:
        yield url


@contextlib.contextmanager
def behind_litellm(server: str, directory: Path) -> Iterator[str]:
    (port,) = free_ports(1)
    config = directory / "litellm.yaml"
    config.write_text(LITELLM.format(server=server))
    words = [str(PYTHON.with_name("litellm")), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    with program(words, f"http://127.0.0.1:{port}", "/health/liveliness", LITELLM_ENV) as url:
        yield url


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The address of a dialect behind what lies between, each started when it is asked for first."""
    with contextlib.ExitStack() as started:

        @functools.cache
        def address(dialect: str, between: str) -> str:
            if between == "nothing":
                return started.enter_context(embedded(dialect, TTFT_MS, ITL_MS))
            put = {"nginx": behind_nginx, "LiteLLM": behind_litellm}[between]
            return started.enter_context(put(address(dialect, "nothing"), tmp_path_factory.mktemp(between)))

        yield address


TEXT = " the of and"
WORDS = [" the", " of", " and"]
MARK = "vllm-0.32.0-emulated"
GOT: dict[str, tuple[str, dict[str, Any]]] = {
    "openai_completions": ("vllm", {
        "models": ["llama-2-7b"], "whole": [[index, TEXT, WORDS] for index in range(4)], "whole tokens": 12,
        "stream": WORDS, "stream tokens": 3,
    }),
    "openai_chat": ("vllm", {
        "whole": TEXT, "finish": "length", "candidates": [2, 2, 2], "fingerprint": MARK, "stream": TEXT,
        "another model": "Error code: 404 - The model `another` does not exist.",
    }),
    "openai_responses": ("vllm", {"stream": WORDS, "whole": TEXT, "tokens": 3}),
    "openai_chat_alone": ("vllm", {"whole": TEXT, "fingerprint": MARK, "stream": TEXT, "tokens": 3}),
    "litellm": ("vllm", {"whole": TEXT, "stream": TEXT}),
    "huggingface_hub": ("tgi", {"whole": "a b" + TEXT, "tokens": WORDS, "stream": WORDS, "chat": TEXT}),
    "text_generation": ("tgi", {"whole": TEXT, "finish": "length", "stream": WORDS, "chat": TEXT}),
}  # fmt: skip


@pytest.mark.clients
@pytest.mark.parametrize(
    ("client", "between"),
    [(client, between) for client in GOT for between in ("nothing", "nginx")] + [("openai_chat_alone", "LiteLLM")],
)
def test_a_client_gets_the_text_that_is_true(client: str, between: str, addresses: Any) -> None:
    dialect, expected = GOT[client]
    words = [str(PYTHON), str(Path(__file__).with_name("ask.py")), client, addresses(dialect, between)]
    env = os.environ | (LITELLM_ENV if client == "litellm" else {})
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == expected


@pytest.mark.peers
@pytest.mark.parametrize("name", ["vllm", "aiperf", "guidellm"])
def test_another_load_generator_gets_all_its_replies(name: str, addresses: Any, tmp_path: Path) -> None:
    (client,) = (each for each in CLIENTS if each.name == name)
    write_tiny_model(tmp_path / "model")
    shape = Shape(requests=20, output_tokens=8, ttft_ms=TTFT_MS, gap_ms=ITL_MS, input_tokens=32)
    (tmp_path / "out").mkdir()
    work = Work(shape, addresses("vllm", "nothing"), "llama-2-7b", tmp_path / "model", tmp_path / "out")
    done = subprocess.run(
        client.command(work), env=os.environ | client.env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = client.read(tmp_path / "out")
    assert len(said.ttft_ms) == 20 and min(said.ttft_ms) >= TTFT_MS
