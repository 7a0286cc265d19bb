"""Adversarial images of a sample of the images.

Examples, transfer between models and the changes inside models are measured on this sample.
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
    adversarial: for each model (m, 3, height, width); equal to `clean` where the attack failed.
    fooled: for each model (m,), True where the attack succeeded.
    """

    attack: Attack
    epsilon: float
    indices: Tensor
    clean: Tensor
    adversarial: tuple[Tensor, ...]
    fooled: tuple[Tensor, ...]


def example_attack(names: Sequence[str]) -> str:
    """Return the one of these attacks that makes the examples, by its rank in the registry."""
    after_all_ranks = len(ATTACKS) + 1  # for rank 0: such an attack is the last choice
    return min(names, key=lambda name: ATTACKS[name].examples or after_all_ranks)


def evenly_spaced(rows: Tensor, most: int) -> Tensor:
    """Return at most `most` rows at even distances, because images are often sorted by class."""
    if len(rows) <= most:
        return rows
    positions = torch.arange(most) * len(rows) // most
    return rows[positions]


def attack_sample(victims: Sequence[Victim]) -> AttackSample:
    """Attack a seeded, class-balanced sample of the images.

    Epsilon is the smallest that halves the accuracy of every model, or else the largest. Images
    that survived this attack in the sweep are not attacked again: they count as not fooled.
    """
    run = victims[0].run
    name = example_attack(run.options.attacks)
    outcomes = [victim.outcomes[name] for victim in victims]
    epsilon = halving_epsilon(outcomes)
    indices = balanced(len(run.split), run.split.labels, SAMPLED, run.run_options.seed)
    clean = victims[0].images(indices)
    adversarial = []
    fooled = []
    title = f"{ATTACKS[name].title} on a sample"
    with run.progress(title, len(victims) * len(indices)) as advance:
        for victim, outcome in zip(victims, outcomes):
            broken_in_sweep = _broken(outcome, epsilon)
            vulnerable = broken_in_sweep[indices]  # (m,)
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
    """Return a mask of the correctly classified images that the attack broke up to this epsilon.

    It has one entry for each image of the split, (n,).
    """
    return outcome.clean & ~outcome.robust(epsilon)
