"""`vitlens.failures`: what the errors of a model have in common, and what mends them when it is changed.

A number predicts failures by the area under the ROC curve: the probability that a random failure has a greater value
than a random success (ties count half); 0.5 is chance. Interval and test follow DeLong 1988, with the sums over groups
of Obuchowski 1997 where images share a source, on the logit scale, so that the interval lies between 0 and 1.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from vitlens.analysis.evaluation.classes import reading
from vitlens.analysis.evaluation.evaluate import accuracy, evaluate, fitting_batch_size
from vitlens.analysis.failures.covariates import CHANGES, PerImage, Pictures, Subject
from vitlens.analysis.failures.properties import (
    PROPERTIES,
    CovariateRow,
    DifferenceRow,
    InterventionRow,
    QuarterRow,
    causes,
)
from vitlens.data.split import as_split, takes_splits
from vitlens.devices import autocast, evaluating
from vitlens.models.model import Model
from vitlens.pixels import AnyImages
from vitlens.references import resolved
from vitlens.shapes import Labels
from vitlens.summary import Line, Summary
from vitlens.uncertainty import LEVEL, Estimate, accuracy_difference, holm, mcnemar

Advance = Callable[[int], object]
Array = NDArray[np.float64]
PARTS: Final = 4  # the images are cut in quarters by a property
FEWEST = 10  # failures, and successes, for an interval and a test
_EACH: Final = 5  # errors (and successes) for each property of the regression
_RIDGE: Final = 1e-4  # on standardised coefficients: keeps them finite where a property separates completely
_Z: Final = float(stats.norm.ppf(0.975))


@dataclass(frozen=True, repr=False)
class Diagnosis(Summary):
    """Why models misclassify images, of one or of two models on the same images.

    values: of every property by image, for each model; correct: (n,) whether each image is classified correctly by the
    first model; covariates, differences, quarters, interventions: rows, see analysis/failures/properties.py.
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
        """The number of images that the first model misclassifies."""
        return int((~self.correct).sum())

    @property
    def causes(self) -> tuple[str, ...]:
        """The properties in which the first model's errors differ and whose change mends them, the strongest first."""
        return tuple(row.covariate for row, _ in causes(self.alias, self.covariates, self.interventions))

    def summary(self) -> Iterator[Line]:
        """The causes, how each property separates errors, and what its change mends."""
        yield Line("misclassified", self.failures, f"of {len(self.correct)} images")
        yield Line("causes", ", ".join(self.causes) or "not known")
        yield from (Line(f"AUC of {row.title}", row.area, row.model) for row in self.covariates)
        yield from (Line(f"{row.change}: mended", row.mended, f"of {row.errors} errors") for row in self.interventions)


@takes_splits
def failures(
    model: Model,
    images: AnyImages,
    labels: Labels | None = None,  # noqa: ARG001  the decorator gives them to the images
    *,
    second: Model | None = None,
    method: str | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    advance: Advance = lambda _: None,
) -> Diagnosis:
    """Why a model misclassifies labelled images: what its errors have in common, and what mends them when changed.

    images: a Split, or any form that `vitlens.images` takes; labels: class indices of the model (n,) (None: those of
    the Split or the class folders); second: another model of these classes, diagnosed on the same images; method: of
    the maps of the predicted class (None: the preferred one of the model's family). A cause is named only where errors
    differ in a property and its change mends more of them than a control as large does; see
    vitlens/analysis/failures/properties.py. Raises DataError without labels, InputError when a model does not know the
    data's classes, and UnsupportedError for a method that the model does not have.

    >>> import vitlens
    >>> found = vitlens.failures(vitlens.load("cnn-digits"), vitlens.load_data("digits", limit=40))
    >>> found.failures, found.causes
    (2, ())
    """
    split, subjects = as_split(images), []
    explain, preferred = (resolved(f"vitlens.attribution.explain:{name}") for name in ("explain", "preferred_method"))
    for each in (model,) if second is None else (model, second):
        evaluation = evaluate(each, split, batch_size=batch_size, advance=advance)
        maps = explain(each, split, method=method or preferred(each), batch_size=batch_size, seed=seed)
        maps = maps.detach().float().cpu()
        subjects.append(Subject(each, split, evaluation, maps, batch_size=batch_size, seed=seed))
    return diagnose(subjects, progress=lambda _: nullcontext(advance))


