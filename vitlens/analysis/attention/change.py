"""How far the attention of each head moved between two models of one architecture, image by image.

The distance of two rows of attention is their total variation, half the sum of absolute differences: the share of the
attention that lies on other keys, 0 for equal rows and 1 for rows without a common key (Levin 2017, section 4.1). A
head's number is the mean over its queries. Layers and heads correspond by place, as one model began with the weights of
the other.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.data.split import Split
from vitlens.errors import InputError
from vitlens.lens.call import precise
from vitlens.lens.capture import capture_attention
from vitlens.models.model import Model
from vitlens.shapes import Weights

Moved = Float[Tensor, "images heads"]  # total variation, a fraction
_AT_ONCE = 16  # images whose weights are held at a time, of all models


def moved_share(before: Weights, after: Float[Tensor, "_ _ _ _"]) -> Float[Tensor, "batch heads"]:
    """The share of each head's attention that lies on other keys after than before, mean over queries, in [0, 1].

    before, after: weights (batch, heads, query, key), rows summing to 1. Raises InputError for other shapes.
    """
    if before.shape != after.shape:
        raise InputError(
            f"expected attention weights of one shape, found {tuple(before.shape)} and {tuple(after.shape)}; compare "
            "models of one architecture at one image size"
        )
    moved: Tensor = (precise(before) - precise(after)).abs().sum(-1).mean(-1) / 2
    return moved


def attention_moved(before: Model, after: Sequence[Model], images: Split) -> tuple[tuple[Moved, ...], ...]:
    """For each of the models after, by layer (images, heads): the share of attention that moved since `before`.

    Windows are averaged over. Raises InputError where the models' attention has other shapes.
    """
    size = min(fitting_batch_size(before), _AT_ONCE)
    parts: list[list[list[Tensor]]] = [[] for _ in after]
    for batch in images.batches(size, device=before.device):
        first = capture_attention(before, batch.images).layers
        for place, model in enumerate(after):
            second = capture_attention(model, batch.images).layers
            if len(first) != len(second):
                raise InputError(f"expected {len(first)} layers of attention, found {len(second)} in {model.alias}")
            count = len(batch.images)
            parts[place].append([_by_image(moved_share(*pair), count) for pair in zip(first, second)])
    return tuple(tuple(torch.cat(layer) for layer in zip(*batches)) for batches in parts)


def _by_image(values: Float[Tensor, "batch heads"], images: int) -> Moved:
    """The mean over the windows of each image."""
    moved: Tensor = values.unflatten(0, (images, -1)).mean(1).cpu()
    return moved
