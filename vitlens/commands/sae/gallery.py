"""The images of latents for the report, with where their evidence lies; small pixels."""

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
ENCODED: Final = (16, 16)  # px, of an image that is compared by its pixels


def gallery_of(
    dictionary: Dictionary,
    split: Split,
    activity: Activity,
    latents: Sequence[int],
    advance: Advance,
) -> tuple[tuple[ExemplarRow, ...], GalleryArrays | None]:
    """Return the images of latents; no arrays if none of them is active.

    advance: called with the number of latents just done.
    """
    rows = []
    pixels = []
    maps = []
    for latent in latents:
        indices = exemplars(activity, latent, EXEMPLARS)
        if indices:
            (batch,) = split.pick(torch.tensor(indices)).batches(len(indices))
            pixels.append(_small(batch.images))
            maps.append(evidence(dictionary, batch.images, [latent] * len(indices)))
        for rank, index in enumerate(indices):
            value = float(activity.largest[index, latent])
            rows.append(ExemplarRow(latent, rank, split.names[index], _label(split, index), value))
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
    """Return a vector for each image by another model, or of its pixels.

    Their mean is subtracted: with it, all images are alike.
    """
    if encoder is None:
        pixels = torch.cat([batch.images for batch in split.batches(64)])
        vectors = F.interpolate(pixels, size=ENCODED, mode="bilinear", antialias=True).flatten(1)
    else:
        features = extract(encoder, split, layer=-1)
        assert features is not None  # of a single process
        vectors = features.at(-1)
    return vectors - vectors.mean(0)