def diagnose(
    subjects: Sequence[Subject],
    *,
    progress: Callable[[int], AbstractContextManager[Advance]] = lambda _: nullcontext(lambda _: None),
) -> Diagnosis:
    """The diagnosis of one or two models. progress: of this number of passes over a changed image. All images are
    changed in those properties that separate errors before any correction, as no others can be shown to be a cause,
    towards what correct predictions have."""
    rows, plans, tested = covariate_rows(subjects), [], list[InterventionRow]()
    for subject in subjects:
        known = subject.split.masks is not None or subject.split.scenes is not None  # where clutter is
        own = [row for row in rows if row.model == subject.evaluation.alias and row.p is not None and row.p <= LEVEL]
        plans.append((subject, [row for row in own if row.change and (known or row.covariate != "clutter")]))
    with progress(sum(2 * len(subject.split) * len(own) for subject, own in plans)) as advance:
        for subject, own in plans:
            after = outcomes(subject, own, advance)
            tested += [_intervened(subject, row, *after[row.covariate]) for row in own]
    p_values = holm([row.p for row in tested])
    first = subjects[0].evaluation
    return Diagnosis(
        first.alias, tuple(subject.values for subject in subjects), first.correct, rows,
        difference_rows(*subjects) if len(subjects) == 2 else (), tuple(quarter_rows(subjects)),
        tuple(replace(row, p_holm=p) for row, p in zip(tested, p_values)),
    )  # fmt: skip


@torch.no_grad()
def predictions(subject: Subject, images: Tensor) -> Int[Tensor, " batch"]:
    """The predicted classes of images, in those of the evaluation."""
    model = subject.model
    read = reading(model.classes, subject.split.classes).read
    with evaluating(model), autocast(model.device, subject.precision):
        return read(model(images.to(model.device)).float().cpu()).argmax(-1)


def outcomes(
    subject: Subject, rows: Sequence[CovariateRow], advance: Advance = lambda _: None
) -> Mapping[str, tuple[Tensor, Tensor]]:
    """Whether every image is classified correctly after the change of each property, and after its control."""
    parts: dict[str, list[Tensor]] = {row.covariate: [] for row in rows}
    for indices in torch.arange(len(subject.split)).split(subject.batch_size or fitting_batch_size(subject.model)):
        pictures, truth = Pictures(subject, indices), subject.evaluation.labels[indices]
        for row in rows:
            after = CHANGES[row.covariate](pictures, row.sign)
            parts[row.covariate].append(torch.stack([predictions(subject, images) == truth for images in after]))
            advance(2 * len(indices))
    return {name: tuple(torch.cat(own, 1)) for name, own in parts.items()}


def _intervened(subject: Subject, row: CovariateRow, changed: Tensor, control: Tensor) -> InterventionRow:
    right, groups = subject.evaluation.correct, subject.evaluation.groups
    return InterventionRow(
        row.model, row.covariate, row.change, row.known.control, int((~right).sum()),
        mended=int((changed & ~right).sum()), control_mended=int((control & ~right).sum()),
        broken=int((right & ~changed).sum()), control_broken=int((right & ~control).sum()),
        gain=accuracy_difference(changed, control, groups=groups, seed=subject.seed),
        p=paired_test(changed, control, groups),
        p_errors=paired_test(changed[~right], control[~right], None if groups is None else groups[~right]),
    )  # fmt: skip


def paired_test(first: Tensor, second: Tensor, groups: Tensor | None) -> float:
    """McNemar's exact test of two outcomes on the same images; images of one group count once, by what prevails."""
    net = _by_group((first.double() - second.double()).numpy(), groups)
    return mcnemar(int((net > 0).sum()), int((net < 0).sum()))


