"""`vitlens rollout`: its numbers are those of the functions, and its report claims no more than they show."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy import stats

import vitlens
from tests.kit.commands import ran, report
from tests.kit.making import digits, save
from tests.kit.planted_maps import on_highest, rollout, said
from vitlens import load
from vitlens.uncertainty import Estimate


def test_numbers_are_those_of_the_functions(tiny_vit, golden):
    """Information and other methods: tests/public/attention."""
    record = golden("rollout").record
    split, model = digits("test").limit(12), load(str(tiny_vit))
    found = {fusion: vitlens.rollout(model, split, fusion=fusion) for fusion in ("max", "min")}
    torch.testing.assert_close(torch.from_numpy(record.maps.maps[:, 0]), found["max"], atol=1e-6, rtol=0)
    for at, row in enumerate(record.methods):
        shares = on_highest(record.maps.maps[:, at], split.masks.numpy())
        assert record.maps.hits[:, at].tolist() == (shares > 0.5).tolist()
        metric = record.metric(f"localisation/tiny-vit/pointing/{row.maps}")
        assert (metric, metric.n, metric.value) == (row.pointing, 12, pytest.approx(shares.mean()))
        assert row.difference.value == pytest.approx(100 * (row.pointing.value - row.of_baseline.value))
        assert row.of_baseline.value >= split.masks.float().mean().item() - 1e-6  # of a uniform map, one of them
    assert [row.name for row in record.methods] == ["rollout (max)", "rollout (min)"]
    mass = found["max"].flatten(1).sum(1).mean().item()
    assert record.metric("rollout/tiny-vit/patch_mass/max").value == pytest.approx(mass, rel=1e-5)
    (pair,) = record.pairs
    ranked = [stats.spearmanr(*map(torch.flatten, both)).statistic for both in zip(found["max"], found["min"])]
    assert pair.agreement.value == pytest.approx(sum(ranked) / len(ranked), rel=1e-5)


def test_own_images_are_shown_and_have_no_pointing_game(tiny_vit, pictures, tmp_path):
    broken = tmp_path / "broken.jpg"
    broken.write_text("no image")
    found = ran(tmp_path / "all", f"rollout {tiny_vit} --images {pictures} {broken}")
    assert not [name for name in found.metrics if name.startswith("localisation")]
    assert [Path(row.image).name for row in found.shown] == ["0.png", "1.png", "2.png"]
    usual = ["rollout-mean", "rollout-max", "rollout-min", "relevance"]
    assert [row.maps for row in found.methods] == usual  # none was asked for
    assert "broken.jpg" in found.config.data.skipped[0].file


def test_maps_that_are_zero_everywhere_are_said(tmp_path):
    model = load("vit-digits")
    model.module.head.weight.data.zero_()  # no weight of attention changes a logit
    save(model, tmp_path / "blind" / "model.safetensors")
    record = ran(tmp_path / "out", f"rollout {tmp_path / 'blind'} --data digits --limit 12 --fusion mean")
    assert {row.name: row.zero for row in record.methods} == {"rollout (mean)": 0, "relevance": 12}
    area = digits("test").limit(12).masks.float().mean().item()
    hits = record.metric("localisation/blind/pointing/relevance").value
    assert hits == pytest.approx(area, abs=1e-6)  # all points tie: no better than a random one
    (told,) = report(record).first.answer
    assert "12 of 12 maps of **relevance** are zero" in told.text
    (figure,) = [each for each in report(record).figures if each.name == "maps"]
    panels = figure.draw().axes
    assert not any(line.get_marker() in ("o", "X") for axes in panels[2::3] for line in axes.lines)


def test_what_was_planted_is_found_and_nothing_beyond_its_limit():
    found = said(rollout())
    assert found.keys() == {"pointing game", "information", "fusion of heads"}
    assert "1 of 3" in found["pointing game"]
    assert "**relevance**" in found["pointing game"]
    flat, not_flat = (said(rollout(information=Estimate(v, v - 0.1, v + 0.1, 40, "bits"))) for v in (0.2, 0.45))
    assert "**mean-map** is nearly uniform" in flat["information"]
    assert "nearly uniform" not in not_flat["information"]
    fixed, not_fixed = (said(rollout(by_place=Estimate(v, v - 0.03, v + 0.03, 40))) for v in (0.95, 0.77))
    assert "**mean-map**" in fixed["fixed places"]
    assert "fixed places" not in not_fixed
    missing = said(rollout(difference=Estimate(-40.0, -50.0, -30.0, 40, "points")))
    assert "**mean-map**" in missing["maps that miss the object"]
    none = rollout()
    assert "None of 2" in said(replace(none, methods=none.methods[:2]))["pointing game"]  # gains of 0 and 1 points


def test_of_few_images_nothing_is_claimed():
    few = rollout(images=19)
    assert not said(few)
    assert not {"Do the maps find the object?", "Do the maps agree?"} & {part.title for part in report(few).sections}
