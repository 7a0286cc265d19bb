"""The record of `vitlens explain` holds what the functions compute, and its figures show it."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from tests.kit.axes import crosses
from tests.kit.explained import BRIEF, explained, report
from tests.kit.first_page import clear_effects, judged, states
from tests.kit.making import digits, save
from tests.kit.map_rows import FALLING, STAYING, checks
from vitlens import explain as attribute
from vitlens import load
from vitlens.attribution.explain import methods_for
from vitlens.attribution.gradients import logit_gain
from vitlens.attribution.registry import ATTRIBUTIONS, default_methods
from vitlens.cli.main import run as command_line
from vitlens.commands.explain.measure import chosen_methods

FIVE = "--data digits --limit 5 --batch-size 3"


def test_maps_are_the_functions(tiny_vit, tmp_path):
    methods = ("relevance", "gradcam", "smoothgrad", "integrated-gradients")
    record = explained(tmp_path / "out", f"{FIVE} --method {','.join(methods)} --target true --seed 4", tiny_vit)
    model, split = load(str(tiny_vit)), digits("test", seed=4).limit(5, seed=4)
    (batch,) = split.batches(5)
    maps = {
        row.method: torch.from_numpy(record.maps[model.alias].maps[index]) for index, row in enumerate(record.methods)
    }
    assert list(maps) == list(methods)
    for name in methods:
        expected = attribute(model, batch.images, targets=batch.labels, method=name, seed=4)
        torch.testing.assert_close(maps[name], expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-3)
    error = maps["integrated-gradients"].sum((1, 2)) - logit_gain(model, batch.images, batch.labels)
    metric = record.metric(f"completeness/{model.alias}/integrated-gradients")
    assert (metric.value, metric.n) == (pytest.approx(error.abs().mean().item(), rel=1e-2, abs=1e-5), 5)
    gains = {row.method: row.gain for row in record.methods}
    assert gains.pop("integrated-gradients") > 0
    assert set(gains.values()) == {None}
    assert [row.target for row in record.shown] == [str(int(label)) for label in batch.labels]


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


@pytest.fixture
def bars(monkeypatch):
    """Bars of the maps and of other substrates by description: their totals, and what was done."""
    shown: dict[str, tuple[int, list[int]]] = {}

    @contextmanager
    def recorded(what, total, *, unit="images", quiet=False):
        shown[what] = total, []
        yield shown[what][1].append

    for module in ("explain.measure", "shared.maps.measure"):
        monkeypatch.setattr(f"vitlens.commands.{module}.progress", recorded)
    return shown


def test_progress_reaches_its_total(tiny_vit, tmp_path, bars):
    explained(tmp_path / "maps", f"{FIVE} --method attention,occlusion", tiny_vit)
    ((total, done),) = bars.values()
    assert sum(done) == total
    assert max(done) > 10 * min(done)  # occlusion is slower, and says so
    line = f"{FIVE} --method saliency --verify --no-counterfactuals --no-stability --composites none"
    explained(tmp_path / "checks", f"{line} --other-substrates mean,black", tiny_vit)
    total, done = bars["Checking on other substrates"]
    assert sum(done) == total == 4 * 5  # two more replacements, and the maps of other images with the two that judge


def test_the_default_methods_and_all_of_them(tiny_vit, tiny_cnn):
    vit, cnn = load(str(tiny_vit)), load(str(tiny_cnn))
    assert chosen_methods([vit], ()) == [default_methods()]
    assert chosen_methods([cnn], ()) == [("gradcam", "integrated-gradients", "occlusion")]
    assert chosen_methods([vit, cnn], ("all",)) == [tuple(ATTRIBUTIONS), methods_for(cnn)]
    assert chosen_methods([vit], (), engine="grad-cam") == [("gradcam",)]


def test_constant_maps_are_reported_and_not_drawn(tmp_path):
    model = load("vit-digits")
    model.module.head.weight.data.zero_()  # no pixel changes a logit
    save(model, tmp_path / "blind" / "model.safetensors")
    line = "--data digits --limit 20 --method relevance,saliency"
    record = explained(tmp_path / "out", line, tmp_path / "blind")
    assert [(row.constant, row.maps) for row in record.methods] == [(20, 20), (20, 20)]
    assert not list((tmp_path / "out").glob("figures/*"))
    document = report(record)
    assert [each.effect.value for each in clear_effects(document)] == [1.0]
    assert sum("uniform or not finite" in each.text for each in document.first.unknown) == 2


def test_a_lead_of_best_is_called_optimistic_on_the_data_sets_it_was_chosen_on(golden, tiny_vit, tmp_path):
    record = explained(tmp_path / "out", f"--data digits --limit 2 --verify {BRIEF} --method best,gradcam", tiny_vit)
    without = replace(record, methods=tuple(row for row in record.methods if row.method != "best"))
    data = replace(record.config.data, title="Other images")
    elsewhere = replace(record, config=replace(record.config, data=data))
    for own, said in ((record, True), (without, False), (elsewhere, False)):
        words = " ".join(each.text for each in report(own).first.unknown)
        assert ("chosen while looking at" in words) == said
    assert list(states(report(record)).values()) == ["inconclusive"]  # of so few images


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


def test_the_packages_own_maps_are_kept_and_said_to_be_its(tiny_vit, tmp_path):
    record = explained(tmp_path / "out", f"{FIVE} --method gradcam,eigencam --engine grad-cam", tiny_vit)
    assert [(row.title, row.signed) for row in record.methods] == [
        ("GradCAM (grad-cam package)", False),
        ("EigenCAM (grad-cam package)", False),
    ]
    assert {row.source for row in record.methods} == {"grad-cam package, ReLU and min-max scaled"}
    assert {row.map for row in record.methods} == {"32x32"}
    maps = record.maps["tiny-vit"].maps[0]
    assert (maps.min(), maps.max()) == (0, pytest.approx(1, abs=1e-5))


def test_all_images_given_are_drawn_or_said(tiny_vit, pictures, tmp_path, monkeypatch, capsys):
    line = ["explain", str(tiny_vit), "--images", str(pictures), "--device", "cpu", "--method", "rollout"]
    monkeypatch.setattr("vitlens.commands.explain.report.EACH", 2)
    assert command_line([*line, "--out", str(tmp_path / "all")]) == 0
    assert {path.stem for path in (tmp_path / "all" / "figures").glob("*.png")} == {"explain", "explain_more"}
    assert "of the 3 images" not in capsys.readouterr().err
    monkeypatch.setattr("vitlens.commands.explain.measure.DRAWN", 1)
    assert command_line([*line, "--out", str(tmp_path / "one")]) == 0
    assert "1 of the 3 images" in capsys.readouterr().err


def test_images_named_are_drawn_whatever_the_sample(tiny_vit, pictures, tmp_path):
    for name in ("0.png", "2.png"):
        line = f"--images {pictures} --limit 1 --show {name} --method rollout"
        record = explained(tmp_path / name, line, tiny_vit)
        assert [row.image.rpartition("/")[2] for row in record.shown] == [name]