def covariate_rows(subjects: Sequence[Subject]) -> tuple[CovariateRow, ...]:
    """How each property separates the errors of each model, alone and given the others; images of NaN (not known) are
    left out, as are properties without both errors and correct predictions."""
    rows: list[CovariateRow] = []
    for subject in subjects:
        evaluation, own = subject.evaluation, list[CovariateRow]()
        for name, values in subject.values.items():
            known = values.isfinite()
            numbers, wrong = values[known].double().numpy(), ~evaluation.correct[known].numpy()
            if wrong.any() and not wrong.all():
                area, p = separation(numbers, wrong, groups=_of(evaluation.groups, known))
                failed, passed = (float(np.median(numbers[of])) for of in (wrong, ~wrong))
                title, errors = PROPERTIES[name].title, int(wrong.sum())
                own.append(CovariateRow(evaluation.alias, name, title, area, errors, failed, passed, p))
        joint = regression(subject, own)
        rows += [replace(row, likelihood_ratio=ratio, p_joint=p) for row in own for ratio, p in [joint[row.covariate]]]
    for name, corrected in (("p", "p_holm"), ("p_joint", "p_joint_holm")):
        tested = [row for row in rows if getattr(row, name) is not None]
        adjusted = dict(zip(tested, holm([getattr(row, name) for row in tested])))
        more: list[dict[str, Any]] = [{corrected: adjusted.get(row)} for row in rows]
        rows = [replace(row, **each) for row, each in zip(rows, more)]
    return tuple(rows)


