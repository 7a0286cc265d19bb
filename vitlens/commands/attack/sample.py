"""Adversarial images of a sample, from which examples, transfer and the changes inside models are
taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from vitlens.attacks.registry import ATTACKS, Attack
from vitlens.attacks.robustness import Outcome, halving_epsilon
from vitlens.commands.attack.sweep import Victim
from vitlens.data.split import balanced

SAMPLED: Final = 256  # images of the sample, at most


@dataclass(frozen=True)
class AttackSample:
    """One attack at one epsilon (pixel units) on some images, for every model.

    indices: (m,) into the split.
    clean: (m, 3, height, width).
    adversarial: the adversarial image of each model, the images of `clean` where the attack failed.
    fooled: of each model (m,), True where the attack succeeded.
    """

    attack: Attack
    epsilon: float
    indices: Tensor
    clean: Tensor
    adversarial: tuple[Tensor, ...]
    fooled: tuple[Tensor, ...]


def example_attack(names: Sequence[str]) -> str:
    """Return the one of these attacks that makes the examples, by its rank in the registry."""
    last = len(ATTACKS) + 1
    return min(names, key=lambda name: ATTACKS[name].examples or last)


def evenly_spaced(rows: Tensor, most: int) -> Tensor:
    """Return at most `most` rows at even distances, because images are often sorted by class."""
    if len(rows) <= most:
        return rows
    return rows[torch.arange(most) * len(rows) // most]


def attack_sample(victims: Sequence[Victim]) -> AttackSample:
    """Attack a seeded, class-balanced sample of the images.

    Epsilon is the smallest that halves the accuracy of every model, or else the largest. Images
    that survived this attack in the sweep are not attacked again: they count as not fooled.
    """
    run = victims[0].run
    name = example_attack(run.options.attacks)
    outcomes = [victim.outcomes[name] for victim in victims]
    epsilon = halving_epsilon(outcomes)
    indices = balanced(len(run.split), run.split.labels, SAMPLED, run.run.seed)
    clean = victims[0].images(indices)
    adversarial = []
    fooled = []
    title = f"{ATTACKS[name].title} on a sample"
    with run.progress(title, len(victims) * len(indices)) as advance:
        for victim, outcome in zip(victims, outcomes):
            vulnerable = _broken(outcome, epsilon)[indices]
            images = clean.clone()
            success = torch.zeros(len(indices), dtype=torch.bool)
            if bool(vulnerable.any()):
                labels = victim.labels[indices][vulnerable]
                result = victim.attempt(name)(clean[vulnerable], labels, epsilon=epsilon)
                images[vulnerable] = result.images.cpu()
                success[vulnerable] = result.success.cpu()
            adversarial.append(images)
            fooled.append(success)
            advance(len(indices))
    return AttackSample(
        attack=ATTACKS[name],
        epsilon=epsilon,
        indices=indices,
        clean=clean,
        adversarial=tuple(adversarial),
        fooled=tuple(fooled),
    )


def _broken(outcome: Outcome, epsilon: float) -> Tensor:
    """Return which correctly classified images the attack broke up to this epsilon, (n,)."""
    return outcome.clean & ~outcome.robust(epsilon)
