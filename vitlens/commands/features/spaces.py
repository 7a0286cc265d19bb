"""Maps in two dimensions of images and patches, by PCA and t-SNE."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from vitlens.analysis.features.embedding import Embedding, embed
from vitlens.analysis.features.features import EMBEDDING, Features, LayerChoice
from vitlens.commands.features.images import Subject, pixels
from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.features.patches import PatchSample
from vitlens.commands.features.record import MapArrays, MapRow, PointsOf
from vitlens.commands.run.progress import progress
from vitlens.data.split import Split, balanced
from vitlens.names import PROJECTIONS, Projection
from vitlens.uncertainty import Estimate

_IMAGES: Final = 1000  # most images in a map
_FEWEST: Final = 4  # points of a map
_THUMBNAILS: Final = 150  # most thumbnails in a map, so that they hardly overlap
_THUMBNAIL_SIDE: Final = 32  # px, longest side of a thumbnail
_CUT_SIDE: Final = 16  # px, side of a cut-out patch
# points for each unit of perplexity: t-SNE's neighbourhoods are so wide (van der Maaten 2014)
_PERPLEXITIES: Final = 3


@dataclass(frozen=True)
class Spaces:
    """The maps of one model, as rows and arrays."""

    rows: tuple[MapRow, ...]
    arrays: MapArrays


def map_spaces(
    subject: Subject,
    test: Features,
    wrong: Tensor | None,
    samples: Mapping[LayerChoice, PatchSample],
) -> Spaces:
    """Map the images of the last layer, its patches and the patch embeddings by each method.

    Maps with too few points are left out.

    test: the features of the test images.
    wrong: (n,), True for misclassified test images, None without labels.
    samples: patches of the embedding and of the last layer (-1).
    """
    split = subject.test
    images = subject.sample(_IMAGES)
    clouds: dict[PointsOf, Tensor] = {"images": test.at(-1)[images]}
    arrays: dict[str, Any] = {}
    last = samples.get(-1)
    if last is not None and last.stage.kind == "block":
        clouds["patches"] = last.tokens
        arrays["labels_patches"] = _patch_labels(last)
    embedding = samples.get(EMBEDDING)
    if embedding is not None and embedding.stage.kind == "embedding":
        clouds["embedding"] = embedding.tokens
        if len(embedding.images.unique()) > 1:  # the content of a single image is zero
            clouds["content"] = embedding.content
        arrays |= _embedding_arrays(subject, embedding)
    if subject.options.thumbnails:
        arrays |= _thumbnails(subject, images)
    if split.labels is not None:
        arrays["labels_images"] = split.labels.cpu()[images].numpy()
    if wrong is not None:
        arrays["wrong_images"] = wrong[images].numpy()
    rows, points = _project_all(subject, clouds)
    classes = np.array(split.classes, dtype=np.str_)
    return Spaces(tuple(rows), MapArrays(classes, points, **arrays))


def _patch_labels(sample: PatchSample) -> NDArray[np.integer] | None:
    """Return 1 for patches on the object, or without masks the class of their image, or None."""
    labels = sample.classes if sample.on_object is None else sample.on_object
    return None if labels is None else labels.numpy()


def _embedding_arrays(subject: Subject, sample: PatchSample) -> dict[str, NDArray[Any]]:
    """Return the places of the patch embeddings, and the pixels of some of them."""
    arrays = {"grid": np.array(sample.grid), "places": sample.places.numpy()}
    if not subject.options.show:  # with --show, only the images named there are drawn
        cut = balanced(len(sample.tokens), None, _THUMBNAILS, subject.seed)
        arrays["cut"] = cut.numpy()
        arrays["cut_pixels"] = _cut_patches(subject.test, sample, cut).numpy()
    return arrays


def _thumbnails(subject: Subject, images: Tensor) -> dict[str, NDArray[Any]]:
    """Return the indices of some points with the pixels of their images."""
    points = balanced(len(images), None, _THUMBNAILS, subject.seed)
    thumbnails = pixels(subject.test, images[points], most=_THUMBNAIL_SIDE)
    return {"pictures": points.numpy(), "pixels": thumbnails.numpy()}


def _cut_patches(split: Split, sample: PatchSample, chosen: Tensor) -> Tensor:
    """Return the pixels (chosen, 3, side, side) of some patches of a sample, in their order.

    chosen: ascending indices into the sample. Its images ascend, too, so that unique images come in
        the order of the patches.
    """
    rows, columns = sample.grid
    images = sample.images[chosen]
    cuts = []
    for image in images.unique():
        picture = pixels(split, image[None])[0]
        height, width = picture.shape[1:]
        chosen_in_image = chosen[images == image]
        for row, column in sample.places[chosen_in_image].tolist():
            # sides need not be multiples of the grid, so top and left are rounded down, others up
            top = row * height // rows
            left = column * width // columns
            bottom = ceil((row + 1) * height / rows)
            right = ceil((column + 1) * width / columns)
            cut = picture[None, :, top:bottom, left:right].float()
            cuts.append(interpolate(cut, size=(_CUT_SIDE, _CUT_SIDE), mode="nearest")[0])
    return torch.stack(cuts).byte()


def _project_all(
    subject: Subject, clouds: Mapping[PointsOf, Tensor]
) -> tuple[list[MapRow], dict[str, NDArray[np.float32]]]:
    """Return the row and the points of each map that has enough points."""
    options = subject.options
    rows = []
    points = {}
    count = len(PROJECTIONS) * len(clouds)
    with progress(
        f"Mapping {subject.alias}", count, unit="maps", quiet=options.run.quiet
    ) as advance:
        for of, values in clouds.items():
            for method in PROJECTIONS:
                advance(1)
                if _can_map(values, method, options):
                    embedded = embed(
                        values, method=method, perplexity=options.perplexity, seed=subject.seed
                    )
                    points[f"{method}_{of}"] = np.asarray(embedded.points, dtype=np.float32)
                    rows.append(_map_row(subject, of, method, values, embedded))
    return rows, points


def _map_row(
    subject: Subject, of: PointsOf, method: Projection, values: Tensor, embedded: Embedding
) -> MapRow:
    """Return the row of a map of these values (n, dim)."""
    trustworthiness = Estimate(float(embedded.trustworthiness), n=len(embedded.points), unit="")
    explained = None
    if embedded.explained is not None:  # by PCA, of each dimension
        explained = float(embedded.explained.sum())
    return MapRow(
        model=subject.alias,
        of=of,
        method=method,
        n=len(values),
        dim=values.shape[1],
        trustworthiness=trustworthiness,
        neighbours=embedded.neighbours,
        perplexity=embedded.perplexity,
        explained=explained,
    )


def _can_map(values: Tensor, method: Projection, options: FeaturesOptions) -> bool:
    """Return True if a method can map this many points, and is not switched off."""
    if len(values) < _FEWEST:
        return False
    if method != "tsne":
        return True
    is_switched_off = options.tsne is False  # None without the option
    return not is_switched_off and len(values) > _PERPLEXITIES * options.perplexity
