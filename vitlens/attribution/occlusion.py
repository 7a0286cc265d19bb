"""Occlusion (Zeiler & Fergus 2014): the fall of the target's logit without each patch of the image."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.analysis.faithfulness.maps import removal_grid
from vitlens.analysis.faithfulness.removal import Variants
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Maps


def occlusion(model: Model, images: Images, targets: Labels) -> Maps:
    """The fall of the target's logit when a patch takes the image's mean colour, (batch, rows, columns), signed.

    For a CNN the image is divided into patches as for a ViT. One forward per patch and image, and one for the image.
    """
    rows, columns = removal_grid(model)
    each = torch.eye(rows * columns, dtype=torch.bool)
    scores = scores_without(model, images, targets, torch.cat((torch.zeros_like(each[:1]), each)))
    falls: Tensor = (scores[:, :1] - scores[:, 1:]).unflatten(1, (rows, columns))
    return falls


def scores_without(
    model: Model, images: Images, targets: Labels, removed: Bool[Tensor, "variants patches"]
) -> Float[Tensor, "batch variants"]:
    """The target's logit of every image without each set of patches, which take the image's mean colour."""
    rows = torch.arange(len(images)).repeat_interleave(len(removed))
    removals = removed.repeat(len(images), 1)
    logits = Variants(model, images, substrate="mean").logits(rows, removals).unflatten(0, (len(images), len(removed)))
    classes = targets.to(logits.device).view(-1, 1, 1).expand(-1, len(removed), 1)
    scores: Tensor = logits.gather(2, classes)[..., 0]
    return scores
