"""The effective receptive field by depth (Luo 2016): how strongly each pixel moves one patch, by gradients."""

from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.devices import evaluating
from vitlens.errors import InputError
from vitlens.lens.stages import FeatureStage, stages
from vitlens.models.hooks import Arguments, watching
from vitlens.models.model import Model
from vitlens.shapes import Images
from vitlens.summary import Summary
from vitlens.uncertainty import Estimate, student_mean

DRAWS: Final = 4  # random directions of the patch's features, for each image


@dataclass(frozen=True, repr=False)
class ReceptiveField(Summary):
    """What the middle patch of one layer depends on.

    layer: from 0; title: its name in reports; field: (height, width), the norm of the patch's gradient at each pixel,
    mean over images, not scaled; distance: from the patch's centre to a pixel, in px, mean over pixels weighted by the
    norm; uniform: the same for equal weights; half: the least share of the pixels that holds half of the sum of norms
    (0.5 if all are equal); seen: the share of the pixels whose gradient is not exactly 0 in any image. distance and
    half: means over images with Student's 95 % interval.
    """

    layer: int
    title: str
    field: Float[Tensor, "height width"]
    distance: Estimate
    uniform: float
    half: Estimate
    seen: float


def receptive_field(model: Model, images: Images, *, draws: int = DRAWS, seed: int = 0) -> tuple[ReceptiveField, ...]:
    """The effective receptive field of every block (of a CNN: stage), measured at the patch in the middle of its map.

    The gradient of v · features(patch) with respect to the pixels, for `draws` random directions v of unit variance:
    the root of the mean square over draws, summed over colours, is the norm of all gradients of the patch's features at
    a pixel, up to the noise of few draws. Raises InputError for no draws, UnsupportedError for layers whose patches
    have no place in the image.
    """
    if draws < 1:
        raise InputError(f"expected draws of at least 1, found {draws}")
    placed = [stage for stage in stages(model) if stage.grid is not None]
    squares = _squared_gradients(model, images, placed, draws=draws, seed=seed)
    return tuple(_field(stage, square.sqrt().cpu()) for stage, square in zip(placed, squares))


def _squared_gradients(
    model: Model, images: Images, placed: list[FeatureStage], *, draws: int, seed: int
) -> list[Float[Tensor, "batch height width"]]:
    """By layer, the square of the gradient at each pixel, mean over draws, summed over colours."""
    outputs: dict[str, Tensor] = {}

    def after(name: str, _arguments: Arguments, output: Any) -> None:
        outputs[name] = output[0] if isinstance(output, tuple) else output

    pixels = images.detach().clone().requires_grad_()
    with evaluating(model), torch.enable_grad(), watching(model.module, [stage.module for stage in placed], after):
        model(pixels)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for stage in placed:
        assert stage.grid is not None
        middle = (stage.grid[0] // 2) * stage.grid[1] + stage.grid[1] // 2
        patch = stage.tokens(outputs[stage.module])[:, len(stage.prefix) + middle]  # (batch, width)
        square = torch.zeros_like(pixels[:, 0])
        for _ in range(draws):
            direction = torch.randn(patch.shape, generator=generator).to(patch)
            (gradient,) = torch.autograd.grad((direction * patch).sum(), pixels, retain_graph=True)
            square += gradient.square().sum(1) / draws
        found.append(square.detach())
    return found


def _field(stage: FeatureStage, norms: Float[Tensor, "batch height width"]) -> ReceptiveField:
    assert stage.grid is not None
    assert stage.index is not None  # not the embedding
    (rows, columns), (_, height, width) = stage.grid, norms.shape  # of the images as given, which a model may resize
    centre = (rows // 2 + 0.5) * height / rows, (columns // 2 + 0.5) * width / columns
    down = (torch.arange(height) + 0.5 - centre[0])[:, None]
    across = torch.arange(width) + 0.5 - centre[1]
    apart = (down.square() + across.square()).sqrt().double()
    weights = norms.double()
    totals = weights.sum((1, 2))
    distances = (weights * apart).sum((1, 2)) / totals
    held = weights.flatten(1).sort(descending=True).values.cumsum(1)
    half = (held < totals[:, None] / 2).sum(1).add(1).double() / apart.numel()
    return ReceptiveField(
        stage.index,
        stage.title,
        norms.mean(0),
        student_mean(distances.numpy(), unit="px", least=0.0),
        float(apart.mean()),
        student_mean(half.numpy(), least=0.0),
        float((norms > 0).any(0).double().mean()),
    )
