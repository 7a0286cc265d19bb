"""The self-checks of every attack, on a few images of each model."""

from collections.abc import Iterator, Sequence
from typing import Final

from torch import Tensor

from vitlens.analysis.robustness.checks import (
    UNLIMITED_EPSILON,
    AttackOutput,
    Attempt,
    at_epsilon_zero,
    every_image_broken,
    gradients_not_zero,
    more_steps,
    same_distances,
    same_in_any_batch,
    unlimited_budget,
    within_budget,
)
from vitlens.analysis.robustness.curve import Outcome
from vitlens.analysis.robustness.masking_signs import never_rises, same_in_ascending_order, weaker_breaks_no_more
from vitlens.analysis.robustness.verdict import Check
from vitlens.attacks.registry import ATTACKS
from vitlens.attacks.self_checks import checks_of, comparisons
from vitlens.commands.attack.measure.curves import steps_of
from vitlens.commands.attack.measure.sample import attempt_of, evenly_spaced
from vitlens.commands.attack.measure.sweep import ModelAttack, SweptAttack, attempted
from vitlens.commands.attack.record import CHECKS
from vitlens.commands.attack.record.rows import AttackCheckRow
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.progress.bar import progress

CHECKED: Final = 16  # correctly classified images on which the attacks are checked
_SLOW: Final = (6, 2)  # images and steps of slow attacks
_SEARCHED: Final = (6, 20)  # images of the full search of C&W, and its steps in other checks


def write_checks(folder: RunFolder, works: Sequence[ModelAttack], swept: Sequence[Sequence[SweptAttack]]) -> None:
    """Every check of every model."""
    rows = [
        AttackCheckRow(
            work.model.alias, check.name, check.attack, check.expected, check.found, check.passed, check.conclusive,
            check.against, check.of,
        )
        for work, of_model in zip(works, swept)
        for check in checked(work, of_model)
    ]  # fmt: skip
    folder.write(CHECKS, rows)


def checked(work: ModelAttack, swept: Sequence[SweptAttack]) -> list[Check]:
    """All checks of one model: of every attack, of its gradients, and of pairs of attacks.

    Empty where the model classifies no image correctly, as there is none to attack.
    """
    right = evenly_spaced(swept[0].outcome.clean.nonzero().flatten(), CHECKED)
    if not len(right):
        return []
    images, labels = work.images(right), work.labels[right]
    checks = [gradients_not_zero(work.model, images, labels)]
    if work.options.self_checks == "few":
        return [*checks, *_of_strongest(work, swept, images, labels)]
    title = f"checking the attacks on {work.model.alias}"
    with progress(title, len(swept), unit="attacks", quiet=work.run.quiet) as advance:
        for result in swept:
            checks += _of_attack(work, result, images, labels)
            if "from below" in _planned(work, result):
                checks.append(_from_below(work, result, right))
            advance(1)
    return [*checks, *_in_order([result.outcome for result in swept], [result.attack for result in swept])]


def _of_strongest(work: ModelAttack, swept: Sequence[SweptAttack], images: Tensor, labels: Tensor) -> Iterator[Check]:
    """More steps of the strongest attack that has them, and that attack against one without."""
    able = [result for result in swept if "more steps" in _planned(work, result)]
    for strongest in sorted(able, key=lambda result: ATTACKS[result.attack].strong)[-1:]:
        if ATTACKS[strongest.attack].kind == "budget":
            yield _more_steps(work, strongest, images, labels)
        of_pairs = _in_order([result.outcome for result in swept], [result.attack for result in swept])
        yield from [check for check in of_pairs if strongest.outcome.name in check.attack.split(", ")][:1]


def _more_steps(work: ModelAttack, swept: SweptAttack, images: Tensor, labels: Tensor) -> Check:
    """At the largest epsilon that leaves an image correct, where more steps could break more."""
    outcome, steps = swept.outcome, steps_of(ATTACKS[swept.attack], work.options)
    open_ = [epsilon for epsilon in outcome.epsilons if outcome.robust(epsilon).any()]
    epsilon = max(open_, default=outcome.epsilons[0])
    return more_steps(outcome.name, attempt_of(work, swept.attack), images, labels, epsilon=epsilon, steps=steps)


