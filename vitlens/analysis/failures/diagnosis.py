"""Diagnosis of failures: properties in which errors differ, and changes that fix them."""

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
from vitlens.analysis.failures.changes import CHANGES, Pictures
from vitlens.analysis.failures.covariates import PerImage, Subject
from vitlens.analysis.failures.operations import distance
from vitlens.analysis.failures.patterns import p_of_any_place, scores
from vitlens.analysis.failures.properties import PROPERTIES
from vitlens.analysis.failures.regression import Array, fit_errors, likelihood_ratio, standardise
from vitlens.analysis.failures.rows import (
    CovariateRow,
    DifferenceRow,
    InterventionRow,
    QuarterRow,
    causes,
    explanations,
)
from vitlens.analysis.failures.separation import FEWEST, area_difference, separation
from vitlens.classes import reading
from vitlens.devices import autocast, evaluating
from vitlens.lens.quick_passes import quick_passes
from vitlens.summary import Line, Summary
from vitlens.uncertainty import LEVEL, Estimate, accuracy_difference, holm, paired_test

Advance = Callable[[int], object]  # called with a number of finished passes
PARTS: Final = 4  # the images are cut into quarters by the value of a property
_ERRORS_A_PROPERTY: Final = 5  # least errors (and successes) for each property of the regression
_VISIBLE: Final = 0.5 / 255  # smaller changes of pixels do not count, as 8-bit images lose them


