"""The self-checks of the attacks on one model: of its gradients, of every attack, and of pairs of
attacks.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from torch import Tensor

from vitlens.attacks.attack import AttackResult
from vitlens.attacks.checks import (
    UNLIMITED_EPSILON,
    Check,
    Trial,
    every_image_broken,
    gradients_not_zero,
    gradients_read,
    never_rises,
    same_in_any_batch,
    same_in_ascending_order,
    weaker_breaks_no_more,
)
from vitlens.attacks.registry import ATTACKS, Attack, comparisons
from vitlens.commands.attack.sample import evenly_spaced
from vitlens.commands.attack.sweep import Victim

CHECKED: Final = 16  # correctly classified images on which attacks are checked
_SLOW_IMAGES: Final = 6  # images on which slow attacks are checked
_SLOW_STEPS: Final = 2  # steps of slow attacks in checks
_SEARCHED_IMAGES: Final = 6  # images of the full search of a minimum-norm attack
_SEARCH_STEPS: Final = 20  # steps of a minimum-norm attack in its other checks


def self_checks(victim: Victim) -> Iterator[Check]:
    """Yield the self-checks of the attacks on a model.

    There are none if the model classifies no image correctly, because there is no image to attack.
    """
    correct = evenly_spaced(victim.clean.nonzero().flatten(), CHECKED)
    if not len(correct):
        return
    yield gradients_not_zero(victim.model, victim.images(correct), victim.labels[correct])
    if victim.run.options.self_checks == "few":
        yield from _strongest_attack_checks(victim, correct)
        return
    title = f"checking the attacks on {victim.model.alias}"
    with victim.run.progress(title, len(victim.outcomes), "attacks") as advance:
        for name in victim.outcomes:
            yield from _attack_checks(victim, name, correct)
            advance(1)
    yield from _pair_checks(victim)


def _pair_checks(victim: Victim) -> list[Check]:
    """Return the checks of a weaker against a stronger attack."""
    outcomes = victim.outcomes
    checks = []
    for weaker, stronger, reason in comparisons([*outcomes]):
        check = weaker_breaks_no_more(outcomes[weaker], outcomes[stronger], reason=reason)
        checks.append(check)
    return checks


def _strongest_attack_checks(victim: Victim, correct: Tensor) -> Iterator[Check]:
    """Yield the two checks of --self-checks few that concern the strongest attack."""
    candidates = [name for name in victim.outcomes if ATTACKS[name].takes_more_steps]
    if not candidates:
        return
    candidates.sort(key=lambda name: ATTACKS[name].strong)  # `strong` is a flag: False comes first
    strongest = candidates[-1]
    if ATTACKS[strongest].kind == "budget":
        yield _more_steps(victim, strongest, correct)
    slug = victim.outcomes[strongest].name
    for check in _pair_checks(victim):
        compared_attacks = check.attack.split(", ")  # a check of two attacks names both
        if slug in compared_attacks:
            yield check
            return  # one comparison is enough for --self-checks few


def _more_steps(victim: Victim, name: str, correct: Tensor) -> Check:
    """Check an attack at the largest epsilon with survivors, because there more steps can break
    more images.
    """
    outcome = victim.outcomes[name]
    with_survivors = [epsilon for epsilon in outcome.epsilons if outcome.robust(epsilon).any()]
    smallest = outcome.epsilons[0]
    epsilon = max(with_survivors, default=smallest)
    groups = None
    if outcome.groups is not None:
        groups = outcome.groups[correct.cpu()]
    trial = Trial(
        attack=outcome.name,
        attempt=victim.attempt(name),
        images=victim.images(correct),
        labels=victim.labels[correct],
        groups=groups,
    )
    return trial.more_steps(epsilon=epsilon, steps=victim.steps_of(ATTACKS[name]))


def _attack_checks(victim: Victim, name: str, correct: Tensor) -> Iterator[Check]:
    """Yield the checks of one attack.

    A slow one is checked on fewer images, and with fewer steps but for `_more_steps`.
    """
    entry = ATTACKS[name]
    outcome = victim.outcomes[name]
    yield never_rises(outcome)
    if entry.gradients:
        has_zero_gradients = outcome.zero_gradients & victim.clean
        yield gradients_read(
            "gradients read",
            outcome.name,
            zero=int(has_zero_gradients.sum()),
            count=int(victim.clean.sum()),
        )
    checked = correct
    if entry.slow:
        checked = evenly_spaced(correct, _SLOW_IMAGES)
    trial = Trial(
        attack=outcome.name,
        attempt=_quick_attempt(victim, entry),
        images=victim.images(checked),
        labels=victim.labels[checked],
    )
    yield from _trial_checks(victim, entry, trial)
    largest = _largest_perturbation(trial.images, entry)
    if entry.kind == "minimum":
        yield _same_distances(victim, entry, trial, epsilon=largest)
        yield every_image_broken(outcome)
    elif entry.takes_more_steps:
        yield _more_steps(victim, name, checked)
        yield trial.unlimited_budget(epsilon=largest)
    has_orders = entry.kind == "budget" and len(outcome.epsilons) > 1
    if victim.run.options.downwards and has_orders:
        yield _same_in_both_orders(victim, entry, checked)


def _quick_attempt(victim: Victim, entry: Attack) -> Callable[..., AttackResult]:
    """Return the attack with few steps if it is slow or a search, else as it is."""
    attempt = victim.attempt(entry.name)
    if entry.kind == "minimum":
        return partial(attempt, steps=min(victim.steps_of(entry), _SEARCH_STEPS))
    if entry.slow:
        return partial(attempt, steps=_SLOW_STEPS)
    return attempt


def _trial_checks(victim: Victim, entry: Attack, trial: Trial) -> Iterator[Check]:
    """Yield the checks of epsilon 0, of the budget, and of the batch size."""
    epsilon = victim.outcomes[entry.name].epsilons[-1]
    images = len(trial.images)
    if entry.kind == "budget" and entry.takes_epsilon:
        yield trial.at_epsilon_zero()
    result = trial.at(epsilon=epsilon, batch_size=images)
    yield trial.within_budget(victim.model, result, epsilon=epsilon, norm=entry.norm)
    if images > 1:
        half = (images + 1) // 2
        smaller_batches = trial.at(epsilon=epsilon, batch_size=half)
        yield same_in_any_batch(trial.attack, result, smaller_batches)


def _largest_perturbation(images: Tensor, entry: Attack) -> float:
    """Return the epsilon within which an image can become any other, in the norm of the attack."""
    if entry.norm == "linf":
        return UNLIMITED_EPSILON
    diagonal: float = images[0].numel() ** 0.5  # L2 distance of a black and a white image
    return diagonal


def _same_distances(victim: Victim, entry: Attack, trial: Trial, *, epsilon: float) -> Check:
    """Check on a few images that a longer search finds the same distances."""
    trial_on_few = Trial(
        attack=trial.attack,
        attempt=trial.attempt,
        images=evenly_spaced(trial.images, _SEARCHED_IMAGES),
        labels=evenly_spaced(trial.labels, _SEARCHED_IMAGES),
    )
    return trial_on_few.same_distances(epsilon=epsilon, steps=victim.steps_of(entry))


def _same_in_both_orders(victim: Victim, entry: Attack, correct: Tensor) -> Check:
    """Check that trying the largest epsilon first breaks the same images."""
    changes: dict[str, Any] = {}
    if entry.slow:
        changes["steps"] = _SLOW_STEPS
    descending = victim.sweep_epsilons(entry.name, correct, downwards=True, **changes)
    ascending = victim.sweep_epsilons(entry.name, correct, downwards=False, **changes)
    return same_in_ascending_order(
        victim.outcomes[entry.name].name,
        descending.broken_at.cpu(),
        ascending.broken_at.cpu(),
    )
