"""The documents: their links lead somewhere, and README.md is a page."""

from __future__ import annotations

import lzma
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import loadgen.cli
import training_probe.cli

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "results/*.md", "compose/*.md")
    for path in ROOT.glob(pattern)
)
MOST_LINES = 100  # of README.md
MOST_WORDS = 25_000  # of what users read
FOR_USERS = [Path("METHODOLOGY.md"), *(path for path in DOCUMENTS if path.parent == Path("docs"))]
FOR_USERS.remove(Path("docs/architecture.md"))


def anchors(document: Path) -> set[str]:
    """Those that GitHub makes of the headings."""
    text = re.sub(r"^```.*?^```", "", (ROOT / document).read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@cache
def originals() -> tuple[str, ...]:
    """Paths of what results/ holds, as they were before they were packed."""
    packed = (ROOT / "results" / "originals.tsv.xz").read_bytes()
    lines = lzma.decompress(packed).decode().splitlines()[1:]
    return tuple(line.partition("\t")[0].removeprefix("benchmarks/") for line in lines)


def results_named(document: Path) -> list[str]:
    """Directories and files of results/ that a document names: as titles of links, and as `results:NAME`."""
    text = (ROOT / document).read_text()
    titles = re.findall(r'results/README\.md "([^"]+)"', text)
    return titles + [name.rstrip(".,;)") for name in re.findall(r"results:([\w./-]+)", text) if name != "NAME"]


def is_kept(name: str) -> bool:
    """A script that was is named, too. The outputs of scripts lay in no directory of their own."""
    path = re.sub(r"^(scripts|training_memory)/", "", name)
    return path.endswith(".py") or any(original.startswith(path) for original in originals())


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document: Path) -> None:
    broken = [name for name in results_named(document) if not is_kept(name)]
    for link in re.findall(r"\]\(\s*([^)\s]+)[^)]*\)", (ROOT / document).read_text()):
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        if "://" in link:
            continue
        if not (ROOT / target).exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_readme_is_a_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES


def test_documents_for_users_are_short() -> None:
    """A table's rules are no words."""
    words = [word for path in FOR_USERS for word in (ROOT / path).read_text().replace("|", " ").split()]
    assert len([word for word in words if any(letter.isalnum() for letter in word)]) <= MOST_WORDS


@pytest.mark.parametrize("document", FOR_USERS, ids=str)
def test_each_opens_with_a_command(document: Path) -> None:
    _, _, opening, *_ = (ROOT / document).read_text().splitlines()
    assert opening.startswith("```")


def commands_of(document: Path) -> list[list[str]]:
    """Lines of code that begin with one of the programs, as words. Their addresses stand for any."""
    text = (ROOT / document).read_text()
    blocks = "\n".join(re.findall(r"^```\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
    lines = re.findall(r"^(?:\$ )?((?:loadgen|training_probe) [^|;\n]*)", blocks, flags=re.MULTILINE)
    return [shlex.split(re.sub(r"\bURL\b", "http://127.0.0.1:8000", line), comments=True) for line in lines]


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if "lab" not in each.parts], ids=str)
def test_the_programs_know_the_commands(document: Path) -> None:
    """By their words and options: none is started."""
    apps = {"loadgen": loadgen.cli.build_app(), "training_probe": training_probe.cli.build_app()}
    for program, *words in commands_of(document):
        if "--config" not in words:  # which is read before the rest
            apps[program].parse_args(words, exit_on_error=False, print_error=False)


@pytest.mark.processes
def test_the_quick_start_answers_its_three_questions(tmp_path: Path) -> None:
    """Each command as it stands there, one after the other. A run on a busy machine may be judged INVALID."""
    questions = (ROOT / "docs" / "quickstart.md").read_text().partition("## Three questions")[2].partition("\n## ")[0]
    commands = [line for block in re.findall(r"^```\n(.*?)^```", questions, re.M | re.S) for line in block.splitlines()]
    assert [command.split()[1] for command in commands] == ["run", "run", "compare", "search", "predict", "plan"]
    for command in commands:
        argv = [sys.executable, "-m", *shlex.split(command)]
        done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, timeout=300)
        assert done.returncode in ((0, 4) if command.split()[1] in ("run", "compare") else (0,)), command + done.stderr
        assert done.stdout and "Traceback" not in done.stderr
