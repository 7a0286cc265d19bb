"""`vitlens.failures`: what the errors of a model have in common, and what mends them when it is changed."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.evaluation.classes import reading
from vitlens.analysis.evaluation.evaluate import accuracy, evaluate, fitting_batch_size
from vitlens.analysis.evaluation.separation import FEWEST, area_difference, separations
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
from vitlens.uncertainty import LEVEL, accuracy_difference, holm, mcnemar

Advance = Callable[[int], object]
Values = Mapping[str, PerImage]
PARTS: Final = 4  # the images are cut in quarters by a property
_EACH: Final = 5  # errors (and successes) for each property of the regression
_RIDGE: Final = 1e-4  # on standardised coefficients: keeps them finite where a property separates completely


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