@dataclass(frozen=True, repr=False)
class Diagnosis(Summary):
    """The reasons why one or two models misclassify images, on the same images.

    The rows are described in analysis/failures/rows.py.

    alias: the alias of the first model.
    values: for each model, the value of every property on each image.
    correct (n,): True for images that the first model predicts correctly.
    covariates: how each property separates errors from correct predictions.
    differences: how much better it does so for the first of two models.
    quarters: the accuracy on quarters of the images by each property.
    interventions: the effects of changes of properties.
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
        """Return the causes of the first model's errors, the strongest first.

        Errors differ in these properties, and their change fixes errors.
        """
        rows_of_causes = causes(self.alias, self.covariates, self.interventions)
        return tuple(cause.row.covariate for cause in rows_of_causes)

    @property
    def undecided(self) -> tuple[tuple[str, ...], ...]:
        """Return sets of properties. One of each set is a cause, but the data do not show which."""
        sets = list[tuple[str, ...]]()
        for cause in explanations(self.alias, self.covariates, self.interventions):
            if cause.rivals:
                rivals = (row.covariate for row in cause.rivals)
                sets.append((cause.row.covariate, *rivals))
        return tuple(sets)

    def summary(self) -> Iterator[Line]:
        """Yield the causes, the separation of errors by each property, and the errors fixed."""
        yield Line("misclassified", self.failures, f"of {len(self.correct)} images")
        yield Line("causes", ", ".join(self.causes) or "not known")
        for row in self.covariates:
            yield Line(f"AUC of {row.title}", row.area, row.model)
        for test in self.interventions:
            yield Line(f"{test.change}: fixed", test.mended, f"of {test.errors} errors")


def _without_progress(_total: int) -> AbstractContextManager[Advance]:
    return nullcontext(lambda _: None)


def diagnose(
    subjects: Sequence[Subject],
    *,
    progress: Callable[[int], AbstractContextManager[Advance]] = _without_progress,
) -> Diagnosis:
    """Return the diagnosis of one or two models.

    A property is changed if it separates errors before any correction: no other change could be
    significant. All images are changed, towards the values of correct predictions.

    progress: called with the number of passes over changed images. It returns a context, which
        yields a function that takes the number of finished passes.
    """
    rows = covariate_rows(subjects)
    plans = list[tuple[Subject, list[CovariateRow]]]()
    passes = 0
    for subject in subjects:
        alias = subject.evaluation.alias
        changed = [row for row in rows if row.model == alias and _is_changed(row, subject)]
        plans.append((subject, changed))
        passes += 2 * len(subject.split) * len(changed)  # each change has a control
    tested = list[InterventionRow]()
    with progress(passes) as advance:
        for subject, changed in plans:
            results = outcomes(subject, changed, advance)
            tested += [_intervention_row(subject, row, results[row.covariate]) for row in changed]
    # a change must gain more than nothing and more than its control, so the larger p-value counts
    p_values = holm([max(row.p, row.p_change) for row in tested])
    first = subjects[0].evaluation
    return Diagnosis(
        alias=first.alias,
        values=tuple(subject.values for subject in subjects),
        correct=first.correct,
        covariates=rows,
        differences=difference_rows(*subjects) if len(subjects) == 2 else (),
        quarters=tuple(quarter_rows(subjects)),
        interventions=tuple(replace(row, p_holm=p) for row, p in zip(tested, p_values)),
    )


def _is_changed(row: CovariateRow, subject: Subject) -> bool:
    """Return True if a property separates errors before any correction, and can be changed."""
    separates = any(p is not None and p <= LEVEL for p in (row.p, row.p_joint))
    if not separates or row.change == "":
        return False
    if row.covariate != "clutter":
        return True
    # clutter is removed from the background only, which masks or scenes separate from the object
    return subject.split.masks is not None or subject.split.scenes is not None


@torch.no_grad()
def predictions(subject: Subject, images: Tensor) -> Int[Tensor, " batch"]:
    """Return the predicted classes of images, as indices into the classes of the evaluation."""
    model = subject.model
    read = reading(model.classes, subject.split.classes).read
    with evaluating(model), quick_passes(model), autocast(model.device, subject.precision):
        return read(model(images.to(model.device)).float().cpu()).argmax(-1)


@dataclass(frozen=True)
class Outcome:
    """The effect of a change and of its control on every image.

    right (2, n): True if the image is predicted correctly after the change, and after the control.
    size (2, n): the mean absolute distance between the pixels before and after each.
    visible (n,): True if the change alters the image at all.
    """

    right: Bool[Tensor, "2 batch"]
    size: Float[Tensor, "2 batch"]
    visible: Bool[Tensor, " batch"]


def outcomes(
    subject: Subject, rows: Sequence[CovariateRow], advance: Advance = lambda _: None
) -> Mapping[str, Outcome]:
    """Return the outcome of the change of each property, and of its control, on all images."""
    batches: defaultdict[str, list[Outcome]] = defaultdict(list)
    batch_size = subject.batch_size or fitting_batch_size(subject.model)
    for indices in torch.arange(len(subject.split)).split(batch_size):
        pictures = Pictures(subject, indices)
        truth = subject.evaluation.labels[indices]
        for row in rows:
            edited = CHANGES[row.covariate](pictures, row.sign)  # the change, and its control
            right = torch.stack([predictions(subject, images) == truth for images in edited])
            size = torch.stack([distance(pictures.images, images) for images in edited])
            changed, _ = edited
            largest_change = (changed - pictures.images).abs().flatten(1).amax(1)
            visible = largest_change > _VISIBLE
            batches[row.covariate].append(
                Outcome(right=right, size=size.cpu(), visible=visible.cpu())
            )
            advance(2 * len(indices))
    return {name: _join_batches(parts) for name, parts in batches.items()}


def _join_batches(parts: Sequence[Outcome]) -> Outcome:
    """Return the outcome on the images of all batches."""
    return Outcome(
        right=torch.cat([part.right for part in parts], -1),
        size=torch.cat([part.size for part in parts], -1),
        visible=torch.cat([part.visible for part in parts]),
    )


def _intervention_row(subject: Subject, row: CovariateRow, after: Outcome) -> InterventionRow:
    """Return the row of one change; it counts images that are altered and have the property."""
    changed = after.visible & subject.values[row.covariate].isfinite()
    right = subject.evaluation.correct[changed]
    groups = _pick(subject.evaluation.groups, changed)
    right_after, right_after_control = after.right[:, changed]
    gain = Estimate(0.0, n=0, unit="points")
    size = 0.0
    control_size = 0.0
    if changed.any():
        gain = accuracy_difference(
            right_after, right_after_control, groups=groups, seed=subject.seed
        )
        size, control_size = after.size[:, changed].double().mean(1).tolist()
    return InterventionRow(
        model=row.model,
        covariate=row.covariate,
        change=row.change,
        control=row.known.control,
        errors=int((~right).sum()),
        mended=int((right_after & ~right).sum()),
        control_mended=int((right_after_control & ~right).sum()),
        broken=int((right & ~right_after).sum()),
        control_broken=int((right & ~right_after_control).sum()),
        gain=gain,
        p=_p_of_change(right_after, right_after_control, groups),
        p_change=_p_of_change(right_after, right, groups),
        size=size,
        control_size=control_size,
    )


def _p_of_change(first: Tensor, second: Tensor, groups: Tensor | None) -> float:
    """Return the p-value of McNemar's test of two correctnesses (n,); 1 without images."""
    if not len(first):
        return 1.0
    sources = None if groups is None else groups.numpy()
    return paired_test(first.numpy(), second.numpy(), groups=sources)


