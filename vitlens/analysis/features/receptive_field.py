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

DRAWS: Final = 4  # random directions of the patch's features for each image


@dataclass(frozen=True, repr=False)
class ReceptiveField(Summary):
    """The pixels on which the middle patch of one layer depends.

    A pixel's gradient norm is the norm of the gradient of the patch's features at this pixel.
    Estimates are means over images with Student's 95 % interval.

    layer: the index of the layer, from 0.
    title: the name of the layer in reports.
    field (height, width): the gradient norm of each pixel, mean over images, not scaled.
    distance: the mean distance of pixels from the centre of the patch, weighted by gradient norms,
        in px.
    uniform: the same mean with equal weights.
    half: the smallest share of the pixels that has half of the sum of gradient norms (0.5 if all
        norms are equal).
    seen: the share of the pixels whose gradient norm is above 0 in at least one image.
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

    It is that of the patch in the middle of the map. For random directions v of unit variance, the
    gradient of v · features(patch) with respect to the pixels is computed. Its squares are averaged
    over directions and summed over colours. The root is the norm of the gradients of all features
    of the patch at a pixel, up to the noise of few directions.

    groups (n,): the source of each image.
    draws: the number of random directions.
    seed: the seed of the directions.

    Raises UnsupportedError for a model without layers to read.
    """
    sources = None if groups is None else groups.cpu().numpy()
    generator = torch.Generator().manual_seed(seed)
    tokens = dict[FeatureStage, Tokens]()
    placed = [stage for stage in stages(model) if stage.grid is not None]
    pixels = images.detach().clone().requires_grad_()

    def keep(stage: FeatureStage, stage_tokens: Tokens) -> None:
        """Keep the tokens of a stage; called after each stage."""
        tokens[stage] = stage_tokens

    with evaluating(model), torch.enable_grad(), watching_stages(model, placed, keep):
        model(pixels)
    fields = list[ReceptiveField]()
    for stage in placed:
        assert stage.grid is not None
        assert stage.index is not None  # it is not the embedding
        rows, columns = stage.grid
        middle = (rows // 2) * columns + columns // 2
        patch = tokens[stage][:, len(stage.prefix) + middle]  # as (batch, dim)
        norms = _gradient_norms(patch, pixels, draws, generator)
        # pixels of the images as they were given, which the model may resize
        pixel_distances = _distances_from_middle(stage.grid, tuple(pixels.shape[2:]))
        weights = norms.double()
        totals = weights.sum((1, 2))
        distances = (weights * pixel_distances).sum((1, 2)) / totals
        half = _share_with_half(weights.flatten(1))
        fields.append(
            ReceptiveField(
                layer=stage.index,
                title=stage.title,
                field=norms.mean(0),
                distance=student_mean(distances.numpy(), groups=sources, unit="px", least=0.0),
                uniform=float(pixel_distances.mean()),
                half=student_mean(half.numpy(), groups=sources, least=0.0, most=1.0),
                seen=float((norms > 0).any(0).double().mean()),
            )
        )
    return tuple(fields)


def _distances_from_middle(
    grid: tuple[int, int], size: tuple[int, ...]
) -> Float[Tensor, "height width"]:
    """Return the distance of each pixel's centre from the centre of the middle patch, in px.

    grid: the rows and columns of patches.
    size: the height and width of the image.
    """
    rows, columns = grid
    height, width = size
    # pixel or patch n reaches from n to n + 1, so its centre is at n + 0.5
    centre_down = (rows // 2 + 0.5) * height / rows
    centre_across = (columns // 2 + 0.5) * width / columns
    down = torch.arange(height) + 0.5 - centre_down
    across = torch.arange(width) + 0.5 - centre_across
    return (down[:, None].square() + across.square()).sqrt().double()


def _share_with_half(weights: Float[Tensor, "batch pixels"]) -> Float[Tensor, " batch"]:
    """Return the smallest share of the pixels that has half of an image's sum of weights."""
    totals = weights.sum(1)
    cumulative = weights.sort(descending=True).values.cumsum(1)
    count = (cumulative < totals[:, None] / 2).sum(1) + 1  # the pixel that reaches half counts
    return count.double() / weights.shape[1]


def _gradient_norms(
    patch: Float[Tensor, "batch dim"], pixels: Images, draws: int, generator: torch.Generator
) -> Float[Tensor, "batch height width"]:
    """Return the norm of the gradient of a patch's features at each pixel.

    It is estimated from gradients in `draws` random directions.
    """
    square = torch.zeros_like(pixels[:, 0])
    for _ in range(draws):
        direction = torch.randn(patch.shape, generator=generator).to(patch)
        (gradient,) = torch.autograd.grad((direction * patch).sum(), pixels, retain_graph=True)
        square += gradient.square().sum(1) / draws
    return square.detach().sqrt().cpu()
