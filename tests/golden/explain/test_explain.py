"""The record of `vitlens explain` holds what the functions compute, and its figures show it."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from tests.kit.axes import crosses
from tests.kit.explained import explained, report
from tests.kit.first_page import clear_effects, judged
from tests.kit.making import digits
from tests.kit.map_rows import FALLING, STAYING, checks
from tests.kit.tiny import images
from vitlens import Refinement, load
from vitlens import explain as attribute
from vitlens.attribution.explain import methods_for
from vitlens.attribution.gradients import logit_gain
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.cli.main import run as command_line
from vitlens.commands.explain.measure import quickly
from vitlens.lens import quick_passes

FIVE = "--data digits --limit 5 --batch-size 3"
MODELS = {name: load(name) for name in ("vit-digits", "cnn-digits")}
# these take seconds, and by default are tried with the CNN alone; the ViT's quick layers are met by 20 other methods
BY_HAND = [("vit-digits", method) for method in ("kernel-shap", "scorecam", "ablationcam", "occlusion")]
CASES = [
    pytest.param(name, method, marks=pytest.mark.slow if (name, method) in BY_HAND else ())
    for name, model in MODELS.items()
    for method in methods_for(model)
]


@pytest.mark.parametrize(
    ("methods", "typed", "refinement"),
    [
        (("relevance", "gradcam", "smoothgrad", "integrated-gradients"), "", Refinement()),
        (("relevance", "rollout"), "--refine affinity --views 2 --times gradcam",
         Refinement("affinity", times="gradcam", views=2)),
    ],
)  # fmt: skip
def test_maps_are_the_functions(tiny_vit, tmp_path, methods, typed, refinement):
    line = f"{FIVE} --method {','.join(methods)} --target true --seed 4 {typed}"
    record, tolerance = explained(tmp_path / "out", line, tiny_vit), 1e-4 if typed else 1e-5
    model, split = load(str(tiny_vit)), digits("test", seed=4).limit(5, seed=4)
    (batch,) = split.batches(5)
    maps = dict(zip(methods, map(torch.from_numpy, record.maps[model.alias].maps.values()), strict=True))
    assert [row.method for row in record.methods] == list(methods)
    for row in record.methods:
        given = {"method": row.method, "refinement": refinement, "seed": 4}
        expected = attribute(model, batch.images, targets=batch.labels, **given)
        torch.testing.assert_close(maps[row.method], expected, atol=tolerance * float(expected.abs().max()), rtol=1e-3)
        assert row.map == "x".join(map(str, expected.shape[1:]))
        assert (row.gain is None) == (row.method != "integrated-gradients")
    assert [row.target for row in record.shown] == [str(int(label)) for label in batch.labels]
    if "integrated-gradients" in maps:
        error = maps["integrated-gradients"].sum((1, 2)) - logit_gain(model, batch.images, batch.labels)
        metric = record.metric(f"completeness/{model.alias}/integrated-gradients")
        assert (metric.value, metric.n) == (pytest.approx(error.abs().mean().item(), rel=1e-2, abs=1e-5), 5)


def test_each_model_gets_the_methods_defined_for_it_and_nothing_is_judged(tiny_vit, tiny_cnn, pictures, tmp_path):
    record = explained(tmp_path / "out", f"--images {pictures} --method relevance,gradcam", tiny_vit, tiny_cnn)
    rows = [(row.model, row.method) for row in record.methods]
    assert rows == [("tiny-vit", "relevance"), ("tiny-vit", "gradcam"), ("tiny-cnn", "gradcam")]
    assert not record.checks
    document = report(record)
    assert [(each.state, each.effect) for each in judged(document)] == [("not tested", None)] * 2
    assert not clear_effects(document)
    assert "--verify" in document.first.unknown[0].text
    assert any("**relevance** is not defined for tiny-cnn" in each.text for each in document.first.unknown)
    assert {path.name for path in (tmp_path / "out" / "figures").iterdir()} == {"explain.png", "explain_more.png"}


def test_progress_reaches_its_total(tiny_vit, tmp_path, monkeypatch):
    bars: dict[str, tuple[int, list[int]]] = {}  # by description: totals, and what was done

    @contextmanager
    def recorded(what, total, *, unit="images", quiet=False):
        bars[what] = total, []
        yield bars[what][1].append

    for module in ("explain.measure", "shared.maps.measure"):
        monkeypatch.setattr(f"vitlens.commands.{module}.progress", recorded)
    line = f"{FIVE} --method attention,occlusion --verify --no-counterfactuals --no-stability --composites none"
    explained(tmp_path / "out", f"{line} --other-substrates mean,black", tiny_vit)
    total, done = bars["Explaining tiny-vit"]
    assert sum(done) == total
    assert max(done) > 10 * min(done)  # occlusion is slower, and says so
    total, done = bars["Checking on other substrates"]
    assert sum(done) == total == 4 * 5  # two more replacements, and the maps of other images with the two that judge


def test_a_lead_of_best_is_called_optimistic_on_the_data_sets_it_was_chosen_on(golden):
    without = golden("explain verified").record
    record = replace(without, methods=(without.methods[0], replace(without.methods[1], method="best")))
    data = replace(record.config.data, title="Other images")
    elsewhere = replace(record, config=replace(record.config, data=data))
    for own, said in ((record, True), (without, False), (elsewhere, False)):
        words = " ".join(each.text for each in report(own).first.unknown)
        assert ("chosen while looking at" in words) == said


def test_many_methods_are_divided_among_sheets_and_failed_ones_crossed_out(tiny_vit, tmp_path):
    """Every other method was made to fail the randomisation check."""
    names = ("rollout", "attention", "relevance", "gradient-rollout", "gradcam", "saliency", "eigencam", "legrad")
    record = explained(tmp_path / "out", f"{FIVE} --method {','.join(names)}", tiny_vit)
    rows = [checks("tiny-vit", name, cascade=(FALLING, STAYING)[at % 2]) for at, name in enumerate(names)]
    record = replace(record, checks=tuple(row for own in rows for row in own))
    document = report(record)
    figures = [figure for figure in document.figures if figure.name.startswith("explain")]
    assert [figure.name for figure in figures] == ["explain", "explain_more"]
    crossed = 0
    for figure in figures:
        panels = figure.draw().axes[:-1]
        row = panels[: len(panels) // 5]
        assert 5 <= len(row) <= 8
        crossed += sum(bool(crosses(axes)) for axes in row)
    assert crossed == len(names) // 2


def test_images_given_are_drawn_or_said(tiny_vit, pictures, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vitlens.commands.explain.report.EACH", 2)
    line = ["explain", str(tiny_vit), "--images", str(pictures), "--device", "cpu", "--method", "rollout", "--out"]
    assert command_line([*line, str(tmp_path / "all")]) == 0
    assert {path.stem for path in (tmp_path / "all" / "figures").glob("*.png")} == {"explain", "explain_more"}
    assert "of the 3 images" not in capsys.readouterr().err
    for name in ("0.png", "2.png"):  # whatever the sample
        record = explained(tmp_path / name, f"--images {pictures} --limit 1 --show {name} --method rollout", tiny_vit)
        assert [row.image.rpartition("/")[2] for row in record.shown] == [name]
    monkeypatch.setattr("vitlens.commands.explain.measure.DRAWN", 1)
    assert command_line([*line, str(tmp_path / "one")]) == 0
    assert "1 of the 3 images" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "method"), CASES)
def test_the_same_maps_inside_quick_passes(name, method, monkeypatch):
    model, batch, targets = MODELS[name], images((32, 32), batch=3), torch.tensor([1, 2, 3])
    options = {
        "rise": {"masks": 16},
        "kernel-shap": {"coalitions": 3 * 64},
        "smoothgrad": {"samples": 3},
        "integrated-gradients": {"steps": 4},
    }.get(method, {})
    plain = attribute(model, batch, targets=targets, method=method, **options)
    monkeypatch.setattr(quick_passes, "quick_batch_size", lambda _model: 2)
    with quickly(model, method):
        found = attribute(model, batch, targets=targets, method=method, **options)
    scale = float(plain.abs().max())
    tolerance = 1e-3 if ATTRIBUTIONS[method].gradients else 1e-4  # a ReLU near 0 is active in only one of the two
    torch.testing.assert_close(found, plain, atol=tolerance * scale, rtol=0)
