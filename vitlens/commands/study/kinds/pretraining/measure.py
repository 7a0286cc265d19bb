"""Measure features learned with and without labels: neighbours, few images, words, objects,
corruptions.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.attention.weights import attention_maps
from vitlens.analysis.failures.disturbances import CORRUPTIONS
from vitlens.analysis.failures.operations import OPERATIONS
from vitlens.analysis.features.embedding import embed
from vitlens.analysis.features.features import extract, features
from vitlens.analysis.features.neighbours import few_shot, nearest, vote
from vitlens.analysis.features.objectness import FEWEST_MASKS, objectness
from vitlens.commands.study.kinds.pretraining.features import (
    POOL,
    frozen_features,
    labels_of,
    probe_correct,
)
from vitlens.commands.study.kinds.pretraining.record import (
    FewShotRow,
    SpaceArrays,
    WordingRow,
    ZeroShotRow,
)
from vitlens.commands.study.kinds.pretraining.rows import likeness_rows, objectness_rows, score_rows
from vitlens.commands.study.kinds.record import VariantRow
from vitlens.commands.study.kinds.setup import Setup
from vitlens.data.captions import PROMPTS, WORDINGS
from vitlens.data.draws import keys
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.names import PERPLEXITY
from vitlens.training.objectives.clip import text_classifier
from vitlens.uncertainty import Estimate, student_mean

NEIGHBOURS: Final = (1, 5, 20)
SHOTS: Final = (1, 2, 5, 10)
DRAWS: Final = 10  # of the images of few shots
CORRUPTED: Final = ("noise", "blur", "contrast", "occlusion")
SEVERITY: Final = 3  # of 1 to 5
PROBE: Final = "linear probe"
_EMBEDDED: Final = 400  # test images of t-SNE
_CONSTANT: Final = 1e-6  # standard deviation of features that are all the same: a collapse
_AT_ONCE: Final = 100  # images whose attention is read

Scores = dict[str, dict[str, list[float]]]  # by measure and label, one score for each seed


def _no_scores() -> Scores:
    return defaultdict(lambda: defaultdict(list))


@dataclass
class _Measured:
    """The measurements of all trainings.

    test_features: by (label, seed), the features of the test images (images, dim).
    scores: `scores[measure][label]` are the accuracies of k-NN or of a linear probe, one for each
        seed.
    losses: `losses[corruption][label]` are the accuracies lost, one for each seed.

    The others are by label, with a tensor for each seed:

    shot_accuracies: accuracies with a few images per class (shots, draws).
    overlaps: the overlaps of attention and objects (3,), see `objectness_rows`.
    wordings: zero-shot accuracies (wordings,).
    """

    test_features: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    scores: Scores = field(default_factory=_no_scores)
    losses: Scores = field(default_factory=_no_scores)
    shot_accuracies: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    overlaps: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    wordings: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))


def measure_features(setup: Setup, variants: Mapping[str, VariantRow]) -> dict[str, Any]:
    """Return the measurements of the features of all variants and seeds, as fields of the
    record."""
    shots = _shots(setup)
    measured = _Measured()
    for variant, seed in product(setup.variants, setup.seeds):
        _measure_training(setup, measured, variant.label, seed, shots)
        if variant.objective == "clip":
            accuracies = _accuracy_by_wording(setup, variant.label, seed)
            measured.wordings[variant.label].append(accuracies)
    words = {label: row.words for label, row in variants.items()}
    chance = 1 / len(setup.test.classes)
    return {
        "feature_scores": tuple(score_rows(measured.scores, words, chance)),
        "corrupted": tuple(score_rows(measured.losses, words, None)),
        "few_shot": tuple(_few_shot_rows(measured.shot_accuracies, shots, words, chance)),
        "zero_shot": tuple(_zero_shot_rows(measured.wordings, words, chance)),
        "wordings": tuple(_wording_rows(measured.wordings, words, chance)),
        "likeness": tuple(likeness_rows(measured.test_features, words)),
        "objectness": tuple(objectness_rows(measured.overlaps, words, images=len(setup.test))),
        "space": _space(setup, measured.test_features),
    }


def _shots(setup: Setup) -> list[int]:
    """Return the numbers of images per class that every class has."""
    fewest = int(torch.bincount(labels_of(setup.train)).min())
    return [shots for shots in SHOTS if shots <= fewest]


def _measure_training(
    setup: Setup, measured: _Measured, label: str, seed: int, shots: Sequence[int]
) -> None:
    """Add the measurements of the features of one training."""
    model = setup.load_trained(label, seed=seed)
    train = frozen_features(model, setup.train)
    test = frozen_features(model, setup.test)
    measured.test_features[label, seed] = test
    for measure, accuracy in _neighbour_accuracies(setup, train, test):
        measured.scores[measure][label].append(accuracy)
    clean, losses = _probe_under_corruptions(setup, model, train, test, seed=seed)
    measured.scores[PROBE][label].append(clean)
    for measure, loss in losses.items():
        measured.losses[measure][label].append(loss)
    accuracies = few_shot(
        train,
        labels_of(setup.train),
        test,
        labels_of(setup.test),
        shots=shots,
        draws=DRAWS,
        seed=setup.run.seed,  # the same images for all variants and seeds
    )
    measured.shot_accuracies[label].append(accuracies)
    if setup.test.masks is not None and len(setup.test) >= FEWEST_MASKS:
        overlaps = _overlaps(model, setup.test, setup.test.masks, seed=setup.run.seed)
        measured.overlaps[label].append(overlaps)


def _neighbour_accuracies(setup: Setup, train: Tensor, test: Tensor) -> Iterator[tuple[str, float]]:
    """Yield the accuracy of k-NN among the training images for each k."""
    train_labels = labels_of(setup.train)
    test_labels = labels_of(setup.test)
    possible = [k for k in NEIGHBOURS if k <= len(train)]
    neighbours = nearest(test, train, k=max(possible))
    for k in possible:
        predictions = vote(neighbours, train_labels, k=k, classes=len(setup.train.classes))
        yield f"k-NN, k = {k}", float((predictions == test_labels).double().mean())


def _probe_under_corruptions(
    setup: Setup, model: Model, train: Tensor, test: Tensor, *, seed: int
) -> tuple[float, Mapping[str, float]]:
    """Return the accuracy of a linear probe fitted to clean images, and the loss of accuracy to
    each corruption.
    """
    test_sets = [test]
    for name in CORRUPTED:
        test_sets.append(_corrupted_features(setup, model, name))
    # one probe for all sets: it is fitted once
    labels = labels_of(setup.test).repeat(len(test_sets))
    correct = probe_correct(setup, train, torch.cat(test_sets), labels, seed=seed)
    correct_by_set = correct.view(len(test_sets), -1)  # (sets, images)
    clean, *corrupted = correct_by_set.double().mean(1).tolist()
    losses = {}
    for name, accuracy in zip(CORRUPTED, corrupted, strict=True):
        losses[CORRUPTIONS[name].title] = clean - accuracy
    return clean, losses


def _corrupted_features(setup: Setup, model: Model, name: str) -> Tensor:
    """Return the features of corrupted test images (images, dim).

    The corrupted images are the same for all variants and seeds.
    """
    corruption = CORRUPTIONS[name]
    operation = OPERATIONS[corruption.operation]
    level = corruption.levels[SEVERITY - 1]
    draws = keys(setup.run.seed, torch.arange(len(setup.test)))
    parts = []
    for batch in setup.test.batches(_AT_ONCE, device=setup.device):
        images = operation(batch.images, level, draws[batch.indices.cpu()]).clamp(0, 1)
        parts.append(features(model, images, layer=-1, pool=POOL).at(-1))
    return torch.cat(parts)


def _overlaps(model: Model, split: Split, masks: Tensor, *, seed: int) -> Tensor:
    """Return the mean intersection over union of the best head, of maps of other images and of the
    mean mask, (3,).
    """
    maps = []
    for batch in split.batches(_AT_ONCE, device=model.device):
        maps.append(attention_maps(model, batch.images)[-1].maps.float().cpu())
    overlap = objectness(torch.cat(maps), masks.cpu(), seed=seed)
    return torch.stack((overlap.iou.mean(), overlap.shuffled.mean(), overlap.mean_mask.mean()))


def _accuracy_by_wording(setup: Setup, label: str, seed: int) -> Tensor:
    """Return the zero-shot accuracy with each wording, (wordings,)."""
    model = setup.load_trained(label, seed=seed)
    pooled = extract(model, setup.test, layer=-1)  # pooled as for the model's own classifier
    assert pooled is not None  # as a study is one process
    images = F.normalize(pooled.at(-1), dim=-1)  # (images, dim)
    # texts are (wordings, classes, dim)
    texts = text_classifier(setup.folder(label, seed), setup.test.classes).cpu()
    similarities = torch.einsum("nd,wcd->wnc", images, texts)
    predictions = similarities.argmax(-1)  # over classes: (wordings, images)
    return (predictions == labels_of(setup.test)).double().mean(1)


def _mean(values: ArrayLike) -> Estimate:
    return student_mean(values, least=0.0, most=1.0)


def _few_shot_rows(
    accuracies: Mapping[str, Sequence[Tensor]],
    shots: Sequence[int],
    words: Mapping[str, str],
    chance: float,
) -> Iterator[FewShotRow]:
    """Yield the accuracy with a few images per class.

    accuracies: by label, for each seed (shots, draws).
    """
    for label, seed_accuracies in accuracies.items():
        by_seed = torch.stack(tuple(seed_accuracies))  # (seeds, shots, draws)
        for index, count in enumerate(shots):
            over_draws = by_seed[:, index]  # (seeds, draws)
            yield FewShotRow(
                label,
                words[label],
                shots=count,
                accuracy=_mean(over_draws.mean(1)),
                spread=float(over_draws.std(1).mean()),
                draws=DRAWS,
                chance=chance,
            )


def _zero_shot_rows(
    accuracies: Mapping[str, Sequence[Tensor]], words: Mapping[str, str], chance: float
) -> Iterator[ZeroShotRow]:
    """Yield the zero-shot accuracy over wordings.

    accuracies: by label, for each seed (wordings,).
    """
    for label, seed_accuracies in accuracies.items():
        by_seed = torch.stack(tuple(seed_accuracies))  # (seeds, wordings)
        yield ZeroShotRow(
            label,
            words[label],
            wordings=len(PROMPTS),
            mean=_mean(by_seed.mean(1)),
            lowest=_mean(by_seed.amin(1)),
            highest=_mean(by_seed.amax(1)),
            chance=chance,
        )


def _wording_rows(
    accuracies: Mapping[str, Sequence[Tensor]], words: Mapping[str, str], chance: float
) -> Iterator[WordingRow]:
    """Yield the zero-shot accuracy of each wording.

    accuracies: by label, for each seed (wordings,).
    """
    for label, seed_accuracies in accuracies.items():
        by_seed = torch.stack(tuple(seed_accuracies))  # (seeds, wordings)
        for index, wording in enumerate(PROMPTS):
            yield WordingRow(
                label,
                words[label],
                wording=wording,
                seen=wording in WORDINGS,
                accuracy=_mean(by_seed[:, index]),
                chance=chance,
            )


def _space(setup: Setup, test_features: Mapping[tuple[str, int], Tensor]) -> SpaceArrays | None:
    """Return the t-SNE of the features of the same test images for every variant, with the first
    seed.

    test_features: (images, dim), by label and seed. None: there are too few images.
    """
    chosen = setup.test.limit(min(_EMBEDDED, len(setup.test)), seed=setup.run.seed)
    # t-SNE needs three times as many neighbours as its perplexity
    perplexity = min(PERPLEXITY, (len(chosen) - 1) / 3)
    if perplexity < 1:
        return None
    # features are in the order of the test split; indices count in the whole source
    indices = setup.test.subset.indices.tolist()
    row_of_index = {index: row for row, index in enumerate(indices)}
    rows = torch.tensor([row_of_index[index] for index in chosen.subset.indices.tolist()])
    points = {}
    for number, variant in enumerate(setup.variants):
        features_of_variant = test_features[variant.label, setup.seeds[0]][rows]
        if float(features_of_variant.std(0).max()) > _CONSTANT:
            points[number] = embed(features_of_variant, perplexity=perplexity).points.numpy()
    labels = labels_of(setup.test)[rows]
    return SpaceArrays(points, labels.numpy(), np.array(setup.test.classes))
