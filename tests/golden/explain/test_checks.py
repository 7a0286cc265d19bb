"""Checks of methods in a record: its tables agree and are judged; composites are made where there are no masks."""

import numpy as np
import pytest
import torch

from tests.kit.commands import figures, ran, report
from tests.kit.first_page import states
from tests.kit.making import digits
from vitlens import explain, load
from vitlens.commands.explain.record import OVERALL, SEARCH, ExplainRecord

BASELINES = ("random", "centre")
METHODS = ("relevance", "rollout")
IMAGES = 6


@pytest.fixture(scope="module")
def masked(golden) -> ExplainRecord:
    """An untrained ViT on six images with masks and labels: relevance and attention."""
    return golden("explain verified").record


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> ExplainRecord:
    """The trained ViT on images without masks: an .npz of digits and labels."""
    split, folder = digits("test").limit(IMAGES), tmp_path_factory.mktemp("record")
    pixels = split.source.read(torch.arange(IMAGES)).permute(0, 2, 3, 1).numpy()
    np.savez(folder / "digits.npz", images=pixels, labels=split.labels.numpy())
    line = f"explain vit-digits --data {folder / 'digits.npz'} --method {','.join(METHODS)} --verify"
    return ran(folder / "out", f"{line} --no-counterfactuals --composite-count 3")


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
    scores = [row.road.value for row in masked.league]
    assert scores == sorted(scores, reverse=True)
    assert {row.method: row.baseline for row in masked.league} == {
        "relevance": False, "attention": False, **dict.fromkeys(BASELINES, True)
    }  # fmt: skip
    for name in ("localisation/tiny-vit/pointing/relevance", "counterfactual/tiny-vit/size/attention",
                 "counterfactual/tiny-vit/turned/relevance", "agreement/tiny-vit/relevance/attention",
                 f"counterfactual/tiny-vit/size_searched/{SEARCH}"):  # fmt: skip
        assert masked.metric(name).n == 6
    assert (masked.composite_sets, masked.composites) == ((), ())  # masks are known
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
    (section,) = (each for each in report(record).sections if "class among others" in each.title)
    assert "judge no map" in " ".join(text.text for text in section.sentences)
    assert "composite_maps_0" in figures(record)
    assert "composites" not in figures(record)


@pytest.mark.slow
def test_pasted_objects_are_seen_and_found(tmp_path):
    line = "explain vit-digits --data digits --limit 40 --method relevance,rollout --composites pasted"
    more = "--composite-count 12 --verify --no-counterfactuals --no-stability"
    found = ran(tmp_path / "out", f"{line} {more}")
    (row,) = found.composite_sets
    assert (row.seen, row.maps) == (True, 12)
    (relevance,) = (each for each in found.composites if each.method == "relevance")
    assert relevance.mass.value > 0.5
    assert relevance.above == BASELINES
    assert found.stability == ()
