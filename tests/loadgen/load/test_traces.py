"""Traces: lines as they were published, what is written comes back, and every mistake is one sentence with its line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.load import traces
from loadgen.load.lengths import MOST_TOKENS, WorkloadError
from loadgen.load.prompts import TokenIds
from loadgen.load.traces import SkippedRequests, Trace, read
from loadgen.load.turns import TurnDelay
from tests.loadgen.load.loads import load

MAKE_TRACE = Path(__file__).parents[3] / "benchmarks" / "make_trace.py"

# Beginnings of published files: Mooncake's conversation trace, both years of Azure, BurstGPT's first file, Qwen's
# thinking trace. The lines of BurstGPT's third file are in its form.
MOONCAKE = """\
{"timestamp": 3000, "input_length": 2012, "output_length": 354, "hash_ids": [0, 427, 428, 429]}
{"timestamp": 3000, "input_length": 915, "output_length": 355, "hash_ids": [0, 462]}
{"timestamp": 5999, "input_length": 1053, "output_length": 26, "hash_ids": [0, 773, 774]}
"""
AZURE_2023 = """\
TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:17:03.9799600,4808,10\r
2023-11-16 18:17:04.0319600,3180,8\r
2023-11-16 18:17:04.0781490,110,27"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01+00:00,2399,6
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,276,693,Conversation log
"""
BURSTGPT_3 = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
7.5,,2.1,GPT-4,300,0,300,API log
8.0,5c2a,3.25,ChatGPT,0,0,0,Conversation log
8.25,5c2a,3.25,ChatGPT,12,34,46,Conversation log
9.0,5c2a,1.5,ChatGPT,60,0,60,Conversation log
"""
BAILIAN = (
    '{"chat_id": 0, "parent_chat_id": -1, "timestamp": 0.0, "input_length": 502, "output_length": 1494, "type": '
    f'"thinking", "turn": 1, "hash_ids": {list(range(32))}}}\n'
    '{"chat_id": 1, "parent_chat_id": 0, "timestamp": 61.114, "input_length": 32, "output_length": 132, "type": "text",'
    ' "turn": 2, "hash_ids": [0, 1089]}\n'
)


def written(directory: Path, text: str | bytes, name: str = "trace") -> Path:
    path = directory / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def plain(trace: Trace) -> list[tuple[int, int, int, int, list[int]]]:
    """Line, due time in ns, tokens in and out, and hash ids of each request."""
    columns = (trace.line, trace.due_ns, trace.input_tokens, trace.output_tokens)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [(*row, [each % 2**64 for each in trace.blocks(number).tolist()]) for number, row in enumerate(rows)]


def test_mooncake(tmp_path: Path) -> None:
    trace = read(written(tmp_path, MOONCAKE))
    assert (trace.format, trace.block_tokens, trace.left_out, len(trace)) == ("mooncake", 512, SkippedRequests(), 3)
    assert plain(trace) == [
        (0, 0, 2012, 354, [0, 427, 428, 429]),
        (1, 0, 915, 355, [0, 462]),
        (2, 2_999_000_000, 1053, 26, [0, 773, 774]),
    ]


def test_azure_of_2023(tmp_path: Path) -> None:
    trace = read(written(tmp_path, AZURE_2023))
    assert (trace.format, trace.block_tokens) == ("azure", 0)
    assert plain(trace) == [(0, 0, 4808, 10, []), (1, 52_000_000, 3180, 8, []), (2, 98_189_000, 110, 27, [])]


def test_azure_of_2024(tmp_path: Path) -> None:
    trace = read(written(tmp_path, AZURE_2024))
    assert plain(trace) == [(0, 0, 2162, 5, []), (1, 990_070_000, 2399, 6, [])]


def test_burstgpt(tmp_path: Path) -> None:
    trace = read(written(tmp_path, BURSTGPT))
    assert (trace.format, trace.block_tokens, trace.left_out) == ("burstgpt", 0, SkippedRequests())
    assert plain(trace) == [(0, 0, 472, 18, []), (1, 40 * 10**9, 1087, 230, []), (2, 113 * 10**9, 417, 276, [])]


