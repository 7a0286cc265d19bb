"""One attack at one epsilon on a sample of the images: for the examples, what changes inside, and transfer."""

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
from vitlens.commands.attack.epsilons import typed
from vitlens.commands.attack.measure.curves import titled
from vitlens.commands.attack.measure.sweep import ModelAttack, SweptAttack
from vitlens.commands.attack.record import SAMPLE, TRANSFER, TRANSFER_ACCURACY, TRANSFER_RATE
from vitlens.commands.attack.record.rows import AttackSampleRow, TransferRow
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.progress import progress
from vitlens.data.split import Split
from vitlens.devices import evaluating
from vitlens.uncertainty import Estimate

SAMPLED: Final = 256  # images that are attacked once more, at one epsilon


@dataclass(frozen=True)
class AttackSample:
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


def attempt_of(work: ModelAttack, name: str) -> Attempt:
    """An attack of the registry on one model, as the checks call it; a patch is bounded by its size, not epsilon."""
    bounded, options, run = ATTACKS[name].takes_epsilon, work.options, work.run

    def attempt(
        images: Tensor, labels: Tensor, *, epsilon: float, steps: int | None = None, batch_size: int | None = None
    ) -> Attacked:
        return attack(
            work.model, images, labels, method=name, epsilon=epsilon if bounded else None,
            steps=steps or options.steps_for(name), restarts=options.restarts, seed=run.seed,
            batch_size=batch_size or work.batch_size, precision=run.precision,
            side=options.patch_side, aligned=not options.patch_anywhere,
        )  # fmt: skip

    return attempt


def example_attack(names: Sequence[str]) -> str:
    """Which of the attacks asked for makes the examples, by its rank in the registry."""
    return min(names, key=lambda name: ATTACKS[name].examples or len(ATTACKS) + 1)


def some_of(split: Split, count: int, *, seed: int) -> Tensor:
    """Indices (sorted) of a seeded, class-balanced subset of at most count images."""
    numbered = replace(split, groups=torch.arange(len(split))).limit(count, seed=seed)
    return torch.arange(len(split)) if numbered.groups is None else numbered.groups


def spread(rows: Tensor, most: int) -> Tensor:
    """At most so many of the rows, at even distances: images often come class by class."""
    return rows if len(rows) <= most else rows[torch.arange(most) * len(rows) // most]


def attack_sample(works: Sequence[ModelAttack], swept: Sequence[Sequence[SweptAttack]]) -> AttackSample:
    """Attack a sample at the smallest epsilon that costs every model half of what it had right (else the largest)."""
    first = works[0]
    name = example_attack(first.options.attacks)
    place = first.options.attacks.index(name)
    epsilon = halving_epsilon([of_model[place].outcome for of_model in swept])
    indices = some_of(first.split, SAMPLED, seed=first.run.seed)
    clean = first.images(indices)
    adversarial, fooled = [], []
    title = f"{ATTACKS[name].title} on a sample"
    with progress(title, len(works) * len(indices), quiet=first.run.quiet) as advance:
        for work in works:
            result = attempt_of(work, name)(clean, work.labels[indices], epsilon=epsilon)
            adversarial.append(result.images.cpu())
            fooled.append(result.success.cpu())
            advance(len(indices))
    return AttackSample(name, epsilon, indices, clean, tuple(adversarial), tuple(fooled))


def logits_of(work: ModelAttack, images: Tensor) -> Tensor:
    """A model's logits for images in fp32, (n, classes), on the CPU."""
    model = work.model
    with evaluating(model), torch.no_grad():
        return torch.cat([model(part.to(model.device)).float().cpu() for part in images.split(work.batch_size)])


def write_sample(folder: RunFolder, sample: AttackSample, works: Sequence[ModelAttack]) -> None:
    """What was attacked once more: which attack, at which epsilon, how many of how many images it fooled."""
    known = ATTACKS[sample.attack]
    rows = [
        AttackSampleRow(
            work.model.alias, known.slug, titled(known), known.norm, float(typed(sample.epsilon, known.norm)),
            len(sample.indices), int(fooled.sum()),
        )
        for work, fooled in zip(works, sample.fooled)
    ]  # fmt: skip
    folder.write(SAMPLE, rows)


def write_transfer(folder: RunFolder, works: Sequence[ModelAttack], sample: AttackSample) -> None:
    """Rates and accuracies of every model on the images made for every model; no rows for one model."""
    if len(works) < 2 or not works[0].options.transfer:
        folder.write(TRANSFER, [])
        return
    matrix, seed, rows = _transferred(works, sample), works[0].run.seed, []
    for source, made_for in enumerate(matrix.aliases):
        for target, shown_to in enumerate(matrix.aliases):
            rate, right = matrix.rate(source, target, seed=seed), matrix.accuracy(source, target, seed=seed)
            if rate is not None:
                folder.metric(TRANSFER_RATE(made_for=made_for, shown_to=shown_to), rate)
            folder.metric(TRANSFER_ACCURACY(made_for=made_for, shown_to=shown_to), right)
            clean = matrix.clean_accuracy(target, seed=seed)
            rows.append(TransferRow(made_for, shown_to, *_ends(rate), right.value, clean.value))
    folder.write(TRANSFER, rows)


def _ends(rate: Estimate | None) -> tuple[float | None, float | None, float | None, int | None]:
    return (None, None, None, None) if rate is None else (rate.value, rate.low, rate.high, rate.n)


def _transferred(works: Sequence[ModelAttack], sample: AttackSample) -> Transfer:
    """Every model on the images made for every model."""
    labels = [work.labels[sample.indices] for work in works]

    def judged(images: Tensor) -> Tensor:
        return torch.stack([logits_of(work, images).argmax(-1) == own for work, own in zip(works, labels)])

    groups = works[0].split.groups
    return transfer(
        [work.model.alias for work in works], judged(sample.clean), [judged(one) for one in sample.adversarial],
        torch.stack(sample.fooled), groups=None if groups is None else groups[sample.indices],
    )  # fmt: skip
