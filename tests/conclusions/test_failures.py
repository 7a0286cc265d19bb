"""What is said of failures follows the rows: a cause is named only where errors differ and a change mends them."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

from tests.analysis.failures.planted import at_border, at_random, low_contrast, model, squares
from tests.kit.contradictions import contradictions
from vitlens import evaluate
from vitlens.analysis.failures.covariates import Subject
from vitlens.analysis.failures.properties import PROPERTIES, CovariateRow, InterventionRow, QuarterRow
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.options import RunOptions
from vitlens.commands.shared.failures import SECTIONS, FailuresRecord, claims, unknown
from vitlens.commands.shared.failures_measure import failure_fields
from vitlens.display import protected
from vitlens.record import read_record, read_run
from vitlens.report.claims import shown, title_of
from vitlens.report.document import Document
from vitlens.report.sections import Report
from vitlens.uncertainty import Estimate

LOSS = Estimate(-1.0, -2.0, 0.0, 400, "points")
CAUSES = ("because", "due to", "caused by")


@dataclass(frozen=True, kw_only=True)
class AskRecord(FailuresRecord):
    """A throw-away command that asks why models fail."""

    command: ClassVar[str] = "evaluate"


REPORT = Report(AskRecord, claims=claims, unknown=unknown, sections=SECTIONS)


def covariate(name: str = "size", area: float = 0.2, **more: object) -> CovariateRow:
    given = {"p": 1e-6, "p_holm": 1e-5, "likelihood_ratio": 20.0, "p_joint": 1e-5, "p_joint_holm": 1e-4} | more
    near = Estimate(area, area - 0.05, area + 0.05, 400, "")
    return CovariateRow("vit", name, PROPERTIES[name].title, near, 40, 0.1, 0.2, **given)  # type: ignore[arg-type]


def change(name: str = "size", mended: int = 30, control: int = 5, **more: object) -> InterventionRow:
    known = PROPERTIES[name]
    given = {"gain": Estimate(6.0, 4.0, 8.0, 400, "points"), "p": 1e-6, "p_errors": 1e-6, "p_holm": 1e-5} | more
    words = known.raised or known.lowered, known.control
    return InterventionRow("vit", name, *words, 40, mended, control, 2, 1, **given)  # type: ignore[arg-type]


def quarters(name: str = "size") -> tuple[QuarterRow, ...]:
    accuracy = {at: Estimate(0.7 + at / 20, 0.6, 1.0, 100) for at in range(1, 5)}
    title = PROPERTIES[name].title
    return tuple(QuarterRow("vit", name, title, at, at / 10, at / 10 + 0.1, own) for at, own in accuracy.items())


def record(*rows: CovariateRow, tests: tuple[InterventionRow, ...] = ()) -> AskRecord:
    every = tuple(each for row in rows for each in quarters(row.covariate))
    return AskRecord(covariates=rows, interventions=tests, quarters=every)


def said(made: AskRecord) -> str:
    (claim,) = claims(made)
    assert not list(contradictions([claim]))
    assert (claim.evidence == "intervened") == any(word in claim.says for word in CAUSES)
    assert bool(list(unknown(made))) == (claim.evidence == "observed")
    return claim.says


def test_a_cause_is_named_where_both_agree():
    made = record(covariate(), covariate("clutter", 0.6, p_holm=0.4), tests=(change(),))
    text = said(made)
    assert "fails on small objects because of their size" in text
    assert "75.0 %" in text, "the quarter of the smallest"
    assert "90.0 %" in text
    assert "30 of its 40 errors" in text
    assert ": 5)" in text
    found = list(claims(made))
    assert title_of(found, "") == "vit fails on small objects"
    assert shown(found) == tuple(found)
    assert found[0].p == 1e-5


@pytest.mark.parametrize(
    ("rows", "tests", "words"),
    [
        ((covariate(p_holm=0.2),), (), "differ from correct predictions in no property"),
        ((covariate(p_holm=0.2),), (change(),), "more frequent on small objects"),
        ((covariate(),), (change(p_holm=0.2),), "more images"),
        ((covariate(),), (change(p_errors=0.2),), "more images"),
        ((covariate(),), (change(mended=3, gain=LOSS),), "a property that goes with it"),
        ((covariate("clutter", 0.8),), (), "images with masks"),
        ((covariate("clutter", 0.95), covariate(area=0.3, likelihood_ratio=9.0)), (change(),), "images with masks"),
        ((covariate("look_alike", 0.8, likelihood_ratio=None),), (), "more images of the classes that it confuses"),
        ((covariate("look_alike", 0.2, likelihood_ratio=None),), (), "in no property"),
        ((covariate("confidence", 0.1, likelihood_ratio=None),), (), "in no property"),
    ],
)  # fmt: skip
def test_else_the_next_test_is_named(rows, tests, words):
    text = said(record(*rows, tests=tests))
    assert words in text
    assert "The next test would be" in text


def test_what_separates_errors_given_the_others_comes_first():
    made = record(
        covariate("off_centre", 0.9, likelihood_ratio=4.0), covariate(), tests=(change("off_centre"), change())
    )
    assert "because of their size" in said(made)
    weaker = record(
        covariate("clutter", 0.6), covariate(area=0.1, likelihood_ratio=9.0), tests=(change(),)
    )  # untested, and weaker alone
    assert "because of their size" in said(weaker)


def test_too_few_errors_are_not_asked():
    few = replace(covariate(), errors=6, p=None, p_holm=None, likelihood_ratio=None)
    assert "6 of 400 images: too few to ask why" in said(record(few))
    assert list(unknown(record(few))) == ["Too few errors to ask why a model fails: **vit** 6."]
    assert not REPORT(record(few)).sections
    assert "too few are left" in said(record(replace(few, errors=395)))


def test_names_of_models_are_escaped():
    name = "a*b`c"
    row, test = replace(covariate(), model=name), replace(change(), model=name)
    made = AskRecord(
        covariates=(row,), interventions=(test,), quarters=tuple(replace(each, model=name) for each in quarters())
    )
    assert name not in next(claims(made)).says
    assert protected(name) in next(claims(made)).says


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> AskRecord:
    """Two planted models on the same images, written and read again."""
    split = squares(200, seed=0)
    both = [model(rule, name) for rule, name in ((at_border, "edge"), (low_contrast, "faint"))]
    fields = failure_fields([Subject(own, split, evaluate(own, split)) for own in both], quiet=True)
    out = tmp_path_factory.mktemp("asked") / "run"
    with RunFolder.opened(
        "evaluate", RunOptions(out=out), {"models": [{"alias": "edge"}, {"alias": "faint"}]}
    ) as folder:
        folder.keep(AskRecord(**fields))
    return read_record(AskRecord, read_run(out))


def test_the_report_of_two_planted_models(measured):
    document: Document = REPORT(measured)
    assert document.title == "edge fails on objects at the border"
    assert [claim.subject for claim in shown(claims(measured))] == ["edge", "faint"]
    why, mended = document.sections
    assert {figure.name for figure in why.figures} == {"failure_properties", "failure_quarters"}
    assert "The models differ most in how" in why.sentences[0].text
    assert {figure.name for figure in mended.figures} == {"interventions", "failure_examples"}
    for figure in (*why.figures, *mended.figures):
        figure.draw()


def test_arrays_are_those_of_the_images(measured):
    split = squares(200, seed=0)
    for name in ("edge", "faint"):
        examples = measured.failure_examples[name]
        assert 0 < len(examples.image) <= 3
        assert (examples.pixels == split.source.pixels[examples.image].numpy()).all()
        before, changed, control = examples.predictions
        assert (changed == examples.truth).all()
        assert (before != examples.truth).all()
        assert (control != examples.truth).all()
        assert not np.array_equal(examples.changed, examples.control)
    assert measured.metric("failure_auc/edge/border").value == next(
        row.area.value for row in measured.covariates if (row.model, row.covariate) == ("edge", "border")
    )
    assert measured.metric("change_gain/faint/object_contrast").unit == "points"


def test_nothing_is_named_of_errors_at_random():
    split = squares(200, seed=0, masks=False)
    own = model(at_random)
    made = AskRecord(**failure_fields([Subject(own, split, evaluate(own, split))], quiet=True))
    assert "We do not know why" in said(made)
    assert not made.failure_examples
    assert len(REPORT(made).sections) == 1
