"""The record of `vitlens explain` holds what the functions compute."""

from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from tests.commands.map_rows import FALLING, STAYING, map_check
from tests.figures.reading import crosses
from vitlens.attribution.explain import explain as attribute
from vitlens.attribution.explain import methods_for
from vitlens.attribution.gradients import logit_gain
from vitlens.attribution.registry import ATTRIBUTIONS, default_methods
from vitlens.cli.main import run as command_line
from vitlens.commands.explain.conclusions import checks_of
from vitlens.commands.explain.measure import chosen_methods, measure
from vitlens.commands.explain.options import ExplainOptions
from vitlens.commands.explain.record import COMPLETENESS, IMAGES, LEAGUE, MAPS, METHODS, LeagueRow
from vitlens.commands.explain.report.maps import map_figures
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read
from vitlens.commands.shared.maps.judged import judged_maps
from vitlens.commands.shared.maps.rows import MapCheck
from vitlens.data.digits import digits
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.files import read_run
from vitlens.models.loading import load
from vitlens.models.saved import save
from vitlens.records import Record

RUN = RunOptions(device="cpu", limit=5, batch_size=3, quiet=True)


def run(models: list[Path | str], out: Path, *, seed: int = 0, **changes: object) -> Record:
    options = ExplainOptions(tuple(map(str, models)), run=replace(RUN, out=out, seed=seed), **changes)
    assert measure(options) == out / "report.md"
    return read(read_run(out))


def test_maps_are_the_functions(tiny_vit, tmp_path):
    methods = ("relevance", "gradcam", "smoothgrad", "integrated-gradients")
    record = run([tiny_vit], tmp_path / "out", data="digits", method=methods, target="true", seed=4)
    model, split = load(str(tiny_vit)), digits("test", seed=4).limit(5, seed=4)
    (batch,) = split.batches(5)
    maps = {
        row.method: torch.from_numpy(record.arrays(MAPS, model=model.alias).maps[index])
        for index, row in enumerate(record.rows(METHODS))
    }
    assert list(maps) == list(methods)
    for name in methods:
        expected = attribute(model, batch.images, targets=batch.labels, method=name, seed=4)
        torch.testing.assert_close(maps[name], expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-3)
    error = maps["integrated-gradients"].sum((1, 2)) - logit_gain(model, batch.images, batch.labels)
    metric = record.metric(COMPLETENESS(model=model.alias, method="integrated-gradients"))
    assert (metric.value, metric.n) == (pytest.approx(error.abs().mean().item(), rel=1e-2, abs=1e-5), 5)
    gains = {row.method: row.gain for row in record.rows(METHODS)}
    assert gains.pop("integrated-gradients") > 0
    assert set(gains.values()) == {None}
    assert [row.target for row in record.rows(IMAGES)] == [str(int(label)) for label in batch.labels]


def test_each_model_gets_the_methods_defined_for_it(tiny_vit, tiny_cnn, pictures, tmp_path):
    record = run([tiny_vit, tiny_cnn], tmp_path / "out", images=(str(pictures),), method=("relevance", "gradcam"))
    rows = [(row.model, row.method) for row in record.rows(METHODS)]
    assert rows == [("tiny-vit", "relevance"), ("tiny-vit", "gradcam"), ("tiny-cnn", "gradcam")]
    assert not record.rows(LEAGUE)
    assert sorted(path.name for path in (tmp_path / "out" / "figures").iterdir()) == [
        "explain_tiny-cnn.png",
        "explain_tiny-vit.png",
    ]


@pytest.fixture
def bars(monkeypatch):
    """Bars of the maps and of other substrates by description: their totals, and what was done."""
    shown: dict[str, tuple[int, list[int]]] = {}

    @contextmanager
    def recorded(what, total, *, unit="images", quiet=False):
        shown[what] = total, []
        yield shown[what][1].append

    for module in ("measure", "measure.evidence"):
        monkeypatch.setattr(f"vitlens.commands.explain.{module}.progress", recorded)
    return shown


def test_progress_counts_passes_up_to_its_total(tiny_vit, tmp_path, bars):
    run([tiny_vit], tmp_path / "out", data="digits", method=("attention", "occlusion"))
    ((total, done),) = bars.values()
    assert sum(done) == total
    assert max(done) > 10 * min(done)  # occlusion is slower, and says so


def test_progress_of_other_substrates_reaches_its_total(tiny_vit, tmp_path, bars):
    checks = {"verify": True, "counterfactuals": False, "composites": ("none",), "stability": False}
    others = {"other_substrates": ("mean", "black")}
    run([tiny_vit], tmp_path / "out", data="digits", method=("saliency",), **checks, **others)
    total, done = bars["Checking on other substrates"]
    assert sum(done) == total == 2 * 5


def test_the_default_methods_and_all_of_them(tiny_vit, tiny_cnn):
    vit, cnn = load(str(tiny_vit)), load(str(tiny_cnn))
    assert chosen_methods([vit], ()) == [default_methods()]
    assert chosen_methods([cnn], ()) == [("gradcam", "integrated-gradients", "occlusion")]
    assert chosen_methods([vit, cnn], ("all",)) == [tuple(ATTRIBUTIONS), methods_for(cnn)]


def test_constant_maps_are_reported_and_not_drawn(tmp_path):
    model = load("vit-digits")
    model.module.head.weight.data.zero_()  # no pixel changes a logit
    save(model, tmp_path / "blind" / "model.safetensors")
    record = run([tmp_path / "blind"], tmp_path / "out", data="digits", method=("relevance", "saliency"))
    assert [(row.constant, row.maps) for row in record.rows(METHODS)] == [(5, 5), (5, 5)]
    assert not list((tmp_path / "out").glob("figures/*"))