def test_failures_are_counted(tmp_path: Path) -> None:
    trace = read(written(tmp_path, BURSTGPT_3))
    assert trace.left_out == SkippedRequests(no_input=1, no_output=2)
    assert plain(trace) == [(2, 0, 12, 34, [])]


def test_bailian(tmp_path: Path) -> None:
    trace = read(written(tmp_path, BAILIAN))
    assert (trace.format, trace.block_tokens) == ("bailian", 16)
    assert plain(trace) == [(0, 0, 502, 1494, list(range(32))), (1, 61_114_000_000, 32, 132, [0, 1089])]


def test_empty_lines_and_packed_files(tmp_path: Path) -> None:
    whole = plain(read(written(tmp_path, MOONCAKE)))
    spaced = "\ufeff\n" + MOONCAKE.replace("\n", "\r\n\n  \n")
    assert plain(read(written(tmp_path, spaced))) == whole
    assert plain(read(written(tmp_path, gzip.compress(MOONCAKE.encode()), "trace.gz"))) == whole


def lines(*each: dict[str, Any]) -> str:
    return "\n".join(map(json.dumps, each))


def line(at: float, tokens: int, *ids: int, **more: Any) -> dict[str, Any]:
    return {"timestamp": at, "input_length": tokens, "output_length": 52, "hash_ids": list(ids)} | more


def test_without_hash_ids_nothing_is_shared(tmp_path: Path) -> None:
    without = [{key: value for key, value in line(at, 655).items() if key != "hash_ids"} for at in (0, 535)]
    for each in (without, [line(0, 655), line(535, 655)], [each | {"chat_id": 1} for each in without]):
        trace = read(written(tmp_path, lines(*each)))
        assert (trace.block_tokens, trace.shared_tokens().tolist(), trace.notes) == (0, [0, 0], ())
        assert trace.input_tokens.tolist() == [655, 655]
    trace = read(written(tmp_path, lines(line(0, 600, 7, 8), line(9e3, 655), line(9e4, 600, 7, 9))))
    assert (trace.block_tokens, trace.shared_tokens().tolist()) == (512, [0, 0, 512])
    trace = read(written(tmp_path, lines(*without)), block_tokens=64)
    assert trace.notes == ("it has no hash_ids, so --trace-block-tokens changes nothing",)


@pytest.mark.parametrize(
    ("rows", "tokens"),
    [
        ((line(0, 200, 1, 2, 3, 4), line(900, 130, 1, 2, 5)), 64),  # 50 to 64, and of these powers of two
        ((line(0, 300, 1, 2, 3), line(900, 101, 1, 4)), 100),  # nothing else
        ((line(0, 1000, 1, 2), line(900, 512, 1)), 512),  # the format's own, though others fit too
    ],
)
def test_block_sizes_that_lengths_and_ids_allow(rows: tuple[dict[str, Any], ...], tokens: int, tmp_path: Path) -> None:
    trace = read(written(tmp_path, lines(*rows)))
    assert trace.block_tokens == tokens
    named = () if tokens == 512 else (f"its hash_ids stand for blocks of {tokens} tokens, as its lengths say",)
    assert trace.notes == named


def test_a_block_size_that_an_option_names(tmp_path: Path) -> None:
    """aiperf's own example agrees with no size: what a prompt lacks of ids is its own, and ids too many are dropped."""
    path = written(tmp_path, lines(line(0, 655, 0, 1, 2), line(535, 672, 0, 3), line(999, 1025, 0, 1, 2)))
    with pytest.raises(WorkloadError, match="--trace-block-tokens"):
        read(path)
    trace = read(path, block_tokens=512)
    assert [trace.blocks(number).tolist() for number in range(3)] == [[0, 1], [0, 3], [0, 1, 2]]
    assert trace.shared_tokens().tolist() == [0, 512, 1024] and "1 of its requests" in trace.notes[0]
    trace = read(path, block_tokens=256)
    assert [trace.blocks(number).tolist() for number in range(3)] == [[0, 1, 2], [0, 3], [0, 1, 2]]
    assert trace.shared_tokens().tolist() == [0, 256, 768] and "2 of its requests" in trace.notes[0]
    shapes = load(trace=path, trace_block_tokens=256).shapes()
    assert [tokens for _, tokens in shapes.shape(1).segments] == [256, 256]
    with pytest.raises(WorkloadError, match="--trace-block-tokens 0 must be from 1"):
        read(path, block_tokens=0)


