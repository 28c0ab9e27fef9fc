"""Embeddings, ranks, scores, responses and images: requests of several texts, replies that are no texts, and what a
report, a comparison and a sweep say of them, against servers whose counts are known."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from loadgen import cli
from loadgen.config import Config, ConfigError
from loadgen.load.images import Images, parse
from loadgen.load.lengths import fixed
from loadgen.load.lengths import parse as law
from loadgen.load.load import Load, parse_arrival
from loadgen.load.prompts import RandomText
from loadgen.report.compare import compare
from loadgen.rundir import records
from servers.serve.wire import image_tokens
from tests.loadgen.scripted import scripted
from tests.servers.reader import running

COMMON = ("--no-calibrate", "--warmup", "2", "--no-server-metrics")


def report(*words: str | Path) -> dict[str, Any]:
    """The report of a run, which a busy machine may make INVALID for its times."""
    directory = Path(words[words.index("--out") + 1])
    assert cli.invoke(["run", *COMMON, *map(str, words)]) in (0, 4)
    told: dict[str, Any] = json.loads((directory / "report.json").read_bytes())
    return told


@pytest.mark.parametrize("backend", ["embeddings", "rerank", "score"])
def test_items_and_tokens_are_those_that_were_sent(backend: str, tmp_path: Path) -> None:
    """Twelve requests of 1 to 9 texts with 16 tokens each: the embedded server counts the words."""
    with running(tmp_path) as server:
        told = report(
            "--url", f"http://127.0.0.1:{server.port}", "--backend", backend, "--batch-size", "uniform:1:9",
            "--input-tokens", "16", "--requests", "12", "--concurrency", "3", "--out", tmp_path / "run",
        )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "run" / "requests.jsonl").read_text().splitlines()[1:-1]]
    batches = [line["items"] for line in lines if line["phase"] == "measured"]
    assert len(batches) == 12 and len(set(batches)) > 3 and min(batches) >= 1 and max(batches) <= 9
    assert told["requests"]["by_outcome"] == {"ok": 12}
    assert told["tokens"] == {"prompt": 16 * sum(batches), "output": 0}
    assert told["items"] == {
        "items": sum(batches), "batch_mean": sum(batches) / 12, "batch_max": max(batches), "tokens_mean": 16.0,
    }  # fmt: skip
    rates = told["throughput"]
    assert rates["items_per_s"] == pytest.approx(sum(batches) / told["duration_s"])
    assert rates["total_tokens_per_s"] == pytest.approx(16 * sum(batches) / told["duration_s"])
    assert rates["output_tokens_per_s"] is None
    counts = {name: summary["n"] for name, summary in told["metrics"].items()}
    assert counts["e2el_ms"] == 12 and not any(counts[name] for name in ("ttft_ms", "tpot_ms", "itl_ms"))
    assert not {"PROMPT_LENGTH", "OUTPUT_LENGTH", "CONTRADICTION", "NO_TOKEN_COUNT"} & {
        finding["code"] for finding in told["verdict"]["findings"]
    }
    text = (tmp_path / "run" / "report.md").read_text()
    assert "| items/s |" in text and not any(f"| {name} |" in text for name in ("ttft", "tpot", "output tokens/s"))
    assert records.read(tmp_path / "run")[0].measured().items == dict(enumerate(batches))


def answer(items: int, tokens: int) -> bytes:
    data = [{"index": at, "embedding": [0.5, 0.25]} for at in range(items)]
    body = json.dumps({"object": "list", "data": data, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}})
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body.encode()


MODELS = b'HTTP/1.1 200 OK\r\nContent-Length: 33\r\n\r\n{"data":[{"id":"m"}],"object":""}'


def test_a_server_that_answers_fewer_texts_than_it_was_sent(tmp_path: Path) -> None:
    """Every third reply lacks one of four vectors: known counts, a known batch time, and a texts' count per word."""

    async def world() -> None:
        def script(number: int) -> Any:
            line, _, body = server.requests[number]
            if line.startswith(b"GET"):
                return [MODELS, "close"]
            texts = json.loads(body)["input"]
            tokens = sum(len(text.split()) + 2 for text in texts)  # two special tokens of each
            asked.append((len(texts), tokens))
            return [0.03, answer(len(texts) - (len(texts) == 4 and len(asked) % 3 == 0), tokens)]

        async with scripted(script) as server:
            words = [
                "run", *COMMON, "--url", server.url, "--backend", "embeddings", "--batch-size", "4", "--requests", "9",
                "--concurrency", "1", "--input-tokens", "10", "--out", str(tmp_path / "run"),
            ]  # fmt: skip
            await asyncio.to_thread(cli.invoke, words)

    asked: list[tuple[int, int]] = []
    asyncio.run(world())
    told = json.loads((tmp_path / "run" / "report.json").read_bytes())
    assert asked[-9:] == [(4, 40)] * 9  # ten tokens each, as the server counts
    assert told["requests"]["by_outcome"] == {"ok": 6, "truncated": 3}
    assert told["errors"] == [{"count": 3, "outcome": "truncated", "message": "the reply answers 3 of 4 items"}]
    assert (told["items"]["items"], told["items"]["tokens_mean"]) == (24, 10.0)
    assert told["metrics"]["e2el_ms"]["min"] >= 30


