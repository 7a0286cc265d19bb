"""Stronger attacks on the images that survive weak ones: a margin loss and Square, before
robustness is claimed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.attacks.losses import FEWEST_CLASSES, dlr
from vitlens.attacks.registry import ATTACKS, UNIT
from vitlens.attacks.robustness import Outcome
from vitlens.commands.attack.epsilon import typed_epsilon
from vitlens.commands.attack.record import FAR, JUDGED, SURVIVED, SurvivorsRow
from vitlens.commands.attack.sweep import Victim

MARGIN = "pgd-dlr"
SQUARE = "square"
# a step of Square has 50 queries
STEPS: Final[Mapping[str, int]] = {MARGIN: 10, SQUARE: 4}
RESTARTS: Final[Mapping[str, int]] = {MARGIN: 2, SQUARE: 1}
# attacks that include a margin loss
_WITH_MARGIN: Final = (MARGIN, "apgd-dlr", "apgd-targeted", "auto")
_WITH_SQUARE: Final = (SQUARE, "auto")  # attacks that include Square


@dataclass(frozen=True)
class Survivors:
    """The images of one model that survive every L∞ attack up to an epsilon, before and after
    stronger attacks.

    epsilon: pixel units.
    before, after: (n,), True where an image is correct under every attack.
    broken: the number of images that each stronger attack breaks; empty if none was run.
    """

    epsilon: float
    before: Tensor
    after: Tensor
    broken: Mapping[str, int]


def follow_up(victims: Sequence[Victim]) -> list[Survivors]:
    """Attack the survivors of weak attacks on each model again.

    Return nothing if no attack looks weak. All models are compared at one epsilon: the smallest
    of at least 8/255, or else the largest.
    """
    epsilon = _compared_epsilon(victims[0])
    if epsilon is None:
        return []
    survivors_before = [_survivors(victim, epsilon) for victim in victims]
    attacks_look_weak = []
    for victim, before in zip(victims, survivors_before):
        attacks_look_weak.append(_looks_weak(victim, before, epsilon))
    if not any(attacks_look_weak):
        return []
    results = []
    for victim, before, looks_weak in zip(victims, survivors_before, attacks_look_weak):
        after = before
        broken: dict[str, int] = {}
        if looks_weak:
            after, broken = _attack_again(victim, before, epsilon)
        results.append(Survivors(epsilon, before, after, broken))
    return results


def survivors_rows(
    victims: Sequence[Victim], survivors: Sequence[Survivors]
) -> tuple[SurvivorsRow, ...]:
    """Return robust accuracy before and after the stronger attacks, for each model that was
    attacked again.
    """
    rows = []
    for victim, result in zip(victims, survivors):
        if not result.broken:
            continue
        groups = victim.run.split.groups
        row = SurvivorsRow(
            model=victim.model.alias,
            epsilon=typed_epsilon(result.epsilon, "linf"),
            survivors=int(result.before.sum()),
            before=accuracy(result.before, groups=groups),
            after=accuracy(result.after, groups=groups),
            margin=result.broken.get(MARGIN),
            square=result.broken.get(SQUARE),
        )
        rows.append(row)
    return tuple(rows)


def _compared_epsilon(victim: Victim) -> float | None:
    """Return the epsilon at which survivors are counted; None without an L∞ attack."""
    epsilons: list[float] = []
    for outcome in _linf_outcomes(victim):
        epsilons += outcome.epsilons
    if not epsilons:
        return None
    far = [epsilon for epsilon in epsilons if epsilon * UNIT >= FAR]
    return min(far, default=max(epsilons))


def _linf_outcomes(victim: Victim) -> list[Outcome]:
    outcomes = []
    for name, outcome in victim.outcomes.items():
        if ATTACKS[name].norm == "linf":
            outcomes.append(outcome)
    return outcomes


def _survivors(victim: Victim, epsilon: float) -> Tensor:
    """Return which images survive every L∞ attack up to this epsilon, (n,)."""
    survivors = victim.clean.clone()
    for outcome in _linf_outcomes(victim):
        survivors &= outcome.robust(epsilon)
    return survivors


def _looks_weak(victim: Victim, survivors: Tensor, epsilon: float) -> bool:
    """Return True if attacks look weak; False if no image survives.

    They do if no image was fooled at an epsilon of JUDGED or more. They also do if more than the
    share SURVIVED of all images survives at FAR or more, which no undefended model keeps.
    """
    if not bool(survivors.any()):
        return False
    epsilon_255 = epsilon * UNIT  # in 1/255, as the limits are
    is_none_fooled = bool((survivors == victim.clean).all())
    if is_none_fooled and epsilon_255 >= JUDGED:
        return True
    robust_accuracy = float(survivors.double().mean())
    return epsilon_255 >= FAR and robust_accuracy > SURVIVED


def _attack_again(
    victim: Victim, survivors: Tensor, epsilon: float
) -> tuple[Tensor, dict[str, int]]:
    """Attack with a margin loss, then with Square those that survive it.

    An attack that the run has included is skipped. Returns which images survive both, (n,), and the
    number that each attack broke, by its name.
    """
    names = [name for name in (MARGIN, SQUARE) if _is_needed(victim, name)]
    after = survivors.clone()
    broken: dict[str, int] = {}
    processes = victim.run.processes
    title = f"stronger attacks on {victim.model.alias}"
    with victim.run.progress(title, len(names), "attacks") as advance:
        for name in names:
            indices = after.nonzero().flatten()
            share = indices[processes.index :: processes.count]  # of this process
            # in the order of `indices`
            fooled = processes.gathered(_fooled_by(victim, name, share, epsilon)).bool()
            after[indices[fooled]] = False
            broken[name] = int(fooled.sum())
            advance(1)
    return after, broken


def _is_needed(victim: Victim, name: str) -> bool:
    """Return True if a stronger attack applies to the model and was not part of the run."""
    attacks = set(victim.outcomes)
    if name == SQUARE:
        return attacks.isdisjoint(_WITH_SQUARE)
    # without gradient attacks, the model may have no gradients
    uses_gradients = any(ATTACKS[attack].gradients for attack in attacks)
    has_enough_classes = len(victim.model.classes) >= FEWEST_CLASSES[dlr]
    return uses_gradients and has_enough_classes and attacks.isdisjoint(_WITH_MARGIN)


def _fooled_by(victim: Victim, name: str, indices: Tensor, epsilon: float) -> Tensor:
    """Return which of these images one attack breaks, (m,)."""
    if not len(indices):
        return torch.zeros(0, dtype=torch.bool)
    parts = []
    for part in indices.split(victim.part_size):
        result = victim.attempt(name)(
            victim.images(part),
            victim.labels[part],
            epsilon=epsilon,
            steps=STEPS[name],
            restarts=RESTARTS[name],
        )
        parts.append(result.success.cpu())
    return torch.cat(parts)
