"""Of a run of `vitlens attack`: one attack at one epsilon on a sample, for what is shown, looked into and passed on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from vitlens.analysis.robustness.checks import Attacked, Attempt
from vitlens.analysis.robustness.curve import halving_epsilon
from vitlens.analysis.robustness.transfer import Transfer, transfer
from vitlens.attacks.attack import attack
from vitlens.attacks.registry import ATTACKS
from vitlens.commands.scaffold.progress import progress
from vitlens.data.split import Split
from vitlens.devices import evaluating
from vitlens.runs.attack_sweep import Swept, Work

SAMPLED: Final = 256  # images that are attacked once more, at one epsilon


@dataclass(frozen=True)
class Sample:
    """One attack at one epsilon on some images of each model.

    attack: its name; epsilon: pixel units; indices: (m,) into the split; clean: (m, 3, height, width); adversarial: for
    each model the images found, the clean one where none was; fooled: for each model (m,).
    """

    attack: str
    epsilon: float
    indices: Tensor
    clean: Tensor
    adversarial: tuple[Tensor, ...]
    fooled: tuple[Tensor, ...]


def attempt_of(work: Work, name: str) -> Attempt:
    """An attack of the registry on one model, as the checks call it; a patch is bounded by its size, not epsilon."""
    bounded = ATTACKS[name].takes_epsilon

    def attempt(
        images: Tensor, labels: Tensor, *, epsilon: float, steps: int | None = None, batch_size: int | None = None
    ) -> Attacked:
        return attack(
            work.model, images, labels, method=name, epsilon=epsilon if bounded else None,
            steps=steps or work.choices.steps_for(name), restarts=work.choices.restarts, seed=work.options.seed,
            batch_size=batch_size or work.batch_size, precision=work.options.precision,
            side=work.choices.patch_side, aligned=not work.choices.patch_anywhere,
        )  # fmt: skip

    return attempt


def shown_attack(names: Sequence[str]) -> str:
    """Which of the attacks asked for is looked into."""
    return min(names, key=lambda name: ATTACKS[name].examples or len(ATTACKS) + 1)


def some_of(split: Split, count: int, *, seed: int) -> Tensor:
    """Indices (sorted) of a seeded, class-balanced subset of at most count images."""
    numbered = replace(split, groups=torch.arange(len(split))).limit(count, seed=seed)
    return torch.arange(len(split)) if numbered.groups is None else numbered.groups


def spread(rows: Tensor, most: int) -> Tensor:
    """At most so many of the rows, at even distances: images often come class by class."""
    return rows if len(rows) <= most else rows[torch.arange(most) * len(rows) // most]


def sampled(works: Sequence[Work], found: Sequence[Sequence[Swept]]) -> Sample:
    """Attack a sample at the smallest epsilon that costs every model half of what it had right (else the largest)."""
    name = shown_attack(works[0].choices.attacks)
    place = works[0].choices.attacks.index(name)
    epsilon = halving_epsilon([swept[place].outcome for swept in found])
    indices = some_of(works[0].split, SAMPLED, seed=works[0].options.seed)
    clean = works[0].images(indices)
    adversarial, fooled = [], []
    title = f"{ATTACKS[name].title} on a sample"
    with progress(title, len(works) * len(indices), quiet=works[0].options.quiet) as advance:
        for work in works:
            result = attempt_of(work, name)(clean, work.labels[indices], epsilon=epsilon)
            adversarial.append(result.images.cpu())
            fooled.append(result.success.cpu())
            advance(len(indices))
    return Sample(name, epsilon, indices, clean, tuple(adversarial), tuple(fooled))


def logits_of(work: Work, images: Tensor) -> Tensor:
    """What a model answers to images in fp32, (n, classes), on the CPU."""
    model = work.model
    with evaluating(model), torch.no_grad():
        return torch.cat([model(part.to(model.device)).float().cpu() for part in images.split(work.batch_size)])


def transferred(works: Sequence[Work], sample: Sample) -> Transfer:
    """Every model on the images made for every model."""
    labels = [work.labels[sample.indices] for work in works]

    def judged(images: Tensor) -> Tensor:
        return torch.stack([logits_of(work, images).argmax(-1) == own for work, own in zip(works, labels)])

    groups = works[0].split.groups
    return transfer(
        [work.model.alias for work in works], judged(sample.clean), [judged(one) for one in sample.adversarial],
        torch.stack(sample.fooled), groups=None if groups is None else groups[sample.indices],
    )  # fmt: skip
