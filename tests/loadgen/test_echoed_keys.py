"""A server that sends back the keys that it was sent: nothing that a run leaves or says holds one."""

from __future__ import annotations

import base64
import html
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest

from loadgen import cli
from loadgen.config import Config, ConfigError, keys_of_url

KEY = "sk-Secret/9+x=A1b2C3"
PASSWORD = "pass/word+1"
BASIC = "Basic " + base64.b64encode(f"me:{PASSWORD}".encode()).decode()
IN_URL = "sk-inTheUrl0123456789"
HIDDEN = (KEY, PASSWORD, BASIC.partition(" ")[2], IN_URL, quote(KEY), quote(KEY, safe=""), json.dumps(KEY)[1:-1])


class Echo(BaseHTTPRequestHandler):
    """GET names a model after the key; POST refuses with all headers and the path, written another way each time, as an
    error's body or an event of a stream."""

    count = 0

    def log_message(self, format: str, *args: object) -> None: ...

    def do_GET(self) -> None:
        model = f"m {self.headers['Authorization']} {self.path}"
        found = "/v1/models" in self.path
        body = json.dumps({"object": "list", "data": [{"id": model, "object": "model"}]}).encode()
        self.reply(200 if found else 404, body if found else self.path.encode(), "application/json")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        said = " ".join((self.headers["Authorization"], self.headers["X-Gateway"], self.path))
        writings = [said, json.dumps({"error": {"message": said}}), quote(said), quote(said, safe="")]
        writings += [html.escape(said), json.dumps({"detail": said}).replace("/", "\\/")]
        writings.append(base64.b64encode(KEY.encode()).decode())
        writings.append("x" * 290 + said)
        number = Echo.count
        Echo.count += 1
        if number == 0:  # is asked how it counts
            chunk = {"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}
            self.reply(200, f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode(), "text/event-stream")
        elif number % 2:
            self.reply(200, f"data: {writings[number // 2 % len(writings)]}\n\n".encode(), "text/event-stream")
        else:
            self.reply(401, writings[number // 2 % len(writings)].encode(), "text/plain")

    def reply(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as echo:
        threading.Thread(target=echo.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{echo.server_port}"
        echo.shutdown()


@pytest.mark.parametrize("transport", ["fast", "aiohttp"])
def test_no_key_is_kept_or_shown(
    transport: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TEST_KEY", KEY)
    monkeypatch.setenv("TEST_BASIC", BASIC)
    url = f"{server}/{IN_URL}"
    argv = ["run", "--url", url, "--backend", "openai-chat", "--requests", "18", "--warmup", "0", "--no-calibrate",
            "--api-key-env", "TEST_KEY", "--header", "X-Gateway=env:TEST_BASIC", "--transport", transport,
            "--out", str(tmp_path / "run")]  # fmt: skip
    monkeypatch.setattr("sys.argv", ["loadgen", *argv])
    monkeypatch.setattr(Echo, "count", 0)
    assert cli.invoke(argv) in (3, 4)
    told = "".join(capfd.readouterr())
    kept = "".join(path.read_bytes().decode("latin-1") for path in (tmp_path / "run").iterdir())
    assert "***" in told and "***" in kept
    for secret in HIDDEN:
        assert secret not in told and secret not in kept


@pytest.mark.parametrize("key", [KEY, "hf_abcdefABCDEF0123", "a" * 10 + "1b2c3d4e5f", "Bearer x"])
@pytest.mark.parametrize("flag", ["--api-key-env", "--header"])
def test_a_key_in_place_of_its_variable_is_not_shown(flag: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    value = key if flag == "--api-key-env" else f"X-Key=env:{key}"
    assert cli.invoke(["run", "--url", "http://127.0.0.1:1", flag, value]) == 2
    told = "".join(capsys.readouterr())
    assert key not in told and "variable" in told and told.count("\n") == 1


def test_names_of_variables_are_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert cli.invoke(["run", "--url", "http://127.0.0.1:1", "--api-key-env", "HF_TOKEN"]) == 2
    assert "HF_TOKEN" in capsys.readouterr().err


def test_what_of_an_address_looks_like_a_key() -> None:
    assert keys_of_url(f"http://h:1/{IN_URL}/v1") == [IN_URL]
    assert keys_of_url("http://h/gateway/0123456789abcdef0123456789abcdef/v1") == ["0123456789abcdef0123456789abcdef"]
    for plain in ("v1", "openai/deployments/gpt-4o-mini-2024-07-18", "models/Meta-Llama-3.1-8B-Instruct", ""):
        assert keys_of_url(f"https://host.example:8000/{plain}") == []
    with pytest.raises(ConfigError):
        Config(url="http://me:password@h")
