"""A sample of patches at the embedding and at the last layer: what their nearest patches share with them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitlens.analysis.features.features import EMBEDDING, LayerChoice, patch_tokens_at
from vitlens.analysis.features.patch_neighbours import NEIGHBOURS, SharedBy, near, object_overlap, patch_neighbours
from vitlens.analysis.features.patch_neighbours import shared as shared_by
from vitlens.commands.features.measure.images import FeatureSets, sample
from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.features.record import PATCH_NEIGHBOURS, SHARED
from vitlens.commands.features.record.patch_rows import PatchesShare, PatchNeighboursRow
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.progress.bar import progress
from vitlens.data.split import Split
from vitlens.errors import DataError
from vitlens.lens.stages import FeatureStage, embedding_stage, stages
from vitlens.models.model import Model

POINTS = 2000  # patches, at most
_IMAGES = 100  # whose patches are drawn
_FEWEST = 4  # patches of an image: a single one is the whole image


@dataclass(frozen=True)
class PatchSample:
    """Patches of one layer, drawn from many images.

    layer: from 0, None for the embedding; title: its name; grid: of each image; tokens: (n, dim); content: the same
    minus the mean of all images' tokens at the same place, so that positions drop out; images: (n,) indices
    into the split; places: (n, 2) rows and columns; classes: (n,) of their images, on_object: (n,) 1 on the object, or
    None where they are not known.
    """

    layer: int | None
    title: str
    kind: str
    grid: tuple[int, int]
    tokens: Tensor
    content: Tensor
    images: Tensor
    places: Tensor
    classes: Tensor | None
    on_object: Tensor | None


def draw_patches(
    models: Sequence[Model], sets: Sequence[FeatureSets], options: FeaturesOptions
) -> list[dict[LayerChoice, PatchSample]]:
    """For each model the patches of the embedding, where it has one, and of the last layer (-1), from one pass; layers
    whose tokens cannot be placed in the image are left out."""
    drawn = []
    for model, own in zip(models, sets):
        known: dict[LayerChoice, FeatureStage | None] = {EMBEDDING: embedding_stage(model), -1: stages(model)[-1]}
        placed = {layer: stage for layer, stage in known.items() if stage is not None and _cells(stage) >= _FEWEST}
        drawn.append(_drawn(model, own.test, placed, options) if placed else {})
    return drawn


def write_patch_neighbours(
    folder: RunFolder,
    models: Sequence[Model],
    drawn: Sequence[dict[LayerChoice, PatchSample]],
    *,
    seed: int,
) -> None:
    """Write what the nearest patches of other images share with a patch, at the embedding and at the last layer."""
    rows: list[PatchNeighboursRow] = []
    for model, samples in zip(models, drawn):
        for layer in samples.values():
            for share, found in _shared(layer, seed=seed):
                rows.append(_row(model.alias, layer, share, found))
                word = EMBEDDING if layer.layer is None else layer.layer
                folder.metric(PATCH_NEIGHBOURS(model=model.alias, layer=word, share=share), found.estimate)
    folder.write(SHARED, rows)


def _drawn(
    model: Model, split: Split, placed: dict[LayerChoice, FeatureStage], options: FeaturesOptions
) -> dict[LayerChoice, PatchSample]:
    seed = options.run.seed
    images = sample(len(split), _IMAGES, labels=split.labels, seed=seed)
    part, size = split.pick(images), options.run.batch_size or 32
    chosen = {
        layer: sample(len(part) * _cells(stage), POINTS, labels=None, seed=seed) for layer, stage in placed.items()
    }
    tokens: dict[LayerChoice, list[Tensor]] = {layer: [] for layer in placed}
    totals: dict[LayerChoice, list[Tensor]] = {layer: [] for layer in placed}
    with progress(f"Patches of {model.alias}", len(part), quiet=options.run.quiet) as advance:
        for number, batch in enumerate(part.batches(size, device=model.device)):
            read = patch_tokens_at(model, batch.images, tuple(placed))
            for (layer, stage), values in zip(placed.items(), read):
                start = number * size * _cells(stage)
                inside = (chosen[layer] >= start) & (chosen[layer] < start + len(values) * _cells(stage))
                tokens[layer].append(values.flatten(0, 2)[chosen[layer][inside] - start])
                totals[layer].append(values.double().sum(0).flatten(0, 1))
            advance(len(batch.images))
    return {
        layer: _sample(
            stage, torch.cat(tokens[layer]), torch.stack(totals[layer]).sum(0) / len(part), chosen[layer], images, part
        )
        for layer, stage in placed.items()
    }


def _sample(
    stage: FeatureStage, tokens: Tensor, means: Tensor, chosen: Tensor, images: Tensor, part: Split
) -> PatchSample:
    """means: (cells, dim) over images; chosen: numbers of the patches, row by row, image by image of the part; images:
    its indices into the split."""
    assert stage.grid is not None
    columns, cells = stage.grid[1], _cells(stage)
    of_part, cell = chosen // cells, chosen % cells
    on_object = None
    if part.masks is not None:
        share = torch.nn.functional.adaptive_avg_pool2d(part.masks.float()[:, None], stage.grid)[:, 0]
        on_object = (share > 0.5).long().flatten().cpu()[chosen]
    return PatchSample(
        layer=stage.index,
        title=stage.title,
        kind=stage.kind,
        grid=stage.grid,
        tokens=tokens,
        content=(tokens.double() - means[cell]).float(),
        images=images[of_part],
        places=torch.stack((cell // columns, cell % columns), 1),
        classes=None if part.labels is None else part.labels.cpu().long()[of_part],
        on_object=on_object,
    )


def _cells(stage: FeatureStage) -> int:
    """Patches of an image; 0 where they have no place."""
    return 0 if stage.grid is None else stage.grid[0] * stage.grid[1]


def _shared(layer: PatchSample, *, seed: int) -> Iterator[tuple[PatchesShare, SharedBy]]:
    """What the neighbours of the patches share with them; nothing with too few patches in other images."""
    images = layer.images.unique(return_inverse=True)[1]
    try:
        neighbours = patch_neighbours(layer.tokens, images)
    except DataError:
        return
    centres = (layer.places.double() + 0.5) / torch.tensor(layer.grid)
    yield "position", shared_by(neighbours, near(centres), images, seed=seed)
    if layer.classes is not None:
        yield "class", shared_by(neighbours, layer.classes[:, None] == layer.classes, images, seed=seed)
    overlap = None if layer.on_object is None else object_overlap(neighbours, layer.on_object, images, seed=seed)
    if overlap is not None:
        yield "object", overlap


def _row(alias: str, layer: PatchSample, share: PatchesShare, found: SharedBy) -> PatchNeighboursRow:
    estimate = found.estimate
    return PatchNeighboursRow(
        model=alias,
        layer=layer.layer,
        title=layer.title,
        share=share,
        value=estimate.value,
        low=estimate.low,
        high=estimate.high,
        chance=found.chance,
        patches=len(layer.tokens),
        images=len(layer.images.unique()),
        neighbours=NEIGHBOURS,
        grid=layer.grid,
    )
