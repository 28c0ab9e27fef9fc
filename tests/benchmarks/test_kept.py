"""Packed measurements: what was packed comes back, a cut file is named, and the history must bear out its originals."""

from __future__ import annotations

import hashlib
import json
import lzma
import subprocess
from pathlib import Path

import pytest

from benchmarks import kept
from loadgen.report import build
from loadgen.rundir import records
from tests.loadgen.tables import facts, failure, manifest, request, write_run


def a_run(directory: Path) -> Path:
    rows = [
        request(number, scheduled=20 * number, sent=20 * number + 1, first=20 * number + 90) for number in range(40)
    ]
    rows += [failure(40), request(41, gaps=(), session=3, turn=1), request(42, phase="warmup", first=50)]
    run = write_run(directory, rows, manifest(), facts())
    (run / "notes.txt").write_text("é\nno newline at the end")
    (run / "odd.json").write_text('{"a":1}')
    return run


def files(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "results"
    place.mkdir()
    monkeypatch.setattr(kept, "RESULTS", place)
    monkeypatch.setattr(kept, "packed_files", lambda: sorted(place.glob("*.jsonl.xz")))
    return place


def test_a_run_comes_back_to_the_byte(tmp_path: Path, results: Path) -> None:
    run = a_run(tmp_path / "run")
    assert kept.main(["pack", str(run), "group/run", "serving", "--gaps"]) == 0
    assert kept.main(["unpack", "group", str(tmp_path / "back")]) == 0
    assert files(tmp_path / "back" / "run") == files(run)


def test_without_gaps_all_but_the_gaps_comes_back(tmp_path: Path, results: Path) -> None:
    run = a_run(tmp_path / "run")
    assert kept.main(["pack", str(run), "run", "serving"]) == 0
    assert kept.main(["unpack", "run", str(tmp_path / "back")]) == 0
    before, after = (build.from_directory(place)[0] for place in (run, tmp_path / "back"))
    assert after.metrics["itl_ms"].n == 0 < before.metrics["itl_ms"].n
    assert {**before.metrics, "itl_ms": None} == {**after.metrics, "itl_ms": None}
    assert (before.requests, before.tokens, before.client) == (after.requests, after.tokens, after.client)
    assert len(records.read(tmp_path / "back")[0]) == 43


def test_packing_again_replaces_and_leaves_the_others(
    tmp_path: Path, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "run")
    for name in ("one", "two", "one"):
        assert kept.main(["pack", str(run), name, "serving"]) == 0
    assert kept.main(["list"]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["two", "one"]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_file_that_is_cut_off_is_named(
    tmp_path: Path, results: Path, share: float, capsys: pytest.CaptureFixture[str]
) -> None:
    kept.main(["pack", str(a_run(tmp_path / "run")), "run", "serving"])
    packed = results / "serving.jsonl.xz"
    packed.write_bytes(packed.read_bytes()[: int(share * packed.stat().st_size)])
    for words in (["list"], ["unpack", "run", str(tmp_path / "back")]):
        assert kept.main(words) == 3
        assert capsys.readouterr().err == f"kept: {packed} is cut off or damaged: get it back with `git checkout`.\n"


def test_mistakes_are_one_sentence(tmp_path: Path, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept.main(["pack", str(a_run(tmp_path / "run")), "run", "serving"])
    assert kept.main(["unpack", "ru", str(tmp_path / "back")]) == 2
    assert kept.main(["unpack", "run", str(tmp_path / "run")]) == 2
    assert kept.main(["pack", str(tmp_path / "none"), "run", "serving"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "kept: No results are named 'ru': `python benchmarks/kept.py list` has the names.",
        f"kept: {tmp_path / 'run'} is there already: name a directory that is not.",
        f"kept: {tmp_path / 'none'} is no directory.",
    ]


class History:
    """A repository in which a prediction and a run were committed; what it tells of them is originals.tsv.xz."""

    def __init__(self, place: Path) -> None:
        self.place, self.rows = place, list[str]()
        place.mkdir(exist_ok=True)
        self.git("init", "--quiet")

    def git(self, *words: str, at_s: int = 0) -> str:
        env = {"GIT_COMMITTER_DATE": f"{at_s} +0000", "GIT_AUTHOR_DATE": f"{at_s} +0000", "HOME": str(self.place)}
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        argv = ["git", "-C", str(self.place), *who, *words]
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.strip()

    def commit(self, kind: str, began_s: float, at_s: int) -> None:
        """Of a run that begins then, or of its prediction; of both for "predicted measured"."""
        made = []
        for each in kind.split():
            run = self.place / "benchmarks" / "frozen" / each / "burst"
            run.mkdir(parents=True)
            (run / "manifest.json").write_text(json.dumps({"started_unix_s": began_s}))
            (run / "requests.jsonl.gz").write_text(each)
            made += [run / "manifest.json", run / "requests.jsonl.gz"]
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", kind, at_s=at_s)
        head = self.git("rev-parse", "HEAD")
        for file in made:
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            self.rows.append(f"{file.relative_to(self.place)}\t{digest}\t{head}")

    def told(self, monkeypatch: pytest.MonkeyPatch, place: Path | None = None, files: int | None = None) -> int:
        monkeypatch.setattr(kept, "ROOT", place or self.place)
        monkeypatch.setattr(kept, "ORIGINALS", self.place / "originals.tsv.xz")
        head = f"# {len(self.rows) if files is None else files} files"
        kept.ORIGINALS.write_bytes(lzma.compress(("\n".join([head, *self.rows]) + "\n").encode()))
        return kept.main(["check"])


@pytest.mark.parametrize(
    ("began_s", "order", "code", "said"),
    [
        (1_700_000_500.0, ("predicted", "measured"), 0, "1 predictions were committed before their runs began."),
        (1_700_000_500.0, ("predicted measured",), 0, "Of 1 the history has prediction and run in one commit: burst."),
        (1_700_000_050.0, ("predicted", "measured"), 3, "burst began at 2023-11-14 22:14:10, before "),
        (1_700_000_500.0, ("measured", "predicted"), 3, "The prediction of burst was not committed before the run."),
    ],
)
def test_a_prediction_must_be_committed_before_its_run_begins(
    began_s: float, order: tuple[str, ...], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    history = History(tmp_path)
    for number, kind in enumerate(order):
        history.commit(kind, began_s, 1_700_000_100 + 900 * number)
    assert history.told(monkeypatch) == code
    shown = capsys.readouterr()
    assert "4 originals are in the history as they were packed." in shown.out.splitlines()
    assert said in (shown.err if code else shown.out)


def a_packed_run(history: History, began_s: float, at_s: int, more: str = "") -> None:
    """Of the prediction's name, in results/ alone."""
    line = {"name": "frozen/measured/burst", "files": {"manifest.json": {"started_unix_s": began_s, "more": more}}}
    path = history.place / "results" / "runs.jsonl.xz"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(lzma.compress((json.dumps(line, separators=(",", ":")) + "\n").encode()))
    history.git("add", "--all")
    history.git("commit", "--quiet", "--message", "packed", at_s=at_s)


@pytest.mark.parametrize(
    ("began_s", "first", "code", "said"),
    [
        (1_700_000_500.0, "predicted", 0, "1 more were, by the runs' own clocks"),
        (1_700_000_050.0, "predicted", 3, "burst began at 2023-11-14 22:14:10, before "),
        (1_700_000_500.0, "packed", 3, "The prediction of burst was not committed before the run."),
    ],
)
def test_a_run_that_was_packed_at_once_is_proven_by_the_pack(
    began_s: float, first: str, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    history = History(tmp_path)
    if first == "packed":
        a_packed_run(history, began_s, 1_700_000_000)
    history.commit("predicted", began_s, 1_700_000_100)
    if first == "predicted":
        a_packed_run(history, began_s, 1_700_001_000)
    assert history.told(monkeypatch) == code
    shown = capsys.readouterr()
    assert said in (shown.err if code else shown.out)
    a_packed_run(history, began_s, 1_700_002_000, "another")
    assert history.told(monkeypatch) == 3 and "is not as it was packed in" in capsys.readouterr().err


def test_originals_that_are_others_or_in_no_commit_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    history = History(tmp_path / "origin")
    history.commit("predicted", 0.0, 1_700_000_100)
    path, digest, commit = history.rows[1].split("\t")
    for row, said in (
        (f"{path}\t{'0' * 64}\t{commit}", "is not the file that originals.tsv.xz names"),
        (f"{path}x\t{digest}\t{commit}", "is not in commit"),
        (f"{path}\t{digest}", "is cut off or damaged"),
    ):
        history.rows[1] = row
        assert history.told(monkeypatch) == 3
        assert said in capsys.readouterr().err
    history.rows.pop()
    assert history.told(monkeypatch, files=2) == 3
    assert "is cut off or damaged" in capsys.readouterr().err
    history.commit("measured", 0.0, 1_700_000_200)
    shallow = tmp_path / "shallow"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{history.place}", str(shallow)], check=True)
    assert history.told(monkeypatch, shallow) == 3
    assert "shallow" in capsys.readouterr().err
