"""The record of `vitlens explain` holds what the functions compute, and its figures show it."""

from dataclasses import replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

import vitlens
from tests.kit.axes import crosses, texts
from tests.kit.commands import figures, ran, report, said_first, written_digits
from tests.kit.first_page import clear_effects, judged, states
from tests.kit.making import CLASSES, digits, save, untrained
from tests.kit.map_rows import FALLING, STAYING, checks
from tests.kit.saving import no_figures
from tests.kit.select import index_by, select, select_one, values_of
from vitlens import Refinement, explain, load
from vitlens.attribution.registry import ATTRIBUTIONS, attribution
from vitlens.commands.explain.record import OVERALL, SEARCH, ExplainRecord

FIVE = "--data digits --limit 5 --batch-size 3"
PATCHES = tuple(
    name for name, entry in ATTRIBUTIONS.items() if entry.resolution == "patch" and name != "best"
)
NAMES = ("relevance", "gradcam", "saliency")  # to choose from
COUNT = 20
IMAGES = 6
BASELINES = ("random", "centre")
USUAL = ("relevance", "rollout", "best", "gradcam", "integrated-gradients", "occlusion")


def test_maps_are_the_functions(tiny_vit, tmp_path):
    methods = ("relevance", "gradcam", "smoothgrad", "integrated-gradients")
    out = tmp_path / "out"
    record = ran(
        out, f"explain {tiny_vit} {FIVE} --method {','.join(methods)} --target true --seed 4"
    )
    model = load(str(tiny_vit))
    split = digits("test", seed=4).limit(5, seed=4)
    (batch,) = split.batches(5)
    maps = dict(
        zip(methods, map(torch.from_numpy, record.maps[model.alias].maps.values()), strict=True)
    )
    assert values_of(record.methods, "method") == list(methods)
    for row in record.methods:
        expected = explain(model, batch.images, targets=batch.labels, method=row.method, seed=4)
        torch.testing.assert_close(
            maps[row.method], expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-3
        )
        assert row.map == "x".join(map(str, expected.shape[1:]))
        assert (row.gain is None) == (row.method != "integrated-gradients")
    assert values_of(record.shown, "target") == [str(int(label)) for label in batch.labels]
    with torch.no_grad():
        gain = (model(batch.images) - model(torch.zeros_like(batch.images)))[
            torch.arange(5), batch.labels
        ]
    error = maps["integrated-gradients"].sum((1, 2)) - gain
    metric = record.metric(f"completeness/{model.alias}/integrated-gradients")
    assert (metric.value, metric.n) == (
        pytest.approx(error.abs().mean().item(), rel=1e-2, abs=1e-5),
        5,
    )


def as_functions(
    record: ExplainRecord, place: Path, source: object, **more: object
) -> tuple[str, ...]:
    """Check that stored maps are those of the functions, and return the methods of the model."""
    model = load(str(place))
    rows = select(record.methods, model=model.alias)
    for row, stored in zip(rows, record.maps[model.alias].maps.values(), strict=True):
        expected = explain(model, vitlens.images(source, model), method=row.method, **more).numpy()
        # a ReLU near 0 is active in only one of the two
        tolerance = 1e-3 if attribution(row.method).gradients else 1e-4
        np.testing.assert_allclose(
            stored, expected, atol=tolerance * np.abs(expected).max(), err_msg=row.method
        )
    return tuple(row.method for row in rows)


def test_every_method_is_the_function_of_its_name(golden, tiny_vit, tiny_cnn, pictures):
    """Also inside quick passes, which the command makes."""
    every = golden("explain by every method").record
    assert as_functions(every, tiny_vit, pictures, targets=3) == tuple(ATTRIBUTIONS)
    few = as_functions(golden("explain").record, tiny_cnn, digits("test").limit(3))
    assert few == ("gradcam", "integrated-gradients", "occlusion")


@pytest.mark.slow
def test_every_method_of_a_cnn_is_the_function_of_its_name(tiny_cnn, pictures, tmp_path):
    record = ran(
        tmp_path / "out", f"explain {tiny_cnn} --images {pictures} --method all --target 3"
    )
    assert {"scorecam", "ablationcam", "rise", "kernel-shap"} < {
        *as_functions(record, tiny_cnn, pictures, targets=3)
    }


