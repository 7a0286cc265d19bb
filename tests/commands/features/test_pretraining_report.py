"""Planted objectives: who is ahead follows from the paired tests; nothing is concluded from what compares nothing."""

from pathlib import Path

import pytest

from tests.backing import unbacked
from tests.commands.features.test_conclusions import record_of, right
from vitlens.commands.features.measure.classifiers import LastLayer
from vitlens.commands.features.record.patch_rows import PatchNeighboursRow
from vitlens.commands.features.record.pretraining_rows import PretrainingRow
from vitlens.commands.features.record.rows import PROBE
from vitlens.commands.features.report.embedding import embedding_sections
from vitlens.commands.features.report.pretraining import pretraining_sections
from vitlens.report.document import Document, Section

OBJECTIVES = {"a": "language-image", "b": "self-supervised", "c": "supervised", "d": "supervised"}


def row(alias: str, objective: str) -> PretrainingRow:
    return PretrainingRow(alias, objective, "X", "", "", "its name", 5_000_000, 192)


def overlap(alias: str, layer: int | None, value: float) -> PatchNeighboursRow:
    ends = (value - 0.02, value + 0.02)
    title = "embedding" if layer is None else f"block {layer}"
    return PatchNeighboursRow(alias, layer, title, "object", value, *ends, 0.2, 2000, 100, 10, (8, 8))


def section(
    folder: Path,
    shares: dict[str, tuple[float, float]],
    objectives: dict[str, str] = OBJECTIVES,
    shared: tuple[PatchNeighboursRow, ...] = (),
) -> Section:
    """shares: the accuracy by probe and by neighbours of each model."""
    layers = [
        LastLayer(alias, None, {"knn-20": right(knn, 2 * place), PROBE: right(probe, 2 * place + 1)})
        for place, (alias, (probe, knn)) in enumerate(shares.items())
    ]
    rows = [row(alias, objectives[alias]) for alias in shares]
    record = record_of(folder / "run", *layers, pretraining=rows, shared=shared)
    (made,) = pretraining_sections(record)
    assert list(unbacked(Document("t", (made, *embedding_sections(record))))) == []
    return made


def text(made: Section) -> str:
    return " ".join(sentence.text for sentence in made.sentences)


def test_the_model_that_beats_all_others_is_ahead(tmp_path):
    found = text(section(tmp_path, {"a": (0.9, 0.9), "b": (0.7, 0.7), "c": (0.6, 0.6)}))
    assert "By the linear probe `a`, language-image (X), is ahead" in found
    assert "By the 20 nearest neighbours `a`, language-image (X), is ahead" in found
    assert "to `b`)" in found  # the closest of the others


def test_one_that_beats_only_some_is_not(tmp_path):
    found = text(section(tmp_path, {"a": (0.8, 0.8), "b": (0.8, 0.8), "c": (0.6, 0.6)}))
    assert "No objective is ahead" in found


def test_the_classifiers_may_disagree(tmp_path):
    found = text(section(tmp_path, {"a": (0.9, 0.5), "b": (0.6, 0.9), "c": (0.5, 0.4)}))
    assert "By the linear probe `a`" in found
    assert "By the 20 nearest neighbours `b`" in found
    assert "disagree" in found
    found = text(section(tmp_path / "x", {"a": (0.9, 0.7), "b": (0.6, 0.7), "c": (0.5, 0.5)}))
    assert "By the 20 nearest neighbours no model is ahead." in found


def test_a_model_of_the_same_objective_need_not_be_beaten(tmp_path):
    found = text(section(tmp_path, {"c": (0.9, 0.9), "d": (0.9, 0.9), "b": (0.6, 0.6)}))
    assert found.count("is ahead of every model") == 2
    assert "`b`, self-supervised" not in found


@pytest.mark.parametrize(
    ("objectives", "words"),
    [
        ({"a": "supervised", "b": "supervised"}, "compare models, not objectives"),
        ({"a": "supervised", "b": "not known"}, "`--objective b=OBJECTIVE`"),
        ({"a": "supervised", "b": "random weights"}, "say nothing about any pretraining"),
    ],
)
def test_what_compares_no_objectives_says_so(tmp_path, objectives, words):
    made = section(tmp_path, {"a": (0.9, 0.9), "b": (0.5, 0.5)}, objectives)
    assert words in text(made)
    assert "is ahead" not in text(made)
    (table,) = made.tables
    assert table.rows[0][:2] == ("a", "supervised (X)")


def test_objects_that_the_embedding_finds_as_well_compare_nothing(tmp_path):
    """Where colour alone separates object and background, a random model is as good."""
    shares = {"a": (0.7, 0.7), "b": (0.7, 0.7)}
    easy = (overlap("a", None, 0.9), overlap("a", 5, 0.9), overlap("b", None, 0.9), overlap("b", 5, 0.6))
    assert "no better than by its patches before any attention" in text(section(tmp_path / "1", shares, shared=easy))
    hard = (overlap("a", None, 0.3), overlap("a", 5, 0.7), overlap("b", None, 0.3), overlap("b", 5, 0.6))
    assert "Patches of `a`, language-image (X), find the object best" in text(
        section(tmp_path / "2", shares, shared=hard)
    )
    close = (overlap("a", None, 0.3), overlap("a", 5, 0.7), overlap("b", None, 0.3), overlap("b", 5, 0.69))
    assert "intervals overlap" in text(section(tmp_path / "3", shares, shared=close))


def test_one_model_has_no_comparison(tmp_path):
    record = record_of(
        tmp_path / "run", LastLayer("a", None, {PROBE: right(0.5, 0)}), pretraining=[row("a", "supervised")]
    )
    assert list(pretraining_sections(record)) == []