@pytest.mark.parametrize(
    ("target", "message"), [("10", "from 0 to 9, found 10"), ("cat", "no class 'cat'"), ("true", "labelled images")]
)
def test_targets_that_cannot_be(tiny_vit, pictures, tmp_path, target, message):
    with pytest.raises(InputError, match=message):
        run([tiny_vit], tmp_path / "out", images=(str(pictures),), target=target)
    assert not (tmp_path / "out").exists()


def test_methods_that_cannot_be(tiny_vit, tiny_cnn, pictures, tmp_path):
    for error, models, method, message in (
        (UnsupportedError, [tiny_cnn], ("rollout",), r"tiny-cnn \(cnn\) has, found 'rollout'; it has gradcam"),
        (UnsupportedError, [tiny_cnn], ("gradcam", "rollout"), "found 'rollout'"),
        (UnsupportedError, [tiny_vit, tiny_cnn], ("relevance",), "tiny-cnn .* found 'relevance'"),
        (UnknownNameError, [tiny_vit], ("gradcm",), "did you mean 'gradcam'"),
    ):
        with pytest.raises(error, match=message):
            run(models, tmp_path / "out", images=(str(pictures),), method=method)
        assert not (tmp_path / "out").exists()


def league_row(check: MapCheck) -> LeagueRow:
    numbers = {field.name: 0.5 for field in fields(LeagueRow)}
    said = {"baseline": False, "by_stage": None, "faults": "", "flagged": False, "verdict": ""}
    return LeagueRow(**{**numbers, **said, "model": check.model, "method": check.method, "check": check})


@pytest.mark.parametrize(
    ("digits", "method", "said"), [(True, "best,gradcam", True), (True, "gradcam", False), (False, "best", False)]
)
def test_a_lead_of_best_is_called_optimistic_on_the_data_sets_it_was_chosen_on(
    tiny_vit, pictures, tmp_path, digits, method, said
):
    data = ["--data", "digits", "--limit", "2"] if digits else ["--images", str(pictures)]
    checks = ["--verify", "--no-counterfactuals", "--composites=none", "--other-substrates=none", "--no-stability"]
    line = ["explain", str(tiny_vit), *data, *checks, "--method", method, "--device", "cpu", "--quiet"]
    assert command_line([*line, "--out", str(tmp_path / "out")]) == 0
    written = (tmp_path / "out" / "report.md").read_text()
    assert ("chosen while looking at images of Digits in scenes" in written) == said
    assert ("a lead of best" in written) == said


def test_many_methods_are_divided_among_sheets_and_failed_ones_crossed_out(tiny_vit, tmp_path):
    """Every other method was made to fail the randomisation check."""
    names = ("rollout", "attention", "relevance", "gradient-rollout", "gradcam", "saliency", "eigencam", "legrad")
    record = run([tiny_vit], tmp_path / "out", data="digits", method=names)
    (alias,) = record.aliases
    checks = [map_check(alias, name, cascade=(FALLING, STAYING)[index % 2]) for index, name in enumerate(names)]
    record._tables[LEAGUE.name] = tuple(map(league_row, checks))
    failed = {each.check.method for each in judged_maps(checks_of(record, alias)) if each.state == "fail"}
    assert failed == set(names[1::2])
    figures = list(map_figures(record, alias))
    assert [figure.name for figure in figures] == ["explain_1", "explain_2"]
    panels = figures[0].draw().axes[:-1]
    images = len(record.arrays(MAPS, model=alias).images)
    shown = record.rows(METHODS)[: len(panels) // images - 1]
    assert 4 <= len(shown) <= 7
    assert [bool(crosses(axes)) for axes in panels] == [False, *(row.method in failed for row in shown)] * images


def test_the_packages_own_maps_are_kept_and_said_to_be_its(tiny_vit, tmp_path):
    record = run([tiny_vit], tmp_path / "out", data="digits", method=("gradcam", "eigencam"), engine="grad-cam")
    rows = record.rows(METHODS)
    assert [(row.title, row.signed) for row in rows] == [
        ("GradCAM (grad-cam package)", False),
        ("EigenCAM (grad-cam package)", False),
    ]
    assert {row.source for row in rows} == {"grad-cam package, ReLU and min-max scaled"}
    assert {row.map for row in rows} == {"32x32"}
    maps = record.arrays(MAPS, model="tiny-vit").maps[0]
    assert (maps.min(), maps.max()) == (0, pytest.approx(1, abs=1e-5))


def test_the_package_has_class_activation_maps_alone(tiny_vit, tmp_path):
    assert chosen_methods([load(str(tiny_vit))], (), engine="grad-cam") == [("gradcam",)]
    with pytest.raises(UnsupportedError, match=r"engine grad-cam has \(gradcam, .*ablationcam\), found 'relevance'"):
        run([tiny_vit], tmp_path / "out", data="digits", method=("relevance",), engine="grad-cam")
    assert not (tmp_path / "out").exists()


def test_all_images_given_are_drawn_or_said(tiny_vit, pictures, tmp_path, monkeypatch, capsys):
    line = ["explain", str(tiny_vit), "--images", str(pictures), "--device", "cpu", "--method", "rollout"]
    monkeypatch.setattr("vitlens.commands.explain.report.maps.EACH", 2)
    assert command_line([*line, "--out", str(tmp_path / "all")]) == 0
    assert {path.stem for path in (tmp_path / "all" / "figures").glob("*.png")} == {"explain_1", "explain_2"}
    assert "of the 3 images" not in capsys.readouterr().err
    monkeypatch.setattr("vitlens.commands.explain.measure.DRAWN", 1)
    assert command_line([*line, "--out", str(tmp_path / "one")]) == 0
    assert "1 of the 3 images" in capsys.readouterr().err