def test_pages_compare_and_sweep_speak_of_items(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(tmp_path) as server:
        code = cli.invoke([
            "sweep", *COMMON, "--url", f"http://127.0.0.1:{server.port}", "--backend", "rerank", "--batch-size",
            "1", "3", "--requests", "5", "--concurrency", "2", "--input-tokens", "8", "--out", str(tmp_path / "sweep"),
        ])  # fmt: skip
    assert code in (0, 4)
    swept = json.loads((tmp_path / "sweep" / "sweep.json").read_bytes())
    items = [point["metrics"]["items_per_s"]["mean"] for point in swept["points"]]
    requests = [point["metrics"]["requests_per_s"]["mean"] for point in swept["points"]]
    assert items == pytest.approx([requests[0], 3 * requests[1]])
    page = (tmp_path / "sweep" / "sweep.md").read_text()
    assert "| items/s |" in page and "| ttft p50 |" not in page and "tokens/s a user" not in page
    runs = [tmp_path / "sweep" / f"batch-size-{each}" for each in (1, 3)]
    rates = compare(*runs).throughput
    assert rates["items_per_s"].a == pytest.approx(items[0]) and "output_tokens_per_s" not in rates
    capsys.readouterr()
    assert cli.invoke(["compare", *map(str, runs), "--fail-if", "items_per_s<-90%"]) in (0, 1, 4)
    assert "items/s" in "".join(capsys.readouterr())


def test_an_option_of_texts_is_refused_beside_embeddings() -> None:
    for field, value in {"output_tokens": 5, "ignore_eos": False, "cancel": 0.1, "prefix": "1:4"}.items():
        with pytest.raises(
            ConfigError, match=rf"--(no-)?{field.replace('_', '-')} does not go with --backend embeddings"
        ):
            Config(backend="embeddings", **{field: value})
    with pytest.raises(ConfigError, match="--goodput limits tpot, and replies of --backend rerank are not streamed"):
        Config(backend="rerank", goodput=("tpot<5ms",))
    config = Config(backend="score", batch_size=3)
    assert Config(**config.as_dict()) == config  # as a resumed run makes it again


def test_texts_of_a_batch_have_the_asked_length_each() -> None:
    load = Load(
        arrival=parse_arrival("burst"), input_tokens=law("uniform:3:30"), output_tokens=fixed(0), requests=50,
        batch=law("uniform:1:5"),
    )  # fmt: skip
    text = RandomText(load)
    for number in range(50):
        prompt, shape = text.prompt("measured", number), text.own(number)
        lengths = {len(item.split()) for item in prompt.items}
        assert len(prompt.items) == shape.items and lengths == {shape.prompt_tokens // shape.items}
        assert prompt.n_tokens == shape.prompt_tokens == sum(len(item.split()) for item in prompt.items)
    assert {text.own(number).items for number in range(50)} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("size", ["1x1", "32x32", "33x31", "200x300", "65x1", "1x65"])
def test_images_are_pictures_of_the_asked_size_and_no_two_alike(size: str) -> None:
    """Read by another library."""
    images = parse(f"3:{size}")
    seen = [
        images.urls(seed, phase, number)
        for seed, phase, number in ((0, "measured", 1), (0, "warmup", 1), (0, "measured", 2))
    ]
    urls = [url for each in seen for url in each]
    assert len(set(urls)) == len(urls) == 9
    assert images.urls(0, "measured", 1) == seen[0]
    for url in urls:
        kind, _, data = url.partition(",")
        picture = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
        pixels = np.asarray(picture.convert("RGB"))
        assert (kind, picture.format, picture.mode) == ("data:image/png;base64", "PNG", "RGB")
        assert pixels.shape == (images.height, images.width, 3)
        assert image_tokens(url) == -(-images.width // 28) * -(-images.height // 28)


@pytest.mark.parametrize("backend", ["openai-chat", "openai-responses"])
def test_image_tokens_are_those_that_the_server_counts(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedded server counts a token for each 28 x 28 pixels: 4 x 3 of 100 x 84."""
    with running(tmp_path, "openai") as server:
        told = report(
            "--url", f"http://127.0.0.1:{server.port}", "--backend", backend, "--images", "2:100x84", "--requests", "4",
            "--input-tokens", "uniform:12:40", "--output-tokens", "3", "--out", tmp_path / "run",
        )  # fmt: skip
        url = f"http://127.0.0.1:{server.port}"
        words = ["--backend", backend, "--images", "1:3000x3000", "--out", str(tmp_path / "none")]
        assert cli.invoke(["run", *COMMON, "--url", url, *words]) == 2
    assert told["images"] == {"count": 2, "size": "100x84", "tokens_mean": 12.0}
    assert told["requests"]["by_outcome"] == {"ok": 4} and told["tokens"]["output"] == 12
    assert "PROMPT_LENGTH" not in {finding["code"] for finding in told["verdict"]["findings"]}
    assert "Images: 2 of 100x84 a request, 12.00 tokens each" in capsys.readouterr().err
    assert not (tmp_path / "none" / "requests.jsonl").exists()


def test_an_image_is_refused_before_anything_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke(["run", "--launch", "embedded", "--backend", "tgi", "--images", "1:9x9"]) == 2
    assert "--images: a request to tgi holds no image; take --backend openai-chat" in capsys.readouterr().err


def test_sizes_that_make_no_image_are_refused() -> None:
    for text, reason in {
        "1": "COUNT:WIDTHxHEIGHT",
        "0:5x5": "1 to 64",
        "1:0x5": "one pixel",
        "1:16385x1": "smaller",
    }.items():
        with pytest.raises(ValueError, match=reason):
            parse(text)
    assert parse("64:16384x1") == Images(64, 16384, 1)
