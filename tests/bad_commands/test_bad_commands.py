"""Bad command lines of both programs: each ends in one sentence and exit code 2 (options) or 3 (the machine, the
server), starts nothing and overwrites nothing. Each runs within this process, and in one of its own that is forked from
an interpreter which has imported the commands (`warm`; in every sample one of each command and exit code); one of each
command is started as a user starts it. The tables beside this file hold them, one a line:

    EXIT COMMAND LINE => part of the sentence
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from backends import gpus
from loadgen import cli as loadgen
from tests.bad_commands import warm
from training_probe import cli as training_probe

PROGRAMS = {"loadgen": loadgen, "training_probe": training_probe}
LEAST_CASES = 250
MOST_CPU_S, TIMEOUT_S = 3.0, 60.0


def mooncake(timestamp_ms: int, input_tokens: int, hash_ids: str) -> str:
    """A line of a trace."""
    lengths = f'"input_length": {input_tokens}, "output_length": 5'
    return f'{{"timestamp": {timestamp_ms}, {lengths}, "hash_ids": {hash_ids}}}\n'


def turn(timestamp_ms: int, name: str, *after: str) -> str:
    """A line of a trace whose sessions' turns wait for each other."""
    fields = {"timestamp": timestamp_ms, "input_length": 6, "output_length": 5, "session_id": "s", "turn": name}
    return json.dumps(fields | ({"after": after} if after else {})) + "\n"


def sweep(options: str) -> str:
    """The beginning of a sweep."""
    order = '[{"directory": "rate-1", "value": "1", "seed": 0}, {"directory": "rate-2", "value": "2", "seed": 1}]'
    plan = f'"varies": "rate", "unit": "", "values": ["1", "2"], "repeat": 1, "seed": 0, "order": {order}'
    return f'{{"version": "1", "started_unix_s": 0, "argv": [], "plan": {{{plan}, "options": {options}}}}}'


def result(**fields: object) -> str:
    """A line of a sweep's results: of a cell that ended well, but for these fields."""
    cell = {"model": "tiny", "task": "pretrain", "engine": "ddp", "method": "F", "platform": "CPU", "gpus": 1}
    numbers = {"seq_len": 64, "batch_size": 1, "tokens_per_s": 5.0, "valid": True}
    return json.dumps({**cell, "cell": "tiny_F", "outcome": "ok", **numbers, **fields}) + "\n"


