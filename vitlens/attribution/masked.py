"""Attributions by removing parts of the image: occlusion, RISE and KernelSHAP.

KernelSHAP over patches (Lundberg & Lee 2017): captum's KernelShap samples and solves image by
image; here all images share the same coalitions, sampled in pairs of complements (Covert & Lee
2021), so that one small system is solved for all of them. The values sum to F(image) - F(its mean
colour) exactly, by constraint.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.faithfulness.maps import removal_grid
from vitlens.analysis.faithfulness.removal import Variants
from vitlens.attribution.registry import COALITIONS, MASKS
from vitlens.devices import evaluating
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.names import DEFAULT_SEED
from vitlens.shapes import Images, Labels, Maps

Coalitions = Bool[Tensor, "coalitions players"]
_CELLS = 7  # along each side of a mask before it is enlarged, as in the paper
_VISIBLE = 0.5  # share of cells that stay visible


def occlusion(model: Model, images: Images, targets: Labels) -> Maps:
    """Return the fall of the target's logit when a patch takes the image's mean colour (Zeiler &
    Fergus 2014), (batch, rows, columns), signed.

    For a CNN the image is divided into patches as for a ViT. One forward per patch and image, and
    one for the image.
    """
    rows, columns = removal_grid(model)
    each = torch.eye(rows * columns, dtype=torch.bool)
    scores = scores_without(model, images, targets, torch.cat((torch.zeros_like(each[:1]), each)))
    falls: Tensor = (scores[:, :1] - scores[:, 1:]).unflatten(1, (rows, columns))
    return falls


def scores_without(
    model: Model, images: Images, targets: Labels, removed: Bool[Tensor, "variants patches"]
) -> Float[Tensor, "batch variants"]:
    """Return the target's logit of every image without each set of patches, which take the image's
    mean colour.
    """
    rows = torch.arange(len(images)).repeat_interleave(len(removed))
    logits = Variants(model, images, substrate="mean").logits(rows, removed.repeat(len(images), 1))
    classes = targets.to(logits.device).repeat_interleave(len(removed))
    scores: Tensor = logits.gather(1, classes[:, None]).view(len(images), len(removed))
    return scores


def rise(
    model: Model, images: Images, targets: Labels, *, masks: int = MASKS, seed: int = DEFAULT_SEED
) -> Maps:
    """Return the target's mean probability over the masks in which a pixel is visible, (batch,
    height, width), a fraction.

    Every image gets the same masks: 7 x 7 cells, each visible with probability one half, enlarged
    bilinearly and shifted at random; masked pixels take the model's mean colour, which its
    normalisation turns into 0. One forward per mask and image. Raises InputError for less than one
    mask.
    """
    if masks < 1:
        raise InputError(f"expected masks of at least 1, found {masks}")
    size = (int(images.shape[2]), int(images.shape[3]))
    at_once = max(1, fitting_batch_size(model) // len(images))
    generator = torch.Generator().manual_seed(seed)
    covered = images.new_zeros(size)
    total = images.new_zeros(len(images), *size)
    with evaluating(model), torch.no_grad():
        for start in range(0, masks, at_once):
            count = min(at_once, masks - start)
            visible = torch.stack([_mask(size, generator) for _ in range(count)]).to(images)
            masked = model.mean + visible[:, None, None] * (
                images - model.mean
            )  # masks, batch, 3, height, width
            probabilities = model(masked.flatten(0, 1)).float().softmax(-1)
            scores = probabilities.gather(1, targets.repeat(count)[:, None]).view(count, -1)
            total += torch.einsum("mb,mhw->bhw", scores.to(visible), visible)
            covered += visible.sum(0)
    # the paper divides by the expected share of visible pixels; the actual share leaves no pattern
    # of uneven masks
    return total / covered.clamp_min(torch.finfo(covered.dtype).tiny)


def _mask(size: tuple[int, int], generator: torch.Generator) -> Float[Tensor, "height width"]:
    """Return one soft mask, cropped at random from one that is a cell larger each way."""
    cell = [-(-side // _CELLS) for side in size]
    coarse = (torch.rand(1, 1, _CELLS, _CELLS, generator=generator) < _VISIBLE).float()
    larger = [(_CELLS + 1) * side for side in cell]
    fine = F.interpolate(coarse, size=larger, mode="bilinear", align_corners=False)[0, 0]
    top, left = (int(torch.randint(side, (1,), generator=generator)) for side in cell)
    return fine[top : top + size[0], left : left + size[1]]


def kernel_shap(
    model: Model,
    images: Images,
    targets: Labels,
    *,
    coalitions: int | None = None,
    seed: int = DEFAULT_SEED,
) -> Maps:
    """Estimated Shapley values of the patches for the target's logit: (batch, rows, columns),
    signed.

    coalitions: forwards per image (None: 512, or four per patch where that is more). Where there
    are no more coalitions than that, all are evaluated and the values are exact. Raises InputError
    for fewer than three per patch.
    """
    rows, columns = removal_grid(model)
    players = rows * columns
    count = coalitions or max(COALITIONS, 4 * players)
    if players < 2:
        raise InputError("expected at least two patches to share the logit between, found one")
    exact = 2**players - 2 <= count
    if not exact and count < 3 * players:  # pairs of complements: the system needs two per patch
        raise InputError(
            f"expected at least {3 * players} coalitions of {players} patches, found {count}"
        )
    chosen, weights = (
        _all_coalitions(players) if exact else _sampled_coalitions(players, count, seed)
    )
    ends = torch.tensor([[False], [True]]).expand(2, players)
    scores = scores_without(model, images, targets, ~torch.cat((ends, chosen))).double().cpu()
    # the coalitions of no patch, all, and some
    empty = scores[:, 0]
    full = scores[:, 1]
    sampled = scores[:, 2:]
    values = shapley_values(chosen, weights, sampled - empty[:, None], full - empty)
    return values.float().view(-1, rows, columns).to(images.device)


def shapley_values(
    chosen: Coalitions,
    weights: Float[Tensor, " coalitions"],
    gains: Float[Tensor, "batch coalitions"],
    whole: Float[Tensor, " batch"],
) -> Float[Tensor, "batch players"]:
    """Return the weighted least-squares solution whose sum is constrained to `whole` (Covert & Lee
    2021, eq. 7).

    chosen: the players of each coalition; gains: of each coalition over the empty one; whole: of
    all players over it.
    """
    design = chosen.double()
    weighted = design * weights[:, None]
    inverse = torch.linalg.inv(design.T @ weighted)
    unconstrained = gains @ weighted @ inverse  # (batch, players)
    ones = inverse.sum(0)
    values: Tensor = unconstrained + (whole - unconstrained.sum(1))[:, None] * ones / ones.sum()
    return values


def _all_coalitions(players: int) -> tuple[Coalitions, Float[Tensor, " coalitions"]]:
    """Return all coalitions except the empty and the full one, with the Shapley kernel's
    weights."""
    numbers = torch.arange(1, 2**players - 1)
    chosen = (numbers[:, None] >> torch.arange(players)) % 2 == 1
    size = chosen.sum(1).double()
    ways = (
        torch.lgamma(torch.tensor(players + 1.0))
        - torch.lgamma(size + 1)
        - torch.lgamma(players - size + 1)
    ).exp()
    return chosen, (players - 1) / (ways * size * (players - size))


def _sampled_coalitions(
    players: int, count: int, seed: int
) -> tuple[Coalitions, Float[Tensor, " coalitions"]]:
    """Coalitions sampled with the Shapley kernel's weights, and their complements."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.arange(1, players).double()
    sizes = (
        torch.multinomial(
            1 / (size * (players - size)), count // 2, replacement=True, generator=generator
        )
        + 1
    )
    ranks = torch.rand(count // 2, players, generator=generator).argsort(1).argsort(1)
    half = ranks < sizes[:, None]
    return torch.cat((half, ~half)), torch.ones(2 * (count // 2), dtype=torch.float64)
