"""Causal tests of failures: misclassified images with what a category blames removed or restored, beside a control.

A test counts the images that are classified correctly after the change and after the control. The two counts are over
the same images, so McNemar's exact test compares them; its p-values are corrected for all tests of a run (Holm).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.analysis.answers.classes import reading
from vitlens.analysis.answers.evaluate import Evaluation, fitting_batch_size
from vitlens.analysis.failures.edits import (
    Edited,
    can_be_enlarged,
    enlarged_objects,
    without_marked,
    without_part,
)
from vitlens.analysis.failures.rules import Applied, MapCells
from vitlens.analysis.failures.taxonomy import FEWEST, TESTED, TESTS, CausalVerdict, judge
from vitlens.data.split import Split
from vitlens.devices import autocast, evaluating
from vitlens.models.model import Model
from vitlens.shapes import Images
from vitlens.summary import Line, Summary
from vitlens.uncertainty import LEVEL, Estimate, difference_of, holm, mcnemar, wilson

Members = Int[Tensor, " images"]  # indices of some images of a split

EXAMPLES = 3  # images of a test that are kept


@dataclass(frozen=True, repr=False)
class Repair(Summary):
    """One causal test of one model on m misclassified images.

    images: (m,) indices, in the random order in which they were drawn; corrected, control: (m,) whether each is
    classified correctly after the change and after the control; p: of McNemar's exact test, p_holm: corrected for all
    tests of the run; verdict: "supported" if the change corrects significantly more, "too few" below 10 images; edited:
    the first 3 images after the change, with their predictions and probabilities.
    """

    test: str
    images: Members
    corrected: Bool[Tensor, " images"]
    control: Bool[Tensor, " images"]
    p: float
    edited: Float[Tensor, "examples 3 height width"]
    prediction: Int[Tensor, " examples"]
    probability: Float[Tensor, " examples"]
    p_holm: float = 1.0
    verdict: CausalVerdict = "too few"

    def summary(self) -> Iterator[Line]:
        """The counts and the verdict."""
        corrected, control = self.rates
        yield Line("test", self.test)
        yield Line("corrected", corrected, f"of {len(self.images)} images")
        yield Line("corrected by the control", control, f"of {len(self.images)} images")
        yield Line("p (Holm)", self.p_holm)
        yield Line("verdict", self.verdict)

    @property
    def category(self) -> str:
        """The category whose cause was changed."""
        return TESTS[self.test].category

    @property
    def rates(self) -> tuple[Estimate, Estimate]:
        """The fractions corrected by the change and by the control, with Wilson's intervals."""
        n = len(self.images)
        return wilson(int(self.corrected.sum()), n), wilson(int(self.control.sum()), n)

    @property
    def gain(self) -> Estimate:
        """The difference of the two fractions, with its interval."""
        return difference(*self.rates)


@dataclass(frozen=True)
class IndexedCells:
    """Maps on cells of the images at these indices of a split."""

    indices: Members
    cells: MapCells


@dataclass(frozen=True)
class Subject:
    """One model, its images, its evaluation on them, and the maps of some of them (None without maps or masks)."""

    model: Model
    split: Split
    evaluation: Evaluation
    cells: IndexedCells | None = None
    precision: str = "fp32"
    batch_size: int | None = None
    seed: int = 0


def difference(first: Estimate, second: Estimate) -> Estimate:
    """The first fraction minus the second, with an interval from theirs (Newcombe 1998, method 10).

    It takes the two as independent, which is conservative for two treatments of the same images.
    """
    points = difference_of(first, second)
    low, high = (None if end is None else min(1.0, max(-1.0, end / 100)) for end in (points.low, points.high))
    return Estimate(points.value / 100, low, high, first.n)


