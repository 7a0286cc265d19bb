"""The record of `vitlens compare`: its numbers agree with each other and with the options."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitlens
from tests.kit.commands import figures, ran, report
from tests.kit.first_page import check_first_page
from tests.kit.making import save, untrained
from tests.kit.select import index_by, select, values_of
from vitlens import load, load_data
from vitlens.commands.compare.record import CELLS, CompareRecord
from vitlens.uncertainty import Estimate

COUNT = 12
SHAPE = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [8, 8]}
PAIR = ("tiny-vit", "tiny-cnn")


@pytest.fixture(scope="module")
def record(golden) -> CompareRecord:
    """Return a comparison of two untrained models on 12 scenes."""
    return golden("compare").record


def pair(folder: Path, classes: tuple[str, ...]) -> str:
    """Write a ViT and a CNN of these classes and return their arguments."""
    for name, preset, overrides in (("vit", "vit-mini", SHAPE), ("cnn", "resnet20", None)):
        save(
            untrained(preset, classes=classes, seed=1, overrides=overrides),
            folder / name / "model.safetensors",
        )
    return f"{folder / 'vit'} {folder / 'cnn'}"


def test_panels_by_rising_agreement_say_and_show_what_the_rows_hold(record):
    in_panels = []
    examples = []
    for row in record.images_shown:
        if row.panel is None:
            assert row.example
            examples.append(row)
        else:
            in_panels.append(row)
    in_panels.sort(key=lambda row: row.panel)
    assert values_of(in_panels, "panel") == list(range(6))
    agreements = values_of(in_panels, "agreement")
    assert agreements == sorted(agreements)
    (section,) = [section for section in report(record).sections if section.panels]
    names = {row.cell: row.name for row in record.cells}
    for panel, row in zip(section.panels, [*in_panels, *examples], strict=True):
        assert (panel.tags.class_name, panel.tags.outcome) == (row.truth, names[row.cell])
        assert row.first_prediction in panel.captions[1]
        assert ("✓" in panel.captions[2]) == (row.second_prediction == row.truth)
        if panel.tags.agreement == "below 0.3":
            assert row.agreement < 0.3
        elif panel.tags.agreement == "at least 0.6":
            assert row.agreement >= 0.6
        else:
            assert 0.3 <= row.agreement < 0.6
    pixels, first, second = section.panels[0].pictures()
    assert pixels.shape == first.shape == second.shape
    assert (pixels == 255).all(-1).any(), "the object is outlined"
    assert not np.array_equal(first, second)


def test_all_panels_are_drawn_on_sheets(tmp_path, tiny_vit, tiny_cnn):
    more = "--limit 24 --panels 20 --maps 20 --checked 0 --no-harder --method saliency"
    record = ran(tmp_path / "out", f"compare {tiny_vit} {tiny_cnn} --data digits {more}")
    sheets = [figure for figure in report(record).figures if figure.name.startswith("all_panels")]
    names = values_of(sheets, "name")
    assert names == ["all_panels_1", "all_panels_2"]
    assert set(names) <= figures(record)
    assert sheets[0].caption.startswith("18 ")
    assert sheets[1].caption.startswith("2 ")
    check_first_page(report(record))


def test_unusable_maps_are_counted(tmp_path, tiny_vit):
    """A model without any weight in its head: no gradient, no relevance."""
    dead = load(str(tiny_vit))
    with torch.no_grad():
        dead.module.head.weight.zero_()
    save(dead, tmp_path / "dead" / "model.safetensors")
    line = (
        f"compare {tmp_path / 'dead'} {tiny_vit} --data digits --limit 4 --disturbed 3 "
        "--panels 3 --method saliency"
    )
    record = ran(tmp_path / "run", line)
    text = tmp_path / "run" / "report.md"
    usable = record.metric("maps/dead/usable")
    assert (usable.value, usable.n) == (0, 4)
    assert "maps/dead/half" not in record.metrics
    assert not record.agreement
    assert not [row for row in record.images_shown if row.panel is not None]
    assert "4 of 4 maps of dead are uniform" in text.read_text()
    assert (
        set(values_of(record.robustness, "accuracy.n"))
        == set(values_of(record.disturbed_pairs, "difference.n"))
        == {3}
    )
    assert "Only 3 images are disturbed" in text.read_text()


def test_levels_of_disturbances_are_the_interventions_and_few_images_are_said_to_be_few(
    tmp_path, tiny_vit, tiny_cnn, record
):
    """The accuracy at a level is that of the intervention, whose images are the same."""
    more = "--limit 24 --panels 1 --maps 1 --checked 0 --method saliency"
    run = ran(tmp_path / "run", f"compare {tiny_vit} {tiny_cnn} --data digits {more}")
    levels = {("fine-detail", "low-pass"): "low-pass/0.3", ("parts", "covered"): "occlusion/0.25"}
    compared = 0
    for row in run.reliance:
        assert row.n + row.unchanged == 24
        level = levels.get((row.cue, row.intervention))
        if level is None or row.unchanged:
            continue
        compared += 1
        clean = run.metric(f"accuracy/{row.model}").value
        after = run.metric(f"hardened_accuracy/{row.model}/{level}").value
        assert after == pytest.approx(clean + (row.fixed - row.broken) / row.n)
    assert compared
    assert not record.reliance, "12 images are too few"
    assert set(values_of(record.reliance_left_out, "cue")) >= {"colour", "layout", "background"}


def test_one_image_and_one_class_whose_name_is_markup(tmp_path):
    classes = ("<b>**x**</b>`1`", "[a](b)")
    place = tmp_path / "data" / "test" / classes[1]
    place.mkdir(parents=True)
    (tmp_path / "data" / "test" / "_").mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(place / "0.png")
    line = (
        f"compare {pair(tmp_path, classes)} --data {tmp_path / 'data'} --limit 1 --panels 1 "
        "--no-harder --html"
    )
    record = ran(tmp_path / "run", f"{line} --method saliency")
    document = report(record)
    check_first_page(document)
    assert not [claim for claim in document.claims if claim.is_shown]
    assert {claim.state for claim in document.claims if claim.state} == {"inconclusive"}
    assert "[a](b)" not in (tmp_path / "run" / "report.md").read_text()
    assert "<b>**x" not in (tmp_path / "run" / "report.html").read_text()


def test_tables_are_those_of_the_public_comparison_and_agree_with_each_other(
    record, tiny_vit, tiny_cnn
):
    comparison = vitlens.compare(
        load(str(tiny_vit)), load(str(tiny_cnn)), load_data("digits", limit=COUNT)
    )
    counts = list(comparison.counts.values())
    assert values_of(record.cells, "cell") == list(CELLS)
    assert values_of(record.cells, "count") == counts
    shares = np.divide(counts, COUNT)
    assert values_of(record.cells, "share.value") == pytest.approx(shares.tolist())
    (pair,) = record.pairs
    assert [pair.both_right, pair.only_second_right, pair.only_first_right] == counts[:3]
    assert pair.both_wrong == counts[3] + counts[4]
    assert values_of(record.methods, "method") == ["best", "gradcam"]  # none was asked for


def test_tables_by_class_and_disturbance_agree_with_the_accuracies(record):
    for score in record.scores:
        alias = score.model
        accuracy = score.accuracy.value
        classes = select(record.per_class, model=alias)
        assert sum(row.n for row in classes) == COUNT
        assert sum(row.n * row.accuracy.value for row in classes) == pytest.approx(COUNT * accuracy)
        confused = select(record.confusions, model=alias)
        assert sum(row.count for row in confused) == round(COUNT * (1 - accuracy))
        for row in confused:
            assert row.truth != row.prediction
        levels = select(record.robustness, model=alias, kind="low-pass")
        assert levels[0].accuracy.value == accuracy, "the first level changes nothing"
        assert record.metric(f"hardened_accuracy/{alias}/shuffle/1").value == accuracy
    assert 2 * len(record.disturbed_pairs) == len(record.robustness)
    levels_by_model = index_by(record.robustness, "model", "kind", "level")
    vit, cnn = PAIR
    for row in record.disturbed_pairs:
        first = levels_by_model[vit, row.kind, row.level].accuracy.value
        second = levels_by_model[cnn, row.kind, row.level].accuracy.value
        assert row.difference.value == pytest.approx(100 * (first - second))
        assert row.p_holm >= row.p


def test_maps_are_checked_on_as_many_images_as_were_asked_for_and_on_the_object(record):
    assert not record.cue_conflicts
    margins = [row.margin for row in record.map_checks if row.margin]
    assert set(values_of(margins, "n")) == {2}
    expected = {}
    for row in record.methods:
        expected[row.model, "mass"] = row.inside.value
        expected[row.model, "pointing"] = row.pointing.value
    on_object = {(row.model, row.score): row.estimate.value for row in record.on_object}
    assert on_object == expected


def test_shape_biases_are_those_of_the_function_and_the_model_that_relies_on_shape_is_named(
    tmp_path,
):
    draws = np.random.default_rng(0)
    animals = ("bear", "cat", "dog")
    for shape, texture, number in product(animals, animals, range(2)):
        place = tmp_path / "data" / shape / f"{shape}{number}-{texture}{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draws.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(place)
    line = (
        f"compare {pair(tmp_path, animals)} --data {tmp_path / 'data'} --no-harder --panels 1 "
        "--checked 0"
    )
    record = ran(tmp_path / "run", line)
    for row in record.shape_bias:
        model = load(str(tmp_path / row.model))
        by_function = vitlens.shape_bias(
            model, load_data(str(tmp_path / "data"), preprocessing=model.preprocessing)
        )
        assert (row.bias, row.shape, row.texture, row.n) == (
            by_function.bias,
            by_function.shape,
            by_function.texture,
            12,
        )
        by_class = values_of(select(record.cue_conflicts, model=row.model), "shape", "texture")
        assert by_class == values_of(by_function.by_class, "shape", "texture")
    assert record.metric("shape_bias/vit") == record.shape_bias[0].bias
    high = Estimate(0.8, 0.8 - 0.1, 0.8 + 0.1, 100, "fraction")
    low = Estimate(0.3, 0.3 - 0.1, 0.3 + 0.1, 100, "fraction")
    for biases, words in (
        ((high, low), "**vit** relies on shape more than **cnn**"),
        ((low, high), "**cnn** relies on shape more than **vit**"),
        ((low, low), "do not differ significantly"),
    ):
        rows = []
        for row, bias in zip(record.shape_bias, biases, strict=True):
            rows.append(replace(row, bias=bias))
        sections = report(replace(record, shape_bias=tuple(rows))).sections
        (section,) = [section for section in sections if "texture" in section.title]
        assert words in section.sentences[0].text


def test_maps_are_drawn_from_all_images_alike_so_that_accuracies_on_them_are_those_of_all(tmp_path):
    """Nine of ten images are of one class, of which both models are right; of the others neither
    is.
    """
    line = pair(tmp_path, ("a", "b"))
    vit = load(str(tmp_path / "vit"))
    pixels = np.random.default_rng(0).integers(0, 256, (100, 32, 32, 3), dtype=np.uint8)
    common = int(vit(torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255).argmax(1).mode().values)
    labels = np.where(np.arange(100) < 90, common, 1 - common)
    np.savez(tmp_path / "data.npz", test_images=pixels, test_labels=labels, classes=("a", "b"))
    more = "--maps 20 --checked 0 --panels 1 --no-harder --method saliency"
    record = ran(tmp_path / "out", f"compare {line} --data {tmp_path / 'data.npz'} {more}")
    quarters = select(record.quarters, covariate="map_size", model=record.scores[0].model)
    images = sum(row.accuracy.n for row in quarters)
    right = sum(row.accuracy.n * row.accuracy.value for row in quarters)
    assert images == 20
    assert right / images == pytest.approx(record.scores[0].accuracy.value, abs=0.2)
