"""The process launcher with tiny Python programs as servers: whatever they do and whoever dies, nothing is left."""

from __future__ import annotations

import base64
import contextlib
import html
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest

from backends import process
from backends.launch import Exit, LaunchError, Running, ServerSpec, died
from backends.untrusted import writings
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the process launcher needs Linux")

PATIENCE_S = 20.0  # far more than anything here takes

SERVES = """
import http.server, signal, sys
def stop(*_):
    print("bye", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(60)
"""
# A child, and a grandchild that has left session and parent, as daemons do; neither heeds SIGTERM.
FAMILY = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def worker():
    print("worker", os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
if os.fork() == 0:
    worker()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        worker()
    os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
print("up", flush=True)
if len(sys.argv) > 2:
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.01)
else:
    time.sleep(60)
"""

Launch = Callable[..., Running]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    started: list[Running] = []

    def start(code: str, *more: str, **fields: Any) -> Running:
        port = process.free_port()
        argv = (sys.executable, "-I", "-S", "-c", code, str(port), *more)
        fields = {"argv": argv, "port": port, "env": {}, **fields}
        running = process.start(
            ServerSpec(run_id="r", backend="vllm", log=tmp_path / "start.log", **fields),
            lambda _: None,
            threading.Event(),
        )
        started.append(running)
        return running

    yield start
    for running in started:
        running.stop()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


def said(running: Running, word: str) -> list[str]:
    """What stands behind `word` at the beginning of lines of the log."""
    return [line[len(word) + 1 :] for line in running.log_tail().splitlines() if line.startswith(word)]


def workers_of(running: Running) -> list[int]:
    """The two of FAMILY."""
    until(lambda: said(running, "up") and len(said(running, "worker")) == 2)
    return [int(pid) for pid in said(running, "worker")]


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=PATIENCE_S) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def test_a_server_serves_until_it_is_stopped(launch: Launch, tmp_path: Path) -> None:
    running = launch(SERVES)
    until(lambda: healthy(running.urls[0]))
    assert running.poll() is None
    pid = running.facts["pid"]
    assert os.getsid(pid) == pid != os.getsid(0)  # a Ctrl-C in our terminal does not reach it
    assert os.getsid(parent(pid)) != os.getsid(0)  # nor its supervisor
    running.stop()
    assert running.poll() == Exit(0)
    assert not alive(pid)
    assert not healthy(running.urls[0])
    assert said(running, "bye") == [""]
    running.stop()
    assert running.poll() == Exit(0)


def test_a_server_that_ignores_sigterm_is_killed(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STOP_S", 0.1)
    running = launch(STUBBORN)
    until(lambda: said(running, "up"))
    running.stop()
    assert running.poll() == Exit(-signal.SIGKILL)
    assert not alive(running.facts["pid"])


def test_a_start_says_how_long_it_may_take_to_end(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STOP_S", 60.0)  # as long as it sleeps: it would end by itself
    running = launch(STUBBORN, stop_s=0.1)
    until(lambda: said(running, "up"))
    running.stop()
    assert running.poll() == Exit(-signal.SIGKILL)


def test_children_and_daemons_are_ended_too(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STOP_S", 0.1)
    running = launch(FAMILY)
    workers = workers_of(running)
    assert all(map(alive, workers))
    assert len({os.getsid(pid) for pid in workers}) == 2
    running.stop()
    assert running.poll() == Exit(-signal.SIGTERM)  # the first process obeyed, the others were killed
    assert not any(map(alive, workers))


def test_what_a_dead_server_leaves_is_ended(launch: Launch, tmp_path: Path) -> None:
    running = launch(FAMILY, str(tmp_path / "leave"))
    workers = workers_of(running)
    assert running.poll() is None
    (tmp_path / "leave").touch()
    assert until(running.poll) == Exit(0)
    assert not any(map(alive, workers))


def test_a_server_that_fails_is_explained(launch: Launch) -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    running = launch(f"import sys; print('loading'); print({text!r}, file=sys.stderr); sys.exit(3)")
    exit = until(running.poll)
    assert exit == Exit(3)
    error = died("vLLM", exit, running.log_tail(), ())
    assert str(error).startswith("vLLM ended with exit code 3: CUDA out of memory; use more GPUs")
    assert text in error.log.splitlines()
    assert running.log_tail(1).count("\n") == 0


def test_a_server_that_is_killed(launch: Launch) -> None:
    running = launch(STUBBORN)
    os.kill(running.facts["pid"], signal.SIGKILL)
    exit = until(running.poll)
    assert exit == Exit(-signal.SIGKILL)
    assert "was killed by signal 9" in str(died("vLLM", exit, "", ()))


def test_the_supervisor_heeds_no_signal_but_sigkill(launch: Launch) -> None:
    running = launch(STUBBORN)
    until(lambda: said(running, "up"))
    supervisor = parent(running.facts["pid"])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(supervisor, number)
    os.kill(running.facts["pid"], signal.SIGKILL)  # it must still be there to report this
    assert until(running.poll) == Exit(-signal.SIGKILL)


def test_the_server_dies_with_its_supervisor(launch: Launch) -> None:
    running = launch(FAMILY)
    pid = running.facts["pid"]
    daemons = [worker for worker in workers_of(running) if os.getpgid(worker) != pid]
    group = [pid, *(worker for worker in workers_of(running) if worker not in daemons)]
    os.kill(parent(pid), signal.SIGKILL)
    until(lambda: not alive(pid))  # by the kernel, before we look
    assert until(running.poll) == Exit(-signal.SIGKILL, error="its supervisor was killed")
    until(lambda: not any(map(alive, group)))
    for worker in daemons:  # beyond reach then
        os.kill(worker, signal.SIGKILL)


LOADGEN = """
import pathlib, subprocess, sys, threading
from backends import process
from backends.launch import ServerSpec
process.STOP_S = 0.1
log, port, code = sys.argv[1:]
running = process.start(
    ServerSpec(run_id="r", backend="vllm", argv=(sys.executable, "-I", "-S", "-c", code, port), env={}, port=int(port),
          log=pathlib.Path(log), secrets=("SECRET_FOR_TEST",)), lambda _: None, threading.Event())
other = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
print(running.facts["pid"], other.pid, flush=True)
threading.Event().wait()
"""


def test_the_server_does_not_outlive_a_killed_loadgen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = secrets.token_hex(16)
    monkeypatch.setenv("SECRET_FOR_TEST", token)
    log = tmp_path / "start.log"
    code = f"import os; print('token', os.environ['SECRET_FOR_TEST'], flush=True)\n{FAMILY}"
    argv = [sys.executable, "-c", LOADGEN, str(log), str(process.free_port()), code]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=Path(process.__file__).parents[1]) as loadgen:
        assert loadgen.stdout is not None
        server, other = map(int, loadgen.stdout.readline().split())
        try:
            supervisor = parent(server)
            until(lambda: log.read_text().count("worker") == 2 and "up" in log.read_text())
            workers = [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("worker")]
            assert alive(server) and all(map(alive, workers))
            loadgen.kill()
            until(lambda: not any(map(alive, (server, supervisor, *workers))))
            assert alive(other)  # a child of loadgen that lives on holds no end of the pipe
        finally:
            os.kill(other, signal.SIGKILL)
    assert token not in log.read_text()
    assert "token ***" in log.read_text()


def test_secrets_reach_the_server_and_nothing_else(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = secrets.token_hex(16)
    longer = token + "-and-more"
    monkeypatch.setenv("TOKEN", token)
    monkeypatch.setenv("LONGER", longer)
    monkeypatch.setenv("EMPTY", "")
    code = """
