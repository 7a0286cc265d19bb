"""Samples of patches from many images, and the properties that similar patches share."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from vitlens.analysis.features.features import EMBEDDING, LayerChoice, patch_tokens
from vitlens.analysis.features.neighbours import (
    NEIGHBOURS,
    Neighbours,
    near,
    object_overlap,
    patch_neighbours,
    shared,
)
from vitlens.commands.features.images import Subject
from vitlens.commands.features.record import PatchesRow
from vitlens.commands.run.progress import progress
from vitlens.data.split import Split, balanced
from vitlens.errors import DataError
from vitlens.lens.stages import FeatureStage, embedding_stage, stages
from vitlens.uncertainty import Estimate

FEWEST_PATCHES: Final = 4  # patches of an image; a single patch would be the whole image
_PATCHES: Final = 2000  # most patches of a sample
_IMAGES: Final = 100  # most images from which patches are drawn
_BATCH: Final = 32  # images in a batch, by default
_ON_OBJECT: Final = 0.5  # share of a patch above which it is on the object

Share = Literal["position", "class", "object"]


@dataclass(frozen=True)
class PatchSample:
    """Patches of one layer, drawn from many images.

    stage: the layer.
    grid: the number of rows and columns of patches in an image.
    tokens: (n, dim).
    content: (n, dim), the tokens minus the mean over all images at the same place, which removes
        positions.
    images: (n,), the images of the patches as indices into the split.
    places: (n, 2), the row and column of each patch.
    classes: (n,), the classes of the images, None without labels.
    on_object: (n,), 1 for patches on the object and 0 for others, None without masks.
    """

    stage: FeatureStage
    grid: tuple[int, int]
    tokens: Tensor
    content: Tensor
    images: Tensor
    places: Tensor
    classes: Tensor | None
    on_object: Tensor | None


def patch_count(stage: FeatureStage) -> int:
    """Return the number of patches of an image at a layer, 0 if they have no place in the image."""
    if stage.grid is None:
        return 0
    return stage.grid[0] * stage.grid[1]


def draw_patches(subject: Subject) -> dict[LayerChoice, PatchSample]:
    """Return patches of the embedding and of the last layer (-1), read in one pass.

    Layers whose tokens have no place in the image are left out.
    """
    layers = _layers_with_patches(subject)
    if not layers:
        return {}
    indices = subject.sample(_IMAGES)
    subset = subject.test.pick(indices)
    run = subject.options.run
    batches = []
    with progress(f"Patches of {subject.alias}", len(subset), quiet=run.quiet) as advance:
        for batch in subset.batches(run.batch_size or _BATCH, device=subject.model.device):
            batches.append(patch_tokens(subject.model, batch.images, tuple(layers)))
            advance(len(batch.images))
    samples = {}
    for index, (layer, stage) in enumerate(layers.items()):
        tokens = torch.cat([tokens_of_layers[index] for tokens_of_layers in batches])
        samples[layer] = _draw(subject, stage, tokens, subset, indices)
    return samples


def _layers_with_patches(subject: Subject) -> dict[LayerChoice, FeatureStage]:
    candidates: dict[LayerChoice, FeatureStage | None] = {
        EMBEDDING: embedding_stage(subject.model),
        -1: stages(subject.model)[-1],
    }
    layers = {}
    for layer, stage in candidates.items():
        if stage is not None and patch_count(stage) >= FEWEST_PATCHES:
            layers[layer] = stage
    return layers


def _draw(
    subject: Subject, stage: FeatureStage, tokens: Tensor, subset: Split, indices: Tensor
) -> PatchSample:
    """Return a seeded sample of patches.

    tokens: (images, rows, columns, dim) of the subset.
    subset: the test images at these indices.
    """
    assert stage.grid is not None  # layers without it are left out
    patches = patch_count(stage)
    # patch p of image i is number i * patches + p
    chosen = balanced(len(subset) * patches, None, _PATCHES, subject.seed)
    image_in_subset = chosen // patches
    patch_in_image = chosen % patches
    columns = stage.grid[1]
    sampled = tokens.flatten(0, 2)[chosen]
    means = tokens.double().mean(0).flatten(0, 1)  # (patches, dim)
    classes = None
    if subset.labels is not None:
        classes = subset.labels.cpu().long()[image_in_subset]
    on_object = None
    if subset.masks is not None:
        masks = subset.masks.float()[:, None]  # with one channel, as pooling needs
        shares = adaptive_avg_pool2d(masks, stage.grid)[:, 0]  # (images, rows, columns)
        on_object = (shares > _ON_OBJECT).long().flatten().cpu()[chosen]
    return PatchSample(
        stage=stage,
        grid=stage.grid,
        tokens=sampled,
        content=(sampled.double() - means[patch_in_image]).float(),
        images=indices[image_in_subset],
        places=torch.stack((patch_in_image // columns, patch_in_image % columns), 1),
        classes=classes,
        on_object=on_object,
    )


def patches_rows(
    subject: Subject, samples: Mapping[LayerChoice, PatchSample]
) -> Iterator[PatchesRow]:
    """Yield what patches share with the nearest patches of other images, at each layer."""
    for sample in samples.values():
        # of the image of each patch, counted from 0 without gaps
        _, image_numbers = sample.images.unique(return_inverse=True)
        try:
            neighbours = patch_neighbours(sample.tokens, image_numbers)
        except DataError:  # too few patches in other images
            continue
        stage = sample.stage
        layer = EMBEDDING if stage.index is None else str(stage.index)
        for share, (value, chance) in _shares(subject, sample, neighbours, image_numbers).items():
            yield PatchesRow(
                model=subject.alias,
                layer=layer,
                title=stage.title,
                share=share,
                value=value,
                chance=chance,
                images=len(image_numbers.unique()),
                neighbours=NEIGHBOURS,
                grid=sample.grid,
            )


def _shares(
    subject: Subject, sample: PatchSample, neighbours: Neighbours, images: Tensor
) -> dict[Share, tuple[Estimate, float]]:
    """Return how often neighbours share the position, the class and the object.

    Each is the measured value and the value by chance.
    """
    centres = (sample.places.double() + 0.5) / torch.tensor(sample.grid)  # in [0, 1]
    shares: dict[Share, tuple[Estimate, float]] = {}
    shares["position"] = shared(neighbours, near(centres), images, seed=subject.seed)
    if sample.classes is not None:
        same_class = sample.classes[:, None] == sample.classes
        shares["class"] = shared(neighbours, same_class, images, seed=subject.seed)
    if sample.on_object is not None:
        overlap = object_overlap(neighbours, sample.on_object, images)
        if overlap is not None:
            shares["object"] = overlap
    return shares
