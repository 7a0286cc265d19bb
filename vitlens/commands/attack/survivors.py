"""Stronger attacks on the images that survive weak ones: a margin loss and Square, before robustness is claimed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.attacks.losses import FEWEST_CLASSES, dlr
from vitlens.attacks.registry import ATTACKS, UNIT
from vitlens.attacks.robustness import Outcome
from vitlens.commands.attack.record import FAR, JUDGED, SURVIVED, SurvivorsRow, typed_epsilon
from vitlens.commands.attack.sweep import ModelAttack

MARGIN = "pgd-dlr"
SQUARE = "square"
STEPS: Final[Mapping[str, int]] = {MARGIN: 10, SQUARE: 4}  # of Square 50 queries each
RESTARTS: Final[Mapping[str, int]] = {MARGIN: 2, SQUARE: 1}
_WITH_MARGIN: Final = (MARGIN, "apgd-dlr", "apgd-targeted", "auto")
_WITH_SQUARE: Final = (SQUARE, "auto")


@dataclass(frozen=True)
class Survivors:
    """The images of one model that survived every L∞ attack up to an epsilon, before and after stronger attacks.

    epsilon: pixel units; before, after: (n,) correct under every attack; broken: how many each stronger attack broke,
    empty where none was needed.
    """

    epsilon: float
    before: Tensor
    after: Tensor
    broken: Mapping[str, int]


def follow_up(works: Sequence[ModelAttack]) -> list[Survivors]:
    """Attack the survivors of weak attacks on each model once more; nothing where no attack looks weak.

    All models are compared at one epsilon: 8/255, or the smallest larger one that was tried, else the largest.
    """
    tried = [epsilon for outcome in _linf(works[0]) for epsilon in outcome.epsilons]
    if not tried:
        return []
    far = [epsilon for epsilon in tried if epsilon * UNIT >= FAR]
    epsilon = min(far) if far else max(tried)
    before = [_survivors(work, epsilon) for work in works]
    is_judged = epsilon * UNIT >= JUDGED
    weak = [_looks_weak(work, left, is_far=bool(far), is_judged=is_judged) for work, left in zip(works, before)]
    if not any(weak):
        return []
    found = []
    for work, left, is_weak in zip(works, before, weak):
        after, broken = _attacked_again(work, left, epsilon) if is_weak else (left, {})
        found.append(Survivors(epsilon, left, after, broken))
    return found


def survivors_rows(works: Sequence[ModelAttack], found: Sequence[Survivors]) -> tuple[SurvivorsRow, ...]:
    """Return robust accuracy before and after the stronger attacks, for each model that needed them."""
    rows = []
    for work, each in zip(works, found):
        if not each.broken:
            continue
        groups = work.run.split.groups
        row = SurvivorsRow(
            work.model.alias,
            typed_epsilon(each.epsilon, "linf"),
            int(each.before.sum()),
            accuracy(each.before, groups=groups),
            accuracy(each.after, groups=groups),
            each.broken.get(MARGIN),
            each.broken.get(SQUARE),
        )
        rows.append(row)
    return tuple(rows)


def _linf(work: ModelAttack) -> list[Outcome]:
    """Return the outcomes of the L∞ attacks that were run."""
    return [outcome for name, outcome in work.swept.items() if ATTACKS[name].norm == "linf"]


def _survivors(work: ModelAttack, epsilon: float) -> Tensor:
    left = work.clean.clone()
    for outcome in _linf(work):
        left &= outcome.robust(epsilon)
    return left


def _looks_weak(work: ModelAttack, left: Tensor, *, is_far: bool, is_judged: bool) -> bool:
    """Return True if more images survive than undefended models keep, or no image was fooled at all.

    is_far, is_judged: whether the epsilon is at least 8/255, or at least the one at which robustness is judged.
    """
    if not bool(left.any()):
        return False
    nothing_fooled = bool((left == work.clean).all())
    return (nothing_fooled and is_judged) or (is_far and float(left.double().mean()) > SURVIVED)


def _attacked_again(work: ModelAttack, left: Tensor, epsilon: float) -> tuple[Tensor, dict[str, int]]:
    """Run a margin loss, then Square, each on what is left; those that the run made itself are not repeated."""
    names = [name for name in (MARGIN, SQUARE) if _is_needed(work, name)]
    after = left.clone()
    broken = dict[str, int]()
    processes = work.run.processes
    with work.run.progress(f"stronger attacks on {work.model.alias}", len(names), "attacks") as advance:
        for name in names:
            places = after.nonzero().flatten()
            share = places[processes.index :: processes.count]
            fooled = processes.gathered(_fooled(work, name, share, epsilon)).bool()
            after[places[fooled]] = False
            broken[name] = int(fooled.sum())
            advance(1)
    return after, broken


def _is_needed(work: ModelAttack, name: str) -> bool:
    if name == SQUARE:
        return not any(each in work.swept for each in _WITH_SQUARE)
    used_gradients = any(ATTACKS[each].gradients for each in work.swept)  # else the model may have none
    enough_classes = len(work.model.classes) >= FEWEST_CLASSES[dlr]
    return used_gradients and enough_classes and not any(each in work.swept for each in _WITH_MARGIN)


def _fooled(work: ModelAttack, name: str, indices: Tensor, epsilon: float) -> Tensor:
    """Return which of these images one attack breaks, (m,)."""
    parts = [torch.zeros(0, dtype=torch.bool)]
    for part in indices.split(work.part_size) if len(indices) else ():
        attempt = work.attempt(name)
        result = attempt(
            work.images(part), work.labels[part], epsilon=epsilon, steps=STEPS[name], restarts=RESTARTS[name]
        )
        parts.append(result.success.cpu())
    return torch.cat(parts)
