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
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from vitlens.analysis.evaluation.classes import reading
from vitlens.analysis.evaluation.evaluate import accuracy, evaluate, fitting_batch_size
from vitlens.analysis.failures.covariates import CHANGES, PerImage, Pictures, Subject, covariates
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
Values = Mapping[str, PerImage]
PARTS: Final = 4  # the images are cut in quarters by a property
_EACH: Final = 5  # errors (and successes) for each property of the regression
_RIDGE: Final = 1e-4  # on standardised coefficients: keeps them finite where a property separates completely

FEWEST = 10  # failures, and successes, for an interval and a test
Array = NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class Diagnosis(Summary):
    """Why models misclassify images, of one or of two models on the same images.

    values: of every property by image, for each model; correct: (n,) whether each image is classified correctly by the
    first model; covariates, differences, quarters, interventions: rows, see analysis/failures/properties.py.
    """

    alias: str
    values: tuple[Values, ...]
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
    """The diagnosis of one or two models. progress: of this number of passes over a changed image.

    All images are changed in those properties that separate errors before any correction, as no others can be shown to
    be a cause, towards what correct predictions have.
    """
    each = [(subject, covariates(subject)) for subject in subjects]
    rows, plans, tested = covariate_rows(each), [], list[InterventionRow]()
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
        first.alias, tuple(values for _, values in each), first.correct, rows, difference_rows(each),
        tuple(quarter_rows(each)), tuple(replace(row, p_holm=p) for row, p in zip(tested, p_values)),
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
        model=row.model,
        covariate=row.covariate,
        change=row.change,
        control=row.known.control,
        errors=int((~right).sum()),
        mended=int((changed & ~right).sum()),
        control_mended=int((control & ~right).sum()),
        broken=int((right & ~changed).sum()),
        control_broken=int((right & ~control).sum()),
        gain=accuracy_difference(changed, control, groups=groups, seed=subject.seed),
        p=paired_test(changed, control, groups),
        p_errors=paired_test(changed[~right], control[~right], None if groups is None else groups[~right]),
    )


def paired_test(first: Tensor, second: Tensor, groups: Tensor | None) -> float:
    """McNemar's exact test of two outcomes on the same images; images of one group count once, by what prevails."""
    net = first.double() - second.double()
    if groups is not None:
        member = groups.unique(return_inverse=True)[1]
        net = torch.zeros(int(member.max()) + 1 if len(member) else 0, dtype=torch.float64).index_add_(0, member, net)
    return mcnemar(int((net > 0).sum()), int((net < 0).sum()))


def covariate_rows(each: Sequence[tuple[Subject, Values]]) -> tuple[CovariateRow, ...]:
    """How each property separates the errors of each model, alone and given the others."""
    rows: list[CovariateRow] = []
    for subject, values in each:
        evaluation = subject.evaluation
        joint = regression(values, evaluation.correct, groups=evaluation.groups)
        for one in separations(values, evaluation.correct, groups=evaluation.groups):
            title, medians = PROPERTIES[one.name].title, (one.median_failure, one.median_success)
            given = joint.get(one.name, (None, None))
            rows.append(
                CovariateRow(evaluation.alias, one.name, title, one.area, one.failures, *medians, one.p, None, *given)
            )
    for name, corrected in (("p", "p_holm"), ("p_joint", "p_joint_holm")):
        adjusted = iter(holm([p for row in rows if (p := getattr(row, name)) is not None]))
        found: list[dict[str, Any]] = [
            {} if getattr(row, name) is None else {corrected: next(adjusted)} for row in rows
        ]
        rows = [replace(row, **more) for row, more in zip(rows, found)]
    return tuple(rows)


