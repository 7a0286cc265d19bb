"""`vitlens.failures`: why images are misclassified, by categories with causal tests."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Final

import torch
from jaxtyping import Bool
from torch import Tensor

from vitlens.analysis.answers.evaluate import accuracy, evaluate
from vitlens.analysis.failures.causal import IndexedCells, Repair, Subject, causal_tests, concluded, difference
from vitlens.analysis.failures.compare import compare
from vitlens.analysis.failures.edits import changed_cells
from vitlens.analysis.failures.rules import (
    Applied,
    cut,
    doubtful,
    elsewhere,
    look_alike,
    map_cells,
    on_distractors,
    small,
    spread,
    wrong_part,
)
from vitlens.analysis.failures.taxonomy import CATEGORIES, NOT_EXPLAINED
from vitlens.analysis.faithfulness.resampled import AnyMaps, removal_grid
from vitlens.data.split import Split, as_split, takes_splits
from vitlens.models.model import Model
from vitlens.pixels import AnyImages
from vitlens.references import resolved
from vitlens.shapes import Labels
from vitlens.summary import Line, Summary
from vitlens.uncertainty import LEVEL, Estimate, Side, beyond

ALWAYS_FAILURES: Final = (
    "doubtful label",
)  # hold for no correct prediction by their rule, so that they explain nothing


@dataclass(frozen=True)
class CategoryRate:
    """How often the rule of a category holds, each over the images for which that is known.

    failures, successes: fractions of misclassified and of correctly classified images, None without any; difference: of
    the two; more_frequent: whether it holds more often for failures, also for as many comparisons as were made.
    """

    category: str
    failures: Estimate | None
    successes: Estimate | None
    difference: Estimate | None
    more_frequent: bool = False


@dataclass(frozen=True, repr=False)
class Diagnosis(Summary):
    """Why one model misclassifies images.

    rates: of the categories that these images can be judged by; repairs: the causal tests; not_explained: the fraction
    of failures in no category that explains any, None without failures; rules: for every image whether each rule holds;
    correct: (n,) whether each image is classified correctly; groups: of images that share a source, or None.
    """

    alias: str
    rates: tuple[CategoryRate, ...]
    repairs: tuple[Repair, ...]
    not_explained: Estimate | None
    rules: Mapping[str, Applied]
    correct: Bool[Tensor, " batch"]
    groups: Tensor | None = None

    @property
    def failures(self) -> int:
        """The number of misclassified images."""
        return int((~self.correct).sum())

    def summary(self) -> Iterator[Line]:
        """The categories with their rates, the causal tests, and what is not explained."""
        yield Line("misclassified", self.failures, f"of {len(self.correct)} images")
        for rate in self.rates:
            yield Line(CATEGORIES[rate.category].title, rate.failures, "of failures")
            yield Line("", rate.successes, "of correct predictions")
        for repair in self.repairs:
            changed, control = repair.rates
            yield Line(f"{repair.test}: {repair.verdict}", changed, "corrected")
            yield Line("", control, "corrected by the control")
        yield Line(NOT_EXPLAINED, self.not_explained, "of failures")

    @property
    def explaining(self) -> tuple[str, ...]:
        """The categories that explain failures: more frequent among them, or supported by a causal test."""
        supported = {repair.category for repair in self.repairs if repair.verdict == "supported"}
        named = (rate for rate in self.rates if rate.failures is not None and rate.failures.value > 0)
        return tuple(rate.category for rate in named if rate.more_frequent or rate.category in supported)


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
    advance: Callable[[int], object] = lambda _: None,
) -> Diagnosis:
    """Why a model misclassifies labelled images: categories of failures, and causal tests of what they blame.

    images: a Split, or any form that `vitlens.images` takes; labels: class indices of the model (n,) (None: those of
    the Split or the class folders); second: another model of these classes, for doubtful labels; method: of the maps of
    the predicted class (None: the preferred one of the model's family). Categories that need masks of objects, other
    images of a class or a second model are left out without them. Each test changes at most 50 misclassified images,
    beside a control; see `vitlens.analysis.failures.taxonomy`. Raises DataError without labels, InputError when a model
    does not know the data's classes, and UnsupportedError for a method that the model does not have.

    >>> import vitlens
    >>> found = vitlens.failures(vitlens.load("cnn-digits"), vitlens.load_data("digits", limit=40))
    >>> found.failures, [repair.verdict for repair in found.repairs]
    (2, ['too few'])
    """
    split = as_split(images)
    evaluation = evaluate(model, split, batch_size=batch_size, advance=advance)
    rules: dict[str, Applied] = {}
    if second is not None:
        rules["doubtful label"] = doubtful(compare(model, second, split, batch_size=batch_size))
    maps = None
    if split.masks is not None:
        explain = resolved("vitlens.attribution.explain:explain")  # a higher layer, as is the preferred method
        chosen = method or resolved("vitlens.attribution.explain:preferred_method")(model)
        maps = explain(model, split, method=chosen, batch_size=batch_size, seed=seed).detach().float().cpu()
    subject = Subject(model, split, evaluation, cells_for(model, split, maps), batch_size=batch_size, seed=seed)
    return together([diagnosis(subject, {**rules_of(subject), **rules}, advance=advance)])[0]


def cells_for(model: Model, split: Split, maps: AnyMaps | None, indices: Tensor | None = None) -> IndexedCells | None:
    """Maps of the images at these indices (None: of all) on the model's cells; None without maps or masks."""
    if maps is None or split.masks is None:
        return None
    at = torch.arange(len(split)) if indices is None else indices
    return IndexedCells(at, map_cells(maps, split.masks[at.to(split.masks.device)].cpu(), grid=removal_grid(model)))


def diagnosis(
    subject: Subject, rules: Mapping[str, Applied], *, advance: Callable[[int], object] = lambda _: None
) -> Diagnosis:
    """The categories and the causal tests of one model, before `together`. rules: applied to all images."""
    evaluation = subject.evaluation
    rates = tuple(
        rate_of(name, rules[name], evaluation.correct, groups=evaluation.groups, seed=subject.seed)
        for name in CATEGORIES
        if name in rules and bool(rules[name].known.any())
    )
    repairs = causal_tests(subject, rules, advance=advance)
    return Diagnosis(evaluation.alias, rates, repairs, None, rules, evaluation.correct, evaluation.groups)


def rules_of(subject: Subject) -> dict[str, Applied]:
    """The rules that these images can be judged by, applied to all of them."""
    split, evaluation = subject.split, subject.evaluation
    rules = {"look-alike": look_alike(evaluation.logits, evaluation.labels)}
    if split.masks is not None:
        masks = split.masks.cpu()
        rules |= {"small": small(masks), "cut": cut(masks)}
    if subject.cells is None:
        return rules
    indices, cells = subject.cells.indices, subject.cells.cells
    of_maps = {"elsewhere": elsewhere(cells), "wrong part": wrong_part(cells)}
    if split.scenes is not None:
        scenes = split.pick(indices)
        assert scenes.scenes is not None
        plain = scenes.scenes.redrawn("without distractors").float() / 255
        drawn = next(iter(scenes.batches(len(scenes)))).images
        changed = changed_cells(drawn, plain, cells.grid)
        of_maps["distractor"] = on_distractors(cells.shares, changed, cells.objects, cells.known)
    return rules | {name: spread(own, indices, len(split)) for name, own in of_maps.items()}


def rate_of(
    category: str, rule: Applied, correct: Tensor, *, groups: Tensor | None = None, seed: int = 0
) -> CategoryRate:
    """How often a rule holds for failures and for correct predictions, where it is known."""
    rates = []
    for members in (rule.known & ~correct, rule.known & correct):
        own = None if groups is None else groups[members]
        rates.append(accuracy(rule.holds[members], groups=own, seed=seed) if bool(members.any()) else None)
    wrong, right = rates
    comparable = wrong is not None and right is not None and category not in ALWAYS_FAILURES
    return CategoryRate(category, wrong, right, difference(wrong, right) if comparable else None)  # type: ignore[arg-type]


def together(diagnoses: Sequence[Diagnosis]) -> tuple[Diagnosis, ...]:
    """The same diagnoses with tests and comparisons corrected for all of them, and what they leave unexplained.

    Intervals of differences are widened for as many comparisons as there are (Bonferroni), p-values corrected (Holm).
    """
    looks = sum(rate.difference is not None for each in diagnoses for rate in each.rates)
    judged = concluded([each.repairs for each in diagnoses])
    known = (
        replace(each, repairs=repairs, rates=tuple(_marked(rate, looks) for rate in each.rates))
        for each, repairs in zip(diagnoses, judged)
    )
    return tuple(replace(each, not_explained=_not_explained(each)) for each in known)


def _marked(rate: CategoryRate, looks: int) -> CategoryRate:
    if rate.difference is None:
        return rate
    return replace(rate, more_frequent=beyond(_wider(rate.difference, looks), 0.0) is Side.ABOVE)


def _wider(estimate: Estimate, looks: int) -> Estimate:
    """The estimate with its 95 % interval widened for this number of comparisons."""
    if estimate.low is None or estimate.high is None:
        return estimate
    normal = NormalDist()
    times = normal.inv_cdf(1 - LEVEL / 2 / max(1, looks)) / normal.inv_cdf(1 - LEVEL / 2)
    low, high = (estimate.value + times * (end - estimate.value) for end in (estimate.low, estimate.high))
    return replace(estimate, low=low, high=high)


def _not_explained(each: Diagnosis) -> Estimate | None:
    """The fraction of failures in none of the explaining categories, over those for which all of these are known."""
    wrong = ~each.correct
    rules = [each.rules[name] for name in each.explaining]
    members = wrong.clone()
    for rule in rules:
        members &= rule.known
    if not members.any():
        return None
    left = members.clone()
    for rule in rules:
        left &= ~rule.holds
    return accuracy(left[members], groups=None if each.groups is None else each.groups[members])
