"""What the nearest patches of other images share with a patch: its position, its class, object or background.

Neighbours are searched among the patches of other images alone, as patches of one image resemble each other whatever
the features. If neighbours share the position far more often than chance, the features hold mostly the position
embedding; if they share object or background, they hold content.
"""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.analysis.features.knn import vote
from vitlens.analysis.features.neighbours import Neighbours
from vitlens.errors import DataError, InputError
from vitlens.uncertainty import Estimate, bootstrap_mean

NEIGHBOURS: Final = 10  # of each patch
WITHIN: Final = 0.125  # of the image's sides: patches at most as far apart lie at the same place
_DIGITS: Final = 12  # decimals to which similarities are rounded before they are compared

Patches = Float[Tensor, "patches dim"]
OfPatch = Int[Tensor, " _"]  # one number a patch
Pairs = Bool[Tensor, "patches others"]


@dataclass(frozen=True)
class SharedBy:
    """How often something is shared by neighbours: the estimate over patches, its interval over images; chance: the
    same for a patch drawn at random from the other images."""

    estimate: Estimate
    chance: float


def patch_neighbours(tokens: Patches, images: OfPatch, *, k: int = NEIGHBOURS) -> Neighbours:
    """The k most similar patches of other images by cosine, most similar first, equal ones by lowest index.

    tokens: (patches, dim); images: the image of each patch. All pairs are compared at once, in float64. Raises
    InputError for images that do not fit, DataError where an image has fewer than k patches outside it.
    """
    if images.shape != (len(tokens),):
        raise InputError(f"expected the image of each of {len(tokens)} patches, found shape {tuple(images.shape)}")
    fewest = len(images) - int(torch.bincount(images).max()) if len(images) else 0
    if fewest < k:
        raise DataError(f"expected at least {k} patches in other images, found {fewest}; give more images")
    lengths = tokens.double().norm(dim=1, keepdim=True)
    units = tokens.double() / lengths.where(lengths > 0, 1)
    similarity = (units @ units.T).round(decimals=_DIGITS)
    similarity = similarity.masked_fill(images[:, None] == images, -torch.inf)
    ordered = similarity.sort(dim=1, descending=True, stable=True)
    return Neighbours(ordered.indices[:, :k], ordered.values[:, :k])


def shared(neighbours: Neighbours, alike: Pairs, images: OfPatch, *, seed: int = 0) -> SharedBy:
    """The share of the neighbours that are like the patch; alike: (patches, patches), whether two patches are."""
    same = alike.gather(1, neighbours.indices).double().mean(1)
    others = images[:, None] != images
    by_chance = (alike & others).sum(1) / others.sum(1)
    estimate = bootstrap_mean(same.numpy(), groups=images.numpy(), seed=seed)
    return SharedBy(estimate, float(by_chance.double().mean()))


def near(centres: Float[Tensor, "patches plane"], *, within: float = WITHIN) -> Pairs:
    """Whether two patches lie at the same place of their images: centres at most `within` apart, as a share of the
    image's sides (an eighth)."""
    exact = centres.double()
    alike: Tensor = (exact[:, None] - exact).norm(dim=2) <= within + 1e-9  # equal up to rounding
    return alike


def object_overlap(neighbours: Neighbours, on_object: OfPatch, images: OfPatch, *, seed: int = 0) -> SharedBy | None:
    """Object segmentation without training: intersection over union of the patches that lie on the object (1, else 0)
    with those whose neighbours vote for it, over all patches; chance: where every patch is said to be on the object.

    Votes are weighted as in k-NN. None where no patch is on the object, or none is not.
    """
    if not 0 < int(on_object.sum()) < len(on_object):
        return None
    voted = vote(neighbours, on_object, k=neighbours.indices.shape[1], classes=2)
    both, either = (voted == 1) & (on_object == 1), (voted == 1) | (on_object == 1)
    # a ratio of sums over images is a mean over the patches of the union
    estimate = bootstrap_mean(both[either].double().numpy(), groups=images[either].numpy(), seed=seed)
    return SharedBy(estimate, float(on_object.double().mean()))
