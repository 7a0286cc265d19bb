"""What an attack changes inside a model, on images that fool it: maps, and the outputs of
blocks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.faithfulness.maps import map_overlap
from vitlens.attacks.registry import NormName
from vitlens.attacks.robustness import cosines, halfway_block
from vitlens.attribution.explain import explain, methods_for, preferred_method
from vitlens.commands.attack.record import (
    AttackExampleArrays,
    BlockDistanceRow,
    Counterpart,
    MapAgreementRow,
)
from vitlens.commands.attack.sample import AttackSample, evenly_spaced
from vitlens.commands.attack.sweep import Victim
from vitlens.commands.run.progress import phase
from vitlens.uncertainty import Estimate, bootstrap_mean

MEASURED: Final = 64  # images that fool a model whose maps and blocks are compared, at most
SHOWN: Final = 5  # images among these in a figure, at most
_DRAWS: Final = 2000  # draws of a bootstrap; fewer than usual, as there is one for every block
# a method without a target class, compared as well if the model has it
_CLASS_AGNOSTIC: Final = "rollout"

MapPair = tuple[Tensor, Tensor]  # before and after the attack, (n, rows, columns)


@dataclass(frozen=True)
class ChangesInside:
    """The changes that an attack makes inside one model.

    halfway: the first block whose outputs for a clean and an adversarial image differ at least half
    as much as for two different images.
    """

    agreements: Sequence[MapAgreementRow]
    blocks: Sequence[BlockDistanceRow]
    examples: AttackExampleArrays
    halfway: Estimate | None


@dataclass(frozen=True)
class FoolingImages:
    """Images that fool a model, clean and adversarial (n, 3, height, width) in [0, 1].

    indices: (n,) into the split.
    labels: (n,).
    groups: (n,) of images that share a source, or None.
    """

    victim: Victim
    indices: Tensor
    clean: Tensor
    adversarial: Tensor
    labels: Tensor
    groups: NDArray[Any] | None

    @property
    def seed(self) -> int:
        """Return the seed of the run."""
        return self.victim.run.run_options.seed

    def maps(self, images: Tensor, targets: Tensor, method: str) -> Tensor:
        """Return the maps of these versions of the images for the target classes, (n, rows,
        columns).
        """
        maps = explain(
            self.victim.model,
            images,
            targets=targets,
            method=method,
            batch_size=self.victim.run.run_options.batch_size,
            seed=self.seed,
        )
        return maps.detach().cpu()


def changes_inside(victims: Sequence[Victim], sample: AttackSample) -> list[ChangesInside | None]:
    """Return what the attack changes inside each model.

    Returns None if no image fools it, or without --inside.
    """
    changes: list[ChangesInside | None] = []
    for index, victim in enumerate(victims):
        with phase("What changes inside the model"):
            images = _fooling_images(victim, sample, index)
            if images is None or not victim.run.options.inside:
                changes.append(None)
            else:
                changes.append(_changes(images, sample.attack.norm))
    return changes


def _fooling_images(victim: Victim, sample: AttackSample, index: int) -> FoolingImages | None:
    """Return at most MEASURED sampled images that fool a model, or None if there are none.

    index: the number of the model in the sample.
    """
    fooled = sample.fooled[index].nonzero().flatten()
    positions = evenly_spaced(fooled, MEASURED)  # in the sample
    if not len(positions):
        return None
    indices = sample.indices[positions]
    groups = None
    if victim.run.split.groups is not None:
        groups = victim.run.split.groups.cpu().numpy()[indices.cpu().numpy()]
    return FoolingImages(
        victim=victim,
        indices=indices,
        clean=sample.clean[positions],
        adversarial=sample.adversarial[index][positions],
        labels=victim.labels[indices],
        groups=groups,
    )


def _changes(images: FoolingImages, norm: NormName) -> ChangesInside:
    """Return the changes inside a model; norm: of the attack."""
    method = preferred_method(images.victim.model)
    before = images.maps(images.clean, images.labels, method)
    after = images.maps(images.adversarial, images.labels, method)
    pairs = _map_pairs(images, method, before, after)
    cosines_by_kind = _cosines(images, norm)
    blocks = []
    for kind, cosines_by_block in cosines_by_kind.items():
        for block, values in enumerate(cosines_by_block):
            distance = _distance(values, images.groups, images.seed)
            blocks.append(BlockDistanceRow(images.victim.model.alias, block, kind, distance))
    halfway = None
    if "another image" in cosines_by_kind:
        block_number = halfway_block(
            cosines_by_kind["adversarial"], cosines_by_kind["another image"]
        )
        if block_number is not None:
            halfway = Estimate(float(block_number), n=len(images.clean), unit="")
    return ChangesInside(
        agreements=list(_agreement_rows(images, pairs)),
        blocks=blocks,
        examples=_examples(images, before, after),
        halfway=halfway,
    )


def _map_pairs(
    images: FoolingImages, method: str, before: Tensor, after: Tensor
) -> dict[str, MapPair]:
    """Return maps before and after the attack, by title.

    They are maps of the true class, of the prediction at each time, and of rollout if the model has
    it.

    before, after: the maps of `method` for the true class.
    """
    predictions = images.victim.logits(images.adversarial).argmax(-1)
    after_for_predictions = images.maps(images.adversarial, predictions, method)
    pairs = {
        f"{method} for the true class": (before, after),
        # clean images are classified correctly, so their prediction is the true class
        f"{method} for each prediction": (before, after_for_predictions),
    }
    if _CLASS_AGNOSTIC in methods_for(images.victim.model) and method != _CLASS_AGNOSTIC:
        pairs[_CLASS_AGNOSTIC] = (
            images.maps(images.clean, images.labels, _CLASS_AGNOSTIC),
            images.maps(images.adversarial, images.labels, _CLASS_AGNOSTIC),
        )
    return pairs


def _agreement_rows(
    images: FoolingImages, pairs: Mapping[str, MapPair]
) -> Iterator[MapAgreementRow]:
    """Yield the agreement of each pair of maps, over the images for which both are usable."""
    for title, (before, after) in pairs.items():
        grid = (before.shape[-2], before.shape[-1])
        overlap = map_overlap(before, after, size=grid, grid=grid)
        usable = overlap.usable
        if not bool(usable.any()):
            continue
        groups = None
        if images.groups is not None:
            groups = images.groups[usable.numpy()]
        spearman = bootstrap_mean(
            overlap.spearman[usable].double().numpy(),
            groups=groups,
            seed=images.seed,
            unit="",
            least=-1.0,
            most=1.0,
        )
        top = bootstrap_mean(
            overlap.top[usable].double().numpy(),
            groups=groups,
            seed=images.seed,
            unit="fraction",
            least=0.0,
            most=1.0,
        )
        yield MapAgreementRow(
            model=images.victim.model.alias,
            maps=title.replace(" ", "-"),
            title=title,
            spearman=spearman,
            top=top,
        )


def _cosines(images: FoolingImages, norm: NormName) -> dict[Counterpart, Tensor]:
    """Return the cosine of each block's outputs for the clean images and for each counterpart,
    (blocks, n).
    """
    count = len(images.clean)
    counterparts: dict[str, Tensor] = {
        "adversarial": images.adversarial,
        "noise": with_noise(images.clean, images.adversarial, norm, seed=images.seed),
    }
    if count > 1:
        # images are often sorted by class, so the one half of them further on is mostly of another
        counterparts["another image"] = images.clean.roll(count // 2, 0)
    batch_size = images.victim.run.run_options.batch_size
    by_name: dict[Any, Tensor] = cosines(
        images.victim.model, images.clean, counterparts, batch_size=batch_size
    )
    return by_name


def with_noise(clean: Tensor, changed: Tensor, norm: str, *, seed: int) -> Tensor:
    """Return the clean images with random noise of the same norm as each perturbation.

    It is a baseline for the effect of the size of a perturbation. Noise that would leave the range
    of pixels gets the other sign, because cutting it off would shorten it.
    """
    generator = torch.Generator().manual_seed(seed)
    change = changed - clean
    if norm == "linf":
        signs = torch.randint(0, 2, clean.shape, generator=generator) * 2.0 - 1  # -1 or 1
        largest = change.flatten(1).abs().amax(1)
        noise = signs * largest[:, None, None, None]
    else:
        noise = torch.randn(clean.shape, generator=generator)
        length = change.flatten(1).norm(dim=1)[:, None, None, None]
        noise_length = noise.flatten(1).norm(dim=1)[:, None, None, None]
        noise = noise * length / noise_length
    noisy = clean + noise
    is_outside = (noisy < 0) | (noisy > 1)
    within = torch.where(is_outside, clean - noise, noisy)
    return within.clamp(0, 1)  # a value above 0.5 may leave the range in both directions


def _distance(values: Tensor, groups: NDArray[Any] | None, seed: int) -> Estimate:
    """Return one minus the mean cosine, at least 0, with its interval.

    values: the cosines (n,).
    """
    mean = bootstrap_mean(
        values.double().numpy(),
        groups=groups,
        seed=seed,
        unit="",
        draws=_DRAWS,
        least=-1.0,
        most=1.0,
    )
    low = None
    high = None
    if mean.high is not None:
        low = max(0.0, 1 - mean.high)
    if mean.low is not None:
        high = max(0.0, 1 - mean.low)
    return Estimate(max(0.0, 1 - mean.value), low, high, len(values), "")


def _examples(images: FoolingImages, before: Tensor, after: Tensor) -> AttackExampleArrays:
    """Return pixels, perturbations, maps and predictions of at most SHOWN images."""
    drawn = evenly_spaced(torch.arange(len(images.clean)), SHOWN)
    clean = images.clean[drawn]
    adversarial = images.adversarial[drawn]
    classes = images.victim.model.classes
    answers = []
    probabilities = []
    for version in (clean, adversarial):
        class_probabilities = images.victim.logits(version).softmax(-1)
        answers.append([classes[int(index)] for index in class_probabilities.argmax(-1)])
        probabilities.append(class_probabilities.amax(-1))
    return AttackExampleArrays(
        pixels=(clean * 255).round().byte().numpy(),
        change=(adversarial - clean).half().numpy(),
        before=_positive_part(before[drawn]),
        after=_positive_part(after[drawn]),
        answers=np.array(answers),
        probability=torch.stack(probabilities).numpy(),
        image=images.indices[drawn].numpy(),
    )


def _positive_part(maps: Tensor) -> NDArray[np.floating]:
    """Return maps with 0 in place of negative values and of values that are not finite."""
    return maps.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp_min(0).numpy()