def regression(
    values: Values, correct: Bool[Tensor, " batch"], *, groups: Tensor | None = None
) -> dict[str, tuple[float, float]]:
    """Of a logistic regression of errors on the properties that no prediction decides: the likelihood ratio without
    each, and its p. Only those that are known of all images, the strongest alone, one for every five errors; of images
    that share a source, one. Nothing with fewer than 10 errors or successes."""
    from scipy import stats

    kept = np.arange(len(correct)) if groups is None else np.unique(groups.cpu().numpy(), return_index=True)[1]
    wrong = ~correct.cpu().numpy()[kept]
    few = int(min(wrong.sum(), (~wrong).sum()))
    if few < FEWEST:
        return {}
    usable = {name: one for name, one in values.items() if not PROPERTIES[name].outcome and bool(one.isfinite().all())}
    alone = sorted(separations(usable, correct, groups=groups), key=lambda one: 1.0 if one.p is None else one.p)
    names = [one.name for one in alone][: few // _EACH]
    columns = np.stack([values[name].double().cpu().numpy()[kept] for name in names], 1)
    columns = (columns - columns.mean(0)) / np.maximum(columns.std(0), 1e-12)
    whole = deviance(columns, wrong)
    found = {}
    for at, name in enumerate(names):
        ratio = max(0.0, deviance(np.delete(columns, at, 1), wrong) - whole)
        found[name] = ratio, float(stats.chi2.sf(ratio, 1))
    return found


def deviance(columns: NDArray[np.float64], wrong: NDArray[np.bool_]) -> float:
    """Minus twice the log likelihood of the logistic regression of `wrong` on standardised columns and a constant."""
    from sklearn.linear_model import LogisticRegression  # takes a second to import

    design = columns if columns.shape[1] else np.zeros((len(wrong), 1))
    model = LogisticRegression(C=1 / _RIDGE, solver="newton-cholesky", tol=1e-8, max_iter=1000)
    with warnings.catch_warnings(action="ignore"):  # it goes on with L-BFGS where Newton's steps do not descend
        scores = model.fit(design, wrong).decision_function(design)
    return 2 * float(np.logaddexp(0, scores).sum() - scores[wrong].sum())


def difference_rows(each: Sequence[tuple[Subject, Values]]) -> tuple[DifferenceRow, ...]:
    """For two models, how much better each property separates the errors of the first."""
    if len(each) != 2:
        return ()
    (first, own), (second, others) = ((subject.evaluation, values) for subject, values in each)
    named = [
        (name, *found)
        for name in own
        if name in others
        and (found := area_difference(own[name], others[name], first.correct, second.correct, groups=first.groups))
    ]
    return tuple(
        DifferenceRow(first.alias, second.alias, name, PROPERTIES[name].title, gap, p)
        for (name, gap, _), p in zip(named, holm([p for _, _, p in named]))
    )


def quarter_rows(each: Sequence[tuple[Subject, Values]]) -> Iterator[QuarterRow]:
    """The accuracy in each quarter of the images by every property; equal values are never separated."""
    inner = torch.linspace(0, 1, PARTS + 1, dtype=torch.float64)[1:-1]
    for subject, values in each:
        evaluation = subject.evaluation
        for name, own in values.items():
            known = own.isfinite()
            edges = torch.quantile(own[known].double(), inner).unique()
            member = torch.where(known, torch.bucketize(own.double(), edges), -1)
            for number, part in enumerate(member[known].unique(), 1):
                inside = member == part
                groups = None if evaluation.groups is None else evaluation.groups[inside]
                right = accuracy(evaluation.correct[inside], groups=groups, seed=subject.seed)
                ends = float(own[inside].amin()), float(own[inside].amax())
                yield QuarterRow(evaluation.alias, name, PROPERTIES[name].title, number, *ends, right)


@dataclass(frozen=True)
class Separation:
    """How well a number separates failures from successes.

    area: with its interval (None with too few images); failures: their number; median_failure, median_success: medians
    of the number; p: two-sided p-value of area 0.5 (None with too few images).
    """

    name: str
    area: Estimate
    failures: int
    median_failure: float
    median_success: float
    p: float | None


def separations(
    numbers: Mapping[str, Float[Tensor, " batch"]], correct: Bool[Tensor, " batch"], *, groups: Tensor | None = None
) -> tuple[Separation, ...]:
    """The separation by each number (n,); images of NaN (not known) are left out, as are numbers without both failures
    and successes."""
    results = []
    for name, values in numbers.items():
        known = values.isfinite()
        right = correct[known.to(correct.device)]
        if 0 < int(right.sum()) < len(right):
            own = None if groups is None else groups[known]
            results.append(separation(values[known], right, name=name, groups=own))
    return tuple(results)


def separation(
    values: Float[Tensor, " batch"],
    correct: Bool[Tensor, " batch"],
    *,
    name: str = "",
    groups: Tensor | None = None,
) -> Separation:
    """How well one number (n,), finite, separates failures from successes, of which there are some."""
    numbers = values.detach().cpu().double().numpy()
    wrong = ~correct.cpu().numpy()
    failing, passing = int(wrong.sum()), int((~wrong).sum())
    area, parts = _area(numbers, wrong)
    if groups is not None and len(groups.unique()) < len(groups):
        error = _grouped_error(parts, groups)
    else:  # DeLong's
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
        half = float(stats.norm.ppf(0.975)) * error * slope
        low, high = (1 / (1 + math.exp(-end)) for end in (centre - half, centre + half))
        ends, p = (low, high), float(2 * stats.norm.sf(abs(centre) / (error * slope)))
    medians = float(np.median(numbers[wrong])), float(np.median(numbers[~wrong]))
    return Separation(name, Estimate(area, *ends, len(numbers), ""), failing, *medians, p)


def area_difference(
    first: Float[Tensor, " batch"],
    second: Float[Tensor, " batch"],
    first_correct: Bool[Tensor, " batch"],
    second_correct: Bool[Tensor, " batch"],
    *,
    groups: Tensor | None = None,
) -> tuple[Estimate, float] | None:
    """The area of a number for one model minus that for another on the same images, with its paired interval and p.

    Images of NaN (not known) are left out; None with fewer than 10 failures or successes of either.
    """
    known = first.isfinite() & second.isfinite()
    found = []
    for values, correct in ((first, first_correct), (second, second_correct)):
        wrong = ~correct[known].cpu().numpy()
        if min(wrong.sum(), (~wrong).sum()) < FEWEST:
            return None
        found.append(_area(values[known].detach().cpu().double().numpy(), wrong))
    (area, parts), (other, others) = found
    error = _grouped_error(parts - others, None if groups is None else groups[known])
    gap, half = area - other, float(stats.norm.ppf(0.975)) * error
    p = 1.0 if error == 0 else float(2 * stats.norm.sf(abs(gap) / error))
    return Estimate(gap, gap - half, gap + half, int(known.sum()), ""), p


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


def _grouped_error(parts: Array, groups: Tensor | None) -> float:
    """The standard error from sums of the images' deviations over groups."""
    members = np.arange(len(parts)) if groups is None else groups.cpu().unique(return_inverse=True)[1].numpy()
    sums = np.bincount(members, weights=parts)
    return float(np.sqrt(len(sums) / max(len(sums) - 1, 1) * (sums**2).sum()))
