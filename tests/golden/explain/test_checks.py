"""Checks and choices of methods in a record: numbers are the functions' own, and the report says what they mean."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitlens
from tests.kit.explained import BRIEF, explained, report
from tests.kit.first_page import states
from tests.kit.making import digits
from vitlens import Model, explain, load
from vitlens.analysis.faithfulness.defaults import BASELINES, OTHER_STEPS
from vitlens.analysis.faithfulness.league import Settings, league
from vitlens.analysis.faithfulness.localisation import cell_mass, confident_images, mosaics, roc_auc
from vitlens.analysis.faithfulness.removal import faithfulness
from vitlens.attribution.choice import DRAWS, FAITHFULNESS, REPLACED, MethodChoice, candidates_for
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.explain.checks import composite_names
from vitlens.commands.explain.record import OVERALL, SEARCH, ExplainRecord
from vitlens.commands.shared.maps.record import IMPUTED, ON_OBJECT, SHIFTS, WEIGHTS
from vitlens.uncertainty import power_of

IMAGES = 8
METHODS = ("relevance", "rollout")
NAMES = ("relevance", "gradcam", "saliency")
COUNT = 20
FEWER = "--verify --no-counterfactuals --no-stability"
LINE = "--data digits --auto"


@pytest.fixture(scope="module")
def masked(golden) -> ExplainRecord:
    """An untrained ViT on images with masks and labels."""
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
    line = f"--data {plain} --method {','.join(METHODS)} --verify --no-counterfactuals --composite-count 3"
    return explained(tmp_path_factory.mktemp("record") / "out", line, "vit-digits")


@pytest.fixture(scope="module")
def given() -> tuple[Model, torch.Tensor, torch.Tensor]:
    """The same model with the images and its predictions."""
    model, split = load("vit-digits"), digits("test").limit(IMAGES)
    (batch,) = split.batches(IMAGES)
    with torch.no_grad():
        return model, batch.images, model(batch.images).argmax(-1)


def words(record: ExplainRecord, question: str) -> str:
    """The sentences of a section."""
    return " ".join(text.text for each in report(record).sections if question in each.title for text in each.sentences)


def test_numbers_are_the_functions_own(masked, tiny_vit):
    model, split = load(str(tiny_vit)), digits("test").limit(6)
    (batch,) = split.batches(6)
    maps = explain(model, batch.images, targets=batch.labels, method="relevance")
    auc = masked.metric("localisation/tiny-vit/roc_auc/relevance")
    assert (auc.value, auc.n) == (pytest.approx(roc_auc(maps, split.masks).mean().item(), abs=1e-6), 6)
    assert auc.low <= auc.value <= auc.high
    functions = {"relevance": lambda s, i, t: explain(s, i, targets=t, method="relevance")}
    given = model, batch.images, batch.labels, functions
    checks, random, _ = league(*given, masks=split.masks, settings=Settings())
    for column, value in (("gap", checks.values["gap"]), ("deletion", checks.values["deletion"])):
        metric = masked.metric(f"faithfulness/tiny-vit/{column}/relevance")
        assert metric.value == pytest.approx(value.mean().item(), abs=1e-6)
    rows = {row.check: row for row in masked.checks if row.method == "relevance"}
    assert set(rows) == {IMPUTED, "mean", WEIGHTS, SHIFTS, ON_OBJECT}
    assert rows[IMPUTED].value.value == pytest.approx(checks.values["road"].mean().item(), abs=1e-6)
    margins = [rows[IMPUTED].margin.value, (checks.values["road"] - random.values["road"]).mean().item()]
    assert margins[0] <= margins[1] + 1e-6  # of the hardest baseline
    assert rows[ON_OBJECT].value.value == pytest.approx(auc.value, abs=1e-6)
    assert 1.5 < masked.metric("cost/tiny-vit/forwards/relevance").value < 3  # a forward and a cheap backward pass


def test_every_method_and_baseline_is_in_the_table(masked):
    rows = {row.method: row for row in masked.league}
    assert rows.keys() == {"relevance", "attention", *BASELINES}
    scores = [row.road.value for row in masked.league]
    assert scores == sorted(scores, reverse=True)
    for name in ("relevance", "attention"):
        assert not rows[name].baseline
        stages = [row for row in masked.stages if row.method == name]
        assert stages[0].stage == "head"
        assert stages[-1].similarity.value == pytest.approx(rows[name].randomisation.value, abs=1e-6)
        means = np.mean([row.similarity.value for row in stages])
        assert rows[name].cascade.value == pytest.approx(means, abs=1e-6)
        for metric in ("faithfulness/tiny-vit/road", "randomisation/tiny-vit", "localisation/tiny-vit/pointing",
                       "counterfactual/tiny-vit/size", "counterfactual/tiny-vit/turned"):  # fmt: skip
            assert masked.metric(f"{metric}/{name}").n == 6
    for name in BASELINES:
        assert rows[name].baseline
        assert (rows[name].randomisation, rows[name].forwards) == (None, None)
        assert f"randomisation/tiny-vit/{name}" not in masked.metrics
    assert masked.metric("agreement/tiny-vit/relevance/attention").n == 6
    assert masked.metric(f"counterfactual/tiny-vit/size_searched/{SEARCH}").n == 6
    assert masked.metric("faithfulness/tiny-vit/relevance_gain/relevance").unit == "logits"
    arrays = masked.curves["tiny-vit"]
    assert arrays.deletion.shape == (4, len(arrays.shares))
    assert [row.score for row in masked.on_object[::2]] == ["roc_auc", "mass", "pointing"]
    assert list(states(report(masked)).values()) == ["inconclusive"]  # of six images


def test_substrates_are_the_functions_own_and_maps_of_other_images_are_a_baseline(record, given):
    model, images, targets = given
    assert {row.substrate for row in record.substrates} == {"blur", "mean", "absent", IMPUTED}
    maps = explain(model, images, targets=targets, method="rollout")
    (own,) = faithfulness(model, images, targets, [maps], substrate="absent", steps=OTHER_STEPS)
    gap = record.metric("substrates/vit-digits/absent/rollout")
    assert gap.value == pytest.approx(float(own.gaps.mean()), abs=1e-4)
    for substrate, column in (("blur", "gap"), (IMPUTED, "road")):
        for method in (*METHODS, *BASELINES):
            expected = record.metric(f"faithfulness/vit-digits/{column}/{method}").value
            found = record.metric(f"substrates/vit-digits/{substrate}/{method}").value
            assert found == pytest.approx(expected, abs=1e-6)
    assert len(record.rankings) == 6
    assert all(row.tau.value in (-1.0, 1.0) and row.methods == 2 for row in record.rankings)  # one pair of methods
    found = {row.check: row for row in record.checks if row.method == "rollout"}
    assert {name for name in found if name in ("mean", IMPUTED)} == {"mean", IMPUTED}
    assert all(row.margin.n == IMAGES for row in found.values() if row.margin)


def test_stability_is_recorded_by_disturbance(record):
    rows = {(row.method, row.disturbance): row for row in record.stability}
    assert {disturbance for _, disturbance in rows} == {OVERALL, "shift-quarter", "shift-half", "shift-one", "flip"}
    for method in METHODS:
        assert record.metric(f"stability/vit-digits/jumped/{OVERALL}/{method}") == rows[method, OVERALL].jumped
        (check,) = (row for row in record.checks if (row.method, row.check) == (method, SHIFTS))
        assert (check.value, check.state) == (rows[method, OVERALL].jumped, "inconclusive")  # of eight images


def test_power_is_that_of_the_paired_differences(record, given):
    model, images, targets = given
    (row,) = record.power  # no masks, so no localisation
    maps = [explain(model, images, targets=targets, method=name) for name in METHODS]
    first, second = faithfulness(model, images, targets, maps, substrate="imputed")
    expected = power_of((first.gaps - second.gaps).numpy())
    assert (row.check, row.detectable.n) == ("road", IMAGES)
    assert record.metric("detectable/vit-digits/road").value == pytest.approx(expected.detectable, rel=1e-3)


def test_composites_are_made_where_masks_are_not_known(record, given):
    model, images, _ = given
    rows = {row.kind: row for row in record.composite_sets}
    assert [(row.kind, row.composites, row.maps, row.refused, row.labels) for row in rows.values()] == [
        ("mosaic-2", 3, 12, "", "labels"),
        ("embedded", 3, 3, "", "labels"),
    ]
    assert (rows["mosaic-2"].chance, rows["mosaic-2"].guessed) == (0.25, pytest.approx(0.4))
    assert record.metric("composites/vit-digits/mosaic-2/recognised").n == 12
    assert {row.method for row in record.composites} == {*METHODS, *BASELINES}
    labels = digits("test").limit(IMAGES).labels
    with torch.no_grad():
        usable = confident_images(model(images), labels)
    made = mosaics(images[usable], labels[usable], side=2, count=3, seed=0)
    maps = explain(model, made.images[made.which], targets=made.targets, method="relevance")
    mass = record.metric("composites/vit-digits/mosaic-2/mass/relevance")
    assert mass.value == pytest.approx(float(cell_mass(maps, made.masks).mean()), abs=1e-5)
    assert (mass.n, mass.low <= mass.value <= mass.high) == (12, True)
    (row,) = (row for row in record.composites if (row.kind, row.method) == ("mosaic-2", "relevance"))
    assert row.above == ()  # three composites show nothing
    arrays = record.composite_maps["mosaic-2-vit-digits"]
    np.testing.assert_allclose(arrays.maps[0], maps[:4].numpy(), atol=1e-5)
    assert arrays.targets.tolist() == [model.classes[int(target)] for target in made.targets[:4]]
    # the bundled ViT knows digits of one size: in a mosaic it names the classes as often as by guessing
    assert not any(row.seen for row in record.composite_sets)
    assert "judge no map" in words(record, "class among others")
    names = {path.name for path in (record.folder / "figures").iterdir()}
    assert "composite_maps_0.png" in names
    assert "composites.png" not in names


@pytest.mark.slow
def test_pasted_objects_are_seen_and_found(tmp_path):
    line = f"--data digits --limit 40 --method relevance,rollout {FEWER} --composites pasted --composite-count 12"
    found = explained(tmp_path / "out", line, "vit-digits")
    (row,) = found.composite_sets
    assert (row.seen, row.maps) == (True, 12)
    (relevance,) = (each for each in found.composites if each.method == "relevance")
    assert relevance.mass.value > 0.5
    assert relevance.above == BASELINES
    assert found.stability == ()


@pytest.mark.slow
def test_too_few_images_are_refused_in_the_report(tmp_path, plain):
    found = explained(tmp_path / "out", f"--data {plain} --limit 3 --method relevance {FEWER}", "vit-digits")
    assert all(row.refused.startswith("expected confidently") for row in found.composite_sets)
    assert found.composites == ()
    assert "No 2 x 2 mosaics of vit-digits: expected confidently" in words(found, "class among others")


@pytest.mark.slow
def test_predictions_stand_in_for_missing_labels(tmp_path, plain):
    (tmp_path / "unlabelled").mkdir()
    for index, pixels in enumerate(np.load(plain)["images"]):
        Image.fromarray(pixels).save(tmp_path / "unlabelled" / f"{index}.png")
    line = f"--images {tmp_path / 'unlabelled'} --method relevance {FEWER} --composites embedded"
    found = explained(tmp_path / "out", f"{line} --other-substrates none", "vit-digits")
    (row,) = found.composite_sets
    assert (row.labels, row.refused) == ("predictions", "")


def test_kinds_by_choice():
    assert composite_names(("auto",), has_masks=True) == ()
    assert composite_names(("auto",), has_masks=False) == ("mosaic-2", "embedded")
    assert composite_names(("none",), has_masks=False) == ()
    assert composite_names(("pasted", "mosaic-3"), has_masks=True) == ("mosaic-3", "pasted")


def test_maps_that_are_broken_are_not_randomised_and_images_without_an_object_not_scored(tiny_vit):
    model, split = load(str(tiny_vit)), digits("test").limit(4)
    (batch,) = split.batches(4)
    functions = {"broken": lambda _s, i, _t: i[:, 0] / 0, "even": lambda _s, i, _t: torch.ones(len(i), 8, 8)}
    masks = split.masks.clone()
    masks[0] = False
    given = (model, batch.images, batch.labels, functions)
    settings = Settings(steps=2, counterfactuals=False)
    broken, even, *_ = league(*given, masks=masks, settings=settings)
    assert (broken.faults.not_finite.all(), broken.randomisation) == (True, None)
    assert (even.faults.words, even.randomisation.judged().lack) == ("4 of 4 constant", "uniform maps")
    assert even.scores["roc_auc"].tolist() == [0.5] * 3
    assert league(*given, settings=settings)[0].scores == {}


@pytest.fixture(scope="module")
def chosen(golden) -> ExplainRecord:
    return golden("explain by a chosen method").record


@pytest.fixture(scope="module")
def expected(sharp_vit: Path) -> MethodChoice:
    return vitlens.choose_method(load(str(sharp_vit)), digits("test").limit(COUNT), methods=NAMES)


def test_rows_and_metrics_of_a_choice_are_those_of_the_function(chosen, expected):
    (row,) = chosen.chosen
    assert (row.method, row.runner_up, row.confirmation) == (expected.method, expected.runner_up, expected.confirmation)
    assert (row.candidates, row.checks, row.draws, row.reason) == (NAMES, expected.checks, DRAWS, "")
    assert (row.selection, row.report) == (len(expected.selection), len(expected.report)) == (COUNT // 2, COUNT // 2)
    certainty = chosen.metric("choice/sharp-vit/certainty")
    assert (certainty.value, certainty.n) == (pytest.approx(expected.certainty, abs=0.01), COUNT // 2)
    assert [each.method for each in chosen.choice_scores] == [each.method for each in expected.scores]
    for scored in expected.scores:
        for half, known in (("selection", scored.selection), ("report", scored.report)):
            for check, estimate in known.items():
                metric = chosen.metric(f"choice/sharp-vit/{half}/{check}/{scored.method}")
                assert (metric.value, metric.n) == (pytest.approx(estimate.value, abs=1e-3), estimate.n)
    margins = {(each.against, each.check): each.difference for each in chosen.choice_margins}
    assert set(margins) == {(each.against, each.check) for each in expected.margins}
    assert {*BASELINES, expected.runner_up} <= {against for against, _ in margins}


def test_the_chosen_method_alone_is_drawn_and_its_check_stands_in_the_table_of_checks(chosen, expected):
    (row,) = chosen.chosen
    assert [each.method for each in chosen.methods] == [row.method]
    (check,) = chosen.checks
    value = chosen.metric(f"choice/sharp-vit/report/{FAITHFULNESS}/{row.method}")
    assert (check.method, check.check, check.value) == (row.method, REPLACED, value)
    assert check.margin.value == min(expected.margin(name, FAITHFULNESS).value for name in BASELINES)
    document = report(chosen)
    assert row.method in document.title
    assert list(states(document).values()) != ["pass"]  # the weights were not randomised
    (section,) = (each for each in document.sections if "chosen" in each.title)
    assert len(section.tables[0].rows) == len(NAMES) + len(BASELINES)
    assert [figure.name for figure in section.figures] == ["choice"]


def test_with_few_images_the_default_is_drawn_and_said_not_to_be_chosen_by_evidence(tmp_path, sharp_vit):
    record = explained(tmp_path / "out", f"{LINE} --limit 5 --engine grad-cam", sharp_vit)
    (row,), (method,) = record.chosen, record.methods
    assert row.candidates == candidates_for(load(str(sharp_vit)), engine="grad-cam")
    assert row.method in row.candidates
    assert (row.certainty, row.confirmation, record.choice_scores, record.checks) == (None, None, (), ())
    assert "at least 20" in row.reason
    (answer,) = report(record).first.answer
    assert "not chosen by evidence" in answer.text
    # the package's own maps
    assert (method.title, method.signed) == (f"{ATTRIBUTIONS[row.method].title} (grad-cam package)", False)
    assert (method.source, method.map) == ("grad-cam package, ReLU and min-max scaled", "32x32")
    maps = record.maps["sharp-vit"].maps[0]
    assert (maps.min(), maps.max()) == (0, pytest.approx(1, abs=1e-5))


def test_verify_checks_the_chosen_method_of_each_model(tmp_path, sharp_vit, tiny_cnn):
    line = f"{LINE} --limit 20 --method saliency,gradcam --verify {BRIEF}"
    record = explained(tmp_path / "out", line, sharp_vit, tiny_cnn)
    assert {each.question for each in report(record).claims} >= {"choice", "maps"}
    for row in record.chosen:
        checked = [(each.method, each.check) for each in record.checks if each.model == row.model]
        assert checked == [(row.method, check) for check in (IMPUTED, "blur", WEIGHTS, ON_OBJECT)]
        for metric in ("faithfulness/{}/gap/{}", "randomisation/{}/{}"):
            assert metric.format(row.model, row.method) in record.metrics
        assert (record.folder / "figures" / f"checks_{row.model}.png").is_file()
    assert [row.model for row in record.chosen] == ["sharp-vit", "tiny-cnn"]