def test_ids_of_64_bits_are_compared_and_drawn_from(tmp_path: Path) -> None:
    far = 2**64 - 1
    trace = load(trace=written(tmp_path, lines(line(0, 512, far), line(500, 1024, far, 2**63), line(900, 512, 2**63))))
    assert [trace.shapes().shape(number).shared_tokens for number in range(3)] == [0, 512, 0]
    drawn = [TokenIds(trace).prompt("measured", number).token_ids for number in range(3)]
    assert drawn[1] is not None and drawn[1][:512] == drawn[0] and drawn[1][512:] == drawn[2]


def test_text_images_and_sessions(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        lines(
            {"timestamp": 0, "text_input": "What is a cache?", "output_length": 5, "session_id": "a"},
            {"delay": 2500, "input_length": 40, "output_length": 5, "session_id": "a", "images": ["x.png"]},
            {"timestamp": 1000, "input_length": 30, "output_length": 5, "session_id": "b"},
        ),
    )
    trace = read(path)
    assert plain(trace) == [(0, 0, 4, 5, []), (1, 0, 40, 5, []), (2, 10**9, 30, 5, [])]
    assert trace.turns is not None and trace.turns.waits(1) == (TurnDelay(0, 2_500_000_000),)  # after the reply
    kinds = ("have a text and no input_length", "came with images")
    assert [kind in note and note.startswith("1 ") for kind, note in zip(kinds, trace.notes, strict=True)] == [True] * 2
    azure = (
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-17 00:00:00,0,9,9\n2024-10-17 00:00:01,3,900,9\n"
    )
    assert "1 of its requests came with images" in read(written(tmp_path, azure)).notes[0]


def test_a_fraction_out_of_order_is_sorted(tmp_path: Path) -> None:
    text = AZURE_2023.replace("18:17:04.0781490", "18:17:03.9798300")  # 0.13 ms before the first
    trace = read(written(tmp_path, text))
    assert plain(trace) == [(2, 0, 110, 27, []), (0, 130_000, 4808, 10, []), (1, 52_130_000, 3180, 8, [])]
    assert trace.notes == ("1 of its lines come before a line above them, by 0.05213 s at the most; they are sorted",)
    assert read(written(tmp_path, AZURE_2023)).notes == ()


@pytest.mark.parametrize("unit", [0.001, 1.0])
def test_seconds_in_a_format_of_milliseconds_are_told(unit: float, tmp_path: Path) -> None:
    path = written(tmp_path, lines(*(line(at * 1000 * unit, 10, 0) for at in (0.0, 0.2, 0.4))))
    notes = read(path).notes
    assert [note.startswith("its times make 5000 requests a second") for note in notes] == ([True] if unit < 1 else [])
    assert all(note.endswith("if they are seconds, add --trace-speed 0.001") for note in notes)
    assert read(path, speed=unit).notes == ()
    late = lines(*(line(at * 1e6, 10, 0, chat_id=1) for at in range(4)))
    assert "in 1e+06 seconds" in read(written(tmp_path, late)).notes[0]


def test_a_part_of_a_trace(tmp_path: Path) -> None:
    path = written(tmp_path, BURSTGPT)
    assert plain(read(path, limit=1)) == [(0, 0, 472, 18, [])]
    assert plain(read(path, speed=4, limit=2)) == [(0, 0, 472, 18, []), (1, 10**10, 1087, 230, [])]
    assert plain(read(path, from_s=40)) == [(1, 0, 1087, 230, []), (2, 73 * 10**9, 417, 276, [])]
    assert plain(read(path, from_s=40.5)) == [(2, 0, 417, 276, [])]


