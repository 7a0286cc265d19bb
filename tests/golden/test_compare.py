"""The record of `vitlens compare`: its numbers agree with each other and with what was asked for."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitlens
from tests.kit.commands import ran, report
from tests.kit.first_page import check_first_page
from tests.kit.making import save, untrained
from vitlens import load, load_data
from vitlens.commands.compare.record import CELLS, CompareRecord

COUNT = 24
SHAPE = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [8, 8]}
PAIR = ("tiny-vit", "tiny-cnn")


@pytest.fixture(scope="module")
def record(golden) -> CompareRecord:
    """Two untrained models on 24 scenes."""
    return golden("compare").record


def pair(folder: Path, classes: tuple[str, ...]) -> str:
    """A ViT and a CNN of these classes, as they are typed."""
    for name, preset, overrides in (("vit", "vit-mini", SHAPE), ("cnn", "resnet20", None)):
        save(untrained(preset, classes=classes, seed=1, overrides=overrides), folder / name / "model.safetensors")
    return f"{folder / 'vit'} {folder / 'cnn'}"


@pytest.fixture(scope="module")
def of_shapes(tmp_path_factory: pytest.TempPathFactory) -> CompareRecord:
    """Two untrained models of shapes on 104 of them: untrained models fail often enough to be tested."""
    root = tmp_path_factory.mktemp("shapes")
    models = pair(root, load_data("shapes", limit=8).classes)
    line = f"compare {models} --data shapes --limit 104 --maps 20 --panels 1 --method saliency --target 3 --no-harder"
    return ran(root / "run", line)


def test_cells_are_those_of_the_public_comparison(record, tiny_vit, tiny_cnn):
    counts = {row.cell: row.count for row in record.cells}
    assert set(counts) == set(CELLS)
    first, second = (vitlens.evaluate(load(str(each)), load_data("digits", limit=COUNT)).correct
                     for each in (tiny_vit, tiny_cnn))  # fmt: skip
    assert counts["both-right"] == int((first & second).sum())
    assert counts["only-first-wrong"] == int((~first & second).sum())
    assert counts["only-second-wrong"] == int((first & ~second).sum())
    assert [row.method for row in record.methods] == ["best", "gradcam"]  # none was asked for
    pair = "tiny-vit/tiny-cnn"
    assert record.metrics.keys() >= {
        *(f"{name}/{alias}" for name in ("accuracy", "calibration_error") for alias in PAIR),
        *(f"maps/{alias}/{name}" for name in ("half", "inside") for alias in PAIR),
        *(f"localisation/{alias}/pointing" for alias in PAIR), f"accuracy_difference/{pair}", f"mcnemar_p/{pair}",
        f"half_difference/{pair}", *(f"agreement/{pair}/{name}" for name in ("spearman", "top", "shared")),
    }  # fmt: skip


def test_tables_agree_with_each_other(record):
    accuracies = {row.model: row.accuracy.value for row in record.scores}
    cells = {row.cell: row for row in record.cells}
    assert sum(row.count for row in record.cells) == COUNT
    assert all(row.share.value == pytest.approx(row.count / COUNT) for row in record.cells)
    (pair,) = record.pairs
    assert pair.both_right == cells["both-right"].count
    assert pair.only_first_right == cells["only-second-wrong"].count
    assert pair.only_second_right == cells["only-first-wrong"].count
    assert pair.both_wrong == cells["both-wrong-alike"].count + cells["both-wrong-differently"].count
    for alias, accuracy in accuracies.items():
        own = [row for row in record.per_class if row.model == alias]
        assert sum(row.n for row in own) == COUNT
        assert sum(row.n * row.accuracy.value for row in own) == pytest.approx(COUNT * accuracy)
        confused = [row for row in record.confusions if row.model == alias]
        assert sum(row.count for row in confused) == round(COUNT * (1 - accuracy))
        assert all(row.truth != row.prediction for row in confused)
        levels = [row for row in record.robustness if (row.model, row.kind) == (alias, "low-pass")]
        assert levels[0].accuracy.value == accuracy, "the first level changes nothing"
        assert record.metric(f"hardened_accuracy/{alias}/shuffle/1").value == accuracy
    assert {row.kind for row in record.robustness} == {row.kind for row in record.disturbed_pairs}
    assert 2 * len(record.disturbed_pairs) == len(record.robustness)
    for row in record.disturbed_pairs:
        first, second = (
            next(
                each
                for each in record.robustness
                if (each.model, each.kind, each.level) == (alias, row.kind, row.level)
            )
            for alias in PAIR
        )
        assert row.difference.value == pytest.approx(100 * (first.accuracy.value - second.accuracy.value))
        assert row.p_holm >= row.p
    assert not record.cue_conflicts


def test_masses_and_pointing_are_those_of_the_methods(record):
    assert {(row.model, row.score) for row in record.on_object} == {(m, s) for m in PAIR for s in ("mass", "pointing")}
    for row in record.on_object:
        name = "inside" if row.score == "mass" else "pointing"
        assert (
            getattr(next(each for each in record.methods if each.model == row.model), name).value == row.estimate.value
        )


def test_numbers_of_images_are_those_asked_for_and_said(tmp_path, tiny_vit, tiny_cnn):
    line = f"compare {tiny_vit} {tiny_cnn} --data digits --limit 8 --panels 1 --checked 4 --disturbed 5"
    record = ran(tmp_path / "run", f"{line} --method saliency")
    assert {row.margin.n for row in record.map_checks if row.margin} == {4}
    assert {row.accuracy.n for row in record.robustness} == {row.difference.n for row in record.disturbed_pairs} == {5}
    assert "Only 5 images are disturbed" in (record.folder / "report.md").read_text()


def test_panels_by_rising_agreement_say_and_show_what_the_rows_hold(record):
    shown = sorted((row for row in record.images_shown if row.panel is not None), key=lambda row: row.panel)
    assert [row.panel for row in shown] == list(range(6))
    assert [row.agreement for row in shown] == sorted(row.agreement for row in shown)
    (section,) = [section for section in report(record).sections if section.panels]
    others = [row for row in record.images_shown if row.panel is None]
    assert len(section.panels) == len(shown) + len(others)
    assert all(row.example for row in others)
    names = {row.cell: row.name for row in record.cells}
    for panel, row in zip(section.panels, [*shown, *others]):
        assert (panel.tags.class_name, panel.tags.outcome) == (row.truth, names[row.cell])
        assert row.first_prediction in panel.captions[1]
        assert ("✓" in panel.captions[2]) == (row.second_prediction == row.truth)
        below = {"below 0.3": row.agreement < 0.3, "at least 0.6": row.agreement >= 0.6}
        assert below.get(panel.tags.agreement, 0.3 <= row.agreement < 0.6)
    pixels, first, second = section.panels[0].pictures()
    assert pixels.dtype == np.uint8
    assert pixels.shape == first.shape == second.shape
    assert (pixels == 255).all(-1).any(), "the object is outlined"
    assert not np.array_equal(first, second)


@pytest.mark.slow
def test_failures_and_conflicts_of_models_of_shapes(of_shapes):
    """With a single method for both models, and a class given by its number."""
    rows = of_shapes.covariates
    assert {row.model for row in rows} == set(of_shapes.aliases)
    assert {"off_centre", "size", "clutter", "map_on_object", "confidence"} <= {row.covariate for row in rows}
    tested = [row for row in rows if row.p is not None]
    smallest = min(tested, key=lambda row: row.p)
    assert smallest.p_holm == pytest.approx(min(1, len(tested) * smallest.p)), "one correction for all"
    assert all(row.area.n == 104 for row in rows if row.covariate == "size")
    assert {row.covariate for row in of_shapes.interventions} <= {row.covariate for row in tested if row.p <= 0.05}
    assert [row.method for row in of_shapes.methods] == ["saliency", "saliency"]
    assert not of_shapes.robustness
    assert sum(row.n for row in of_shapes.cue_conflicts) == 2 * 560
    for bias in of_shapes.shape_bias:
        own = [row for row in of_shapes.cue_conflicts if row.model == bias.model]
        assert bias.shape.value == pytest.approx(sum(row.shape for row in own) / 560)
        assert bias.texture.value == pytest.approx(sum(row.texture for row in own) / 560)
    check_first_page(report(of_shapes))


def test_unusable_maps_are_counted(tmp_path, tiny_vit):
    """A model without any weight in its head: no gradient, no relevance."""
    dead = load(str(tiny_vit))
    with torch.no_grad():
        dead.module.head.weight.zero_()
    save(dead, tmp_path / "dead" / "model.safetensors")
    line = f"compare {tmp_path / 'dead'} {tiny_vit} --data digits --limit 4 --no-harder --panels 3 --method saliency"
    record = ran(tmp_path / "run", line)
    usable = record.metric("maps/dead/usable")
    assert (usable.value, usable.n) == (0, 4)
    assert "maps/dead/half" not in record.metrics
    assert not record.agreement
    assert not [row for row in record.images_shown if row.panel is not None]
    assert "4 of 4 maps of dead are uniform" in (tmp_path / "run" / "report.md").read_text()


def test_one_image_and_one_class_whose_name_is_markup(tmp_path):
    classes = ("<b>**x**</b>`1`", "[a](b)")
    place = tmp_path / "data" / "test" / classes[1]
    place.mkdir(parents=True)
    (tmp_path / "data" / "test" / "_").mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(place / "0.png")
    line = f"compare {pair(tmp_path, classes)} --data {tmp_path / 'data'} --limit 1 --panels 1 --no-harder --html"
    record = ran(tmp_path / "run", f"{line} --method saliency")
    document = report(record)
    check_first_page(document)
    assert not [claim for claim in document.claims if claim.is_shown]
    assert {claim.state for claim in document.claims if claim.state} == {"inconclusive"}
    assert "[a](b)" not in (tmp_path / "run" / "report.md").read_text()
    assert "<b>**x" not in (tmp_path / "run" / "report.html").read_text()
