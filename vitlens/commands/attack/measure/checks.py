"""The self-checks of every attack that was asked for, on a few images of each model."""

from collections.abc import Iterator, Sequence
from typing import Final

from torch import Tensor

from vitlens.analysis.robustness.checks import (
    EVERYTHING,
    Attacked,
    Attempt,
    all_found,
    as_near,
    at_epsilon_zero,
    more_steps,
    same_in_any_batch,
    unlimited,
    visible_gradients,
    within_budget,
)
from vitlens.analysis.robustness.curve import Outcome
from vitlens.analysis.robustness.masking_signs import never_rises, same_from_below, stronger_in_order
from vitlens.analysis.robustness.verdict import Check
from vitlens.attacks.registry import ATTACKS
from vitlens.attacks.self_checks import checks_of, comparisons
from vitlens.commands.attack.measure.curves import steps_of
from vitlens.commands.attack.measure.sample import attempt_of, spread
from vitlens.commands.attack.measure.sweep import ModelAttack, SweptAttack, attempted
from vitlens.commands.attack.record import CHECKS
from vitlens.commands.attack.record.rows import AttackCheckRow
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.progress import progress

CHECKED: Final = 16  # right images that are attacked again and again
_FEW: Final = (6, 2)  # images and steps of slow attacks
_SEARCHED: Final = (6, 20)  # of C&W, hundreds of passes an image: images of the long search, steps of the other checks


def write_checks(folder: RunFolder, works: Sequence[ModelAttack], swept: Sequence[Sequence[SweptAttack]]) -> None:
    """Every check of every model."""
    rows = [
        AttackCheckRow(
            work.model.alias, check.name, check.attack, check.expected, check.found, check.passed, check.conclusive
        )
        for work, of_model in zip(works, swept)
        for check in checked(work, of_model)
    ]
    folder.write(CHECKS, rows)


def checked(work: ModelAttack, swept: Sequence[SweptAttack]) -> list[Check]:
    """All checks of one model: of every attack, of its gradients, and of the attacks against each other.

    Nothing where the model has no image right: then there is none to attack.
    """
    right = spread(swept[0].outcome.clean.nonzero().flatten(), CHECKED)
    if not len(right):
        return []
    images, labels = work.images(right), work.labels[right]
    checks = [visible_gradients(work.model, images, labels)]
    title = f"checking the attacks on {work.model.alias}"
    with progress(title, len(swept), unit="attacks", quiet=work.run.quiet) as advance:
        for one in swept:
            checks += _of_attack(work, one, images, labels)
            if "from below" in _planned(work, one):
                checks.append(_from_below(work, one, right))
            advance(1)
    return [*checks, *_in_order([one.outcome for one in swept], [one.attack for one in swept])]


def _of_attack(work: ModelAttack, swept: SweptAttack, images: Tensor, labels: Tensor) -> Iterator[Check]:
    known, slug, planned = ATTACKS[swept.attack], swept.outcome.name, _planned(work, swept)
    attempt, epsilon = attempt_of(work, swept.attack), swept.outcome.epsilons[-1]
    yield never_rises(swept.outcome)
    if "gradients read" in planned:
        silent = int((swept.silent & swept.outcome.clean).sum())
        right = int(swept.outcome.clean.sum())
        yield Check(
            "gradients read", slug, "not all zero, for at least 9 images in 10",
            f"all zero for {silent} of {right}", 10 * silent <= right,
        )  # fmt: skip
    if known.slow:
        images, labels = spread(images, _FEW[0]), spread(labels, _FEW[0])
        attempt = _with_steps(attempt, _FEW[1])
    steps = steps_of(known, work.options)
    if known.kind == "minimum":
        attempt = _with_steps(attempt, min(steps, _SEARCHED[1]))
    if "epsilon 0" in planned:
        yield at_epsilon_zero(slug, attempt, images, labels)
    result = attempt(images, labels, epsilon=epsilon, batch_size=len(images))
    yield within_budget(slug, work.model, result, images, labels, epsilon=epsilon, norm=known.norm)
    if len(images) > 1:
        apart = attempt(images, labels, epsilon=epsilon, batch_size=-(-len(images) // 2))
        yield same_in_any_batch(slug, result, apart)
    everything = EVERYTHING if known.norm == "linf" else float(images[0].numel()) ** 0.5
    if known.kind == "minimum":
        some = spread(images, _SEARCHED[0]), spread(labels, _SEARCHED[0])
        yield as_near(slug, attempt, *some, epsilon=everything, steps=steps)
        yield all_found(swept.outcome)
    elif "more steps" in planned:
        yield more_steps(slug, attempt, images, labels, epsilon=swept.outcome.epsilons[0], steps=steps)
        yield unlimited(slug, attempt, images, labels, epsilon=everything)


def _from_below(work: ModelAttack, swept: SweptAttack, rows: Tensor) -> Check:
    """The same attack from the largest epsilon and from the smallest."""
    slow = ATTACKS[swept.attack].slow
    rows, steps = (spread(rows, _FEW[0]), _FEW[1]) if slow else (rows, None)
    above, below = (
        attempted(work, swept.attack, rows, downwards=downwards, steps=steps).broken_at[swept.attack].cpu()
        for downwards in (True, False)
    )
    return same_from_below(swept.outcome.name, above, below)


def _planned(work: ModelAttack, swept: SweptAttack) -> tuple[str, ...]:
    """The names of the checks that an attack gets."""
    return checks_of(
        ATTACKS[swept.attack], epsilons=len(swept.outcome.epsilons), downwards=work.options.downwards
    )  # fmt: skip


def _with_steps(attempt: Attempt, few: int) -> Attempt:
    def short(
        images: Tensor, labels: Tensor, *, epsilon: float, steps: int | None = None, batch_size: int | None = None
    ) -> Attacked:
        return attempt(images, labels, epsilon=epsilon, steps=steps or few, batch_size=batch_size)

    return short


def _in_order(outcomes: Sequence[Outcome], names: Sequence[str]) -> Iterator[Check]:
    """One step against many, attacks without gradients against those with, and other pairs of the registry."""
    known = dict(zip(names, outcomes))
    for pair in comparisons(names):
        yield stronger_in_order(known[pair.weaker], known[pair.stronger], reason=pair.reason)