def llama(**fields: object) -> str:
    """The config.json of a small model, but for these fields."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    others = {"model_type": "llama", "vocab_size": 100, "max_position_embeddings": 512}
    return json.dumps({key: value for key, value in {**sizes, **others, **fields}.items() if value is not None})


# A search that was stopped.
SEARCHED = (
    '{"schema": "loadgen.search/1", "version": "1", "ended": "stopped", "asked": {"slo_ms": {"ttft": 500}, '
    '"attain": 0.95, "axis": "rate", "budget_s": 60, "config": {}}}'
)

# What the command lines name; each runs in a directory of its own that holds these.
FILES = {
    "empty/x": "", "file": "", "full/report.json": "precious",
    "bad.toml": "requests = ", "unknown.toml": "requets = 6\n", "zero.toml": "requests = 0\n",
    "table.toml": "[run]\nrequests = 5\n", "both.toml": "requests = 5\n[other]\nx = 1\n",
    "wrong_type.toml": "requests = [1, 2]\n", "latin.toml": 'model = "\xff"\n',
    "bad.jsonl": '{"prompt": 7}\n', "key.jsonl": '{"prompt": [1], "output_tokens": "x"}\n',
    "nojson.jsonl": "# A title\n",
    "two.jsonl": '{"prompt": [1, 2]}\n{"prompt": [3, 4]}\n', "text.jsonl": '{"prompt": "a b"}\n', "empty.jsonl": "",
    "chats.json": '[{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]',
    "no_chat.json": '[{"conversations": [{"from": "human", "value": "a"}]}, {"dialog": []}]',
    "null_chat.json": '[{"messages": [{"role": "user", "content": "a"}]}, null]',
    "silent.jsonl": '{"messages": [{"role": "user", "content": "a"}, {"content": "b"}]}\n',
    "cut.json": '[{"conversations": [{"from": "hum',
    "robots.json": '[{"conversations": [{"from": "gpt", "value": "a"}]}]',
    "surrogate.jsonl": '{"messages": [{"role": "user", "content": "\\ud800"}]}\n',
    "outputs.jsonl": '{"messages": [{"role": "user", "content": "a"}], "output_tokens": [3, 4]}\n',
    "bad.json": "{", "damaged/manifest.json": '{"schema":7}', "damaged/results.jsonl": "{]\n",
    "half/manifest.json": '{"schema": "loadgen.man', "loadgen_run/manifest.json": '{"schema": "loadgen.manifest/1"}',
    "training/manifest.json": '{"platform": "GPU", "schema": "training_probe.manifest/1"}',
    "searched/search.json": SEARCHED,
    "swept/results.jsonl": "", "points/micro.jsonl": "",
    "bad_sweep/sweep.json": '{"schema": "loadgen.sweep/1"}', "no_options/sweep.json": sweep('{"seed": "x"}'),
    "half_sweep/sweep.json": sweep('{"rates": [1.0, 2.0]}'),
    "headless/config.json": '{"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 8}',
    "mamba/config.json": '{"model_type": "mamba2", "num_hidden_layers": 2, "hidden_size": 64}',
    "negative/results.jsonl": result(tokens_per_s=-5.0), "numberless/results.jsonl": result(tokens_per_s=None),
    "nobody/results.jsonl": result() + result(gpus=0),
    "timeless/micro.jsonl": '{"point": {"kind": "memcpy", "route": "h2h", "size_bytes": 8}, "outcome": "ok"}\n',
    "cut_config/config.json": '{"model_type": "llama", "hidden_si', "list_config/config.json": "[1]",
    "typeless/config.json": llama(model_type=None), "quoted/config.json": llama(hidden_size="64"),
    "below_zero/config.json": llama(num_attention_heads=-4), "uneven/config.json": llama(hidden_size=66),
    "three_of_four/config.json": llama(num_key_value_heads=3), "odd_heads/config.json": llama(hidden_size=60),
    "pairs.txt": "512 128\n512\n",
    "trace.jsonl": mooncake(0, 600, "[1, 2]") + mooncake(90, 600, "[1, 3]"),
    "circle.jsonl": turn(0, "a", "b") + turn(1, "b", "a"), "unknown.jsonl": turn(0, "a") + turn(1, "b", "c"),
    "no_session.json": '{"id": "a", "block_size": 64, "requests": [{"t": -1}]}',
    "backwards.jsonl": mooncake(1090, 6, "[1]") + mooncake(0, 6, "[1]"),
    "negative.jsonl": mooncake(0, 6, "[1]") + mooncake(3, -6, "[1]"),
    "few_ids.jsonl": mooncake(0, 1200, "[1, 2]") + mooncake(0, 6, "[1, 2]"),
    "long.jsonl": mooncake(0, 9999, str(list(range(20)))), "broken.jsonl": mooncake(0, 6, "[1]") + '{"timestamp": \n',
    "heading.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n", "notzip.jsonl.gz": "{}\n",
    "fields.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n2023-11-16 18:15:50,396\n",
    "failures.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,0,0,0,x\n",
}  # fmt: skip
ENVIRONMENT = {"LOADGEN_TEST_BAD_KEY": "s3cret\n", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80"}


@dataclass(frozen=True)
class Case:
    program: str
    line: str
    exit_code: int
    sentence: str


def table() -> Iterator[Case]:
    for program in PROGRAMS:
        for line in (Path(__file__).parent / f"{program}.txt").read_text(encoding="utf-8").splitlines():
            command, sentence = line.split(" => ")
            code, _, words = command.partition(" ")
            yield Case(program, words, int(code), sentence)


CASES = list(table())
FIRST = list(
    {(case.program, case.line.partition(" ")[0]): case for case in reversed(CASES)}.values()
)  # of each command
EVERY_EXIT = {(case.program, case.line.partition(" ")[0], case.exit_code): case for case in reversed(CASES)}.values()
each_case = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.always] * (case in EVERY_EXIT)) for case in CASES],
    ids=[f"{case.program} {case.line}" for case in CASES],
)  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a command, and its environment: a machine without GPUs."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    monkeypatch.chdir(tmp_path)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def held(place: Path) -> dict[str, bytes | None]:
    """Every path below it; of a file what is in it."""
    paths = sorted(place.rglob("*"))
    return {str(path.relative_to(place)): path.read_bytes() if path.is_file() else None for path in paths}


def check(case: Case, code: int, out: str, err: str) -> None:
    assert (code, out) == (case.exit_code, ""), err
    assert err.startswith(f"{case.program}: ") and err.count("\n") == 1 and err.endswith("\n"), err
    assert case.sentence in err
    assert "Traceback" not in err and "s3cret" not in err


def test_the_tables_are_long_enough_and_name_nothing_twice() -> None:
    lines = [(case.program, case.line) for case in CASES]
    assert len(lines) == len(set(lines)) >= LEAST_CASES
    assert {case.exit_code for case in CASES} == {2, 3}


def test_every_command_has_its_bad_lines() -> None:
    for program, module in PROGRAMS.items():
        commands = {name for name in module.build_app() if not name.startswith("-")}
        assert commands <= {case.line.partition(" ")[0] for case in CASES if case.program == program}


@each_case
def test_in_this_process(
    case: Case, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def started(*argv: Any, **_: Any) -> NoReturn:
        raise AssertionError(f"{argv} was started")

    monkeypatch.setattr(gpus, "read", gpus.Inventory)
    if case.exit_code == 2:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    before = held(place)
    code = PROGRAMS[case.program].invoke(shlex.split(case.line))
    check(case, code, *capsys.readouterr())
    assert held(place) == before


@pytest.fixture(scope="module")
def interpreter() -> Iterator[warm.Interpreter]:
    with warm.interpreter(ENVIRONMENT) as ready:
        yield ready


@pytest.mark.processes
@each_case
def test_as_a_process(case: Case, place: Path, tmp_path_factory: pytest.TempPathFactory,
                      interpreter: warm.Interpreter) -> None:  # fmt: skip
    before, said = held(place), tmp_path_factory.mktemp("said")
    line = warm.Line(case.program, shlex.split(case.line), str(place), str(said), TIMEOUT_S)
    ended, out, err = interpreter.run(line)
    check(case, ended.exit_code, out, err)
    assert held(place) == before
    assert living_in(place) == []
    assert ended.cpu_s < MOST_CPU_S


@pytest.mark.processes
@pytest.mark.parametrize("case", FIRST, ids=[f"{case.program} {case.line}" for case in FIRST])
def test_as_a_user_starts_it(case: Case, place: Path) -> None:
    before, used = held(place), resource.getrusage(resource.RUSAGE_CHILDREN)
    program = [sys.executable, "-c", f"from {case.program}.cli import main; main()"]
    ended = subprocess.run(
        [*program, *shlex.split(case.line)], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    check(case, ended.returncode, ended.stdout, ended.stderr)
    assert held(place) == before
    assert living_in(place) == []
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime < MOST_CPU_S


def living_in(place: Path) -> list[str]:
    """The processes that work there, but for this one."""
    working = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.name != str(os.getpid()) and (process / "cwd").readlink() == place.resolve():
                working.append(process.name)
        except OSError:  # it has ended, or is another user's
            continue
    return working
