"""The command: what it prints, how it ends, and what it says when it cannot start."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from servers.simulator.options import Hardware
from tests.servers.reader import ask_on, http_request, stamps

COMMAND = [sys.executable, "-m", "servers"]


def start(*options: str, **environment: str) -> tuple[subprocess.Popen[str], dict[str, object]]:
    process = subprocess.Popen(
        [*COMMAND, "--port", "0", *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=os.environ | environment,
    )  # fmt: skip
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def connection_to(url: object) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(str(url).removeprefix("http://"), timeout=10)


def fails(*options: str, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [*COMMAND, *options], capture_output=True, text=True, timeout=20, env=os.environ | environment, check=False
    )
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    return done.returncode, done.stderr


def test_ready_line_requests_stamps_and_sigterm(tmp_path: Path) -> None:
    process, ready = start(
        "--dialect", "tgi", "--stamps", str(tmp_path / "s.npz"), "--model", "llama", "--ttft-ms", "5"
    )
    assert set(ready) == {"url", "dialect", "emulated", "emulation"}
    assert (ready["dialect"], ready["emulated"], ready["emulation"]) == ("tgi", True, None)
    connection = connection_to(ready["url"])
    assert ask_on(connection, "GET", "/info").json["model_id"] == "llama"
    asked = {"inputs": "a", "parameters": {"max_new_tokens": 4}}
    assert len(ask_on(connection, "POST", "/generate_stream", asked, X_Request_Id="r").events) == 4
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (0, "", "")
    received_ns, sent = stamps(tmp_path / "s.npz")["r"]
    assert len(sent) == 4
    assert sent[0] >= received_ns + 5_000_000


def test_a_modelled_sglang_by_the_name_that_runs_have() -> None:
    process, ready = start("--backend", "sglang", "--gpu", "h200", "--model", "7b")
    assert (ready["dialect"], ready["emulation"]["scheduler"]) == ("sglang", "sglang@0.5.11")
    asked = {"input_ids": [7] * 600, "sampling_params": {"max_new_tokens": 3}}
    reply = ask_on(connection_to(ready["url"]), "POST", "/generate", asked).json
    assert reply["meta_info"]["completion_tokens"] == 3 and reply["meta_info"]["e2e_latency"] > 0
    process.terminate()
    assert process.wait(timeout=10) == 0


def test_sigint_ends_streams_under_way_and_keeps_their_stamps(tmp_path: Path) -> None:
    process, ready = start("--itl-ms", "20", "--stamps", str(tmp_path / "s.npz"))
    connection = connection_to(ready["url"])
    body = json.dumps({"prompt": "a", "max_tokens": 4000, "stream": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json", "X-Request-Id": "r"})
    response = connection.getresponse()
    assert response.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 0
    assert 1 <= len(stamps(tmp_path / "s.npz")["r"][1]) < 4000


def test_ends_when_standard_input_does() -> None:
    process, ready = start("--exit-with-stdin")
    assert process.stdin is not None
    process.stdin.write("ignored\n")
    process.stdin.flush()
    assert ask_on(connection_to(ready["url"]), "GET", "/health").status == 200
    process.stdin.close()
    assert process.wait(timeout=10) == 0


def test_port_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, sentence = fails("--port", port)
    assert code == 3
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use; choose another" in sentence


def test_address_that_is_not_ours() -> None:
    code, sentence = fails("--host", "no.such.host.invalid")
    assert code == 3
    assert "cannot listen on no.such.host.invalid" in sentence
    code, sentence = fails("--host", f"{64 * 'a'}.example")  # no label of a name can be so long
    assert code == 2
    assert "is no host name; name an address to listen on" in sentence


def crowded(*options: str) -> tuple[subprocess.Popen[str], str, list[socket.socket]]:
    """A server that has no file descriptor left, and the connections that took them."""
    limit = 40
    process = subprocess.Popen(
        [*COMMAND, "--port", "0", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    url = str(json.loads(process.stdout.readline())["url"])
    port = int(url.rsplit(":", 1)[1])
    socks = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(limit + 10)]
    assert "Too many open files; raise `ulimit -n`" in process.stderr.readline()
    return process, url, socks


def test_more_connections_than_files() -> None:
    """Further ones wait until others close; the server goes on."""
    process, url, socks = crowded()
    for sock in socks:
        sock.close()
    assert ask_on(connection_to(url), "GET", "/health").status == 200
    process.terminate()
    assert process.wait(timeout=10) == 0


def test_idle_connections_make_room(tmp_path: Path) -> None:
    """Who asks nothing keeps nobody out, though its connection stays open."""
    process, url, socks = crowded()
    for _ in range(3):
        assert ask_on(connection_to(url), "GET", "/health").status == 200
    for sock in socks:
        sock.close()
    process.terminate()
    assert process.wait(timeout=10) == 0


def test_stopped_while_it_has_no_file_left(tmp_path: Path) -> None:
    process, _, socks = crowded("--stamps", str(tmp_path / "s.npz"), "--ttft-ms", "0")
    socks[0].sendall(http_request("/v1/completions", {"prompt": "a", "max_tokens": 3}, "X-Request-Id: r"))
    assert socks[0].recv(65536).startswith(b"HTTP/1.1 200")
    process.terminate()
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (0, "", "")
    assert len(stamps(tmp_path / "s.npz")["r"][1]) == 1
    for sock in socks:
        sock.close()


def test_api_key_from_the_environment() -> None:
    process, ready = start("--api-key-env", "THE_KEY", THE_KEY="sesame")
    connection = connection_to(ready["url"])
    assert ask_on(connection, "GET", "/v1/models").status == 401
    assert ask_on(connection, "GET", "/v1/models", Authorization="Bearer sesame").status == 200
    process.terminate()
    assert process.wait(timeout=10) == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--ttft"], "Unknown option"),
        (["--dialect", "foo"], "--dialect"),
        (["--backend", "ollama"], "--backend"),
        (["--host", ""], "--host is empty"),
        (["--ttft-ms", "-1"], "--ttft-ms -1 is out of range"),
        (["--itl-ms", "nan"], "--itl-ms nan is out of range"),
        (["--jitter-ratio", "1"], "--jitter-ratio 1 is out of range"),
        (["--port", "70000"], "--port 70000 is no port"),
        (["--max-model-len", "1"], "--max-model-len 1"),
        (["--fault", "explode:2"], "there is no fault 'explode'"),
        (["--dialect", "tgi", "--fault", "no_done:2"], "the tgi protocol has nothing of the kind"),
        (["--stamps", "/no/such/place/s.npz"], "cannot write /no/such/place/s.npz: No such file or directory"),
        (["--api-key-env", "NOT_SET_ANYWHERE"], "NOT_SET_ANYWHERE named by --api-key-env is not set"),
    ],
)
def test_bad_options(options: list[str], sentence: str) -> None:
    code, said = fails(*options)
    assert code == 2
    assert sentence in said


def test_exit_with_stdin_needs_something_that_ends() -> None:
    done = subprocess.run(
        [*COMMAND, "--exit-with-stdin"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 2
    assert "--exit-with-stdin needs a pipe or a terminal" in done.stderr


def test_help_names_every_option_and_fault() -> None:
    text = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, timeout=20, check=True).stdout
    for word in (
        "--jitter-ratio",
        "--stamps",
        "--exit-with-stdin",
        "--max-model-len",
        "wrong_prompt_tokens",
        "127.0.0.1",
    ):
        assert word in text


def test_help_says_what_each_option_of_the_hardware_does() -> None:
    text = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, timeout=20, check=True).stdout
    for field in dataclasses.fields(Hardware):
        name = field.name.replace("_", "-")
        assert re.search(rf"--{name} (STR|INT|FLOAT|PATH|CHOICE|--no-p2p)?(\.\.\.)? +[A-Z]", text), name


def test_gpus_that_do_nothing_are_told_when_it_starts() -> None:
    process = subprocess.run(
        [*COMMAND, "--port", "0", "--exit-with-stdin", "--gpu", "h200", "--gpus", "2"],
        input="", capture_output=True, text=True, timeout=20, check=True,
    )  # fmt: skip
    assert process.stderr == "note: 1 of the 2 GPUs holds llama-2-7b and the rest do nothing; --tp 2 uses all.\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--kv-tokens", "100"), "--kv-tokens is for modelled hardware; name the GPU to model with --gpu."),
        (("--gpus", "2"), "--gpus is for modelled hardware"),
        (("--speed", "2"), "--speed is for modelled hardware"),
        (("--gpu", "h200", "--dtype", "int4"), '"int4" for --dtype. Choose from: "float16", '),
        (("--gpu", "h200", "--speed", "inf"), "--speed is inf"),
        (("--gpu", "h200", "--scheduler-arg", "max_running=0"), "max_running is 0; it must be at least 1"),
    ],
)
def test_modelled_hardware_that_cannot_be(options: tuple[str, ...], said: str) -> None:
    code, sentence = fails(*options)
    assert code == 2 and said in sentence


def test_the_wire_tells_its_speed() -> None:
    process, ready = start("--gpu", "rtx4090", "--gpus", "2", "--tp", "2", "--p2p", "--speed", "8")
    assert isinstance(ready["emulation"], dict)
    assert (ready["emulation"]["speed"], ready["emulation"]["topology"]) == (8.0, "pcie")
    process.terminate()
    assert process.wait(timeout=10) == 0


def test_a_server_of_fixed_times_starts_without_what_it_does_not_need() -> None:
    """numpy alone would take longer to load than all of it."""
    script = "import sys, servers.app; print(sorted({'numpy', 'matplotlib', 'aiohttp', 'httpx'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "[]\n"