def _of_attack(work: ModelAttack, swept: SweptAttack, images: Tensor, labels: Tensor) -> Iterator[Check]:
    entry, slug, planned = ATTACKS[swept.attack], swept.outcome.name, _planned(work, swept)
    attempt, epsilon = attempt_of(work, swept.attack), swept.outcome.epsilons[-1]
    yield never_rises(swept.outcome)
    if "gradients read" in planned:
        zero = int((swept.silent & swept.outcome.clean).sum())
        right = int(swept.outcome.clean.sum())
        yield Check(
            "gradients read", slug, "not all zero, for at least 9 images in 10",
            f"all zero for {zero} of {right}", 10 * zero <= right, against=zero, of=right,
        )  # fmt: skip
    if entry.slow:
        images, labels = evenly_spaced(images, _SLOW[0]), evenly_spaced(labels, _SLOW[0])
        attempt = _with_steps(attempt, _SLOW[1])
    steps = steps_of(entry, work.options)
    if entry.kind == "minimum":
        attempt = _with_steps(attempt, min(steps, _SEARCHED[1]))
    if "epsilon 0" in planned:
        yield at_epsilon_zero(slug, attempt, images, labels)
    result = attempt(images, labels, epsilon=epsilon, batch_size=len(images))
    yield within_budget(slug, work.model, result, images, labels, epsilon=epsilon, norm=entry.norm)
    if len(images) > 1:
        smaller_batches = attempt(images, labels, epsilon=epsilon, batch_size=-(-len(images) // 2))
        yield same_in_any_batch(slug, result, smaller_batches)
    everything = UNLIMITED_EPSILON if entry.norm == "linf" else float(images[0].numel()) ** 0.5
    if entry.kind == "minimum":
        searched = evenly_spaced(images, _SEARCHED[0]), evenly_spaced(labels, _SEARCHED[0])
        yield same_distances(slug, attempt, *searched, epsilon=everything, steps=steps)
        yield every_image_broken(swept.outcome)
    elif "more steps" in planned:
        yield _more_steps(work, swept, images, labels)
        yield unlimited_budget(slug, attempt, images, labels, epsilon=everything)


def _from_below(work: ModelAttack, swept: SweptAttack, rows: Tensor) -> Check:
    """The same attack from the largest epsilon downwards and from the smallest upwards."""
    slow = ATTACKS[swept.attack].slow
    rows, steps = (evenly_spaced(rows, _SLOW[0]), _SLOW[1]) if slow else (rows, None)
    above, below = (
        attempted(work, swept.attack, rows, downwards=downwards, steps=steps).broken_at[swept.attack].cpu()
        for downwards in (True, False)
    )
    return same_in_ascending_order(swept.outcome.name, above, below)


def _planned(work: ModelAttack, swept: SweptAttack) -> tuple[str, ...]:
    """The names of an attack's checks."""
    return checks_of(
        ATTACKS[swept.attack], epsilons=len(swept.outcome.epsilons), downwards=work.options.downwards
    )  # fmt: skip


def _with_steps(attempt: Attempt, number: int) -> Attempt:
    def limited(
        images: Tensor, labels: Tensor, *, epsilon: float, steps: int | None = None, batch_size: int | None = None
    ) -> AttackOutput:
        return attempt(images, labels, epsilon=epsilon, steps=steps or number, batch_size=batch_size)

    return limited


def _in_order(outcomes: Sequence[Outcome], names: Sequence[str]) -> Iterator[Check]:
    """One step compared with many, attacks without gradients with those that use them, and other pairs."""
    by_name = dict(zip(names, outcomes))
    for pair in comparisons(names):
        yield weaker_breaks_no_more(by_name[pair.weaker], by_name[pair.stronger], reason=pair.reason)
