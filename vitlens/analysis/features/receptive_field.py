"""The effective receptive field by depth (Luo 2016), by gradients of one patch."""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.devices import evaluating
from vitlens.lens.differentiable import needs_gradients
from vitlens.lens.stages import FeatureStage, stages, watching_stages
from vitlens.models.model import Model
from vitlens.shapes import Images, Tokens
from vitlens.summary import Summary
from vitlens.uncertainty import Estimate, student_mean

DRAWS: Final = 4  # random directions of the patch's features, for each image


@dataclass(frozen=True, repr=False)
class ReceptiveField(Summary):
    """The pixels on which the middle patch of one layer depends.

    layer: from 0.
    title: its name in reports.
    field: (height, width), the norm of the gradient of the patch at each pixel, mean over images,
        not scaled.
    distance: from the centre of the patch to a pixel, in px, mean over pixels weighted by the norm.
    uniform: the same for equal weights.
    half: the least share of the pixels that holds half of the sum of norms (0.5 if all are equal).
    seen: the share of the pixels with a gradient that is not exactly 0 in every image.
    distance and half: means over images with Student's 95 % interval.
    """

    layer: int
    title: str
    field: Float[Tensor, "height width"]
    distance: Estimate
    uniform: float
    half: Estimate
    seen: float


@needs_gradients
def receptive_field(
    model: Model, images: Images, *, groups: Tensor | None = None, draws: int = DRAWS, seed: int = 0
) -> tuple[ReceptiveField, ...]:
    """Return the effective receptive field of every block (of a CNN: stage).

    It is that of the patch in the middle of the map. The gradient is of v · features(patch) with
    respect to the pixels, for `draws` random directions v of unit variance. The root of the mean
    square over draws, summed over colours, is the norm of all gradients of the features of the
    patch at a pixel, up to the noise of few draws. groups (n,): of images that share a source.
    Raises UnsupportedError for a model without layers to read.
    """
    sources = None if groups is None else groups.cpu().numpy()
    generator = torch.Generator().manual_seed(seed)
    tokens = dict[FeatureStage, Tokens]()
    placed = [stage for stage in stages(model) if stage.grid is not None]
    pixels = images.detach().clone().requires_grad_()
    with evaluating(model), torch.enable_grad(), watching_stages(model, placed, tokens.__setitem__):
        model(pixels)
    height, width = pixels.shape[2:]  # of the images, which a model may resize
    fields = list[ReceptiveField]()
    for stage in placed:
        assert stage.grid is not None
        assert stage.index is not None  # not the embedding
        rows, columns = stage.grid
        middle = (rows // 2) * columns + columns // 2
        patch = tokens[stage][:, len(stage.prefix) + middle]  # (batch, width)
        norms = _gradient_norms(patch, pixels, draws, generator)
        down = (torch.arange(height) + 0.5 - (rows // 2 + 0.5) * height / rows)[:, None]
        across = torch.arange(width) + 0.5 - (columns // 2 + 0.5) * width / columns
        pixel_distances = (down.square() + across.square()).sqrt().double()
        weights = norms.double()
        totals = weights.sum((1, 2))
        distances = (weights * pixel_distances).sum((1, 2)) / totals
        cumulative = weights.flatten(1).sort(descending=True).values.cumsum(1)
        pixels_of_half = (cumulative < totals[:, None] / 2).sum(1).add(1)
        half = pixels_of_half.double() / pixel_distances.numel()
        fields.append(
            ReceptiveField(
                stage.index,
                stage.title,
                field=norms.mean(0),
                distance=student_mean(distances.numpy(), groups=sources, unit="px", least=0.0),
                uniform=float(pixel_distances.mean()),
                half=student_mean(half.numpy(), groups=sources, least=0.0, most=1.0),
                seen=float((norms > 0).any(0).double().mean()),
            )
        )
    return tuple(fields)


def _gradient_norms(
    patch: Float[Tensor, "batch dim"], pixels: Images, draws: int, generator: torch.Generator
) -> Float[Tensor, "batch height width"]:
    """Return the norm of the gradient of a patch at each pixel, from random directions."""
    square = torch.zeros_like(pixels[:, 0])
    for _ in range(draws):
        direction = torch.randn(patch.shape, generator=generator).to(patch)
        (gradient,) = torch.autograd.grad((direction * patch).sum(), pixels, retain_graph=True)
        square += gradient.square().sum(1) / draws
    return square.detach().sqrt().cpu()
