"""The pictures of the documents: each is drawn by figures.py, and shown; what it draws of kept runs is a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from benchmarks import figures, kept
from tests.data import PACKED

DOCUMENTS = [*kept.ROOT.glob("*.md"), *kept.ROOT.glob("docs/**/*.md")]
AS_IT_WAS = {"timeline.png"}  # what it shows was not kept


def test_each_picture_is_drawn_and_shown() -> None:
    there = {path.name for path in figures.PICTURES.iterdir()}
    assert there == set(figures.FIGURES) | AS_IT_WAS
    text = "".join(document.read_text() for document in DOCUMENTS)
    assert [name for name in there if f"pictures/{name}" not in text] == []


def test_runs_over_each_other_and_a_measurements_own_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "packed_files", lambda: PACKED)
    over_each_other = figures.cdfs("7b_tp4_o64 7b_lightllm_o64")(tmp_path)
    own = figures.report_of("h200/training/fig4", "scaling.png")(tmp_path)
    for picture in (over_each_other, own):
        with Image.open(picture) as image:
            assert image.width > 500
    with pytest.raises(kept.KeptError, match="No results are named 'h200/serving/none'"):
        figures.cdfs("none")(tmp_path)