def covariate_rows(subjects: Sequence[Subject]) -> tuple[CovariateRow, ...]:
    """Return how each property separates the errors of each model, given the others and without.

    Images with an unknown value (NaN) are left out. So are properties without both errors and
    correct predictions.
    """
    rows = list[CovariateRow]()
    counts = list[int]()  # the number of rows of each subject
    for subject in subjects:
        separate_rows = list[CovariateRow]()
        for name in subject.values:
            row = _separation_row(subject, name)
            if row is not None:
                separate_rows.append(row)
        counts.append(len(separate_rows))
        rows += _with_regression(subject, separate_rows)
    rows = _correct_p_values(rows)  # over all subjects
    complete = list[CovariateRow]()
    start = 0
    for subject, count in zip(subjects, counts):
        subject_rows = rows[start : start + count]
        start += count
        for row in subject_rows:
            inseparable = _inseparable(subject, row, subject_rows)
            complete.append(replace(row, inseparable=inseparable))
    return tuple(complete)


def _correct_p_values(rows: Sequence[CovariateRow]) -> list[CovariateRow]:
    """Return the rows with p-values corrected by Holm over both tests of all rows."""
    tests = list[tuple[int, str]]()  # the index of the row, and the field of the p-value
    p_values = list[float]()
    for index, row in enumerate(rows):
        for name in ("p", "p_joint"):
            p = getattr(row, name)
            if p is not None:
                tests.append((index, name))
                p_values.append(p)
    corrected = list(rows)
    for (index, name), p in zip(tests, holm(p_values)):
        adjusted: dict[str, Any] = {f"{name}_holm": p}
        corrected[index] = replace(corrected[index], **adjusted)
    return corrected


def _separation_row(subject: Subject, name: str) -> CovariateRow | None:
    """Return how one property separates errors if no other property is known.

    It is None without errors or without correct predictions.
    """
    evaluation = subject.evaluation
    values = subject.values[name]
    has_value = values.isfinite()
    numbers = values[has_value].double().numpy()
    wrong = ~evaluation.correct[has_value].numpy()
    if not wrong.any() or wrong.all():
        return None
    groups = _pick(evaluation.groups, has_value)
    area, p = separation(numbers, wrong, groups=groups, seed=subject.seed)
    if PROPERTIES[name].sought:
        # it was chosen as the best of many, so its interval would be too narrow
        area = Estimate(area.value, n=area.n, unit="")
    detail = ""
    place = ""
    # the p-value of a property that was chosen among many counts all of them
    if name == "mark" and subject.mark is not None:
        p = subject.mark.p
        detail = subject.mark.detail
        place = subject.mark.place
    if name == "pair" and subject.pair is not None:
        p = subject.pair.p
        first = evaluation.classes[subject.pair.first]
        second = evaluation.classes[subject.pair.second]
        detail = f"{first} and {second}"
    return CovariateRow(
        model=evaluation.alias,
        covariate=name,
        title=PROPERTIES[name].title,
        area=area,
        errors=int(wrong.sum()),
        median_errors=float(np.median(numbers[wrong])),
        median_correct=float(np.median(numbers[~wrong])),
        p=p,
        detail=detail,
        place=place,
    )


