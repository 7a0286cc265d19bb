"""A report names a cause of errors only where errors differ and a change fixes them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import vitlens
from tests.kit.axes import shown as panels
from tests.kit.contradictions import contradictions
from tests.kit.planted_answers import answers, compare_record
from tests.kit.planted_failures import at_border, audited, failures_of, low_contrast, model, squares
from tests.kit.planted_methods import planted_methods
from tests.kit.select import index_by, select, select_one, values_of
from vitlens.commands.audit.record import AuditRecord
from vitlens.commands.audit.report import REPORT as AUDIT_REPORT
from vitlens.commands.compare.record import CompareRecord
from vitlens.commands.compare.report import REPORT
from vitlens.report.claims import Claim, first_page_claims, title_of
from vitlens.uncertainty import Estimate

ROWS = CompareRecord.contents().tables
LOSS = Estimate(-1.0, -2.0, 0.0, 400, "points")
RIGHT = answers(np.arange(400) % 10 > 0)
BOTH = compare_record({"vit": RIGHT, "cnn": RIGHT})
CAUSES = ("because", "due to", "caused by")
ALIKE = {"p_holm": 0.2, "p_joint_holm": 0.2}
TESTED = {"size": "enlarged", "off_centre": "moved to the centre"}


def covariate(name="size", area=0.2, **more):
    fields = {
        "p": 1e-6,
        "p_holm": 1e-5,
        "likelihood_ratio": 20.0,
        "p_joint": 1e-5,
        "p_joint_holm": 1e-4,
    } | more
    near = Estimate(area, area - 0.05, area + 0.05, 400, "")
    return ROWS["covariates"]("vit", name, name, near, 40, 0.1, 0.2, **fields)


def change(name="size", mended=30, control=5, **more):
    fields = {
        "gain": Estimate(6.0, 4.0, 8.0, 400, "points"),
        "p": 1e-6,
        "p_change": 1e-6,
        "p_holm": 1e-5,
    } | more
    fields = {"size": 0.1, "control_size": 0.1} | fields
    return ROWS["interventions"](
        "vit", name, TESTED[name], "as large a change", 40, mended, control, 2, 1, **fields
    )


def quarters(name):
    accuracy = {at: Estimate(0.7 + at / 20, 0.6, 1.0, 100) for at in range(1, 5)}
    return [
        ROWS["quarters"]("vit", name, name, at, at / 10, at / 10 + 0.1, accuracy_of_quarter)
        for at, accuracy_of_quarter in accuracy.items()
    ]


def record(*rows, tests=()) -> CompareRecord:
    every = tuple(quarter for row in rows for quarter in quarters(row.covariate))
    return replace(BOTH, covariates=rows, interventions=tests, quarters=every)


def said(compared: CompareRecord) -> Claim:
    document = REPORT(compared)
    claim = select_one(document.claims, question="why it fails")
    assert not list(contradictions([claim]))
    assert (claim.evidence == "intervened") == any(word in claim.says for word in CAUSES)
    unknown = [line.text for line in document.first.unknown if "why" in line.text]
    assert bool(unknown) == (claim.evidence == "observed")
    return claim


def test_a_cause_is_named_where_both_agree_and_drawn_beside_its_control():
    test = change()
    claim = said(record(covariate(), covariate("clutter", 0.6, p_holm=0.4), tests=(test,)))
    for part in (
        "small objects",
        "because of their size",
        "75.0 %",
        "90.0 %",
        "30 of 40 errors",
        "2 correct",
        "5 and 1",
    ):
        assert part in claim.says
    assert (claim.effect, claim.p) == (test.gain, test.p_holm)
    assert title_of([claim], "") == "vit fails on small objects"
    assert first_page_claims([claim]) == (claim,)
    much = said(record(covariate(area=0.8), tests=(change(),)))
    # of the last quarter, of the first
    assert much.says.index("90.0 %") < much.says.index("75.0 %")
    compared = record(covariate(), covariate("clutter", 0.6, p_holm=0.4), tests=(change(),))
    sections = index_by(REPORT(compared).sections, "title")
    figures = {figure.name: figure.draw for figure in sections["Why do the models fail?"].figures}
    area, *_ = figures["failure_properties"]().axes
    assert area.lines[0].get_xdata().tolist() == pytest.approx([0.2, 0.6])
    first, second = figures["failure_quarters"]().axes[:2]
    assert [axes.get_title() for axes in (first, second)] == ["size", "clutter"]
    np.testing.assert_allclose(first.lines[0].get_xydata(), [[1, 75], [2, 80], [3, 85], [4, 90]])
    (mended,) = sections["What fixes their errors?"].figures
    assert mended.draw().axes[0].lines[0].get_xdata().tolist() == pytest.approx(
        [(30 - 2) / 4, (5 - 1) / 4]
    )


@pytest.mark.parametrize("count", [2, 3])
def test_the_others_are_all_other_images(count):
    """Of two parts; of three, from equal values, the worst is compared with the opposite one."""
    compared = record(covariate(), tests=(change(),))
    claim = said(replace(compared, quarters=compared.quarters[:count]))
    assert ("on the others" in claim.says) == (count == 2)
    assert "75.0 %" in claim.says
    assert f"{70 + 5 * count}.0 %" in claim.says


@pytest.mark.parametrize(
    ("rows", "tests", "words"),
    [
        ((covariate(**ALIKE),), (), "in none of the measured properties"),
        ((covariate(**ALIKE),), (change(),), "more frequent on small objects"),
        ((covariate(),), (change(p_holm=0.2),), "more images"),
        ((covariate(),), (change(control_size=0.3),), "more images"),
        ((covariate(),), (change(control_size=0.04),), "more images"),
        ((covariate(),), (change(mended=3, gain=LOSS),), "a property that goes with it"),
        ((covariate("clutter", 0.8),), (), "images with masks"),
        (
            (
                covariate("clutter", 0.95),
                covariate(area=0.3, likelihood_ratio=9.0, inseparable=("clutter",)),
            ),
            (change(),),
            "images with masks",
        ),
        (
            (covariate("look_alike", 0.8, likelihood_ratio=None),),
            (),
            "more images of the classes that it confuses",
        ),
        ((covariate("look_alike", 0.2, likelihood_ratio=None),), (), "in none of"),
        ((covariate("confidence", 0.1, likelihood_ratio=None),), (), "in none of"),
    ],
)
def test_else_the_next_test_is_named(rows, tests, words):
    claim = said(record(*rows, tests=tests))
    assert words in claim.says
    assert "The next test would be" in claim.says
    assert claim.effect is None


@pytest.mark.parametrize(
    ("covariates", "tests"),
    [
        (
            (covariate("off_centre", 0.9, likelihood_ratio=4.0), covariate()),
            (change("off_centre"), change()),
        ),
        # untested, and weaker by itself
        ((covariate("clutter", 0.6), covariate(area=0.1, likelihood_ratio=9.0)), (change(),)),
    ],
)
def test_what_separates_errors_given_the_others_comes_first(covariates, tests):
    assert "because of their size" in said(record(*covariates, tests=tests)).says


def test_a_difference_given_the_other_properties_is_enough_for_a_cause():
    assert "because of their size" in said(record(covariate(p_holm=0.2), tests=(change(),))).says
    # by itself, errors seem to have more of it
    suppressed = covariate(area=0.6, p_holm=0.2, slope=-1.0)
    assert suppressed.change == "enlarged"
    assert "fails on small objects" in said(record(suppressed, tests=(change(),))).says


@pytest.mark.parametrize("tests", [(change(), change("off_centre")), (change(),)])
def test_of_two_properties_that_the_images_cannot_separate_neither_is_named(tests):
    """Each adds nothing to the other; of one of them either the change fixes errors, too, or no
    change was tested.
    """
    rows = (
        covariate(inseparable=("off_centre",)),
        covariate("off_centre", 0.8, inseparable=("size",)),
    )
    claim = said(record(*rows, tests=tests))
    for part in ("small objects", "off-centre objects", "cannot separate"):
        assert part in claim.says
    assert claim.title == ""
    denied = change("off_centre", mended=3, gain=LOSS, p_holm=1.0)
    assert "because of their size" in said(record(*rows, tests=(change(), denied))).says


def test_a_property_that_another_one_explains_is_no_cause():
    """Where size is known, the place adds nothing; no change of size was shown to fix errors."""
    rows = covariate(), covariate("off_centre", 0.8, likelihood_ratio=9.0, inseparable=("size",))
    assert (
        "because" not in said(record(*rows, tests=(change("off_centre"), change(p_holm=0.3)))).says
    )
    assert (
        "because of their size" in said(record(*rows, tests=(change("off_centre"), change()))).says
    )


def test_a_confused_pair_of_classes_is_named_without_a_change():
    pair = covariate("pair", 0.8, detail="3 and 8", slope=1.0)
    compared = record(pair)
    compared = replace(
        compared, quarters=tuple(replace(row, covariate="pair") for row in quarters("pair")[:0:-2])
    )
    claim = select_one(REPORT(compared).claims, question="why it fails")
    assert claim.title == "vit fails on images of 3 and 8"
    assert claim.evidence == "observed"
    assert claim.effect.value == pytest.approx(-10.0)
    for line in REPORT(compared).first.unknown:
        assert "why" not in line.text
    for explained in (
        replace(pair, p_joint_holm=0.4),
        replace(pair, p_holm=0.4),
        replace(pair, slope=-1.0),
    ):
        assert said(record(explained)).title == ""


def test_the_first_page_does_not_deny_a_change_that_mends():
    """Errors do not differ in size, but their enlargement fixes them."""
    for tests, mends in (((change(),), True), ((change(p_holm=0.3),), False), ((), False)):
        (line,) = (
            line.text
            for line in REPORT(record(covariate(**ALIKE), tests=tests)).first.unknown
            if "why" in line.text
        )
        assert ("no change" in line) != mends


def test_too_few_correct_predictions_are_not_compared_with():
    row = replace(covariate(), errors=395, p=None, p_holm=None, likelihood_ratio=None)
    compared = record(row)
    assert "too few correct predictions" in said(compared).says
    assert "Why do the models fail?" not in values_of(REPORT(compared).sections, "title")


def test_the_questions_about_one_model_are_in_the_singular():
    both = record(covariate(), tests=(change(),))
    one = AuditRecord(
        folder=both.folder,
        config=replace(both.config, models=both.config.models[:1]),
        covariates=both.covariates,
        interventions=both.interventions,
        quarters=both.quarters,
    )
    titles = values_of(AUDIT_REPORT(one).sections, "title")
    assert {"Why does the model fail?", "What fixes its errors?"} <= set(titles)
    titles = values_of(REPORT(both).sections, "title")
    assert {"Why do the models fail?", "What fixes their errors?"} <= set(titles)


@pytest.mark.parametrize(("errors", "is_asked"), [(29, False), (30, True)])
def test_errors_that_are_too_few_to_explain_are_left_out_with_one_line(errors, is_asked):
    compared = record(replace(covariate(), errors=errors), tests=(change(),))
    document = REPORT(compared)
    assert any(claim.question == "why it fails" for claim in document.claims) == is_asked
    assert (
        any(section.title == "Why do the models fail?" for section in document.sections) == is_asked
    )
    lines = [line.text for line in document.first.unknown if f"**vit** {errors}" in line.text]
    assert len(lines) == (not is_asked)


def test_a_property_that_hardly_marks_errors_is_not_called_more_frequent():
    """An AUC between 0.45 and 0.55 is no finding, however significant."""
    for area, is_said in ((0.468, False), (0.4, True)):
        claim = said(record(covariate(area=area), tests=(change(mended=3, gain=LOSS),)))
        assert ("more frequent" in claim.says) == is_said


def test_a_control_that_is_not_matched_is_called_so():
    for control_size, words in ((0.1, "matched"), (0.3, "unmatched"), (0.04, "unmatched")):
        document = REPORT(record(covariate(), tests=(change(control_size=control_size),)))
        section = select_one(document.sections, title="What fixes their errors?")
        assert section.tables[0].rows[0][-1] == words
        assert any(claim.evidence == "intervened" for claim in document.claims) == (
            words == "matched"
        )


def test_accuracies_by_quarters_of_a_map_are_those_of_all_images():
    """Of maps of some images of an audit; half of them were errors."""
    split = squares(400, seed=0, masks=False)
    right = float(vitlens.evaluate(model(at_border), split).correct.double().mean())
    draw = torch.Generator().manual_seed(0)
    with planted_methods(
        {
            method: lambda _model, images, _targets: (
                torch.rand(len(images), 4, 4, generator=draw) ** 4
            )
            for method in ("saliency", "gradcam")
        }
    ):
        quarters = select(audited(at_border, split), covariate="map_size")
    images = sum(row.accuracy.n for row in quarters)
    mean = sum(row.accuracy.value * row.accuracy.n for row in quarters) / images
    assert 150 < images < 300
    assert mean == pytest.approx(right, abs=0.1)
    assert right > 0.6


def test_examples_are_errors_that_a_change_mends_and_its_control_does_not():
    split = squares(200, seed=0)
    compared = replace(BOTH, **failures_of({"vit": at_border, "cnn": low_contrast}, split))
    document = REPORT(compared)
    assert set(values_of(select(document.claims, question="why it fails"), "subject")) == {
        "vit",
        "cnn",
    }
    sure = [row for row in compared.covariate_differences if row.p_holm <= 0.05]
    apart = max(sure, key=lambda row: abs(row.difference.value))
    why = select_one(document.sections, title="Why do the models fail?")
    assert f"differ most in how **{apart.title}**" in why.sentences[0].text
    figure = select_one(document.figures, name="failure_examples")
    assert (
        len(panels(figure.draw()))
        == 3 * sum(len(examples_of.image) for examples_of in compared.failure_examples.values())
        > 3
    )
    for shown_examples in compared.failure_examples.values():
        assert 0 < len(shown_examples.image) <= 3
        np.testing.assert_array_equal(
            shown_examples.pixels, split.source.pixels[shown_examples.image]
        )
        assert not np.array_equal(shown_examples.changed, shown_examples.control)
        before, changed, control = shown_examples.predictions == shown_examples.truth
        assert (before.any(), changed.all(), control.any()) == (False, True, False)
