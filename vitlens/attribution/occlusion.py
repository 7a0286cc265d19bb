"""Occlusion (Zeiler & Fergus 2014): what the target's logit loses without each patch of the image."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.analysis.faithfulness.masking import logits_without_patches
from vitlens.analysis.faithfulness.resampled import removal_grid
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Maps


def occlusion(model: Model, images: Images, targets: Labels) -> Maps:
    """The fall of the target's logit where a patch turns to the image's mean colour, (batch, rows, columns), signed.

    A CNN's image is cut as that of a ViT would be. One forward for each patch and image, one for the image itself.
    """
    rows, columns = removal_grid(model)
    each = torch.eye(rows * columns, dtype=torch.bool)
    scores = scores_without(model, images, targets, torch.cat((torch.zeros_like(each[:1]), each)))
    falls: Tensor = (scores[:, :1] - scores[:, 1:]).unflatten(1, (rows, columns))
    return falls


def scores_without(
    model: Model, images: Images, targets: Labels, removed: Bool[Tensor, "variants patches"]
) -> Float[Tensor, "batch variants"]:
    """The target's logit of every image without each set of patches, the image's mean colour in their place."""
    which = torch.arange(len(images)).repeat_interleave(len(removed))
    everywhere = removed.repeat(len(images), 1)
    logits = logits_without_patches(
        model, images, which, everywhere, grid=removal_grid(model), substrate="mean"
    ).unflatten(0, (len(images), len(removed)))
    places = targets.to(logits.device).view(-1, 1, 1).expand(-1, len(removed), 1)
    scores: Tensor = logits.gather(2, places)[..., 0]
    return scores
