"""The diagnosis of failures: what the errors of a model have in common, and what mends them when it
is changed.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import accuracy, fitting_batch_size
from vitlens.analysis.failures.covariates import CHANGES, PerImage, Pictures, Subject, distance
from vitlens.analysis.failures.patterns import p_of_any_place, scores
from vitlens.analysis.failures.properties import (
    PROPERTIES,
    CovariateRow,
    DifferenceRow,
    InterventionRow,
    QuarterRow,
    causes,
    explanations,
)
from vitlens.analysis.failures.regression import Array, fitted, likelihood_ratio, standardised
from vitlens.analysis.failures.separation import FEWEST, area_difference, separation
from vitlens.classes import reading
from vitlens.devices import autocast, evaluating
from vitlens.lens.quick_passes import quick_passes
from vitlens.summary import Line, Summary
from vitlens.uncertainty import LEVEL, Estimate, accuracy_difference, holm, paired_test

Advance = Callable[[int], object]
PARTS: Final = 4  # the images are cut in quarters by a property
_EACH: Final = 5  # errors (and successes) for each property of the regression
_VISIBLE: Final = 0.5 / 255  # of a pixel: what less changes is as it was


@dataclass(frozen=True, repr=False)
class Diagnosis(Summary):
    """Why models misclassify images, of one or of two models on the same images.

    values: of every property by image, for each model; correct: (n,) whether each image is
    classified correctly by the first model; covariates, differences, quarters, interventions: rows,
    see analysis/failures/properties.py.
    """

    alias: str
    values: tuple[Mapping[str, PerImage], ...]
    correct: Bool[Tensor, " batch"]
    covariates: tuple[CovariateRow, ...]
    differences: tuple[DifferenceRow, ...]
    quarters: tuple[QuarterRow, ...]
    interventions: tuple[InterventionRow, ...]

    @property
    def failures(self) -> int:
        """Return the number of images that the first model misclassifies."""
        return int((~self.correct).sum())

    @property
    def causes(self) -> tuple[str, ...]:
        """Return the properties in which the first model's errors differ and whose change mends
        them, the strongest first.
        """
        return tuple(
            cause.row.covariate for cause in causes(self.alias, self.covariates, self.interventions)
        )

    @property
    def undecided(self) -> tuple[tuple[str, ...], ...]:
        """Sets of properties of which one, but the data do not say which, is why the first model
        errs.
        """
        found = explanations(self.alias, self.covariates, self.interventions)
        return tuple(
            (cause.row.covariate, *(row.covariate for row in cause.rivals))
            for cause in found
            if cause.rivals
        )

    def summary(self) -> Iterator[Line]:
        """Yield the causes, how each property separates errors, and what its change mends."""
        yield Line("misclassified", self.failures, f"of {len(self.correct)} images")
        yield Line("causes", ", ".join(self.causes) or "not known")
        yield from (Line(f"AUC of {row.title}", row.area, row.model) for row in self.covariates)
        yield from (
            Line(f"{row.change}: mended", row.mended, f"of {row.errors} errors")
            for row in self.interventions
        )


def diagnose(
    subjects: Sequence[Subject],
    *,
    progress: Callable[[int], AbstractContextManager[Advance]] = lambda _: nullcontext(
        lambda _: None
    ),
) -> Diagnosis:
    """Return the diagnosis of one or two models. progress: of this number of passes over a changed
    image.

    All images are changed in those properties that separate errors before any correction, as no
    others can be shown to be a cause, towards what correct predictions have.
    """
    rows = covariate_rows(subjects)
    plans = []
    tested = list[InterventionRow]()
    for subject in subjects:
        changeable = [
            row
            for row in rows
            if row.model == subject.evaluation.alias and _is_changed(row, subject)
        ]
        plans.append((subject, changeable))
    with progress(sum(2 * len(subject.split) * len(own) for subject, own in plans)) as advance:
        for subject, own in plans:
            after = outcomes(subject, own, advance)
            tested += [_intervened(subject, row, after[row.covariate]) for row in own]
    p_values = holm([max(row.p, row.p_change) for row in tested])
    first = subjects[0].evaluation
    return Diagnosis(
        first.alias,
        tuple(subject.values for subject in subjects),
        first.correct,
        rows,
        difference_rows(*subjects) if len(subjects) == 2 else (),
        tuple(quarter_rows(subjects)),
        tuple(replace(row, p_holm=p) for row, p in zip(tested, p_values)),
    )


def _is_changed(row: CovariateRow, subject: Subject) -> bool:
    """Return True if a property separates errors before any correction, and a change of it is
    possible.
    """
    separates = any(p is not None and p <= LEVEL for p in (row.p, row.p_joint))
    ground = subject.split.masks is not None or subject.split.scenes is not None
    return separates and row.change != "" and (ground or row.covariate != "clutter")


@torch.no_grad()
def predictions(subject: Subject, images: Tensor) -> Int[Tensor, " batch"]:
    """Return the predicted classes of images, in those of the evaluation."""
    model = subject.model
    read = reading(model.classes, subject.split.classes).read
    with evaluating(model), quick_passes(model), autocast(model.device, subject.precision):
        return read(model(images.to(model.device)).float().cpu()).argmax(-1)


@dataclass(frozen=True)
class Outcome:
    """What becomes of every image after a change and after its control, rows of (2, n): right:
    whether it is then classified correctly; size: the mean absolute distance of its pixels from
    before. visible: (n,) whether the change alters it at all.
    """

    right: Bool[Tensor, "2 batch"]
    size: Float[Tensor, "2 batch"]
    visible: Bool[Tensor, " batch"]


def outcomes(
    subject: Subject, rows: Sequence[CovariateRow], advance: Advance = lambda _: None
) -> Mapping[str, Outcome]:
    """Return for each property what becomes of all images after its change, and after its
    control."""
    parts: defaultdict[str, list[tuple[Tensor, Tensor, Tensor]]] = defaultdict(list)
    for indices in torch.arange(len(subject.split)).split(
        subject.batch_size or fitting_batch_size(subject.model)
    ):
        pictures = Pictures(subject, indices)
        truth = subject.evaluation.labels[indices]
        for row in rows:
            both = CHANGES[row.covariate](pictures, row.sign)
            right = torch.stack([predictions(subject, images) == truth for images in both])
            size = torch.stack([distance(pictures.images, images) for images in both])
            visible = (both[0] - pictures.images).abs().flatten(1).amax(1) > _VISIBLE
            parts[row.covariate].append((right, size.cpu(), visible.cpu()))
            advance(2 * len(indices))
    return {
        name: Outcome(*(torch.cat(part, -1) for part in zip(*own))) for name, own in parts.items()
    }


def _intervened(subject: Subject, row: CovariateRow, after: Outcome) -> InterventionRow:
    """Count the images of which the property is known and which the change alters."""
    changed = after.visible & subject.values[row.covariate].isfinite()
    right = subject.evaluation.correct[changed]
    groups = _of(subject.evaluation.groups, changed)
    then, control = after.right[:, changed]
    size, control_size = (
        after.size[:, changed].double().mean(1).tolist() if changed.any() else (0.0, 0.0)
    )
    gain = Estimate(0.0, n=0, unit="points")
    if changed.any():
        gain = accuracy_difference(then, control, groups=groups, seed=subject.seed)
    return InterventionRow(
        row.model,
        row.covariate,
        row.change,
        row.known.control,
        errors=int((~right).sum()),
        mended=int((then & ~right).sum()),
        control_mended=int((control & ~right).sum()),
        broken=int((right & ~then).sum()),
        control_broken=int((right & ~control).sum()),
        gain=gain,
        p=_p_of_change(then, control, groups),
        p_change=_p_of_change(then, right, groups),
        size=size,
        control_size=control_size,
    )


def _p_of_change(first: Tensor, second: Tensor, groups: Tensor | None) -> float:
    if not len(first):
        return 1.0
    return paired_test(
        first.numpy(), second.numpy(), groups=None if groups is None else groups.numpy()
    )


def covariate_rows(subjects: Sequence[Subject]) -> tuple[CovariateRow, ...]:
    """Return how each property separates the errors of each model, alone and given the others;
    images of NaN (not known) are left out, as are properties without both errors and correct
    predictions.
    """
    rows: list[CovariateRow] = []
    sizes = list[int]()
    for subject in subjects:
        alone = [row for name in subject.values if (row := _alone(subject, name)) is not None]
        sizes.append(len(alone))
        rows += _given_others(subject, alone)
    tests = [
        (at, name)
        for at, row in enumerate(rows)
        for name in ("p", "p_joint")
        if getattr(row, name) is not None
    ]
    corrected = holm([getattr(rows[at], name) for at, name in tests])
    for (at, name), p in zip(tests, corrected):
        adjusted: dict[str, Any] = {f"{name}_holm": p}
        rows[at] = replace(rows[at], **adjusted)
    separated = list[CovariateRow]()
    start = 0
    for subject, size in zip(subjects, sizes):
        same = rows[start : start + size]
        separated += [replace(row, inseparable=_inseparable(subject, row, same)) for row in same]
        start += size
    return tuple(separated)


def _alone(subject: Subject, name: str) -> CovariateRow | None:
    """Return how one property separates errors when no other is known; None without errors or
    correct predictions.
    """
    evaluation = subject.evaluation
    values = subject.values[name]
    usable = values.isfinite()
    numbers = values[usable].double().numpy()
    wrong = ~evaluation.correct[usable].numpy()
    if not wrong.any() or wrong.all():
        return None
    area, p = separation(numbers, wrong, groups=_of(evaluation.groups, usable), seed=subject.seed)
    detail = place = ""
    if PROPERTIES[name].sought:
        area = Estimate(
            area.value, n=area.n, unit=""
        )  # the interval of what was chosen is too narrow
    if name == "mark" and subject.mark is not None:
        p = subject.mark.p
        detail = subject.mark.detail
        place = subject.mark.place
    if name == "pair" and subject.pair is not None:
        p = subject.pair.p
        both = (subject.pair.first, subject.pair.second)
        detail = " and ".join(evaluation.classes[at] for at in both)
    failed, passed = (float(np.median(numbers[of])) for of in (wrong, ~wrong))
    title = PROPERTIES[name].title
    errors = int(wrong.sum())
    return CovariateRow(
        evaluation.alias, name, title, area, errors, failed, passed, p, detail=detail, place=place
    )


def _given_others(subject: Subject, alone: Sequence[CovariateRow]) -> list[CovariateRow]:
    """Return the rows with what each property adds to a logistic regression of errors on the
    others.

    The regression has only properties that no prediction decides and that are known of all images,
    the strongest alone, one for every five errors; of images that share a source, one; and none
    with fewer than 10 errors or successes. What is sought in the errors is added to it, but is not
    among the others.
    """
    wrong = _wrong(subject)
    few = int(min(wrong.sum(), (~wrong).sum()))
    if few < FEWEST:
        return list(alone)
    known = [
        row
        for row in alone
        if not row.known.outcome and bool(subject.values[row.covariate].isfinite().all())
    ]
    usable = [row for row in known if not row.known.sought]
    usable.sort(key=lambda row: (1.0 if row.p is None else row.p, -abs(row.area.value - 0.5)))
    names = [row.covariate for row in usable[: few // _EACH]]
    columns = _columns(subject, names)
    fit = fitted(columns, wrong)
    found = dict[str, tuple[float, float, float]]()
    for at, name in enumerate(names):
        ratio = likelihood_ratio(columns, at, wrong)
        found[name] = ratio, float(stats.chi2.sf(ratio, 1)), float(fit.slopes[at])
    for row in known:
        if row.known.sought:
            found[row.covariate] = _sought(subject, row.covariate, columns, wrong)
    empty = (None, None, None)
    return [
        replace(row, likelihood_ratio=ratio, p_joint=p, slope=slope)
        for row in alone
        for ratio, p, slope in [found.get(row.covariate, empty)]
    ]


def _sought(
    subject: Subject, name: str, columns: Array, wrong: NDArray[np.bool_]
) -> tuple[float, float, float]:
    """Return the likelihood ratio, p and slope of what is sought in the errors, given these
    properties.
    """
    more = np.column_stack([columns, _columns(subject, [name])])
    ratio = likelihood_ratio(more, columns.shape[1], wrong)
    slope = float(fitted(more, wrong).slopes[-1])
    if name == "pair" and subject.pair is not None:
        return ratio, min(1.0, subject.pair.pairs * float(stats.chi2.sf(ratio, 1))), slope
    assert subject.mark is not None
    design = np.column_stack([np.ones(len(wrong)), columns])
    cells = subject.cells.flatten(1)[torch.from_numpy(subject.independent)].double().numpy()
    cells -= design @ np.linalg.lstsq(design, cells, rcond=None)[0]
    residuals = wrong - fitted(columns, wrong).chances
    residuals -= residuals.mean()
    observed = float(scores(cells[:, [subject.mark.index]], residuals)[0])
    p, _ = p_of_any_place(cells, residuals, observed, seed=subject.seed)
    return ratio, p, slope


def _inseparable(
    subject: Subject, row: CovariateRow, rows: Sequence[CovariateRow]
) -> tuple[str, ...]:
    """Return the properties in which a model's errors differ, too, and beside which alone this one
    adds nothing.
    """
    others = [each for each in rows if each.differs and each.covariate != row.covariate]
    if not row.differs or row.known.outcome:
        return ()
    found = []
    for other in others:
        if other.known.outcome:
            continue
        columns = _columns(subject, [row.covariate, other.covariate])
        usable = np.isfinite(columns).all(1)
        wrong = _wrong(subject)[usable]
        if wrong.any() and not wrong.all():
            ratio = likelihood_ratio(standardised(columns[usable]), 0, wrong)
            if stats.chi2.sf(ratio, 1) > LEVEL:
                found.append(other.covariate)
    return tuple(found)


def _wrong(subject: Subject) -> NDArray[np.bool_]:
    wrong: NDArray[np.bool_] = ~subject.evaluation.correct.numpy()[subject.independent]
    return wrong


def _columns(subject: Subject, names: Sequence[str]) -> Array:
    """Return standardised properties (n, properties) of the images that count on their own."""
    if not names:
        return np.zeros((len(subject.independent), 0))
    return standardised(
        np.stack([subject.values[name].double().numpy()[subject.independent] for name in names], 1)
    )


def difference_rows(first: Subject, second: Subject) -> tuple[DifferenceRow, ...]:
    """Return how much better each property separates the errors of the first of two models, where
    both make enough.
    """
    one = first.evaluation
    other = second.evaluation
    found = list[tuple[str, Estimate, float]]()
    for name in first.values:
        if name in second.values and not PROPERTIES[name].sought:
            values = torch.stack((first.values[name], second.values[name]))
            known = values.isfinite().all(0)
            correct = torch.stack((one.correct, other.correct))
            numbers = values[:, known].double().numpy()
            wrong = ~correct[:, known].numpy()
            if min(wrong.sum(1).min(), (~wrong).sum(1).min()) >= FEWEST:
                found.append(
                    (name, *area_difference(numbers, wrong, groups=_of(one.groups, known)))
                )
    return tuple(
        DifferenceRow(one.alias, other.alias, name, PROPERTIES[name].title, gap, p)
        for (name, gap, _), p in zip(found, holm([p for _, _, p in found]))
    )


def quarter_rows(subjects: Sequence[Subject]) -> Iterator[QuarterRow]:
    """Yield the accuracy in each quarter of the images by every property; equal values are never
    separated.
    """
    inner = torch.linspace(0, 1, PARTS + 1, dtype=torch.float64)[1:-1]
    for subject in subjects:
        evaluation = subject.evaluation
        for name, own in subject.values.items():
            known = own.isfinite()
            edges = torch.quantile(own[known].double(), inner).unique()
            member = torch.where(known, torch.bucketize(own.double(), edges), -1)
            for number, part in enumerate(member[known].unique(), 1):
                inside = member == part
                groups = _of(evaluation.groups, inside)
                right = accuracy(evaluation.correct[inside], groups=groups)
                ends = float(own[inside].amin()), float(own[inside].amax())
                yield QuarterRow(
                    evaluation.alias, name, PROPERTIES[name].title, number, *ends, right
                )


def _of(groups: Tensor | None, images: Tensor) -> Tensor | None:
    return None if groups is None else groups[images]
