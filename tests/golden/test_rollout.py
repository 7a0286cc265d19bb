"""`vitlens rollout`: its numbers are those of the functions, and its report claims no more than they show."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import vitlens
from tests.kit.commands import ran, report
from tests.kit.contradictions import contradictions
from tests.kit.making import digits, save
from tests.kit.planted_maps import bits, enlarged, rollout
from vitlens import load
from vitlens.cli.main import run
from vitlens.commands.rollout.record import RolloutRecord
from vitlens.commands.rollout.report import REPORT
from vitlens.uncertainty import Estimate

DIGITS = "--data digits --limit 12 --batch-size 5"


def test_numbers_are_those_of_the_functions(tiny_vit, golden):
    record = golden("rollout").record
    split, model = digits("test").limit(12), load(str(tiny_vit))
    images = next(split.batches(12)).images
    found = {fusion: vitlens.rollout(model, images, fusion=fusion) for fusion in ("max", "min")}
    torch.testing.assert_close(torch.from_numpy(record.maps.maps[:, 0]), found["max"], atol=1e-6, rtol=0)
    metric, row = record.metric("localisation/tiny-vit/pointing/rollout-max"), record.methods[0]
    assert (metric.n, row.pointing, row.name) == (12, metric, "rollout (max)")
    assert metric.value == pytest.approx(record.maps.hits[:, 0].mean(), abs=1 / 12)  # ties count in part
    assert row.difference.value == pytest.approx(100 * (row.pointing.value - row.of_baseline.value))
    assert row.of_baseline.value >= split.masks.float().mean().item() - 1e-6  # of a uniform map, one of them
    assert row.information.value == pytest.approx(bits(found["max"].numpy()).mean(), rel=1e-4)
    mass = found["max"].flatten(1).sum(1).mean().item()
    assert record.metric("rollout/tiny-vit/patch_mass/max").value == pytest.approx(mass, rel=1e-5)
    (pair,) = record.pairs
    ranked = [stats.spearmanr(*map(torch.flatten, both)).statistic for both in zip(found["max"], found["min"])]
    assert pair.agreement.value == pytest.approx(sum(ranked) / len(ranked), rel=1e-5)


def test_the_maximum_of_a_map_points_at_the_object_or_not(golden):
    record, masks = golden("rollout").record, digits("test").limit(12).masks.numpy()
    for at in range(len(record.methods)):
        large = enlarged(record.maps.maps[:, at], (32, 32)).reshape(12, -1)
        highest = np.isclose(large, large.max(1, keepdims=True), rtol=1e-6)  # of all that tie, more than half
        hits = (highest * masks.reshape(12, -1)).sum(1) / highest.sum(1) > 0.5
        assert record.maps.hits[:, at].tolist() == hits.tolist()


def test_every_method_is_the_function_of_its_name(tiny_vit, golden):
    record = golden("every method").record  # of the true class, with --alpha 0.4 and --layer 0
    split, model = digits("test").limit(5), load(str(tiny_vit))
    batch = next(split.batches(5))
    maps = {row.maps: torch.from_numpy(record.maps.maps[:, at]) for at, row in enumerate(record.methods)}
    expected = {
        "rollout-mean": vitlens.rollout(model, batch.images, alpha=0.4),
        "relevance": vitlens.relevance(model, batch.images, targets=batch.labels),
        "attention": vitlens.attention(model, batch.images)[0][:, :, 0, 1:].mean(1).unflatten(1, (4, 4)),
    }
    for name, own in expected.items():
        torch.testing.assert_close(maps[name], own, atol=1e-6, rtol=1e-4)
    own = vitlens.explain(model, batch.images, targets=batch.labels, method="gradient-rollout")
    assert np.corrcoef(maps["gradient-rollout"].flatten(), own.flatten())[0, 1] > 0.9  # of another share of identity
    assert [name for name in maps if "rollout-" not in name] == ["relevance", "gradient-rollout", "attention", "flow"]
    assert [row.target for row in record.shown] == [str(int(label)) for label in split.labels]


def test_own_images_are_shown_and_have_no_pointing_game(tiny_vit, pictures, tmp_path, capsys):
    broken = tmp_path / "broken.jpg"
    broken.write_text("no image")
    line = f"rollout {tiny_vit} --device cpu --images {pictures} {broken}"
    assert run(f"{line} --out {tmp_path / 'all'}".split()) == 0
    assert "of the 3 images" not in capsys.readouterr().err
    found = vitlens.read(tmp_path / "all")
    assert not [name for name in found.metrics if name.startswith("localisation")]
    assert [Path(row.image).name for row in found.table("shown")] == ["0.png", "1.png", "2.png"]
    usual = ["rollout-mean", "rollout-max", "rollout-min", "relevance"]
    assert [row.maps for row in found.table("methods")] == usual  # none was asked for
    assert "broken.jpg" in found.config.data.skipped[0].file


def test_maps_that_are_zero_everywhere_are_said(tmp_path):
    model = load("vit-digits")
    model.module.head.weight.data.zero_()  # no weight of attention changes a logit
    save(model, tmp_path / "blind" / "model.safetensors")
    record = ran(tmp_path / "out", f"rollout {tmp_path / 'blind'} {DIGITS} --fusion mean")
    assert {row.name: row.zero for row in record.methods} == {"rollout (mean)": 0, "relevance": 12}
    area = digits("test").limit(12).masks.float().mean().item()
    hits = record.metric("localisation/blind/pointing/relevance").value
    assert hits == pytest.approx(area, abs=1e-6)  # all points tie: no better than a random one
    (said,) = report(record).first.answer
    assert "12 of 12 maps of **relevance** are zero" in said.text
    (figure,) = [each for each in report(record).figures if each.name == "maps"]
    panels = figure.draw().axes
    assert not any(line.get_marker() in ("o", "X") for axes in panels[2::3] for line in axes.lines)


def said(record: RolloutRecord) -> dict[str, str]:
    claims = list(REPORT.claims(record))
    assert not list(contradictions(claims))
    return {claim.question: claim.says for claim in claims if claim.is_shown}


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
