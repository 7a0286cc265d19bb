"""The images of latents for the report, with maps of their evidence, and vectors of images."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.dictionary.dictionary import Dictionary
from vitlens.analysis.dictionary.gallery import EXEMPLARS, evidence, exemplars
from vitlens.analysis.dictionary.measures import Activity
from vitlens.analysis.features.features import extract
from vitlens.commands.run.progress import Advance
from vitlens.commands.sae.record import ExemplarRow, GalleryArrays
from vitlens.data.split import Split
from vitlens.models.model import Model

PICTURE: Final = 96  # px, the longest side of an exemplar in the report
ENCODED: Final = (16, 16)  # px, the size of images that are compared by their pixels
_BATCH: Final = 64  # images whose pixels are read at once


def gallery_of(
    dictionary: Dictionary,
    split: Split,
    activity: Activity,
    latents: Sequence[int],
    advance: Advance,
) -> tuple[tuple[ExemplarRow, ...], GalleryArrays | None]:
    """Return the images of latents; no arrays if none of them is active.

    activity: the activity of the latents on the images of the split.
    latents: the latents in the order of the gallery.
    advance: called with the number of latents just done.
    """
    rows = []
    pixels = []  # of each latent, in the order of the rows
    maps = []
    for latent in latents:
        indices = exemplars(activity, latent, EXEMPLARS)
        if indices:
            (batch,) = split.pick(torch.tensor(indices)).batches(len(indices))
            pixels.append(_small(batch.images))
            maps.append(evidence(dictionary, batch.images, [latent] * len(indices)))
        for rank, index in enumerate(indices):
            row = ExemplarRow(
                latent=latent,
                rank=rank,
                image=split.names[index],
                label=_label(split, index),
                value=float(activity.largest[index, latent]),
            )
            rows.append(row)
        advance(1)
    if not rows:
        return (), None
    arrays = GalleryArrays(torch.cat(pixels).numpy(), torch.cat(maps).float().numpy())
    return tuple(rows), arrays


def _label(split: Split, index: int) -> str | None:
    if split.labels is None:
        return None
    return split.classes[int(split.labels[index])]


def _small(images: Tensor) -> Tensor:
    """Return images as uint8 with sides of at most PICTURE px."""
    longest = max(images.shape[-2:])
    if longest > PICTURE:
        size = [max(1, round(side * PICTURE / longest)) for side in images.shape[-2:]]
        images = F.interpolate(images, size=size, mode="bilinear", antialias=True)
    return (images * 255).round().clamp(0, 255).byte()


def embeddings_of(split: Split, encoder: Model | None) -> Tensor:
    """Return a vector (n, dim) for each image: the features of another model, or small pixels.

    The mean vector is subtracted, because all images share it and so would be similar.
    """
    if encoder is None:
        pixels = torch.cat([batch.images for batch in split.batches(_BATCH)])
        vectors = F.interpolate(pixels, size=ENCODED, mode="bilinear", antialias=True).flatten(1)
    else:
        features = extract(encoder, split, layer=-1)
        assert features is not None  # of a single process
        vectors = features.at(-1)
    return vectors - vectors.mean(0)