def test_each_model_gets_the_methods_defined_for_it_and_nothing_is_judged(golden):
    record = golden("explain").record
    names = ("relevance", "gradcam", "integrated-gradients", "occlusion")
    rows = values_of(record.methods, "model", "method")
    assert rows == [
        *(("tiny-vit", name) for name in names),
        *(("tiny-cnn", name) for name in names[1:]),
    ]
    assert not record.checks
    document = report(record)
    assert values_of(judged(document), "state", "effect") == [("not tested", None)] * 2
    assert not clear_effects(document)
    assert "--verify" in document.first.unknown[0].text
    assert "**relevance** is not defined for tiny-cnn" in said_first(document)
    assert figures(record) >= {"explain", "explain_more"}


def test_images_too_few_to_show_any_difference_of_removal_scores_are_said(golden):
    record = golden("explain verified").record
    power = select_one(record.power, check="road")
    undecided = replace(record, power=(replace(power, detectable=None),))
    seen = values_of(report(replace(record, power=(power,))).first.unknown, "text")
    unseen = values_of(report(undecided).first.unknown, "text")
    (changed,) = set(unseen) - set(seen)
    assert len(unseen) == len(seen)
    assert f"with {record.images} images" in changed
    assert "below" not in changed


def test_a_lead_of_best_is_called_optimistic_on_the_data_sets_it_was_chosen_on(golden):
    without = golden("explain verified").record
    record = replace(
        without, methods=(without.methods[0], replace(without.methods[1], method="best"))
    )
    data = replace(record.config.data, title="Other images")
    elsewhere = replace(record, config=replace(record.config, data=data))
    for judged_record, warned in ((record, True), (without, False), (elsewhere, False)):
        title = judged_record.config.data.title
        assert (
            title in "\n".join(values_of(report(judged_record).first.unknown, "text"))
        ) == warned