def causal_tests(
    subject: Subject, rules: Mapping[str, Applied], *, advance: Callable[[int], object] = lambda _: None
) -> tuple[Repair, ...]:
    """Every test that these images allow, of a random sample of at most 50 misclassified images of its category.

    advance: called with the number of images just computed, two for each image of a test.
    """
    repairs = []
    for test, members in tested_images(subject, rules).items():
        size = subject.batch_size or fitting_batch_size(subject.model)
        after = [_answers(subject, _edited(subject, test, part), part, advance) for part in members.split(size)]
        corrected, control, edited, logits = (torch.cat(parts) for parts in zip(*after))
        p = mcnemar(int((corrected & ~control).sum()), int((control & ~corrected).sum()))
        shown = logits[:EXAMPLES].softmax(-1).max(-1)
        repairs.append(Repair(test, members, corrected, control, p, edited[:EXAMPLES], shown.indices, shown.values))
    return tuple(repairs)


def tested_images(subject: Subject, rules: Mapping[str, Applied]) -> dict[str, Members]:
    """The images of each test, drawn at random by the seed; tests without images are left out."""
    chosen = {}
    for test, known in TESTS.items():
        rule = rules.get(known.category)
        if rule is None:
            continue
        able = rule.holds & ~subject.evaluation.correct
        if test == "enlarge":
            assert subject.split.masks is not None
            able = able & can_be_enlarged(subject.split.masks)
        members = sample_of(able, subject.evaluation.groups, seed=subject.seed)
        if len(members):
            chosen[test] = members
    return chosen


def sample_of(able: Bool[Tensor, " batch"], groups: Tensor | None, *, seed: int, most: int = TESTED) -> Members:
    """Indices of at most `most` images at random, one of each group."""
    members = able.nonzero().flatten()
    members = members[torch.randperm(len(members), generator=torch.Generator().manual_seed(seed))]
    if groups is not None:
        seen: set[int] = set()
        own = groups[members].tolist()
        first = [place for place, group in enumerate(own) if not (group in seen or seen.add(group))]  # type: ignore[func-returns-value]
        members = members[first]
    return members[:most]


def concluded(repairs: Iterable[Iterable[Repair]]) -> tuple[tuple[Repair, ...], ...]:
    """The tests of several models with p-values corrected for all of them that have enough images, and verdicts."""
    each = [tuple(of_model) for of_model in repairs]
    judged = [repair.p for of_model in each for repair in of_model if len(repair.images) >= FEWEST]
    adjusted = iter(holm(judged))
    return tuple(
        tuple(_judged(repair, next(adjusted) if len(repair.images) >= FEWEST else 1.0) for repair in of_model)
        for of_model in each
    )


def _judged(repair: Repair, p_holm: float) -> Repair:
    corrected, control = int(repair.corrected.sum()), int(repair.control.sum())
    verdict = judge(corrected, control, len(repair.images), p_holm, level=LEVEL)
    return replace(repair, p_holm=p_holm, verdict=verdict)


def _edited(subject: Subject, test: str, members: Members) -> Edited:
    """These images after a test's change and after its control."""
    split, seed = subject.split.pick(members), subject.seed
    if test == "remove distractors":
        assert split.scenes is not None
        return Edited(*(split.scenes.redrawn(how).float() / 255 for how in ("without distractors", "other ground")))
    images = next(iter(split.batches(len(members)))).images
    assert split.masks is not None
    masks = split.masks.cpu()
    if test == "enlarge":
        return enlarged_objects(images, masks, seed=seed)
    assert subject.cells is not None
    place = {index: row for row, index in enumerate(subject.cells.indices.tolist())}
    cells = subject.cells.cells.pick(torch.tensor([place[index] for index in members.tolist()]))
    if test == "remove marked patches":
        return without_marked(images, masks, cells, seed=seed)
    return without_part(images, masks, cells, seed=seed)


@torch.no_grad()
def _answers(
    subject: Subject, edited: Edited, members: Members, advance: Callable[[int], object]
) -> tuple[Tensor, Tensor, Images, Tensor]:
    """Whether each image is classified correctly after the change and the control; the changed images; their logits."""
    model = subject.model
    read = reading(model.classes, subject.split.classes).read
    truth = subject.evaluation.labels[members]
    with evaluating(model), autocast(model.device, subject.precision):
        logits = [read(model(images.to(model.device)).float().cpu()) for images in edited]
    advance(2 * len(members))
    corrected, control = (each.argmax(-1) == truth for each in logits)
    return corrected, control, edited.changed.cpu(), logits[0]
