"""Checks of methods in a record: its tables agree and are judged; composites are made where there are no masks."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kit.commands import figures, ran, report
from tests.kit.first_page import states
from tests.kit.making import digits
from vitlens import explain, load
from vitlens.commands.explain.record import OVERALL, SEARCH, ExplainRecord
from vitlens.report.document import Document

BASELINES = ("random", "centre")
METHODS = ("relevance", "rollout")
IMAGES = 8
FEWER = "--verify --no-counterfactuals --no-stability"


@pytest.fixture(scope="module")
def masked(golden) -> ExplainRecord:
    """An untrained ViT on six images with masks and labels: relevance and attention."""
    return golden("explain verified").record


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits without masks: an .npz of images and labels."""
    split = digits("test").limit(IMAGES)
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    pixels = split.source.read(torch.arange(IMAGES)).permute(0, 2, 3, 1).numpy()
    np.savez(path, images=pixels, labels=split.labels.numpy())
    return path


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory, plain: Path) -> ExplainRecord:
    """The trained ViT on images without masks."""
    line = f"explain vit-digits --data {plain} --method {','.join(METHODS)} --verify --no-counterfactuals"
    return ran(tmp_path_factory.mktemp("record") / "out", f"{line} --composite-count 3")


def words(document: Document, question: str) -> str:
    """The sentences of a section."""
    return " ".join(text.text for each in document.sections if question in each.title for text in each.sentences)


def test_the_checks_of_a_method_are_its_rows_of_the_table(masked):
    """Which are computed by hand in tests/public/faithfulness."""
    league = {row.method: row for row in masked.league}
    assert 1.5 < league["relevance"].forwards.value < 3  # a forward and a cheap backward pass
    for method in ("relevance", "attention"):
        rows = {row.check: row for row in masked.checks if row.method == method}
        assert len(rows) == 5
        (road,) = [
            row for row in rows.values() if row.value and row.value.value == pytest.approx(league[method].road.value)
        ]
        margins = [league[method].road.value - league[name].road.value for name in BASELINES]
        assert road.margin.value <= min(margins) + 1e-6  # of the hardest baseline
        assert league[method].roc_auc.value in [pytest.approx(row.value.value) for row in rows.values() if row.value]
    assert list(states(report(masked)).values()) == ["inconclusive"]  # of six images


def test_every_method_and_baseline_is_in_the_table(masked):
    rows = {row.method: row for row in masked.league}
    assert rows.keys() == {"relevance", "attention", *BASELINES}
    scores = [row.road.value for row in masked.league]
    assert scores == sorted(scores, reverse=True)
    for name in ("relevance", "attention"):
        assert not rows[name].baseline
        for metric in ("localisation/tiny-vit/pointing", "counterfactual/tiny-vit/size",
                       "counterfactual/tiny-vit/turned"):  # fmt: skip
            assert masked.metric(f"{metric}/{name}").n == 6
    for name in BASELINES:
        assert rows[name].baseline
    assert (masked.composite_sets, masked.composites) == ((), ())  # masks are known
    assert masked.metric("agreement/tiny-vit/relevance/attention").n == 6
    assert masked.metric(f"counterfactual/tiny-vit/size_searched/{SEARCH}").n == 6
    assert masked.metric("faithfulness/tiny-vit/relevance_gain/relevance").unit == "logits"
    assert [row.score for row in masked.on_object[::2]] == ["roc_auc", "mass", "pointing"]


def test_other_replacements_are_measured_beside_the_first(record):
    league = {row.method: row for row in record.league}
    found = {row.substrate for row in record.substrates}
    assert found >= {"blur", "mean", "absent"}
    (imputed,) = found - {"blur", "mean", "absent"}
    for substrate, column in (("blur", "gap"), (imputed, "road")):
        for method in (*METHODS, *BASELINES):
            metric = record.metric(f"substrates/vit-digits/{substrate}/{method}")
            assert metric.value == pytest.approx(getattr(league[method], column).value, abs=1e-6)
    assert len(record.rankings) == 6
    assert all(row.margin.n == IMAGES for row in record.checks if row.margin)
    (power,) = record.power  # no masks, so no localisation
    assert (power.check, power.detectable.n) == ("road", IMAGES)
    assert record.metric("detectable/vit-digits/road") == power.detectable
    for row in [row for row in record.stability if row.disturbance == OVERALL]:
        assert record.metric(f"stability/vit-digits/jumped/{OVERALL}/{row.method}") == row.jumped


def test_composites_are_made_where_masks_are_not_known(record):
    model = load("vit-digits")
    rows = {row.kind: row for row in record.composite_sets}
    assert [(row.kind, row.composites, row.maps, row.refused, row.labels) for row in rows.values()] == [
        ("mosaic-2", 3, 12, "", "labels"),
        ("embedded", 3, 3, "", "labels"),
    ]
    assert (rows["mosaic-2"].chance, rows["mosaic-2"].guessed) == (0.25, pytest.approx(0.4))
    assert record.metric("composites/vit-digits/mosaic-2/recognised").n == 12
    assert {row.method for row in record.composites} == {*METHODS, *BASELINES}
    arrays = record.composite_maps["mosaic-2-vit-digits"]
    images = torch.from_numpy(arrays.images[:1]).float() / 255
    targets = [model.classes.index(name) for name in arrays.targets]
    for target, own in zip(targets, arrays.maps[0], strict=True):
        found = explain(model, images, targets=torch.tensor([target]), method="relevance")[0]
        np.testing.assert_allclose(own, found, atol=0.02 * float(found.abs().max()))  # of its rounded pixels
    mass = record.metric("composites/vit-digits/mosaic-2/mass/relevance")
    assert (mass.n, mass.low <= mass.value <= mass.high) == (12, True)
    (row,) = (row for row in record.composites if (row.kind, row.method) == ("mosaic-2", "relevance"))
    assert row.above == ()  # three composites show nothing
    # the bundled ViT knows digits of one size: in a mosaic it names the classes as often as by guessing
    assert not any(row.seen for row in record.composite_sets)
    assert "judge no map" in words(report(record), "class among others")
    assert "composite_maps_0" in figures(record)
    assert "composites" not in figures(record)


@pytest.mark.slow
def test_pasted_objects_are_seen_and_found(tmp_path):
    line = f"--data digits --limit 40 --method relevance,rollout {FEWER} --composites pasted --composite-count 12"
    found = ran(tmp_path / "out", f"explain vit-digits {line}")
    (row,) = found.composite_sets
    assert (row.seen, row.maps) == (True, 12)
    (relevance,) = (each for each in found.composites if each.method == "relevance")
    assert relevance.mass.value > 0.5
    assert relevance.above == BASELINES
    assert found.stability == ()


@pytest.mark.slow
def test_too_few_images_are_refused_in_the_report(tmp_path, plain):
    found = ran(tmp_path / "out", f"explain vit-digits --data {plain} --limit 3 --method relevance {FEWER}")
    assert all(row.refused.startswith("expected confidently") for row in found.composite_sets)
    assert found.composites == ()
    assert "No 2 x 2 mosaics of vit-digits: expected confidently" in words(report(found), "class among others")