def test_many_methods_are_divided_among_sheets_and_failed_ones_crossed_out(golden):
    """Every other method was made to fail the randomisation check."""
    record = golden("explain by every method").record
    record = replace(record, methods=record.methods[:8])
    names = values_of(record.methods, "method")
    rows = [
        checks("tiny-vit", name, cascade=(FALLING, STAYING)[at % 2])
        for at, name in enumerate(names)
    ]
    data = replace(record.config.data, images=20)  # enough for a verdict
    record = replace(record, config=replace(record.config, data=data))
    document = report(replace(record, checks=tuple(chain.from_iterable(rows))))
    sheets = [figure for figure in document.figures if figure.name.startswith("explain")]
    assert values_of(sheets, "name") == ["explain", "explain_more"]
    panels = [figure.draw().axes[:-1] for figure in sheets]
    crossed_out = 0
    for sheet in panels:
        crossed_out += sum(bool(crosses(axes)) for axes in sheet[: len(sheet) // 3])
    assert crossed_out == len(names) // 2


def test_an_outline_is_explained_only_if_masks_are_known(golden):
    record = golden("explain by every method").record
    ((alias, arrays),) = record.maps.items()
    for masks in (np.ones_like(arrays.images[:, 0], bool), None):
        maps = {alias: replace(arrays, masks=masks)}
        caption = report(replace(record, maps=maps)).first.picture.caption
        assert ("Outline" in caption) == (masks is not None)


def test_a_target_that_is_not_predicted_is_named_whole(golden):
    record = golden("explain by every method").record
    rows = [
        replace(row, target="teapot", target_probability=0.1, prediction="p" * 200, probability=0.5)
        for row in record.shown
    ]
    names = texts(report(replace(record, shown=tuple(rows))).first.picture.draw())
    assert len([name for name in names if "teapot (10 %)" in name]) >= len(rows)


def test_images_that_are_asked_for_are_drawn_whatever_the_sample(tiny_vit, pictures, tmp_path):
    for name in ("0.png", "2.png"):
        line = f"explain {tiny_vit} --images {pictures} --limit 1 --show {name} --method rollout"
        assert [Path(row.image).name for row in ran(tmp_path / name, line).shown] == [name]


@pytest.mark.parametrize(
    ("method", "line", "refinement", "size"),
    [
        (
            "gradcam",
            "--refine affinity --refine-layers 1 --refine-steps 4",
            Refinement("affinity", layers=(1,), steps=4),
            "4x4",
        ),
        # whose sum is no longer the method's
        (
            "integrated-gradients",
            "--views 3",
            Refinement(views=3),
            "32x32",
        ),
        ("gradcam", "--times rollout", Refinement(times="rollout"), "4x4"),
        ("gradcam", "--upsample image", Refinement(upsample="image"), "32x32"),
        (
            "relevance",
            "--refine affinity --views 2 --times gradcam",
            Refinement("affinity", times="gradcam", views=2),
            "8x8",
        ),
    ],
)
def test_refinements_as_typed(tiny_vit, tmp_path, method, line, refinement, size):
    record = ran(
        tmp_path / "out",
        f"explain {tiny_vit} --data digits --limit 2 --method {method} --target 3 {line}",
    )
    (row,), model = record.methods, load(str(tiny_vit))
    assert (row.map, row.signed) == (size, refinement.times is None)
    assert row.title == f"{ATTRIBUTIONS[method].title}, {refinement.words}"
    assert (row.gain, row.completeness) == (None, None)
    batch = next(digits("test").limit(2).batches(2)).images
    expected = explain(model, batch, targets=3, method=method, refinement=refinement).numpy()
    (stored,) = record.maps[model.alias].maps.values()
    np.testing.assert_allclose(stored, expected, atol=1e-4 * np.abs(expected).max(), rtol=1e-3)


@pytest.mark.parametrize(
    ("line", "of_vit"),
    [
        ("", USUAL),
        ("--refine affinity", ("relevance", "rollout", "gradcam", "occlusion")),
        ("--times gradcam", tuple(name for name in USUAL if name != "gradcam")),
        pytest.param("--method all --refine affinity", PATCHES, marks=pytest.mark.slow),
    ],
)
def test_the_methods_that_are_taken_where_none_is_named(line, of_vit, tiny_vit, tiny_cnn, tmp_path):
    models = f"{tiny_vit} {'' if line else tiny_cnn}"
    record = ran(tmp_path / "out", f"explain {models} --data digits --limit 1 {line}")
    assert tuple(values_of(select(record.methods, model="tiny-vit"), "method")) == of_vit
    of_cnn = values_of(select(record.methods, model="tiny-cnn"), "method")
    assert of_cnn == ([] if line else ["gradcam", "integrated-gradients", "occlusion"])


@pytest.mark.slow
def test_checks_are_of_the_refined_maps(tiny_vit, tmp_path):
    """A verified run removes patches in the order of the refined map."""
    line = (
        f"explain {tiny_vit} --data digits --limit 5 --method gradcam --verify "
        "--no-counterfactuals --no-stability"
    )
    line += " --other-substrates none"
    plain = ran(tmp_path / "plain", line)
    refined = ran(tmp_path / "refined", f"{line} --refine affinity --views 2")
    rows = [index_by(plain.league, "method"), index_by(refined.league, "method")]
    assert rows[0]["gradcam"].gap != rows[1]["gradcam"].gap
    assert rows[0]["random"].gap == rows[1]["random"].gap
    assert rows[1]["gradcam"].forwards.value > 2 * rows[0]["gradcam"].forwards.value


def test_a_choice_has_the_numbers_of_the_function_and_only_the_chosen_method_is_drawn(
    golden, sharp_vit
):
    chosen = golden("explain by a chosen method").record
    expected = vitlens.choose_method(
        load(str(sharp_vit)), digits("test").limit(COUNT), methods=NAMES
    )
    (row,) = chosen.chosen
    assert (row.method, row.runner_up, row.confirmation) == (
        expected.method,
        expected.runner_up,
        expected.confirmation,
    )
    assert (row.candidates, row.checks, row.reason) == (NAMES, expected.checks, "")
    assert (
        (row.selection, row.report)
        == (len(expected.selection), len(expected.report))
        == (COUNT // 2, COUNT // 2)
    )
    certainty = chosen.metric("choice/sharp-vit/certainty")
    assert (certainty.value, certainty.n) == (
        pytest.approx(expected.certainty, abs=0.01),
        COUNT // 2,
    )
    assert values_of(chosen.choice_scores, "method") == values_of(expected.scores, "method")
    for scored in expected.scores:
        for half, by_check in (("selection", scored.selection), ("report", scored.report)):
            for check, estimate in by_check.items():
                metric = chosen.metric(f"choice/sharp-vit/{half}/{check}/{scored.method}")
                assert (metric.value, metric.n) == (
                    pytest.approx(estimate.value, abs=1e-3),
                    estimate.n,
                )
    margins = {
        (margin.against, margin.check): margin.difference for margin in chosen.choice_margins
    }
    assert set(margins) == set(values_of(expected.margins, "against", "check"))
    assert {*BASELINES, expected.runner_up} <= {against for against, _ in margins}
    assert values_of(chosen.methods, "method") == [row.method]
    (check,) = chosen.checks
    of_choice = {
        name: value
        for name, value in chosen.metrics.items()
        if name.startswith("choice/sharp-vit/report")
    }
    (faithfulness,) = {
        name.split("/")[3] for name, value in of_choice.items() if value == check.value
    }
    assert check.method == row.method
    assert check.margin.value == min(
        expected.margin(name, faithfulness).value for name in BASELINES
    )
    document = report(chosen)
    assert row.method in document.title
    claim = select_one(document.claims, question="choice")
    assert claim.effect.value == pytest.approx(
        expected.margin(row.runner_up, "score").value, abs=1e-3
    )
    assert list(states(document).values()) != ["pass"]  # the weights were not randomised
    (section,) = (section for section in document.sections if "chosen" in section.title)
    assert len(section.tables[0].rows) == len(NAMES) + len(BASELINES)
    assert values_of(section.figures, "name") == ["choice"]


def test_with_few_images_the_default_is_drawn_and_said_not_to_be_chosen_by_evidence(
    tmp_path, sharp_vit
):
    record = ran(tmp_path / "out", f"explain {sharp_vit} --data digits --auto --limit 5")
    (row,), (method,) = record.chosen, record.methods
    assert row.method in row.candidates
    assert (row.certainty, row.confirmation, record.choice_scores, record.checks) == (
        None,
        None,
        (),
        (),
    )
    assert "at least 20" in row.reason
    (answer,) = report(record).first.answer
    assert "not chosen by evidence" in answer.text
    assert method.title == ATTRIBUTIONS[row.method].title


def test_a_method_of_a_library_is_a_row_next_to_ours(tiny_vit, pictures, tmp_path):
    pytest.importorskip("captum")
    line = f"explain {tiny_vit} --images {pictures} --target 3"
    record = ran(tmp_path / "out", f"{line} --method captum:integrated-gradients,relevance")
    assert as_functions(record, tiny_vit, pictures, targets=3) == (
        "captum:integrated-gradients",
        "relevance",
    )
    of_captum, ours = record.methods
    assert of_captum.source == f"captum {version('captum')}"
    assert of_captum.completeness is not None
    assert ours.source != of_captum.source
    assert not any("patented" in text for text in values_of(report(record).first.unknown, "text"))


@pytest.mark.slow
def test_all_of_a_library_is_what_the_model_supports_and_is_checked_like_ours(sharp_vit, tmp_path):
    pytest.importorskip("autolrp")
    line = f"explain {sharp_vit} --data digits --limit 3 --method autolrp:all,rollout --verify"
    record = ran(tmp_path / "out", f"{line} --no-counterfactuals --composites none")
    names = tuple(values_of(record.methods, "method"))
    assert names == (*vitlens.list_methods("autolrp:*").names, "rollout")
    checked = set(values_of(record.checks, "method"))
    assert checked >= {*names}
    assert any("patented" in text for text in values_of(report(record).first.unknown, "text"))


def test_verify_checks_the_chosen_method_of_each_model(tmp_path, sharp_vit):
    cnn = tmp_path / "tiny-cnn"
    save(
        untrained("resnet20", classes=CLASSES, seed=1, image_size=(16, 16)),
        cnn / "model.safetensors",
    )
    line = (
        f"explain {sharp_vit} {cnn} --data digits --auto --limit 20 --method saliency,gradcam "
        "--verify"
    )
    brief = "--composites none --other-substrates none --no-stability --no-counterfactuals"
    record = ran(tmp_path / "out", f"{line} {brief}")
    assert set(values_of(report(record).claims, "question")) >= {"choice", "maps"}
    for row in record.chosen:
        checked = values_of(select(record.checks, model=row.model), "method", "check")
        assert checked == [
            (row.method, check) for check in ("imputed", "blur", "weights", "object")
        ]
        for metric in ("faithfulness/{}/gap/{}", "randomisation/{}/{}"):
            assert metric.format(row.model, row.method) in record.metrics
        assert f"checks_{row.model}" in figures(record)
    assert values_of(record.chosen, "model") == ["sharp-vit", "tiny-cnn"]
    of_cnn = values_of(select(record.stages, model="tiny-cnn"), "stage")
    assert (of_cnn[0], of_cnn[-1], len(of_cnn)) == ("head", "embedding", 6)


def test_the_checks_of_a_method_are_its_rows_of_the_table(golden):
    """On six images with masks and labels; they are computed by hand in
    tests/public/faithfulness."""
    masked = golden("explain verified").record
    league = index_by(masked.league, "method")
    assert 1.5 < league["relevance"].forwards.value < 3  # a forward and a cheap backward pass
    for method in ("relevance", "attention"):
        rows = {row.check: row for row in masked.checks if row.method == method}
        assert len(rows) == 5
        expected_road = pytest.approx(league[method].road.value)
        (road,) = [row for row in rows.values() if row.value and row.value.value == expected_road]
        margins = [league[method].road.value - league[name].road.value for name in BASELINES]
        assert road.margin.value <= min(margins) + 1e-6  # of the hardest baseline
        assert league[method].roc_auc.value in [
            pytest.approx(row.value.value) for row in rows.values() if row.value
        ]
    assert list(states(report(masked)).values()) == ["inconclusive"]  # of six images
    scores = values_of(masked.league, "road.value")
    assert scores == sorted(scores, reverse=True)
    assert {row.method: row.baseline for row in masked.league} == {
        "relevance": False,
        "attention": False,
        **dict.fromkeys(BASELINES, True),
    }
    for name in (
        "localisation/tiny-vit/pointing/relevance",
        "counterfactual/tiny-vit/size/attention",
        "counterfactual/tiny-vit/turned/relevance",
        "agreement/tiny-vit/relevance/attention",
        f"counterfactual/tiny-vit/size_searched/{SEARCH}",
    ):
        assert masked.metric(name).n == 6
    assert (masked.composite_sets, masked.composites) == ((), ())  # masks are known
    assert masked.metric("faithfulness/tiny-vit/relevance_gain/relevance").unit == "logits"
    assert values_of(masked.on_object[::2], "score") == ["roc_auc", "mass", "pointing"]


def test_other_replacements_are_measured_too_and_composites_are_made_without_masks(
    tiny_vit, tmp_path
):
    """On an .npz of digits and labels; composites of the trained ViT, which is sure of its
    digits."""
    split = digits("test").limit(IMAGES)
    pixels = split.source.read(torch.arange(IMAGES)).permute(0, 2, 3, 1).numpy()
    np.savez(tmp_path / "digits.npz", images=pixels, labels=split.labels.numpy())
    data = f"--data {tmp_path / 'digits.npz'} --verify --no-counterfactuals"
    with no_figures():  # as those of "explain verified", which contracts draw
        record = ran(
            tmp_path / "removed",
            f"explain {tiny_vit} {data} --method relevance,rollout --composites none",
        )
    methods = ("relevance", "rollout", *BASELINES)
    league = index_by(record.league, "method")
    substrates = set(values_of(record.substrates, "substrate"))
    assert substrates >= {"blur", "mean", "absent"}
    (imputed,) = substrates - {"blur", "mean", "absent"}
    for substrate, column in (("blur", "gap"), (imputed, "road")):
        for method in methods:
            metric = record.metric(f"substrates/tiny-vit/{substrate}/{method}")
            assert metric.value == pytest.approx(getattr(league[method], column).value, abs=1e-6)
    assert len(record.rankings) == 6
    assert all(row.margin.n == IMAGES for row in record.checks if row.margin)
    (power,) = record.power  # no masks, so no localisation
    assert (power.check, power.detectable.n) == ("road", IMAGES)
    assert record.metric("detectable/tiny-vit/road") == power.detectable
    for row in select(record.stability, disturbance=OVERALL):
        assert record.metric(f"stability/tiny-vit/jumped/{OVERALL}/{row.method}") == row.jumped
    few = "--method relevance --composite-count 3 --other-substrates none --no-stability"
    model = load("vit-digits")
    record = ran(tmp_path / "composed", f"explain vit-digits {data} {few}")
    rows = index_by(record.composite_sets, "kind")
    assert values_of(rows.values(), "kind", "composites", "maps", "refused", "labels") == [
        ("mosaic-2", 3, 12, "", "labels"),
        ("embedded", 3, 3, "", "labels"),
    ]
    assert (rows["mosaic-2"].chance, rows["mosaic-2"].guessed) == (0.25, pytest.approx(0.4))
    assert record.metric("composites/vit-digits/mosaic-2/recognised").n == 12
    assert set(values_of(record.composites, "method")) == {"relevance", *BASELINES}
    arrays = record.composite_maps["mosaic-2-vit-digits"]
    images = torch.from_numpy(arrays.images[:1]).float() / 255
    targets = [model.classes.index(name) for name in arrays.targets]
    for target, heat_map in zip(targets, arrays.maps[0], strict=True):
        substrates = explain(model, images, targets=torch.tensor([target]), method="relevance")[0]
        difference = np.abs(heat_map - substrates.numpy()).mean()
        assert difference < 0.005 * float(substrates.abs().max())  # of its rounded pixels
    mass = record.metric("composites/vit-digits/mosaic-2/mass/relevance")
    assert (mass.n, mass.low <= mass.value <= mass.high) == (12, True)
    row = select_one(record.composites, kind="mosaic-2", method="relevance")
    assert row.above == ()  # three composites show nothing
    # the bundled ViT knows digits of one size: in a mosaic it names the classes as often as by
    # guessing
    assert not any(row.seen for row in record.composite_sets)
    recognised = replace(
        record, composite_sets=tuple(replace(row, seen=True) for row in record.composite_sets)
    )

    def sentences_of(written):
        sentences = chain.from_iterable(section.sentences for section in report(written).sections)
        return set(values_of(sentences, "text"))

    unseen = sentences_of(record)
    seen = sentences_of(recognised)
    # another sentence for each kind that shows nothing
    assert len(unseen - seen) == len(record.composite_sets)
    assert "composite_maps_0" in figures(record)
    assert "composites" not in figures(record)


def test_composites_are_of_predictions_if_the_model_does_not_know_the_classes(tmp_path):
    data = written_digits(
        tmp_path / "data", 8, lambda number, label: f"class {label % 2}/{number}.png"
    )
    line = f"explain vit-digits --data {data} --method saliency --verify --composite-count 3"
    with no_figures():
        record = ran(
            tmp_path / "out",
            f"{line} --no-counterfactuals --no-stability --other-substrates none",
        )
    assert record.composite_sets
    assert set(values_of(record.composite_sets, "labels")) == {"predictions"}


def test_the_seed_draws_the_intervals_of_the_league(tiny_vit, tmp_path):
    images = written_digits(tmp_path / "images", 24, lambda number, _: f"{number}.png")
    line = f"explain {tiny_vit} --images {images} --method saliency --verify --composites none"
    rows = []
    for seed in (0, 1):
        with no_figures():
            record = ran(
                tmp_path / str(seed),
                f"{line} --no-counterfactuals --no-stability --other-substrates none --seed {seed}",
            )
        rows.append(select_one(record.league, method="saliency"))
    first, second = (row.gap for row in rows)
    assert first.low is not None
    assert first.value == pytest.approx(second.value, abs=1e-6)
    assert (first.low, first.high) != (second.low, second.high)


@pytest.mark.slow
def test_pasted_objects_are_seen_and_found(tmp_path):
    line = (
        "explain vit-digits --data digits --limit 40 --method relevance,rollout --composites pasted"
    )
    more = "--composite-count 12 --verify --no-counterfactuals --no-stability"
    record = ran(tmp_path / "out", f"{line} {more}")
    (row,) = record.composite_sets
    assert (row.seen, row.maps) == (True, 12)
    relevance = select_one(record.composites, method="relevance")
    assert relevance.mass.low > 0.3
    assert relevance.above == BASELINES
    assert record.stability == ()