def test_the_file_is_read_once_and_its_sharing_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of the trace is looked at before the server says what it takes, and often afterwards."""
    done: list[str] = []
    reading, sharing = traces.read, Trace.shared_tokens
    monkeypatch.setattr(traces, "read", lambda *options: done.append("read") or reading(*options))
    monkeypatch.setattr(Trace, "shared_tokens", lambda self: done.append("shared") or sharing(self))
    asked = load(trace=written(tmp_path, MOONCAKE))
    for longest, requests in ((None, 3), (2000, 2), (None, 3), (2000, 2)):
        limited = asked.within(longest)
        assert limited.planned == requests == len(limited.due_ns())
    assert [limited.shapes().shape(number).shared_tokens for number in (0, 1)] == [0, 512]
    assert limited.typical_tokens() == (984, 190)
    assert done == ["read", "shared"]


def test_what_lies_behind_the_last_request_is_not_read(tmp_path: Path) -> None:
    path = written(tmp_path, BURSTGPT + "what is this?\n")
    assert len(read(path, limit=3)) == 3
    with pytest.raises(WorkloadError, match="line 5"):
        read(path)


def test_a_limit_counts_what_is_played(tmp_path: Path) -> None:
    trace = read(written(tmp_path, BURSTGPT_3), limit=1)
    assert (len(trace), trace.left_out) == (1, SkippedRequests(1, 1))


ONE_A_LINE = [name for name in traces.FORMATS if name != "weka"]
ROWS = st.lists(
    st.tuples(st.integers(0, 10**7), st.integers(0, 1100), st.integers(0, MOST_TOKENS)), min_size=1, max_size=20
).map(sorted)


@settings(deadline=None)
@given(
    ROWS.filter(lambda rows: any(row[1] and row[2] for row in rows)), st.sampled_from(ONE_A_LINE), st.data(),
    st.sampled_from([0.25, 1.0, 2.0]), st.none() | st.integers(1, 25), st.integers(0, 25),
)  # fmt: skip
def test_what_is_written_comes_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int]], format: str, data: st.DataObject,
    speed: float, limit: int | None, at: int,
) -> None:  # fmt: skip
    """Rows of milliseconds, tokens in and tokens out, in each format, and any part of them at any speed."""
    block_tokens = {"mooncake": 512, "bailian": 16}.get(format, 0)
    ids = [
        data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=n, max_size=n))
        for n in (-(-row[1] // block_tokens) if block_tokens else 0 for row in rows)
    ]
    path = written(tmp_path_factory.mktemp("trace"), text_of(format, rows, ids))
    from_ms = rows[min(at, len(rows) - 1)][0] - rows[0][0]
    kept = [
        (line, row, ids[line])
        for line, row in enumerate(rows)
        if row[0] - rows[0][0] >= from_ms and row[1] and row[2]
    ]  # fmt: skip
    if not kept:
        with pytest.raises(WorkloadError, match="can be played"):
            read(path, None, speed, limit, from_ms / 1e3)
        return
    expected = [
        (line, round((row[0] - kept[0][1][0]) * 1e6 / speed), row[1], row[2], hashes) for line, row, hashes in kept
    ]
    trace = read(path, None, speed, limit, from_ms / 1e3)
    assert trace.format == format
    assert plain(trace) == expected[:limit]
    if limit is None:
        after = [row for row in rows if row[0] - rows[0][0] >= from_ms]
        assert trace.left_out == SkippedRequests(
            no_input=sum(not row[1] for row in after), no_output=sum(row[1] > 0 == row[2] for row in after)
        )


def text_of(format: str, rows: list[tuple[int, int, int]], ids: list[list[int]]) -> str:
    if format in ("mooncake", "bailian"):
        lines: list[dict[str, Any]] = []
        for number, ((ms, tokens, reply), hashes) in enumerate(zip(rows, ids, strict=True)):
            line = {"timestamp": ms, "input_length": tokens, "output_length": reply, "hash_ids": hashes}
            more = {"chat_id": number, "parent_chat_id": -1, "turn": 1, "timestamp": ms / 1e3}
            lines.append(line if format == "mooncake" else line | more)
        return "\n".join(map(json.dumps, lines))
    file = io.StringIO()
    writer = csv.writer(file)
    if format == "azure":
        writer.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        begin = datetime(2023, 12, 31, 23, tzinfo=UTC)
        writer.writerows((begin + timedelta(milliseconds=ms), tokens, reply) for ms, tokens, reply in rows)
    else:
        writer.writerow(["Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type"])
        writer.writerows((ms / 1e3, "a, b", tokens, reply, 0, "API log") for ms, tokens, reply in rows)
    return file.getvalue()


def mooncake(**changes: Any) -> str:
    line = {"timestamp": 6000, "input_length": 512, "output_length": 1, "hash_ids": [1]} | changes
    return MOONCAKE + json.dumps(line)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no requests"),
        ("what is this?\n", r"line 1 begins no trace of a known format, which are: mooncake \(timestamp, input_length"),
        ('\n{"prompt": "a"}\n', "line 2 begins no trace of a known format"),
        ('{"timestamp": 0\n', "begins no trace"),
        (b"\xff\xfe\x00", "cannot read the trace .*: it begins as UTF-16 and is none"),
        (b"\xff\xfd\x00", "begins no trace"),
        (b"[" * 100_000, "begins no trace"),
        ("a" * (traces.MOST_LINE_BYTES + 1), "line 1 has over 16 MiB"),
        (mooncake(timestamp=4998), r"line 4 comes 1\.001 s before a line above it; sort"),
        (mooncake(timestamp=-1), "line 4 is no request in format mooncake: timestamp: expected float >= 0"),
        (mooncake(timestamp="now"), "line 4 .*timestamp: expected float . null, got str"),
        (mooncake(timestamp=1e18), "line 4 .*timestamp: expected float <= 4000000000000"),
        (mooncake(input_length=-1), "line 4 .*input_length: expected int >= 0"),
        (mooncake(input_length=2**31), "line 4 .*input_length: expected int <= 2147483647"),
        (mooncake(output_length=-5), "line 4 .*output_length: expected int >= 0"),
        (mooncake(output_length=10**40), "line 4 .*output_length: expected int"),
        (mooncake(output_length=1.5), "line 4 .*output_length: expected int, got float"),
        (
            mooncake(hash_ids=[1, 2]),
            r"line 4 has 2 hash_ids for its 512 input tokens, and blocks of 512 tokens, as of format mooncake, make 1; "
            r"say with --trace-block-tokens how many an id stands for \(503 to 511 fit its lines\)",
        ),
        (mooncake(input_length=100, hash_ids=[1, 2]), r"line 4 has 2 hash_ids .* \(no number fits all of its lines\)"),
        (mooncake(hash_ids=[-1]), "line 4 .*hash_ids.0.: expected int >= 0"),
        (mooncake(hash_ids=[2**64]), "line 4 .*hash_ids: expected int below 2.64"),
        (mooncake(hash_ids=["a"]), "line 4 .*hash_ids.0.: expected int, got str"),
        (MOONCAKE + '\n{"timestamp": 6000}\n', "line 5 .*missing required field output_length"),
        (mooncake(input_length=None), "line 4 .*it has neither input_length nor text_input"),
        (mooncake(timestamp=None), "line 4 .*it has no timestamp, nor a delay after an earlier line of its session_id"),
        (f"[{MOONCAKE}]", "begins no trace of a known format, .*; a trace of JSON has an object a line"),
        (MOONCAKE.replace("output_length", "osl"), "the nearest is mooncake, of which it lacks output_length; rename"),
        (
            AZURE_2023.replace("ContextTokens", "context_tokens"),
            r"the nearest is azure, of which it lacks ContextTokens \(there is context_tokens\); rename the columns",
        ),
        (MOONCAKE + "{\n", "line 4 is no request in format mooncake: "),
        (BAILIAN.replace("1089", "1089, 7"), "line 2 has 3 hash_ids for its 32 input tokens, and blocks of 16"),
        (BAILIAN + BAILIAN, r"line 3 comes 61\.114 s before"),
        (BURSTGPT + "119,GPT-4,1,1\n", "line 5 .*format burstgpt: it has 4 fields, and the heading has 6"),
        (BURSTGPT + "119,GPT-4,x,1,2,API log\n", "line 5 .*Request tokens: expected int, got str"),
        (BURSTGPT + "nan,GPT-4,1,1,2,API log\n", "line 5 .*Timestamp: expected float >= 0"),
        (BURSTGPT + "116.5,GPT-4,1,1,2,API log\n", r"line 5 comes 1\.5 s before"),
        (BURSTGPT + '"', "line 5 is no request in format burstgpt: unexpected end of data"),
        (BURSTGPT.encode() + b"\xff,,,,,", "line 5 is no request in format burstgpt: 'utf-8' codec"),
        (AZURE_2024 + "2024-05-10,1,1\n", "line 4 .*TIMESTAMP: invalid RFC3339 encoded datetime"),
        (AZURE_2024 + "2024-05-09 23:59:59+00:00,1,1\n", "line 4 comes 2 s before"),
        (AZURE_2024 + "9024-05-09 23:59:59+00:00,1,1\n", r"line 4 comes over 4e\+09 s after the first"),
        (BURSTGPT_3.replace("12,34", "0,34"), "no request that can be played: 2 have no input tokens, and 2 others no"),
    ],
)
def test_bad_traces(text: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=message) as caught:
        read(written(tmp_path, text))
    assert str(caught.value).isprintable() and str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"from_s": 2.5}, r"--trace-from 2\.5 is beyond the end of .*, whose last request comes 0\.99007 s after"),
        ({"from_s": float("inf")}, "--trace-from 4e.09 is beyond the end"),
        ({"from_s": -1.0}, "--trace-from -1 must be 0 or more"),
        ({"speed": 0.0}, "--trace-speed 0 must be a number above 0"),
        ({"speed": float("nan")}, "--trace-speed nan must be"),
        ({"speed": 1e-300}, r"--trace-speed 1e-300 makes .* last over 4e\+09 s; name a higher speed"),
        ({"limit": 0}, "--trace-limit 0 must be 1 or more"),
        ({"format": "mooncake"}, "line 1 is no request in format mooncake: JSON is malformed"),
        ({"format": "burstgpt"}, "line 1 is no heading in format burstgpt: there is no Timestamp"),
        ({"format": "vllm"}, "no trace format 'vllm'; the known ones are mooncake, azure, burstgpt, bailian"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=message):
        read(written(tmp_path, AZURE_2024), **options)


def test_files_that_are_none(tmp_path: Path) -> None:
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file")):
        with pytest.raises(WorkloadError, match=f"cannot read the trace .*: {why}.*; name another --trace"):
            read(path)
    packed = gzip.compress(MOONCAKE.encode())
    for data, why in ((packed[:-9], "ended before"), (packed[:-8] + b"12345678", "CRC")):
        with pytest.raises(WorkloadError, match=f"cannot read the trace .*{why}"):
            read(written(tmp_path, data, "trace.gz"))
    if Path("/dev/zero").exists():
        with pytest.raises(WorkloadError, match="line 1 has over 16 MiB"):
            read(Path("/dev/zero"))


def made(out: Path, *options: str) -> bytes:
    argv = [sys.executable, str(MAKE_TRACE), "--out", str(out), *options]
    assert "a synthetic trace of" in subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return out.read_bytes()


def test_a_trace_that_is_made(tmp_path: Path) -> None:
    """It is Mooncake's format, by seed; its lengths and its rate are as asked, and what is shared are prefixes."""
    options = ("--requests", "3000", "--rate", "10", "--most-tokens", "20000")
    first = made(tmp_path / "a", *options)
    assert first == made(tmp_path / "b", *options, "--seed", "0") != made(tmp_path / "c", *options, "--seed", "1")
    trace = read(tmp_path / "a")
    assert trace.format == "mooncake" and len(trace) == 3000
    assert np.mean(np.diff(trace.due_ns)) / 1e9 == pytest.approx(0.1, rel=0.06)  # 3 standard errors
    assert max(trace.input_tokens + trace.output_tokens) <= 20000
    assert np.median(trace.output_tokens) == pytest.approx(350, rel=0.05)
    seen: dict[int, tuple[int, ...]] = {}
    reused = 0
    for number in range(len(trace)):
        blocks = trace.blocks(number).tolist()
        for place, block in enumerate(blocks):
            reused += block in seen
            assert seen.setdefault(block, tuple(blocks[:place])) == tuple(blocks[:place])  # a block has one past
    assert 0.2 < reused / len(trace.hash_ids) < 0.8


@pytest.mark.parametrize("wrong", [("--requests", "0"), ("--rate", "nan"), ("--seed", "-1"), ("--rate", "inf")])
def test_a_trace_that_cannot_be_made(wrong: tuple[str, str], tmp_path: Path) -> None:
    argv = [sys.executable, str(MAKE_TRACE), "--out", str(tmp_path / "a"), *wrong]
    assert subprocess.run(argv, capture_output=True).returncode == 2