import os, time
print("length", len(os.environ["TOKEN"]))
print("one", os.environ["TOKEN"], "two", os.environ["LONGER"], "end", flush=True)
time.sleep(60)
"""
    running = launch(code, secrets=("TOKEN", "LONGER", "EMPTY", "UNSET"))
    until(lambda: said(running, "one"))
    assert said(running, "length") == ["32"]
    assert said(running, "one") == ["*** two *** end"]
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert token.encode() not in entry.read_bytes()
    log = tmp_path / "start.log"
    assert log.stat().st_mode & 0o777 == 0o600
    running.stop()
    assert log.read_text().splitlines()[:2] == ["length 32", "one *** two *** end"]
    assert token not in log.read_text()


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"])
def test_a_token_that_nobody_gave_is_masked_too(
    name: str, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = secrets.token_hex(16)
    monkeypatch.setenv(name, token)
    running = launch(f"import os\nprint('token', os.environ['{name}'], flush=True)")
    assert until(running.poll) == Exit(0)
    assert said(running, "token") == ["***"]
    assert token not in (tmp_path / "start.log").read_text()


def test_masking_a_file_keeps_the_rest_of_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = [b"%d \xff%s %s\r" % (index, b"x" * index, b"hunter22" * (index % 3)) for index in range(300)]
    log.write_bytes(b"\n".join(lines * 20))
    expected = log.read_bytes().replace(b"hunter22", b"***")
    process.mask_file(log, writings(["hunter22", "7"]))  # "7" is no secret
    assert log.read_bytes() == expected


def test_a_log_is_masked_in_every_writing() -> None:
    key, longer = 'sk-Ab/9+x"\u00fc', "sk-longer-0123456789"
    packed = base64.b64encode(key.encode()).decode()
    shown = [key, json.dumps(key), json.dumps(key, ensure_ascii=False), quote(key, safe=""), quote_plus(key), packed]
    shown += [html.escape(key), base64.urlsafe_b64encode(key.encode()).decode(), f"Bearer {key}", longer]
    log = b"".join(b"\xff key=" + each.encode() + b" refused\n" + f"is {each} end\n".encode() for each in shown)
    masked = process.masked_log(log, writings([f"Bearer {key}", longer]))
    assert not any(part.encode() in masked for part in ("Ab", packed[:6], "longer", "0123456789"))
    assert masked.count(b"\xff key=") == masked.count(b" refused\n") == masked.count(b" end\n") == len(shown)


def test_the_environment_of_the_server(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("VIRTUAL_ENV", "/ours")
    monkeypatch.setenv("OURS", "1")
    monkeypatch.setenv("BOTH", "ours")
    monkeypatch.setenv("BYTES", os.fsdecode(b"\xff"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    code = """