def _with_regression(subject: Subject, separate_rows: Sequence[CovariateRow]) -> list[CovariateRow]:
    """Return the rows with the test of each property in a logistic regression of errors.

    - A property takes part if all images have it and it does not follow from predictions.
    - There is one property for every five errors. The strongest without the others are taken.
    - One image of each source takes part. With fewer than 10 errors or successes there is no test.
    - A property that is sought in the errors is tested given the others, but is none of the others.
    """
    wrong = _wrong(subject)
    # errors or successes, of which there are fewer
    rarer = int(min(wrong.sum(), (~wrong).sum()))
    if rarer < FEWEST:
        return list(separate_rows)
    complete = list[CovariateRow]()
    for row in separate_rows:
        is_complete = bool(subject.values[row.covariate].isfinite().all())
        if is_complete and not row.known.outcome:
            complete.append(row)
    sought = [row.covariate for row in complete if row.known.sought]
    candidates = [row for row in complete if not row.known.sought]
    candidates.sort(key=_strongest_first)
    names = [row.covariate for row in candidates[: rarer // _ERRORS_A_PROPERTY]]
    tests = _tests_in_regression(subject, names, sought, wrong)
    rows = list[CovariateRow]()
    for row in separate_rows:
        test = tests.get(row.covariate)
        if test is not None:
            row = replace(
                row, likelihood_ratio=test.likelihood_ratio, p_joint=test.p, slope=test.slope
            )
        rows.append(row)
    return rows


def _tests_in_regression(
    subject: Subject, names: Sequence[str], sought: Sequence[str], wrong: NDArray[np.bool_]
) -> "dict[str, _Test]":
    """Return the test of each property, by name.

    names: the properties of the regression. Each is tested given the others.
    sought: the properties that were sought in the errors. Each is tested given all of `names`.
    wrong: True for errors, of one image of each source.
    """
    columns = _standardised_columns(subject, names)
    fit = fit_errors(columns, wrong)
    tests = dict[str, _Test]()
    for column, name in enumerate(names):
        ratio = likelihood_ratio(columns, column, wrong)
        tests[name] = _Test(ratio, float(stats.chi2.sf(ratio, 1)), float(fit.slopes[column]))
    for name in sought:
        tests[name] = _test_sought(subject, name, columns, wrong)
    return tests


def _strongest_first(row: CovariateRow) -> tuple[float, float]:
    """Return a sort key: the strongest separation without the other properties is first."""
    p = 1.0 if row.p is None else row.p
    return p, -abs(row.area.value - 0.5)


@dataclass(frozen=True)
class _Test:
    """The test of one property in a logistic regression of errors."""

    likelihood_ratio: float
    p: float
    slope: float


def _test_sought(subject: Subject, name: str, columns: Array, wrong: NDArray[np.bool_]) -> _Test:
    """Return the test of a property that was sought in the errors, given these columns.

    Its p-value counts all that could have been chosen: all pairs of classes, or all places.
    """
    extended = np.column_stack([columns, _standardised_columns(subject, [name])])
    sought_column = columns.shape[1]  # the last
    ratio = likelihood_ratio(extended, sought_column, wrong)
    slope = float(fit_errors(extended, wrong).slopes[-1])
    if name == "pair" and subject.pair is not None:
        p_of_pair = float(stats.chi2.sf(ratio, 1))
        return _Test(ratio, min(1.0, subject.pair.pairs * p_of_pair), slope)
    assert subject.mark is not None
    # The search for a mark is repeated on what the other properties do not explain: they are
    # regressed out of the cells and of the errors (Frisch and Waugh).
    design = np.column_stack([np.ones(len(wrong)), columns])
    cells = subject.cells.flatten(1)[torch.from_numpy(subject.independent)].double().numpy()
    coefficients, *_ = np.linalg.lstsq(design, cells, rcond=None)
    cells -= design @ coefficients
    residuals = wrong - fit_errors(columns, wrong).chances
    residuals -= residuals.mean()
    cells_of_mark = cells[:, [subject.mark.index]]
    (observed,) = scores(cells_of_mark, residuals).tolist()
    p, _ = p_of_any_place(cells, residuals, observed, seed=subject.seed)
    return _Test(ratio, p, slope)


def _inseparable(
    subject: Subject, row: CovariateRow, rows: Sequence[CovariateRow]
) -> tuple[str, ...]:
    """Return the other properties in which errors differ and to which this one adds nothing.

    It adds nothing to another one if it does not significantly separate errors given that one.
    There are none if errors do not differ in this property.
    """
    if not row.differs or row.known.outcome:
        return ()
    names = list[str]()
    for other in rows:
        if other.covariate == row.covariate or not other.differs or other.known.outcome:
            continue
        columns = _columns(subject, [row.covariate, other.covariate])
        usable = np.isfinite(columns).all(1)  # a property such as one of masks may have no value
        wrong = _wrong(subject)[usable]
        if not wrong.any() or wrong.all():
            continue
        # column 0 is this property, which is tested given the other one
        ratio = likelihood_ratio(standardise(columns[usable]), 0, wrong)
        if stats.chi2.sf(ratio, 1) > LEVEL:
            names.append(other.covariate)
    return tuple(names)


def _wrong(subject: Subject) -> NDArray[np.bool_]:
    """Return True for the independent images that are misclassified."""
    wrong: NDArray[np.bool_] = ~subject.evaluation.correct.numpy()[subject.independent]
    return wrong


def _standardised_columns(subject: Subject, names: Sequence[str]) -> Array:
    """Return properties (n, properties) of the independent images, standardised."""
    if not names:
        return np.zeros((len(subject.independent), 0))
    return standardise(_columns(subject, names))


def _columns(subject: Subject, names: Sequence[str]) -> Array:
    """Return properties (n, properties) of the independent images, NaN where one has no value."""
    columns = [subject.values[name].double().numpy()[subject.independent] for name in names]
    return np.stack(columns, 1)


def difference_rows(first: Subject, second: Subject) -> tuple[DifferenceRow, ...]:
    """Return how much better each property separates the errors of the first of two models.

    A property is left out if either model makes too few errors.
    """
    correct = torch.stack((first.evaluation.correct, second.evaluation.correct))
    rows = list[DifferenceRow]()
    p_values = list[float]()
    for name in first.values:
        if name not in second.values or PROPERTIES[name].sought:
            continue
        values = torch.stack((first.values[name], second.values[name]))
        has_values = values.isfinite().all(0)
        numbers = values[:, has_values].double().numpy()
        wrong = ~correct[:, has_values].numpy()
        if min(wrong.sum(1).min(), (~wrong).sum(1).min()) < FEWEST:
            continue
        groups = _pick(first.evaluation.groups, has_values)
        gap, p = area_difference(numbers, wrong, groups=groups)
        rows.append(
            DifferenceRow(
                first=first.evaluation.alias,
                second=second.evaluation.alias,
                covariate=name,
                title=PROPERTIES[name].title,
                difference=gap,
                p_holm=p,  # corrected below
            )
        )
        p_values.append(p)
    return tuple(replace(row, p_holm=p) for row, p in zip(rows, holm(p_values)))


def quarter_rows(subjects: Sequence[Subject]) -> Iterator[QuarterRow]:
    """Yield the accuracy on each quarter of the images by every property.

    Images with equal values are in the same quarter.
    """
    inner_edges = torch.linspace(0, 1, PARTS + 1, dtype=torch.float64)[1:-1]  # 0.25, 0.5 and 0.75
    for subject in subjects:
        evaluation = subject.evaluation
        for name, values in subject.values.items():
            has_value = values.isfinite()
            edges = torch.quantile(values[has_value].double(), inner_edges).unique()
            quarters = torch.where(has_value, torch.bucketize(values.double(), edges), -1)
            # a quarter may be empty if values are equal, so the others are numbered from 1
            for number, quarter in enumerate(quarters[has_value].unique(), 1):
                inside = quarters == quarter
                groups = _pick(evaluation.groups, inside)
                yield QuarterRow(
                    model=evaluation.alias,
                    covariate=name,
                    title=PROPERTIES[name].title,
                    quarter=number,
                    low=float(values[inside].amin()),
                    high=float(values[inside].amax()),
                    accuracy=accuracy(evaluation.correct[inside], groups=groups),
                )


def _pick(groups: Tensor | None, images: Tensor) -> Tensor | None:
    return None if groups is None else groups[images]
