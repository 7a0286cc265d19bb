"""One attack at one epsilon on a sample of the images, for examples, changes inside the model, and transfer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from vitlens.analysis.robustness.checks import AttackOutput, Attempt
from vitlens.analysis.robustness.curve import halving_epsilon
from vitlens.analysis.robustness.transfer import Transfer, transfer
from vitlens.attacks.attack import attack
from vitlens.attacks.registry import ATTACKS
from vitlens.commands.attack.epsilons import typed_epsilon
from vitlens.commands.attack.measure.curves import title_of
from vitlens.commands.attack.measure.sweep import ModelAttack, SweptAttack
from vitlens.commands.attack.record import SAMPLE, TRANSFER, TRANSFER_ACCURACY, TRANSFER_RATE
from vitlens.commands.attack.record.rows import AttackSampleRow, TransferRow
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.progress.bar import progress
from vitlens.data.split import Split
from vitlens.devices import evaluating
from vitlens.uncertainty import Estimate

SAMPLED: Final = 256  # images of the sample, at most


@dataclass(frozen=True)
class AttackSample:
    """One attack at one epsilon on some images of each model.

    attack: its name; epsilon: pixel units; indices: (m,) into the split; clean: (m, 3, height, width); adversarial: for
    each model the images found, or the clean ones where the attack failed; fooled: for each model (m,).
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
    ) -> AttackOutput:
        return attack(
            work.model, images, labels, method=name, epsilon=epsilon if bounded else None,
            steps=steps or options.steps_for(name), restarts=options.restarts, seed=run.seed,
            batch_size=batch_size or work.batch_size, precision=run.precision,
            side=options.patch_side, aligned=not options.patch_anywhere,
        )  # fmt: skip

    return attempt


def example_attack(names: Sequence[str]) -> str:
    """The attack of these names that makes the examples, by its rank in the registry."""
    return min(names, key=lambda name: ATTACKS[name].examples or len(ATTACKS) + 1)


def class_balanced(split: Split, count: int, *, seed: int) -> Tensor:
    """Indices (sorted) of a seeded, class-balanced subset of at most count images."""
    numbered = replace(split, groups=torch.arange(len(split))).limit(count, seed=seed)
    return torch.arange(len(split)) if numbered.groups is None else numbered.groups


def evenly_spaced(rows: Tensor, most: int) -> Tensor:
    """At most this many of the rows, evenly spaced, as images are often sorted by class."""
    return rows if len(rows) <= most else rows[torch.arange(most) * len(rows) // most]


def attack_sample(works: Sequence[ModelAttack], swept: Sequence[Sequence[SweptAttack]]) -> AttackSample:
    """Attack a sample at the smallest epsilon that halves the accuracy of every model (else the largest).

    Images on which the attack failed up to that epsilon are not attacked once more: they count as not fooled.
    """
    first = works[0]
    name = example_attack(first.options.attacks)
    index = first.options.attacks.index(name)
    epsilon = halving_epsilon([of_model[index].outcome for of_model in swept])
    indices = class_balanced(first.split, SAMPLED, seed=first.run.seed)
    clean = first.images(indices)
    adversarial, fooled = [], []
    title = f"{ATTACKS[name].title} on a sample"
    with progress(title, len(works) * len(indices), quiet=first.run.quiet) as advance:
        for work, of_model in zip(works, swept):
            outcome = of_model[index].outcome
            open_ = (outcome.clean & ~outcome.robust(epsilon))[indices]
            images, success = clean.clone(), torch.zeros(len(indices), dtype=torch.bool)
            if bool(open_.any()):
                result = attempt_of(work, name)(clean[open_], work.labels[indices][open_], epsilon=epsilon)
                images[open_], success[open_] = result.images.cpu(), result.success.cpu()
            adversarial.append(images)
            fooled.append(success)
            advance(len(indices))
    return AttackSample(name, epsilon, indices, clean, tuple(adversarial), tuple(fooled))


def logits_of(work: ModelAttack, images: Tensor) -> Tensor:
    """A model's logits for images in fp32, (n, classes), on the CPU."""
    model = work.model
    with evaluating(model), torch.no_grad():
        return torch.cat([model(part.to(model.device)).float().cpu() for part in images.split(work.batch_size)])


def write_sample(folder: RunFolder, sample: AttackSample, works: Sequence[ModelAttack]) -> None:
    """Write the attack on the sample, its epsilon, and the number of images on which it succeeds."""
    entry = ATTACKS[sample.attack]
    rows = [
        AttackSampleRow(
            work.model.alias, entry.slug, title_of(entry), entry.norm, float(typed_epsilon(sample.epsilon, entry.norm)),
            len(sample.indices), int(fooled.sum()),
        )
        for work, fooled in zip(works, sample.fooled)
    ]  # fmt: skip
    folder.write(SAMPLE, rows)


def write_transfer(folder: RunFolder, works: Sequence[ModelAttack], sample: AttackSample) -> None:
    """Write rates and accuracies of every model on the adversarial images of every model; no rows for one model."""
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
            rows.append(TransferRow(made_for, shown_to, *_rate_fields(rate), right.value, clean.value))
    folder.write(TRANSFER, rows)


def _rate_fields(rate: Estimate | None) -> tuple[float | None, float | None, float | None, int | None]:
    return (None, None, None, None) if rate is None else (rate.value, rate.low, rate.high, rate.n)


def _transferred(works: Sequence[ModelAttack], sample: AttackSample) -> Transfer:
    """Every model on the adversarial images of every model."""
    labels = [work.labels[sample.indices] for work in works]

    def correct(images: Tensor) -> Tensor:
        return torch.stack([logits_of(work, images).argmax(-1) == own for work, own in zip(works, labels)])

    groups = works[0].split.groups
    return transfer(
        [work.model.alias for work in works], correct(sample.clean), [correct(images) for images in sample.adversarial],
        torch.stack(sample.fooled), groups=None if groups is None else groups[sample.indices],
    )  # fmt: skip