import json, os, signal
print("stdin", os.fstat(0).st_rdev == os.stat("/dev/null").st_rdev, "fds", sorted(os.listdir("/proc/self/fd"))[:4])
print("sigterm", signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
print("sigint", signal.getsignal(signal.SIGINT) == signal.default_int_handler)
print("env", json.dumps(dict(os.environ)))
"""

    def environment(**fields: Any) -> dict[str, str]:
        running = launch(code, **fields)
        assert until(running.poll) == Exit(0)
        assert said(running, "stdin")[-1] == "True fds ['0', '1', '2', '3']"  # 3 is the listing itself
        assert said(running, "sigterm")[-1] == said(running, "sigint")[-1] == "True"
        found: dict[str, str] = json.loads(said(running, "env")[-1])
        return found

    with_gpus = environment(env={"BOTH": "theirs", "NEW": "a b"}, gpu_ids=("2", "3"))
    assert not {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"} & with_gpus.keys()
    expected = {"OURS": "1", "BOTH": "theirs", "NEW": "a b", "BYTES": os.fsdecode(b"\xff")}
    assert expected.items() <= with_gpus.items()
    assert with_gpus["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert with_gpus["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    without = environment(env={"PYTHONPATH": "/theirs"})
    assert without["PYTHONPATH"] == "/theirs"
    assert without["CUDA_VISIBLE_DEVICES"] == ""


def test_programs_beside_the_interpreter_are_found(launch: Launch, tmp_path: Path) -> None:
    """A server may start another program of its virtual environment by name, and nobody has activated that."""
    beside = tmp_path / "venv" / "bin"
    beside.mkdir(parents=True)
    (beside / "python").symlink_to(sys.executable)
    (beside / "front").write_text("#!/bin/sh\necho front is up\n")
    (beside / "front").chmod(0o755)
    code = "import subprocess; subprocess.run(['front'], check=True)"
    running = launch(code, argv=(str(beside / "python"), "-I", "-S", "-c", code))
    assert until(running.poll) == Exit(0)
    assert running.log_tail() == "front is up"


def test_the_command_line_is_what_is_started(tmp_path: Path) -> None:
    start = ServerSpec(
        run_id="r", backend="vllm", argv=("vllm", "serve", "a b"), env={"NCCL_P2P_DISABLE": "1", "HF_TOKEN": "hidden"},
        port=8000, log=tmp_path / "start.log", gpu_ids=("0", "1"), secrets=("HF_TOKEN",),
    )  # fmt: skip
    assert process.command_line(start) == [
        "env", "NCCL_P2P_DISABLE=1", "CUDA_DEVICE_ORDER=PCI_BUS_ID", "CUDA_VISIBLE_DEVICES=0,1", "vllm", "serve", "a b",
    ]  # fmt: skip


def test_the_end_of_a_long_log(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "TAIL_BYTES", 1000)
    monkeypatch.setenv("TOKEN", "secret" * 20)
    running = launch("import os\nfor i in range(100): print(i, os.environ['TOKEN'])", secrets=("TOKEN",))
    assert until(running.poll) == Exit(0)
    assert running.log_tail().splitlines()[-1] == "99 ***"
    assert running.log_tail(2) == "98 ***\n99 ***"
    # Cut within a secret, whose rest cannot be recognised.
    running.log.write_bytes(b"\n".join([b"secret" * 20] * 50))
    assert set(running.log_tail().splitlines()) == {"***"}


def refused(tmp_path: Path, **fields: Any) -> str:
    said: list[str] = []
    fields = {"argv": (sys.executable, "-c", "0"), "env": {}, "port": 0, "log": tmp_path / "start.log", **fields}
    cancelled = threading.Event()
    with pytest.raises(LaunchError) as error:
        process.start(ServerSpec(run_id="r", backend="vllm", **fields), said.append, cancelled)
    assert not said
    return str(error.value)


def test_a_missing_program(tmp_path: Path) -> None:
    message = refused(tmp_path, argv=("no-such-server", "--x"), env={"PATH": f"/usr/bin:{__file__}"})
    assert message == (
        "there is no program no-such-server; install the server on this machine, or use --launch docker."
    )
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_cannot_run(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("no")
    assert "cannot be started: Permission denied" in refused(tmp_path, argv=(str(program),))
    program.chmod(0o755)
    assert "cannot be started: Exec format error" in refused(tmp_path, argv=(str(program),))
    assert list(tmp_path.iterdir()) == [program]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_taken_port(tmp_path: Path, host: str) -> None:
    with socket.socket() as other:
        other.bind((host, 0))
        other.listen()
        port = other.getsockname()[1]
        assert refused(tmp_path, port=port) == (
            f"port {port} is taken; stop what listens there, or name another --port."
        )
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    message = refused(tmp_path, log=tmp_path / "missing" / "start.log")
    assert message == f"cannot write {tmp_path}/missing/start.log: No such file or directory; name another --out."


def test_a_log_that_another_has_put_there(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        assert f"cannot write {tmp_path}/{name}: " in refused(tmp_path, log=tmp_path / name)
    assert not (tmp_path / "outside").exists()


def test_nothing_is_started_once_cancelled(tmp_path: Path) -> None:
    cancelled = threading.Event()
    cancelled.set()
    start = ServerSpec(run_id="r", backend="vllm", argv=("x",), env={}, port=0, log=tmp_path / "start.log")
    with pytest.raises(LaunchError, match="stopped before the server was started"):
        process.start(start, lambda _: None, cancelled)
    assert list(tmp_path.iterdir()) == []