def regression(subject: Subject, alone: Sequence[CovariateRow]) -> Mapping[str, tuple[float | None, float | None]]:
    """Of a logistic regression of errors on the properties that no prediction decides: the likelihood ratio without
    each, and its p; None for those that are not in it.

    It has only those that are known of all images, the strongest alone, one for every five errors; of images that share
    a source, one; and none with fewer than 10 errors or successes.
    """
    values, groups = subject.values, subject.evaluation.groups
    found: dict[str, tuple[float | None, float | None]] = dict.fromkeys(values, (None, None))
    kept = np.arange(len(subject.split)) if groups is None else np.unique(groups.numpy(), return_index=True)[1]
    wrong = ~subject.evaluation.correct.numpy()[kept]
    few = int(min(wrong.sum(), (~wrong).sum()))
    usable = [row for row in alone if not row.known.outcome and bool(values[row.covariate].isfinite().all())]
    if few < FEWEST or not usable:
        return found
    usable.sort(key=lambda row: 1.0 if row.p is None else row.p)
    names = [row.covariate for row in usable[: few // _EACH]]
    columns = np.stack([values[name].double().numpy()[kept] for name in names], 1)
    columns = (columns - columns.mean(0)) / np.maximum(columns.std(0), 1e-12)
    whole = deviance(columns, wrong)
    for at, name in enumerate(names):
        ratio = max(0.0, deviance(np.delete(columns, at, 1), wrong) - whole)
        found[name] = ratio, float(stats.chi2.sf(ratio, 1))
    return found


def deviance(columns: Array, wrong: NDArray[np.bool_]) -> float:
    """Minus twice the log likelihood of the logistic regression of `wrong` on standardised columns and a constant."""
    from sklearn.linear_model import LogisticRegression  # takes a second to import

    design = columns if columns.shape[1] else np.zeros((len(wrong), 1))
    model = LogisticRegression(C=1 / _RIDGE, solver="newton-cholesky", tol=1e-8, max_iter=1000)
    with warnings.catch_warnings(action="ignore"):  # it goes on with L-BFGS where Newton's steps do not descend
        scores = model.fit(design, wrong).decision_function(design)
    return 2 * float(np.logaddexp(0, scores).sum() - scores[wrong].sum())


def difference_rows(first: Subject, second: Subject) -> tuple[DifferenceRow, ...]:
    """How much better each property separates the errors of the first of two models, where both make enough."""
    one, other, found = first.evaluation, second.evaluation, list[tuple[str, Estimate, float]]()
    for name in first.values:
        if name in second.values:
            values = torch.stack((first.values[name], second.values[name]))
            known, correct = values.isfinite().all(0), torch.stack((one.correct, other.correct))
            numbers, wrong = values[:, known].double().numpy(), ~correct[:, known].numpy()
            if min(wrong.sum(1).min(), (~wrong).sum(1).min()) >= FEWEST:
                found.append((name, *area_difference(numbers, wrong, groups=_of(one.groups, known))))
    return tuple(
        DifferenceRow(one.alias, other.alias, name, PROPERTIES[name].title, gap, p)
        for (name, gap, _), p in zip(found, holm([p for _, _, p in found]))
    )


def quarter_rows(subjects: Sequence[Subject]) -> Iterator[QuarterRow]:
    """The accuracy in each quarter of the images by every property; equal values are never separated."""
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
                right = accuracy(evaluation.correct[inside], groups=groups, seed=subject.seed)
                ends = float(own[inside].amin()), float(own[inside].amax())
                yield QuarterRow(evaluation.alias, name, PROPERTIES[name].title, number, *ends, right)


def _of(groups: Tensor | None, images: Tensor) -> Tensor | None:
    return None if groups is None else groups[images]


def separation(
    numbers: Array, wrong: NDArray[np.bool_], *, groups: Tensor | None = None
) -> tuple[Estimate, float | None]:
    """The area of a finite number (n,) for failures (wrong) and successes, of which there are some: with its interval,
    and the two-sided p of an area of 0.5; neither of few images."""
    failing, passing = int(wrong.sum()), int((~wrong).sum())
    area, parts = _area(numbers, wrong)
    if groups is not None and len(groups.unique()) < len(groups):
        error = _error(parts, groups)
    else:  # DeLong's: failures and successes are drawn separately
        variances = ((own**2).sum() * len(own) / max(len(own) - 1, 1) for own in (parts[wrong], parts[~wrong]))
        error = float(np.sqrt(sum(variances)))
    ends: tuple[float | None, float | None] = (None, None)
    p, tested = None, min(failing, passing) >= FEWEST
    if tested and area in (0.0, 1.0):  # no interval of complete separation; p is the exact one of all orders
        p = min(1.0, 2 / math.comb(failing + passing, failing))
    elif tested and error == 0:
        p = 1.0
    elif tested:  # on the logit scale
        slope, centre = 1 / (area * (1 - area)), math.log(area / (1 - area))
        half = _Z * error * slope
        low, high = (1 / (1 + math.exp(-end)) for end in (centre - half, centre + half))
        ends, p = (low, high), float(2 * stats.norm.sf(abs(centre) / (error * slope)))
    return Estimate(area, *ends, len(numbers), ""), p


def area_difference(
    numbers: Array, wrong: NDArray[np.bool_], *, groups: Tensor | None = None
) -> tuple[Estimate, float]:
    """The area of a number for one model minus that for another, with its paired interval and p: both (2, n)."""
    (area, parts), (other, others) = (_area(*each) for each in zip(numbers, wrong))
    gap, error = area - other, _error(parts - others, groups)
    p = 1.0 if error == 0 else float(2 * stats.norm.sf(abs(gap) / error))
    return Estimate(gap, gap - _Z * error, gap + _Z * error, numbers.shape[1], ""), p


def _area(numbers: Array, wrong: NDArray[np.bool_]) -> tuple[float, Array]:
    """The area, and what each image contributes to its deviation from its mean (n,): for a failure from the share of
    successes below it, for a success from the share of failures above it."""
    high, low = np.sort(numbers[wrong]), np.sort(numbers[~wrong])
    below, not_above = (
        (np.searchsorted(others, own, "left") + np.searchsorted(others, own, "right")) / 2 / len(others)
        for others, own in ((low, numbers[wrong]), (high, numbers[~wrong]))
    )
    area, parts = float(below.mean()), np.empty(len(wrong))
    parts[wrong], parts[~wrong] = (below - area) / len(high), (1 - not_above - area) / len(low)
    return area, parts


def _error(parts: Array, groups: Tensor | None) -> float:
    """The standard error from sums of the images' deviations over groups."""
    sums = _by_group(parts, groups)
    return float(np.sqrt(len(sums) / max(len(sums) - 1, 1) * (sums**2).sum()))


def _by_group(values: Array, groups: Tensor | None) -> Array:
    """The sum of the values in each group; without groups each value is its own."""
    if groups is None:
        return values
    return np.bincount(groups.unique(return_inverse=True)[1].numpy(), weights=values).astype(np.float64)
