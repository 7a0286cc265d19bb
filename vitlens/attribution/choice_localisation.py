"""Localisation (ROC-AUC) of the maps of several methods, on objects or on mosaics of images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.analysis.faithfulness.defaults import COMPOSITE_KINDS, FEWEST
from vitlens.analysis.faithfulness.localisation import (
    Composites,
    confident_images,
    has_edge,
    is_recognised,
    roc_auc,
)
from vitlens.attribution.choice_scores import Indices
from vitlens.devices import evaluating
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Logits, Maps, Masks
from vitlens.uncertainty import Side, beyond

MOSAICS: Final = 12  # of each half, at most
KIND: Final = "mosaic-2"  # the kind of composites

Values = Float[Tensor, "methods images"]
ComputeMaps = Callable[[Images, Labels], Mapping[str, Maps]]  # the maps of all methods, by name


@dataclass(frozen=True)
class Localisation:
    """The localisation of every method.

    values: the ROC-AUC of each method on each image, NaN where it is undefined.
    obstacle: why there are no values, "" if there are.
    """

    values: Values
    obstacle: str = ""


class _HalfMosaics(NamedTuple):
    """The mosaics of one half of the images.

    indices: the images of which they are made, numbered from 0 in composites.sources.
    """

    indices: Indices
    composites: Composites


def localise_on_objects(maps: Mapping[str, Maps], masks: Masks) -> Localisation:
    """Return the ROC-AUC on the objects, NaN for an image without an object or background."""
    usable = has_edge(masks)
    values = torch.full((len(maps), len(masks)), torch.nan)
    if bool(usable.any()):
        scores = [roc_auc(method_maps[usable], masks[usable]) for method_maps in maps.values()]
        values[:, usable] = torch.stack(scores)
    return Localisation(values)


def localise_on_mosaics(
    model: Model,
    images: Images,
    logits: Logits,
    parts: tuple[Indices, Indices],
    compute_maps: ComputeMaps,
    seed: int,
) -> Localisation:
    """Return the ROC-AUC of each image on the cells that show it in the mosaics of its half.

    It is the mean over these cells, NaN for an image in no mosaic. There are no values if a half
    has too few confidently classified images, or if the model does not name the classes of mosaics
    better than by guessing.

    parts: the two halves, indices of the images.
    """
    no_values = torch.full((1, len(images)), torch.nan)
    mosaics = list[_HalfMosaics]()
    for part in parts:
        labels = logits[part].argmax(-1)
        usable = confident_images(logits[part], labels)
        obstacle = _too_few_classes(labels[usable])
        if obstacle:
            return Localisation(no_values, obstacle)
        indices = part[usable]
        composites = COMPOSITE_KINDS[KIND].make(
            images[indices.to(images.device)], labels[usable], count=MOSAICS, seed=seed
        )
        mosaics.append(_HalfMosaics(indices, composites))
    obstacle = _unrecognised(model, mosaics)
    if obstacle:
        return Localisation(no_values, obstacle)
    scores_of_halves = [_score_sources(half, compute_maps) for half in mosaics]
    methods = len(scores_of_halves[0])
    values = torch.full((methods, len(images)), torch.nan)
    for half, scores in zip(mosaics, scores_of_halves):
        values[:, half.indices] = scores
    return Localisation(values)


def _too_few_classes(labels: Labels) -> str:
    """Return why images with these labels do not suffice for mosaics, "" if they do."""
    fewest = max(FEWEST, COMPOSITE_KINDS[KIND].classes)
    classes = len(labels.unique())
    if classes >= fewest:
        return ""
    return (
        f"expected confidently classified images of at least {fewest} classes in "
        f"each half, found {len(labels)} images of {classes}"
    )


def _unrecognised(model: Model, mosaics: Sequence[_HalfMosaics]) -> str:
    """Return "" if the model names the classes of mosaics better than by guessing, else why not."""
    kind = COMPOSITE_KINDS[KIND]
    pixels = torch.cat([half.composites.images for half in mosaics])
    targets = torch.cat([half.composites.targets for half in mosaics])
    with evaluating(model), torch.no_grad():
        logits = model(pixels).float().cpu()
    # several classes of each mosaic are explained, one target each
    mosaic_of_target = torch.arange(len(pixels)).repeat_interleave(kind.explained)
    is_named = is_recognised(logits[mosaic_of_target], targets, kind.classes)
    share = accuracy(is_named, groups=mosaic_of_target)
    guessed = min(1.0, kind.classes / len(model.classes))
    if beyond(share, guessed) is Side.ABOVE:
        return ""
    return (
        f"{model.alias} names {100 * share.value:.0f} % of the classes of mosaics, not "
        f"significantly more than by guessing ({100 * guessed:.0f} %)"
    )


def _score_sources(half: _HalfMosaics, compute_maps: ComputeMaps) -> Float[Tensor, "methods used"]:
    """Return the mean ROC-AUC of every image of which the mosaics are made, over its cells."""
    composites = half.composites
    mosaic_of_cell = composites.which.to(composites.images.device)
    maps = compute_maps(composites.images[mosaic_of_cell], composites.targets)
    # (methods, cells), the cells in the order of composites.sources
    scores_of_cells = torch.stack(
        [roc_auc(method_maps, composites.masks) for method_maps in maps.values()]
    )
    # (cells, used): 1 if cell i shows image sources[i] of half.indices. So the product sums the
    # scores of the cells of each image.
    shows_image = F.one_hot(composites.sources.flatten(), len(half.indices)).float()
    return (scores_of_cells @ shows_image) / shows_image.sum(0)
