"""The record of `vitlens explain` holds what the functions compute, and its figures show it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import vitlens
from tests.kit.axes import crosses
from tests.kit.commands import figures, ran, report, said_first
from tests.kit.first_page import clear_effects, judged
from tests.kit.making import digits
from tests.kit.map_rows import FALLING, STAYING, checks
from vitlens import Refinement, explain, load
from vitlens.attribution.registry import ATTRIBUTIONS

FIVE = "--data digits --limit 5 --batch-size 3"
PATCHES = tuple(name for name, entry in ATTRIBUTIONS.items() if entry.resolution == "patch" and name != "best")
USUAL = ("relevance", "rollout", "best", "gradcam", "integrated-gradients", "occlusion")


def test_maps_are_the_functions(tiny_vit, tmp_path):
    methods = ("relevance", "gradcam", "smoothgrad", "integrated-gradients")
    out = tmp_path / "out"
    record = ran(out, f"explain {tiny_vit} {FIVE} --method {','.join(methods)} --target true --seed 4")
    model, split = load(str(tiny_vit)), digits("test", seed=4).limit(5, seed=4)
    (batch,) = split.batches(5)
    maps = dict(zip(methods, map(torch.from_numpy, record.maps[model.alias].maps.values()), strict=True))
    assert [row.method for row in record.methods] == list(methods)
    for row in record.methods:
        expected = explain(model, batch.images, targets=batch.labels, method=row.method, seed=4)
        torch.testing.assert_close(maps[row.method], expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-3)
        assert row.map == "x".join(map(str, expected.shape[1:]))
        assert (row.gain is None) == (row.method != "integrated-gradients")
    assert [row.target for row in record.shown] == [str(int(label)) for label in batch.labels]
    with torch.no_grad():
        gain = (model(batch.images) - model(torch.zeros_like(batch.images)))[torch.arange(5), batch.labels]
    error = maps["integrated-gradients"].sum((1, 2)) - gain
    metric = record.metric(f"completeness/{model.alias}/integrated-gradients")
    assert (metric.value, metric.n) == (pytest.approx(error.abs().mean().item(), rel=1e-2, abs=1e-5), 5)


def test_every_method_is_the_function_of_its_name(golden, tiny_vit, tiny_cnn, pictures):
    """Also inside quick passes, which the command makes."""
    tried = set()
    for name, place, given, more in (
        ("explain by every method", tiny_vit, pictures, {"targets": 3}),
        ("explain", tiny_cnn, digits("test").limit(3), {}),
    ):  # fmt: skip
        record, model = golden(name).record, load(str(place))
        rows = [row for row in record.methods if row.model == model.alias]
        for row, found in zip(rows, record.maps[model.alias].maps.values(), strict=True):
            expected = explain(model, vitlens.images(given, model), method=row.method, **more).numpy()
            # a ReLU near 0 is active in only one of the two
            tolerance = 1e-3 if ATTRIBUTIONS[row.method].gradients else 1e-4
            np.testing.assert_allclose(found, expected, atol=tolerance * np.abs(expected).max(), err_msg=row.method)
            tried.add((model.alias, row.method))
    assert tried == {("tiny-vit", name) for name in ATTRIBUTIONS} | {
        ("tiny-cnn", name) for name in ("gradcam", "integrated-gradients", "occlusion")
    }


def test_each_model_gets_the_methods_defined_for_it_and_nothing_is_judged(tiny_vit, tiny_cnn, pictures, tmp_path):
    record = ran(tmp_path / "out", f"explain {tiny_vit} {tiny_cnn} --images {pictures} --method relevance,gradcam")
    rows = [(row.model, row.method) for row in record.methods]
    assert rows == [("tiny-vit", "relevance"), ("tiny-vit", "gradcam"), ("tiny-cnn", "gradcam")]
    assert not record.checks
    document = report(record)
    assert [(each.state, each.effect) for each in judged(document)] == [("not tested", None)] * 2
    assert not clear_effects(document)
    assert "--verify" in document.first.unknown[0].text
    assert "**relevance** is not defined for tiny-cnn" in said_first(document)
    assert figures(record) == {"explain", "explain_more"}


def test_a_lead_of_best_is_called_optimistic_on_the_data_sets_it_was_chosen_on(golden):
    without = golden("explain verified").record
    record = replace(without, methods=(without.methods[0], replace(without.methods[1], method="best")))
    data = replace(record.config.data, title="Other images")
    elsewhere = replace(record, config=replace(record.config, data=data))
    for own, said in ((record, True), (without, False), (elsewhere, False)):
        assert ("chosen while looking at" in said_first(report(own))) == said


def test_many_methods_are_divided_among_sheets_and_failed_ones_crossed_out(tiny_vit, tmp_path):
    """Every other method was made to fail the randomisation check."""
    names = ("rollout", "attention", "relevance", "gradient-rollout", "gradcam", "saliency", "eigencam", "legrad")
    record = ran(tmp_path / "out", f"explain {tiny_vit} --data digits --limit 2 --method {','.join(names)}")
    rows = [checks("tiny-vit", name, cascade=(FALLING, STAYING)[at % 2]) for at, name in enumerate(names)]
    document = report(replace(record, checks=tuple(row for own in rows for row in own)))
    sheets = [figure for figure in document.figures if figure.name.startswith("explain")]
    assert [figure.name for figure in sheets] == ["explain", "explain_more"]
    panels = [figure.draw().axes[:-1] for figure in sheets]
    assert sum(bool(crosses(axes)) for sheet in panels for axes in sheet[: len(sheet) // 2]) == len(names) // 2


def test_images_that_are_asked_for_are_drawn_whatever_the_sample(tiny_vit, pictures, tmp_path):
    for name in ("0.png", "2.png"):
        line = f"explain {tiny_vit} --images {pictures} --limit 1 --show {name} --method rollout"
        assert [Path(row.image).name for row in ran(tmp_path / name, line).shown] == [name]


@pytest.mark.parametrize(
    ("method", "line", "refinement", "size"),
    [
        ("gradcam", "--refine affinity --refine-layers 1 --refine-steps 4",
         Refinement("affinity", layers=(1,), steps=4), "4x4"),
        ("integrated-gradients", "--views 3", Refinement(views=3), "32x32"),  # whose sum is no longer the method's
        ("gradcam", "--times rollout", Refinement(times="rollout"), "4x4"),
        ("gradcam", "--upsample image", Refinement(upsample="image"), "32x32"),
        ("relevance", "--refine affinity --views 2 --times gradcam",
         Refinement("affinity", times="gradcam", views=2), "8x8"),
    ],
)  # fmt: skip
def test_refinements_as_typed(tiny_vit, tmp_path, method, line, refinement, size):
    record = ran(tmp_path / "out", f"explain {tiny_vit} --data digits --limit 2 --method {method} --target 3 {line}")
    (row,), model = record.methods, load(str(tiny_vit))
    assert (row.map, row.signed) == (size, refinement.times is None)
    assert row.title == f"{ATTRIBUTIONS[method].title}, {refinement.words}"
    assert (row.gain, row.completeness) == (None, None)
    batch = next(digits("test").limit(2).batches(2)).images
    expected = explain(model, batch, targets=3, method=method, refinement=refinement).numpy()
    (found,) = record.maps[model.alias].maps.values()
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max(), rtol=1e-3)


@pytest.mark.parametrize(
    ("line", "of_vit"),
    [
        ("", USUAL),
        ("--engine grad-cam", ("gradcam",)),
        ("--refine affinity", ("relevance", "rollout", "gradcam", "occlusion")),
        ("--times gradcam", tuple(name for name in USUAL if name != "gradcam")),
        pytest.param("--method all --refine affinity", PATCHES, marks=pytest.mark.slow),
    ],
)
def test_the_methods_that_are_taken_where_none_is_named(line, of_vit, tiny_vit, tiny_cnn, tmp_path):
    models = f"{tiny_vit} {'' if line else tiny_cnn}"
    record = ran(tmp_path / "out", f"explain {models} --data digits --limit 1 {line}")
    assert tuple(row.method for row in record.methods if row.model == "tiny-vit") == of_vit
    of_cnn = [row.method for row in record.methods if row.model == "tiny-cnn"]
    assert of_cnn == ([] if line else ["gradcam", "integrated-gradients", "occlusion"])


@pytest.mark.slow
def test_checks_are_of_the_refined_maps(tiny_vit, tmp_path):
    """A verified run removes patches in the order of the refined map."""
    line = f"explain {tiny_vit} --data digits --limit 5 --method gradcam --verify --no-counterfactuals --no-stability"
    plain, refined = (
        ran(tmp_path / name, f"{line} --other-substrates none {more}")
        for name, more in (("plain", ""), ("refined", "--refine affinity --views 2"))
    )
    rows = [{row.method: row for row in record.league} for record in (plain, refined)]
    assert rows[0]["gradcam"].gap != rows[1]["gradcam"].gap
    assert rows[0]["random"].gap == rows[1]["random"].gap
    assert rows[1]["gradcam"].forwards.value > 2 * rows[0]["gradcam"].forwards.value
