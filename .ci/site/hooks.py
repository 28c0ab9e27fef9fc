"""What mkdocs cannot do itself: documents that stand outside docs/ become pages, and links to files that are no
documents lead to the repository (REPO_URL), or stay words where no repository is named."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
OUTSIDE = ("METHODOLOGY.md", "CONTRIBUTING.md", "CHANGELOG.md", "results/README.md", "benchmarks/README.md")
FRONT = "README.md"
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)([^)]*)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    assert config.nav is not None
    lab = sorted(f"lab/{path.name}" for path in (ROOT / "docs/lab").glob("*.md") if path.name != FRONT)
    config.nav += [{"Lab book": [f"lab/{FRONT}", *lab]}, {"The project": [*OUTSIDE[1:]]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name in (FRONT, *OUTSIDE):
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    name = page.file.src_uri
    # where the document stands in the repository
    folder = posixpath.dirname(name if name in (FRONT, *OUTSIDE) else f"docs/{name}")

    def rewritten(match: re.Match[str]) -> str:
        words, link, title = match.groups()
        path, hash_, anchor = link.partition("#")
        if "://" in link or not path:
            return match.group()
        target = posixpath.normpath(posixpath.join(folder, path))
        page_of = target.removeprefix("docs/")
        if files.get_file_from_path(page_of):
            return f"{words}({posixpath.relpath(page_of, posixpath.dirname(name) or '.')}{hash_}{anchor}{title})"
        if not (ROOT / target).exists():
            return match.group()  # which mkdocs reports
        repository = os.environ.get("REPO_URL")
        return f"{words}({repository}/blob/main/{target}{title})" if repository else words[1:-1]

    return LINK.sub(rewritten, markdown)
